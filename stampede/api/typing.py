"""What type checkers see of a decorated function: its own signature, result and colour, and the verbs.

A `ParamSpec` may stand alone only, so a verb with options of its own has overloads: the function's parameters, or any
together with one of those options.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from stampede.api.status import Status
from stampede.codecs import ValueCodec
from stampede.events import Observer
from stampede.metrics import Stats
from stampede.model.entry import Entry
from stampede.model.policy import Seconds, TimeToLive
from stampede.settings import LocalSettings

__all__ = [
    "BulkheadOptions", "CacheOptions", "CacheTable", "CachedAsync", "CachedFunction", "Decorate", "DecorateIn",
    "DecorateLoosely", "LimitOptions", "LocalTable", "LockOptions", "LooselyCached",
    "LooselyCachedAsync", "MoreOptions", "Nobody", "Options", "Origins", "PolicyOptions", "StrictOptions", "Tables",
    "TryLockOptions", "WithObservers",
]  # fmt: skip

P = ParamSpec("P")
P2 = ParamSpec("P2")
K = ParamSpec("K")
C_contra = TypeVar("C_contra", contravariant=True)
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")
Hook: TypeAlias = Callable[[Callable[[], object]], object]
Codec: TypeAlias = Literal["sealed", "msgpack", "json", "pickle"] | ValueCodec


class NamespaceOf(Protocol):
    """A function of those arguments of a call that it names."""

    def __call__(self, *args: Any, **kwargs: Any) -> str | int: ...


# -- options ------------------------------------------------------------------------------------------------------


class MoreOptions(TypedDict, total=False):
    """All those of a computation but `ttl`."""

    stale: Seconds
    early: float
    background: bool
    lease: float | str | timedelta
    max_hold: Seconds
    wait: Seconds
    patience: Seconds
    deadline: Seconds
    retry_after: float | str | timedelta
    jitter: float
    cache_if: Callable[[Any], object] | None
    raises: type[Exception] | tuple[type[Exception], ...]
    strict: bool
    origin: str | None


class PolicyOptions(MoreOptions, total=False):
    """How values are computed, kept and served: what a call, a decorator and a cache's settings can say."""

    ttl: TimeToLive


class Several(Protocol[S_co]):
    """Some of these, in a list, a tuple or a set. A text has another `__contains__`, and is not some texts."""

    def __contains__(self, item: object, /) -> bool: ...
    def __iter__(self) -> Iterator[S_co]: ...


class _Coding(PolicyOptions, total=False):
    codec: Codec
    trust: Several[str | type | ModuleType]
    signing_key: str | bytes | Sequence[str | bytes] | None
    compress: int | str | bool | None
    max_bytes: int | str | None


class _Keying(_Coding, total=False):
    version: str | int
    namespace: str | int | NamespaceOf


class StrictOptions(_Keying, total=False):
    """Of `@cached`, where verbs take what calls take."""

    key: Callable[..., object] | None


class Options(_Keying, total=False):
    """What `@cached` takes besides: how keys are made, and values encoded."""

    key: Callable[..., object] | str | None
    ignore: str | Collection[str]


class LocalTable(TypedDict, total=False):
    """A local tier's table."""

    entries: int
    ttl: Seconds


class CacheOptions(_Coding, total=False):
    """What `Cache`, `configure` and a settings file's table take beside the URLs."""

    namespace: str
    local: bool | LocalTable | LocalSettings | None
    on_engine_error: Literal["local", "raise"]


class CacheTable(CacheOptions, total=False):
    """A cache's whole table."""

    url: str
    locks: str | None


Tables: TypeAlias = Mapping[str, CacheTable]
Origins: TypeAlias = Mapping[str, Mapping[str, Any]]
WithObservers: TypeAlias = Sequence[Observer] | Mapping[str, bool | str | Observer]


class TryLockOptions(TypedDict, total=False):
    """What a lock that is never waited for takes beside its name and its engine."""

    lease: float | str | timedelta
    max_hold: Seconds
    release_via: Hook | None
    shared: bool
    token: bytes | str | None


class LockOptions(TryLockOptions, total=False):
    """What any lock takes."""

    wait: Seconds


class LimitOptions(TypedDict, total=False):
    """What a limit takes beside its name, its engine and its rate."""

    wait: Seconds
    when_down: Literal["raise", "allow"]


class BulkheadOptions(TypedDict, total=False):
    """What a bulkhead takes beside its name and its engine."""

    concurrency: int
    lease: float | str | timedelta
    max_hold: Seconds
    wait: Seconds


# -- decorated functions ------------------------------------------------------------------------------------------


class Decorated(Protocol[K]):
    """What both colours have."""

    __name__: str
    __qualname__: str

    @property
    def cache(self) -> Any: ...

    def key(self, /, *args: K.args, **kwargs: K.kwargs) -> str: ...
    def stats(self) -> Stats: ...


