"""`@cached.many`: a function of many ids, called once for all missing ids. Each id has a key of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from math import inf
from typing import Any, ClassVar

from stampede.algorithm.batch import value_of_each
from stampede.algorithm.context import Context, EachContext, Inside, as_one_of_many
from stampede.algorithm.loaders import BatchFunction, mapped
from stampede.algorithm.scope import ScopeSide
from stampede.api.binding import Home
from stampede.api.cached import VERBS, Arguments, Cached, LateCache
from stampede.api.duplicate_names import DuplicateNames
from stampede.api.method import Bound, Method
from stampede.api.overrides import Block, current_block
from stampede.codecs import values_of
from stampede.errors import Absent, OptionError
from stampede.keys import Parameters
from stampede.model.result import Nothing
from stampede.runtime.colour import run_blocking
from stampede.runtime.definitions import signature_of
from stampede.settings.options import Policy, seconds

__all__ = ["CachedMany", "CachedManyMethod"]

OWN = ("chunk", "absent")
PLURAL = ("set_many", "invalidate_many", "expire_many")
EACH = [verb for verb in VERBS if verb not in ("many", *PLURAL)]
"""The verbs that take one id."""


class CachedMany:
    """One decorated function of many ids."""

    def __init__(
        self, function: Callable[..., Any], find: Callable[[], Home], options: Mapping[str, Any], *, bound: bool = False
    ) -> None:
        self.check(options)
        self.function = function
        self.bound = bound
        self.suspending = inspect.iscoroutinefunction(function)
        self._position = _Position(function, options, bound=bound)
        self._chunk = options.get("chunk")
        of_one = {name: value for name, value in options.items() if name not in OWN}
        absent = seconds("absent", options.get("absent", 0))
        self.one = One(function, find, of_one, self._position, absent, bound=self.bound)

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raise OptionError for wrong options, as far as they can be checked without the function."""
        if options.get("refresh_by") is not None:
            raise OptionError("@cached.many has no refresh_by: a refresh of many ids is one call of the function")
        Cached.check({name: value for name, value in options.items() if name not in OWN})
        seconds("absent", options.get("absent", 0))
        chunk = options.get("chunk")
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise OptionError(f"chunk is {chunk!r}: give the number of ids for one call, 1 or more")

    def check_duplicates(self, duplicate_names: DuplicateNames) -> None:
        self.one.check_duplicates(duplicate_names)

    # -- calls ----------------------------------------------------------------------------------------------------

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the values of these ids, by id, in the given order. Ids without a value are left out."""
        return self.one._run(self._values(args, kwargs))

    async def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
        ids, call = self._position.split(args, kwargs)
        wanted = ids_of(ids)
        block = current_block(lambda: self.one.home)
        if block is not None and block.bypass:
            return await self._uncached(wanted, call)
        return await self.one.in_open_cache(lambda scope: self._cached_values(scope, wanted, call, block))

    async def _cached_values(
        self, scope: ScopeSide, ids: list[Any], call: Callable[[Any], Arguments], block: Block | None
    ) -> dict[Any, Any]:
        keys = {id: call(id).of(self.one.key_of_call)() for id in ids}
        names = {key: id for id, key in keys.items()}  # if a key= makes ids equal, one of them
        loader = BatchFunction(
            self.one.colour,
            lambda some: call(some).of(self.function)(),
            names,
            chunk=self._chunk,
            nothing=lambda id: Nothing(_no_value_text(self.function, id)),
        )
        own_of = lambda key: self.one.own_options(*call(names[key]))  # noqa: E731
        found = await value_of_each(scope, names, loader, scope.policy, block, own_of)
        return {id: found[key] for id, key in keys.items() if key in found}

    async def _uncached(self, ids: list[Any], call: Callable[[Any], Arguments]) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        size = self._chunk or len(ids) or 1
        for start in range(0, len(ids), size):
            chunk = ids[start : start + size]  # passed on as a copy, which the function may change
            with Inside(EachContext({id: Context(repr(id)) for id in chunk})):
                given = mapped(await self.one.colour.call(call([*chunk]).of(self.function)), chunk)
            values |= {id: given[id] for id in chunk if id in given}
        return values

    def _keys(self, ids: Iterable[Any], call: Callable[[Any], Arguments], key: Callable[..., str]) -> dict[str, Any]:
        """Return the ids by their keys."""
        return {call(id).of(key)(): id for id in ids}

    # -- the verbs of many ids ------------------------------------------------------------------------------------

    def set_many(self, values: Mapping[Any, Any], /, *args: Any, **kwargs: Any) -> Any:
        """Store these values, by id, in one round trip if the engine can. `ttl=` and `stale=` are those of `set`.

        >>> @cached.many
        ... def lengths(words: list[str]) -> dict[str, int]:
        ...     return {word: len(word) for word in words}
        >>> lengths.set_many({"tea": 5}, ttl=60)
        >>> lengths(["tea", "coffee"])
        {'tea': 5, 'coffee': 6}
        """
        return self.one._run(self._set_many(values, args, kwargs))

    async def _set_many(self, values: Mapping[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scope, entry_options, with_id = (
            self.one.scope,
            self.one.entry_options(kwargs),
            self._position.with_id(args, kwargs),
        )
        keys = self._keys(values, with_id, self.one.key)

        def policy_of(key: str) -> Policy:
            call = with_id(keys[key])
            return self.one.policy_of(entry_options, *self.one.whole_call(call.args, dict(call.kwargs)))

        await scope.put_many({key: values[id] for key, id in keys.items()}, policy_of)

    def invalidate_many(self, ids: Iterable[Any], /, *args: Any, **kwargs: Any) -> Any:
        """Invalidate all these ids, in one round trip if the engine can. Return how many had a value. `on_error=` is as
        for `invalidate`.

        >>> @cached.many
        ... def lengths(words: list[str]) -> dict[str, int]:
        ...     return {word: len(word) for word in words}
        >>> lengths(["tea", "coffee"])
        {'tea': 3, 'coffee': 6}
        >>> lengths.invalidate_many(["tea", "milk"])
        1
        """
        return self.one._run(self._of_each("invalidate_many", ids_of(ids), args, kwargs))

    def expire_many(self, ids: Iterable[Any], /, *args: Any, **kwargs: Any) -> Any:
        """Expire all these ids, in one round trip if the engine can. Return how many were fresh."""
        return self.one._run(self._of_each("expire_many", ids_of(ids), args, kwargs))

    async def _of_each(self, verb: str, ids: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        on_error = self.one.pop_on_error(kwargs)
        keys = self._keys(ids, self._position.with_id(args, kwargs), self.one.key)
        return await getattr(self.one.scope, verb)(keys, on_error)

    # -- the decorated function -----------------------------------------------------------------------------------

    def plain(self) -> Any:
        """Return a function like the decorated one, with the verbs of one id, and those of many, as its attributes."""
        wrapper: Any
        if self.suspending:

            async def suspending(*args: Any, **kwargs: Any) -> dict[Any, Any]:
                return await self._values(args, kwargs)

            wrapper = suspending
        else:

            def blocking(*args: Any, **kwargs: Any) -> dict[Any, Any]:
                return run_blocking(self._values(args, kwargs))

            wrapper = blocking
        functools.update_wrapper(wrapper, self.function)
        for verb in EACH:
            setattr(wrapper, verb, getattr(self.one, verb))
        for verb in PLURAL:
            setattr(wrapper, verb, getattr(self, verb))
        wrapper.cache = LateCache(self.one)
        wrapper.one = self.one.plain()
        wrapper.one.__qualname__ = f"{self.function.__qualname__}.one"  # for pickle, which goes by this name
        return wrapper


class One(Cached):
    """The decorated function for one id: the base of its verbs, and of `users.one`."""

    def __init__(
        self,
        many: Callable[..., Any],
        find: Callable[[], Home],
        options: Mapping[str, Any],
        position: _Position,
        absent: float,
        *,
        bound: bool,
    ) -> None:
        self._absent_for = absent
        super().__init__(_public_one(many, position), find, options, bound=bound, written=many)
        self.origin = _of_one(many, position, Nothing)

    def _return_type(self) -> Any:
        return values_of(super()._return_type())

    def _policy(self, policy: Policy) -> Policy:
        policy = super()._policy(policy)
        if not self._absent_for:
            return policy
        return policy.with_options(ttl=self._unless_absent(policy.ttl_of), raises=(*policy.raises, Nothing))

    def ttl_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Any], Any] | None:
        ttl = super().ttl_of(args, kwargs)
        return self._unless_absent(ttl) if ttl is not None and self._absent_for else ttl

    def _unless_absent(self, ttl_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        absent = self._absent_for

        def ttl(value: Any) -> Any:
            seconds = absent if isinstance(value, Nothing) else ttl_of(value)
            return None if seconds == inf else seconds

        return ttl


class _Position:
    """The position of the list of ids, or of one id, among the arguments of a call."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any], *, bound: bool) -> None:
        self._signature = signature_of(function)
        parameters = list(self._signature.parameters.values())
        absent = Parameters(function, options.get("ignore", ())).absent(options.get("key"))
        found = next((each for each in parameters[bound:] if each.name not in absent), None)
        if found is None or found.kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            raise OptionError(
                f"{function.__qualname__} takes no list of ids: make it the first parameter that is part of the key, "
                "as in def users(ids: list[int]) -> dict[int, User]"
            )
        self._at = parameters.index(found)
        self._name = found.name
        self._after = bound  # as `_at`, among the arguments that are part of the key

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Callable[[Any], Arguments]]:
        """Return the argument at this position, and a function that returns the arguments with another one there."""
        at, name = self._at, self._name
        if len(args) > at:
            before, after = args[:at], args[at + 1 :]
            return args[at], lambda value: Arguments((*before, value, *after), kwargs)
        if name not in kwargs:
            self._signature.bind(*args, **kwargs)  # raises the error that the function itself would raise
        return kwargs[name], lambda value: Arguments(args, {**kwargs, name: value})

    def with_id(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Any], Arguments]:
        """Return a function that adds an id to the other arguments that are part of the key."""
        at = self._after
        return lambda id: Arguments((*args[:at], id, *args[at:]), kwargs)

    @property
    def of_one(self) -> inspect.Signature:
        """The signature of the function for one id."""
        parts = self._signature.parameters
        id = parts[self._name].replace(annotation=Parameter.empty, default=Parameter.empty)
        return self._signature.replace(
            parameters=[*(parts | {self._name: id}).values()], return_annotation=Parameter.empty
        )


