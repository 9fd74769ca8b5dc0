"""An error, as it goes into a record: its type, what it says, and where it came from, of bounded size."""

from __future__ import annotations

from traceback import TracebackException

from stampede.ports import Problem

__all__ = ["problem_of"]

NAME, MESSAGE, TRACEBACK = 200, 4000, 16_000
"""Characters of each, at most."""


def problem_of(error: BaseException) -> Problem:
    """Of a traceback that is too long, what is nearest to the error is kept."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Problem(name[:NAME], _said(error)[:MESSAGE], _trace(error))


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # it is the user's own __str__
        return f"<str() of it failed: {type(other).__name__}>"


def _trace(error: BaseException) -> str:
    try:
        text = "".join(TracebackException.from_exception(error, compact=True).format())
    except Exception:  # sources that can't be read, or one's own attributes
        return ""
    return text if len(text) <= TRACEBACK else f"...\n{text[-TRACEBACK:]}"
