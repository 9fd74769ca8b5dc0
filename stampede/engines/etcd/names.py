"""Keys of locks and of values, and what stands in those of a lock."""

from __future__ import annotations

import json
import time
from math import inf
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from stampede.engines.etcd.gateway import b64, unb64
from stampede.engines.etcd.watches import Span
from stampede.engines.kit.whereabouts import here

__all__ = ["EtcdNames", "QueuedKey", "place_of", "value_of"]


class EtcdNames:
    """The keys of one engine. A lock's places are keys below its name, which `etcdctl get --prefix` shows."""

    def __init__(self, prefix: str) -> None:
        self.locks = f"{prefix}lock/".encode()
        self.cells = f"{prefix}cell/".encode()

    def queue(self, name: str) -> Span:
        """From the first place of a lock to behind the last."""
        below = self.locks + _quoted(name)
        return below + b"/", below + b"0"

    def place(self, name: str, token: bytes) -> bytes:
        return self.queue(name)[0] + token.hex().encode()

    def below(self, prefix: str) -> Span:
        """All places of all locks whose names begin with this."""
        start = self.locks + _quoted(prefix)
        return start, start[:-1] + bytes([start[-1] + 1])

    def name_of(self, key: bytes) -> str:
        quoted = key[len(self.locks) :].rpartition(b"/")[0]
        return unquote(quoted.decode("ascii", "replace"), errors="surrogatepass")


class QueuedKey(NamedTuple):
    """A token that has the lock, or waits for it."""

    key: bytes
    token: bytes
    number: int  # the revision that has made it
    changed: int  # the one that has changed it last
    lease: int
    room: float
    seconds: float  # the lease that was asked for
    holder: str
    since: float


def place_of(told: dict[str, Any]) -> QueuedKey:
    """What others have written there may be anything: then it is a lock's holder like any other."""
    key = unb64(told["key"])
    try:
        token = bytes.fromhex(key.rpartition(b"/")[2].decode("ascii", "replace"))
    except ValueError:
        token = key.rpartition(b"/")[2]
    try:
        body = json.loads(unb64(told.get("value", "")))
        room, seconds = body["room"], float(body["lease"])
        its = inf if room is None else float(room), seconds, str(body["holder"]), float(body["since"])
    except (ValueError, TypeError, KeyError):
        its = 1.0, 1.0, "", 0.0
    made, changed, lease = (int(told.get(name, 0)) for name in ("create_revision", "mod_revision", "lease"))
    return QueuedKey(key, token, made, changed, lease, *its)


def value_of(room: float, lease: float) -> str:
    body = {"holder": here(), "room": None if room == inf else room, "lease": lease, "since": round(time.time(), 3)}
    return b64(json.dumps(body).encode())


def _quoted(name: str) -> bytes:
    return quote(name, safe="", errors="surrogatepass").encode()
