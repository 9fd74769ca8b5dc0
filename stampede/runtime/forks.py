"""What is done around a fork: one hook of the interpreter's for all, so that nobody's failure stops the others'."""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

__all__ = ["as_in_child", "closing", "each", "in_child", "in_parent", "on_fork"]

_log = logging.getLogger("stampede")

Hook = Callable[[], object]


class _Moment:
    """What is to be done at one moment of a fork. A method counts for as long as its object lives."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self._hooks: dict[int, Callable[[], Hook | None]] = {}

    def add(self, hook: Hook) -> None:
        number, bound = next(self._count), getattr(hook, "__self__", None)
        if bound is None:
            self._hooks[number] = lambda: hook
        else:
            # No WeakMethod: its own callback fails when the interpreter ends, and says so.
            owner, function = weakref.ref(bound, lambda _: self._hooks.pop(number, None)), cast("Any", hook).__func__
            self._hooks[number] = lambda: None if (it := owner()) is None else function.__get__(it)

    def hooks(self) -> list[Hook]:
        """In the order in which they came."""
        found = [refer() for refer in list(self._hooks.values())]
        return [hook for hook in found if hook is not None]


_before, _parent, _child = _Moment(), _Moment(), _Moment()

on_fork, in_parent, in_child = _before.add, _parent.add, _child.add
"""Have a function or a method called before each fork; behind it in the parent; in the child."""


def each(hooks: Iterable[Hook]) -> None:
    """Call them all, whichever of them fail."""
    for hook in hooks:
        try:
            hook()
        except BaseException:
            _log.exception("around a fork, %s failed", getattr(hook, "__qualname__", hook))


def closing(owner: object, close: Hook) -> Callable[[], object]:
    """What closes an engine, once: if nobody calls it, the collector does, or the interpreter's end. Never in a forked
    child: what is open there is the parent's. `close` must not refer to the owner."""
    return weakref.finalize(owner, _in_this_process, os.getpid(), close)


def _in_this_process(pid: int, close: Hook) -> None:
    if os.getpid() == pid:
        close()


def as_in_child() -> None:
    """Begin again with locks, threads and connections that are this process's own."""
    each(_child.hooks())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: each(reversed(_before.hooks())),
        after_in_parent=lambda: each(_parent.hooks()),
        after_in_child=as_in_child,
    )
