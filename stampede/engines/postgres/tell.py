"""Wake-ups for waiters in other processes: notifications, sent after the change that they announce.

The server runs commits that notify one after the other, so there should be few. The first notification is sent at once.
Those that come while it is under way, and for a few milliseconds more, are sent together. No caller waits for them. If
one is lost, its waiters find the change when they look next."""

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

GATHER = 0.005  # seconds for which notifications are collected after others were sent
LONGEST = 5900  # bytes of a message, at most: in base64, with its channel, it stays below the 8000 of a notification
AT_ONCE = 500  # notifications of one statement
MOST = 10_000  # notifications that wait to be sent; if there are more, the oldest are dropped
AT_EXIT = 1.0  # seconds that `close` waits until all is sent, also at the end of the program
IN_A_LOOP = 0.05  # seconds that `close` waits in an event loop, which it blocks

TELL = (
    "SELECT count(pg_notify('stampede_' || home, payload)) FROM unnest($1::text[], $2::text[]) AS told (home, payload)"
)


class Teller:
    """Sends notifications to other processes, which are named by their homes. `ask` sends a command, and blocks."""

    def __init__(self, ask: Callable[[Command], object], news: Any) -> None:
        """`news` is this process's own feed: a notification to its home takes no round trip."""
        self._ask = ask
        self._news = news
        self._pool = ThreadPool(1, "stampede-postgres-tell")
        self.start_again()

    def start_again(self) -> None:
        """Begin with an empty queue in a forked child: the parent sends what is in the old one."""
        self._left: deque[tuple[str, str]] = deque(maxlen=MOST)
        self._hurry = threading.Event()

    def tell(self, homes: Iterable[str] | None, channel: bytes, message: bytes = b"") -> None:
        """Notify the listeners of a channel in these processes, soon. A message that is too long arrives empty."""
        theirs = set(homes or ())
        if self._news.home in theirs:
            theirs.discard(self._news.home)
            self._news.ring(channel, message)
        if theirs:
            payload = _payload(channel, message)
            self._left.extend((home, payload) for home in theirs)
            self._pool.do(self._tell)

    def flush(self, seconds: float) -> None:
        """Wait until all notifications are sent, but no longer than so many seconds."""
        done = threading.Event()
        self._hurry.set()
        self._pool.do(done.set)
        done.wait(seconds)

    def close(self) -> None:
        self.flush(AT_EXIT if running_loop() is None else IN_A_LOOP)

    def _tell(self) -> None:
        """Send until the queue is empty. Jobs behind this one then find nothing to do."""
        while some := self._next():
            try:
                self._ask((TELL, [[home for home, _ in some], [payload for _, payload in some]]))
            except EngineError as error:  # waiters also look now and then
                _log.debug("notifications were not sent: %s", error)
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
