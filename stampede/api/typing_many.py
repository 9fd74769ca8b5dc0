"""What type checkers see of a decorated function of many ids, `users(ids) -> dict[K, V]`, with its K and V."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from stampede.api.typing import AsyncVerbs, Called, DecorateIn, NoInstance, Options, StrictOptions, Verbs
from stampede.settings.options import Seconds, TimeToLive

__all__ = [
    "CachedHere",
    "CachedIn",
    "DecorateMany",
    "DecorateManyLoosely",
    "ManyAsync",
    "ManyFunction",
    "ManyMethod",
    "ManyMethodAsync",
    "ManyOptions",
    "OneAsync",
    "OneFunction",
    "StrictManyOptions",
]

C_contra = TypeVar("C_contra", contravariant=True)
K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
P = ParamSpec("P")


class _OfMany(TypedDict, total=False):
    chunk: int | None
    absent: Seconds


class ManyOptions(Options, _OfMany, total=False):
    """The options of `@cached.many`: also the number of ids for one call, and how long an absent id is remembered."""


class StrictManyOptions(StrictOptions, _OfMany, total=False):
    """The options of `@cached.many` with which verbs take the same arguments as calls."""


class _Each(Verbs[Concatenate[K, P], Concatenate[K, P], V], Generic[K, V, P]):
    """The verbs that take one id."""


class OneFunction(_Each[K, V, P], Called[Concatenate[K, P], V]):
    """The function of one id: `users.one`."""


class _Plural(Protocol[K, V, P]):
    """The call, and the verbs that take many ids."""

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


class ManyFunction(_Each[K, V, P], _Plural[K, V, P]):
    """A decorated `def users(ids: list[K], ...) -> dict[K, V]`."""


class _EachAsync(AsyncVerbs[Concatenate[K, P], Concatenate[K, P], V], Generic[K, V, P]):
    """The verbs that take one id, awaited."""


class OneAsync(_EachAsync[K, V, P], Called[Concatenate[K, P], Coroutine[Any, Any, V]]):
    """The function of one id, `users.one`, awaited."""


class _PluralAsync(Protocol[K, V, P]):
    """The call, and the verbs that take many ids, awaited."""

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


class ManyAsync(_EachAsync[K, V, P], _PluralAsync[K, V, P]):
    """A decorated `async def users(ids: list[K], ...) -> dict[K, V]`."""


class ManyMethod(Protocol[S_contra, K, V, P]):
    """A decorated `def` of many ids in a class body."""

    @overload
    def __get__(self, obj: None, owner: type | None = None, /) -> ManyMethod[S_contra, K, V, P]: ...
    @overload
    def __get__(self, obj: S_contra, owner: type | None = None, /) -> ManyFunction[K, V, P]: ...

    def __call__(self, first: S_contra, ids: Iterable[K], /, *args: P.args, **kwargs: P.kwargs) -> dict[K, V]: ...


class ManyMethodAsync(Protocol[S_contra, K, V, P]):
    """A decorated `async def` of many ids in a class body."""

    @overload
    def __get__(self, obj: None, owner: type | None = None, /) -> ManyMethodAsync[S_contra, K, V, P]: ...
    @overload
    def __get__(self, obj: S_contra, owner: type | None = None, /) -> ManyAsync[K, V, P]: ...

    def __call__(
        self, first: S_contra, ids: Iterable[K], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, dict[K, V]]: ...


class DecorateManyLoosely(Protocol):
    """The decorator `@cached.many(...)` with options that may leave parameters out of the key: any arguments fit."""

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


class DecorateMany(Protocol[C_contra]):
    """The decorator `@cached.many` or `@cached.many(...)`. C is that of `DecorateIn`."""

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
    def __call__(
        self, /, *, cache: C_contra = ..., **options: Unpack[StrictManyOptions]
    ) -> DecorateMany[NoInstance]: ...
    @overload
    def __call__(self, /, *, cache: C_contra = ..., **options: Unpack[ManyOptions]) -> DecorateManyLoosely: ...


class CachedIn(DecorateIn[C_contra], Protocol[C_contra]):
    """The decorator `cached`, whose `cache=` is a C."""

    @property
    def many(self) -> DecorateMany[C_contra]: ...


CachedHere: TypeAlias = CachedIn[NoInstance]
"""The decorator `cached` of one cache."""
