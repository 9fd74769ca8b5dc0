"""A test run that hangs is ended, and says where it hung. A run that is slow goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import watchdog
from watchdog import CONTROLLER, ROUNDS

SUPPORT = Path(watchdog.__file__).parent

IN, AFTER, COLLECTS, ENDED = (
    "1 0.0 in a.py::test",
    "1 0.0 after a.py::test",
    "1 0.0 has begun",
    "1 0.0 has ended its session",
)


STUCK: list[tuple[dict[str, str], dict[str, int], list[str]]] = [
    ({"gw0": IN, "gw1": IN}, {"gw0": ROUNDS}, ["gw0"]),  # the tests of the other workers go on
    ({"gw0": IN, "gw1": AFTER}, {"gw0": ROUNDS, "gw1": ROUNDS, CONTROLLER: ROUNDS}, ["gw0"]),
    ({"gw0": AFTER, "gw1": IN}, {"gw0": ROUNDS, CONTROLLER: ROUNDS}, []),  # gw0 waits for its next test
    ({"gw0": AFTER, "gw1": ENDED}, dict.fromkeys(["gw0", "gw1", CONTROLLER], ROUNDS), ["gw0"]),
    ({"gw0": AFTER, "gw1": ENDED}, {"gw0": ROUNDS, "gw1": ROUNDS}, []),  # the controller still works
    ({"gw0": ENDED}, {"gw0": ROUNDS, CONTROLLER: ROUNDS}, [CONTROLLER]),
    ({"gw0": COLLECTS, CONTROLLER: COLLECTS}, {"gw0": 2 * ROUNDS, CONTROLLER: 2 * ROUNDS}, []),
    ({"gw0": COLLECTS, CONTROLLER: COLLECTS}, {"gw0": 3 * ROUNDS, CONTROLLER: 3 * ROUNDS}, ["gw0"]),
]


def test_who_is_ended() -> None:
    """Only a process that hangs is ended. If a working one were killed, its tests would fail."""
    for known, silent, stuck in STUCK:
        signs = {CONTROLLER: AFTER, **known}
        assert watchdog._stuck(signs, {name: silent.get(name, 0) for name in signs}) == stuck, (known, silent)


FROZEN = """
import faulthandler, os, signal, sys
from watchdog import CONTROLLER, Signs, Watchdog

def freezes(name):
    faulthandler.enable()
    Signs(dog.place, name).pytest_runtest_logstart("a.py::test")
    os.kill(os.getpid(), signal.SIGSTOP)

dog = Watchdog(0.4)
worker = os.fork()
if worker == 0:
    freezes("gw0")
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), flush=True)
freezes(CONTROLLER)
"""


def test_whoever_is_frozen_shows_its_stacks_and_ends() -> None:
    """A frozen process shows its stacks and ends. Otherwise a CI run would hang, without a word in its log."""
    ran = subprocess.run([sys.executable, "-c", FROZEN], cwd=SUPPORT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == int(ran.stdout) == -signal.SIGABRT
    assert "no sign of gw0 for" in ran.stderr and "no sign of controller for" in ran.stderr
    assert "gw0 in a.py::test, its setup, " in ran.stderr
    assert ran.stderr.count("in freezes") == 2
