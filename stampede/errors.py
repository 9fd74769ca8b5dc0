"""The tree of errors: each is also of the builtin family that a Python user expects."""

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
    """Whatever this library raises by itself.

    >>> try:
    ...     cached(ttl=-1)
    ... except stampede.StampedeError as error:
    ...     print(error)
    ttl is -1: it must be at least 0
    """


class OptionError(StampedeError, ValueError):
    """An option that can't be: its name, its value and the remedy are in the message.

    >>> cached(tll=60)
    Traceback (most recent call last):
    stampede.errors.OptionError: @cached has no option 'tll': did you mean 'ttl'?
    """


class SettingsError(OptionError):
    """A settings file, or an argument of `configure`, that can't be used.

    >>> Cache(tll=60)
    Traceback (most recent call last):
    stampede.errors.SettingsError: Cache(): tll: there is no such setting: did you mean 'ttl'?
    """


class MissingExtra(StampedeError, ImportError):
    """An engine or codec whose package is not installed; the message holds its pip line.

    >>> try:  # Cache("redis://localhost"), where it isn't installed
    ...     raise MissingExtra("redis:// needs the package 'redis': pip install 'stampede-guard[redis]'")
    ... except ImportError as error:
    ...     print(error)
    redis:// needs the package 'redis': pip install 'stampede-guard[redis]'
    """


class UnsupportedPatch(StampedeError, RuntimeError):
    """The program was patched by eventlet, which this library does not support; the message says what to use instead.

    >>> issubclass(UnsupportedPatch, RuntimeError)
    True
    """


class KeyingError(StampedeError, TypeError):
    """An argument that has no stable identity; the message names the parameter.

    >>> @cached
    ... def rows(connection: object) -> int:
    ...     return 1
    >>> rows(object())
    Traceback (most recent call last):
    stampede.errors.KeyingError: rows: parameter 'connection': builtins:object has no stable identity: ...
    """


class CodecError(StampedeError, TypeError):
    """A value that the codec can't hold, or bytes that it doesn't believe.

    >>> cache.set("k", open)  # in tests, and with strict=True; elsewhere memory:// warns
    Traceback (most recent call last):
    stampede.errors.CodecError: ...
    """


class TooLarge(CodecError):
    """A value above `max_bytes` or the engine's own limit: it goes to its callers, and is not stored.

    >>> Cache(max_bytes=100, strict=True).set("k", "x" * 1000)
    Traceback (most recent call last):
    stampede.errors.TooLarge: the value takes ... bytes: more than max_bytes, 100
    """


class EngineError(StampedeError, ConnectionError):
    """The engine can't be asked: it is down, hung, full, or refuses us.

    >>> cache = Cache()
    >>> cache.close()
    >>> try:
    ...     cache.invalidate("k")
    ... except ConnectionError as error:
    ...     print(type(error).__name__)
    EngineClosed
    """

    partial = False  # True: so it is with a part of its keys, as one of several servers is down; others may be asked
    unsure = False  # True: the connection broke before the reply, and a second try could do the same change again
    refused = False  # True: it has answered, and takes nothing new, as it is full; others may invalidate what it has


class EngineClosed(EngineError):
    """The engine was closed here, for good: nothing is served in its place, and who waited for it waits no more.

    >>> cache = Cache()
    >>> cache.close()
    >>> cache.set("k", 1)
    Traceback (most recent call last):
    stampede.errors.EngineClosed: memory: the engine was closed: open another Cache, or call configure() again, ...
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name}: the engine was closed: open another Cache, or call configure() again, "
            "as in the lifespan that has closed it"
        )


class WaitTimeout(StampedeError, TimeoutError):
    """Somebody else computes, and `wait` ran out.

    >>> try:  # with wait=: somebody else has computed it for so long
    ...     raise WaitTimeout("somebody else has been computing 'k' for 5 s, and wait ran out")
    ... except TimeoutError as error:
    ...     print(error)
    somebody else has been computing 'k' for 5 s, and wait ran out
    """


class Absent(StampedeError, KeyError):
    """A function of many ids (`@cached.many`) has nothing for the one that was asked for.

    >>> @cached.many
    ... def users(ids: list[int]) -> dict[int, str]:
    ...     return {}
    >>> users([5]), issubclass(stampede.Absent, LookupError)
    ({}, True)
    >>> users.one(5)
    Traceback (most recent call last):
    stampede.errors.Absent: ...
    """

    __str__ = Exception.__str__  # a KeyError's is its repr


class LockTimeout(StampedeError, TimeoutError):
    """Somebody else holds the lock, and `wait` ran out.

    >>> with cache.lock("nightly"), cache.lock("nightly", wait=0):
    ...     pass
    Traceback (most recent call last):
    stampede.errors.LockTimeout: the lock 'nightly' is already held, and wait ran out: 0 s
    """


class LockLost(StampedeError, RuntimeError):
    """The lock ended before its block did: somebody else may have been inside.

    >>> cache.lock("nightly").release()
    Traceback (most recent call last):
    stampede.errors.LockLost: the lock 'nightly' is not held through this object: released, or never acquired
    """


class LimitTimeout(StampedeError, TimeoutError):
    """As many have started as the limit allows, and `wait` ran out; `seconds` until the next may.

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
    """An origin has as many computations as its settings allow, and there is nothing to serve meanwhile.

    >>> try:  # with when_full = "raise", or when wait has run out
    ...     raise OriginFull("the origin 'orders-db' is full")
    ... except TimeoutError as error:
    ...     print(error)
    the origin 'orders-db' is full
    """

    may_be_covered = True  # by what is stale


WAY_OUT = "ask for another, or call the function itself, as its __wrapped__"


class RecursiveComputation(StampedeError, RecursionError):
    """A computation asked for its own key.

    >>> @cached
    ... def count(n: int) -> int:
    ...     return count(n) + 1
    >>> count(1)
    Traceback (most recent call last):
    stampede.errors.RecursiveComputation: the computation of ... asked for its own key: ...
    """


class ComputationFailed(StampedeError, RuntimeError):
    """The computation failed in another call, a moment ago or elsewhere; `type_name` and `message` tell how.

    >>> print(ComputationFailed("row(5)", "shop.NoRow", "5"))
    computing 'row(5)' failed in another call: shop.NoRow: 5 (where that is an answer, and no fault, say
    raises=shop.NoRow: then every caller gets it as itself)
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
        return f"{text} (where that is an answer, and no fault, say raises={name}: then every caller gets it as itself)"
