"""The decorator: one function's keys, its place in a cache, and its verbs.

Hits are answered by generated code (`hot.py`). All else, a miss, an argument of another type, an entry whose moment
has come, takes the slow way through the function's `Scope`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from stampede import forks
from stampede.batch import fetch_many
from stampede.codec import make_codec, returns_of
from stampede.colour import BLOCKING, SUSPENDING, Stopped, run_blocking
from stampede.core import Scope
from stampede.entry import Entry
from stampede.errors import EngineClosed, KeyingError, OptionError
from stampede.hot import Hot
from stampede.keys import Parameters, identity_of, in_namespace, key_maker, quoted, scope_name
from stampede.loaders import OneByOne
from stampede.local import Resident
from stampede.namesakes import Namesakes, told_apart
from stampede.outcome import empty, landed
from stampede.policy import DEFAULT, OPTIONS, Policy, nearest
from stampede.settings.checks import CACHE, checked

__all__ = ["Cached", "Home", "decorate", "disabled", "switch", "unbind_all"]

_log = logging.getLogger("stampede")

KEYING = ("key", "version", "namespace", "ignore")
CODING = ("codec", "trust", "signing_key", "compress", "max_bytes")


class Home(Protocol):
    """The cache in which a function keeps its values."""

    namespace: str
    policy: Policy
    namesakes: Namesakes

    def scope(
        self, name: str, policy: Policy, returns: Any = None, *, called: str | None = None, **codec: Any
    ) -> Scope: ...
    def stats_of(self, scope: str) -> Any: ...


def decorate(function: Any, find: Callable[[], Home], options: Mapping[str, Any], namesakes: Namesakes) -> Any:
    """`@cached` with or without arguments. `find` is asked for the cache at the first call; `namesakes` are the
    functions that are known to be decorated for it."""
    if function is None:
        Cached.check(options)  # a wrong option is an error of this line, not of the next
        return lambda function: decorate(function, find, options, namesakes)
    if isinstance(function, staticmethod):
        return staticmethod(Cached(function.__func__, find, options).among(namesakes).plain())
    if isinstance(function, classmethod):
        return Method(Cached(function.__func__, find, options, bound=True).among(namesakes), by_class=True)
    cached = Cached(function, find, options, bound=_in_class_body(function)).among(namesakes)
    return Method(cached) if cached.bound else cached.plain()


def _in_class_body(function: Any) -> bool:
    home = getattr(function, "__qualname__", "").rpartition(".")[0]
    return bool(home) and not home.endswith("<locals>")


def _refuse(function: Any) -> None:
    """OptionError, with the remedy, for what is no function."""
    if isinstance(function, (property, functools.cached_property)):
        raise OptionError("@cached stands on a property: put it below, between @property and the def")
    if isinstance(function, functools.partial):
        raise OptionError(f"@cached stands on {function!r}, whose name is another's: write a def that calls it")
    if isinstance(function, type):
        raise OptionError(
            f"@cached stands on the class {function.__qualname__}: all would share one object. Put it on the methods "
            "that are expensive, or on a def that makes one"
        )
    if not callable(function) or not hasattr(function, "__qualname__"):
        raise OptionError(f"@cached stands on {function!r}: it goes on a def (its options are named: @cached(ttl=60))")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise OptionError(
            f"{function.__qualname__} is a generator function: what it yields can be had only once. Return a list of it"
        )


class Cached:
    """One decorated function."""

    def __init__(
        self, function: Callable[..., Any], find: Callable[[], Home], options: Mapping[str, Any], *, bound: bool = False
    ) -> None:
        _refuse(function)
        self.check(options)
        key = options.get("key")
        self.function = function
        self.options = dict(options)
        self.bound = bound
        self.suspending = inspect.iscoroutinefunction(function)
        self._of_class = bound and next(iter(inspect.signature(function).parameters), None) == "cls"
        self.colour = SUSPENDING if self.suspending else BLOCKING
        self.parameters = Parameters(function, options.get("ignore", ()))
        # A key function may look at more than the arguments: a tenant in a context, the day of the week.
        pure = key is None or isinstance(key, str)
        self.hot = Hot(function, self.parameters, suspending=self.suspending, bound=bound, pure=pure)
        self._find = find
        self._lock = threading.RLock()  # a finalizer that runs in the middle of binding may call the function
        self._home: Home | None = None
        self._identity = told_apart(identity_of(function, options.get("ignore", ())))
        self._scope: Scope | None = None
        self._make_key: Callable[..., str] | None = None
        # What verbs don't ask for: parameters that are no part of the key, but for the object that they are bound to.
        absent = self.parameters.absent(key)
        self._absent = absent.difference(self.parameters.names[:1]) if bound else absent
        if isinstance(key, str):
            self._key_maker("")  # a field that the signature can't fill is an error of this line
        _all.add(self)
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._lock = threading.RLock()  # a thread that was binding is not here to open it

    def among(self, namesakes: Namesakes) -> Cached:
        """One of those that are decorated for one cache: OptionError if it would be served what another computes."""
        if self.options.get("key") is None and self._identity.whole:
            namesakes.add(self._name(str(self.options.get("namespace", ""))), self._identity)
        return self

    def _name(self, namespace: str) -> str:
        return scope_name(namespace, self._identity, self.options.get("version"))

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Refuse at decoration what can be known to be wrong then."""
        known = [*KEYING, *CODING, *OPTIONS]
        for name in options:
            if name not in known:
                raise OptionError(f"@cached has no option {name!r}: {nearest(name, known)}")
        DEFAULT.with_options(**_among(options, OPTIONS))
        coding = checked(_among(options, CODING), CACHE)
        if coding.get("codec", "pickle") != "pickle":
            make_codec(coding["codec"])  # or its package is missing, or it is no codec
        for name in ("version", "namespace"):
            value = options.get(name, "")
            if not isinstance(value, (str, int)):
                raise OptionError(f"{name} is {value!r}: give a string or a number")

        key = options.get("key")
        if key is not None and not isinstance(key, str) and not callable(key):
            raise OptionError(f"key is {key!r}: give a function of the arguments, or a format string")

    def _key_maker(self, prefix: str) -> Callable[..., str]:
        ignore, key = self.options.get("ignore", ()), self.options.get("key")
        return key_maker(self.function, prefix=prefix, ignore=ignore, key=key, bound=self.bound)

    # -- binding: the cache is found at the first call, and again after `configure` -------------------------------

    @property
    def home(self) -> Home:
        self.scope  # noqa: B018  binds
        assert self._home is not None
        return self._home

    @property
    def scope(self) -> Scope:
        scope = self._scope
        return scope if scope is not None else self._bind()

    def _bind(self) -> Scope:
        home = self._find()
        with self._lock:
            if self._scope is None or self._home is not home:
                if not (
                    self._identity.named or self._identity.whole
                ):  # what was missing when it was decorated is there now
                    self._identity = told_apart(identity_of(self.function, self.options.get("ignore", ())))
                namespace = str(self.options.get("namespace", home.namespace))
                name = called = self._name(namespace)
                if self.options.get("key") is None:
                    home.namesakes.add(name, self._identity)
                    prefix = f"{name}:"
                else:
                    name, prefix = quoted(namespace), in_namespace(namespace, "")  # a cache's own key
                policy = home.policy.with_options(**_among(self.options, OPTIONS))
                coding = checked(_among(self.options, CODING), CACHE)
                self._make_key = self._key_maker(prefix)
                self._scope = home.scope(name, policy, returns_of(self.function), called=called, **coding)
                self._home = home
            return self._scope

    def unbind(self) -> None:
        """Forget the cache: the next call finds it again."""
        with self._lock:
            self._home = self._scope = None
            self.hot.fast.clear()

    def key(self, /, *args: Any, **kwargs: Any) -> str:
        """The key of these arguments; of those that are a part of it, as in the other verbs."""
        if not self._absent:
            return self.key_of_call(*args, **kwargs)
        signature = inspect.signature(self.function)
        parts = [part for name, part in signature.parameters.items() if name not in self._absent]
        given = signature.replace(parameters=parts).bind(*args, **kwargs)
        whole = signature.bind_partial()
        whole.arguments = {
            name: None if name in self._absent else given.arguments[name]
            for name in signature.parameters
            if name in self._absent or name in given.arguments
        }
        return self.key_of_call(*whole.args, **whole.kwargs)

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
        if switch.off:
            return self.function(*args, **kwargs)
        closed = scope = None
        while True:
            try:
                scope, key, found = self._look(args, kwargs)
                if found is not None:
                    return found.value
                return landed(run_blocking(self._fetch(scope, key, args, kwargs)), scope.policy)
            except EngineClosed:
                closed = self._other_than(closed, scope)

    async def slow_async(self, /, *args: Any, **kwargs: Any) -> Any:
        """The same, suspending."""
        if switch.off:
            return await self.function(*args, **kwargs)
        closed = scope = None
        while True:
            try:
                scope, key, found = self._look(args, kwargs)
                if found is not None:
                    return found.value
                return landed(await self._fetch(scope, key, args, kwargs), scope.policy)
            except EngineClosed:
                closed = self._other_than(closed, scope)

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Scope, str, Resident | Entry[Any] | None]:
        """Where the value of these arguments belongs, and what is at hand of it."""
        scope = self.scope
        key = self.key_of_call(*args, **kwargs)
        found = scope.at_hand(key)
        if isinstance(found, Resident):
            self._take_home(scope, found, args, kwargs)
        return scope, key, found

    def _other_than(self, closed: Home | None, scope: Scope | None) -> Home:
        """The cache to be tried now, where `configure` has closed one under a call; or the error, if it is the same.

        The error is another engine's, which the function has asked, if the one of `scope` isn't closed.
        """
        home = self._find()
        if home is closed or (scope is not None and not scope.core.closed):
            raise
        self.unbind()  # who was binding while it was closed has bound to the closed one
        return home

    def _fetch(
        self, scope: Scope, key: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, force: bool = False
    ) -> Any:
        caller = _Caller(self, scope, args, kwargs)
        return scope.fetch(self.colour, key, caller, None, force=force, home=caller)

    def _take_home(self, scope: Scope, resident: Resident, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the next call with these arguments find the resident by itself, if it can tell them exactly."""
        tier = scope.core.front.tier
        fast = None if resident.homes or tier is None else self.hot.key(args, kwargs)
        if fast is not None and tier is not None:
            tier.adopt(resident, self.hot.fast, fast)
            if self._scope is not scope:
                self.hot.fast.pop(fast, None)  # unbound meanwhile

    # -- the other verbs ------------------------------------------------------------------------------------------

    def _run(self, work: Any) -> Any:
        return work if self.suspending else run_blocking(work)

    def peek(self, /, *args: Any, **kwargs: Any) -> Any:
        """The entry that is kept for these arguments, fresh or stale; nobody computes."""
        return self._run(self.scope.peek(self.colour, self.key(*args, **kwargs)))

    def refresh(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute and store now, whatever is there and whoever is computing."""
        return self._run(self._refresh(args, kwargs))

    async def _refresh(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scope = self.scope
        return landed(
            await self._fetch(scope, self.key_of_call(*args, **kwargs), args, kwargs, force=True), scope.policy
        )

    def set(self, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Store this value for these arguments."""
        return self._run(self.scope.put(self.colour, self.key(*args, **kwargs), value))

    def expire(self, /, *args: Any, **kwargs: Any) -> Any:
        """Stale from now on, and served while one caller computes."""
        return self._run(self.scope.expire(self.colour, self.key(*args, **kwargs)))

    def invalidate(self, /, *args: Any, **kwargs: Any) -> Any:
        """Gone, also what is being computed. `via=on_commit` hands it to a hook that calls it later, blocking."""
        via = kwargs.pop("via", None) if self._takes_hook(kwargs.get("via")) else None
        key = self.key(*args, **kwargs)
        if via is None:
            return self._run(self.scope.invalidate(self.colour, key))
        via(lambda: run_blocking(self.scope.invalidate(BLOCKING, key)))
        return self._run(_nothing())

    def _takes_hook(self, via: object) -> bool:
        """It may be an argument of the function's, too."""
        return "via" not in self.parameters.names and (callable(via) or not self.parameters.open)

    def invalidate_all(self) -> Any:
        """Every value of this function is gone, in every process."""
        if self.options.get("key") is not None:
            raise OptionError(
                f"the keys of {self.function.__qualname__} are its cache's own, as it has a key=: nobody knows which "
                "they are. Invalidate them one by one, or clear() the cache (of a namespace that is its alone)"
            )
        return self._run(self.scope.bump(self.colour))

    def many(self, calls: Iterable[Iterable[Any]]) -> Any:
        """The values of many calls, each a tuple of arguments, in their order."""
        return self._run(self._many([_arguments(call) for call in calls]))

    async def _many(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        if switch.off:
            return [await self.colour.call(functools.partial(self.function, *args)) for args in calls]
        closed = scope = None
        while True:
            try:
                scope = self.scope
                return await self._all_of(scope, calls)
            except EngineClosed:
                closed = self._other_than(closed, scope)

    async def _all_of(self, scope: Scope, calls: list[tuple[Any, ...]]) -> list[Any]:
        keys = [self.key_of_call(*args) for args in calls]
        wanted = dict(zip(keys, calls, strict=True))
        values = {key: found.value for key in wanted if (found := scope.at_hand(key)) is not None}
        missing = [key for key in wanted if key not in values]
        loader = OneByOne(self.colour, {key: functools.partial(self.function, *wanted[key]) for key in missing})
        landings = await fetch_many(scope, self.colour, missing, loader, scope.policy)
        try:
            values |= {key: landed(landings[key], scope.policy) for key in missing if key in landings}
        except StopIteration as end:  # a function's own
            empty(landings)
            raise Stopped(end) from end
        except BaseException:
            empty(landings)  # one error may be that of many keys
            raise
        return [values[key] for key in keys]

    def stats(self) -> Any:
        """Counts of this function in this process."""
        return self.home.stats_of(self.scope.called)

    # -- the faces: a plain function, or a descriptor -------------------------------------------------------------

    @property
    def slowly(self) -> Callable[..., Any]:
        return self.slow_async if self.suspending else self.slow

    def plain(self) -> Any:
        """A function like the decorated one, with the verbs as its attributes."""
        wrapper: Any = self.hot.call(self.slowly)
        functools.update_wrapper(wrapper, self.function)
        for verb in VERBS:
            setattr(wrapper, verb, getattr(self, verb))
        wrapper.cache = _LateCache(self)
        return wrapper


class _Caller:
    """One call's arguments: how its value is computed, and where its resident may live."""

    __slots__ = ("_args", "_cached", "_kwargs", "_scope")

    def __init__(self, cached: Cached, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._cached = cached
        self._scope = scope
        self._args = args
        self._kwargs = kwargs

    def __call__(self) -> Any:
        return self._cached.function(*self._args, **self._kwargs)

    def take_home(self, resident: Resident) -> None:
        self._cached._take_home(self._scope, resident, self._args, self._kwargs)


VERBS = ("key", "peek", "refresh", "set", "expire", "invalidate", "invalidate_all", "many", "stats")

_new = object.__new__


class Method:
    """What stands in the class body: it binds the call and the verbs to the object, or to the class."""

    __slots__ = ("__dict__", "__weakref__", "_bound", "_by_class")  # slots: every hit reads the last two

    def __init__(self, cached: Cached, *, by_class: bool = False) -> None:
        functools.update_wrapper(self, cached.function)
        self.cached = cached
        self._by_class = by_class
        self._direct = by_class
        marks = _coroutine_marks() if cached.suspending else {}
        self.__dict__.update(marks)
        self._bound: Any = type(
            "Bound",
            (Bound,),
            {
                "__slots__": (),
                "__call__": cached.hot.call(cached.slowly),
                "cached": cached,
                "__doc__": cached.function.__doc__,
                "__module__": cached.function.__module__,
                **marks,
            },
        )

    def __set_name__(self, owner: type, name: str) -> None:
        self._direct = True

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if self._by_class:
            obj = owner
        elif obj is None:
            return self
        bound = _new(self._bound)  # no __init__: a call less in every hit
        bound.__self__ = obj
        return bound

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """`C.method(obj, 1)`, and what a decorator around this one calls."""
        return self.unbound().slowly(*args, **kwargs)

    @property
    def cache(self) -> Any:
        return _LateCache(self.unbound())

    def __reduce__(self) -> str:
        return self.cached.function.__qualname__  # pickled as functions are: by name

    def unbound(self) -> Cached:
        """Inside a staticmethod nobody told us our name, and there is no self to key."""
        cached = self.cached
        if not self._direct and cached.bound and cached.parameters.names[:1] not in (["self"], ["cls"]):
            cached.bound = False
            cached.unbind()
        return cached


def _coroutine_marks() -> dict[str, Any]:
    """What `iscoroutinefunction` looks for on an object that is none, but whose call gives a coroutine."""
    if sys.version_info >= (3, 12):
        return dict(vars(inspect.markcoroutinefunction(lambda: None)))
    else:
        return {"_is_coroutine": vars(asyncio.coroutines)["_is_coroutine"]}


def _unbound_verb(verb: str) -> property:
    return property(lambda method: getattr(method.unbound(), verb))


for _verb in VERBS:  # one by one: a __getattr__ would slow down every look at the descriptor's own attributes
    setattr(Method, _verb, _unbound_verb(_verb))


class Bound:
    """`obj.method`: the call with its hit generated into it, and the verbs, for one object."""

    __slots__ = ("__self__",)
    __self__: Any
    cached: ClassVar[Cached]

    def key(self, /, *args: Any, **kwargs: Any) -> str:
        return self.cached.key(self.__self__, *args, **kwargs)

    def peek(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.cached.peek(self.__self__, *args, **kwargs)

    def refresh(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.cached.refresh(self.__self__, *args, **kwargs)

    def set(self, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.cached.set(value, self.__self__, *args, **kwargs)

    def expire(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.cached.expire(self.__self__, *args, **kwargs)

    def invalidate(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.cached.invalidate(self.__self__, *args, **kwargs)

    def many(self, calls: Iterable[Iterable[Any]]) -> Any:
        return self.cached.many((self.__self__, *_arguments(call)) for call in calls)

    def invalidate_all(self) -> Any:
        """Every value of this method is gone, of every object, in every process."""
        return self.cached.invalidate_all()

    def stats(self) -> Any:
        return self.cached.stats()

    @property
    def cache(self) -> Any:
        return self.cached.home

    @property
    def __wrapped__(self) -> Any:
        return self.cached.function.__get__(self.__self__)

    @property
    def __func__(self) -> Any:
        return self.cached.function

    @property
    def __name__(self) -> str:
        return self.cached.function.__name__

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__self__ is self.__self__

    def __hash__(self) -> int:
        return hash((type(self), id(self.__self__)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cached.function, name)  # as of any method; what is asked for in a hit is found before

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__name__)

    def __repr__(self) -> str:
        return f"<cached {self.cached.function.__qualname__} of {self.__self__!r}>"


class _LateCache:
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


# -- all decorated functions --------------------------------------------------------------------------------------

_all: weakref.WeakSet[Cached] = weakref.WeakSet()


class Switch:
    off = False


switch = Switch()
switch.off = os.environ.get("STAMPEDE_DISABLED", "") not in ("", "0")


def unbind_all() -> None:
    """Every function finds its cache again at its next call."""
    for cached in list(_all):
        cached.unbind()


@contextmanager
def disabled() -> Iterator[None]:
    """Calls go straight to the functions."""
    before = switch.off
    _set_switch(True)
    try:
        yield
    finally:
        _set_switch(before)


def _set_switch(off: bool) -> None:
    switch.off = off
    unbind_all()  # or hits would go on


def _among(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _arguments(call: Any) -> tuple[Any, ...]:
    """One call's, of a batch. A string is no tuple of its letters here, nor a mapping one of its keys."""
    if type(call) is tuple:
        return call
    if isinstance(call, (str, bytes, bytearray, Mapping)) or not isinstance(call, Iterable):
        raise OptionError(f"many() was given {call!r} as one call's arguments: give a tuple of them, as in ({call!r},)")
    return tuple(call)


async def _nothing() -> None:
    return None