class Verbs(Decorated[K], Protocol[P, K, T]):
    """Those of a decorated `def` called with P; K is what they take: all of that, or what is part of the key."""

    def refresh(self, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def peek(self, /, *args: K.args, **kwargs: K.kwargs) -> Entry[T] | None: ...
    def status(self, /, *args: K.args, **kwargs: K.kwargs) -> Status[T]: ...
    @overload
    def set(self, value: T, /, *args: K.args, **kwargs: K.kwargs) -> None: ...
    @overload
    def set(self, value: T, /, *args: Any, ttl: TimeToLive, stale: Seconds = ..., **kwargs: Any) -> None: ...
    @overload
    def set(self, value: T, /, *args: Any, stale: Seconds, **kwargs: Any) -> None: ...
    def expire(self, /, *args: K.args, **kwargs: K.kwargs) -> bool: ...
    @overload
    def invalidate(self, /, *args: K.args, **kwargs: K.kwargs) -> bool: ...
    @overload
    def invalidate(self, /, *args: Any, via: Hook | None, **kwargs: Any) -> bool | None: ...
    def invalidate_all(self) -> None: ...
    def expire_all(self) -> None: ...


class AsyncVerbs(Decorated[K], Protocol[P, K, T]):
    """The same of a decorated `async def`: those that ask the engine are awaited too."""

    async def refresh(self, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def peek(self, /, *args: K.args, **kwargs: K.kwargs) -> Entry[T] | None: ...
    async def status(self, /, *args: K.args, **kwargs: K.kwargs) -> Status[T]: ...
    @overload
    async def set(self, value: T, /, *args: K.args, **kwargs: K.kwargs) -> None: ...
    @overload
    async def set(self, value: T, /, *args: Any, ttl: TimeToLive, stale: Seconds = ..., **kwargs: Any) -> None: ...
    @overload
    async def set(self, value: T, /, *args: Any, stale: Seconds, **kwargs: Any) -> None: ...
    async def expire(self, /, *args: K.args, **kwargs: K.kwargs) -> bool: ...
    @overload
    async def invalidate(self, /, *args: K.args, **kwargs: K.kwargs) -> bool: ...
    @overload
    async def invalidate(self, /, *args: Any, via: Hook | None, **kwargs: Any) -> bool | None: ...
    async def invalidate_all(self) -> None: ...
    async def expire_all(self) -> None: ...


class Called(Protocol[P, S_co]):
    """What is called with P, and was made of a function."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> S_co: ...

    @property
    def __wrapped__(self) -> Callable[P, S_co]: ...


class Function(Called[P, T], Verbs[P, K, T], Protocol[P, K, T]):
    """The call of a decorated `def`, and the verbs."""

    def many(self, calls: Iterable[Iterable[Any] | Mapping[str, Any]], /, *, workers: int = 1) -> list[T]: ...


class AsyncFunction(Called[P, Coroutine[Any, Any, T]], AsyncVerbs[P, K, T], Protocol[P, K, T]):
    """The same of an `async def`."""

    async def many(self, calls: Iterable[Iterable[Any] | Mapping[str, Any]], /) -> list[T]: ...


# -- in a class body ----------------------------------------------------------------------------------------------
#
# Both checkers look through @classmethod and @staticmethod, and so all three kinds of methods are found by `__get__`,
# told apart by their first parameter: `type[S]` of the class that is asked binds the class, another's object binds
# that, and what doesn't fit binds nothing, as of a static method. Of a first parameter that anything fits (`object`)
# nobody can tell; then the arguments are not looked at.
#
# mypy matches a prefix of parameters in a `self` that is a Callable, and takes any other for all; pyright knows no
# `self` that is a Callable. The name MYPY is true for mypy.

MYPY = False


class Nobody:
    """Fits where anything does."""


N = TypeVar("N", bound=Nobody)
"""What fits everywhere: `Any`, and what has it for a base."""


if MYPY:
    from collections.abc import Callable as Itself  # pyright: ignore[reportAssignmentType]
else:

    class Itself(Called[P, S_co], Protocol[P, S_co]):
        """What is asked for its method."""


class CachedFunction(Function[P, P, T]):
    """A decorated `def`."""

    @overload
    def __get__(  # type: ignore[misc]
        self: Itself[Concatenate[object, P2], T], obj: object, owner: type | None = None, /
    ) -> CachedFunction[..., T]: ...
    @overload
    def __get__(  # type: ignore[misc]
        self: Itself[Concatenate[type[S], P2], T], obj: object, owner: type[S], /
    ) -> CachedFunction[P2, T]: ...
    @overload
    def __get__(self, obj: None, owner: type | None = None, /) -> CachedFunction[P, T]: ...
    @overload
    def __get__(self: Itself[Concatenate[S, P2], T], obj: S, owner: type | None = None, /) -> CachedFunction[P2, T]: ...
    @overload
    def __get__(self, obj: object, owner: type | None = None, /) -> CachedFunction[P, T]: ...
    def __get__(self, obj: object, owner: Any = None, /) -> Any: ...


class CachedAsync(AsyncFunction[P, P, T]):
    """A decorated `async def`."""

    @overload
    def __get__(  # type: ignore[misc]
        self: Itself[Concatenate[object, P2], Coroutine[Any, Any, T]], obj: object, owner: type | None = None, /
    ) -> CachedAsync[..., T]: ...
    @overload
    def __get__(  # type: ignore[misc]
        self: Itself[Concatenate[type[S], P2], Coroutine[Any, Any, T]], obj: object, owner: type[S], /
    ) -> CachedAsync[P2, T]: ...
    @overload
    def __get__(self, obj: None, owner: type | None = None, /) -> CachedAsync[P, T]: ...
    @overload
    def __get__(
        self: Itself[Concatenate[S, P2], Coroutine[Any, Any, T]], obj: S, owner: type | None = None, /
    ) -> CachedAsync[P2, T]: ...
    @overload
    def __get__(self, obj: object, owner: type | None = None, /) -> CachedAsync[P, T]: ...
    def __get__(self, obj: object, owner: Any = None, /) -> Any: ...


class LooselyCached(Function[P, ..., T]):
    """A decorated `def` whose keys don't hold all of its parameters: verbs take what is in them."""

    @overload
    def __get__(  # type: ignore[misc]
        self: Itself[Concatenate[object, P2], T], obj: object, owner: type | None = None, /
    ) -> LooselyCached[..., T]: ...
    @overload
    def __get__(  # type: ignore[misc]
        self: Itself[Concatenate[type[S], P2], T], obj: object, owner: type[S], /
    ) -> LooselyCached[P2, T]: ...
    @overload
    def __get__(self, obj: None, owner: type | None = None, /) -> LooselyCached[P, T]: ...
    @overload
    def __get__(self: Itself[Concatenate[S, P2], T], obj: S, owner: type | None = None, /) -> LooselyCached[P2, T]: ...
    @overload
    def __get__(self, obj: object, owner: type | None = None, /) -> LooselyCached[P, T]: ...
    def __get__(self, obj: object, owner: Any = None, /) -> Any: ...


class LooselyCachedAsync(AsyncFunction[P, ..., T]):
    """The same of an `async def`."""

    @overload
    def __get__(  # type: ignore[misc]
        self: Itself[Concatenate[object, P2], Coroutine[Any, Any, T]], obj: object, owner: type | None = None, /
    ) -> LooselyCachedAsync[..., T]: ...
    @overload
    def __get__(  # type: ignore[misc]
        self: Itself[Concatenate[type[S], P2], Coroutine[Any, Any, T]], obj: object, owner: type[S], /
    ) -> LooselyCachedAsync[P2, T]: ...
    @overload
    def __get__(self, obj: None, owner: type | None = None, /) -> LooselyCachedAsync[P, T]: ...
    @overload
    def __get__(
        self: Itself[Concatenate[S, P2], Coroutine[Any, Any, T]], obj: S, owner: type | None = None, /
    ) -> LooselyCachedAsync[P2, T]: ...
    @overload
    def __get__(self, obj: object, owner: type | None = None, /) -> LooselyCachedAsync[P, T]: ...
    def __get__(self, obj: object, owner: Any = None, /) -> Any: ...


# -- decorators ---------------------------------------------------------------------------------------------------


class DecorateLoosely(Protocol):
    """`@cached(...)`, once it has options that leave parameters out of the key."""

    @overload
    def __call__(self, function: Callable[P, N], /) -> LooselyCached[P, N]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> LooselyCachedAsync[P, T]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> LooselyCached[P, T]: ...


class DecorateIn(Protocol[C_contra]):
    """`@cached`, and `@cached(...)`. C is what `cache=` may be: nothing (`Nobody`), of a cache's own `cached`."""

    @overload  # what may be anything, as a class of a package that ships no types, is no coroutine
    def __call__(self, function: Callable[P, N], /) -> CachedFunction[P, N]: ...
    @overload  # a coroutine function is a function too: the narrower comes first
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> CachedAsync[P, T]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> CachedFunction[P, T]: ...
    @overload
    def __call__(self, /, *, cache: C_contra = ..., **options: Unpack[StrictOptions]) -> Decorate: ...
    @overload
    def __call__(self, /, *, cache: C_contra = ..., **options: Unpack[Options]) -> DecorateLoosely: ...


Decorate: TypeAlias = DecorateIn[Nobody]
"""Those of one cache, which name no other."""
