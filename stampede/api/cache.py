"""The cache: an engine behind a local tier, with blocking verbs, and an async `a`-twin of each that does I/O."""

from __future__ import annotations

import importlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, Unpack, cast, overload

from stampede import events
from stampede.algorithm.batch import value_of_each
from stampede.algorithm.context import Context, EachContext, Inside
from stampede.algorithm.core import Core
from stampede.algorithm.loaders import BatchFunction
from stampede.algorithm.scope import Scope, ScopeSide
from stampede.algorithm.stored import STAY
from stampede.api.decorator import decorate
from stampede.api.duplicate_names import DuplicateNames
from stampede.api.overrides import Block, bypassed, current_block, overrides, refreshing
from stampede.api.status import Status, status
from stampede.api.typing import (
    BulkheadOptions,
    CacheOptions,
    FunctionOptions,
    Hook,
    LimitOptions,
    LockOptions,
    OnError,
    Origins,
    PolicyOptions,
)
from stampede.api.typing_many import CachedHere, ManyOptions
from stampede.codecs import make_codec
from stampede.engines import engine_of, open_engine, safe_url
from stampede.engines.kit.worker_threads import WorkerThreads
from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired
from stampede.errors import EngineError, KeyingError, OptionError
from stampede.keys import in_namespace, quoted
from stampede.leases.keeper import keeper
from stampede.limits import origins as caps
from stampede.limits.limiter import Limiter
from stampede.local_tier.residents import Resident, Residents
from stampede.local_tier.tier import LocalTier
from stampede.locks.bulkhead import Bulkhead
from stampede.locks.lock import Lock
from stampede.metrics import Counters, Observers, Stats, log_events, watch
from stampede.model.entry import Entry
from stampede.model.ports import Engine
from stampede.model.result import value_of
from stampede.outages.outage import Outage
from stampede.runtime.colour import BLOCKING, SUSPENDING, after_commit, called, run_blocking, running_loop
from stampede.runtime.signatures import showing, with_twins
from stampede.runtime.threads import begun
from stampede.settings import CacheSettings, cache_settings, from_mapping
from stampede.settings.options import DEFAULT, OPTIONS, Policy, Seconds, checked_tags

__all__ = ["Cache"]

_log = logging.getLogger("stampede")

CLOSING = 1.0
"""Seconds for which `close` waits until the leases are given back. Later ones expire by themselves."""

P = ParamSpec("P")
T = TypeVar("T")


