"""What type checkers see of a decorated function of many ids: of `users(ids) -> dict[K, V]`, K and V everywhere."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from stampede.entry import Entry
from stampede.faces import Decorate, Hook, Options, StrictOptions
from stampede.metrics import Stats
from stampede.policy import Seconds, TimeToLive
from stampede.status import Status

__all__ = [
    "CachedHere",
    "DecorateMany",
    "DecorateManyLoosely",
    "DecorateManyWith",
    "ManyAsync",
    "ManyFunction",
    "ManyMethod",
    "ManyMethodAsync",
    "ManyOptions",
    "OneAsync",
    "OneFunction",
    "StrictManyOptions",
]

K = TypeVar("K")
K_contra = TypeVar("K_contra", contravariant=True)
V = TypeVar("V")
S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
P = ParamSpec("P")


class _OfMany(TypedDict, total=False):
    chunk: int | None
    absent: Seconds


class ManyOptions(Options, _OfMany, total=False):
    """What `@cached.many` takes besides: for how many ids the function is called at once, and how long an id is known
    to be absent."""


class StrictManyOptions(StrictOptions, _OfMany, total=False):
    """The same, where verbs take what calls take."""


class _Each(Protocol[K_contra, V, P]):
    """The verbs of one id."""

    __name__: str
    __qualname__: str

    @property
    def cache(self) -> Any: ...

    def key(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> str: ...
    def stats(self) -> Stats: ...
    def peek(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> Entry[V] | None: ...
    def status(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> Status[V]: ...
    def refresh(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> V: ...
    @overload
    def set(self, value: V, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    def set(
        self, value: V, id: K_contra, /, *args: Any, ttl: TimeToLive, stale: Seconds = ..., **kwargs: Any
    ) -> None: ...
    @overload
    def set(self, value: V, id: K_contra, /, *args: Any, stale: Seconds, **kwargs: Any) -> None: ...
    def expire(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> bool: ...
    @overload
    def invalidate(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> bool: ...
    @overload
    def invalidate(self, id: K_contra, /, *args: Any, via: Hook | None, **kwargs: Any) -> bool | None: ...
    def invalidate_all(self) -> None: ...
    def expire_all(self) -> None: ...


class OneFunction(_Each[K_contra, V, P], Protocol[K_contra, V, P]):
    """`users.one`."""

    def __call__(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> V: ...
    @property
    def __wrapped__(self) -> Callable[Concatenate[K_contra, P], V]: ...


class ManyFunction(_Each[K, V, P], Protocol[K, V, P]):
    """A decorated `def users(ids: list[K], ...) -> dict[K, V]`."""

    def __call__(self, ids: Iterable[K], /, *args: P.args, **kwargs: P.kwargs) -> dict[K, V]: ...
    @property
    def __wrapped__(self) -> Callable[Concatenate[list[K], P], Mapping[K, V]]: ...
    @property
    def one(self) -> OneFunction[K, V, P]: ...

    @overload
    def set_many(self, values: Mapping[K, V], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    def set_many(
        self, values: Mapping[K, V], /, *args: Any, ttl: TimeToLive, stale: Seconds = ..., **kwargs: Any
    ) -> None: ...
    @overload
    def set_many(self, values: Mapping[K, V], /, *args: Any, stale: Seconds, **kwargs: Any) -> None: ...
    def invalidate_many(self, ids: Iterable[K], /, *args: P.args, **kwargs: P.kwargs) -> int: ...
    def expire_many(self, ids: Iterable[K], /, *args: P.args, **kwargs: P.kwargs) -> int: ...


class _EachAsync(Protocol[K_contra, V, P]):
    """The same, awaited."""

    __name__: str
    __qualname__: str

    @property
    def cache(self) -> Any: ...

    def key(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> str: ...
    def stats(self) -> Stats: ...
    async def peek(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> Entry[V] | None: ...
    async def status(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> Status[V]: ...
    async def refresh(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> V: ...
    @overload
    async def set(self, value: V, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    async def set(
        self, value: V, id: K_contra, /, *args: Any, ttl: TimeToLive, stale: Seconds = ..., **kwargs: Any
    ) -> None: ...
    @overload
    async def set(self, value: V, id: K_contra, /, *args: Any, stale: Seconds, **kwargs: Any) -> None: ...
    async def expire(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> bool: ...
    @overload
    async def invalidate(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> bool: ...
    @overload
    async def invalidate(self, id: K_contra, /, *args: Any, via: Hook | None, **kwargs: Any) -> bool | None: ...
    async def invalidate_all(self) -> None: ...
    async def expire_all(self) -> None: ...


class OneAsync(_EachAsync[K_contra, V, P], Protocol[K_contra, V, P]):
    """`users.one`, awaited."""

    def __call__(self, id: K_contra, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, V]: ...
    @property
    def __wrapped__(self) -> Callable[Concatenate[K_contra, P], Coroutine[Any, Any, V]]: ...


class ManyAsync(_EachAsync[K, V, P], Protocol[K, V, P]):
    """A decorated `async def users(ids: list[K], ...) -> dict[K, V]`."""

    def __call__(self, ids: Iterable[K], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, dict[K, V]]: ...
    @property
    def __wrapped__(self) -> Callable[Concatenate[list[K], P], Coroutine[Any, Any, Mapping[K, V]]]: ...
    @property
    def one(self) -> OneAsync[K, V, P]: ...

    @overload
    async def set_many(self, values: Mapping[K, V], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    async def set_many(
        self, values: Mapping[K, V], /, *args: Any, ttl: TimeToLive, stale: Seconds = ..., **kwargs: Any
    ) -> None: ...
    @overload
    async def set_many(self, values: Mapping[K, V], /, *args: Any, stale: Seconds, **kwargs: Any) -> None: ...
    async def invalidate_many(self, ids: Iterable[K], /, *args: P.args, **kwargs: P.kwargs) -> int: ...
    async def expire_many(self, ids: Iterable[K], /, *args: P.args, **kwargs: P.kwargs) -> int: ...


class ManyMethod(Protocol[S_contra, K, V, P]):
    """The same in a class body."""

    @overload
    def __get__(self, obj: None, owner: type | None = None, /) -> ManyMethod[S_contra, K, V, P]: ...
    @overload
    def __get__(self, obj: S_contra, owner: type | None = None, /) -> ManyFunction[K, V, P]: ...

    def __call__(self, first: S_contra, ids: Iterable[K], /, *args: P.args, **kwargs: P.kwargs) -> dict[K, V]: ...


class ManyMethodAsync(Protocol[S_contra, K, V, P]):
    """And of an `async def`."""

    @overload
    def __get__(self, obj: None, owner: type | None = None, /) -> ManyMethodAsync[S_contra, K, V, P]: ...
    @overload
    def __get__(self, obj: S_contra, owner: type | None = None, /) -> ManyAsync[K, V, P]: ...

    def __call__(
        self, first: S_contra, ids: Iterable[K], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, dict[K, V]]: ...


class DecorateManyWith(Protocol):
    """`@cached.many(...)`, once it has its options."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[list[K], P], Coroutine[Any, Any, Mapping[K, V]]], /
    ) -> ManyAsync[K, V, P]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[list[K], P], Mapping[K, V]], /
    ) -> ManyFunction[K, V, P]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[K], P], Coroutine[Any, Any, Mapping[K, V]]], /
    ) -> ManyMethodAsync[S, K, V, P]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, list[K], P], Mapping[K, V]], /) -> ManyMethod[S, K, V, P]: ...


