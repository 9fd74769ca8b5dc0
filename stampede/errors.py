"""The tree of errors. Each also derives from the builtin exception that a Python user expects."""

from __future__ import annotations

__all__ = [
    "Absent",
    "CodecError",
    "ComputationFailed",
    "EngineClosed",
    "EngineError",
    "KeyingError",
    "LimitTimeout",
    "LockLost",
    "LockTimeout",
    "MissingExtra",
    "NoComputation",
    "OptionError",
    "OriginFull",
    "RecursiveComputation",
    "SettingsError",
    "StampedeError",
    "TooLarge",
    "UnsupportedPatch",
    "WaitTimeout",
]


class StampedeError(Exception):
    """The base of all errors that the library itself raises.

    >>> try:
    ...     cached(ttl=-1)
    ... except stampede.StampedeError as error:
    ...     print(error)
    ttl is -1: it must be at least 0
    """


class OptionError(StampedeError, ValueError):
    """An option whose name or value is wrong. The message names the option, the value and the remedy.

    >>> cached(tll=60)
    Traceback (most recent call last):
    stampede.errors.OptionError: @cached has no option 'tll': did you mean 'ttl'?
    """


class SettingsError(OptionError):
    """A settings file, or an argument of `Cache` or `configure`, that can't be used.

    >>> Cache(tll=60)
    Traceback (most recent call last):
    stampede.errors.SettingsError: Cache(): tll: there is no such setting: did you mean 'ttl'?
    """


class MissingExtra(StampedeError, ImportError):
    """An engine or codec whose package is not installed. The message shows the pip command.

    >>> try:  # Cache("redis://localhost"), if redis is not installed
    ...     raise MissingExtra("redis:// needs the package 'redis': pip install 'stampede-guard[redis]'")
    ... except ImportError as error:
    ...     print(error)
    redis:// needs the package 'redis': pip install 'stampede-guard[redis]'
    """


class UnsupportedPatch(StampedeError, RuntimeError):
    """A program patched by eventlet, which the library does not support. The message says what to use instead.

    >>> issubclass(UnsupportedPatch, RuntimeError)
    True
    """


class KeyingError(StampedeError, TypeError):
    """An argument from which no key can be made, such as an object without a stable identity. The message names it.

    >>> @cached
    ... def rows(connection: object) -> int:
    ...     return 1
    >>> rows(object())
    Traceback (most recent call last):
    stampede.errors.KeyingError: rows: parameter 'connection': builtins:object has no stable identity: ...
    """


class CodecError(StampedeError, TypeError):
    """A value that the codec can't encode, or bytes that it refuses to decode.

    >>> cache.set("k", open)  # raises if strict, the default in isolated(); else memory:// logs a warning
    Traceback (most recent call last):
    stampede.errors.CodecError: ...
    """


class TooLarge(CodecError):
    """A value larger than `max_bytes` or the engine's own limit. Callers get it, but it is not stored.

    >>> Cache(max_bytes=100, strict=True).set("k", "x" * 1000)
    Traceback (most recent call last):
    stampede.errors.TooLarge: the value takes ... bytes: more than max_bytes, 100
    """


class EngineError(StampedeError, ConnectionError):
    """An engine that can't be used, because it is down, hung, full, or refuses the request.

    >>> cache = Cache()
    >>> cache.close()
    >>> try:
    ...     cache.invalidate("k")
    ... except ConnectionError as error:
    ...     print(type(error).__name__)
    EngineClosed
    """

    partial = False  # True: only some keys are affected, as one of several servers is down; other keys still work
    unsure = False  # True: the connection broke before the reply, so a second try could make the same change twice
    refused = False  # True: it answers, but is full and stores nothing new; what it holds can be invalidated


