"""Small values: keys that are swapped if they still have the revision that was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stampede.engines.cells import Faster, Seen, Version, WatchingCell
from stampede.engines.etcd.gateway import Gateway, Gone, b64, unb64
from stampede.engines.etcd.leases import Leases
from stampede.engines.etcd.names import EtcdNames
from stampede.engines.etcd.watches import Watches

__all__ = ["EtcdCell"]

MOST = 1 << 20
"""The largest value in bytes: the server refuses requests of 1.5 MiB."""


class EtcdCell(WatchingCell):
    """The keys of one cluster. They expire with leases, each of which many keys share."""

    ends = grows = tells = True
    longest = MOST
    at_once = 100

    def __init__(self, gateway: Gateway, leases: Leases, watches: Watches, names: EtcdNames) -> None:
        self._gateway, self._leases, self._watches, self._names = gateway, leases, watches, names

    def read(self, names: Sequence[str]) -> list[Seen]:
        asked = [{"request_range": {"key": self._key(name)}} for name in names]
        reply = self._gateway.ask("/v3/kv/txn", {"success": asked})
        return [_seen(each) for each in reply["responses"]]

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        key = self._key(name)
        lease = 0 if data is None else self._leases.end_after(ttl)
        change: dict[str, Any] = {"request_delete_range": {"key": key}}
        if data is not None:
            change = {"request_put": {"key": key, "value": b64(data), "lease": str(lease)}}
        terms = {
            "compare": [{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(version or 0)}],
            "success": [change],
            "failure": [{"request_range": {"key": key}}],
        }
        try:
            reply = self._gateway.ask("/v3/kv/txn", terms, twice=False)
        except Gone:  # the lease was revoked, or it ended while we were frozen. Faster: the caller tries again
            self._leases.forget(lease)
            return Faster()
        if reply.get("succeeded"):
            return None if data is None else int(reply["header"]["revision"])
        return Faster(_seen(reply["responses"][0]))

    def watch(self, name: str, notify: Callable[[], object]) -> Callable[[], object]:
        watch = self._watches.watch((self._names.cells + name.encode(), b""), lambda _: notify())
        return (lambda: None) if watch is None else watch.close

    def _key(self, name: str) -> str:
        return b64(self._names.cells + name.encode())


def _seen(reply: dict[str, Any]) -> Seen:
    kvs = reply["response_range"].get("kvs")
    return Seen(unb64(kvs[0].get("value", "")), int(kvs[0]["mod_revision"])) if kvs else Seen(None)