@with_twins
class Cache:
    """Values by key. Concurrent callers share one computation: `cache.get_or_compute("k", fn, ttl=60)`.

    `url` names the engine, or is a client object such as redis-py's; `engine` is an engine that exists already. The
    other arguments are those of a `[caches.NAME]` table in a settings file.

    >>> cache = Cache(ttl="10m", stale="1h")  # or Cache("redis://localhost"), Cache("disk:///var/cache/shop") ...
    >>> cache.get_or_compute("answer", lambda: 42)
    42
    """

    @showing(CacheOptions)
    def __init__(
        self,
        url: str | object = "memory://",
        *,
        engine: Engine | None = None,
        locks: str | Engine | None = None,
        observers: Iterable[events.Observer] = (),
        origins: Origins | None = None,
        **options: Unpack[CacheOptions],
    ) -> None:
        if not isinstance(url, str):
            url, engine = "memory://", engine_of(url)
        table: dict[str, Any] = {"url": url, **options}
        if isinstance(locks, str):
            table["locks"] = locks
        settings = cache_settings(table, "Cache():")
        settings = replace(settings, origins=from_mapping({"origins": origins or {}}, "Cache()").origins)
        self._set_up(settings, engine, None if isinstance(locks, str) else locks, tuple(observers))

    @classmethod
    def of(
        cls,
        settings: CacheSettings,
        engine: Engine | None = None,
        observers: Iterable[events.Observer] = (),
    ) -> Cache:
        """Return the cache that `settings` describe; on `engine` instead of their own, if one is given."""
        cache = cls.__new__(cls)
        cache._set_up(settings, engine, None, tuple(observers))
        return cache

    def _set_up(
        self,
        settings: CacheSettings,
        engine: Engine | None,
        locks: Engine | None,
        observers: tuple[events.Observer, ...],
    ) -> None:
        self.settings = settings
        self.policy = settings.policy
        self.namespace = settings.namespace
        self.name = safe_url(settings.url) if engine is None else engine.url or engine.scheme
        self.label = settings.name or self.name  # in metrics
        self.counters = Counters(self.label)
        logs = partial(log_events, cache=settings.name or f"{self.name} {self.namespace}", named=bool(settings.name))
        self.observers = Observers([self.counters, logs, *observers])
        self.engine = engine or open_engine(settings.url)
        if isinstance(self.engine, MemoryEngine) and settings.codec == "sealed" and self.engine.codec is not None:
            self.settings = replace(settings, codec=self.engine.codec)
        if settings.locks is not None:
            locks = open_engine(settings.locks)
        if locks is not None:
            self.engine = Paired(self.engine, locks)
        self.counters.all_are_heard = len(self.observers) > 2  # there are more than the counters and the log
        self._core = Core(
            self.engine,
            self._make_local_tier(settings),
            self._outage(settings),
            partial(self.counters.note, self.observers.emit),
            caps.Origins(settings.origins, self.engine),
            later=settings.on_error == "later",
        )
        self.trusted = tuple(_imported(name) for name in settings.trust)  # classes and modules
        root = self.scope(quoted(self.namespace), self.policy)
        self._root, self._aroot = root.side(BLOCKING), root.side(SUSPENDING)
        self._root_prefix = in_namespace(self.namespace, "")
        self.duplicate_names = DuplicateNames()
        self._worker_threads = WorkerThreads(2)  # for `aping` and `aclose`
        watch(self)

    def _make_local_tier(self, settings: CacheSettings) -> LocalTier:
        """Return the memory engine's own tier, or the tier in front of a shared engine, if the settings ask for one."""
        if not self.engine.shared:
            return LocalTier(self.engine.tier, shared=False)
        if not settings.local:
            return LocalTier(None, shared=True)
        self.engine.follow()
        ttl, engine = settings.local.ttl, self.engine

        def believed() -> float | None:
            return ttl or (None if engine.coherent else 1.0)

        return LocalTier(Residents(settings.local.entries), shared=True, believed=believed)

    def _outage(self, settings: CacheSettings) -> Outage | None:
        if not self.engine.shared:
            return None
        strict = settings.on_engine_error == "raise"
        called = f"{self.name} (cache {settings.name!r})" if settings.name else self.name

        def give_back(key: str, token: bytes) -> None:
            claims = self.engine.blocking.claims
            assert claims is not None
            keeper.give_back(claims, key, token, claims.abandon)

        return Outage(called, MemoryEngine(), self.observers.emit, give_back, strict=strict)

    def scope(
        self, name: str, policy: Policy, returns: Any = None, *, called: str | None = None, **codec: Any
    ) -> Scope:
        """Return one function's part of this cache. Its values are encoded for its return annotation."""
        settings = self.settings
        coder = make_codec(
            codec.get("codec", settings.codec),
            returns=returns,
            trust=(*self.trusted, *map(_imported, codec.get("trust", ()))),
            signing_key=codec.get("signing_key", settings.signing_key) or None,
            compress=codec.get("compress", settings.compress),
            max_bytes=codec.get("max_bytes", settings.max_bytes),
        )
        return Scope(self._core, self.namespace, name, policy, coder, called)

    # -- one key --------------------------------------------------------------------------------------------------

    @showing(PolicyOptions)
    def get_or_compute(self, key: str, function: Callable[[], T], **options: Unpack[PolicyOptions]) -> T:
        """Return the key's value. If it is missing, one caller computes it with `function`, and the others wait for it.

        >>> cache.get_or_compute("greeting", lambda: "hello", ttl=60)
        'hello'
        """
        found = None if overrides.active else self._at_hand(key, options)
        if found is None:
            return cast(T, run_blocking(self._computed(self._root, key, function, options)))
        value: T = found.value
        return value

    @overload  # an async function matches both: the narrower overload comes first
    async def aget_or_compute(
        self, key: str, function: Callable[[], Awaitable[T]], **options: Unpack[PolicyOptions]
    ) -> T: ...
    @overload
    async def aget_or_compute(self, key: str, function: Callable[[], T], **options: Unpack[PolicyOptions]) -> T: ...

    @showing(PolicyOptions)
    async def aget_or_compute(self, key: str, function: Callable[[], Any], **options: Unpack[PolicyOptions]) -> Any:
        """Return the key's value, as `get_or_compute` does, awaited. `function` may be async or plain.

        >>> async def greet():
        ...     return "hello"
        >>> asyncio.run(cache.aget_or_compute("greeting", greet, ttl=60))
        'hello'
        """
        found = None if overrides.active else self._at_hand(key, options)
        return await self._computed(self._aroot, key, function, options) if found is None else found.value

    def _at_hand(
        self, key: str, options: Mapping[str, Any], block: Block | None = None
    ) -> Resident | Entry[Any] | None:
        for name in options:  # a comparison of sets would build a set first
            if name not in _NAMES:
                DEFAULT.with_options(**options)  # raises at every call, not only if the call computes
        key = self._root_prefix + key if type(key) is str else self._key(key)  # saves a call in every hit
        return self._root.at_hand(key) if block is None else self._root.at_hand_of(block, key)

    async def _computed(
        self, root: ScopeSide, key: str, function: Callable[[], Any], options: Mapping[str, Any]
    ) -> Any:
        """Return the value of a key that is not at hand, or that a `refreshing` or `bypassed` block may concern."""
        block = current_block(lambda: self)
        if block is not None and block.bypass:
            with Inside(Context(key)):
                return await root.colour.call(function)
        found = self._at_hand(key, options, block) if overrides.active else None
        if found is not None:
            return found.value
        if not callable(function):
            raise OptionError(f"the function to compute {key!r} is {function!r}: give something callable")
        policy = self.policy.with_options(**options)
        result = await root.fetch(self._key(key), function, policy, once=block)
        return called(partial(value_of, result, policy))  # may raise the function's own StopIteration

    @showing(PolicyOptions)
    def refresh(self, key: str, function: Callable[[], T], **options: Unpack[PolicyOptions]) -> T:
        """Compute and store the value now, even if one is stored or another caller is computing.

        >>> cache.set("answer", 41)
        >>> cache.refresh("answer", lambda: 42), cache.get("answer")
        (42, 42)
        """
        return cast(T, run_blocking(self._refresh(self._root, key, function, options)))

    @overload
    async def arefresh(self, key: str, function: Callable[[], Awaitable[T]], **options: Unpack[PolicyOptions]) -> T: ...
    @overload
    async def arefresh(self, key: str, function: Callable[[], T], **options: Unpack[PolicyOptions]) -> T: ...

    @showing(PolicyOptions)
    async def arefresh(self, key: str, function: Callable[[], Any], **options: Unpack[PolicyOptions]) -> Any:
        return await self._refresh(self._aroot, key, function, options)

    async def _refresh(self, root: ScopeSide, key: str, function: Callable[[], Any], options: Mapping[str, Any]) -> Any:
        block = current_block(lambda: self)
        once = None if block is None or block.bypass else block  # a refresh counts for the whole refreshing block
        policy = self.policy.with_options(**options)
        result = await root.fetch(self._key(key), function, policy, force=True, once=once)
        return called(partial(value_of, result, policy))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value if it is fresh, else `default`. Never compute.

        >>> cache.set("k", None)
        >>> cache.get("k", "nothing"), cache.get("other", "nothing")
        (None, 'nothing')
        """
        found = self._root.at_hand(self._key(key))
        return found.value if found is not None else run_blocking(self._get(self._root, [key])).get(key, default)

    async def aget(self, key: str, default: Any = None) -> Any:
        found = self._root.at_hand(self._key(key))
        return found.value if found is not None else (await self._get(self._aroot, [key])).get(key, default)

    @showing(PolicyOptions)
    def set(self, key: str, value: Any, **options: Unpack[PolicyOptions]) -> None:
        """Store this value. A computation that is under way will not replace it.

        >>> cache.set("rate", 1.09, ttl="1h", stale="1d")
        """
        run_blocking(self._root.put(self._key(key), value, self.policy.with_options(**options)))

    @showing(PolicyOptions)
    async def aset(self, key: str, value: Any, **options: Unpack[PolicyOptions]) -> None:
        await self._aroot.put(self._key(key), value, self.policy.with_options(**options))

    @showing(PolicyOptions)
    def add(self, key: str, value: Any, **options: Unpack[PolicyOptions]) -> bool:
        """Store this value unless a fresh one is stored. Return whether it was stored.

        >>> cache.add("job 5", "mine", ttl=60), cache.add("job 5", "mine, too", ttl=60)
        (True, False)
        """
        return run_blocking(self._add(self._root, key, value, options))

    @showing(PolicyOptions)
    async def aadd(self, key: str, value: Any, **options: Unpack[PolicyOptions]) -> bool:
        return await self._add(self._aroot, key, value, options)

    async def _add(self, root: ScopeSide, key: str, value: Any, options: Mapping[str, Any]) -> bool:
        def make(seen: Entry[Any] | None) -> Any:
            return value if seen is None or seen.fresh <= 0 or seen.raised else STAY

        return await root.compare_and_set(self._key(key), make, self.policy.with_options(**options)) is not None

    @showing(PolicyOptions)
    def update(
        self,
        key: str,
        function: Callable[[Any], T],
        default: Any = None,
        *,
        in_place: bool = False,
        **options: Unpack[PolicyOptions],
    ) -> T:
        """Store what `function` returns for the fresh value, or for `default` if there is none, and return it.

        No concurrent change is lost: `function` is called again if the value has changed meanwhile. The new value gets
        the full `ttl=` and the `tags=` of this call. With `in_place=True` it keeps the end and the tags of the value
        that it replaces.

        >>> [cache.update("visits", lambda n: n + 1, default=0) for _ in range(3)]
        [1, 2, 3]
        """
        return cast(T, run_blocking(self._update(self._root, key, function, default, in_place, options)))

    @showing(PolicyOptions)
    async def aupdate(
        self,
        key: str,
        function: Callable[[Any], T],
        default: Any = None,
        *,
        in_place: bool = False,
        **options: Unpack[PolicyOptions],
    ) -> T:
        return cast(T, await self._update(self._aroot, key, function, default, in_place, options))

    async def _update(
        self,
        root: ScopeSide,
        key: str,
        function: Callable[[Any], Any],
        default: Any,
        in_place: bool,
        options: Mapping[str, Any],
    ) -> Any:
        def make(seen: Entry[Any] | None) -> Any:
            return function(default if seen is None or seen.fresh <= 0 or seen.raised else seen.value)

        policy = self.policy.with_options(**options)
        entry = await root.compare_and_set(self._key(key), make, policy, in_place=in_place)
        return None if entry is None else entry.value

    @showing(PolicyOptions)
    def touch(self, key: str, **options: Unpack[PolicyOptions]) -> bool:
        """Give the stored value a new `ttl=` and `stale=`, from now on, also if it was stale. The defaults are those of
        the cache, whatever the value was set with. Return whether there was a value.

        >>> cache.set("session 7", {"user": 5}, ttl=60)
        >>> cache.touch("session 7", ttl="1h"), cache.touch("session 8", ttl="1h")
        (True, False)
        """
        return run_blocking(self._touch(self._root, key, options))

    @showing(PolicyOptions)
    async def atouch(self, key: str, **options: Unpack[PolicyOptions]) -> bool:
        return await self._touch(self._aroot, key, options)

    async def _touch(self, root: ScopeSide, key: str, options: Mapping[str, Any]) -> bool:
        if "tags" in options:
            raise OptionError("touch leaves the tags of a value as they are: use set to give it others")

        def make(seen: Entry[Any] | None) -> Any:
            return STAY if seen is None or seen.raised else seen.value

        policy = self.policy.with_options(**options)
        return await root.compare_and_set(self._key(key), make, policy, touch=True) is not None

    def peek(self, key: str) -> Entry[Any] | None:
        """Return the stored entry, fresh or stale, or None. Never compute.

        >>> cache.set("k", 1, ttl=60)
        >>> entry = cache.peek("k")
        >>> entry.value, 59 < entry.fresh <= 60, cache.peek("other")
        (1, True, None)
        """
        return run_blocking(self._root.peek(self._key(key)))

    async def apeek(self, key: str) -> Entry[Any] | None:
        return await self._aroot.peek(self._key(key))

    def status(self, key: str) -> Status[Any]:
        """Return what is stored, its age and time left, and which caller computes it, if any. Change nothing.

        >>> cache.status("greeting").holder
        """
        return run_blocking(self._status(self._root, key))

    async def astatus(self, key: str) -> Status[Any]:
        return await self._status(self._aroot, key)

    async def _status(self, root: ScopeSide, key: str) -> Status[Any]:
        return replace(await status(root, self._key(key)), key=key)

    def expire(self, key: str, *, on_error: OnError | None = None) -> bool:
        """Mark the value as stale: it is served while one caller computes. Return whether it was fresh.

        >>> cache.set("k", 1, stale=60)
        >>> cache.expire("k"), cache.get("k"), cache.peek("k").value
        (True, None, 1)
        """
        return run_blocking(self._root.expire(self._key(key), on_error))

    async def aexpire(self, key: str, *, on_error: OnError | None = None) -> bool:
        return await self._aroot.expire(self._key(key), on_error)

    def invalidate(self, key: str, *, on_error: OnError | None = None) -> bool:
        """Remove the value; a computation under way will not be stored. Return whether there was a value.

        EngineError: the engine can't be reached, so the value may still be there. With `on_error="later"`, this process
        repeats the invalidation until the engine has made it; it is lost if the process ends first.

        >>> cache.set("k", 1)
        >>> cache.invalidate("k"), cache.invalidate("k")
        (True, False)
        """
        return run_blocking(self._root.invalidate(self._key(key), on_error))

    async def ainvalidate(self, key: str, *, on_error: OnError | None = None) -> bool:
        return await self._aroot.invalidate(self._key(key), on_error)

    # -- many keys ------------------------------------------------------------------------------------------------

    @showing(PolicyOptions)
    def get_or_compute_many(
        self, keys: Iterable[str], function: Callable[[list[str]], Mapping[str, T]], **options: Unpack[PolicyOptions]
    ) -> dict[str, T]:
        """Return the values by key. `function` gets the list of missing keys and returns a mapping; keys that it leaves
        out are left out here, too.

        >>> def lengths(words):  # called with the missing words only
        ...     return {word: len(word) for word in words}
        >>> cache.get_or_compute_many(["tea", "coffee"], lengths, ttl=60)
        {'tea': 3, 'coffee': 6}
        """
        return run_blocking(self._many(self._root, keys, function, options))

    @showing(PolicyOptions)
    async def aget_or_compute_many(
        self,
        keys: Iterable[str],
        function: Callable[[list[str]], Awaitable[Mapping[str, T]] | Mapping[str, T]],
        **options: Unpack[PolicyOptions],
    ) -> dict[str, T]:
        return await self._many(self._aroot, keys, function, options)

    async def _many(
        self, root: ScopeSide, keys: Iterable[str], function: Callable[[list[str]], Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        block = current_block(lambda: self)
        if block is not None and block.bypass:
            names = list(keys)
            with Inside(EachContext({key: Context(key) for key in names})):
                return dict(await root.colour.call(lambda: function(names)))
        policy = self.policy.with_options(**options)
        wanted = {self._key(key): key for key in keys}
        found = await value_of_each(root, wanted, BatchFunction(root.colour, function, wanted), policy, block)
        return {outer: found[key] for key, outer in wanted.items() if key in found}

    def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the fresh values by key. Other keys are left out.

        >>> cache.set("tea", 3)
        >>> cache.get_many(["tea", "coffee"])
        {'tea': 3}
        """
        return run_blocking(self._get_many(self._root, list(keys)))

    async def aget_many(self, keys: Iterable[str]) -> dict[str, Any]:
        return await self._get_many(self._aroot, list(keys))

    @showing(PolicyOptions)
    def set_many(self, values: Mapping[str, Any], **options: Unpack[PolicyOptions]) -> None:
        """Store all values, in one round trip if the engine can. If one value is refused, none is stored.

        >>> cache.set_many({"tea": 3, "coffee": 6}, ttl=60)
        """
        run_blocking(self._set_many(self._root, values, options))

    @showing(PolicyOptions)
    async def aset_many(self, values: Mapping[str, Any], **options: Unpack[PolicyOptions]) -> None:
        await self._set_many(self._aroot, values, options)

    async def _set_many(self, root: ScopeSide, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        keyed = {self._key(key): value for key, value in values.items()}
        await root.put_many(keyed, self.policy.with_options(**options))

    def invalidate_many(self, keys: Iterable[str], *, on_error: OnError | None = None) -> int:
        """Invalidate all these keys, in one round trip if the engine can. Return how many had a value.

        >>> cache.set_many({"tea": 3, "coffee": 6})
        >>> cache.invalidate_many(["tea", "coffee", "milk"])
        2
        """
        wanted = [self._key(key) for key in keys]
        return run_blocking(self._root.invalidate_many(wanted, on_error))

    async def ainvalidate_many(self, keys: Iterable[str], *, on_error: OnError | None = None) -> int:
        return await self._aroot.invalidate_many([self._key(key) for key in keys], on_error)

    def expire_many(self, keys: Iterable[str], *, on_error: OnError | None = None) -> int:
        """Expire all these keys, in one round trip if the engine can. Return how many were fresh.

        >>> cache.set_many({"user:1": "bob", "user:2": "eve"})
        >>> cache.expire_many(cache.keys("user:"))
        2
        """
        wanted = [self._key(key) for key in keys]
        return run_blocking(self._root.expire_many(wanted, on_error))

    async def aexpire_many(self, keys: Iterable[str], *, on_error: OnError | None = None) -> int:
        return await self._aroot.expire_many([self._key(key) for key in keys], on_error)

    # -- tags -----------------------------------------------------------------------------------------------------

    def invalidate_tags(self, *tags: str, via: Hook | None = None, on_error: OnError | None = None) -> None:
        """Remove all values that carry one of these tags, in every process. What is being computed for them is not
        stored.

        `via=on_commit` postpones this, as for a function's `invalidate`; `on_error=` is as for `invalidate`.

        >>> cache.set("user:5", "bob", tags=["users"])
        >>> cache.invalidate_tags("users")
        >>> cache.get("user:5")
        """
        self._end_tags(tags, hard=True, via=via, on_error=on_error)

    async def ainvalidate_tags(self, *tags: str, via: Hook | None = None, on_error: OnError | None = None) -> None:
        await self._aend_tags(tags, hard=True, via=via, on_error=on_error)

    def expire_tags(self, *tags: str, via: Hook | None = None, on_error: OnError | None = None) -> None:
        """Mark all values that carry one of these tags as stale: they are served while one caller computes.

        >>> cache.set("user:5", "bob", tags=["users"], stale=60)
        >>> cache.expire_tags("users")
        >>> cache.get("user:5"), cache.peek("user:5").value
        (None, 'bob')
        """
        self._end_tags(tags, hard=False, via=via, on_error=on_error)

    async def aexpire_tags(self, *tags: str, via: Hook | None = None, on_error: OnError | None = None) -> None:
        await self._aend_tags(tags, hard=False, via=via, on_error=on_error)

    def _end_tags(self, tags: Sequence[str], *, hard: bool, via: Hook | None, on_error: str | None) -> None:
        checked_tags("tags", tags, of_entry=False)  # now, not at the commit
        if via is None:
            run_blocking(self._root.end_tags(tags, hard=hard, on_error=on_error))
        else:
            via(lambda: self._end_tags_later(tags, hard=hard, on_error=on_error, suspending=False))

    async def _aend_tags(self, tags: Sequence[str], *, hard: bool, via: Hook | None, on_error: str | None) -> None:
        checked_tags("tags", tags, of_entry=False)
        if via is None:
            await self._aroot.end_tags(tags, hard=hard, on_error=on_error)
        else:
            via(lambda: self._end_tags_later(tags, hard=hard, on_error=on_error, suspending=True))

    def _end_tags_later(self, tags: Sequence[str], *, hard: bool, on_error: str | None, suspending: bool) -> Any:
        """Invalidate after a commit. Log a failure instead of raising it, so that the caller's next hooks run, too."""
        scope = self._root.scope

        def complain(why: object) -> None:
            text = "tags %s were not invalidated after a commit, so old values are served until their ttl ends: %s"
            _log.error(text, ", ".join(tags), why)

        work = lambda colour: scope.side(colour).end_tags(tags, hard=hard, on_error=on_error)  # noqa: E731
        return after_commit(work, complain, suspending=suspending, expected=EngineError)

    # -- the keys -------------------------------------------------------------------------------------------------

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Iterate over the stored keys, fresh or stale, that begin with `prefix`. They are read page by page.

        Keys of functions are not among them, except those made by `key=`. OptionError: the engine can't list its keys
        (memcached).

        >>> for key in cache.keys("user:"):
        ...     print(key)
        """
        self._root.lists()  # raises now, not at the first key
        return self._keys(self._key(prefix))

    def akeys(self, prefix: str = "") -> AsyncIterator[str]:
        self._aroot.lists()
        return self._akeys(self._key(prefix))

    def _keys(self, prefix: str) -> Iterator[str]:
        found, after = run_blocking(self._root.page(prefix))
        yield from map(self._outer, found)
        while after is not None:
            found, after = run_blocking(self._root.page(prefix, after))
            yield from map(self._outer, found)

    async def _akeys(self, prefix: str) -> AsyncIterator[str]:
        found, after = await self._aroot.page(prefix)
        for key in found:
            yield self._outer(key)
        while after is not None:
            found, after = await self._aroot.page(prefix, after)
            for key in found:
                yield self._outer(key)

    async def _get(self, root: ScopeSide, keys: Sequence[str]) -> dict[str, Any]:
        """Return the fresh values by key."""
        entries = await root.get([self._key(key) for key in keys])
        found = zip(keys, entries, strict=True)
        return {key: entry.value for key, entry in found if entry is not None and not entry.raised}

    async def _get_many(self, root: ScopeSide, keys: Sequence[str]) -> dict[str, Any]:
        at_hand = {key: found.value for key in keys if (found := root.at_hand(self._key(key))) is not None}
        left = [key for key in keys if key not in at_hand]
        values = at_hand | (await self._get(root, left) if left else {})
        return {key: values[key] for key in keys if key in values}

    # -- blocks ---------------------------------------------------------------------------------------------------

    def refreshing(self) -> AbstractContextManager[None]:
        """Compute the calls in a block anew, and store the values: `stampede.refreshing`, for this cache only.

        >>> with cache.refreshing():  # whatever is stored
        ...     cache.get_or_compute("answer", lambda: 43)
        43
        """
        return refreshing(self)

    def bypassed(self) -> AbstractContextManager[None]:
        """Make the calls in a block go straight to the functions: `stampede.bypassed`, for this cache only.

        >>> with cache.bypassed():  # whatever is stored; and store nothing
        ...     cache.get_or_compute("answer", lambda: 44)
        44
        """
        return bypassed(self)

    # -- all of it ------------------------------------------------------------------------------------------------

    def clear(self, *, on_error: OnError | None = None) -> None:
        """Remove everything of this namespace, in every process.

        >>> cache.set("k", 1)
        >>> cache.clear()
        >>> cache.get("k")
        """
        run_blocking(self._root.clear(on_error))

    async def aclear(self, *, on_error: OnError | None = None) -> None:
        await self._aroot.clear(on_error)

    def expire_all(self, *, on_error: OnError | None = None) -> None:
        """Mark everything of this namespace as stale, in every process. It is served while one caller computes.

        >>> cache.set("greeting", "hello", stale=60)
        >>> cache.expire_all()
        >>> cache.get("greeting")
        """
        run_blocking(self._root.expire_all(quoted(self.namespace), on_error))

    async def aexpire_all(self, *, on_error: OnError | None = None) -> None:
        await self._aroot.expire_all(quoted(self.namespace), on_error)

    def stats(self) -> Stats:
        """Return counts of this process, since the cache was made.

        >>> cache.get_or_compute("k", lambda: 1) + cache.get_or_compute("k", lambda: 1)
        2
        >>> stats = cache.stats()
        >>> stats.computations, stats.hits, stats.ratio
        (1, 1, 0.5)
        """
        hits, saved = self._served()
        return self._with_tier_counts(self.counters.total(), sum(hits.values()), sum(saved.values()))

    def stats_of(self, scope: str) -> Stats:
        """Return `stats` of one function."""
        hits, saved = self._served()
        return self._with_tier_counts(self.counters.of(scope), hits.get(scope, 0), saved.get(scope, 0.0))

    def stats_by_function(self) -> dict[str, Stats]:
        """Return `stats` of each function called in this process, by name. "" stands for the cache's own keys.

        >>> cache.get_or_compute("k", lambda: 1)
        1
        >>> cache.stats_by_function()[""].computations
        1
        """
        hits, saved = self._served()
        return {
            scope: self._with_tier_counts(self.counters.of(scope), hits.get(scope, 0), saved.get(scope, 0.0))
            for scope in {"", *hits, *self.counters.scopes()}
        }

    def _served(self) -> tuple[dict[str, int], dict[str, float]]:
        tier = self._core.local_tier.residents
        return ({}, {}) if tier is None else tier.served()

    def _with_tier_counts(self, counted: Stats, hits: int, saved: float) -> Stats:
        """Return the counts from events, with those of the local tier and of the engine's outages added."""
        own, outage = self.counters.of(""), self._core.outage
        down = 0.0 if outage is None else outage.lasts
        return replace(
            counted,
            hits=hits,
            saved_seconds=counted.saved_seconds + saved,
            engine_downs=own.engine_downs,
            engine_down_seconds=own.engine_down_seconds + down,
        )

    def ping(self) -> float:
        """Send the engine a ping, for a health check, and return the seconds until its answer.

        The engine is asked even while it counts as down. EngineError: it did not answer within its time-out.

        >>> 0 <= cache.ping() < 1
        True
        """
        return self.engine.ping()

    async def aping(self) -> float:
        return await self._worker_threads.run(self.engine.ping)

    def close(self) -> None:
        """Close the engine's connections and threads, for good. A second call does nothing.

        Callers that wait for a value or a lock get EngineError at once, and so does every later verb, whatever
        `on_engine_error` says. Computations under way run to their end; their callers get the values, which are not
        stored. Their leases are given back, so that other processes need not wait; `close` waits up to a second for
        that, but not in a running event loop. Locks that are held are not released: they expire, and the code under
        them goes on.

        >>> cache = Cache()
        >>> cache.close()
        >>> cache.get("k")
        Traceback (most recent call last):
        stampede.errors.EngineClosed: memory: the engine was closed: open another Cache, or call configure() again, ...
        """
        give_back = self._core.close()
        giving = None if give_back is None else begun("stampede-closing", self._end, give_back)
        if giving is None:
            self._end()
        elif running_loop() is None:
            giving.join(CLOSING)

    def _end(self, give_back: Callable[[], object] = lambda: None) -> None:
        give_back()
        self.engine.close()
        if self._core.local_tier.residents is not None:
            self._core.local_tier.residents.clear()

    async def aclose(self) -> None:
        await self._worker_threads.run(self.close)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Cache {self.name}>"

    @property
    def shared(self) -> bool:
        """Whether other processes see the same values."""
        return self.engine.shared

    @property
    def postponed(self) -> int:
        """The number of invalidations that the engine has not made yet, and that are repeated (`on_error="later"`)."""
        return len(self._core.postponed)

    @property
    def down(self) -> bool:
        """Whether the engine counts as down in this process. Calls go on without it meanwhile."""
        return self._core.is_down()

    # -- functions, locks and limits on this cache ----------------------------------------------------------------

    @property
    def cached(self) -> CachedHere:
        """The decorator `stampede.cached`, with `cached.many`, for this cache."""
        return _CachedIn(self)

    @showing(LockOptions)
    def lock(self, name: str, **options: Unpack[LockOptions]) -> Lock:
        """Return a `stampede.Lock` of this name on this cache's engine.

        >>> with cache.lock("nightly", lease=60, wait=5):
        ...     pass  # no other process is inside
        """
        return Lock(name, self.engine, **options)

    @showing(LimitOptions)
    def limiter(self, name: str, *, max: int, per: Seconds, **options: Unpack[LimitOptions]) -> Limiter:
        """Return a `stampede.Limiter` of this name on this cache's engine.

        >>> with cache.limiter("github", max=5, per=0.8):
        ...     pass  # at most five such blocks begin in any 0.8 s
        """
        return Limiter(name, self.engine, max=max, per=per, **options)

    @showing(BulkheadOptions)
    def bulkhead(self, name: str, **options: Unpack[BulkheadOptions]) -> Bulkhead:
        """Return a `stampede.Bulkhead` of this name on this cache's engine.

        >>> with cache.bulkhead("reports", concurrency=8):
        ...     pass  # no more than eight are inside
        """
        return Bulkhead(name, self.engine, **options)

    def _outer(self, key: str) -> str:
        """Return the key as the user gave it."""
        return key.removeprefix(self._root_prefix)

    def _key(self, key: str) -> str:
        if not isinstance(key, str):
            raise KeyingError(f"the key {key!r} is of type {type(key).__name__}: give a str")
        return self._root_prefix + key


class _CachedIn:
    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    @showing(FunctionOptions)
    def __call__(self, function: Any = None, /, **options: Any) -> Any:
        return decorate(function, lambda: self._cache, options, self._cache.duplicate_names)

    @showing(ManyOptions)
    def many(self, function: Any = None, /, **options: Any) -> Any:
        return decorate(function, lambda: self._cache, options, self._cache.duplicate_names, many=True)


_NAMES = frozenset(OPTIONS)


def _imported(name: str | type | ModuleType) -> type | ModuleType:
    """Return a class or a module, imported if its dotted name is given."""
    found = imported("trust", name) if isinstance(name, str) else name
    if not isinstance(found, (type, ModuleType)):
        raise OptionError(f"trust names {name!r}, which is neither a class nor a module")
    return found


def imported(setting: str, name: str) -> Any:
    """Import and return what a dotted name leads to. The last dot may be a colon."""
    module, _, path = name.replace(":", ".").rpartition(".")
    try:
        within = importlib.import_module(module)
        return getattr(within, path) if hasattr(within, path) else importlib.import_module(f"{module}.{path}")
    except (ImportError, ValueError) as exc:
        raise OptionError(f"{setting} names {name!r}, which can't be imported: {exc}") from exc
