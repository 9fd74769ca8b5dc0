"""Small values: keys that are swapped while they have the revision that was seen."""

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
"""Bytes of a value; the server refuses requests of 1.5 MiB."""


class EtcdCell(WatchingCell):
    """Keys of one cluster. They end with leases that many of them share."""

    ends = grows = tells = True
    longest = MOST
    at_once = 100

    def __init__(self, gateway: Gateway, leases: Leases, watches: Watches, names: EtcdNames) -> None:
        self._gateway, self._leases, self._watches, self._names = gateway, leases, watches, names

    def read(self, names: Sequence[str]) -> list[Seen]:
        asked = [{"request_range": {"key": self._key(name)}} for name in names]
        told = self._gateway.ask("/v3/kv/txn", {"success": asked})
        return [_seen(each) for each in told["responses"]]

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
            told = self._gateway.ask("/v3/kv/txn", terms, twice=False)
        except Gone:  # the lease: somebody has revoked it, or we were frozen between. Then it is tried again
            self._leases.forget(lease)
            return Faster()
        if told.get("succeeded"):
            return None if data is None else int(told["header"]["revision"])
        return Faster(_seen(told["responses"][0]))

    def watch(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
        its = self._watches.watch((self._names.cells + name.encode(), b""), lambda _: told())
        return (lambda: None) if its is None else its.close

    def _key(self, name: str) -> str:
        return b64(self._names.cells + name.encode())


def _seen(told: dict[str, Any]) -> Seen:
    kvs = told["response_range"].get("kvs")
    return Seen(unb64(kvs[0].get("value", "")), int(kvs[0]["mod_revision"])) if kvs else Seen(None)
