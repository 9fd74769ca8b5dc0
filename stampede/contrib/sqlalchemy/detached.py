"""SQLAlchemy's objects as values: detached from the session that loaded them, and merged into the one that needs
them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import sqlalchemy
from sqlalchemy.orm import Session
from sqlalchemy.orm.collections import InstrumentedDict, InstrumentedList, InstrumentedSet
from sqlalchemy.orm.state import InstanceState

from stampede.codecs.sqlalchemy import facts_of, plain, several

__all__ = ["detach", "detached", "merge"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def detached(function: Callable[P, R]) -> Callable[P, R]:
    """Detach the objects that a function, `def` or `async def`, returns: put `@detached` below `@cached`.

    The cache then stores and shares what `detach` makes of the objects.

        >>> @cached(ttl=600, ignore=["session"])
        ... @detached
        ... def user(session: Session, user_id: int) -> User:
        ...     return session.get_one(User, user_id)

        >>> user(session, 1) in session
        False
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def suspending(*args: P.args, **kwargs: P.kwargs) -> Any:
            return detach(await function(*args, **kwargs))

        return cast(Callable[P, R], suspending)

    @functools.wraps(function)
    def blocking(*args: P.args, **kwargs: P.kwargs) -> R:
        return detach(function(*args, **kwargs))

    return blocking


def detach(value: T) -> T:
    """Return copies of objects that belong to no session, with what is loaded of them and of related objects.

    If two objects refer to each other, the reference back is left unloaded. Objects inside lists, tuples, sets and
    dicts are detached, too. The session's own objects are not changed.

        >>> bob = detach(session.get_one(User, 1))
        >>> bob.name, bob in session
        ('bob', False)
    """
    return cast(T, _Detaching().of(value))


def merge(session: Session, value: T) -> T:
    """Return the same objects in this session, where unloaded attributes load when they are read. It runs no query.

    With an `AsyncSession`: `await session.run_sync(merge, value)`.

        >>> mine = merge(session, detach(session.get_one(User, 1)))
        >>> mine in session
        True
    """
    return cast(T, _each(value, lambda each: session.merge(each, load=False)))


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    kind = _PLAIN.get(type(value), type(value))
    if kind in (list, tuple, set, frozenset):
        return kind(_each(each, function) for each in value)
    if kind is dict:
        return {key: _each(each, function) for key, each in value.items()}
    return function(value) if _state(value) is not None else value


_PLAIN: dict[type, type] = {InstrumentedList: list, InstrumentedSet: set, InstrumentedDict: dict}


def _state(value: Any) -> InstanceState[Any] | None:
    found = sqlalchemy.inspect(value, raiseerr=False)
    return found if isinstance(found, InstanceState) else None


class _Detaching:
    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._above: set[int] = set()

    def of(self, value: Any) -> Any:
        return _each(value, self._one)

    def _one(self, value: Any) -> Any:
        made = self._made.get(id(value))
        if made is None:
            self._above.add(id(value))
            made = self._made[id(value)] = self._anew(value)
            self._above.remove(id(value))
        return made

    def _anew(self, value: Any) -> Any:
        state, held = _state(value), vars(value)
        kind: Any = type(value)
        facts = facts_of(kind)
        if state is None or state.key is None or state.modified or not facts.identity <= held.keys():
            return value  # a cache refuses it, and says why
        columns = {name: plain(held[name]) for name in facts.columns & held.keys()}
        relations = {}
        for name in facts.relations & held.keys():
            found = several(held[name])
            many = type(found) is list
            if self._above.isdisjoint(map(id, found if many else [found])):
                relations[name] = [*map(self._one, found)] if many else self.of(found)
        return facts.make(columns, relations)
