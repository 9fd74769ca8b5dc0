"""The suite of random histories: an engine must answer every sequence of verbs as `model/record.py` does."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from stampede.runtime.colour import run_blocking
from stampede.testing.conformance.suite import KeyedSuite

__all__ = ["HistoriesSuite"]


class HistoriesSuite(KeyedSuite):
    """The suite of random histories of two keys, which two clients of one store use in turn. It needs hypothesis.

    With a `clock`, time passes in them. Without one, all durations are hours, so nothing expires during a history.

    >>> from stampede.engines.memory import MemoryEngine  # yours
    >>> from stampede.testing import FakeClock, HistoriesSuite
    >>> class TestMine(HistoriesSuite):
    ...     def make_engine(self):
    ...         self.clock = FakeClock()  # if your engine takes a clock
    ...         return MemoryEngine(clock=self.clock)
    """

    histories: ClassVar[int] = 25
    steps: ClassVar[int] = 16
    blur: ClassVar[float | None] = None  # seconds by which reported times may be off; None: 2 without a clock
    durations: ClassVar[dict[str, float]] = {}  # seconds of "no", "short", "long" and "ever", if not the default ones
    passes: ClassVar[list[float]] = [0.5, 1.0, 2.0, 5.0, 30.0]  # seconds by which the clock is advanced
    draws: ClassVar[bool] = True  # the engine decides by `Ask.draw` whether an entry is due
    ids_last: ClassVar[bool] = True  # an entry keeps its id until it is replaced; a forced claim may not change it

    def test_it_answers_as_the_record_does(self) -> None:
        """An engine must answer as the record does; otherwise a claim would mean something else on this engine."""
        from stampede.testing.conformance.machine import run_histories

        with self.opened():
            if self.suspending:
                with asyncio.Runner() as runner:  # one loop for all steps
                    run_histories(self, runner.run)
            else:
                run_histories(self, run_blocking)
