"""Moments of a call at which a finalizer, or a signal's handler, may run: before each line, or wherever it can be."""

from __future__ import annotations

import dis
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import stampede

__all__ = ["Line", "interrupted", "lines_in", "lines_of", "looked"]

Line: TypeAlias = tuple[str, int]
Point: TypeAlias = tuple[CodeType, int]

OURS = str(Path(stampede.__file__).parent) + os.sep


def ours(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith((OURS, "<stampede"))


def lines_of(
    act: Callable[[], object], at: Callable[[Line], object], where: Callable[[FrameType], bool] = ours
) -> None:
    """Do `act`, and tell of each line of ours before it runs: any of them may be interrupted by a finalizer."""
    busy = False

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal busy
        if busy or not where(frame):
            return None
        if event == "line":
            busy = True
            try:
                at((frame.f_code.co_filename, frame.f_lineno))
            finally:
                busy = False
        return trace

    with _uncollected():  # finalizers of what other tests have left are no lines of this
        _traced(act, trace)


def lines_in(act: Callable[[], object]) -> dict[Line, None]:
    """The lines of ours in it, in their order."""
    lines: dict[Line, None] = {}
    lines_of(act, lambda line: lines.setdefault(line))
    return lines


def looked(look: Callable[[], Mapping[Line, None]]) -> dict[Line, bool]:
    """What three looks have seen, and whether it is there each time. The keeper's thread may be at any line of its."""
    looks = [look() for _ in range(3)]
    return {
        line: all(line in each for each in looks) and not line[0].endswith("keeper.py")
        for line in itertools.chain(*looks)
    }


def points_of(
    act: Callable[[], object], at: Callable[[Point], object], where: Callable[[FrameType], bool] = ours
) -> None:
    """Do `act`, and tell of each moment in it, in our code, at which the interpreter serves signals.

    Where Python tells of no instructions, only of lines, it is the begin of each.
    """
    instructions = _tells_instructions()

    def entered(frame: FrameType, event: str, _: object) -> Any:
        if not where(frame):
            return None
        code = frame.f_code
        told, served = ("opcode", _served(code)) if instructions else ("line", _begins(code))

        def goes_on(frame: FrameType, event: str, _: object) -> Any:  # called for each instruction
            if event == told and frame.f_lasti in served:
                at((code, frame.f_lasti))
            return goes_on

        if instructions:
            frame.f_trace = goes_on  # from Python 3.13 on, only who is traced can be told of them
            frame.f_trace_opcodes = True
        return goes_on

    # A finalizer of what other tests have left would be interrupted in this one's place, and nobody hear of it; and
    # Python 3.12.1 crashes where another thread collects while this one is traced by its instructions.
    with _uncollected():
        _traced(act, entered)


def interrupted(
    act: Callable[[], object], number: int, *, where: Callable[[FrameType], bool] = ours, by: type[BaseException]
) -> BaseException | None:
    """Do `act`, interrupted at its moment of this number. What came of it; None: it has not so many."""
    left = number

    def at(point: Point) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise by(f"at {point[0].co_qualname}, {point[1]}")

    # No frame of ours may keep the error, whose frames would keep that: what it holds would never be let go of.
    try:
        points_of(act, at, where)
    except BaseException as error:
        return error
    return by("swallowed") if left < 0 else None


@contextmanager
def _uncollected() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _traced(act: Callable[[], object], trace: Any) -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)


@cache
def _tells_instructions() -> bool:
    # Python 3.12 tells of them only if this was set before it traces; then no two threads may be traced at once.
    sys._getframe().f_trace_opcodes = True
    told: list[str] = []

    def trace(frame: Any, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        told.append(event)
        return trace

    _traced(lambda: None, trace)
    return "opcode" in told


@cache
def _served(code: CodeType) -> frozenset[int]:
    """The instructions before which signals are served: behind each call, at each turn of a loop, and at the begin."""
    return frozenset(_behind(code))


def _behind(code: CodeType) -> Iterator[int]:
    bytecode, serves = dis.Bytecode(code), None
    for instruction in bytecode:
        if serves is not None and _guarded(bytecode, serves) == _guarded(bytecode, instruction.offset):
            yield instruction.offset
        serves = instruction.offset if instruction.opname.startswith(_SERVE) else None


@cache
def _begins(code: CodeType) -> frozenset[int]:
    """All, but those with which a block is left: what is served before them is served inside of it."""
    bytecode = dis.Bytecode(code)
    ends = {entry.end for entry in bytecode.exception_entries}
    left = {end for end in ends if _guarded(bytecode, end) is None}
    return frozenset(range(0, len(code.co_code), 2)) - left


_SERVE = ("CALL", "RESUME", "JUMP_BACKWARD")


def _guarded(bytecode: Any, offset: int) -> object:
    """Where an exception goes on. One that is served behind a call is the call's, and not the next instruction's, which
    for `return f()` in a `with` block is out of the block."""
    return next((entry.target for entry in bytecode.exception_entries if entry.start <= offset < entry.end), None)
