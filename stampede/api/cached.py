"""One decorated function: its keys, its calls, and its verbs such as `peek` and `invalidate`. Hits are answered by
generated code (`fast_hit.py`). Everything else, such as a miss, an argument of another type, or an entry that is due,
takes the slow way through the function's `Scope`."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from stampede.algorithm.context import Context, Inside
from stampede.algorithm.scope import ScopeSide
from stampede.api.binding import Binding, Home
from stampede.api.many_calls import value_by_key
from stampede.api.overrides import Block, current_block, overrides
from stampede.api.status import status
from stampede.api.typing import OnError
from stampede.errors import EngineClosed, EngineError, KeyingError, OptionError
from stampede.local_tier.residents import Resident
from stampede.model.entry import Entry
from stampede.model.result import value_of
from stampede.runtime.colour import after_commit, run_blocking
from stampede.runtime.definitions import signature_of
from stampede.settings.options import Policy

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
    """The calls and the verbs of one decorated function. They are async if the function is."""

    def key(self, /, *args: Any, **kwargs: Any) -> str:
        """Return the key of these arguments. Most verbs, like this one, take only arguments that are part of the key.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price.key("tea")
        "shop:price...:('tea')"
        """
        args, kwargs = self.whole_call(args, kwargs)
        return self.key_of_call(*args, **kwargs)

    def whole_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a whole call, with None for those that are not part of the key."""
        if not self._not_in_key:
            return args, kwargs
        signature = signature_of(self.function)
        parts = [part for name, part in signature.parameters.items() if name not in self._not_in_key]
        given = signature.replace(parameters=parts).bind(*args, **kwargs)
        bound = signature.bind_partial()
        bound.arguments = {
            name: None if name in self._not_in_key else given.arguments[name]
            for name in signature.parameters
            if name in self._not_in_key or name in given.arguments
        }
        return bound.args, bound.kwargs

    def key_of_call(self, /, *args: Any, **kwargs: Any) -> str:
        """Return the key of a whole call's arguments."""
        if self._of_class and args and not isinstance(args[0], type):
            raise KeyingError(
                f"{self.function.__qualname__}: cls is {args[0]!r}, which is no class: since Python 3.13 @classmethod "
                "doesn't bind the verbs of what it decorates. Write @cached above it, or give the class first"
            )
        make = self._make_key
        if make is None or self._scope is None:
            self._bind()  # the namespace is part of the key
            make = self._make_key
        assert make is not None
        return make(*args, **kwargs)

    # -- calls ----------------------------------------------------------------------------------------------------

    def slow(self, /, *args: Any, **kwargs: Any) -> Any:
        """Answer a blocking call that the generated hit could not answer."""
        block = None
        if overrides.active:
            block = current_block(lambda: self.home)
            if block is not None and block.bypass:
                with Inside(Context(self.function.__qualname__)):
                    return self.function(*args, **kwargs)
        closed = scope = None
        while True:
            try:
                scope, key, found = self._look(args, kwargs, block)
                if found is not None:
                    return found.value
                result = run_blocking(self.fetch(scope, key, args, kwargs, once=block))
                entry = result.entry
                if result.error is None and entry is not None and not entry.raised:  # like `value_of`, without a call
                    return entry.value
                return value_of(result, scope.policy)
            except EngineClosed:
                closed = self.cache_after_close(closed, scope)

    async def slow_async(self, /, *args: Any, **kwargs: Any) -> Any:
        """Answer an async call that the generated hit could not answer."""
        block = None
        if overrides.active:
            block = current_block(lambda: self.home)
            if block is not None and block.bypass:
                with Inside(Context(self.function.__qualname__)):
                    return await self.function(*args, **kwargs)
        closed = scope = None
        while True:
            try:
                scope, key, found = self._look(args, kwargs, block)
                if found is not None:
                    return found.value
                return value_of(await self.fetch(scope, key, args, kwargs, once=block), scope.policy)
            except EngineClosed:
                closed = self.cache_after_close(closed, scope)

    def _look(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], block: Block | None
    ) -> tuple[ScopeSide, str, Resident | Entry[Any] | None]:
        """Return the scope and the key of these arguments, and the value if it is at hand."""
        scope = self._scope or self._bind()
        key = self.key_of_call(*args, **kwargs)
        if not scope.near:
            return scope, key, None
        found = scope.at_hand(key) if block is None else scope.at_hand_of(block, key)
        if isinstance(found, Resident) and self.fast_hit.enabled:
            self._adopt(scope, args, kwargs, found)
        return scope, key, found

    def cache_after_close(self, closed: Home | None, scope: ScopeSide | None) -> Home:
        """Return the cache to try now, after `configure` has closed one during a call. Called in an `except` block.
        Raise the error again if the cache is still the same; or if that of `scope` isn't closed, since the error then
        comes from another engine that the function uses."""
        home = self._find()
        if home is closed or (scope is not None and not scope.core.closed):
            raise
        self.unbind()  # a call that was binding meanwhile may have bound the closed cache
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
        home = None if tier is None else functools.partial(self._adopt, scope, args, kwargs)
        policy = None if self._ttl is None else scope.policy.with_options(ttl=self._ttl(*args, **kwargs))
        if self._refresh_by is not None:
            enqueue = functools.partial(self._refresh_by, *args, **kwargs)
            policy = replace(policy or scope.policy, refresh_by=enqueue)
        tags = None if self._tags is None else self._tags(*args, **kwargs)  # beside the policy, whose copy costs more
        origin = functools.partial(self.origin, *args, **kwargs)
        return scope.fetch(key, origin, policy, force=force, home=home, once=once, tags=tags)

    def _adopt(self, scope: ScopeSide, args: tuple[Any, ...], kwargs: dict[str, Any], resident: Resident) -> None:
        """Put the resident into the table of hits, if the table can tell these arguments exactly."""
        tier = scope.core.local_tier.residents
        if tier is None or overrides.active or (resident.homes and resident.lives_in(self.fast_hit.fast)):
            return
        fast = self.fast_hit.key(args, kwargs)
        if fast is not None:
            tier.adopt(resident, self.fast_hit.fast, fast)
            if self._scope is not scope or overrides.active:
                self.fast_hit.fast.pop(fast, None)  # unbound, or an override began, meanwhile

    # -- the verbs ----------------------------------------------------------------------------------------------------

    def _run(self, work: Any) -> Any:
        return work if self.suspending else run_blocking(work)

    def peek(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the stored entry for these arguments, fresh or stale, or None. Never compute.

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
        """Return what is stored for these arguments, its age and time left, and which caller computes it, if any.

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
        """Compute and store the value now, even if one is stored or another caller is computing.

        >>> numbers = iter([1, 2])
        >>> @cached(version=1)
        ... def number() -> int:
        ...     return next(numbers)
        >>> number(), number(), number.refresh(), number()
        (1, 1, 2, 2)
        """
        return self._run(self._refresh(args, kwargs))

    async def _refresh(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scope, block = self.scope, current_block(lambda: self.home)
        once = None if block is None or block.bypass else block  # a refresh counts for the whole refreshing block
        work = self.fetch(scope, self.key_of_call(*args, **kwargs), args, kwargs, force=True, once=once)
        return value_of(await work, scope.policy)

    def set(self, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Store this value for these arguments. `ttl=` and `stale=` apply to this entry, unless they are parameters of
        the function.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price.set(5, "tea", ttl="1h")
        >>> price("tea")
        5
        """
        entry_options = self.entry_options(kwargs)
        args, kwargs = self.whole_call(args, kwargs)
        policy = self.policy_of(entry_options, args, kwargs)
        return self._run(self.scope.put(self.key_of_call(*args, **kwargs), value, policy))

    def entry_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Remove `ttl` and `stale` from the keywords, unless they are the function's own, and return them."""
        return {name: kwargs.pop(name) for name in ("ttl", "stale") if name in kwargs and self._has_no(name)}

    def policy_of(self, entry_options: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Policy:
        """Return the policy of an entry that is set with these options, whose ttl may depend on the arguments."""
        ttl = self.ttl_of_set(args, kwargs) if "ttl" not in entry_options else None
        tags = self.tags_of_set(args, kwargs)
        own = {"ttl": ttl, "tags": tags}
        given = {name: value for name, value in own.items() if value is not None}
        return self.scope.policy.with_options(**entry_options, **given)

    def _has_no(self, name: str) -> bool:
        """Return whether the function can't take an argument of this name."""
        return name not in self.parameters.names and not self.parameters.open

    def expire(self, /, *args: Any, **kwargs: Any) -> Any:
        """Mark the value as stale: it is served while one caller computes. Return whether it was fresh.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price("tea")
        3
        >>> price.expire("tea"), price.expire("coffee")
        (True, False)
        """
        on_error = self.pop_on_error(kwargs)
        return self._run(self.scope.expire(self.key(*args, **kwargs), on_error))

    def invalidate(self, /, *args: Any, **kwargs: Any) -> Any:
        """Remove the value for these arguments; a computation under way won't be stored. Return whether there was one.

        `via=on_commit` postpones this: the hook receives a function that invalidates when it is called. After a commit
        it is too late to fail, so this function logs an EngineError instead of raising it. For an async function, in
        a running event loop, it returns a task and does not block.

        `on_error="later"`: if the engine cannot be reached, this process repeats the invalidation until the engine has
        made it, instead of raising EngineError. It is lost if the process ends first.

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
        on_error = self.pop_on_error(kwargs)
        key = self.key(*args, **kwargs)
        if via is None:
            return self._run(self.scope.invalidate(key, on_error))
        via(functools.partial(self._invalidate_later, key, on_error))
        return self._run(_nothing())

    def pop_on_error(self, kwargs: dict[str, Any]) -> str | None:
        """Take `on_error=` out of the keywords, unless it is the function's own."""
        return kwargs.pop("on_error", None) if self._has_no("on_error") else None

    def _invalidate_later(self, key: str, on_error: str | None) -> asyncio.Task[None] | None:
        """Invalidate after a commit. Log a failure instead of raising it, so that the caller's next hooks run, too."""
        scope, complain = self.scope.scope, functools.partial(_not_invalidated, key)
        work = lambda colour: scope.side(colour).invalidate(key, on_error)  # noqa: E731
        return after_commit(work, complain, suspending=self.suspending, expected=EngineError)

    def _takes_hook(self, via: object) -> bool:
        """Return whether `via=` is meant for the verb, and not an argument of the function."""
        return "via" not in self.parameters.names and (callable(via) or not self.parameters.open)

    def invalidate_all(self, *, on_error: OnError | None = None) -> Any:
        """Remove every value of this function, in every process.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price("tea")
        3
        >>> price.invalidate_all()
        >>> price.peek("tea")
        """
        self._check_all("invalidate", "clear")
        return self._run(self.scope.bump(on_error))

    def expire_all(self, *, on_error: OnError | None = None) -> Any:
        """Mark all values of this function as stale, in every process. They are served while one caller computes.

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
        return self._run(self.scope.expire_all(on_error=on_error))

    def _check_all(self, verb: str, all_of_it: str) -> None:
        """Raise OptionError if the function's keys can't be told from others, as it has a key=."""
        key, name = self.options.get("key"), self.function.__name__
        if key is None:
            return
        prefix = key.partition("{")[0] if isinstance(key, str) else ""
        each = f"{'await ' if self.suspending else ''}{name}.cache.{'a' if self.suspending else ''}{verb}_many"
        by_prefix = f"by their prefix, {each}({name}.cache.keys({prefix or '...'!r})); "
        raise OptionError(
            f"{self.function.__qualname__} has a key=, so its keys can't be told from other keys of its cache. Say "
            f"which ({by_prefix if 'namespace' not in self.options else ''}or one by one); or {all_of_it}() the "
            "cache, if the function has one with a namespace of its own"
        )

    def many(self, calls: Iterable[Iterable[Any] | Mapping[str, Any]], *, workers: int = 1) -> Any:
        """Return the values of many calls, in their order. A call is a tuple of arguments, or a mapping by name.

        An async function computes missing values all at once; another function one by one, or in `workers` threads.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price.many([("tea",), {"item": "coffee"}])
        [3, 6]
        """
        return self.many_of(calls, workers=workers)

    def many_of(self, calls: Iterable[Iterable[Any] | Mapping[str, Any]], *first: Any, workers: int = 1) -> Any:
        """Return the values of many calls, with `first` before the arguments of each call."""
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise OptionError(f"workers is {workers!r}: give the number of threads, 1 or more")
        if workers > 1 and self.suspending:
            raise OptionError(
                f"{self.function.__qualname__} is async: its calls are computed all at once. Leave workers= out"
            )
        return self._run(self._many([call_arguments(call, *first) for call in calls], workers))

    async def _many(self, calls: list[Arguments], workers: int) -> list[Any]:
        block = current_block(lambda: self.home)
        if block is not None and block.bypass:
            with Inside(Context(self.function.__qualname__)):
                return [await self.colour.call(call.of(self.function)) for call in calls]
        return await self.in_open_cache(lambda scope: self._all_of(scope, calls, workers, block))

    async def in_open_cache(self, ask: Callable[[ScopeSide], Awaitable[T]]) -> T:
        """Return what `ask` returns. Ask again, with the new cache, if `configure` has closed the cache meanwhile."""
        closed = scope = None
        while True:
            try:
                scope = self.scope
                return await ask(scope)
            except EngineClosed:
                closed = self.cache_after_close(closed, scope)

    async def _all_of(self, scope: ScopeSide, calls: list[Arguments], workers: int, block: Block | None) -> list[Any]:
        keys = [self.key_of_call(*args, **kwargs) for args, kwargs in calls]
        wanted = dict(zip(keys, calls, strict=True))
        origins = {key: call.of(self.origin) for key, call in wanted.items()}

        def policy_of(key: str) -> Policy:
            return scope.policy.with_options(**self.own_options(*wanted[key]))

        values = await value_by_key(scope, origins, policy_of, workers=workers, once=block)
        return [values[key] for key in keys]

    def stats(self) -> Any:
        """Return counts of this function's calls in this process.

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
    def slow_path(self) -> Callable[..., Any]:
        return self.slow_async if self.suspending else self.slow

    def plain(self) -> Any:
        """Return a function like the decorated one, with the verbs as its attributes."""
        wrapper: Any = self.fast_hit.call(self.slow_path)
        functools.update_wrapper(wrapper, self.function)
        for verb in VERBS:
            setattr(wrapper, verb, getattr(self, verb))
        wrapper.cache = LateCache(self)
        return wrapper


class LateCache:
    """A proxy, `function.cache`, for the function's current cache, which may be unknown before the first call."""

    def __init__(self, cached: Cached) -> None:
        self.__dict__["_cached"] = cached

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cached.home, name)

    @property  # type: ignore[misc]  # the data model allows a proxy to name the class of its object
    def __class__(self) -> Any:
        return type(self._cached.home)

    def __repr__(self) -> str:
        return repr(self._cached.home)


class Arguments(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def of(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """Return a callable that calls `function` with these arguments."""
        return functools.partial(function, *self.args, **self.kwargs)


def call_arguments(call: Any, *first: Any) -> Arguments:
    """Return the arguments of one call of a batch, given as a tuple or as a mapping by name. A string is refused."""
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