def _of_one(many: Callable[..., Any], position: _Position, missing: type[Exception]) -> Callable[..., Any]:
    """Return a function of one id that calls the one of many, and raises `missing` if the id is left out."""

    def prepared(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Callable[[], Any]]:
        id, call = position.split(args, kwargs)
        return id, call([id]).of(many)

    def value_of_id(values: Any, id: Any) -> Any:
        values = mapped(values, [id])
        if id not in values:
            raise missing(_no_value_text(many, id))
        return values[id]

    def blocking(*args: Any, **kwargs: Any) -> Any:
        id, call = prepared(args, kwargs)
        with as_one_of_many(id):
            return value_of_id(call(), id)

    async def suspending(*args: Any, **kwargs: Any) -> Any:
        id, call = prepared(args, kwargs)
        with as_one_of_many(id):
            return value_of_id(await call(), id)

    return suspending if inspect.iscoroutinefunction(many) else blocking


def _public_one(many: Callable[..., Any], position: _Position) -> Callable[..., Any]:
    """Return the public function of one id, with the name of the one of many. It raises Absent for an id left out."""
    function: Any = functools.update_wrapper(_of_one(many, position, Absent), many)
    function.__signature__ = position.of_one
    return function  # type: ignore[no-any-return]


def _no_value_text(many: Callable[..., Any], id: Any) -> str:
    return f"{many.__qualname__} has nothing for {id!r}"


