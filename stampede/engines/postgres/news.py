"""The feed of a Postgres server: notifications, on the one connection of this process that listens.

Wake-ups for waiters come on a channel of this process alone. Changes come on a channel that all processes listen to,
and only while some process has a local tier; new generations always do. The connection's backend is also this
process's sign of life. Only connecting blocks here. A server that hangs is recognized by its silence."""

from __future__ import annotations

import itertools
import logging
import time
from binascii import Error as NoBase64
from binascii import a2b_base64
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from stampede.engines.kit.feed import TICK, Channel, Feed, NothingToHear
from stampede.engines.kit.stamps import NewsStamps
from stampede.engines.kit.transport import disown_number
from stampede.runtime.colour import Colour

__all__ = ["SLOTS", "Bumps", "PostgresNews"]

_log = logging.getLogger("stampede")

SLOTS = 1 << 16
SCOPES = 1 << 8  # the slots of generations, behind those of keys: scopes share them

CHANGES = b"stampede"
"""The channel of changes. A message is a slot in four hex digits; `g` and two hex digits for the slot of a
scope whose generation is new; or `g` alone: all are new."""

NO_NEWS = "no notifications arrive here: waiters look ten times a second, and a local tier keeps nothing"
NO_CHANGES = "a local tier keeps nothing, and every hit asks the server"

PATIENCE = "500ms"
"""How long `stampede.keep` waits for changes under way. It must not be long: later changes wait behind it."""

AT_FIRST = 0.5  # seconds that the first claim, or lock, of a process waits for the connection that is its sign of life
LATER = 30.0  # seconds before `stampede.keep` is called again after the server has refused it

_HOME = b"home"
_PASSING = ("25", "40", "55", "57")  # conflicts, locks, time limits; read-only, as before a promotion


class PostgresNews(Feed):
    """The feed of one server. `listens` is a number of the connection that listens, 0 if there is none. `reporter` is
    the same number once changes come on this connection. Before that it is 0, and there are no tickets. A reader
    samples the stamp of the key's slot before it sends its question, and keeps a ticket only if `reporter` is not 0
    when the answer is there. Then a change that is committed after the read is either notified later, or has changed
    the stamp already. Each beginning and end of the connection changes all stamps, too."""

    def __init__(self, connection: Callable[[], Any], *, tracks: bool = False, bound: bool = True) -> None:
        """`connection` returns a new blocking connection to the server itself, or None if only a pooler can be reached.
        With `bound`, leases and locks of this process end with that connection."""
        self._connection = connection
        self.tracks, self.bound = tracks, bound
        self.on_refused: Callable[[str], object] = lambda how: None
        self.on_left: Callable[[tuple[int, float]], object] = lambda backend: None  # the lost one: our sign of life
        self._numbers = itertools.count(1)
        self._source: _Connection | None = None
        super().__init__("postgres", SLOTS + SCOPES)

    def _begin(self) -> None:
        super()._begin()
        self.reporter = self.listens = 0
        self.home_backend: tuple[int, float] | None = None  # pid, and when it was started: pids are reused
        self.life: tuple[int, float] | tuple[None, None] = (None, None)  # `home_backend` if it is our sign of life

    @property
    def channel(self) -> bytes:
        """The channel on which only this process listens."""
        return b"%s_%s" % (CHANGES, self.home.encode())

    async def at_home(self, colour: Colour) -> None:
        """Wait until the first connection is there, or has failed: a lease granted before that has no sign of life."""
        if self.bound and self.home_backend is None and not self.mute:
            with self.listen(_HOME) as listener:
                await colour.park(listener.ready, AT_FIRST)

    def track(self) -> None:
        """Listen to changes from now on, if need be on a connection that is already there."""
        self.tracks = True
        self.wake()

    def follow(self) -> None:
        """Start to listen if changes are wanted (`track`). There are no tickets before the first connection."""
        if self._thread is None and self.tracks:
            self.start()

    # -- the feed's thread --------------------------------------------------------------------------------------

    def connect(self) -> _Connection:
        connection = self._connection()
        if connection is None:
            self.on_refused(NO_NEWS)
            raise NothingToHear
        self._source = _Connection(connection, self)
        return self._source

    def start_again(self) -> None:
        """Detach the parent's connection in a forked child, and start anew. As long as the child kept it open, a parent
        that was killed would seem to live."""
        inherited, self._source = self._source, None
        super().start_again()
        if inherited is not None and not inherited.connection.closed:
            disown_number(inherited.fileno())

    def turn(self, source: _Connection) -> None:
        source.turn()

    def want(self, channel: Channel) -> None:
        if self.listens:  # no subscription is needed: all messages come on the channel of this process
            self.answered(channel, True)
        else:
            super().want(channel)

    def listening(self, backend: tuple[int, float]) -> None:
        """Note that the connection listens: nothing is missed from here on but changes, which come after `tracking`."""
        self.void_all()  # a question that is under way may have been sent before this
        self.home_backend = backend
        self.life = backend if self.bound else self.life
        self.listens = next(self._numbers)
        self.stamps.find()

    def tracking(self) -> None:
        """Note that changes come from here on, too."""
        self.void_all()
        self.reporter = self.listens

    def refused(self, why: str) -> None:
        """Report that the server does not let this process ask for changes."""
        self.on_refused(f"{why}: {NO_CHANGES}")

    def heard(self, channel: bytes, message: bytes) -> None:
        """Handle a notification. Any client of the database can send one, so that it may be malformed."""
        if channel != CHANGES:
            name, _, said = message.partition(b" ")
            try:
                self.ring(name, a2b_base64(said))
            except NoBase64:
                return
        elif message == b"g":
            self.void_all()
        else:
            try:
                if len(message) == 4:
                    self.stamps.void(int(message, 16), 1)
                elif len(message) == 3 and message[:1] == b"g":
                    self.stamps.void(SLOTS + int(message[1:], 16), 1)
            except ValueError:
                return

    def lost(self) -> None:
        if self.listens:
            self.stamps.lose()
        self.reporter = self.listens = 0
        self.home_backend, self.life = None, (None, None)

    def _lose(self) -> None:
        left = self.home_backend
        super()._lose()
        if left is not None:  # last: it asks the server, and the steps before must not wait for that
            self.on_left(left)


