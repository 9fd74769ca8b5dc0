"""The `with` blocks of a lock, known by the end that a block's frame keeps on its stack for as long as it lasts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any
from weakref import ReferenceType, ref

from stampede.grip import Grip

__all__ = ["Block", "BlockEnd", "Blocks"]

SUSPENDS = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Of the code of what goes on only while its loop runs."""


class Block:
    """One `with` block: whatever thread or task it ends in, it gives back what it took itself, and nothing else."""

    end: ReferenceType[Any]  # what its frame's stack has of it
    grip: Grip | None = None  # None: it isn't entered yet; without a hold: refused
    caller: ReferenceType[Any] | None = None  # who entered it
    suspends = False  # it goes on only while its loop runs


class Blocks:
    """The `with` blocks of one lock that are about to be entered, by the frames they are in."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}

    def add(self, frame: FrameType, block: Block) -> None:
        if self._blocks:
            for number, other in list(self._blocks.items()):
                if other.end() is None:
                    self._blocks.pop(number, None)
        self._blocks[id(frame)] = block

    def take(self, frame: FrameType) -> Block | None:
        block = self._blocks.pop(id(frame), None)
        if block is None or block.end() is None:
            return None
        if frame.f_code.co_flags & SUSPENDS:
            block.suspends = True
        return block


class BlockEnd:
    """`__exit__` or `__aexit__`. A `with` statement takes it before it enters, and keeps it on its frame's stack.

    What it takes is a `partial`: a call of one keeps it there to its end, where a bound method would be gone before.
    """

    def __init__(self, leave: Callable[..., Any]) -> None:
        self._leave = leave
        self.__doc__ = leave.__doc__

    def __get__(self, lock: Any, owner: type | None = None) -> Callable[..., Any]:
        if lock is None:
            return self._leave
        block = Block()
        end = partial(self._leave, lock, block=block)
        block.end = ref(end)
        lock._blocks.add(sys._getframe(1), block)
        return end
