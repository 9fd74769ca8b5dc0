"""A Postgres server's news, as `engines/kit/feed.py` hears them: notifications, on the one connection of this process
that listens.

Whoever waits is told on a channel of the process, of which nobody else hears. Changes come on a channel that all listen
on, and only while some process keeps what it has read; bumps of generations always do. The connection's backend is also
this process's sign of life. Nothing blocks here but the connecting: a server that hangs is found out by its silence.
"""

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

__all__ = ["GENERATIONS", "Bumps", "PostgresNews"]

_log = logging.getLogger("stampede")

SLOTS = 1 << 16
GENERATIONS = SLOTS  # the slot of all generations, behind those of keys

CHANGES = b"stampede"
"""The channel of changes: a slot in four hex digits, or `g`."""

NOBODY = "nobody tells of anything here: waiters look ten times a second, and a local tier keeps nothing"
UNKEPT = "a local tier keeps nothing, and every hit asks the server"

PATIENCE = "500ms"
"""For which we wait for the changes under way to end, before changes are told to us, too: later ones wait behind us."""

AT_FIRST = 0.5  # seconds that the first claim, or lock, of a process waits for the connection that is its sign of life
LATER = 30.0  # seconds before a server that refuses to note us is asked again

_HOME = b"home"
_PASSING = ("25", "40", "55", "57")  # conflicts, locks, time limits; read-only, as before a promotion


class PostgresNews(Feed):
    """One server's news. `listens` is a number of the connection that listens, 0 while there is none. `told` is the
    same once changes are told to it; else 0, and there are no tickets.

    Whoever reads samples the stamp of the key's slot before the question is sent, and keeps a ticket only if `told` is
    not 0 when it is answered: a change that was committed behind what he has read is news to come, or has changed the
    stamp; and so has each beginning and end of the news.
    """

    def __init__(self, connection: Callable[[], Any], *, tracks: bool = False, bound: bool = True) -> None:
        """`connection` makes a blocking one to the server itself, behind no pooler; None: there is no way to it. With
        `bound`, what is held here ends with that connection."""
        self._connection = connection
        self.tracks, self.bound = tracks, bound
        self.on_refused: Callable[[str], object] = lambda how: None
        self.on_left: Callable[[tuple[int, float]], object] = lambda backend: None  # which was our sign of life
        self._numbers = itertools.count(1)
        self._source: _Told | None = None
        super().__init__("postgres", SLOTS + 1)

    def _begin(self) -> None:
        super()._begin()
        self.told = self.listens = 0
        self.home_backend: tuple[int, float] | None = None  # its number, and when it was started: numbers come again
        self.life: tuple[int, float] | tuple[None, None] = (None, None)  # the same, if it is our sign of life

    @property
    def channel(self) -> bytes:
        """On which this process alone listens."""
        return b"%s_%s" % (CHANGES, self.home.encode())

    async def at_home(self, colour: Colour) -> None:
        """Wait for the first connection, or for its refusal: what is granted before it has no sign of life."""
        if self.bound and self.home_backend is None and not self.mute:
            with self.listen(_HOME) as listener:
                await colour.park(listener.ready, AT_FIRST)

    def track(self) -> None:
        """Changes are wanted, from now on; the connection may be there already."""
        self.tracks = True
        self.wake()

    def follow(self) -> None:
        """Have changes told, if this is wanted at all. Until they are, there are no tickets."""
        if self._thread is None and self.tracks:
            self.start()

    # -- the feed's thread --------------------------------------------------------------------------------------

    def connect(self) -> _Told:
        connection = self._connection()
        if connection is None:
            self.on_refused(NOBODY)
            raise NothingToHear
        self._source = _Told(connection, self)
        return self._source

    def start_again(self) -> None:
        """In a forked child: as long as it had its parent's connection, a parent that was killed would seem to live."""
        inherited, self._source = self._source, None
        super().start_again()
        if inherited is not None and not inherited.connection.closed:
            disown_number(inherited.fileno())

    def turn(self, source: _Told) -> None:
        source.turn()

    def want(self, channel: Channel) -> None:
        if self.listens:  # all come on a channel that stands
            self.answered(channel, True)
        else:
            super().want(channel)

    def listening(self, backend: tuple[int, float]) -> None:
        """From here on nothing is missed but changes, of which we are not told yet."""
        self.void_all()  # a question that is under way may have been asked before
        self.home_backend = backend
        self.life = backend if self.bound else self.life
        self.listens = next(self._numbers)
        self.stamps.find()

    def kept(self) -> None:
        """Changes are told to us from here on, too."""
        self.void_all()
        self.told = self.listens

    def refused(self, why: str) -> None:
        """We may not say that we want to be told of changes."""
        self.on_refused(f"{why}: {UNKEPT}")

    def heard(self, channel: bytes, message: bytes) -> None:
        """A notification. Anybody can send one."""
        if channel != CHANGES:
            name, _, said = message.partition(b" ")
            try:
                self.ring(name, a2b_base64(said))
            except NoBase64:
                return
        elif message == b"g":
            self.void_all()  # hits don't ask for the generation: whatever is kept may be of an older one
        elif len(message) == 4:
            try:
                self.stamps.void(int(message, 16), 1)
            except ValueError:
                return

    def lost(self) -> None:
        if self.listens:
            self.stamps.lose()
        self.told = self.listens = 0
        self.home_backend, self.life = None, (None, None)

    def _lose(self) -> None:
        left = self.home_backend
        super()._lose()
        if left is not None:  # behind what others must not wait for
            self.on_left(left)


