"""What type checkers see of a decorated function: its own signature, result and colour, and the verbs. A `ParamSpec`
can't be combined with keywords. So a verb with options of its own has overloads: one with the function's parameters,
and one for each option, with any parameters."""

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
from stampede.settings import LocalSettings
from stampede.settings.options import Seconds, TimeToLive

__all__ = [
    "BulkheadOptions", "CacheOptions", "CacheTable", "CachedAsync", "CachedFunction", "Decorate", "DecorateIn",
    "DecorateLoosely", "FunctionOptions", "LimitOptions", "LocalTable", "LockOptions", "LooselyCached",
    "LooselyCachedAsync", "MoreOptions", "NoInstance", "OnceOptions", "Options", "Origins", "PolicyOptions",
    "StrictFunctionOptions", "StrictOptions", "Tables", "TryLockOptions", "WithObservers",
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
    """A function of a call's arguments, which takes those that it names."""

    def __call__(self, *args: Any, **kwargs: Any) -> str | int: ...


# -- options ------------------------------------------------------------------------------------------------------


OnError: TypeAlias = Literal["raise", "later"]
"""What happens if the engine could not make an invalidation: an error, or further attempts by this process."""


class Several(Protocol[S_co]):
    """Several values, in a list, a tuple or a set. A str does not match, as its `__contains__` differs."""

    def __contains__(self, item: object, /) -> bool: ...
    def __iter__(self) -> Iterator[S_co]: ...


class _Terms(TypedDict, total=False):
    """The options of a computation, without `ttl` and `tags`."""

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


class MoreOptions(_Terms, total=False):
    """The options of a computation, without `ttl`."""

    tags: Several[str]


class PolicyOptions(MoreOptions, total=False):
    """The options of a computation, in a call."""

    ttl: TimeToLive


class _Coding(_Terms, total=False):
    ttl: TimeToLive
    codec: Codec
    trust: Several[str | type | ModuleType]
    signing_key: str | bytes | Sequence[str | bytes] | None
    compress: int | str | bool | None
    max_bytes: int | str | None


class _Keying(_Coding, total=False):
    tags: Several[str] | Callable[..., Several[str]]
    version: str | int
    namespace: str | int | NamespaceOf


class StrictOptions(_Keying, total=False):
    """The options of `@cached` with which verbs take the same arguments as calls."""

    key: Callable[..., object] | None


class Options(_Keying, total=False):
    """All options of `@cached`: also how keys are made and values encoded."""

    key: Callable[..., object] | str | None
    ignore: str | Collection[str]


class _Refreshing(TypedDict, total=False):
    refresh_by: Callable[..., object] | None


class StrictFunctionOptions(StrictOptions, _Refreshing, total=False):
    """`StrictOptions`, of a function that is called for one key."""


class FunctionOptions(Options, _Refreshing, total=False):
    """All options of `@cached`, without those of `@cached.many`."""


class LocalTable(TypedDict, total=False):
    """The table of a local tier."""

    entries: int
    ttl: Seconds


class CacheOptions(_Coding, total=False):
    """The options of `Cache`, `configure` and a table of a settings file, without the URLs."""

    namespace: str
    tags: Several[str]
    local: bool | LocalTable | LocalSettings | None
    on_engine_error: Literal["local", "raise"]
    on_error: OnError


class CacheTable(CacheOptions, total=False):
    """The whole table of a cache."""

    url: str
    locks: str | None


Tables: TypeAlias = Mapping[str, CacheTable]
Origins: TypeAlias = Mapping[str, Mapping[str, Any]]
WithObservers: TypeAlias = Sequence[Observer] | Mapping[str, bool | str | Observer]


class TryLockOptions(TypedDict, total=False):
    """The options of `try_lock`, without its name and engine."""

    lease: float | str | timedelta
    max_hold: Seconds
    release_via: Hook | None
    shared: bool
    token: bytes | str | None


class LockOptions(TryLockOptions, total=False):
    """The options of `Lock`, without its name and engine."""

    wait: Seconds


class OnceOptions(TypedDict, total=False):
    """The options of `once`, without its name, engine and period."""

    retry_after: float | str | timedelta
    lease: float | str | timedelta
    max_hold: Seconds


class LimitOptions(TypedDict, total=False):
    """The options of a limit, without its name, engine and rate."""

    wait: Seconds
    when_down: Literal["raise", "allow"]


class BulkheadOptions(TypedDict, total=False):
    """The options of a bulkhead, without its name and engine."""

    concurrency: int
    lease: float | str | timedelta
    max_hold: Seconds
    wait: Seconds


# -- decorated functions ------------------------------------------------------------------------------------------


class Decorated(Protocol[K]):
    """The verbs of both colours."""

    __name__: str
    __qualname__: str

    @property
    def cache(self) -> Any: ...

    def key(self, /, *args: K.args, **kwargs: K.kwargs) -> str: ...
    def stats(self) -> Stats: ...


class Verbs(Decorated[K], Protocol[P, K, T]):
    """The verbs of a decorated `def` called with P. Verbs take K: all of P, or only what is part of the key."""

    def refresh(self, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def peek(self, /, *args: K.args, **kwargs: K.kwargs) -> Entry[T] | None: ...
    def status(self, /, *args: K.args, **kwargs: K.kwargs) -> Status[T]: ...
    @overload
    def set(self, value: T, /, *args: K.args, **kwargs: K.kwargs) -> None: ...
    @overload
    def set(self, value: T, /, *args: Any, ttl: TimeToLive, stale: Seconds = ..., **kwargs: Any) -> None: ...
    @overload
    def set(self, value: T, /, *args: Any, stale: Seconds, **kwargs: Any) -> None: ...
    @overload
    def expire(self, /, *args: K.args, **kwargs: K.kwargs) -> bool: ...
    @overload
    def expire(self, /, *args: Any, on_error: OnError, **kwargs: Any) -> bool: ...
    @overload
    def invalidate(self, /, *args: K.args, **kwargs: K.kwargs) -> bool: ...
    @overload
    def invalidate(self, /, *args: Any, via: Hook | None, on_error: OnError = ..., **kwargs: Any) -> bool | None: ...
    @overload
    def invalidate(self, /, *args: Any, on_error: OnError, **kwargs: Any) -> bool: ...
    def invalidate_all(self, *, on_error: OnError | None = None) -> None: ...
    def expire_all(self, *, on_error: OnError | None = None) -> None: ...


class AsyncVerbs(Decorated[K], Protocol[P, K, T]):
    """The verbs of a decorated `async def`. Verbs that ask the engine are awaited, too."""

    async def refresh(self, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def peek(self, /, *args: K.args, **kwargs: K.kwargs) -> Entry[T] | None: ...
    async def status(self, /, *args: K.args, **kwargs: K.kwargs) -> Status[T]: ...
    @overload
    async def set(self, value: T, /, *args: K.args, **kwargs: K.kwargs) -> None: ...
    @overload
    async def set(self, value: T, /, *args: Any, ttl: TimeToLive, stale: Seconds = ..., **kwargs: Any) -> None: ...
    @overload
    async def set(self, value: T, /, *args: Any, stale: Seconds, **kwargs: Any) -> None: ...
    @overload
    async def expire(self, /, *args: K.args, **kwargs: K.kwargs) -> bool: ...
    @overload
    async def expire(self, /, *args: Any, on_error: OnError, **kwargs: Any) -> bool: ...
    @overload
    async def invalidate(self, /, *args: K.args, **kwargs: K.kwargs) -> bool: ...
    @overload
    async def invalidate(
        self, /, *args: Any, via: Hook | None, on_error: OnError = ..., **kwargs: Any
    ) -> bool | None: ...
    @overload
    async def invalidate(self, /, *args: Any, on_error: OnError, **kwargs: Any) -> bool: ...
    async def invalidate_all(self, *, on_error: OnError | None = None) -> None: ...
    async def expire_all(self, *, on_error: OnError | None = None) -> None: ...


class Called(Protocol[P, S_co]):
    """A callable with parameters P that wraps a function."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> S_co: ...

    @property
    def __wrapped__(self) -> Callable[P, S_co]: ...


class Function(Called[P, T], Verbs[P, K, T], Protocol[P, K, T]):
    """A decorated `def`: the call and the verbs."""

    def many(self, calls: Iterable[Iterable[Any] | Mapping[str, Any]], /, *, workers: int = 1) -> list[T]: ...


class AsyncFunction(Called[P, Coroutine[Any, Any, T]], AsyncVerbs[P, K, T], Protocol[P, K, T]):
    """A decorated `async def`: the call and the verbs."""

    async def many(self, calls: Iterable[Iterable[Any] | Mapping[str, Any]], /) -> list[T]: ...


# -- in a class body ----------------------------------------------------------------------------------------------
#
# mypy and pyright look through @classmethod and @staticmethod, so `__get__` serves all three kinds of methods. The
# first parameter tells them apart: `type[S]` of the class binds the class; a parameter that the object fits binds the
# object; any other binds nothing, as in a static method. If everything fits the first parameter (`object`), the kind
# is unknown, and arguments are not checked.
#
# mypy matches a prefix of the parameters only if `self` is a Callable; pyright does not support such a `self`. The
# name MYPY is true for mypy.

MYPY = False


class NoInstance:
    """A type without objects: only `Any` fits where it is expected."""


N = TypeVar("N", bound=NoInstance)
"""A type that fits everywhere: `Any`, or a class with `Any` as its base."""


if MYPY:
    from collections.abc import Callable as Itself  # pyright: ignore[reportAssignmentType]
else:

    class Itself(Called[P, S_co], Protocol[P, S_co]):
        """The decorated function whose `__get__` is called."""


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
    """A decorated `def` with parameters that are not part of the key. Verbs take any arguments."""

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
    """A decorated `async def` with parameters that are not part of the key. Verbs take any arguments."""

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
    """The decorator `@cached(...)` with options that may leave parameters out of the key."""

    @overload
    def __call__(self, function: Callable[P, N], /) -> LooselyCached[P, N]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> LooselyCachedAsync[P, T]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> LooselyCached[P, T]: ...


class DecorateIn(Protocol[C_contra]):
    """The decorator `@cached` or `@cached(...)`. `cache=` may be a C; for a cache's own `cached`, C is `NoInstance`."""

    @overload  # a value of type Any, such as one of an untyped package, is taken for no coroutine
    def __call__(self, function: Callable[P, N], /) -> CachedFunction[P, N]: ...
    @overload  # a coroutine function matches both: the narrower overload comes first
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> CachedAsync[P, T]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> CachedFunction[P, T]: ...
    @overload
    def __call__(self, /, *, cache: C_contra = ..., **options: Unpack[StrictFunctionOptions]) -> Decorate: ...
    @overload
    def __call__(self, /, *, cache: C_contra = ..., **options: Unpack[FunctionOptions]) -> DecorateLoosely: ...


Decorate: TypeAlias = DecorateIn[NoInstance]
"""The decorator of one cache, without a `cache=` argument."""
