"""One decorated function: its keys, its calls, and what it can do beside being called.

Hits are answered by generated code (`fast_hit.py`). Everything else, such as a miss, an argument of another type, or an
entry that is due, takes the slow way through the function's `Scope`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from stampede.algorithm.scope import ScopeSide
from stampede.api.binding import Binding, Home
from stampede.api.many_calls import value_by_key
from stampede.api.overrides import Block, around, overrides
from stampede.api.status import status
from stampede.errors import EngineClosed, EngineError, KeyingError, OptionError
from stampede.local_tier.residents import Resident
from stampede.model.entry import Entry
from stampede.model.policy import Policy
from stampede.model.result import value_of
from stampede.runtime.colour import after_commit, run_blocking
from stampede.runtime.definitions import signature_of

__all__ = ["VERBS", "Arguments", "Cached", "LateCache"]

VERBS = (
    "key",
    "peek",
    "refresh",
    "set",
    "expire",
    "invalidate",
    "invalidate_all",
    "expire_all",
    "status",
    "many",
    "stats",
)


T = TypeVar("T")

_log = logging.getLogger("stampede")


class Cached(Binding):
    """The calls and the verbs of one decorated function, of its own colour."""

    def key(self, /, *args: Any, **kwargs: Any) -> str:
        """The key of these arguments; of those that are a part of it, as in the other verbs.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price.key("tea")
        "shop:price...:('tea')"
        """
        args, kwargs = self.completed(args, kwargs)
        return self.key_of_call(*args, **kwargs)

    def completed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, where those that are no part of the key are not given."""
        if not self._absent:
            return args, kwargs
        signature = signature_of(self.function)
        parts = [part for name, part in signature.parameters.items() if name not in self._absent]
        given = signature.replace(parameters=parts).bind(*args, **kwargs)
        bound = signature.bind_partial()
        bound.arguments = {
            name: None if name in self._absent else given.arguments[name]
            for name in signature.parameters
            if name in self._absent or name in given.arguments
        }
        return bound.args, bound.kwargs

    def key_of_call(self, /, *args: Any, **kwargs: Any) -> str:
        """The key of a call's arguments."""
        if self._of_class and args and not isinstance(args[0], type):
            raise KeyingError(
                f"{self.function.__qualname__}: cls is {args[0]!r}, which is no class: since Python 3.13 @classmethod "
                "doesn't bind the verbs of what stands below it. Write @cached above it, or give the class first"
            )
        make = self._make_key
        if make is None or self._scope is None:
            self._bind()  # the namespace is part of the key
            make = self._make_key
        assert make is not None
        return make(*args, **kwargs)

    # -- calls ----------------------------------------------------------------------------------------------------

    def slow(self, /, *args: Any, **kwargs: Any) -> Any:
        """A call that the generated hit could not answer; blocking."""
        block = None
        if overrides.thrown:
            block = around(lambda: self.home)
            if block is not None and block.straight:
                return self.function(*args, **kwargs)
        closed = scope = None
        while True:
            try:
                scope, key, found = self._look(args, kwargs, block)
                if found is not None:
                    return found.value
                result = run_blocking(self.fetch(scope, key, args, kwargs, once=block))
                entry = result.entry
                if result.error is None and entry is not None and not entry.raised:  # as `value_of`, and a call less
                    return entry.value
                return value_of(result, scope.policy)
            except EngineClosed:
                closed = self.other_than(closed, scope)

    async def slow_async(self, /, *args: Any, **kwargs: Any) -> Any:
        """The same, suspending."""
        block = None
        if overrides.thrown:
            block = around(lambda: self.home)
            if block is not None and block.straight:
                return await self.function(*args, **kwargs)
        closed = scope = None
        while True:
            try:
                scope, key, found = self._look(args, kwargs, block)
                if found is not None:
                    return found.value
                return value_of(await self.fetch(scope, key, args, kwargs, once=block), scope.policy)
            except EngineClosed:
                closed = self.other_than(closed, scope)

    def _look(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], block: Block | None
    ) -> tuple[ScopeSide, str, Resident | Entry[Any] | None]:
        """Where the value of these arguments belongs, and what is at hand of it."""
        scope = self._scope or self._bind()
        key = self.key_of_call(*args, **kwargs)
        if not scope.near:
            return scope, key, None
        found = scope.at_hand(key) if block is None else scope.at_hand_of(block, key)
        if isinstance(found, Resident) and self.fast_hit.looks:
            self._take_home(scope, args, kwargs, found)
        return scope, key, found

    def other_than(self, closed: Home | None, scope: ScopeSide | None) -> Home:
        """The cache to be tried now, where `configure` has closed one under a call; or the error, if it is the same.

        The error is another engine's, which the function has asked, if the one of `scope` isn't closed.
        """
        home = self._find()
        if home is closed or (scope is not None and not scope.core.closed):
            raise
        self.unbind()  # who was binding while it was closed has bound to the closed one
        return home

    def fetch(
        self,
        scope: ScopeSide,
        key: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        force: bool = False,
        once: Block | None = None,
    ) -> Any:
        tier = scope.core.local_tier.residents
        home = None if tier is None else functools.partial(self._take_home, scope, args, kwargs)
        policy = None if self._ttl is None else scope.policy.with_options(ttl=self._ttl(*args, **kwargs))
        origin = functools.partial(self.origin, *args, **kwargs)
        return scope.fetch(key, origin, policy, force=force, home=home, once=once)

    def _take_home(self, scope: ScopeSide, args: tuple[Any, ...], kwargs: dict[str, Any], resident: Resident) -> None:
        """Let the next call with these arguments find the resident by itself, if it can tell them exactly."""
        tier = scope.core.local_tier.residents
        if tier is None or overrides.thrown or (resident.homes and resident.lives_in(self.fast_hit.fast)):
            return
        fast = self.fast_hit.key(args, kwargs)
        if fast is not None:
            tier.adopt(resident, self.fast_hit.fast, fast)
            if self._scope is not scope or overrides.thrown:
                self.fast_hit.fast.pop(fast, None)  # unbound, or thrown, meanwhile

    # -- the verbs ----------------------------------------------------------------------------------------------------

    def _run(self, work: Any) -> Any:
        return work if self.suspending else run_blocking(work)

    def peek(self, /, *args: Any, **kwargs: Any) -> Any:
        """The entry that is kept for these arguments, fresh or stale; nobody computes.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price("tea")
        3
        >>> price.peek("tea").value, price.peek("coffee")
        (3, None)
        """
        return self._run(self.scope.peek(self.key(*args, **kwargs)))

    def status(self, /, *args: Any, **kwargs: Any) -> Any:
        """What is kept for these arguments, since when and for how long, and who computes; nothing is touched.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price("tea")
        3
        >>> price.status("tea").entry.value
        3
        """
        return self._run(status(self.scope, self.key(*args, **kwargs)))

    def refresh(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute and store now, whatever is there and whoever is computing.

        >>> numbers = iter([1, 2])
        >>> @cached(version=1)
        ... def number() -> int:
        ...     return next(numbers)
        >>> number(), number(), number.refresh(), number()
        (1, 1, 2, 2)
        """
        return self._run(self._refresh(args, kwargs))

    async def _refresh(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scope, block = self.scope, around(lambda: self.home)
        once = None if block is None or block.straight else block  # what is refreshed inside is refreshed for all of it
        work = self.fetch(scope, self.key_of_call(*args, **kwargs), args, kwargs, force=True, once=once)
        return value_of(await work, scope.policy)

    def set(self, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Store this value for these arguments. `ttl=` and `stale=` are of this entry, unless they are arguments of the
        function's.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price.set(5, "tea", ttl="1h")
        >>> price("tea")
        5
        """
        terms = self.terms(kwargs)
        args, kwargs = self.completed(args, kwargs)
        policy = self.policy_of(terms, args, kwargs)
        return self._run(self.scope.put(self.key_of_call(*args, **kwargs), value, policy))

    def terms(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """How an entry is kept that is set: what these say of it is taken out of them."""
        return {name: kwargs.pop(name) for name in ("ttl", "stale") if name in kwargs and self._has_no(name)}

    def policy_of(self, terms: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Policy:
        """The same, and what the arguments of its call say of it."""
        ttl = self.ttl_of_kept(args, kwargs) if "ttl" not in terms else None
        return self.scope.policy.with_options(**terms, **({} if ttl is None else {"ttl": ttl}))

    def _has_no(self, name: str) -> bool:
        """It can't be an argument of the function's."""
        return name not in self.parameters.names and not self.parameters.open

    def expire(self, /, *args: Any, **kwargs: Any) -> Any:
        """Stale from now on, and served while one caller computes.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price("tea")
        3
        >>> price.expire("tea"), price.expire("coffee")
        (True, False)
        """
        return self._run(self.scope.expire(self.key(*args, **kwargs)))

    def invalidate(self, /, *args: Any, **kwargs: Any) -> Any:
        """Remove what is stored for these arguments; what is being computed for them will not be stored.

        `via=on_commit` gives the hook a function that does so when it is called: after a commit, where it is too late
        to fail, so it logs an EngineError instead of raising it. Of an async function, in a running event loop, it
        returns a task and does not block.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price("tea")
        3
        >>> price.invalidate("tea"), price.invalidate("tea")
        (True, False)
        >>> hooks = []
        >>> price.invalidate("tea", via=hooks.append)  # or via=transaction.on_commit
        """
        via = kwargs.pop("via", None) if self._takes_hook(kwargs.get("via")) else None
        key = self.key(*args, **kwargs)
        if via is None:
            return self._run(self.scope.invalidate(key))
        via(functools.partial(self._invalidate_later, key))
        return self._run(_nothing())

    def _invalidate_later(self, key: str) -> asyncio.Task[None] | None:
        """What `via=` is given. Each is tried by itself: one that fails must not keep its caller from the next."""
        scope, complain = self.scope.scope, functools.partial(_not_invalidated, key)
        work = lambda colour: scope.side(colour).invalidate(key)  # noqa: E731
        return after_commit(work, complain, suspending=self.suspending, expected=EngineError)

    def _takes_hook(self, via: object) -> bool:
        """It may be an argument of the function's, too."""
        return "via" not in self.parameters.names and (callable(via) or not self.parameters.open)

    def invalidate_all(self) -> Any:
        """Every value of this function is gone, in every process.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price("tea")
        3
        >>> price.invalidate_all()
        >>> price.peek("tea")
        """
        self._check_all("invalidate", "clear")
        return self._run(self.scope.bump())

    def expire_all(self) -> Any:
        """Every value of this function is stale from now on, in every process, and served while one caller computes.

        >>> @cached(stale=60)
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price("tea")
        3
        >>> price.expire_all()
        >>> price.peek("tea").fresh <= 0
        True
        """
        self._check_all("expire", "expire_all")
        return self._run(self.scope.expire_all())

    def _check_all(self, verb: str, all_of_it: str) -> None:
        """OptionError, where its keys can't be told from others."""
        key, name = self.options.get("key"), self.function.__name__
        if key is None:
            return
        prefix = key.partition("{")[0] if isinstance(key, str) else ""
        each = f"{'await ' if self.suspending else ''}{name}.cache.{'a' if self.suspending else ''}{verb}_many"
        by_prefix = f"by what they begin with, {each}({name}.cache.keys({prefix or '...'!r})); "
        raise OptionError(
            f"the keys of {self.function.__qualname__} are its cache's own, as it has a key=: nobody knows which they "
            f"are. Say which ({by_prefix if 'namespace' not in self.options else ''}or one by one), or {all_of_it}() "
            "the cache (of a namespace that is its alone)"
        )

    def many(self, calls: Iterable[Iterable[Any] | Mapping[str, Any]], *, workers: int = 1) -> Any:
        """The values of many calls, each a tuple of arguments or a mapping of them by name, in their order.

        An async function computes those that are missing all at once; any other in turn, or in so many threads.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price.many([("tea",), {"item": "coffee"}])
        [3, 6]
        """
        return self.many_of(calls, workers=workers)

    def many_of(self, calls: Iterable[Iterable[Any] | Mapping[str, Any]], *first: Any, workers: int = 1) -> Any:
        """The same, with `first` before the arguments of each."""
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise OptionError(f"workers is {workers!r}: give the number of threads, 1 or more")
        if workers > 1 and self.suspending:
            raise OptionError(
                f"{self.function.__qualname__} is async: its calls are computed all at once, and workers= are threads"
            )
        return self._run(self._many([call_arguments(call, *first) for call in calls], workers))

    async def _many(self, calls: list[Arguments], workers: int) -> list[Any]:
        block = around(lambda: self.home)
        if block is not None and block.straight:
            return [await self.colour.call(call.of(self.function)) for call in calls]
        return await self.in_open_cache(lambda scope: self._all_of(scope, calls, workers, block))

    async def in_open_cache(self, ask: Callable[[ScopeSide], Awaitable[T]]) -> T:
        """What this gives; asked once more, of the cache of today, where `configure` has closed one under it."""
        closed = scope = None
        while True:
            try:
                scope = self.scope
                return await ask(scope)
            except EngineClosed:
                closed = self.other_than(closed, scope)

    async def _all_of(self, scope: ScopeSide, calls: list[Arguments], workers: int, block: Block | None) -> list[Any]:
        keys = [self.key_of_call(*args, **kwargs) for args, kwargs in calls]
        wanted = dict(zip(keys, calls, strict=True))
        origins = {key: call.of(self.origin) for key, call in wanted.items()}

        def policy_of(key: str) -> Policy:
            ttl = self.ttl_of(*wanted[key])
            return scope.policy if ttl is None else scope.policy.with_options(ttl=ttl)

        values = await value_by_key(scope, origins, policy_of, workers=workers, once=block)
        return [values[key] for key in keys]

    def stats(self) -> Any:
        """Counts of this function in this process.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price("tea") + price("tea")
        6
        >>> price.stats().computations, price.stats().hits
        (1, 1)
        """
        return self.home.stats_of(self.scope.called)

    # -- the faces: a plain function, or a descriptor -------------------------------------------------------------

    @property
    def slowly(self) -> Callable[..., Any]:
        return self.slow_async if self.suspending else self.slow

    def plain(self) -> Any:
        """A function like the decorated one, with the verbs as its attributes."""
        wrapper: Any = self.fast_hit.call(self.slowly)
        functools.update_wrapper(wrapper, self.function)
        for verb in VERBS:
            setattr(wrapper, verb, getattr(self, verb))
        wrapper.cache = LateCache(self)
        return wrapper


class LateCache:
    """`function.cache`: the cache in which the function is bound now, which may not be known before the first call."""

    def __init__(self, cached: Cached) -> None:
        self.__dict__["_cached"] = cached

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cached.home, name)

    @property  # type: ignore[misc]  # the data model lets a proxy say whose it is
    def __class__(self) -> Any:
        return type(self._cached.home)

    def __repr__(self) -> str:
        return repr(self._cached.home)


class Arguments(NamedTuple):
    """What one call is given."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def of(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """That call of a function."""
        return functools.partial(function, *self.args, **self.kwargs)


def call_arguments(call: Any, *first: Any) -> Arguments:
    """One call's, of a batch: a tuple of them, or a mapping by their names. A string is no tuple of its letters."""
    if isinstance(call, Mapping) and all(isinstance(name, str) for name in call):
        return Arguments(first, call)
    if isinstance(call, (str, bytes, bytearray, Mapping)) or not isinstance(call, Iterable):
        raise OptionError(
            f"many() was given {call!r} as one call's arguments: give a tuple of them, as in ({call!r},), or a mapping "
            "of them by their names"
        )
    return Arguments((*first, *call), {})


def _not_invalidated(key: str, why: object) -> None:
    _log.error("%r was not invalidated after a commit, so its old value is served until its ttl ends: %s", key, why)


async def _nothing() -> None:
    return None
