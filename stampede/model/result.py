"""How a call ends, and what its caller is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from stampede.errors import Absent
from stampede.model.entry import Entry
from stampede.model.policy import Policy
from stampede.model.ports import Ticket
from stampede.runtime.colour import Stopped
from stampede.runtime.definitions import slots_of

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


# Not frozen, for the same reason as an entry; nobody writes to one.
@dataclass(slots=True)
class Result:
    """How a call ends: an entry or an error, and who else may have it: whoever began before `as_of`."""

    entry: Entry[Any] | None = None
    error: BaseException | None = None
    ticket: Ticket | None = None  # the entry was read from the engine under this proof
    stored: bool = False  # computed here, and the engine has it
    at: float = 0.0  # the moment from which the entry's durations count
    until: float | None = None  # nobody needs to ask again before so many seconds have passed
    meanwhile: bool = False  # it is served while somebody computes
    as_of: float = -inf  # the moment before the engine was asked for this: who began later must ask it anew

    @property
    def is_stale(self) -> bool:
        """What was kept is served in place of something fresh."""
        return self.until is not None and self.entry is not None and self.entry.fresh <= 0

    @property
    def is_nothing(self) -> bool:
        """The function of many keys has left this one out, now or when it was asked last."""
        return isinstance(self.error, LeftOut) or (
            self.entry is not None and self.entry.raised and self.entry.value[0] == _NOTHING
        )

    @property
    def is_interruption(self) -> bool:
        """It is its caller's own, like Ctrl-C, and no failure."""
        return self.error is not None and not isinstance(self.error, Exception)

    def for_followers(self) -> Result:
        """The same end, to be kept for others: the caller takes its error out of its own."""
        return self if self.error is None else replace(self)

    def for_follower(self) -> Result:
        """The same end for another caller: errors are copied, so that tracebacks don't grow together."""
        return self if self.error is None else replace(self, error=own_copy(self.error))


class MayCompute(Result):
    """No end yet: leave to compute, to one who asks for other keys before he does; with what is kept meanwhile."""

    __slots__ = ()


class LeftOut(Exception):
    """The function of many keys has no value for one that it was asked for. Only the batch that asked hears of it."""


class Nothing(LeftOut):
    """The same where all callers have one function: an answer for everybody, and `Absent` to who asked for one."""


_NOTHING = "stampede.outcome.Nothing"
"""The name of `Nothing` in stored entries. It stays the same wherever the class is."""


def _name_of(kind: type[BaseException]) -> str:
    return _NOTHING if kind is Nothing else f"{kind.__module__}.{kind.__qualname__}"


def value_of(result: Result, policy: Policy) -> Any:
    """The value of a landing, or its error raised."""
    entry = result.entry
    if result.error is not None:
        error, result.error = result.error, None  # it refers to our caller's frame, which may refer to the landing
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
    """The values of many landings; or an error raised, which may be that of many keys: none of them keeps it."""
    try:
        return {key: value_of(result, policy) for key, result in results.items()}
    except StopIteration as end:  # a function's own
        empty(results)
        raise Stopped(end) from end
    except BaseException:
        empty(results)
        raise


def empty(results: Mapping[str, Result]) -> None:
    """Let go of the errors that nobody is to be given: they refer to frames that refer to these landings."""
    for result in results.values():
        result.error = None


def parts_of(error: BaseException) -> tuple[Any, ...]:
    """What an entry of `raises` holds: the name of its class, its arguments, and its attributes, if it has any."""
    kind, (arguments, state) = type(error), _recipe(error)
    name = _name_of(kind)
    return (name, arguments, {"state": state}) if state else (name, arguments)


def comes_back(entry: Entry[Any], error: BaseException, raises: tuple[type[BaseException], ...]) -> bool:
    """Whether an entry of `raises` gives the very exception: of its class, with its arguments and attributes."""
    try:
        return _is_same(_revived(entry, raises), error)
    except Exception:  # the class's own code
        return False


def own_copy(error: BaseException) -> BaseException:
    """The same error with a traceback of its own; the very same one where it can't be copied."""
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
    """The arguments and attributes of which it is made again, as Python's own class below it would pickle it."""
    builtin: Any = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    _, arguments, *state = builtin.__reduce__(error)
    return arguments, _with_own_notes(state[0] if state else {})


def _with_own_notes(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of these attributes. Notes may be added to, and are each error's own."""
    notes = state.get("__notes__")
    return {**state, "__notes__": [*notes]} if isinstance(notes, list) else {**state}


def _is_same(twin: BaseException, error: BaseException) -> bool:
    return type(twin) is type(error) and _recipe(twin) == _recipe(error) and _slots(twin) == _slots(error)


def _slots(error: BaseException) -> dict[str, Any]:
    """What it has in `__slots__`, which no recipe holds: of OSError and others, this is made of the arguments."""
    kind: Any = type(error)
    names = slots_of(kind) - slots_of(BaseException)
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


def _revived(entry: Entry[Any], raises: tuple[type[BaseException], ...]) -> BaseException:
    """The exception that an entry of `raises` stands for: of a declared class, or one below it."""
    name, arguments, *facts = entry.value
    state = facts[0].get("state", {}) if facts else {}
    known = list(raises)
    for kind in known:
        if _name_of(kind) == name:
            return _made(kind, arguments, state)
        known.extend(kind.__subclasses__())
    return _made(raises[0] if raises else RuntimeError, arguments, state)


def _made(kind: type[BaseException], arguments: tuple[Any, ...], state: Mapping[str, Any]) -> BaseException:
    """An error with these arguments and attributes, also where its __init__ takes others than it hands on."""
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