class EngineClosed(EngineError):
    """An engine that was closed in this process, for good. No fallback replaces it, and waiters get this error too.

    >>> cache = Cache()
    >>> cache.close()
    >>> cache.set("k", 1)
    Traceback (most recent call last):
    stampede.errors.EngineClosed: memory: the engine was closed: open another Cache, or call configure() again, ...
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name}: the engine was closed: open another Cache, or call configure() again, "
            "for example in the lifespan function that closed it"
        )


class WaitTimeout(StampedeError, TimeoutError):
    """A value that was not there when `wait` or `deadline` ran out.

    >>> try:  # with wait=5, while another caller computes the value
    ...     raise WaitTimeout("another caller has been computing 'k' for 5 s, and wait ran out")
    ... except TimeoutError as error:
    ...     print(error)
    another caller has been computing 'k' for 5 s, and wait ran out
    """


class Absent(StampedeError, KeyError):
    """An id for which a function of many ids (`@cached.many`) has no value.

    >>> @cached.many
    ... def users(ids: list[int]) -> dict[int, str]:
    ...     return {}
    >>> users([5]), issubclass(stampede.Absent, LookupError)
    ({}, True)
    >>> users.one(5)
    Traceback (most recent call last):
    stampede.errors.Absent: ...
    """

    __str__ = Exception.__str__  # KeyError's own shows the message's repr


class LockTimeout(StampedeError, TimeoutError):
    """A lock that was still held by another caller when `wait` ran out.

    >>> with cache.lock("nightly"), cache.lock("nightly", wait=0):
    ...     pass
    Traceback (most recent call last):
    stampede.errors.LockTimeout: the lock 'nightly' is already held, and wait ran out: 0 s
    """


class LockLost(StampedeError, RuntimeError):
    """A lock that ended before its block did, so that another caller may have been inside as well.

    >>> cache.lock("nightly").release()
    Traceback (most recent call last):
    stampede.errors.LockLost: the lock 'nightly' is not held through this object: released, or never acquired
    """


class LimitTimeout(StampedeError, TimeoutError):
    """A limit that allowed no further start within `wait`. `seconds` is the time until the next possible start.

    >>> with cache.limiter("github", max=1, per=60), cache.limiter("github", max=1, per=60, wait=0):
    ...     pass
    Traceback (most recent call last):
    stampede.errors.LimitTimeout: the limit 'github' allows 1 per 60 s, and wait ran out: 0 s; the next start is in ...
    """

    def __init__(self, message: str, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds

    def __reduce__(self) -> tuple[type[LimitTimeout], tuple[str, float]]:
        return type(self), (str(self), self.seconds)


class OriginFull(StampedeError, TimeoutError):
    """An origin with as many computations as its settings allow, and no stale value to serve instead.

    >>> try:  # with when_full = "raise", or when wait has run out
    ...     raise OriginFull("the origin 'orders-db' is full")
    ... except TimeoutError as error:
    ...     print(error)
    the origin 'orders-db' is full
    """

    may_be_covered = True  # a stale value may be served instead


WAY_OUT = "ask for another key, or call the undecorated function, its __wrapped__"


class RecursiveComputation(StampedeError, RecursionError):
    """A computation that asked for its own key.

    >>> @cached
    ... def count(n: int) -> int:
    ...     return count(n) + 1
    >>> count(1)
    Traceback (most recent call last):
    stampede.errors.RecursiveComputation: the computation of ... asked for its own key: ...
    """


class NoComputation(StampedeError, RuntimeError):
    """`stampede.current()` was called outside a computation, or asked for something that is not stored.

    >>> stampede.current()
    Traceback (most recent call last):
    stampede.errors.NoComputation: current() was called outside a cached function: ...
    """


class ComputationFailed(StampedeError, RuntimeError):
    """A computation that failed in another call, just now or in another process: with `type_name` and `message`.

    >>> print(ComputationFailed("row(5)", "shop.NoRow", "5"))
    computing 'row(5)' failed in another call: shop.NoRow: 5 (if this is an answer and no fault, give
    raises=shop.NoRow: then every caller gets the exception itself)
    """

    def __init__(self, key: str, type_name: str, message: str) -> None:
        super().__init__(key, type_name, message)
        self.key = key
        self.type_name = type_name
        self.message = message

    def __str__(self) -> str:
        text = f"computing {self.key!r} failed in another call: {self.type_name}: {self.message}"
        if not self.type_name or self.type_name.startswith("stampede."):
            return text
        name = self.type_name.removeprefix("builtins.")
        return (
            f"{text} (if this is an answer and no fault, give raises={name}: "
            "then every caller gets the exception itself)"
        )
