"""The load that an origin can bear, found by trials, in simulated time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stampede.model.adaptive import NAMES, Adaptive


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "adaptive.py"
    spec = importlib.util.spec_from_file_location("benchmarks_adaptive", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look up their annotations there
    spec.loader.exec_module(module)
    return module


TIMES = ["constant", "uniform, 10 to 90 ms", "bimodal, 10 or 500 ms", "log-normal, sigma 1", "Pareto, alpha 1.5"]


@pytest.mark.parametrize("time", TIMES)
def test_an_origin_that_is_well_has_nearly_all_of_its_room(simulation: ModuleType, time: str) -> None:
    """An origin that is not overloaded gets nearly all of its room, even if its times vary by nature."""
    course = simulation.simulate(Adaptive, simulation.TIMES[time], inf, seconds=10.0, unseen=5.0)
    assert course.room > 0.8 * simulation.MOST


@pytest.mark.parametrize("bears", [4, 12])
@pytest.mark.parametrize("time", TIMES)
def test_one_that_is_saturated_is_given_about_what_it_bears(simulation: ModuleType, time: str, bears: int) -> None:
    """A saturated origin gets about as much as it bears: it is neither overloaded nor starved."""
    course = simulation.simulate(Adaptive, simulation.TIMES[time], bears, seconds=90.0)
    assert 0.6 * bears < course.room < (4 if "log-normal" in time else 2) * bears


class Origin:
    """Runs computations one after the other, as if the room were always full."""

    def __init__(self, adaptive: Adaptive, bears: float = inf) -> None:
        self.adaptive, self.bears, self.now = adaptive, bears, 100.0

    def works(self, seconds: float, time: Callable[[], tuple[str, float]] = lambda: ("rows", 0.05)) -> list[int]:
        rooms, end = [], self.now + seconds
        while self.now < end:
            name, took = time()
            took *= max(1.0, self.adaptive.room / self.bears)
            self.now += took / self.adaptive.room
            self.adaptive.ended(name, took, self.now, failed=False)
            rooms.append(self.adaptive.room)
        return rooms


def test_it_has_its_room_again_when_it_is_well_again() -> None:
    origin = Origin(Adaptive(32), bears=2)
    origin.works(30)
    assert max(origin.works(10)) < 10
    origin.bears = inf
    origin.works(60)
    rooms = origin.works(20)
    assert max(rooms) == 32 and sum(rooms) / len(rooms) > 28


def test_an_origin_that_becomes_slow_is_tried_at_once() -> None:
    """When an origin becomes slow, a trial begins at once. It need not wait for the next regular trial."""
    origin = Origin(Adaptive(64))
    origin.works(20)
    origin.bears = 8
    origin.works(3)
    assert max(origin.works(3)) <= 24


def test_failures_are_a_sign_too_and_one_of_many_counts() -> None:
    """Failures reduce the room. Thirty at the same time count as one, and do not close the origin."""
    adaptive = Adaptive(32)
    for number in range(30):
        adaptive.ended("rows", 0.05 if number % 2 else 0.0, 10.0, failed=True)
    assert adaptive.room == 24
    for round_ in range(30):
        adaptive.ended("rows", 0.05, 20.0 + round_, failed=True)
    assert adaptive.room == 1


def test_a_failure_counts_whatever_failed() -> None:
    """A failure counts even if the name of the computation is not remembered, as with very many names."""
    its, now = Adaptive(64), 1.0
    for number in range(2 * NAMES):
        now += 0.001
        its.ended(f"f{number}", 0.0005, now, failed=False)
    before, now = its.room, now + 1
    its.ended("another", 0.0005, now, failed=True)
    assert its.room < before


def test_who_is_slow_by_nature_is_no_sign() -> None:
    """A computation that is always slow, such as a report among lookups, is not a sign of overload."""
    names = iter([("report", 5.0), *[("row", 0.01)] * 3] * 10_000)
    rooms = Origin(Adaptive(16)).works(600, lambda: next(names))
    assert sum(rooms) / len(rooms) > 14


def test_what_has_become_slower_for_good_keeps_its_room() -> None:
    """An origin that has become slower for good, as with a table that has grown, keeps its room."""
    origin = Origin(Adaptive(16))
    origin.works(30)
    rooms = origin.works(60, lambda: ("rows", 0.5))
    assert sum(rooms) / len(rooms) > 14


def test_a_failure_during_a_trial_takes_from_the_whole_room() -> None:
    """A failure during a trial reduces the whole room, not the half that the trial has left."""
    origin = Origin(Adaptive(64))
    for _ in range(1000):
        if origin.adaptive.room < 64:
            break
        origin.works(0.01)
    assert origin.adaptive.room == 32
    origin.adaptive.ended("rows", 0.05, origin.now + 1, failed=True)
    assert origin.adaptive.room == 48


@given(
    most=st.integers(1, 100),
    least=st.integers(1, 100),
    ended=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 100), st.floats(0, 10), st.booleans())),
)
def test_the_room_is_between_its_bounds(most: int, least: int, ended: list[tuple[str, float, float, bool]]) -> None:
    adaptive, now = Adaptive(most, least), 0.0
    for name, seconds, later, failed in ended:
        now += later
        for _ in range(20):
            adaptive.ended(name, seconds, now, failed=failed)
            assert min(least, most) <= adaptive.room <= most
