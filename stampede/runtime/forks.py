"""Hooks around a fork. The interpreter knows one of them, which calls all others, so that no failure stops the rest."""

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
    """The hooks for one moment of a fork. A method is called only while its object lives."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self._hooks: dict[int, Callable[[], Hook | None]] = {}

    def add(self, hook: Hook) -> None:
        number, bound = next(self._count), getattr(hook, "__self__", None)
        if bound is None:
            self._hooks[number] = lambda: hook
        else:
            # Not WeakMethod: its callback fails at the end of the interpreter, and prints that.
            owner, function = weakref.ref(bound, lambda _: self._hooks.pop(number, None)), cast("Any", hook).__func__
            self._hooks[number] = lambda: None if (living := owner()) is None else function.__get__(living)

    def hooks(self) -> list[Hook]:
        """Return the hooks in the order in which they were added."""
        found = [refer() for refer in list(self._hooks.values())]
        return [hook for hook in found if hook is not None]


_before, _parent, _child = _Moment(), _Moment(), _Moment()

on_fork, in_parent, in_child = _before.add, _parent.add, _child.add
"""Have a function or method called before each fork (`on_fork`), after it in the parent, or after it in the child."""


def each(hooks: Iterable[Hook]) -> None:
    """Call all hooks. The failure of one is logged, and does not stop the others."""
    for hook in hooks:
        try:
            hook()
        except BaseException:
            _log.exception("%s failed before or after a fork", getattr(hook, "__qualname__", hook))


def closing(owner: object, close: Hook) -> Callable[[], object]:
    """Return a function that calls `close` once. It also runs when the owner is collected, or the interpreter ends. It
    never runs in a forked child, where open files and connections are the parent's. `close` must not refer to the
    owner."""
    return weakref.finalize(owner, _in_this_process, os.getpid(), close)


def _in_this_process(pid: int, close: Hook) -> None:
    if os.getpid() == pid:
        close()


def as_in_child() -> None:
    """Call the hooks for a forked child, which replace locks, threads and connections by new ones."""
    each(_child.hooks())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: each(reversed(_before.hooks())),
        after_in_parent=lambda: each(_parent.hooks()),
        after_in_child=as_in_child,
    )
