"""The watchdog ends a test run of several workers that hangs, and reports what each worker did.

A timeout ends a test that waits. But a process that is frozen, or holds the interpreter's lock forever, has no timeout.
And when one worker stops answering, the others soon wait for its share of the tests, between tests, where no timeout
applies. So each process writes a sign of what it does, and a separate process reads the signs. If a process writes no
sign for too long, the watchdog reports it, makes it print its stacks, and kills it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

__all__ = ["Signs", "Watchdog"]

ROUNDS = 40
"""The number of unchanged looks after which a process is stuck. A watchdog that was itself stopped does not count."""
CONTROLLER = "controller"
_IN, _AFTER, _ENDED = "in", "after", "has ended its session"


class Signs:
    """A plugin that each process uses to write its pid and current action to a file of its own."""

    def __init__(self, place: Path, name: str) -> None:
        self._pid = os.getpid()
        self._file = os.open(place / name, os.O_CREAT | os.O_WRONLY)
        self._leave("has begun")

    def _leave(self, what: str) -> None:
        if os.getpid() == self._pid:  # not in a fork
            os.pwrite(self._file, f"{self._pid} {time.monotonic()} {what}"[:600].ljust(600).encode(), 0)

    def pytest_collection_finish(self) -> None:
        self._leave("has collected")

    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        self._leave(f"knows what {node.gateway.id} has collected")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._leave(f"{_IN} {nodeid}, its setup")

    def pytest_runtest_logreport(self, report: Any) -> None:
        after = {"setup": "after its setup", "call": "after its call"}.get(report.when, "after its teardown")
        self._leave(f"{_IN} {report.nodeid}, {after}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._leave(f"{_AFTER} {nodeid}")

    def pytest_sessionfinish(self) -> None:
        self._leave(_ENDED)


Signs.pytest_xdist_node_collection_finished.pytest_impl = {"optionalhook": True}  # type: ignore[attr-defined]


class Watchdog:
    """The watchdog process, and the directory of the signs."""

    def __init__(self, seconds: float) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="stampede-signs-"))
        self._process = subprocess.Popen([sys.executable, "-I", "-S", __file__, str(self.place), str(seconds)])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        rmtree(self.place, ignore_errors=True)


# -- the other process ---------------------------------------------------------------------------------------------


def _watch(place: Path, seconds: float) -> None:
    controller = os.getppid()
    seen: dict[str, str] = {}
    silent: dict[str, int] = {}
    gone: set[str] = set()
    while os.getppid() == controller:
        time.sleep(seconds / ROUNDS)
        for name, sign in _signs(place):
            silent[name] = silent.get(name, 0) + 1 if seen.get(name) == sign else 0
            seen[name] = sign
        if silent and (stuck := _stuck({name: seen[name] for name in seen.keys() - gone}, silent)):
            _say(f"the tests stand still: no sign of {' and '.join(stuck)} for {seconds:g} seconds or more")
            for name, sign in seen.items():
                _say(f"{name} {_what(sign)}, {_ago(sign)} ago; {_state(_pid(sign))}")
            for name in stuck:
                _say(f"{name} is ended; its stacks:\n")
                _end(_pid(seen[name]))
            gone.update(stuck)
            silent = dict.fromkeys(silent, 0)


def _stuck(signs: dict[str, str], silent: dict[str, int]) -> list[str]:
    """The processes to end: workers that are silent in a test. If there are none and all processes are silent: all
    workers, or the controller if no worker is left."""
    workers = [name for name, sign in signs.items() if name != CONTROLLER and _what(sign) != _ENDED]
    within = [name for name in workers if _what(signs[name]).startswith(_IN) and silent[name] >= ROUNDS]
    begun = any(_what(sign).startswith((_IN, _AFTER, _ENDED)) for sign in signs.values())
    if within or min(silent.values()) < ROUNDS * (1 if begun else 3):  # start and collection take longer
        return within
    return workers or [CONTROLLER]


def _signs(place: Path) -> Iterator[tuple[str, str]]:
    for each in sorted(place.iterdir()):
        if sign := each.read_text(errors="replace").strip():
            yield each.name, sign


def _pid(sign: str) -> int:
    return int(sign.split()[0])


def _ago(sign: str) -> str:
    return f"{time.monotonic() - float(sign.split()[1]):.0f} s"


def _what(sign: str) -> str:
    return sign.split(maxsplit=2)[2]


def _say(what: str) -> None:
    os.write(2, f"\nwatchdog: {what}".encode())


def _state(pid: int) -> str:
    """The states of all threads, as the kernel reports them. T means frozen."""
    found = []
    for each in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with suppress(OSError):
            found.append(f"{_stat(each)[0]} in {(each / 'wchan').read_text()}")
    return f"process {pid}, its threads: {', '.join(found) or 'gone'}"


def _stat(process: Path) -> list[str]:
    """The fields from the state on. The name before it may contain blanks."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _end(pid: int) -> None:
    """Send SIGABRT, so that faulthandler prints all stacks. Then kill its children: they may keep its pipes open."""
    theirs = _below(pid)
    _kill(pid, signal.SIGABRT)
    _kill(pid, signal.SIGCONT)
    end = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < end:
        time.sleep(0.05)
    for each in [pid, *theirs]:
        _kill(each, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return _stat(Path(f"/proc/{pid}"))[0] not in "ZX"
    except OSError:
        return False


def _below(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            children.setdefault(int(_stat(each)[1]), []).append(int(each.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return [each for each in found[1:] if each != os.getpid()]


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and the watchdog ends after them
    _watch(Path(sys.argv[1]), float(sys.argv[2]))
    rmtree(sys.argv[1], ignore_errors=True)  # the controller was killed
