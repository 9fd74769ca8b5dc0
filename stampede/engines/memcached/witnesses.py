"""Who signs for an event loop or a batch: a connection that stood before the lease was asked for, and a thread.

Their own connection is everybody's; a loop that its own computation blocks can sign nothing; and a connection that is
made when it is needed may lead to another server than the one that has given the CAS number. So one per server stands
by. Before the first has come, or when it is in doubt, a lease is signed at once, by one command more.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from stampede.colour import run_blocking
from stampede.engines.kit.sock import watch_of
from stampede.engines.memcached.blocking import BlockingLine, Connection
from stampede.engines.memcached.holds import Link, OwnLease, Signer
from stampede.engines.memcached.meta import Reply
from stampede.engines.memcached.servers import Server
from stampede.errors import EngineError
from stampede.threads import begun

__all__ = ["Witnesses"]

AGAIN = 1.0
"""Seconds between two tries to have a witness come."""
TRUSTED = 30.0
"""Seconds for which a connection is believed in that says nothing: firewalls forget."""


class Witness:
    """One connection, of any thread: a `Link`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.longest = connection.longest
        self.heard = time.monotonic()
        self._lock = threading.RLock()  # who interrupts its own thread is told that the connection is in use

    @property
    def born(self) -> float:
        return self.connection.born

    async def ask(self, commands: bytes, count: int = 1, *, twice: bool = False) -> list[Reply]:
        with self._lock:
            replies = await self.connection.ask(commands, count, twice=twice)
            self.heard = time.monotonic()
        return replies

    def stands(self) -> bool:
        """Whether there is no doubt. A server that has ended has sent the connection's end."""
        connection = self.connection
        if connection.broken or time.monotonic() - self.heard >= TRUSTED:
            return False
        try:
            return connection.quiet(watch_of(connection.sock))
        except (OSError, ValueError):  # another thread has just closed it
            return False


class Witnesses:
    """One for each server, from its first lease on."""

    def __init__(self, line: BlockingLine, signer: Signer) -> None:
        self._line = line
        self._signer = signer
        self.start_again()

    def start_again(self) -> None:
        """In a forked child: the connections are the parent's."""
        self._lock = threading.RLock()
        self._there: dict[Server, Witness] = {}
        self._next: dict[Server, float] = {}

    def add(self, hold: OwnLease, link: Link) -> bool:
        """Have a lease signed in a moment. False: nobody can; but for the next one somebody may."""
        server = self._line.servers.of(hold.name)
        witness = self._there.get(server)
        if witness is None or not witness.stands():
            self._call(server)
            return False
        if not hold.known_to(witness):
            return False
        hold.witness = witness
        return self._signer.add(hold)

    def _call(self, server: Server) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._next.get(server, 0.0):
                return
            self._next[server] = now + AGAIN
        begun("stampede-memcached-witness", self._come, server)

    def _come(self, server: Server) -> None:
        """Another thread's, as it may take long: have a witness whose connection has just been heard of."""
        old = self._there.get(server)
        with suppress(EngineError):
            if old is not None:
                run_blocking(old.ask(b"mn\r\n"))
                return
        if old is not None:
            self._there.pop(server, None)
            self._line.give(old.connection)
        with suppress(EngineError):
            connection = self._line.connection(server)
            try:
                run_blocking(connection.ask(b"mn\r\n", twice=True))
            except EngineError:
                self._line.give(connection)
                raise
            self._there[server] = Witness(connection)

    def close(self) -> None:
        there, self._there = self._there, {}
        for witness in there.values():
            self._line.give(witness.connection)
