"""The result of a call, and the value or error that its caller gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from stampede.errors import Absent
from stampede.model.entry import Entry
from stampede.model.ports import Ticket
from stampede.runtime.colour import Stopped
from stampede.runtime.definitions import slots_of
from stampede.settings.options import Policy

__all__ = [
    "LeftOut",
    "MayCompute",
    "Nothing",
    "Result",
    "comes_back",
    "empty",
    "own_copy",
    "parts_of",
    "value_of",
    "values_of",
]


# Not frozen, for the same reason as an entry. Still, no code writes to an instance that is shared.
@dataclass(slots=True)
class Result:
    """The end of a call, an entry or an error, which is also valid for other callers that began before `as_of`."""

    entry: Entry[Any] | None = None
    error: BaseException | None = None
    ticket: Ticket | None = None  # the proof under which the entry was read from the engine
    stored: bool = False  # computed here, and the engine has stored it
    at: float = 0.0  # the moment from which the entry's durations count
    until: float | None = None  # seconds before which no caller needs to ask again
    meanwhile: bool = False  # it is served while another caller computes
    as_of: float = -inf  # the moment before the engine was asked: a caller that began later must ask again

    @property
    def is_stale(self) -> bool:
        """Whether a stale entry is served instead of a fresh one."""
        return self.until is not None and self.entry is not None and self.entry.fresh <= 0

    @property
    def is_nothing(self) -> bool:
        """Whether the function of many keys has left this key out, now or when it was last called."""
        return isinstance(self.error, LeftOut) or (
            self.entry is not None and self.entry.raised and self.entry.value[0] == _NOTHING
        )

    @property
    def is_interruption(self) -> bool:
        """Whether the error concerns only its caller, like Ctrl-C, and is no failure of the computation."""
        return self.error is not None and not isinstance(self.error, Exception)

    def for_followers(self) -> Result:
        """Return a result to store for other callers, because `value_of` takes the error out of the caller's own."""
        return self if self.error is None else replace(self)

    def for_follower(self) -> Result:
        """Return a result for another caller. An error is copied, so that each caller has its own traceback."""
        return self if self.error is None else replace(self, error=own_copy(self.error))


class MayCompute(Result):
    """The right to compute, for a caller that asks for its other keys first. `entry` is what is stored meanwhile."""

    __slots__ = ()


class LeftOut(Exception):
    """A function of many keys returned no value for this key. Only the batch that asked for it sees this error."""


class Nothing(LeftOut):
    """A key was left out by the one function that all callers use, so all of them get that answer. A caller that asked
    for this key alone gets `Absent`."""


_NOTHING = "stampede.outcome.Nothing"
"""The name of `Nothing` in stored entries. It never changes, even if the class moves."""


def _name_of(kind: type[BaseException]) -> str:
    return _NOTHING if kind is Nothing else f"{kind.__module__}.{kind.__qualname__}"


def value_of(result: Result, policy: Policy) -> Any:
    """Return the value of a result, or raise its error."""
    entry = result.entry
    if result.error is not None:
        error, result.error = result.error, None  # it refers to our caller's frame, which may refer to the result
        if isinstance(error, Nothing):
            error = Absent(*error.args)
        try:
            raise error
        finally:
            del error
    assert entry is not None
    if entry.raised:
        raise Absent(*entry.value[1]) if result.is_nothing else _revived(entry, policy.raises)
    return entry.value


def values_of(results: Mapping[str, Result], policy: Policy) -> dict[str, Any]:
    """Return the values of many results, or raise an error. Then all errors are removed from the results."""
    try:
        return {key: value_of(result, policy) for key, result in results.items()}
    except StopIteration as end:  # a function's own
        empty(results)
        raise Stopped(end) from end
    except BaseException:
        empty(results)
        raise


def empty(results: Mapping[str, Result]) -> None:
    """Remove the errors that no caller will get: they refer to frames that refer to these results."""
    for result in results.values():
        result.error = None


def parts_of(error: BaseException) -> tuple[Any, ...]:
    """Return the value of an entry for an exception of `raises`: its class's name, arguments, and attributes if any."""
    kind, (arguments, state) = type(error), _recipe(error)
    name = _name_of(kind)
    return (name, arguments, {"state": state}) if state else (name, arguments)


def comes_back(entry: Entry[Any], error: BaseException, raises: tuple[type[BaseException], ...]) -> bool:
    """Return whether an entry of `raises` would give an equal exception: the same class, arguments and attributes."""
    try:
        return _is_same(_revived(entry, raises), error)
    except Exception:  # the class's own code
        return False


def own_copy(error: BaseException) -> BaseException:
    """Return a copy of an error with its own traceback, or the error itself if it can't be copied."""
    try:
        twin = _made(type(error), *_recipe(error))
        if not _is_same(twin, error):
            return error
    except Exception:  # the class's own code
        return error
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin.with_traceback(error.__traceback__)


def _recipe(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and attributes that make an equal error, as its builtin base class would pickle it."""
    builtin: Any = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    _, arguments, *state = builtin.__reduce__(error)
    return arguments, _with_own_notes(state[0] if state else {})


def _with_own_notes(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of these attributes, with its own list of notes, because notes can be added later."""
    notes = state.get("__notes__")
    return {**state, "__notes__": [*notes]} if isinstance(notes, list) else {**state}


def _is_same(twin: BaseException, error: BaseException) -> bool:
    return type(twin) is type(error) and _recipe(twin) == _recipe(error) and _slots(twin) == _slots(error)


def _slots(error: BaseException) -> dict[str, Any]:
    """Return the values in `__slots__`, which `_recipe` leaves out. OSError and others make them from the arguments."""
    kind: Any = type(error)
    names = slots_of(kind) - slots_of(BaseException)
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


def _revived(entry: Entry[Any], raises: tuple[type[BaseException], ...]) -> BaseException:
    """Return the exception that an entry of `raises` stands for, of a declared class or a subclass of one."""
    name, arguments, *facts = entry.value
    state = facts[0].get("state", {}) if facts else {}
    known = list(raises)
    for kind in known:
        if _name_of(kind) == name:
            return _made(kind, arguments, state)
        known.extend(kind.__subclasses__())
    return _made(raises[0] if raises else RuntimeError, arguments, state)


def _made(kind: type[BaseException], arguments: tuple[Any, ...], state: Mapping[str, Any]) -> BaseException:
    """Return an error with these arguments and attributes, even if its __init__ takes other arguments."""
    try:
        error = kind(*arguments)
        as_given = _recipe(error)[0] == arguments
    except Exception:  # its own __init__
        as_given = False
    if not as_given:
        error = kind.__new__(kind, *arguments)
        error.args = arguments
    vars(error).clear()
    error.__setstate__(_with_own_notes(state))
    return error
