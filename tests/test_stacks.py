"""The look at all threads, which the interpreter takes with its list of them locked."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from stampede.stacks import _undisturbed, innermost_frames, is_in


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


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this interpreter collects nothing meanwhile by itself")
@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("look", [innermost_frames, lambda: is_in(threading.get_ident(), sys._getframe())])
def test_no_finalizer_runs_meanwhile(
    threads: list[threading.Thread], collects: bool, look: Callable[[], object]
) -> None:
    """One that closes a file lets another thread on, which wants the same lock, and has all others stand still: the
    process would hang for ever. Or it leaves the frames at which we look."""
    lines, first = inspect.getsourcelines(_undisturbed)
    looks = {first + number for number, line in enumerate(lines) if "return look()" in line}
    seen = []

    def collected(phase: str, info: object) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _undisturbed.__code__ and frame.f_lineno in looks:
                seen.append(phase)
            frame = frame.f_back

    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        if not collects:
            gc.disable()
        look()
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
