"""The breaker: a table of calls and their results."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from stampede.errors import OptionError
from stampede.model.breaker import Breaker

TABLE: dict[str, list[tuple[float, str, Any]]] = {
    "up": [(0, "allow", True), (0, "allow", True), (1, "succeeded", 0.0), (1, "open", False)],
    "one failure opens it": [(5, "failed", None), (5, "open", True), (5, "allow", False), (5.99, "allow", False)],
    "one probe per pause": [
        (5, "failed", None), (6, "allow", True), (6, "allow", False), (6.5, "failed", None),
        (7.4, "allow", False), (7.5, "allow", True), (7.5, "allow", False),
    ],
    "a probe that never tells": [
        (5, "failed", None), (8.3, "allow", True), (9.2, "allow", False), (9.3, "allow", True), (9.3, "allow", False),
    ],
    "a probe that succeeds": [
        (5, "failed", None), (6, "allow", True), (6.5, "succeeded", 1.5), (6.5, "open", False), (6.5, "allow", True),
        (6.6, "succeeded", 0.0),
    ],
    "down since the first failure": [
        (5, "failed", None), (6, "allow", True), (7, "failed", None), (8, "allow", True), (9, "succeeded", 4.0),
    ],
    "down again": [
        (5, "failed", None), (6, "succeeded", 1.0), (7, "failed", None), (7.5, "allow", False), (8, "allow", True),
        (9, "succeeded", 2.0),
    ],
    "a late failure is told by its own time": [
        (5, "failed", None), (6, "allow", True), (5.2, "failed", None), (6.5, "allow", False), (7, "allow", True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("steps", TABLE.values(), ids=TABLE)
def test_table(steps: list[tuple[float, str, Any]]) -> None:
    """While an engine is down, one call per pause asks it. All calls ask it again after one has succeeded."""
    breaker = Breaker(pause=1.0)
    for now, what, answer in steps:
        got = breaker.open if what == "open" else getattr(breaker, what)(now)
        assert got == answer, (now, what)


@pytest.mark.parametrize("pause", [0, -1, float("nan")])
def test_pause_that_cannot_be(pause: float) -> None:
    """A wrong pause is refused at once, and not found out during the first outage."""
    with pytest.raises(OptionError, match="pause is"):
        Breaker(pause)


def test_threads_share_one_probe_and_one_recovery() -> None:
    """If an engine is down, only one thread of a process probes it, and only one reports that it is back."""
    interval, rounds, threads = sys.getswitchinterval(), 300, 8
    breaker, barrier = Breaker(), threading.Barrier(threads)
    probes: list[int] = []
    ends: list[float] = []

    def work() -> None:
        for number in range(rounds):
            now = 10.0 * number
            if barrier.wait() == 0:
                breaker.failed(now)
            barrier.wait()
            if breaker.allow(now + 1):
                probes.append(number)
            barrier.wait()
            if (seconds := breaker.succeeded(now + 2)) > 0:
                ends.append(seconds)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    sys.setswitchinterval(1e-5)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert probes == list(range(rounds))
    assert ends == [2.0] * rounds
