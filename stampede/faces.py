"""What type checkers see of a decorated function: its own signature, result and colour, and the verbs.

Class methods are beyond them: both checkers look through `@classmethod` in their own ways, and want `cls` given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from stampede.codec import ValueCodec
from stampede.entry import Entry
from stampede.metrics import Stats

__all__ = ["CachedAsync", "CachedFunction", "Decorate", "DecorateWith", "Decorated", "Options", "PolicyOptions"]

P = ParamSpec("P")
P2 = ParamSpec("P2")
S = TypeVar("S")
T = TypeVar("T")
Hook: TypeAlias = Callable[[Callable[[], object]], object]
Seconds: TypeAlias = float | str | timedelta | None
TimeToLive: TypeAlias = Seconds | Callable[[Any], Seconds]


class PolicyOptions(TypedDict, total=False):
    """How values are computed, kept and served: what a call, a decorator and a cache's settings can say."""

    ttl: TimeToLive
    stale: Seconds
    early: float
    background: bool
    lease: float | str | timedelta
    max_hold: Seconds
    wait: Seconds
    retry_after: float | str | timedelta
    jitter: float
    cache_if: Callable[[Any], object] | None
    raises: type[Exception] | tuple[type[Exception], ...]
    strict: bool


class Options(PolicyOptions, total=False):
    """What `@cached` takes besides: how keys are made, and values encoded."""

    key: Callable[..., object] | str | None
    version: str | int
    namespace: str
    ignore: str | Collection[str]
    codec: str | ValueCodec
    trust: Iterable[type | ModuleType]
    signing_key: str | bytes | list[str | bytes] | None
    compress: int | bool | None
    max_bytes: int | None


class Decorated(Protocol[P]):
    """What both colours have."""

    __name__: str
    __qualname__: str

    @property
    def cache(self) -> Any: ...

    def key(self, /, *args: P.args, **kwargs: P.kwargs) -> str: ...
    def stats(self) -> Stats: ...


class CachedFunction(Decorated[P], Protocol[P, T]):
    """A decorated `def`."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    @overload
    def __get__(self, obj: None, owner: type | None = None, /) -> CachedFunction[P, T]: ...
    @overload
    def __get__(
        self: CachedFunction[Concatenate[S, P2], T], obj: S, owner: type | None = None, /
    ) -> CachedFunction[P2, T]: ...

    @property
    def __wrapped__(self) -> Callable[P, T]: ...

    def peek(self, /, *args: P.args, **kwargs: P.kwargs) -> Entry[T] | None: ...
    def refresh(self, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def set(self, value: T, /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    def set(self, value: T, /, *args: Any, ttl: TimeToLive, stale: Seconds = ..., **kwargs: Any) -> None: ...
    @overload
    def set(self, value: T, /, *args: Any, stale: Seconds, **kwargs: Any) -> None: ...
    def expire(self, /, *args: P.args, **kwargs: P.kwargs) -> bool: ...
    def invalidate(self, /, *args: Any, via: Hook | None = None, **kwargs: Any) -> bool | None: ...
    def invalidate_all(self) -> None: ...
    def many(self, calls: Iterable[Iterable[Any] | Mapping[str, Any]], /) -> list[T]: ...


class CachedAsync(Decorated[P], Protocol[P, T]):
    """A decorated `async def`: the verbs that ask the engine are awaited too."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]: ...

    @overload
    def __get__(self, obj: None, owner: type | None = None, /) -> CachedAsync[P, T]: ...
    @overload
    def __get__(
        self: CachedAsync[Concatenate[S, P2], T], obj: S, owner: type | None = None, /
    ) -> CachedAsync[P2, T]: ...

    @property
    def __wrapped__(self) -> Callable[P, Coroutine[Any, Any, T]]: ...

    async def peek(self, /, *args: P.args, **kwargs: P.kwargs) -> Entry[T] | None: ...
    async def refresh(self, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def set(self, value: T, /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    async def set(self, value: T, /, *args: Any, ttl: TimeToLive, stale: Seconds = ..., **kwargs: Any) -> None: ...
    @overload
    async def set(self, value: T, /, *args: Any, stale: Seconds, **kwargs: Any) -> None: ...
    async def expire(self, /, *args: P.args, **kwargs: P.kwargs) -> bool: ...
    async def invalidate(self, /, *args: Any, via: Hook | None = None, **kwargs: Any) -> bool | None: ...
    async def invalidate_all(self) -> None: ...
    async def many(self, calls: Iterable[Iterable[Any] | Mapping[str, Any]], /) -> list[T]: ...


class DecorateWith(Protocol):
    """`@cached(...)`, once it has its options."""

    @overload  # a coroutine function is a function too: the narrower comes first
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> CachedAsync[P, T]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> CachedFunction[P, T]: ...


class Decorate(Protocol):
    """`@cached` and `@cached(...)`."""

    @overload  # a coroutine function is a function too: the narrower comes first
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> CachedAsync[P, T]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> CachedFunction[P, T]: ...
    @overload
    def __call__(self, /, **options: Unpack[Options]) -> DecorateWith: ...