def ids_of(ids: Any) -> list[Any]:
    """Return each id once, in their order."""
    if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Iterable):
        raise OptionError(f"a function of many ids was given {ids!r}: give a list of ids")
    return list(dict.fromkeys(ids))


# -- methods ----------------------------------------------------------------------------------------------------------


class CachedManyMethod(Method):
    """The descriptor in a class body, which binds the call and the verbs to the object, or to the class."""

    def __init__(self, many: CachedMany, *, by_class: bool = False) -> None:
        self.cached = many.one
        self._by_class = by_class
        self._is_method = True
        self.one = Method(many.one)
        self.one._is_method = True
        self.one._bound.__reduce__ = lambda bound: (_one_of, (bound.__self__, bound.__name__))
        for verb in PLURAL:
            setattr(self, verb, getattr(many, verb))
        self._many = many
        self._imitate(many.function, BoundMany, _many=many, _bind_one=self.one.__get__)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function unbound, as `C.users(obj, [1, 2])` does, or a decorator around this one."""
        return self._many.call(*args, **kwargs)


def _one_of(obj: Any, name: str) -> Any:
    return getattr(obj, name).one


class BoundMany(Bound):
    """The bound method `obj.users`: the call and the verbs for one object."""

    __slots__ = ()
    _many: ClassVar[CachedMany]
    _bind_one: Any

    @property
    def __func__(self) -> Any:
        return self._many.function

    @property
    def one(self) -> Any:
        return self._bind_one(self.__self__)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._many.call(self.__self__, *args, **kwargs)

    def set_many(self, values: Mapping[Any, Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._many.set_many(values, self.__self__, *args, **kwargs)

    def invalidate_many(self, ids: Iterable[Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._many.invalidate_many(ids, self.__self__, *args, **kwargs)

    def expire_many(self, ids: Iterable[Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._many.expire_many(ids, self.__self__, *args, **kwargs)