class DecorateManyLoosely(Protocol):
    """The same, where options leave parameters out of the key: what is asked for beside ids is not looked at."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[list[K], P], Coroutine[Any, Any, Mapping[K, V]]], /
    ) -> ManyAsync[K, V, ...]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[list[K], P], Mapping[K, V]], /
    ) -> ManyFunction[K, V, ...]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[K], P], Coroutine[Any, Any, Mapping[K, V]]], /
    ) -> ManyMethodAsync[S, K, V, ...]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[K], P], Mapping[K, V]], /
    ) -> ManyMethod[S, K, V, ...]: ...


class DecorateMany(DecorateManyWith, Protocol):
    """`@cached.many` and `@cached.many(...)`."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[list[K], P], Coroutine[Any, Any, Mapping[K, V]]], /
    ) -> ManyAsync[K, V, P]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[list[K], P], Mapping[K, V]], /
    ) -> ManyFunction[K, V, P]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[K], P], Coroutine[Any, Any, Mapping[K, V]]], /
    ) -> ManyMethodAsync[S, K, V, P]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, list[K], P], Mapping[K, V]], /) -> ManyMethod[S, K, V, P]: ...
    @overload
    def __call__(self, /, **options: Unpack[StrictManyOptions]) -> DecorateManyWith: ...
    @overload
    def __call__(self, /, **options: Unpack[ManyOptions]) -> DecorateManyLoosely: ...


class CachedHere(Decorate, Protocol):
    """`cached` of one cache."""

    @property
    def many(self) -> DecorateMany: ...
