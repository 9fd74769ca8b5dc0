"""Interrupts a call at each moment at which a finalizer or a signal handler may run."""

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
    """Run `act`, and call `at` before each line of our code: a finalizer may run before any line."""
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

    with _uncollected():  # finalizers of other tests' objects would add lines
        _traced(act, trace)


def lines_in(act: Callable[[], object]) -> dict[Line, None]:
    """The lines of our code that `act` runs, in order."""
    lines: dict[Line, None] = {}
    lines_of(act, lambda line: lines.setdefault(line))
    return lines


def looked(look: Callable[[], Mapping[Line, None]]) -> dict[Line, bool]:
    """The lines of three runs, and whether each is in all of them. Lines of the keeper's thread never count."""
    looks = [look() for _ in range(3)]
    return {
        line: all(line in each for each in looks) and not line[0].endswith("keeper.py")
        for line in itertools.chain(*looks)
    }


def points_of(
    act: Callable[[], object], at: Callable[[Point], object], where: Callable[[FrameType], bool] = ours
) -> None:
    """Run `act`, and call `at` at each moment in our code at which the interpreter handles signals.

    If Python traces only lines and not instructions, these are the starts of lines.
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
            frame.f_trace = goes_on  # from Python 3.13 on, it must be set first
            frame.f_trace_opcodes = True
        return goes_on

    # A finalizer of another test's object could be interrupted instead of `act`, unnoticed. And Python 3.12.1 crashes
    # if another thread collects while this one is traced by instructions.
    with _uncollected():
        _traced(act, entered)


def interrupted(
    act: Callable[[], object], number: int, *, where: Callable[[FrameType], bool] = ours, by: type[BaseException]
) -> BaseException | None:
    """Run `act`, interrupted at the moment with this number. Return its error; None if it has fewer moments."""
    left = number

    def at(point: Point) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise by(f"at {point[0].co_qualname}, {point[1]}")

    # No frame here may keep the error: its traceback keeps the frames, and the cycle would keep all their objects.
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
    # Python 3.12 traces instructions only if this is set before. Then only one thread at a time may be traced.
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
    """The instructions before which signals are handled: after each call, at each turn of a loop, and at the start."""
    return frozenset(_behind(code))


def _behind(code: CodeType) -> Iterator[int]:
    bytecode, serves = dis.Bytecode(code), None
    for instruction in bytecode:
        if serves is not None and _guarded(bytecode, serves) == _guarded(bytecode, instruction.offset):
            yield instruction.offset
        serves = instruction.offset if instruction.opname.startswith(_SERVE) else None


@cache
def _begins(code: CodeType) -> frozenset[int]:
    """All offsets, except those directly after a guarded block: a signal there is handled inside the block."""
    bytecode = dis.Bytecode(code)
    ends = {entry.end for entry in bytecode.exception_entries}
    left = {end for end in ends if _guarded(bytecode, end) is None}
    return frozenset(range(0, len(code.co_code), 2)) - left


_SERVE = ("CALL", "RESUME", "JUMP_BACKWARD")


def _guarded(bytecode: Any, offset: int) -> object:
    """The handler of an exception at this offset. An exception after a call belongs to the call, not to the next
    instruction: after `return f()` in a `with` block, the next instruction is outside the block."""
    return next((entry.target for entry in bytecode.exception_entries if entry.start <= offset < entry.end), None)
