"""dogpile's backends as our store, for the stores that we have no engine for; the locks are another engine's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dogpile.cache.api import CacheBackend
from dogpile.cache.backends import _backend_loader
from dogpile.cache.util import PluginLoader

from stampede.engines.cells import Cell, CellEngine, Faster, Seen, Version
from stampede.errors import OptionError
from stampede.ports import Side

__all__ = ["DogpileEngine"]

_VERSION = 8
"""Bytes before the data: random ones, which tell one writing of a name from all others."""


class _BackendCell(Cell):
    """Names in a backend, which can not compare and set: a swap is two steps, and others may write in between."""

    tells = True

    def __init__(self, backend: CacheBackend) -> None:
        self._backend = backend

    def read(self, names: Sequence[str]) -> list[Seen]:
        found = self._backend.get_serialized_multi([_named(name) for name in names])
        return [_seen(each) for each in found]

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        (seen,) = self.read([name])
        if seen.version != version:
            return Faster(seen)
        if data is None:
            self._backend.delete(_named(name))
            return None
        new = os.urandom(_VERSION)
        self._backend.set_serialized(_named(name), new + data)
        return new


def _named(name: str) -> str:
    return f"stampede-{name}"


def _seen(found: Any) -> Seen:
    if not isinstance(found, (bytes, bytearray)) or len(found) < _VERSION:
        return Seen(None)  # nothing, or nothing of ours
    return Seen(bytes(found[_VERSION:]), bytes(found[:_VERSION]))


class DogpileEngine(CellEngine):
    """A backend of dogpile's, or of anybody's for dogpile, as the store of a pair:
    `Cache(engine=DogpileEngine("dogpile.cache.dbm", {"filename": "/var/cache/shop.dbm"}), locks="file://")`.

    `backend` is one that is there (`region.backend`, also behind proxies), or its name, with its `arguments`.
    Such a store can't compare and set: promises 4 and 5 (an invalidation wins, a late fill is refused) hold by the
    locks alone, and not where they end before the computation does. The clocks of machines that share it should agree,
    as they should for dogpile itself. Nothing goes away by itself: let the backend's own expiry be longer than any
    `ttl` and `stale` together.

    >>> from stampede.contrib.dogpile import DogpileEngine
    >>> cache = Cache(engine=DogpileEngine("dogpile.cache.memory"), locks="file://")
    >>> cache.get_or_compute("answer", lambda: 42)
    42
    """

    fenced = False

    def __init__(self, backend: CacheBackend | str, arguments: Mapping[str, Any] | None = None) -> None:
        if isinstance(backend, str):
            try:
                loader: Any = _backend_loader  # which has no types
                kind = loader.load(backend)
            except PluginLoader.NotFound as missing:
                raise OptionError(f"dogpile has no backend {backend!r}") from missing
            backend = kind(dict(arguments or {}))
        elif arguments is not None:
            raise OptionError("arguments go with the name of a backend: this one has its own already")
        if not isinstance(backend, CacheBackend):
            raise OptionError(f"backend is {backend!r}: give a backend of dogpile's, or its name")
        super().__init__(_BackendCell(backend), "dogpile")
        # Leases and locks need a swap that is one step.
        self.blocking, self.suspending = Side(store=self.blocking.store), Side(store=self.suspending.store)
        self.looks, self.many = False, None
