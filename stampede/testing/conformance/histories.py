"""Whatever is asked of a key, in whatever order: an engine answers as `record.py` does."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from stampede.runtime.colour import run_blocking
from stampede.testing.conformance.suite import KeyedSuite

__all__ = ["HistoriesSuite"]


class HistoriesSuite(KeyedSuite):
    """Random histories of two keys, which two clients of one store ask by turns. Needs hypothesis.

    With a `clock`, time passes in them; without one nothing ends but what is stored as ended: all durations are hours.

    >>> from stampede.engines.memory import MemoryEngine  # yours
    >>> from stampede.testing import FakeClock, HistoriesSuite
    >>> class TestMine(HistoriesSuite):
    ...     def make_engine(self):
    ...         self.clock = FakeClock()  # if it takes one
    ...         return MemoryEngine(clock=self.clock)
    """

    histories: ClassVar[int] = 25
    steps: ClassVar[int] = 16
    blur: ClassVar[float | None] = None  # seconds by which what is told of time may be off; None: 2 without a clock
    durations: ClassVar[dict[str, float]] = {}  # how long "no", "short", "long" and "ever" last, if not as usual
    passes: ClassVar[list[float]] = [0.5, 1.0, 2.0, 5.0, 30.0]  # seconds
    draws: ClassVar[bool] = True  # it tells what is due from what is not
    ids_last: ClassVar[bool] = True  # an entry keeps its id, whatever happens around it

    def test_it_answers_as_the_record_does(self) -> None:
        """It would decide in another order than the other engines, and nobody could say what a claim means."""
        from stampede.testing.conformance.machine import run_histories

        with self.opened():
            if self.suspending:
                with asyncio.Runner() as runner:  # one loop for all steps
                    run_histories(self, runner.run)
            else:
                run_histories(self, run_blocking)
