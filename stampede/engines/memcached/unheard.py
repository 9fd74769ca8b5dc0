"""Replies that nobody waits for any more: who asked has gone on without the engine, or was interrupted.

A claim that is answered so may have won a stub, which nobody can give back: it has no name on it, and nobody else knows
its number. So the connection is listened to, by a thread of its own, and what was won there goes at once. What is
deleted is just the item of that number: should the replies be taken for those to other questions, nothing is.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ssl import SSLWantReadError, SSLWantWriteError
from typing import Any

from stampede import forks
from stampede.engines.memcached import meta
from stampede.engines.memcached.servers import Server
from stampede.errors import EngineError
from stampede.threads import begun

__all__ = ["Unheard", "unheard"]

LONGEST = 60.0
"""Seconds for which a server is listened to that owes replies."""

MOST = 250
"""Connections at most: with more, the oldest are closed."""

LOOK = 0.05
"""Seconds until a connection that has just come is listened to, where the thread listens to others already."""

AT_ONCE = 1.0
"""Seconds in which a server that has answered takes a line more, or says what it owes to an engine that was closed."""

CHUNK = 1 << 16


@dataclass(eq=False)
class _Line:
    """One connection, and what it owes."""

    sock: Any
    until: float
    _claims: Sequence[bytes]
    _replies: list[meta.Reply]
    _rest: bytearray
    _server: Server | None

    def owes(self, now: float) -> bool:
        """Hear what has come: whether there is more to come."""
        if self._server is not None and self._server.closed:
            self.until = min(self.until, now + AT_ONCE)
        with suppress(BlockingIOError, SSLWantReadError, SSLWantWriteError):
            while self._is_short() or self._gives_back():
                if now >= self.until or not (some := self.sock.recv(CHUNK)):
                    return False
                self._rest += some
            return False
        return True

    def _is_short(self) -> bool:
        at = 0
        while len(self._replies) < len(self._claims) and (found := meta.parse(self._rest, at)) is not None:
            reply, at = found
            self._replies.append(reply)
        del self._rest[:at]
        return len(self._replies) < len(self._claims)

    def _gives_back(self) -> bool:
        """Behind the last reply: while one is missing, what we say might be taken for the rest of a question."""
        pairs = zip(self._claims, self._replies, strict=True)
        won = [meta.delete(name, reply.cas) for name, reply in pairs if name and reply.won]
        if won:
            self.sock.settimeout(AT_ONCE)
            self.sock.sendall(b"".join(won))
            self.sock.settimeout(0)
        self._claims, self._replies = [b""] * len(won), []  # heard out: what is said and hung up on may be lost
        return bool(won)


class Unheard:
    """All such connections of this process."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        """In a forked child: they are the parent's."""
        self._lock = threading.RLock()  # a finalizer may add one in the middle of this
        self._served = False
        lines, self._lines = self._lines, []
        for line in lines:
            line.sock.close()

    def __len__(self) -> int:
        return len(self._lines)

    def add(
        self,
        sock: Any,
        claims: Sequence[bytes],
        replies: Sequence[meta.Reply],
        rest: bytes | bytearray,
        server: Server | None = None,
    ) -> None:
        """Listen to it, which is nobody else's from now on. `claims`: for each reply the name that it may have won, or
        none; `replies`: those which have come; `rest`: the bytes that came behind them. `server`: when it is closed
        here, it has a second yet."""
        sock.settimeout(0)
        line = _Line(sock, time.monotonic() + LONGEST, claims, list(replies), bytearray(rest), server)
        with self._lock:
            self._lines.append(line)
            for old in self._lines[:-MOST]:
                old.until = 0.0
            served = self._served
        if not served and begun("stampede-memcached-unheard", self._run) is None:
            self._drop(line)

    def _drop(self, line: _Line) -> None:
        with self._lock:
            self._lines.remove(line)
        line.sock.close()

    def _run(self) -> None:
        with self._lock:
            if self._served:
                return  # two have begun one
            self._served = True
        try:
            while lines := self._due():
                look = select.poll()
                for line in lines:
                    if line.sock.fileno() >= 0:  # or it was left twice, and has been closed
                        look.register(line.sock, select.POLLIN)
                look.poll(1000 * LOOK)
                for line in lines:
                    if not _owes(line):
                        self._drop(line)
        except BaseException:
            self._served = False  # an exception was thrown into it: the next one begins another
            raise

    def _due(self) -> list[_Line]:
        with self._lock:
            self._served = bool(self._lines)
            return list(self._lines)


def _owes(line: _Line) -> bool:
    try:
        return line.owes(time.monotonic())
    except (OSError, EngineError, ValueError, LookupError):  # it has ended, or what it says is no reply
        return False


unheard = Unheard()
