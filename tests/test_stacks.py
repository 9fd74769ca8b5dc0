"""The look at all threads, which the interpreter takes with its list of them locked."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from stampede.stacks import innermost_frames, is_in


@pytest.fixture
def threads() -> Iterator[list[threading.Thread]]:
    """Some that are in `rest`, at which nobody has looked yet: to do so allocates."""
    inside, over = threading.Barrier(6), threading.Event()
    threads = [threading.Thread(target=rest, args=(inside, over)) for _ in range(5)]
    for thread in threads:
        thread.start()
    inside.wait()
    yield threads
    over.set()
    for thread in threads:
        thread.join()


def rest(inside: threading.Barrier, over: threading.Event) -> None:
    inside.wait()
    over.wait()


def test_every_thread_is_seen(threads: list[threading.Thread]) -> None:
    """Who waits for a write would take the turn of somebody who is still at it."""
    frame = innermost_frames()[threads[0].ident or 0]
    while frame.f_code is not rest.__code__:
        assert frame.f_back is not None
        frame = frame.f_back


@pytest.mark.skipif(sys.version_info >= (3, 11, 9), reason="this interpreter collects nothing meanwhile by itself")
@pytest.mark.parametrize("collects", [True, False])
def test_no_finalizer_runs_meanwhile(threads: list[threading.Thread], collects: bool) -> None:
    """One that closes a file lets another thread on, which wants the same lock, and has all others stand still: the
    process would hang for ever."""
    lines, first = inspect.getsourcelines(innermost_frames)
    looks = {first + number for number, line in enumerate(lines) if "_current_frames()" in line}
    seen = []

    def collected(phase: str, info: object) -> None:
        frame = sys._getframe(1)
        if frame.f_code is innermost_frames.__code__ and frame.f_lineno in looks:
            seen.append(phase)

    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        if not collects:
            gc.disable()
        innermost_frames()
        assert gc.isenabled() is collects
    finally:
        gc.enable()
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    assert not seen


def steps(depth: int) -> Iterator[None]:
    if depth:
        yield from steps(depth - 1)
    while True:
        yield


def test_who_runs_on_meanwhile_is_seen() -> None:
    """A generator that yields leaves its caller's stack: two would write at once, and each end the other's write."""
    frames: list[FrameType] = []
    inside, over = threading.Event(), threading.Event()

    def writing() -> None:
        frames.append(sys._getframe())
        inside.set()
        while not over.is_set():
            for _, _ in zip(range(100), steps(30), strict=False):
                pass

    interval, thread = sys.getswitchinterval(), threading.Thread(target=writing)
    thread.start()
    try:
        assert inside.wait(10)
        sys.setswitchinterval(1e-6)
        assert all(is_in(thread.ident or 0, frames[0]) for _ in range(30_000))
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
    assert not is_in(thread.ident or 0, frames[0])
