"""dogpile's backends as our store, for the stores that we have no engine for; the locks are another engine's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from struct import Struct, error
from typing import Any, TypeVar

from dogpile.cache.api import CacheBackend
from dogpile.cache.backends import _backend_loader
from dogpile.cache.util import PluginLoader

from stampede.colour import run_blocking
from stampede.engines.kit.errands import Errands, Run, here
from stampede.entry import Entry, new_id
from stampede.errors import EngineClosed, EngineError, OptionError
from stampede.ports import Engine, Side, Store

__all__ = ["DogpileEngine"]

T = TypeVar("T")

_HEAD = Struct(">2sB8sddddd")
"""Magic, flags, id, cost, margin, ttl, and the ends of fresh and keep: by the wall clock, as backends have no other."""

_MAGIC, _RAISED = b"SD", 1


class DogpileEngine(Engine):
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

    scheme = "dogpile"
    shared = True
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
        self.backend = backend
        self._stores = store, astore = _Store(backend, here), _Store(backend, Errands().run)
        self.blocking, self.suspending = Side(store=store), Side(store=astore)

    def ping(self) -> float:
        start = time.perf_counter()
        run_blocking(self._stores[0].found([_name("ping")]))
        return time.perf_counter() - start

    def close(self) -> None:
        """Ours; the backend is its owner's, and dogpile's have no such verb."""
        for store in self._stores:
            store.closed = True


class _Store(Store):
    """The store of one colour. It is not `Versioned`, since its `replace` is two steps."""

    closed = False

    def __init__(self, backend: CacheBackend, run: Run) -> None:
        self._backend = backend
        self._run = run

    async def _asked(self, ask: Callable[..., T], *args: Any) -> T:
        """Ask the backend. Whatever it raises is an EngineError."""
        if self.closed:
            raise EngineClosed("dogpile")
        try:
            return await self._run(ask, *args)
        except EngineError:
            raise
        except Exception as trouble:  # of anybody's backend, which may raise anything
            kind = type(self._backend).__name__
            raise EngineError(f"{kind} can't be asked: {type(trouble).__name__}: {trouble}") from trouble

    async def found(self, names: Sequence[str]) -> list[bytes | None]:
        found = await self._asked(self._backend.get_serialized_multi, names) if names else []
        return [bytes(each) if isinstance(each, (bytes, bytearray)) else None for each in found]

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        now = time.time()
        return [_entry(found, now) for found in await self.found([_name("k", key) for key in keys])]

    async def set(self, key: str, entry: Entry[Any]) -> None:
        await self._put(_name("k", key), _packed(entry, time.time()))

    async def _put(self, name: str, value: bytes) -> None:
        await self._asked(self._backend.set_serialized, name, value)

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        """By get and set, as a backend has no such verb. In between, others may set."""
        (kept,) = await self.get([key])
        if (None if kept is None else kept.id) != seen:
            return False
        await self.set(key, entry)
        return True

    async def expire(self, key: str) -> bool:
        (kept,) = await self.get([key])
        if kept is None or kept.fresh <= 0:
            return False
        kept.id, kept.fresh = new_id(), 0.0
        await self.set(key, kept)
        return True

    async def invalidate(self, key: str) -> bool:
        (kept,) = await self.get([key])
        await self._asked(self._backend.delete, _name("k", key))
        return kept is not None

    # Asked for each time: a process that believed in one for a while would have to be told of the next.
    async def generation(self, scope: str) -> str:
        names = [_name("g"), _name("g", scope)] if scope else [_name("g")]
        found = await self.found(names)
        for name, value in zip(names, found, strict=True):
            if value is None:
                await self._put(name, _random())
        if None in found:  # again: of two that make one at the same time the later is it
            found = await self.found(names)
        return ".".join((value or _random()).decode("latin-1") for value in found)

    async def generations(self, scope: str) -> Sequence[str]:
        return [await self.generation(scope)]

    async def bump(self, scope: str) -> None:
        await self._put(_name("g", scope) if scope else _name("g"), _random())


def _name(kind: str, key: str = "") -> str:
    """A name that any store takes, however long the key is and whatever it holds."""
    return f"stampede-{kind}-{blake2b(key.encode('utf-8', 'surrogatepass'), digest_size=20).hexdigest()}"


def _random() -> bytes:
    return os.urandom(8).hex().encode()


def _packed(entry: Entry[Any], now: float) -> bytes:
    ends = now + entry.fresh, now + entry.keep
    flags = _RAISED if entry.raised else 0
    value: bytes = entry.value
    return _HEAD.pack(_MAGIC, flags, entry.id, entry.cost, entry.margin, entry.ttl, *ends) + value


def _entry(found: bytes | None, now: float) -> Entry[Any] | None:
    """What is kept; nothing, if it has ended or is none of ours."""
    try:
        magic, flags, id, cost, margin, ttl, fresh, keep = _HEAD.unpack_from(found or b"")
    except error:
        return None
    if found is None or magic != _MAGIC or not keep > now:
        return None
    return Entry(found[_HEAD.size :], id, cost, margin, ttl, fresh - now, keep - now, bool(flags & _RAISED))
