"""Early refresh: tables for the arithmetic, and simulated expiries for its effect."""

from __future__ import annotations

import importlib.util
import random
import sys
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stampede.model import early
from stampede.model.entry import Entry


def entry(cost: float = 1.0, margin: float = 3.0, ttl: float = 100.0, fresh: float = 50.0) -> Entry[Any]:
    return Entry(None, b"12345678", cost, margin, ttl, fresh)


def learn(costs: list[float]) -> Entry[Any]:
    """Return the entry after computations with these costs."""
    cost, margin = early.observe(None, costs[0])
    for seconds in costs[1:]:
        cost, margin = early.observe(entry(cost, margin), seconds)
    return entry(cost, margin)


@pytest.mark.parametrize(
    "there, draw, lead",
    [
        (entry(cost=1, margin=3), 0.0, 3.0),
        (entry(cost=2, margin=3), 0.5, 4.0),
        (entry(cost=2, margin=3, ttl=6), 0.5, 3.0),  # never before half of ttl
        (entry(cost=2, margin=300, ttl=6), 0.5, 3.0),
        (entry(cost=0, margin=0), 5.0, 0.0),  # no cost is known
        (entry(ttl=0), 0.5, 0.0),
        (entry(ttl=inf), 0.5, 3.5),
    ],
)
def test_lead(there: Entry[Any], draw: float, lead: float) -> None:
    """The lead is the margin plus the draw times the cost, and at most half of ttl."""
    assert early.lead(there, draw) == lead


@pytest.mark.parametrize(
    "there, due",
    [
        (entry(fresh=3.6), False),
        (entry(fresh=3.5), True),
        (entry(fresh=0), True),
        (entry(fresh=-1), True),
        (entry(ttl=inf, fresh=inf), False),
        (entry(ttl=0, fresh=0), True),
        (entry(ttl=4, fresh=2.1), False),
        (entry(ttl=4, fresh=2), True),
    ],
)
def test_due(there: Entry[Any], due: bool) -> None:
    """A value is due when its end is at most the lead away. A value without an end is never due."""
    assert early.due(there, 0.5) is due


def test_draw_is_exponential() -> None:
    """Draws are exponential and never negative, so that processes refresh at different moments."""
    dice = random.Random(1)
    drawn = [early.draw(2.0, dice.random) for _ in range(20_000)]
    assert min(drawn) >= 0
    assert sum(drawn) / len(drawn) == pytest.approx(2 * early.SPREAD, rel=0.03)
    assert early.draw(0.0, dice.random) == 0
    assert early.draw(1.0, lambda: 0.0) == 0  # what random() may return at either end
    assert 0 < early.draw(1.0, lambda: 1 - 2**-53) < 4


def test_first_margin_expects_costs_to_vary() -> None:
    """The first margin assumes that costs vary. Otherwise the first refresh of every key would block readers."""
    cost, margin = early.observe(None, 2.0)
    assert cost == 2.0
    assert 4 < margin / cost < 7


@pytest.mark.parametrize("previous", [entry(0, 0), entry(1, 0), entry(1, 0.5), entry(0, 3), entry(float("nan"), 1)])
def test_an_entry_that_knows_nothing_is_no_previous(previous: Entry[Any]) -> None:
    """An entry without a valid cost and margin, as after `set`, counts as no entry. It does not divide by zero."""
    assert early.observe(previous, 2.0) == early.observe(None, 2.0)


@pytest.mark.parametrize("previous", [None, entry(1e-300, 1e300), entry(1, inf), entry(inf, inf), entry(1e-9, 1e-8)])
@pytest.mark.parametrize("cost", [0.0, -1.0, 1e-9, 1.0, 1e9])
def test_numbers_stay_numbers(previous: Entry[Any] | None, cost: float) -> None:
    """Odd numbers of an engine, or a clock that stands still, raise no error. Cost and margin stay positive."""
    typical, margin = early.observe(previous, cost)
    assert 0 < typical < margin or typical == inf


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_what_is_learnt(scale: float) -> None:
    """The margin is small for costs that hardly vary, and large enough for costs that do."""
    dice = random.Random(2)
    steady = learn([scale] * 400)
    assert steady.cost == pytest.approx(scale)
    assert 1.3 < steady.margin / scale < 1.5
    varying = learn([scale * dice.lognormvariate(0, 0.5) for _ in range(400)])
    assert 0.7 < varying.cost / scale < 1.4
    assert 3.5 < varying.margin / scale < 8  # the 99.9 % quantile is 4.7


@pytest.mark.parametrize("factor, computations", [(2, 1), (5, 3), (20, 6)])
def test_a_key_that_becomes_slower_is_soon_believed(factor: float, computations: int) -> None:
    """If a key becomes slower, its margin exceeds the new cost after a few computations."""
    there = learn([1.0] * 200 + [factor] * computations)
    assert there.margin > factor


def test_a_key_that_becomes_faster_is_believed_in_the_end() -> None:
    """If a key becomes faster, its margin shrinks in the end. It is not refreshed too early for ever."""
    assert learn([1.0] * 200 + [0.1] * 100).margin < 0.3


def test_one_outlier_is_not_believed() -> None:
    """One slow computation raises the margin only a little, and for a short time."""
    assert learn([1.0] * 200 + [100.0]).margin < 5
    assert learn([1.0] * 200 + [100.0] + [1.0] * 50).margin < 2


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "early.py"
    spec = importlib.util.spec_from_file_location("benchmarks_early", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look up their annotations there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("rate", [10, 100, 1000])
@pytest.mark.parametrize("cost", ["constant", "log_normal"])
def test_nobody_waits_at_an_expiry(simulation: ModuleType, cost: str, rate: int, processes: int) -> None:
    """Hardly any expiry blocks readers, and values are not refreshed much too early."""
    tally = simulation.simulate(simulation.OURS, getattr(simulation, cost), rate, processes, expiries=2000, seed=7)
    assert tally.computations <= 1.001 * tally.expiries
    assert tally.blocked <= tally.expiries * (0.01 if rate == 10 else 0.001)
    assert tally.mean_earliness < (2.0 if cost == "constant" else 5.5)  # with 10^5 expiries: 1.7 and 4.9


def test_the_simulation_sees_blocked_readers(simulation: ModuleType) -> None:
    """The simulation does see blocked readers: XFetch without a margin is known to block 63 % and 14 %."""
    alone = simulation.simulate(simulation.XFETCH, simulation.constant, 1000, 1, expiries=2000)
    assert alone.blocked_percent == pytest.approx(63, abs=4)
    eight = simulation.simulate(simulation.XFETCH, simulation.log_normal, 1000, 8, expiries=2000)
    assert eight.blocked_percent == pytest.approx(14, abs=3)


def test_a_fleet_lets_values_live(simulation: ModuleType) -> None:
    """A value lives for at least half of its ttl, even if 500 processes draw and the earliest one decides."""
    ways = simulation.XFETCH, simulation.OURS
    xfetch, ours = (simulation.simulate(way, simulation.constant, 1000, 500, 40, ttl=6.0) for way in ways)
    assert xfetch.interval == pytest.approx(4.0, abs=0.1)  # half of ttl plus the cost
    assert ours.interval >= 4.0
