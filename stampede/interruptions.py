"""What a signal's handler throws into whatever runs: a worker's time limit. It is no failure of what it came out of.

Most time limits are of an ordinary `Exception` (Celery's SoftTimeLimitExceeded, RQ's JobTimeoutException, anybody's
TimeoutError), which whoever catches what foreign code may raise would take for that code's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import CO_VARARGS
from signal import Signals
from types import FrameType

__all__ = ["of_a_caller", "pass_on", "thrown", "thrown_in"]


def thrown_in(error: BaseException) -> bool:
    """Whether a signal's handler has raised it: nothing else is called with a number and the very frame that calls it.

    (A tracer is, with that frame and an event, whose exceptions are thrown in, too.) Not to be seen: what another
    thread has had raised here, by `PyThreadState_SetAsyncExc`, which leaves no frame; and what a handler raises that is
    no Python function.
    """
    return _came_by_a_handler([*_frames(error)])


def of_a_caller(error: BaseException) -> BaseException | None:
    """What was thrown in, and ends a call and no more, if this was or was made of that. What ends the program comes out
    of an event loop by itself."""
    own = thrown(error)
    return None if isinstance(own, (KeyboardInterrupt, SystemExit)) else own


def pass_on(error: BaseException) -> None:
    """Raise what was thrown in, if this was, or if it was made of that by somebody on the way here."""
    own = thrown(error)
    if own is None:
        return
    context = own.__context__
    try:
        raise own
    finally:
        own.__context__ = context  # and not what was made of it, which refers to it
        del own, error, context  # they would refer to themselves through this frame


def thrown(error: BaseException) -> BaseException | None:
    """What was thrown in, if this was, or was made of that by somebody on the way here. (Older ones, which somebody
    above us handles right now, were caught in no frame that this one has passed.)"""
    frames, known = [*_frames(error)], [error]
    while not _came_by_a_handler(frames):
        cause = error.__context__ if error.__cause__ is None else error.__cause__
        if cause is None or cause.__traceback__ is None or any(cause is each for each in known):
            return None
        if cause.__traceback__.tb_frame not in frames:
            return None
        error, frames = cause, [*_frames(cause)]
        known.append(error)
    return error


def _frames(error: BaseException) -> Iterator[FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _came_by_a_handler(frames: Sequence[FrameType]) -> bool:
    # Not the first, which has caught it: one that is asked for its variables keeps them, and so the error, and itself.
    return any(map(_is_handler, frames[1:]))


def _is_handler(frame: FrameType) -> bool:
    """Whether it was called with a signal's number and its caller's frame, or with that and what a tracer is told of.

    (Its caller's is not always the one before it in a traceback: compiled code, as uvloop's, puts some in between.)
    """
    code, caller = frame.f_code, frame.f_back
    count, starred = code.co_argcount, bool(code.co_flags & CO_VARARGS)
    if caller is None or not (count or starred):
        return False
    values = frame.f_locals
    given = [values.get(name) for name in code.co_varnames[:count]]
    if starred:
        more = values.get(code.co_varnames[count + code.co_kwonlyargcount])
        given += more if type(more) is tuple else ()
    for number, each in enumerate(given):
        if each is caller:
            before, behind = given[number - 1] if number else None, given[number + 1] if each is not given[-1] else None
            return type(before) in (int, Signals) or (type(behind) is str and behind in _EVENTS)
    return False


_EVENTS = ("call", "line", "return", "exception", "opcode")
