"""One decorated function: its keys, its place in a cache, and its calls.

Hits are answered by generated code (`hot.py`). All else, a miss, an argument of another type, an entry whose moment
has come, takes the slow way through the function's `Scope`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from stampede import forks
from stampede.codec import make_codec, returns_of
from stampede.colour import BLOCKING, SUSPENDING, run_blocking
from stampede.definitions import signature_of
from stampede.entry import Entry
from stampede.errors import EngineClosed, KeyingError, OptionError
from stampede.hot import Hot
from stampede.keys import (
    BY_CODE,
    Identity,
    Parameters,
    arguments_named,
    identity_of,
    in_namespace,
    in_namespace_of,
    key_maker,
    quoted,
    scope_name,
    ttl_of_call,
)
from stampede.local import Resident
from stampede.namesakes import Namesakes, told_apart
from stampede.outcome import landed
from stampede.policy import DEFAULT, OPTIONS, Policy, nearest
from stampede.scope import Scope, ScopeSide
from stampede.settings.checks import CACHE, checked
from stampede.switch import Block, around, enrolled, switch
from stampede.verbs import VERBS, Verbs

__all__ = ["Cached", "Home", "LateCache"]

_log = logging.getLogger("stampede")

KEYING = ("key", "version", "namespace", "ignore")
CODING = ("codec", "trust", "signing_key", "compress", "max_bytes")


class Home(Protocol):
    """The cache in which a function keeps its values."""

    namespace: str
    policy: Policy
    namesakes: Namesakes

    @property
    def shared(self) -> bool: ...
    def scope(
        self, name: str, policy: Policy, returns: Any = None, *, called: str | None = None, **codec: Any
    ) -> Scope: ...
    def stats_of(self, scope: str) -> Any: ...


class Cached(Verbs):
    """One decorated function."""

    def __init__(
        self, function: Callable[..., Any], find: Callable[[], Home], options: Mapping[str, Any], *, bound: bool = False
    ) -> None:
        self.check(options)
        key = options.get("key")
        self.function = self.origin = function
        self.options = dict(options)
        self.bound = bound
        self.suspending = inspect.iscoroutinefunction(function)
        self._of_class = bound and next(iter(signature_of(function).parameters), None) == "cls"
        self.colour = SUSPENDING if self.suspending else BLOCKING
        self.parameters = Parameters(function, options.get("ignore", ()))
        self._ttl, self._ttl_asks = ttl_of_call(options.get("ttl"), self.parameters)
        namespace = options.get("namespace")
        # Such a function may look at more than the arguments: a tenant in a context, the day of the week.
        pure = not callable(key) and not callable(namespace)
        self.hot = Hot(function, self.parameters, suspending=self.suspending, bound=bound, pure=pure)
        self._find = find
        self._lock = threading.RLock()  # a finalizer that runs in the middle of binding may call the function
        self._home: Home | None = None
        self._identity = self._told_by()
        self._scope: ScopeSide | None = None
        self._asks_first = False
        self._make_key: Callable[..., str] | None = None
        # What verbs don't ask for: parameters that are no part of the key, but for the object that they are bound to.
        absent = self.parameters.absent(key)
        if callable(namespace):
            absent = absent.difference(arguments_named("namespace", namespace, self.parameters))
        self._absent = absent.difference(self.parameters.names[:1]) if bound else absent
        if key is not None:
            self._key_maker("")  # a field that the signature can't fill is an error of this line
        enrolled.add(self)
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._lock = threading.RLock()  # a thread that was binding is not here to open it

    def among(self, namesakes: Namesakes) -> Cached:
        """One of those that are decorated for one cache: OptionError if it would be served what another computes."""
        if self.options.get("key") is None and self._identity.complete:
            namesakes.add(self._name(self._namespace("")), self._identity)
        return self

    def _told_by(self) -> Identity:
        return self._identity_of(self.function)

    def _identity_of(self, function: Callable[..., Any]) -> Identity:
        objects = self.options.get("version") in (None, BY_CODE)
        return told_apart(identity_of(function, self.options.get("ignore", ()), objects=objects))

    def _returns(self) -> Any:
        """The type of its values, as far as its annotation says."""
        return returns_of(self.function)

    def _policy(self, policy: Policy) -> Policy:
        """Its cache's policy, as its own options change it."""
        own = _among(self.options, OPTIONS)
        if self._ttl is not None:
            del own["ttl"]
        return policy.with_options(**own)

    def ttl_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Any], Any] | None:
        """How long this call's values are fresh, where that depends on its arguments."""
        return None if self._ttl is None else self._ttl(*args, **kwargs)

    def ttl_of_kept(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Any], Any] | None:
        """The same of a value that is set, of whose call only that is known which is part of the key."""
        unknown = self._absent.intersection(self._ttl_asks)
        if unknown:
            raise OptionError(
                f"how long a value of {self.function.__qualname__} is fresh depends on {', '.join(sorted(unknown))}, "
                "which is no part of its key: give set() a ttl="
            )
        return self.ttl_of(args, kwargs)

    def _namespace(self, default: str) -> str:
        """That of all its keys: one that depends on the arguments stands in each, behind its cache's."""
        namespace = self.options.get("namespace", default)
        return default if callable(namespace) else str(namespace)

    def _name(self, namespace: str) -> str:
        return scope_name(namespace, self._identity, self.options.get("version"))

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Refuse at decoration what can be known to be wrong then."""
        known = [*KEYING, *CODING, *OPTIONS]
        for name in options:
            if name not in known:
                raise OptionError(f"@cached has no option {name!r}: {nearest(name, known)}")
        DEFAULT.with_options(
            **{name: each for name, each in _among(options, OPTIONS).items() if not _of_call(name, each)}
        )
        coding = checked(_among(options, CODING), CACHE)
        if coding.get("codec", "pickle") != "pickle":
            make_codec(coding["codec"])  # or its package is missing, or it is no codec
        for name, function in (("version", ""), ("namespace", ", or a function of the arguments")):
            value = options.get(name, "")
            if not isinstance(value, (str, int)) and not (function and callable(value)):
                raise OptionError(f"{name} is {value!r}: give a string or a number{function}")
        key = options.get("key")
        if key is not None and not isinstance(key, str) and not callable(key):
            raise OptionError(f"key is {key!r}: give a function of the arguments, or a format string")

    def _key_maker(self, prefix: str) -> Callable[..., str]:
        ignore, key, namespace = self.options.get("ignore", ()), self.options.get("key"), self.options.get("namespace")
        if not callable(namespace):
            return key_maker(self.function, prefix=prefix, ignore=ignore, key=key, bound=self.bound)
        make = key_maker(self.function, prefix="", ignore=ignore, key=key, bound=self.bound)
        return in_namespace_of(namespace, self.parameters, prefix, make)

    # -- binding: the cache is found at the first call, and again after `configure` -------------------------------

    @property
    def home(self) -> Home:
        self.scope  # noqa: B018  binds
        assert self._home is not None
        return self._home

    @property
    def scope(self) -> ScopeSide:
        scope = self._scope
        return scope if scope is not None else self._bind()

    def _bind(self) -> ScopeSide:
        home = self._find()
        with self._lock:
            if self._scope is None or self._home is not home:
                if not (
                    self._identity.named or self._identity.complete
                ):  # what was missing when it was decorated is there now
                    self._identity = self._told_by()
                namespace = self._namespace(home.namespace)
                name = called = self._name(namespace)
                if self.options.get("key") is None:
                    home.namesakes.add(name, self._identity)
                    self._warn_of_captured(home)
                    prefix = f"{name}:"
                else:
                    name, prefix = quoted(namespace), in_namespace(namespace, "")  # a cache's own key
                policy = self._policy(home.policy)
                coding = checked(_among(self.options, CODING), CACHE)
                self._make_key = self._key_maker(prefix)
                scope = home.scope(name, policy, self._returns(), called=called, **coding).side(self.colour)
                self._asks_first = not self.suspending  # or a loop may be waiting for this lock
                self._scope, self._home = scope, home
            return self._scope

    def _learn_first(self, scope: ScopeSide) -> None:
        """By the first call, not by who binds: `key` and `stats` ask nobody."""
        with self._lock:
            if self._asks_first:
                self._asks_first = False
                scope.learn_first()

    def _warn_of_captured(self, home: Home) -> None:
        identity = self._identity
        if identity.named or not home.shared:
            return
        for names, what_then in (
            (
                identity.untold,
                "which nothing in its keys can tell: another process that has captured another one is served the same "
                "values",
            ),
            (
                [name for name, _ in identity.captured if name not in identity.untold],
                "whose state is part of its keys: a process in which it differs shares no values with this one, and "
                "does not see its invalidations",
            ),
        ):
            if names:
                _log.warning(
                    "%s has captured %s, %s. Make it a parameter; or give a version= (other than 'code'), which says "
                    "that all are alike, or tells them apart",
                    identity.name,
                    " and ".join(dict.fromkeys(names)),
                    what_then,
                )

    def unbind(self) -> None:
        """Forget the cache: the next call finds it again."""
        with self._lock:
            self._home = self._scope = None
            self.hot.fast.clear()

    def forget_fast(self) -> None:
        """What is kept is found by asking the cache, until it has come home again."""
        self.hot.fast.clear()

    def key(self, /, *args: Any, **kwargs: Any) -> str:
        """The key of these arguments; of those that are a part of it, as in the other verbs.

        >>> @cached
        ... def price(item: str) -> int:
        ...     return len(item)
        >>> price.key("tea")
        "shop:price...:('tea')"
        """
        args, kwargs = self.completed(args, kwargs)
        return self.key_of_call(*args, **kwargs)

    def completed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, where those that are no part of the key are not given."""
        if not self._absent:
            return args, kwargs
        signature = signature_of(self.function)
        parts = [part for name, part in signature.parameters.items() if name not in self._absent]
        given = signature.replace(parameters=parts).bind(*args, **kwargs)
        bound = signature.bind_partial()
        bound.arguments = {
            name: None if name in self._absent else given.arguments[name]
            for name in signature.parameters
            if name in self._absent or name in given.arguments
        }
        return bound.args, bound.kwargs

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
        block = None
        if switch.thrown:
            block = around(self._the_home)
            if block is not None and block.straight:
                return self.function(*args, **kwargs)
        closed = scope = None
        while True:
            try:
                scope, key, found = self._look(args, kwargs, block)
                if found is not None:
                    return found.value
                landing = run_blocking(self.fetch(scope, key, args, kwargs, once=block))
                entry = landing.entry
                if landing.error is None and entry is not None and not entry.raised:  # as `landed`, and a call less
                    return entry.value
                return landed(landing, scope.policy)
            except EngineClosed:
                closed = self.other_than(closed, scope)

    async def slow_async(self, /, *args: Any, **kwargs: Any) -> Any:
        """The same, suspending."""
        block = None
        if switch.thrown:
            block = around(self._the_home)
            if block is not None and block.straight:
                return await self.function(*args, **kwargs)
        closed = scope = None
        while True:
            try:
                scope, key, found = self._look(args, kwargs, block)
                if found is not None:
                    return found.value
                return landed(await self.fetch(scope, key, args, kwargs, once=block), scope.policy)
            except EngineClosed:
                closed = self.other_than(closed, scope)

    def _the_home(self) -> Home:
        return self.home

    def _look(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], block: Block | None
    ) -> tuple[ScopeSide, str, Resident | Entry[Any] | None]:
        """Where the value of these arguments belongs, and what is at hand of it."""
        scope = self._scope or self._bind()
        if self._asks_first:
            self._learn_first(scope)
        key = self.key_of_call(*args, **kwargs)
        if not scope.near:
            return scope, key, None
        found = scope.at_hand(key) if block is None else scope.at_hand_of(block, key)
        if isinstance(found, Resident) and self.hot.looks:
            self._take_home(scope, args, kwargs, found)
        return scope, key, found

    def other_than(self, closed: Home | None, scope: ScopeSide | None) -> Home:
        """The cache to be tried now, where `configure` has closed one under a call; or the error, if it is the same.

        The error is another engine's, which the function has asked, if the one of `scope` isn't closed.
        """
        home = self._find()
        if home is closed or (scope is not None and not scope.core.closed):
            raise
        self.unbind()  # who was binding while it was closed has bound to the closed one
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
        tier = scope.core.front.tier
        home = None if tier is None else functools.partial(self._take_home, scope, args, kwargs)
        policy = None if self._ttl is None else scope.policy.with_options(ttl=self._ttl(*args, **kwargs))
        origin = functools.partial(self.origin, *args, **kwargs)
        return scope.fetch(key, origin, policy, force=force, home=home, once=once)

    def _take_home(self, scope: ScopeSide, args: tuple[Any, ...], kwargs: dict[str, Any], resident: Resident) -> None:
        """Let the next call with these arguments find the resident by itself, if it can tell them exactly."""
        tier = scope.core.front.tier
        if tier is None or switch.thrown or (resident.homes and resident.lives_in(self.hot.fast)):
            return
        fast = self.hot.key(args, kwargs)
        if fast is not None:
            tier.adopt(resident, self.hot.fast, fast)
            if self._scope is not scope or switch.thrown:
                self.hot.fast.pop(fast, None)  # unbound, or thrown, meanwhile

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
        wrapper.cache = LateCache(self)
        return wrapper


class LateCache:
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


def _of_call(name: str, option: Any) -> bool:
    """It may ask for more than the value: that is seen when the function is known."""
    return name == "ttl" and callable(option)


def _among(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}
