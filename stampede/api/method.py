"""A decorated function in a class body: a descriptor that binds the call and the verbs."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from stampede.api.cached import VERBS, Cached, LateCache
from stampede.runtime.definitions import signature_of

__all__ = ["Bound", "Method"]

_new = object.__new__


class Method:
    """The descriptor in the class body, which binds the call and the verbs to the object, or to the class."""

    __slots__ = ("__dict__", "__weakref__", "_bound", "_by_class")  # slots: every hit reads the last two

    def __init__(self, cached: Cached, *, by_class: bool = False) -> None:
        self.cached = cached
        self._by_class = by_class
        self._is_method = by_class
        self._imitate(cached.function, Bound, __call__=cached.fast_hit.call(cached.slow_path))

    def _imitate(self, function: Any, kind: type, **own: Any) -> None:
        """Look like this function. Bound objects are of a new class, derived from `kind`."""
        functools.update_wrapper(self, function)
        marks = _coroutine_marks() if self.cached.suspending else {}
        self.__dict__.update(marks)
        own |= {"__slots__": (), "cached": self.cached, "__doc__": function.__doc__, "__module__": function.__module__}
        self._bound: Any = type(kind.__name__, (kind,), own | marks)

    def __set_name__(self, owner: type, name: str) -> None:
        self._is_method = True

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if self._by_class:
            obj = owner
        elif obj is None:
            return self
        bound = _new(self._bound)  # without __init__, which would cost every hit a call
        bound.__self__ = obj
        return bound

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function unbound, as `C.method(obj, 1)` does, or a decorator around this one."""
        return self.unbound().slow_path(*args, **kwargs)

    @property
    def cache(self) -> Any:
        return LateCache(self.unbound())

    def __reduce__(self) -> str:
        return self.cached.function.__qualname__  # pickled by name, like a function

    def unbound(self) -> Cached:
        """Return the `Cached` for calls without an object. Inside a staticmethod, `__set_name__` was never called, and
        there is no self in the key."""
        cached = self.cached
        if not self._is_method and cached.bound and cached.parameters.names[:1] not in (["self"], ["cls"]):
            cached.bound = False
            cached.unbind()
        return cached


def _coroutine_marks() -> dict[str, Any]:
    """Return the marks by which `iscoroutinefunction` accepts an object whose call returns a coroutine."""
    if sys.version_info >= (3, 12):
        return dict(vars(inspect.markcoroutinefunction(lambda: None)))
    else:
        return {"_is_coroutine": vars(asyncio.coroutines)["_is_coroutine"]}


def _unbound_verb(verb: str) -> property:
    return property(lambda method: getattr(method.unbound(), verb))


for _verb in VERBS:  # one by one: a __getattr__ would slow down every access to the descriptor's own attributes
    setattr(Method, _verb, _unbound_verb(_verb))


class Bound:
    """The bound method `obj.method`: the call, with generated code for hits, and the verbs for one object."""

    __slots__ = ("__self__",)
    cached: ClassVar[Cached]

    @property
    def __func__(self) -> Any:
        return self.cached.function

    @property
    def __wrapped__(self) -> Any:
        return self.__func__.__get__(self.__self__)

    @property
    def __name__(self) -> str:
        return str(self.__func__.__name__)

    @property
    def __signature__(self) -> inspect.Signature:
        return signature_of(self.__wrapped__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)  # like any method; attributes that a hit needs are found without this

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__name__)

    def __repr__(self) -> str:
        return f"<cached {self.__func__.__qualname__} of {self.__self__!r}>"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__self__ is self.__self__

    def __hash__(self) -> int:
        return hash((type(self), id(self.__self__)))

    def set(self, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.cached.set(value, self.__self__, *args, **kwargs)

    def many(self, calls: Iterable[Iterable[Any] | Mapping[str, Any]], *, workers: int = 1) -> Any:
        return self.cached.many_of(calls, self.__self__, workers=workers)

    @property
    def cache(self) -> Any:
        return self.cached.home


def _bound_verb_of(verb: str) -> Any:
    """Return the verb with the object as its first argument, unless the verb is about all objects."""

    def bound(self: Bound, /, *args: Any, **kwargs: Any) -> Any:
        first = () if verb in ("invalidate_all", "expire_all", "stats") else (self.__self__,)
        return getattr(self.cached, verb)(*first, *args, **kwargs)

    bound.__name__, bound.__qualname__ = verb, f"Bound.{verb}"
    return bound


for _verb in VERBS:
    if _verb not in vars(Bound):
        setattr(Bound, _verb, _bound_verb_of(_verb))
    _bound_verb = vars(Bound)[_verb]
    _bound_verb.__doc__ = _bound_verb.__doc__ or getattr(Cached, _verb).__doc__
