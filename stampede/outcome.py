"""How a call ends, and what its caller is given."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from stampede.codec.alike import alike, slots_of
from stampede.colour import Stopped
from stampede.entry import Entry
from stampede.errors import Absent
from stampede.policy import Policy
from stampede.ports import Ticket

__all__ = [
    "Landing",
    "Leave",
    "LeftOut",
    "Nothing",
    "all_landed",
    "comes_back",
    "empty",
    "landed",
    "own_copy",
    "parts_of",
]


# Not frozen, for the same reason as an entry; nobody writes to one.
@dataclass(slots=True)
class Landing:
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

    def for_followers(self) -> Landing:
        """The same end, to be kept for others: the caller takes its error out of its own."""
        return self if self.error is None else replace(self)

    def for_follower(self) -> Landing:
        """The same end for another caller: errors are copied, so that tracebacks don't grow together."""
        return self if self.error is None else replace(self, error=own_copy(self.error))


class Leave(Landing):
    """No end yet: leave to compute, to one who asks for other keys before he does; with what is kept meanwhile."""

    __slots__ = ()


class LeftOut(Exception):
    """The function of many keys has no value for one that it was asked for. Only the batch that asked hears of it."""


class Nothing(LeftOut):
    """The same where all callers have one function: an answer for everybody, and `Absent` to who asked for one."""


_NOTHING = f"{Nothing.__module__}.{Nothing.__qualname__}"


def landed(landing: Landing, policy: Policy) -> Any:
    """The value of a landing, or its error raised."""
    entry = landing.entry
    if landing.error is not None:
        error, landing.error = landing.error, None  # it refers to our caller's frame, which may refer to the landing
        if isinstance(error, Nothing):
            error = Absent(*error.args)
        try:
            raise error
        finally:
            del error
    assert entry is not None
    if entry.raised:
        raise Absent(*entry.value[1]) if landing.is_nothing else _revived(entry, policy.raises)
    return entry.value


def all_landed(landings: Mapping[str, Landing], policy: Policy) -> dict[str, Any]:
    """The values of many landings; or an error raised, which may be that of many keys: none of them keeps it."""
    try:
        return {key: landed(landing, policy) for key, landing in landings.items()}
    except StopIteration as end:  # a function's own
        empty(landings)
        raise Stopped(end) from end
    except BaseException:
        empty(landings)
        raise


def empty(landings: Mapping[str, Landing]) -> None:
    """Let go of the errors that nobody is to be given: they refer to frames that refer to these landings."""
    for landing in landings.values():
        landing.error = None


def parts_of(error: BaseException) -> tuple[Any, ...]:
    """What an entry of `raises` holds: the name of its class, its arguments, and what else is not made of these."""
    kind, state = type(error), _state(vars(error))
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        twin = _made(kind, error.args)
    except Exception:  # then it doesn't come back, which is found out by who tries
        return name, error.args
    facts: dict[str, Any] = {}
    if not _same(state, vars(twin)):
        facts["state"] = state
    if slots := {name: value for name, value in _slots(error).items() if not _same(value, _slots(twin).get(name))}:
        facts["slots"] = slots
    if error.__cause__ is not None and (cause := _cause(error.__cause__)) is not None:
        facts["cause"] = cause
    return (name, error.args, facts) if facts else (name, error.args)


def comes_back(entry: Entry[Any], error: BaseException, raises: tuple[type[BaseException], ...]) -> bool:
    """Whether an entry of `raises` gives the very exception: of its class, with its arguments and attributes."""
    try:
        twin = _revived(entry, raises)
        return type(twin) is type(error) and _held(twin) == _held(error)
    except Exception:  # the class's own code
        return False


def _held(error: BaseException) -> list[Any]:
    # An empty dict is there once somebody has asked for it.
    return [_slots(error), *[each for each in error.__reduce__()[:3] if each], vars(error)]


def _slots(error: BaseException) -> dict[str, Any]:
    """What it has beside its arguments and its dict: an OSError's number, what a class has declared as `__slots__`."""
    kind: Any = type(error)
    return {name: getattr(error, name) for name in sorted(slots_of(kind)) if hasattr(error, name)}


def _state(held: dict[str, Any]) -> dict[str, Any]:
    """Its attributes; notes may be added to, and are each one's own."""
    notes = held.get("__notes__")
    return held | {"__notes__": [*notes]} if type(notes) is list else dict(held)


def _same(value: Any, other: Any) -> bool:
    try:
        return value is other or alike(value, other)
    except Exception:  # of an attribute's own __eq__
        return False


def _all_of(parts: tuple[Any, ...]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    name, arguments, *facts = parts
    return name, arguments, facts[0] if facts else {}


def _cause(error: BaseException) -> list[Any] | None:
    """A cause, where it is Python's own and plain: another could not be found, or keep the whole from being kept."""
    name, args, facts = _all_of(parts_of(error))
    known = getattr(builtins, type(error).__qualname__, None) is type(error)
    return [name, [*args], facts] if known and _is_plain([args, facts]) else None


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str for key in value) and _is_plain([*value.values()])
    return value is None or type(value) in (bool, int, float, str)


def _revived(entry: Entry[Any], raises: tuple[type[BaseException], ...]) -> BaseException:
    """The exception that an entry of `raises` stands for: of a declared class, or one below it."""
    name, arguments, facts = _all_of(entry.value)
    known = list(raises)
    for kind in known:
        if f"{kind.__module__}.{kind.__qualname__}" == name:
            return _restored(kind, arguments, facts)
        known.extend(kind.__subclasses__())
    return _restored(raises[0] if raises else RuntimeError, arguments, facts)


def _restored(kind: Any, arguments: tuple[Any, ...], facts: dict[str, Any]) -> BaseException:
    error = _made(kind, arguments)
    if "cause" in facts:
        name, args, more = facts["cause"]
        cause: Any = getattr(builtins, name.removeprefix("builtins."), None)
        if isinstance(cause, type) and issubclass(cause, BaseException):
            try:
                error.__cause__ = _restored(cause, tuple(args), more)
            except Exception:  # as of a group of none: only foreign bytes say so
                pass
    for name, value in facts.get("slots", {}).items():
        if name in slots_of(kind):
            setattr(error, name, value)
    if "state" in facts:
        held = vars(error)
        held.clear()
        held.update(_state(facts["state"]))
    return error


def _made(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    """An error with these arguments, also where its __init__ takes others than it hands on."""
    try:
        error = kind(*arguments)
        if error.args == arguments:
            return error
    except Exception:  # its own __init__
        pass
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    return error


def own_copy(error: BaseException) -> BaseException:
    """The same error with a traceback of its own; the very same one where it can't be copied."""
    try:
        twin = copy.copy(error)
        if type(twin) is not type(error):
            return error
        if twin.args != error.args:
            raise ValueError  # its __init__ makes other arguments of these: do without it
    except Exception:  # its own __init__, __reduce_ex__ or __eq__; below, its __new__
        try:
            twin = type(error).__new__(type(error), *error.args)
            twin.__dict__.update(error.__dict__)
        except Exception:
            return error
    held = _slots(twin)
    for name, value in _slots(error).items():  # copy knows nothing of them
        if held.get(name) is value:
            continue  # an OSError whose `filename2` has been set to None has another message
        with suppress(AttributeError, TypeError):  # an ExceptionGroup's can't be set, and are arguments
            setattr(twin, name, value)
    twin.__dict__.update(_state(vars(error)))
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin.with_traceback(error.__traceback__)
