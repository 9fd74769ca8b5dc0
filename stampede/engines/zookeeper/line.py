"""The connection to a server: send signs of life on it, and end it if the server is silent.

kazoo is silent for a third of the session's time-out, which is too long (see `ZooKeeperSession.ensure_outlasts`). And
it never gives up a connection on which it sends requests more often than that, even if no reply comes. So this module
limits kazoo's read time-out to seconds, after half of which kazoo sends a ping, and decides itself how long a server
may be silent.

Only this module uses private names of kazoo (2.11). `_connect` alone knows which session time-out the server grants.
All requests and replies go through `_submit` and `_read_header`, and the first request of a session through `_invoke`.
`ping_outstanding` would end a connection by the read time-out. `_pending` contains the numbers of unanswered requests.
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
"""Seconds without a request after which a ping is sent. kazoo shortens the pause at random."""

RELAY = 1.0
"""Seconds after which the leader knows of a sign of life that another server has received. It asks the servers each
half tick. A tick is two seconds by default, and clients are not told its length."""

MARGIN = RELAY + 2 * SIGN
"""Seconds by which a session's time-out exceeds the leases of its locks. If a server dies, the leader never learns of
the signs of life since it last asked. A lock may have been taken just then, while the sign before is already old."""

TAKEN_ON = 1.0
"""The seconds that each server has at least to accept a connection, however many servers are tried."""

GRAIN, KEPT = 0.1, 32
"""The least seconds between two remembered signs of life, and how many are remembered."""


class ZooKeeperLine:
    """The requests that a kazoo client sends to its server, and the replies, in their order. All methods but
    `last_sign` run in kazoo's thread."""

    def __init__(self, client: KazooClient, timeout: float) -> None:
        self.seconds = 0.0  # the session's time-out, as the server grants it
        self.granted = threading.Event()
        self._timeout = timeout
        self._begun = self._received = 0.0
        self._where: tuple[Any, ...] = ()
        self._silent: tuple[Any, ...] = ()  # the server that was left because it was silent
        self._sent: deque[float] = deque()  # when each request was sent that has no reply yet
        self._signs: tuple[tuple[float, float], ...] = ()  # when a request was sent, and when its reply came
        self._each = max(timeout / len(client.hosts), TAKEN_ON)
        self._connection, self._pending = client._connection, client._pending
        connection = self._connection
        self._connect, self._submit, self._read = connection._connect, connection._submit, connection._read_header
        connection._connect, connection._submit, connection._read_header = self._on_connect, self._send, self._receive
        self._invoke, connection._invoke = connection._invoke, self._begin
        self._reach, client.handler.create_connection = client.handler.create_connection, self._create_connection

    def last_sign(self, moment: float) -> float:
        """Return when the latest sign of life was sent to which a reply had come by `moment`. The start of a connection
        is one, too: a server that takes a session over asks the leader, which so knows of it at once."""
        return next((sent for sent, answered in reversed(self._signs) if answered <= moment), self._begun)

    def _on_connect(self, *where: Any) -> Any:
        self._sent.clear()
        silent, self._silent = self._silent, ()
        if where == silent:  # skip it once: kazoo tries all servers in turn, so the others come first
            raise ConnectionDropped("this server was silent")
        begun = time.monotonic()
        reads, connects = self._connect(*where)
        self._sent.clear()
        self._where, self._begun, self._signs = where, begun, ()
        self.seconds = reads * 1.5 / 1000  # kazoo's read time-out in milliseconds is two thirds of the session's
        self.granted.set()
        return min(reads, 2000 * SIGN), connects

    def _create_connection(self, *args: Any, timeout: float, **options: Any) -> Any:
        """Limit the time for one server: kazoo would try one that is switched off for the session's whole time-out."""
        return self._reach(*args, timeout=min(timeout, self._each), **options)

    def _begin(self, timeout: float, *args: Any, **options: Any) -> Any:
        return self._invoke(min(timeout, self._each), *args, **options)

    def _send(self, *args: Any) -> None:
        now = time.monotonic()
        if self._sent and now - max(self._sent[0], self._received) > self._patience():
            self._silent = self._where
            raise ConnectionDropped("this server is silent")  # kazoo sends this request to the next server
        self._sent.append(now)
        self._submit(*args)
        self._connection.ping_outstanding.clear()

    def _patience(self) -> float:
        """Return how long the server may be silent: a third of the longest lease at most, to leave time for a renewal
        by another server."""
        return max(SIGN, min(self._timeout, (self.seconds - MARGIN) / 3))

    def _receive(self, timeout: float) -> Any:
        answer = self._read(timeout)
        xid, pending = answer[0].xid, self._pending
        if xid >= 0 and pending and pending[0][2] != xid:  # kazoo's thread would end, and with it the session's locks
            raise ConnectionDropped(f"reply {xid} came instead of reply {pending[0][2]}")
        self._received = now = time.monotonic()
        if xid != WATCH_XID and self._sent:
            sent, signs = self._sent.popleft(), self._signs
            if not signs or now - signs[-1][1] >= GRAIN:
                self._signs = (*signs[1 - KEPT :], (sent, now))
        return answer
