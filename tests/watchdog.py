"""Names what hangs, and ends it, where no time-out sees it: a worker that was stopped, or that nothing can interrupt.

pytest-timeout interrupts a test, and faulthandler ends a process whose interpreter answers nobody. A process that is
stopped does neither; its tests are nobody's, and the others wait for it for as long as they are let.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["Watchdog", "begun", "ended"]

LONGEST = 200.0
"""Seconds that no test takes, with its fixtures: both time-outs of pyproject.toml come before."""

LOOK = 5.0


def begun(place: str, worker: str, test: str) -> None:
    """A worker is at this test."""
    Path(place, worker).write_text(f"{os.getpid()} {test}")


def ended(place: str, worker: str) -> None:
    Path(place, worker).write_text("")


class Watchdog(threading.Thread):
    """Looks after the workers of a run, from the process that has begun them; and after that process itself."""

    def __init__(self, place: Path) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._place = place
        self._told = time.monotonic()
        self._over = threading.Event()
        self.start()

    def told(self) -> None:
        """A test has ended, and this process knows."""
        self._told = time.monotonic()

    def end(self) -> None:
        self._over.set()

    def run(self) -> None:
        while not self._over.wait(LOOK):
            for worker in self._place.iterdir():
                with suppress(OSError, ValueError):
                    self._look(worker)
            if time.monotonic() - self._told > LONGEST + 60:
                print("\nnobody has been told of anything for minutes: this process hangs", file=sys.__stderr__)
                faulthandler.dump_traceback(sys.__stderr__)
                os._exit(3)

    def _look(self, worker: Path) -> None:
        seconds = time.time() - worker.stat().st_mtime
        pid, test = worker.read_text().split(" ", 1)
        if seconds > LONGEST:
            worker.write_text("")
            print(f"\n{worker.name} has been at {test} for {seconds:.0f} s: {_state(int(pid))}", file=sys.__stderr__)
            _end(int(pid))


def _state(pid: int) -> str:
    """What its threads do, as the kernel has it."""
    told = []
    for each in sorted(Path(f"/proc/{pid}/task").iterdir()):
        with suppress(OSError):
            state = (each / "stat").read_text().rpartition(")")[2].split()[0]
            told.append(f"{each.name} {state} {(each / 'wchan').read_text()}")
    return ", ".join(told)


def _end(pid: int) -> None:
    """It tells where it is, if it can."""
    for number, rest in ((signal.SIGCONT, 0.1), (signal.SIGABRT, 10.0), (signal.SIGKILL, 0.0)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        time.sleep(rest)
