"""Engines keep the promises of the ports, for threads and for tasks."""

from __future__ import annotations

import time
import unittest
from collections import Counter
from typing import Any

import pytest
from cachetools import LRUCache

from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired
from stampede.model.ports import Engine
from stampede.testing import conformance
from stampede.testing.clock import FakeClock
from stampede.testing.conformance import ClaimsSuite, LocksSuite, StoreSuite
from stampede.testing.conformance.suite import Suite


class _All(ClaimsSuite, StoreSuite, LocksSuite):
    pass


class TestMemory(_All):
    short = 0.1

    def make_engine(self) -> Engine:
        return MemoryEngine()


class TestMemoryAsync(TestMemory):
    suspending = True


class TestMemorySealed(StoreSuite):
    """Values are kept as bytes. Leases and locks work as in the memory engine."""

    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        return MemoryEngine(sealed=True, clock=self.clock)


class TestMemoryInCachetools(StoreSuite):
    """Values are kept in a mapping that the user supplies. Leases and locks work as in the memory engine."""

    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        return MemoryEngine(store=LRUCache(1_000), clock=self.clock)


class TestPaired(ClaimsSuite, StoreSuite):
    """A pair of a store and another engine's locks. The suite of locks is not run, since that engine has them."""

    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        store, locks = MemoryEngine(clock=self.clock), MemoryEngine(clock=self.clock)
        self.parts = store, locks
        return Paired(store, locks, clock=self.clock)

    def make_peer(self, engine: Engine) -> Engine:
        """Return another process's pair over the same store and locks."""
        assert self.clock is not None
        return Paired(*self.parts, clock=self.clock)


class TestPairedAsync(TestPaired):
    suspending = True


# -- the suites themselves ----------------------------------------------------------------------------------------


def test_unittest_runs_a_suite_of_three_lines() -> None:
    """unittest can run a suite of three lines, so the authors of other engines do not need pytest."""

    class TestTheirs(LocksSuite, unittest.TestCase):
        def make_engine(self) -> Engine:
            return MemoryEngine(clock=time.monotonic)

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(TestTheirs).run(result)
    assert result.wasSuccessful()
    assert result.testsRun > 10


async def _always(*_: Any, **__: Any) -> bool:
    return True


async def _never(*_: Any, **__: Any) -> bool:
    return False


SABOTAGE: list[tuple[Any, str, str, Any, str]] = [
    (ClaimsSuite, "claims", "fill", _always, "test_filled_is_found_as_it_was"),
    (ClaimsSuite, "claims", "fill", _always, "test_fill_without_a_lease_is_refused"),
    (ClaimsSuite, "claims", "renew", _always, "test_a_lost_lease_is_not_renewed"),
    (ClaimsSuite, "claims", "renew", _never, "test_renew_moves_the_end"),
    (ClaimsSuite, "claims", "abandon", _always, "test_abandon_lets_the_next_one_try"),
    (ClaimsSuite, "claims", "abandon", _always, "test_verdict_answers_those_who_waited"),
    (ClaimsSuite, "claims", "abandon", _always, "test_a_resting_key_is_granted_to_nobody"),
    (ClaimsSuite, "store", "invalidate", _always, "test_fill_after_invalidate_is_refused"),
    (StoreSuite, "store", "invalidate", _always, "test_invalidated_is_gone"),
    (StoreSuite, "store", "expire", _always, "test_expired_is_stale_and_kept"),
    (StoreSuite, "store", "bump", _always, "test_generations_change_by_bump_alone"),
    (StoreSuite, "store", "replace", _always, "test_replace_only_what_was_seen"),
    (StoreSuite, "store", "replace", _always, "test_one_of_many_replaces"),
    (LocksSuite, "locks", "release", _always, "test_release_needs_the_token"),
    (LocksSuite, "locks", "release", _never, "test_released_is_free"),
    (LocksSuite, "locks", "renew", _always, "test_a_lock_ends"),
    (LocksSuite, "locks", "release", _always, "test_a_failed_try_disturbs_nobody"),
    (LocksSuite, "locks", "renew", _always, "test_what_was_given_back_is_of_no_use"),
]


@pytest.mark.parametrize("suite, port, verb, broken, name", SABOTAGE)
def test_a_broken_verb_is_found_out(suite: Any, port: str, verb: str, broken: Any, name: str) -> None:
    """Each case of a suite fails on an engine with a broken verb. Otherwise, a pass would prove nothing."""

    class Broken(suite):  # type: ignore[misc]
        def make_engine(self) -> Engine:
            self.clock = FakeClock()
            engine = MemoryEngine(clock=self.clock)
            setattr(getattr(engine.blocking, port), verb, broken)
            return engine

    with pytest.raises(AssertionError):
        getattr(Broken(), name)()


def test_no_case_hides_another() -> None:
    """No two suites have a case of the same name. An engine's class inherits from several, and would hide one."""
    suites = [each for each in vars(conformance).values() if isinstance(each, type) and issubclass(each, Suite)]
    cases = [(name, suite) for suite in suites for name in vars(suite) if name.startswith("test_")]
    assert [name for name, count in Counter(name for name, _ in cases).items() if count > 1] == []
