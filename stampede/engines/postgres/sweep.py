"""Removes what is over, and what there is no room for: a little, now and then, by a thread that nobody waits for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from itertools import count
from math import inf

from stampede.engines.postgres.talk import Command, Row
from stampede.errors import EngineError
from stampede.threads import Crew

__all__ = ["Reaper", "Sweeper"]

_log = logging.getLogger("stampede")

WRITES = 64
"""Of a process, between two sweeps."""

AT_ONCE = 512
"""Entries that are looked at in one."""

WORTH = 8
"""Where one in so many was removed, there is more."""

ON_END = 32
"""Sweeps on end, at most."""

LAST = 240
"""The highest byte that a sweep begins at: behind it there would be too few to judge by."""

TAKEN = 64
"""Locks of a process, between two looks for dead ones."""

REAPED = 128
"""Of them, at most, at once."""

MOMENT = 1.0
"""Seconds that a holder whose connection is gone has to say that it lives, as in locks.sql."""

AGAIN = 0.05
"""Seconds between two tries to say so."""

REAP = "SELECT stampede.reap($1)"
UNBIND = "SELECT stampede.unbind($1, $2)"

SWEEP = "SELECT over, about FROM stampede.sweep($1, $2, $3, $4)"


class Sweeper:
    """`entries` and `max_bytes`: as much is kept, about. `ask` sends a command, and blocks."""

    def __init__(self, ask: Callable[[Command], list[Row]], entries: float = inf, max_bytes: float = inf) -> None:
        self._ask = ask
        self._room = float(entries), float(max_bytes)
        self._writes = count(1)
        self._crew = Crew(1, "stampede-postgres-sweep")
        self._closed = False

    def wrote(self) -> None:
        """One more has been stored here."""
        if next(self._writes) % WRITES == 0 and not self._closed:
            self._crew.do(self._sweep)

    def close(self) -> None:
        self._closed = True

    def _sweep(self) -> None:
        try:
            for _ in range(ON_END):
                if self._closed or self.sweep() < AT_ONCE // WORTH:
                    return
        except EngineError as error:  # the next one tries again
            _log.debug("nothing was swept: %s", error)

    def sweep(self) -> int:
        """Once; how many were removed."""
        start = bytes([int.from_bytes(os.urandom(2)) % LAST]) + os.urandom(15)
        ((over, _),) = self._ask((SWEEP, (start, AT_ONCE, *self._room)))
        return int(over)


class Reaper:
    """Records, and drops, locks whose holders are gone and that nobody wants: their rows would stay for ever."""

    def __init__(self, ask: Callable[[Command], list[Row]]) -> None:
        self._ask = ask
        self._taken = count(1)
        self._crew = Crew(1, "stampede-postgres-reap")
        self._closed = False

    def took(self) -> None:
        """One more has been granted here."""
        if next(self._taken) % TAKEN == 0 and not self._closed:
            self._crew.do(self._reap)

    def unbind(self, backend: tuple[int, float]) -> None:
        """We have lost our sign of life, and live: what we hold isn't to be taken for a dead one's. It is bound to the
        next one when it is renewed."""
        if not self._closed:
            self._crew.do(lambda: self._unbind(backend))

    def close(self) -> None:
        self._closed = True

    def _unbind(self, backend: tuple[int, float]) -> None:
        end = time.monotonic() + MOMENT
        while not self._closed:
            try:
                self._ask((UNBIND, backend))
                return
            except EngineError as error:  # a proxy that is reloaded refuses connections for some milliseconds
                if time.monotonic() > end:
                    _log.debug("locks are bound to a connection that is gone: %s", error)
                    return
            time.sleep(AGAIN)

    def _reap(self) -> None:
        try:
            self.reap()
        except EngineError as error:  # the next one tries again
            _log.debug("nothing was reaped: %s", error)

    def reap(self) -> int:
        """Once; how many there were."""
        ((count,),) = self._ask((REAP, (REAPED,)))
        return int(count)
