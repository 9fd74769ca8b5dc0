"""Flask-Caching: its `Cache`, of which concurrent callers of a view or a function share one computation.

from stampede.contrib.flask_caching import Cache

cache = Cache(config={
    "CACHE_TYPE": "stampede.contrib.flask_caching.StampedeCache",
    "CACHE_STAMPEDE_URL": "redis://localhost:6379/0",
})"""

from __future__ import annotations

import functools
import hashlib
import hmac
import inspect
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from math import inf
from typing import TYPE_CHECKING, Any

import flask_caching
from flask import Flask
from flask_caching.backends.base import BaseCache
from flask_caching.utils import join_generator, normalize_timeout
from werkzeug.exceptions import HTTPException

from stampede.api.current import current
from stampede.contrib import cachelib
from stampede.errors import EngineError, RecursiveComputation
from stampede.model.result import LeftOut
from stampede.settings.options import LONGEST

__all__ = ["Cache", "StampedeCache"]

_log = logging.getLogger("stampede")
_MISSING = object()


class StampedeCache(cachelib.StampedeCache, BaseCache):
    """A backend for Flask-Caching on one of our engines. The application's settings are:

    - `CACHE_STAMPEDE_URL` (default: `memory://`): the engine;
    - `CACHE_KEY_PREFIX`: the namespace. Applications of one namespace on one engine share their keys;
    - `SECRET_KEY`: signs what is stored, so that it may be any object that pickle can store. Set it before the cache is
      made: without it, responses of views can't be stored. `SECRET_KEY_FALLBACKS` are
      still accepted. An application without them stores only values that `codec="sealed"` knows;
    - `CACHE_OPTIONS`: further arguments of `stampede.Cache`, such as `{"stale": "1h", "local": True}`.

    >>> from flask import Flask
    >>> from stampede.contrib.flask_caching import Cache
    >>> app = Flask("shop")
    >>> app.config["CACHE_TYPE"] = "stampede.contrib.flask_caching.StampedeCache"
    >>> cache = Cache(app)
    >>> cache.set("tea", 3), cache.get("tea")
    (True, 3)
    """

    @classmethod
    def factory(cls, app: Flask, config: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> StampedeCache:
        """Make the backend of an application. Flask-Caching calls this."""
        if not args:
            kwargs.setdefault("url", config.get("CACHE_STAMPEDE_URL", "memory://"))
        kwargs.setdefault("namespace", config["CACHE_KEY_PREFIX"])
        known = [app.secret_key, *(app.config.get("SECRET_KEY_FALLBACKS") or ())]
        if keys := [_derived(secret) for secret in known if secret]:
            kwargs.setdefault("signing_key", keys)
        return cls(*args, **kwargs)


def _derived(secret: str | bytes) -> bytes:
    """Return a key for this purpose only: what is signed here can't be passed off as a session, nor the reverse."""
    return hmac.digest(secret.encode() if isinstance(secret, str) else secret, __name__.encode(), "sha256")


class Cache(flask_caching.Cache):
    """Flask-Caching's `Cache`. With the backend `StampedeCache`, concurrent callers of a function that `cached` or
    `memoize` decorates share one computation, in all processes. With other backends it is Flask-Caching's own.

    All options work as they do there. A call that `unless` excludes, and one with `forced_update`, computes for itself.
    What `response_filter` refuses is shared with no other request: each caller computes it.

    >>> from flask import Flask
    >>> from stampede.contrib.flask_caching import Cache
    >>> app = Flask("shop")
    >>> cache = Cache(app, config={"CACHE_TYPE": "stampede.contrib.flask_caching.StampedeCache"})
    >>> @app.get("/report")
    ... @cache.cached(timeout=60)
    ... def report():
    ...     return "computed once"
    >>> app.test_client().get("/report").text
    'computed once'
    """

    # Flask-Caching's decorated functions do everything but the computation: they make the key, `get` the value, call
    # the function if there is none, and `set` its value. We see the key in `get`. What a flight has stored is not `set`
    # again: it may have been invalidated meanwhile.

    if not TYPE_CHECKING:  # type checkers see the signatures of Flask-Caching

        @functools.wraps(flask_caching.Cache.cached)
        def cached(self, *args: Any, **kwargs: Any) -> Any:
            return self._shared(super().cached, args, kwargs, (HTTPException,))

        @functools.wraps(flask_caching.Cache.memoize)
        def memoize(self, *args: Any, **kwargs: Any) -> Any:
            return self._shared(super().memoize, args, kwargs)

    def _shared(self, decorate: Any, args: Any, kwargs: Any, answers: Any = ()) -> Callable[[Any], Any]:
        """Return Flask-Caching's decorator, for functions whose callers share a computation. Exceptions of the types in
        `answers` are values."""
        options = inspect.signature(decorate).bind(*args, **kwargs).arguments
        accept, keeps_none = options.get("response_filter"), options.get("cache_none", False)
        for name in ("unless", "make_cache_key", "make_name"):
            if callable(options.get(name)):
                options[name] = _apart(options[name])
        if callable(options.get("forced_update")):
            options["forced_update"] = self._noting_force(_apart(options["forced_update"]))
        if callable(options.get("is_stale")):
            options["is_stale"] = _noting_stale(_apart(options["is_stale"]))

        def accepts(value: Any) -> bool:
            with _outside():
                return accept is None or bool(accept(value.get_response() if isinstance(value, answers) else value))

        def storable(value: Any) -> bool:
            return (value is not None or keeps_none) and accepts(value)

        def should_set(value: Any) -> bool:
            call = _current.get()
            return accepts(value) if call is None or not call.shared else call.stored

        def decorator(function: Callable[..., Any]) -> Any:
            @functools.wraps(function)
            def computed(*args: Any, **kwargs: Any) -> Any:
                call, backend = _current.get(), self._backend()
                run = functools.partial(self.app.ensure_sync(function), *args, **kwargs)
                if backend is None or call is None or not call.key:
                    with _outside():
                        return run()
                call.shared = True
                return call.value_of(backend, run, storable)

            theirs = decorate(**{**options, "response_filter": should_set})(computed)

            @functools.wraps(theirs)
            def decorated(*args: Any, **kwargs: Any) -> Any:
                theirs.cache_timeout = ours.cache_timeout  # both may be set
                theirs.make_cache_key = _apart(ours.make_cache_key)
                before = _current.get()
                _current.set(_Call(theirs.cache_timeout, answers, debug=self.app.debug))
                try:
                    return theirs(*args, **kwargs)
                finally:
                    _current.set(before)

            ours: Any = decorated
            return ours

        return decorator

    def _backend(self) -> cachelib.StampedeCache | None:
        backend: object = self.cache
        return backend if isinstance(backend, cachelib.StampedeCache) else None

    def _noting_force(self, condition: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forced_update`, which notes in the call that it is true. Then it returns False: so Flask-Caching asks
        `get` for the value, as it does for other calls, and we see the key."""

        @functools.wraps(condition)
        def noting(*args: Any, **kwargs: Any) -> Any:
            result, call = condition(*args, **kwargs), _current.get()
            if call is None or self._backend() is None or result is not True:
                return result
            call.forced = True
            return False

        return noting

    # -- Flask-Caching's verbs, as its decorated functions use them ---------------------------------------------------

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Return the value from the backend, or None."""
        call, backend = _current.get(), self._backend()
        if call is None or backend is None:
            return super().get(*args, **kwargs)
        key: str = args[0] if args else kwargs["key"]
        stored = _MISSING if call.forced else backend.cache.get(key, _MISSING)
        value = _MISSING if stored is _MISSING else backend.loads(stored, _MISSING)
        call.key, call.stored_before, call.missing = key, stored, value is _MISSING
        return None if call.missing else value

    def has(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether the backend has the value."""
        call = _current.get()
        if call is not None and args == (call.key,):
            return not call.missing  # since then, another caller may have stored a value that is not None
        return super().has(*args, **kwargs)

    def set(self, *args: Any, **kwargs: Any) -> bool | None:
        """Store the value in the backend."""
        call = _current.get()
        if call is not None and call.stored and args[:1] == (call.key,):
            return True
        return super().set(*args, **kwargs)

    def get_many(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the values from the backend."""
        call, backend, found = _current.get(), self._backend(), super().get_many(*args, **kwargs)
        if call is None or backend is None:
            return found
        for index, key in enumerate(args):
            if found[index] is None and key.endswith(_VERSION):  # all concurrent callers must get the same new one
                found[index] = backend.loads(backend.cache.get_or_compute(key, lambda: _version(backend), ttl=None))
        call.versions = dict(zip(args, found, strict=True))
        return found

    def set_many(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Store the values in the backend."""
        call, backend = _current.get(), self._backend()
        if call is None or backend is None or args[:1] != (call.versions,):
            return super().set_many(*args, **kwargs)
        return _prolong(backend, *args, **kwargs)


_VERSION = "_memver"
"""How the keys end under which Flask-Caching stores the versions of memoized functions."""


def _version(backend: cachelib.StampedeCache) -> bytes | int:
    return backend.dumps(secrets.token_urlsafe(4))


def _prolong(backend: cachelib.StampedeCache, versions: dict[str, Any], timeout: Any = None) -> list[Any]:
    """Let versions live as long as the value that was stored under them, also while it is stale. One that
    `delete_memoized` has changed meanwhile stays changed."""
    seconds = backend.seconds(timeout)
    ttl = None if seconds is None else min(seconds + backend.cache.policy.stale, LONGEST)
    with suppress(EngineError):  # what was computed meanwhile is stored here only, for a few seconds
        for key in versions:
            backend.cache.touch(key, ttl=ttl)
    return list(versions)


class _Call:
    """One call of a decorated function."""

    def __init__(self, timeout: Any, answers: tuple[type[Exception], ...], *, debug: bool) -> None:
        self.timeout = timeout
        self.answers = answers
        self.debug = debug
        self.key = ""  # the key that was looked up last
        self.stored_before: Any = _MISSING  # what is stored for it, as the backend has it
        self.missing = True  # there was no value
        self.versions: dict[str, Any] = {}  # of the memoized function, by key, as they were read last
        self.forced = False  # it computes for itself: `forced_update` is true
        self.anew = False  # the stored value is not wanted: `is_stale` is true
        self.shared = False  # it asked the engine who is to compute
        self.stored = False  # it computed the value that is stored
        self.value: Any = _MISSING  # what it computed

    def value_of(self, backend: cachelib.StampedeCache, run: Callable[[], Any], storable: Callable[[Any], bool]) -> Any:
        """Return the value that this call or another one computes, or raise it if it is an exception."""
        cache, key, ttl = backend.cache, self.key, backend.seconds(normalize_timeout(self.timeout))
        compute = functools.partial(self.compute, backend, run, storable)
        refresh = functools.partial(cache.refresh, key, compute, ttl=ttl)
        try:
            if self.forced:
                found = refresh()
            elif self.anew:  # callers that refuse one stored value share the next; a deletion parts older from newer
                refused = hashlib.sha256(repr(self.stored_before).encode()).hexdigest()
                found = cache.get_or_compute(f"{key} anew {refused}", refresh, ttl=0)
            else:
                found = cache.get_or_compute(key, compute, ttl=ttl)
        except LeftOut:
            value = self.value
        except RecursiveComputation:
            if self.value is not _MISSING:
                raise
            with _outside():
                return run()  # of two functions of one key, the outer one is stored
        else:
            self.stored = self.value is not _MISSING
            value = self.value if self.stored else backend.loads(found, _MISSING)
            if value is _MISSING:  # a class has changed: replace the value
                self.anew, self.stored_before = True, found
                return self.value_of(backend, run, storable)
        if isinstance(value, self.answers):
            raise value
        return value

    def compute(self, backend: cachelib.StampedeCache, run: Callable[[], Any], storable: Callable[[Any], bool]) -> Any:
        """Return what is to be stored. LeftOut: nothing is, so callers that wait for it compute for themselves."""
        with _outside():
            try:
                value = run()
            except self.answers as answer:
                value = answer
            self.value = value = join_generator(value) if inspect.isgenerator(value) else value
            if not storable(value):
                raise LeftOut
            try:
                data = backend.dumps(value)
            except Exception as error:  # pickle raises errors of many types
                if self.debug:
                    raise
                _log.error("%r can't be stored, so each caller computes it: %r", self.key, error)
                raise LeftOut from None
            if isinstance(value, flask_caching.CachedResponse) and value.timeout:
                ttl = backend.seconds(value.timeout)
                current().ttl = inf if ttl is None else ttl
            return data


_current: ContextVar[_Call | None] = ContextVar("stampede_flask_caching", default=None)


@contextmanager
def _outside() -> Iterator[None]:
    """Run a block outside of the current call: what the block looks up and stores is not that of the call."""
    call = _current.get()
    _current.set(None)
    try:
        yield
    finally:
        _current.set(call)


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the user's that a decorated function calls before it computes. What it looks up does not
    become the key of the call. If it fails, the call has no key: Flask-Caching then computes, and stores nothing."""

    @functools.wraps(function)
    def apart(*args: Any, **kwargs: Any) -> Any:
        call = _current.get()
        try:
            with _outside():
                return function(*args, **kwargs)
        except Exception:
            if call is not None:
                call.key = ""
            raise

    return apart


def _noting_stale(condition: Callable[..., Any]) -> Callable[..., Any]:
    """Return `is_stale`, which notes in the call that it is true."""

    @functools.wraps(condition)
    def noting(*args: Any, **kwargs: Any) -> Any:
        result, call = condition(*args, **kwargs), _current.get()
        if call is not None and result is True:
            call.anew = True
        return result

    return noting
