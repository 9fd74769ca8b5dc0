"""Wake-ups for those who wait in other processes: notifications, sent behind the change that they tell of.

The server does commits that notify one by one, so they are few: the first goes out at once, and what comes while it is
under way, and for some milliseconds more, goes out together. Callers of either colour wait for none of it; what is lost
on the way costs whoever waits a look.
"""

from __future__ import annotations

import logging
import threading
from binascii import b2a_base64
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from stampede.engines.postgres.talk import Command
from stampede.errors import EngineError
from stampede.runtime.colour import running_loop
from stampede.runtime.threads import ThreadPool

__all__ = ["LONGEST", "Teller"]

_log = logging.getLogger("stampede")

GATHER = 0.005  # seconds for which notifications are gathered, behind the last ones that were sent
LONGEST = 5900  # bytes of a message, at most: in base64, with its channel, it stays below the 8000 of a notification
AT_ONCE = 500  # notifications of one statement
MOST = 10_000  # notifications that wait to be sent: of more, the oldest are dropped
AT_EXIT = 1.0  # seconds that a close waits for what is to be told, also at the end of the program
IN_A_LOOP = 0.05  # the same in an event loop, where others wait, too

TELL = (
    "SELECT count(pg_notify('stampede_' || home, payload)) FROM unnest($1::text[], $2::text[]) AS told (home, payload)"
)


class Teller:
    """Tells processes, by their homes. `ask` sends a command, and blocks."""

    def __init__(self, ask: Callable[[Command], object], news: Any) -> None:
        """What is for the own home of the `News` takes no round trip."""
        self._ask = ask
        self._news = news
        self._pool = ThreadPool(1, "stampede-postgres-tell")
        self.start_again()

    def start_again(self) -> None:
        """In a forked child: what is to be told is the parent's, who tells it."""
        self._left: deque[tuple[str, str]] = deque(maxlen=MOST)
        self._hurry = threading.Event()

    def tell(self, homes: Iterable[str] | None, channel: bytes, message: bytes = b"") -> None:
        """Have those who listen there told, soon. A message that is too long is none, and wakes them all the same."""
        theirs = set(homes or ())
        if self._news.home in theirs:
            theirs.discard(self._news.home)
            self._news.ring(channel, message)
        if theirs:
            payload = _payload(channel, message)
            self._left.extend((home, payload) for home in theirs)
            self._pool.do(self._tell)

    def flush(self, seconds: float) -> None:
        """Wait until all has been told, if that takes no longer."""
        told = threading.Event()
        self._hurry.set()
        self._pool.do(told.set)
        told.wait(seconds)

    def close(self) -> None:
        self.flush(AT_EXIT if running_loop() is None else IN_A_LOOP)

    def _tell(self) -> None:
        """Until there is nothing more; the jobs behind this one find nothing to do then."""
        while some := self._next():
            try:
                self._ask((TELL, [[home for home, _ in some], [payload for _, payload in some]]))
            except EngineError as error:  # waiters look by themselves
                _log.debug("nobody was told: %s", error)
            self._hurry.wait(GATHER)

    def _next(self) -> list[tuple[str, str]]:
        some = list[tuple[str, str]]()
        with suppress(IndexError):
            while len(some) < AT_ONCE:
                some.append(self._left.popleft())
        return some


def _payload(channel: bytes, message: bytes) -> str:
    if len(message) > LONGEST:
        message = b""
    return (channel + b" " + b2a_base64(message, newline=False)).decode()
