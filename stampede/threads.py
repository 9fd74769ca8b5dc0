"""Threads that serve: daemons, begun when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

__all__ = ["begun"]


def begun(name: str, work: Callable[..., object], *args: Any) -> Thread | None:
    """A thread that is at it. None: there is none to be had, which each caller survives in its own way.

    So it is where the system has no more, while the interpreter ends, and always in an isolated subinterpreter, which
    refuses daemons when they are made; others would keep it from ending.
    """
    try:
        thread = Thread(target=work, name=name, args=args, daemon=True)
        thread.start()
    except RuntimeError:
        return None
    return thread
