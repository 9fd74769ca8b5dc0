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
from stampede.runtime.threads import ThreadPool

__all__ = ["Sweeper"]

_log = logging.getLogger("stampede")

WRITES = 64  # writes of a process between two sweeps
AT_ONCE = 512  # entries that are looked at in one
WORTH = 8  # if one in so many was removed, another sweep is worth its while
ON_END = 32  # sweeps on end, at most
LAST = 240  # the highest byte that a sweep begins at: behind it there would be too few to judge by
TAKEN = 64  # locks of a process, between two looks for dead ones
REAPED = 128  # dead locks that one look ends, at most
MOMENT = 1.0  # seconds that a holder whose connection is gone has to say that it lives, as in locks.sql
AGAIN = 0.05  # seconds between two tries to say so

REAP = "SELECT stampede.reap($1)"
UNBIND = "SELECT stampede.unbind($1, $2)"

SWEEP = "SELECT over FROM stampede.sweep($1, $2, $3, $4)"


class Sweeper:
    """Keeps about so many `entries` and `max_bytes`. Also drops, and records, locks whose holders are gone and that no
    process wants: their rows would stay for ever. `ask` sends a command, and blocks."""

    def __init__(self, ask: Callable[[Command], list[Row]], entries: float = inf, max_bytes: float = inf) -> None:
        self._ask = ask
        self._room = float(entries), float(max_bytes)
        self._writes, self._taken = count(1), count(1)
        self._pool = ThreadPool(2, "stampede-postgres-sweep")  # `unbind` has a second, and waits for no sweep
        self._closed = False

    def wrote(self) -> None:
        """One more has been stored here."""
        if next(self._writes) % WRITES == 0:
            self._do(self._sweep)

    def took(self) -> None:
        """One more lock has been granted here."""
        if next(self._taken) % TAKEN == 0:
            self._do(lambda: self._ask((REAP, (REAPED,))))

    def unbind(self, backend: tuple[int, float]) -> None:
        """Say that this process lives, though the connection that showed it is gone. Renewals bind to the next one."""
        self._do(lambda: self._unbind(backend))

    def close(self) -> None:
        self._closed = True

    def _do(self, job: Callable[[], object]) -> None:
        def tried() -> None:
            try:
                job()
            except EngineError as error:  # the next one tries again
                _log.debug("nothing was swept: %s", error)

        if not self._closed:
            self._pool.do(tried)

    def _sweep(self) -> None:
        for _ in range(ON_END):
            start = bytes([int.from_bytes(os.urandom(2)) % LAST]) + os.urandom(15)
            ((over,),) = self._ask((SWEEP, (start, AT_ONCE, *self._room)))
            if self._closed or over < AT_ONCE // WORTH:
                return

    def _unbind(self, backend: tuple[int, float]) -> None:
        end = time.monotonic() + MOMENT
        while not self._closed:
            try:
                self._ask((UNBIND, backend))
                return
            except EngineError:  # a proxy that is reloaded refuses connections for some milliseconds
                if time.monotonic() > end:
                    raise
            time.sleep(AGAIN)
