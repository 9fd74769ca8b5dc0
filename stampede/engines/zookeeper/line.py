"""The line to a server: signs of life on it, and an end to it if nothing is heard.

kazoo is silent for a third of a session, which is too long (see `Session.vouch`), and a line on which it asks more
often than that is never given up, though nothing comes back. So it is told to read for seconds only, after half of
which it sends a ping; and how long there may be no answer is said here.

kazoo's private names stand here and nowhere else (2.11): `_connect` alone knows which time-out the server grants, and
all that is said and heard goes through `_submit` and `_read_header`, what a session begins with through `_invoke`;
`ping_outstanding` would end a line by the time that it reads for; `_pending` has the numbers of what was asked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionDropped
from kazoo.protocol.connection import WATCH_XID

__all__ = ["MARGIN", "RELAY", "TAKEN_ON", "ZooKeeperLine"]

SIGN = 1.0
"""Seconds after which a line on which nothing was said has another sign of life; kazoo's dice take some of it."""

RELAY = 1.0
"""Seconds after which a server's leader has heard of a sign of life: it asks for them each half tick, and ticks are of
two seconds as servers come. Clients aren't told how long they are."""

MARGIN = RELAY + 2 * SIGN
"""Seconds by which a session outlasts the leases of its locks. A server that dies takes with it what it was told since
the leader asked: a lock may have been taken just then, and the sign of life before may be as old as they get."""

TAKEN_ON = 1.0
"""Seconds that a server has at least to take us on, however many there are to be tried."""

GRAIN, KEPT = 0.1, 32
"""Signs of life are remembered that lie so many seconds apart, and so many of them."""


class ZooKeeperLine:
    """What a client of kazoo's says to its server, in order, and hears from it. All but `known` in kazoo's thread."""

    def __init__(self, client: KazooClient, timeout: float) -> None:
        self.seconds = 0.0  # after which the server ends the session, if it hears nothing
        self.granted = threading.Event()
        self._timeout = timeout
        self._begun = self._heard = 0.0
        self._where: tuple[Any, ...] = ()
        self._silent: tuple[Any, ...] = ()  # the server that was given up last
        self._said: deque[float] = deque()  # what has no answer yet
        self._answered: tuple[tuple[float, float], ...] = ()  # when it was said, and its answer came
        self._each = max(timeout / len(client.hosts), TAKEN_ON)
        self._connection, self._pending = client._connection, client._pending
        connection = self._connection
        self._connect, self._submit, self._read = connection._connect, connection._submit, connection._read_header
        connection._connect, connection._submit, connection._read_header = self._connected, self._say, self._hear
        self._invoke, connection._invoke = connection._invoke, self._begin
        self._reach, client.handler.create_connection = client.handler.create_connection, self._reached

    def known(self, moment: float) -> float:
        """When the newest sign of life was given that the server had heard by then. A server that takes a session over
        asks the leader, who hears of that at once."""
        return next((said for said, answered in reversed(self._answered) if answered <= moment), self._begun)

    def _connected(self, *where: Any) -> Any:
        self._said.clear()
        silent, self._silent = self._silent, ()
        if where == silent:  # kazoo tries them all, and then again: any other first
            raise ConnectionDropped("nothing was heard from it")
        begun = time.monotonic()
        reads, connects = self._connect(*where)
        self._said.clear()
        self._where, self._begun, self._answered = where, begun, ()
        self.seconds = reads * 1.5 / 1000  # what it reads for, in milliseconds, is two thirds of it
        self.granted.set()
        return min(reads, 2000 * SIGN), connects

    def _reached(self, *args: Any, timeout: float, **its: Any) -> Any:
        """kazoo tries one server for a whole session: one that is switched off would keep us from all others."""
        return self._reach(*args, timeout=min(timeout, self._each), **its)

    def _begin(self, timeout: float, *args: Any, **its: Any) -> Any:
        return self._invoke(min(timeout, self._each), *args, **its)

    def _say(self, *args: Any) -> None:
        now = time.monotonic()
        if self._said and now - max(self._said[0], self._heard) > self._patience():
            self._silent = self._where
            raise ConnectionDropped("nothing was heard")  # what was to be said is said to the next one
        self._said.append(now)
        self._submit(*args)
        self._connection.ping_outstanding.clear()

    def _patience(self) -> float:
        """A third of the longest lease, so that there is time for a renewal elsewhere."""
        return max(SIGN, min(self._timeout, (self.seconds - MARGIN) / 3))

    def _hear(self, timeout: float) -> Any:
        answer = self._read(timeout)
        xid, pending = answer[0].xid, self._pending
        if xid >= 0 and pending and pending[0][2] != xid:  # kazoo's thread would end, and with it the session's locks
            raise ConnectionDropped(f"a reply of number {xid} came in place of {pending[0][2]}")
        self._heard = now = time.monotonic()
        if xid != WATCH_XID and self._said:
            said, those = self._said.popleft(), self._answered
            if not those or now - those[-1][1] >= GRAIN:
                self._answered = (*those[1 - KEPT :], (said, now))
        return answer
