"""A decorated function's place in a cache: its identity, its options, and the cache found at its first call."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from stampede.algorithm.scope import Scope, ScopeSide
from stampede.api.duplicate_names import DuplicateNames, disambiguated
from stampede.api.fast_hit import FastHit
from stampede.api.overrides import all_bindings
from stampede.codecs import make_codec, returns_of
from stampede.errors import OptionError
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
    tags_of_call,
    ttl_of_call,
)
from stampede.runtime import forks
from stampede.runtime.colour import BLOCKING, SUSPENDING
from stampede.runtime.definitions import signature_of
from stampede.settings.checks import CACHE, checked
from stampede.settings.options import DEFAULT, OPTIONS, Policy, nearest

__all__ = ["Binding", "Home"]

_log = logging.getLogger("stampede")

KEY_OPTIONS = ("key", "version", "namespace", "ignore")
FUNCTION_OPTIONS = ("refresh_by",)
CODEC_OPTIONS = ("codec", "trust", "signing_key", "compress", "max_bytes")

CAPTURED = """%s has captured %s, %s. Make it a parameter; or give a version= (other than 'code'), which declares all \
such functions alike, or tells them apart"""
IN_KEYS = "whose state is part of its keys: processes with another state share no values with this one"
NOT_IN_KEYS = "which is not part of its keys: a process that has captured another one gets the same values"


class Home(Protocol):
    """The cache that stores the values of a function."""

    namespace: str
    policy: Policy
    duplicate_names: DuplicateNames

    @property
    def shared(self) -> bool: ...
    def scope(
        self, name: str, policy: Policy, returns: Any = None, *, called: str | None = None, **codec: Any
    ) -> Scope: ...
    def stats_of(self, scope: str) -> Any: ...


class Binding:
    """One decorated function, and the cache that stores its values."""

    def __init__(
        self,
        function: Callable[..., Any],
        find: Callable[[], Home],
        options: Mapping[str, Any],
        *,
        bound: bool = False,
        written: Callable[..., Any] | None = None,
    ) -> None:
        self.check(options)
        key = options.get("key")
        self.function = self.origin = function  # `origin` computes the values
        self.options = dict(options)
        self._written = written or function  # the function of the source code, for its identity
        self.bound = bound
        self.suspending = inspect.iscoroutinefunction(function)
        self._of_class = bound and next(iter(signature_of(function).parameters), None) == "cls"
        self.colour = SUSPENDING if self.suspending else BLOCKING
        self.parameters = Parameters(function, options.get("ignore", ()))
        self._ttl, self._ttl_parameters = ttl_of_call(options.get("ttl"), self.parameters)
        self._tags, self._tags_parameters = tags_of_call(options.get("tags", ()), self.parameters)
        self._refresh_by: Callable[..., object] | None = options.get("refresh_by")
        namespace = options.get("namespace")
        # A function as key= or namespace= may use more than the arguments, such as a tenant in a context, or the date.
        pure = not callable(key) and not callable(namespace)
        self.fast_hit = FastHit(function, self.parameters, suspending=self.suspending, bound=bound, pure=pure)
        self._find = find
        self._lock = threading.RLock()  # re-entrant: a finalizer that runs during binding may call the function
        self._home: Home | None = None
        self._identity = self._find_identity()
        self._scope: ScopeSide | None = None
        self._make_key: Callable[..., str] | None = None
        # Verbs don't take the parameters that are not part of the key, except for the object that they are bound to.
        absent = self.parameters.absent(key)
        if callable(namespace):
            absent = absent.difference(arguments_named("namespace", namespace, self.parameters))
        self._not_in_key = absent.difference(self.parameters.names[:1]) if bound else absent
        if key is not None:
            self._key_maker("")  # raise now if the signature lacks a field of the key
        all_bindings.add(self)
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._lock = threading.RLock()  # the thread that held the lock does not exist in the child

    def check_duplicates(self, duplicate_names: DuplicateNames) -> None:
        """Add the function to those of its cache. OptionError: it would be served the values of another one."""
        if self.options.get("key") is None and self._identity.complete:
            duplicate_names.add(self._name(self._namespace("")), self._identity)

    def _find_identity(self) -> Identity:
        objects = self.options.get("version") in (None, BY_CODE)
        return disambiguated(identity_of(self._written, self.options.get("ignore", ()), objects=objects))

    def _return_type(self) -> Any:
        """Return the type of the values, as far as the annotation tells."""
        return returns_of(self._written)

    def _policy(self, policy: Policy) -> Policy:
        """Return the cache's policy, changed by the function's own options."""
        own = _only(self.options, OPTIONS)
        if self._ttl is not None:
            del own["ttl"]
        if self._tags is not None:
            del own["tags"]
        elif "tags" in own:
            own["tags"] = [tag.format() for tag in own["tags"]]  # they have no fields
        return policy.with_options(**own)

    def ttl_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Any], Any] | None:
        """Return the ttl of this call, as a function of the value. None: it does not depend on the arguments."""
        return None if self._ttl is None else self._ttl(*args, **kwargs)

    def own_options(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that depend on the arguments of a call."""
        ttl = self.ttl_of(args, kwargs)
        own: dict[str, Any] = {} if ttl is None else {"ttl": ttl}
        if self._tags is not None:
            own["tags"] = self._tags(*args, **kwargs)
        return own

    def tags_of_set(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...] | None:
        """Return the tags of a value that is set, or None if they are always the same. OptionError: they depend on
        arguments that are no part of the key."""
        if self._tags is None:
            return None
        unknown = self._not_in_key.intersection(self._tags_parameters)
        if unknown:
            raise OptionError(
                f"the tags of {self.function.__qualname__} depend on {', '.join(sorted(unknown))}, which is not part "
                "of its key, so set() cannot know them: invalidate the key, and let it be computed"
            )
        return self._tags(*args, **kwargs)

    def ttl_of_set(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Any], Any] | None:
        """Return `ttl_of` for a value that is set. OptionError: it depends on arguments that are no part of the key."""
        unknown = self._not_in_key.intersection(self._ttl_parameters)
        if unknown:
            raise OptionError(
                f"the ttl of {self.function.__qualname__} depends on {', '.join(sorted(unknown))}, which is not part "
                "of its key: give set() a ttl="
            )
        return self.ttl_of(args, kwargs)

    def _namespace(self, default: str) -> str:
        """Return the namespace of all keys. One that depends on arguments is added to each key, after the cache's."""
        namespace = self.options.get("namespace", default)
        return default if callable(namespace) else str(namespace)

    def _name(self, namespace: str) -> str:
        return scope_name(namespace, self._identity, self.options.get("version"))

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raise OptionError for wrong options, as far as they can be checked without the function."""
        known = [*KEY_OPTIONS, *FUNCTION_OPTIONS, *CODEC_OPTIONS, *OPTIONS]
        for name in options:
            if name not in known:
                raise OptionError(f"@cached has no option {name!r}: {nearest(name, known)}")
        DEFAULT.with_options(
            **{name: each for name, each in _only(options, OPTIONS).items() if not _may_need_call(name, each)}
        )
        coding = checked(_only(options, CODEC_OPTIONS), CACHE)
        if coding.get("codec", "pickle") != "pickle":
            make_codec(coding["codec"])  # raises if its package is missing, or if it is no codec
        for name, function in (("version", ""), ("namespace", ", or a function of the arguments")):
            value = options.get(name, "")
            if not isinstance(value, (str, int)) and not (function and callable(value)):
                raise OptionError(f"{name} is {value!r}: give a string or a number{function}")
        refresh_by = options.get("refresh_by")
        if refresh_by is not None and not callable(refresh_by):
            raise OptionError(
                f"refresh_by is {refresh_by!r}: give a function of the arguments, such as a task's `delay`"
            )
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
        home = self._find()  # outside the lock, as it may open an engine
        with self._lock:
            if self._scope is None or self._home is not home:
                if not (self._identity.named or self._identity.complete):
                    self._identity = self._find_identity()  # names that were undefined at decoration are defined now
                namespace = self._namespace(home.namespace)
                name = called = self._name(namespace)
                if self.options.get("key") is None:
                    home.duplicate_names.add(name, self._identity)
                    self._warn_of_captured(home)
                    prefix = f"{name}:"
                else:
                    name, prefix = quoted(namespace), in_namespace(namespace, "")  # keys like those of the cache itself
                policy = self._policy(home.policy)
                coding = checked(_only(self.options, CODEC_OPTIONS), CACHE)
                self._make_key = self._key_maker(prefix)
                scope = home.scope(name, policy, self._return_type(), called=called, **coding).side(self.colour)
                self._scope, self._home = scope, home
            return self._scope

    def _warn_of_captured(self, home: Home) -> None:
        identity = self._identity
        if identity.named or not home.shared:
            return
        in_keys = [name for name, _ in identity.captured if name not in identity.untold]
        for names, effect in ((identity.untold, NOT_IN_KEYS), (in_keys, IN_KEYS)):
            if names:
                _log.warning(CAPTURED, identity.name, " and ".join(dict.fromkeys(names)), effect)

    def unbind(self) -> None:
        """Forget the cache. The next call finds it again."""
        with self._lock:
            self._home = self._scope = None
            self.fast_hit.fast.clear()

    def forget_fast(self) -> None:
        """Empty the table of hits. Calls ask the cache until a value is adopted again."""
        self.fast_hit.fast.clear()


def _may_need_call(name: str, option: Any) -> bool:
    """Return whether the option may need arguments of the call, and is checked once the function is known."""
    return name in ("ttl", "tags") and callable(option)


def _only(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}