class Bumps:
    """The same news, as what is known of generations sees them: of a bump all are told who listen."""

    def __init__(self, news: PostgresNews) -> None:
        self._news = news
        self.stamps: NewsStamps = news.stamps
        self.ticket = news.ticket

    @property
    def told(self) -> int:
        return self._news.listens

    @property
    def tracks(self) -> bool:
        return not self._news.mute


class _Told:
    """The connection that listens. One question at a time is under way over it."""

    def __init__(self, connection: Any, news: PostgresNews) -> None:
        self.connection = connection
        self._pg = connection.pgconn
        self._news = news
        self._home = news.home.encode()
        self._pid = 0
        self._questions: deque[tuple[bytes, Callable[[list[Any]], object]]] = deque()
        self._answered: Callable[[list[Any]], object] | None = None
        self._results: list[Any] = []
        self._held: list[Channel] = []  # until we listen
        self._keep_at = 0.0  # when we ask to be told of changes
        self._keeps = False  # we are
        self._ask(  # with all digits: a start that is not quite ours would be another backend's
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
        if news.tracks and news.home_backend and not news.told and time.monotonic() >= self._keep_at:
            self._keep_at = inf
            self._ask(b"SELECT stampede.keep('%s', %d, %r)" % (self._home, *news.home_backend), self._kept)

    def ask(self, some: Sequence[tuple[bool, Channel]]) -> None:
        """They come on a channel that stands, or is about to."""
        self._held += [channel for wanted, channel in some if wanted]
        self._answer_held()

    def ping(self) -> None:
        """It has another backend if there is a pooler between us."""
        if self._answered is None:
            self._ask(b"SELECT pg_backend_pid()", self._same)
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
        if self._keeps and self._answered is None:  # or whoever is noted next sees that we have gone
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
            held, self._held = self._held, []
            for channel in held:
                self._news.answered(channel, True)

    def _same(self, results: list[Any]) -> None:
        self._check(results)
        if int(results[0].get_value(0, 0)) != self._pid:
            raise ConnectionError("this is not the backend that listens: there is a pooler before it")

    def _kept(self, results: list[Any]) -> None:
        state, why = refusal_of(results)
        if state is None:
            self._keeps = True
            self._news.kept()
            return
        _log.debug("changes are not told: %s", why)
        passes = state[:2] in _PASSING
        self._keep_at = time.monotonic() + (TICK if passes else LATER)
        if not passes:
            self._news.refused(why)

    @staticmethod
    def _check(results: list[Any]) -> None:
        state, why = refusal_of(results)
        if state is not None:
            raise ConnectionError(why)


def refusal_of(results: Sequence[Any]) -> tuple[str | None, str]:
    """The first that is one: its SQLSTATE, and what is said."""
    from psycopg.pq import DiagnosticField, ExecStatus

    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            fields = (
                result.error_field(each) or b"" for each in (DiagnosticField.SQLSTATE, DiagnosticField.MESSAGE_PRIMARY)
            )
            state, why = (each.decode("utf-8", "replace") for each in fields)
            return state, why
    return None, ""
