"""Events as log lines. They contain keys and reasons, but never a value."""

from __future__ import annotations

import logging
from logging import DEBUG, ERROR, WARNING
from math import inf
from time import monotonic

from stampede import events
from stampede.errors import EngineError
from stampede.runtime import process_lock

__all__ = ["DAILY", "log", "log_events"]

log = logging.getLogger("stampede")


DAILY = frozenset({events.Found, events.Waited, events.Served, events.Computed, events.Invalidated})
"""Events of the daily work. They are logged at DEBUG only."""


_MANY = (events.BadBytes, events.Failed, events.LeaseLost, events.Postponed, events.Unkept)
"""Events that may come by the thousand. Above DEBUG, one in ten seconds is logged."""


def log_events(event: events.Event, *, keys: bool = True, cache: str = "", named: bool = False) -> None:
    """Log an event to the logger `stampede`: at WARNING what needs an operator, at DEBUG the daily work.

    This is an observer. Lines contain keys and the messages of errors. If these are secret, use
    `functools.partial(log_events, keys=False)`: lines then contain only the function and the error's type. `cache` is
    the name of the event's cache. With `named`, each line contains it."""
    level = _level(event)
    floods = level > DEBUG and isinstance(event, _MANY)
    if floods and not _is_due(event, cache):
        level, floods = DEBUG, False
    if log.isEnabledFor(level):
        what = repr(event.key) if keys and event.key else event.scope or "(all)"
        text, *arguments = _line(event, what, keys=keys)
        if floods:
            text = f"{text} (more like this in the next {_pause(event):.0f} s are not written)"
        if named and not isinstance(event, (events.EngineDown, events.EngineUp)):  # their engine's name has it
            text, arguments = f"cache %r: {text}", [cache, *arguments]
        names = {"stampede.event": type(event).__name__, "stampede.scope": event.scope}
        log.log(level, text, *arguments, extra=names | ({"stampede.key": event.key} if keys else {}))


def _level(event: events.Event) -> int:
    match event:
        case events.Unkept(wanted=wanted):
            return DEBUG if wanted else ERROR
        case events.LeaseLost(invalidated=True):
            return DEBUG  # as it should be
        case events.Failed(error=RecursionError()):  # raised in all calls that are under way, at once
            return WARNING if _has_room(LINE) else DEBUG
        case events.Failed() | events.LeaseLost() | events.BadBytes():
            return WARNING
        case events.EngineDown() | events.EngineUp() | events.Untold() | events.Postponed():
            return WARNING
        case _:
            return DEBUG


def _is_due(event: events.Event, cache: str) -> bool:
    """Return whether an event may be logged at its level. The next ones of its kind come too soon, and go to DEBUG."""
    kind = cache, event.scope, type(event.error if isinstance(event, events.Failed) else event).__qualname__
    now = monotonic()
    with process_lock.lock:
        due = _due.get(kind, -inf)
        if now < due or (len(_due) >= MOST and due == -inf):
            return False
        _due[kind] = now + _pause(event)
    return True


def _pause(event: events.Event) -> float:
    return LASTING if isinstance(event, events.Unkept) else FLOOD


def _has_room(frames: int) -> bool:
    """Return whether the stack has room for so many frames. At the end of the stack a line would be lost half-way. So
    it is not written there, but by a call further up."""
    try:
        return frames == 0 or _has_room(frames - 1)
    except RecursionError:
        return False


LINE = 100
"""Frames that the handlers of a log line may need."""


FLOOD = 10.0
"""Seconds between two lines of one kind about one function of one cache."""

LASTING = 600.0
"""Seconds between two lines about values of a function that can't be stored, because only new code changes that."""

MOST = 10_000
"""The most entries of `_due`, by cache, function and kind."""

_due: dict[tuple[str, str, str], float] = {}  # when the next line may be written


def _line(event: events.Event, what: str, *, keys: bool) -> tuple[object, ...]:
    match event:
        case events.Found():
            return "found %s", what
        case events.Waited():
            return "waited %.3f s for %s, which another caller computed", event.seconds, what
        case events.Served():
            return "served %s as it was stored: %s", what, event.why
        case events.Computed():
            text = "computed %s in %.3f s: %s" if event.stored else "computed %s in %.3f s: %s; not stored"
            return text, what, event.cost, event.why
        case events.Failed():
            return "computing %s failed after %.3f s (%s): %s", what, event.cost, event.why, _error(event.error, keys)
        case events.LeaseLost(max_hold=float(longest)):
            return _HELD, what, longest
        case events.LeaseLost(invalidated=True):
            return "the value of %s was only returned, not stored: the key was invalidated or set meanwhile", what
        case events.LeaseLost():
            text = "the value of %s was only returned, not stored: the key was invalidated or set, or its lease ended"
            return text, what
        case events.Unkept():
            text = "%s can't be stored, which is an error because of strict: %s"
            return text if event.strict else "%s was returned, but not stored: %s", what, event.why
        case events.BadBytes():
            return "the stored entry of %s was refused, and its value is computed again: %s", what, event.why
        case events.Invalidated():
            return "%s: %s", event.verb, what
        case events.Postponed():
            text = "%s of %s could not be made, and is repeated until it can: %s"
            return text, event.verb, what, _error(event.error, keys)
        case events.EngineDown():
            now = "and calls raise it" if event.strict else "calls go on without it"
            return "%s %s, %s: %s", event.engine, _state(event.error), now, _error(event.error, keys)
        case events.EngineUp():
            return "%s is back after %.1f s", event.engine, event.seconds
        case events.Untold():
            return "%s does not announce changes to this process: %s", event.engine, event.how
        case _:
            return "%s: %s", type(event).__name__, what


_HELD = (
    "computing %s took longer than max_hold, which is %g s here: the value was only returned, not stored, and the next "
    "caller computes it again. Set @cached(max_hold=...) to more than it takes"
)


def _state(error: BaseException) -> str:
    if not isinstance(error, EngineError) or not error.partial:
        return "is down"
    return "refuses new values" if error.refused else "is down in part"


def _error(error: BaseException, message: bool) -> str:
    name = type(error).__qualname__
    return f"{name}: {error}" if message and str(error) else name
