"""The keys of locks and of values, and the content of a lock's keys."""

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
    """The keys of one engine. The places of a lock are keys below its name, which `etcdctl get --prefix` shows."""

    def __init__(self, prefix: str) -> None:
        self.locks = f"{prefix}lock/".encode()
        self.cells = f"{prefix}cell/".encode()

    def queue(self, name: str) -> Span:
        """Return the range of all places of a lock."""
        below = self.locks + _quoted(name)
        return below + b"/", below + b"0"

    def place(self, name: str, token: bytes) -> bytes:
        return self.queue(name)[0] + token.hex().encode()

    def below(self, prefix: str) -> Span:
        """Return the range of all places of the locks whose names begin with this."""
        start = self.locks + _quoted(prefix)
        return start, start[:-1] + bytes([start[-1] + 1])

    def name_of(self, key: bytes) -> str:
        quoted = key[len(self.locks) :].rpartition(b"/")[0]
        return unquote(quoted.decode("ascii", "replace"), errors="surrogatepass")


class QueuedKey(NamedTuple):
    """A place in a lock's queue: a token that has the lock or waits for it."""

    key: bytes
    token: bytes
    number: int  # the revision that created it
    changed: int  # the revision that changed it last
    lease: int
    room: float
    seconds: float  # the lease that was asked for
    holder: str
    since: float


def place_of(kv: dict[str, Any]) -> QueuedKey:
    """Return the place that a key and its value mean. If another program has written them, they count as the place of
    an exclusive lock."""
    key = unb64(kv["key"])
    try:
        token = bytes.fromhex(key.rpartition(b"/")[2].decode("ascii", "replace"))
    except ValueError:
        token = key.rpartition(b"/")[2]
    try:
        body = json.loads(unb64(kv.get("value", "")))
        room, seconds = body["room"], float(body["lease"])
        content = inf if room is None else float(room), seconds, str(body["holder"]), float(body["since"])
    except (ValueError, TypeError, KeyError):
        content = 1.0, 1.0, "", 0.0
    created, changed, lease = (int(kv.get(name, 0)) for name in ("create_revision", "mod_revision", "lease"))
    return QueuedKey(key, token, created, changed, lease, *content)


def value_of(room: float, lease: float) -> str:
    body = {"holder": here(), "room": None if room == inf else room, "lease": lease, "since": round(time.time(), 3)}
    return b64(json.dumps(body).encode())


def _quoted(name: str) -> bytes:
    return quote(name, safe="", errors="surrogatepass").encode()