class Bumps:
    """The feed as `PushedGenerations` sees it. New generations are notified to every process that listens."""

    def __init__(self, news: PostgresNews) -> None:
        self._news = news
        self.stamps: NewsStamps = news.stamps
        self.ticket = news.ticket

    @property
    def reporter(self) -> int:
        return self._news.listens

    @property
    def tracks(self) -> bool:
        return not self._news.mute


class _Connection:
    """The connection that listens. Its questions are sent one at a time."""

    def __init__(self, connection: Any, news: PostgresNews) -> None:
        self.connection = connection
        self._pg = connection.pgconn
        self._news = news
        self._home = news.home.encode()
        self._pid = 0
        self._questions: deque[tuple[bytes, Callable[[list[Any]], object]]] = deque()
        self._answered: Callable[[list[Any]], object] | None = None
        self._results: list[Any] = []
        self._pending: list[Channel] = []  # to be answered once we listen
        self._track_at = 0.0  # when to ask for changes
        self._tracks = False  # the server sends changes
        self._ask(  # with all digits: a start time that was rounded would be another backend's
            b"SET lock_timeout = '%s'; SET extra_float_digits = 1; LISTEN %s; LISTEN %s;"
            b"SELECT pg_backend_pid(), date_part('epoch', backend_start) FROM pg_stat_get_activity(pg_backend_pid())"
            % (PATIENCE.encode(), CHANGES, news.channel),
            self._listening,
        )

    def fileno(self) -> int:
        number: int = self._pg.socket
        return number

    def turn(self) -> None:
        news = self._news
        if news.tracks and news.home_backend and not news.reporter and time.monotonic() >= self._track_at:
            self._track_at = inf
            self._ask(b"SELECT stampede.keep('%s', %d, %r)" % (self._home, *news.home_backend), self._tracking)

    def ask(self, some: Sequence[tuple[bool, Channel]]) -> None:
        """Answer that these channels are subscribed, as soon as this connection listens."""
        self._pending += [channel for wanted, channel in some if wanted]
        self._answer_held()

    def ping(self) -> None:
        """Ask for the backend's pid. If a pooler is in between, another backend answers."""
        if self._answered is None:
            self._ask(b"SELECT pg_backend_pid()", self._check_backend)
        self._pg.flush()

    def read(self) -> None:
        self._pg.consume_input()
        self._news.stamps.heard = time.monotonic()
        while self._answered is not None and not self._pg.is_busy():
            result = self._pg.get_result()
            if result is not None:
                self._results.append(result)
                continue
            answered, results = self._answered, self._results
            self._answered, self._results = None, []
            answered(results)
            self._next()
        while (notice := self._pg.notifies()) is not None:
            self._news.heard(notice.relname, notice.extra)

    def close(self) -> None:
        if self._tracks and self._answered is None:  # otherwise the next `stampede.keep` of any process removes our row
            with suppress(Exception):
                self._pg.send_query(b"DELETE FROM stampede.keepers WHERE pid = %d" % self._pid)
                self._pg.flush()
        self.connection.close()

    # -- questions ----------------------------------------------------------------------------------------------

    def _ask(self, question: bytes, answered: Callable[[list[Any]], object]) -> None:
        self._questions.append((question, answered))
        self._next()

    def _next(self) -> None:
        if self._answered is None and self._questions:
            question, self._answered = self._questions.popleft()
            self._pg.send_query(question)
            self._pg.flush()

    def _listening(self, results: list[Any]) -> None:
        self._check(results)
        pid, started = (results[-1].get_value(0, column) for column in (0, 1))
        self._pid = int(pid)
        self._news.listening((self._pid, float(started)))
        self._answer_held()

    def _answer_held(self) -> None:
        if self._news.listens:
            pending, self._pending = self._pending, []
            for channel in pending:
                self._news.answered(channel, True)

    def _check_backend(self, results: list[Any]) -> None:
        self._check(results)
        if int(results[0].get_value(0, 0)) != self._pid:
            raise ConnectionError("another backend answered than the one that listens: there is a pooler in between")

    def _tracking(self, results: list[Any]) -> None:
        state, why = refusal_of(results)
        if state is None:
            self._tracks = True
            self._news.tracking()
            return
        _log.debug("the server sends no changes: %s", why)
        passes = state[:2] in _PASSING
        self._track_at = time.monotonic() + (TICK if passes else LATER)
        if not passes:
            self._news.refused(why)

    @staticmethod
    def _check(results: list[Any]) -> None:
        state, why = refusal_of(results)
        if state is not None:
            raise ConnectionError(why)


def refusal_of(results: Sequence[Any]) -> tuple[str | None, str]:
    """Return SQLSTATE and message of the first refusal among these results. None: there is none."""
    from psycopg.pq import DiagnosticField, ExecStatus

    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            fields = (
                result.error_field(each) or b"" for each in (DiagnosticField.SQLSTATE, DiagnosticField.MESSAGE_PRIMARY)
            )
            state, why = (each.decode("utf-8", "replace") for each in fields)
            return state, why
    return None, ""
