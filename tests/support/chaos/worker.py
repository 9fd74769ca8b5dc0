"""One worker process: its threads and event loop make calls. Then it heals and closes. `python -m chaos.worker PART`.

It writes its journal to stdout, and reads commands from stdin: `begin WHEN SECONDS`, `heal N`, `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import random
import sys
import threading
import time
import traceback
from typing import Any

from chaos.caller import Caller, Functions, Interrupted
from chaos.journal import Journal
from chaos.plan import Part, Step, Whim, all_keys, steps
from stampede import Cache, events

PATIENCE = 60.0
"""Seconds in which every started call must end, under any fault of the round."""


def main() -> None:
    faulthandler.enable()
    part = Part(**json.loads(sys.argv[1]))
    out = os.dup(1)
    os.dup2(2, 1)  # everything printed goes to standard error
    journal = Journal(part.name, out)
    logging.basicConfig(level=logging.ERROR)
    journal.watch_for_stalls()
    threading.Thread.start = _watched_start  # type: ignore[method-assign]
    if part.uvloop:
        _new_uvloop().close()  # the first uvloop opens files that stay open
    before = _open_now()
    worker = Worker(part, journal)
    journal.write("ready", time.monotonic())
    _, begin, seconds = sys.stdin.readline().split()
    worker.run(float(begin), float(begin) + float(seconds))
    journal.write("rested", time.monotonic())
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "heal":
            worker.heal(number)
        else:
            worker.close()
            del worker
            journal.write("closed", _left(before))
            break
    os._exit(0)


def _open_now() -> set[str]:
    """Files and sockets of this process, and its threads except those that remain."""
    gc.collect()
    found = {thread.name for thread in threading.enumerate() if not thread.name.startswith(_STAY)}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return {each for each in found if "/proc/" not in each and "stamps" not in each}  # no listing, no mapped files


# Threads that belong to the process, not to a cache.
_STAY = (
    "MainThread",
    "chaos",
    "stampede-keeper",
    "stampede-watch",
    "stampede-refresh",
    "stampede-io",
    "stampede-ask",
    "stampede-wait",
    "stampede-postgres-tell",  # these three end by themselves
    "stampede-postgres-sweep",
    "stampede-postgres-reap",
)


def _left(before: set[str]) -> list[str]:
    """The files, sockets and threads that remain after the cache was closed."""
    end = time.monotonic() + 5
    while True:
        left = _open_now() - before
        if not left or time.monotonic() > end:
            return sorted(left)
        time.sleep(0.05)


_starting: set[int] = set()
"""Threads that are starting another thread. CPython 3.11 may raise their exception in the new thread, which then dies
before it can report its start, and `Thread.start` never returns."""

_start = threading.Thread.start


def _watched_start(thread: threading.Thread) -> None:
    me = threading.get_ident()
    _starting.add(me)
    try:
        _start(thread)
    finally:
        _starting.discard(me)


def _new_uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


class Worker:
    def __init__(self, part: Part, journal: Journal) -> None:
        self._part = part
        self._journal = journal
        self._cache = Cache(
            part.url, local=part.local, namespace=part.namespace, observers=[self._hear], **part.options
        )
        self._functions = Functions(self._cache, journal)

    def _hear(self, event: events.Event) -> None:
        match event:
            case events.EngineDown():
                self._journal.write("down", time.monotonic(), str(event.error)[:200], type(event.error).__name__)
            case events.EngineUp():
                self._journal.write("up", time.monotonic(), event.seconds)
            case events.BadBytes():
                self._journal.write("bad", time.monotonic(), event.key, event.why[:200])

    def run(self, begin: float, end: float) -> None:
        """Run all callers between two moments of the monotonic clock, which all processes of a machine share."""
        self._begin, self._end = begin, end
        part = self._part
        callers = [self._caller(suspending=False) for _ in range(part.threads)]
        jobs = [(self._calls, number, caller) for number, caller in enumerate(callers)]
        threads = [self._thread(f"chaos-{job[1]}", *job) for job in jobs]
        strikes = [self._thread("chaos-strikes", self._strike, threads, callers)] if part.interrupts else []
        threads.append(self._thread("chaos-loop", self._loop))
        for thread in threads + strikes:
            thread.start()
        end += PATIENCE
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                faulthandler.dump_traceback(all_threads=True)
                self._journal.write("hang", f"{thread.name} never came back")

    def _thread(self, name: str, *job: Any) -> threading.Thread:
        return threading.Thread(target=self._guarded, args=job, name=name, daemon=True)

    def _guarded(self, body: Any, *args: Any) -> None:
        try:
            body(*args)
        except BaseException:
            self._journal.write("hang", f"a caller ended: {traceback.format_exc()[-1500:]}")

    def _caller(self, *, suspending: bool) -> Caller:
        return Caller(self._cache, self._functions, self._journal, suspending=suspending)

    def _calls(self, number: int, caller: Caller) -> None:
        script = steps(self._part, number, suspending=False)
        time.sleep(max(0.0, self._begin - time.monotonic()))
        while time.monotonic() < self._end:
            try:
                step = next(script, None)
                if step is None:
                    return  # the script itself was interrupted
                time.sleep(step.pause)
                _run(caller.act(step))
            except Interrupted:
                self._journal.write("done", caller.call, time.monotonic(), "Interrupted", {}, "")

    def _strike(self, threads: list[threading.Thread], callers: list[Caller]) -> None:
        """Interrupt calling threads at random moments."""
        dice = random.Random(f"{self._part.seed} {self._part.name} strikes")
        while time.monotonic() < self._end:
            time.sleep(dice.expovariate(1 / self._part.interrupts))
            chosen = dice.randrange(len(callers))
            thread = threads[chosen].ident
            if callers[chosen].exposed and thread is not None and thread not in _starting:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interrupted))

    def _loop(self) -> None:
        with asyncio.Runner(loop_factory=_new_uvloop if self._part.uvloop else None) as runner:
            runner.run(self._tasks())

    async def _tasks(self) -> None:
        part = self._part

        async def calls(number: int) -> None:
            caller = self._caller(suspending=True)
            await asyncio.sleep(max(0.0, self._begin - time.monotonic()))
            for step in steps(part, number, suspending=True):
                await asyncio.sleep(step.pause)
                if time.monotonic() > self._end:
                    return
                await caller.act(step)

        tasks = [asyncio.create_task(calls(part.threads + number)) for number in range(part.tasks)]
        _, late = await asyncio.wait(tasks, timeout=self._end + PATIENCE - time.monotonic())
        for task in late:
            task.print_stack()
            self._journal.write("hang", f"a task never came back: {task!r}"[:500])
        for task in tasks:
            if task not in late:
                task.result()

    # -- afterwards -----------------------------------------------------------------------------------------------

    def heal(self, number: str) -> None:
        """After the faults, every key of every interface must give a value."""
        whim = Whim(0.01, False, 0.0)
        for key in all_keys("cache", "sync"):
            _run(self._caller(suspending=False).act(_asked(key, whim)))

        async def suspending() -> None:
            for key in all_keys("cache", "async"):
                await self._caller(suspending=True).act(_asked(key, whim))

        asyncio.run(suspending())
        self._journal.write("healed", time.monotonic(), number)

    def close(self) -> None:
        self._cache.close()


def _asked(key: str, whim: Whim) -> Step:
    face = key.split("/")[0]
    return Step("compute" if face == "cache" else "call", face, [key], whim, None, 0.0, 0.0)


def _run(work: Any) -> None:
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("a thread's call suspended")


if __name__ == "__main__":
    main()
