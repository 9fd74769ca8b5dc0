"""Removes expired rows, and entries beyond the limits: a few at a time, in a thread that no caller waits for."""

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
AT_ONCE = 512  # entries that one sweep examines
WORTH = 8  # sweep again if at least one in so many was removed
ON_END = 32  # sweeps in a row, at most
LAST = 240  # the highest first byte of an id at which a sweep begins: behind it are too few entries for an estimate
TAKEN = 64  # locks that a process takes between two searches for dead ones
REAPED = 128  # dead locks that one search ends, at most
MOMENT = 1.0  # seconds in which a holder that lost its connection must say that it lives, as in locks.sql
AGAIN = 0.05  # seconds between two attempts to say so

REAP = "SELECT stampede.reap($1)"
UNBIND = "SELECT stampede.unbind($1, $2)"

SWEEP = "SELECT over FROM stampede.sweep($1, $2, $3, $4)"


class Sweeper:
    """Keeps the table at about `entries` entries and `max_bytes` bytes. Also removes and records locks of dead holders
    that no process wants: their rows would stay for ever. `ask` sends a command, and blocks."""

    def __init__(self, ask: Callable[[Command], list[Row]], entries: float = inf, max_bytes: float = inf) -> None:
        self._ask = ask
        self._room = float(entries), float(max_bytes)
        self._writes, self._taken = count(1), count(1)
        self._pool = ThreadPool(2, "stampede-postgres-sweep")  # two: `unbind` has one second, and must not wait
        self._closed = False

    def wrote(self) -> None:
        """Count an entry that this process has stored, and sweep now and then."""
        if next(self._writes) % WRITES == 0:
            self._do(self._sweep)

    def took(self) -> None:
        """Count a lock that this process has taken, and end dead locks now and then."""
        if next(self._taken) % TAKEN == 0:
            self._do(lambda: self._ask((REAP, (REAPED,))))

    def unbind(self, backend: tuple[int, float]) -> None:
        """Tell the server that this process lives, although its connection is gone. Renewals bind to the next one."""
        self._do(lambda: self._unbind(backend))

    def close(self) -> None:
        self._closed = True

    def _do(self, job: Callable[[], object]) -> None:
        def tried() -> None:
            try:
                job()
            except EngineError as error:  # a later job tries again
                _log.debug("a background job failed: %s", error)

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
            except EngineError:  # a proxy refuses connections for some milliseconds while it reloads
                if time.monotonic() > end:
                    raise
            time.sleep(AGAIN)
