"""News from a server, for both colours: one connection that is told, and one daemon thread that reads it.

Waiters listen to channels, and what is kept in this process stands under the stamps that news change. While there is
no connection nothing is believed, and nobody waits for a message. An engine inherits from `Feed` and says how it
connects; its `Source` says how names are subscribed to, and what has come.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Protocol, TypeAlias

from stampede.engines.kit.stamps import NewsStamps
from stampede.model.ports import Pulse, Ticket
from stampede.runtime import process_lock
from stampede.runtime.colour import Bell
from stampede.runtime.threads import begun

__all__ = ["Channel", "Feed", "Listener", "NothingToHear", "Source"]

_log = logging.getLogger("stampede")

LINGER = 5.0
"""Seconds that a channel stays subscribed after its last waiter: the next herd finds it so."""

TICK = 1.0
"""Seconds between two pings: a connection that was cut without a word would tell nothing."""

AGAIN = 0.5
"""Seconds before a lost connection is made again."""

NAP = 0.005
"""Seconds for which news are let come together, while nobody waits for a message."""

LATELY = 0.05
"""Seconds for which local hits trust that nothing has come since all that had come was read."""

DEAF = 2.0
"""Seconds for which no connection could be made, while the server answers others, before people are told."""

MEANS = "until it is made, waiters look ten times a second, and a local tier keeps nothing"
"""What it costs that there is no connection for news."""

_Pair: TypeAlias = tuple[socket.socket, socket.socket]
"""What the thread is woken by: its end, and the others'."""


class Channel:
    """One name, subscribed or about to be."""

    __slots__ = ("ears", "left", "name", "ready", "stands")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.ears: set[Listener] = set()
        self.ready = Bell()  # there is an answer: subscribed, refused or lost
        self.stands = False
        self.left = 0.0  # when the last ear did

    def take(self, message: bytes) -> list[Listener]:
        """Those that hear this message; of thousands that wait for their turn it is one."""
        heard = [listener for listener in self.ears if not message or listener.only in (b"", message)]
        self.ears.difference_update(heard)
        return heard

    def lose(self) -> None:
        """There will be no messages any more: everybody asks again."""
        self.stands = False
        self.ready.ring()
        for listener in list(self.ears):
            listener.bell.ring()


class Listener:
    """What one waiter hears: `bell` rings at the first message, or when the news are lost."""

    __slots__ = ("_channel", "bell", "message", "only")

    def __init__(self, channel: Channel, only: bytes) -> None:
        self._channel = channel
        self.only = only
        self.bell = Bell()
        self.message = b""

    @property
    def ready(self) -> Bell:
        """Rings as soon as it is known whether there will be messages."""
        return self._channel.ready

    @property
    def hears(self) -> bool:
        return self._channel.stands


class Source(Protocol):
    """A connection that is told, for the feed's thread alone. Whatever raises here, it is lost."""

    def fileno(self) -> int:
        """Of what is readable when something has come."""

    def ask(self, some: Sequence[tuple[bool, Channel]]) -> None:
        """Subscribe to these channels (True), or leave them. `Feed.answered` is to be told of those."""

    def ping(self) -> None:
        """Have something come soon."""

    def read(self) -> None:
        """Tell the feed of all that has come, by `ring`, `answered`, `gone`, and what its stamps are to hear."""

    def close(self) -> None: ...


class NothingToHear(Exception):
    """There is nothing to connect to, nor will there be."""


class Feed(ABC):
    """One server's news."""

    beside: Any = None
    """What else the thread is to be woken by when it is readable."""

    def __init__(self, kind: str, slots: int) -> None:
        self._kind = kind
        self.stamps = NewsStamps.of(slots)
        self.pulse = Pulse(self.heard_until, self.stamps.stood)
        self.on_void: Callable[[], object] = lambda: None  # when nothing holds any more
        self.on_tick: Callable[[], object] = lambda: None  # called by the thread once in TICK
        self.on_deaf: Callable[[str], object] = lambda how: None  # once whenever no connection can be made for DEAF
        self.answered_others: Callable[[], float] = lambda: 0.0  # when the server last answered on another connection
        self._begin()

    def _begin(self) -> None:
        self.home = os.urandom(6).hex()  # part of the channels on which this process alone listens
        self.mute = False  # this user may not subscribe, or there is nobody who tells
        self._lock = threading.RLock()  # a finalizer, or a signal, may listen in the middle of this
        self._channels: dict[bytes, Channel] = {}
        self._todo: deque[tuple[bool, Channel]] = deque()  # what the thread is to ask
        self._thread: threading.Thread | None = None
        self._poke: _Pair | None = None
        self._down = False
        self._closed = False
        self._deaf = False  # people were told
        self._deaf_since, self._failed_at = 0.0, inf
        self._read = 0.0  # when all that had come was read
        self._quiet: list[int] | None = None  # what the thread waits for; None while it does not wait

    # -- what an engine says ------------------------------------------------------------------------------------

    @abstractmethod
    def connect(self) -> Source:
        """A new connection, by the thread."""

    def want(self, channel: Channel) -> None:
        """Have it asked for, soon; nobody else does anything meanwhile."""
        self._todo.append((True, channel))
        self.wake()

    def turn(self, source: Any) -> None:
        """By the thread, before it waits, which is never longer than TICK. It raises if this connection is of no use
        any more."""
        return

    def lost(self) -> None:
        """There is no connection, or the last one is of no use: what it kept true is not known to be so."""
        self.stamps.lose()

    # -- waiting ------------------------------------------------------------------------------------------------

    @contextmanager
    def listen(self, name: bytes, only: bytes = b"") -> Iterator[Listener]:
        """An ear for a channel, and what is sent after `ready` has rung. With `only`, messages for others are not."""
        self.start()
        with self._lock:
            channel = self._channels.get(name)
            if channel is None:
                channel = Channel(name)
                if self._down or self.mute or self._closed:
                    channel.ready.ring()
                else:
                    self._channels[name] = channel
                    self.want(channel)
            listener = Listener(channel, only)
            channel.ears.add(listener)
        try:
            yield listener
        finally:
            with self._lock:
                channel.ears.discard(listener)
                channel.left = time.monotonic()

    def start(self) -> None:
        """Have a connection, soon."""
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._poke = _pair()
                    self._thread = begun(f"stampede-{self._kind}-news", self._live, self._poke)

    def wake(self) -> None:
        """Have the thread take its next turn now."""
        if self._poke is not None:
            try:
                self._poke[1].send(b"!")
            except BlockingIOError:
                pass  # it has been poked often enough
            except OSError:
                pass  # else the thread has ended

    def over(self) -> None:
        """Nobody reads any more, and nobody will."""
        return

    def close(self) -> None:
        """Let everybody go. The thread ends by itself."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self.wake()
        self._lose()
        if thread is None:
            self.over()

    def start_again(self) -> None:
        """In a forked child: the connection is the parent's, and nothing is known of what it will be told."""
        inherited = self._poke
        self._begin()
        self.void_all()
        for end in inherited or ():
            end.close()

    # -- stamps -------------------------------------------------------------------------------------------------

    def ticket(self, slot: int, stamp: int) -> Ticket:
        """Return a ticket of what was read after this stamp was."""
        return Ticket(self.stamps, slot, stamp, self.pulse)

    def stored(self, slot: int, stamp: int) -> Ticket | None:
        """Return a ticket for a value that this process has just stored, if there can be one.

        `stamp` was read before the value was sent. The server must be certain to tell of this change, and of all in
        their order, each by itself. The ticket begins with the first news of the slot. If those are about an older
        change, the news about this value end it. News about a later change always do.
        """
        with process_lock.lock:
            told = self.stamps[slot] - stamp
            if told == 0:
                self.stamps.void(slot)  # what was read meanwhile may be older than the value
            return self.ticket(slot, self.stamps[slot] + 1 - told) if told in (0, 1) else None

    def void(self, slot: int) -> None:
        """What is kept of a slot's keys is true no more."""
        self.stamps.void(slot)

    def void_all(self) -> None:
        """Nor is anything else."""
        self.stamps.void_all()
        self.on_void()

    def heard_until(self, now: float) -> float:
        """Return until when local hits may trust the stamps; a moment that has passed if they may not now.

        Any thread may ask. The thread that reads may not have run for long: then this looks whether something waits to
        be read. If the whole machine was frozen nothing may have come yet, which the age of the last word tells.
        """
        if now - self._read < LATELY:
            return self._read + LATELY
        quiet = self._quiet
        try:
            if quiet is None or now - self.stamps.heard > 2 * TICK or _speaks(quiet, 0.0) or self._quiet is None:
                return 0.0
        except OSError:  # the connection was closed meanwhile
            return 0.0
        self._read = now
        return now + LATELY

    # -- what has come, by the thread -----------------------------------------------------------------------------

    def ring(self, name: bytes, message: bytes) -> None:
        """A message of a channel."""
        with self._lock:
            channel = self._channels.get(name)
            if channel is None:
                return
            heard = channel.take(message)
        for listener in heard:
            listener.message = message
            listener.bell.ring()

    def answered(self, channel: Channel, stands: bool) -> None:
        """A channel that was asked for stands, or is refused."""
        channel.stands = stands
        channel.ready.ring()
        if not stands:
            with self._lock:
                if self._channels.get(channel.name) is channel:
                    del self._channels[channel.name]

    def gone(self, name: bytes) -> None:
        """It is told no more, on the server's own account: who waits asks again."""
        with self._lock:
            channel = self._channels.pop(name, None)
        if channel is not None:
            channel.lose()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _serves(self, poke: _Pair) -> bool:
        """Is the thread with this one to go on? Not if another has come in its place."""
        return self._poke is poke and not self._closed

    def _live(self, poke: _Pair) -> None:
        pid = os.getpid()
        try:
            while self._serves(poke):
                source, seconds, began = None, AGAIN, inf
                try:
                    source = self.connect()
                    began = time.monotonic()
                    with self._lock:
                        self._down = self.mute = False
                    self._attend(source, poke)
                except NothingToHear:
                    self.mute, seconds = True, inf
                except Exception as error:  # whatever it was, there are no news until they are back
                    _log.debug("no news from %s: %s", self._kind, error)
                    self._failed(error, began)
                finally:
                    if os.getpid() == pid:
                        if self._poke is poke:
                            self._lose()
                        if source is not None:
                            source.close()
                self._rest(poke, seconds)
        finally:
            if os.getpid() == pid:
                for end in poke:
                    end.close()
                if self._closed:
                    self.over()

    def _failed(self, error: Exception, began: float) -> None:
        """Tell people once, if no connection can be made, and the server is not down: of that others tell."""
        now = time.monotonic()
        if now - began > DEAF:  # it stood for a while
            self._deaf, self._deaf_since = False, now
        elif self.answered_others() < self._failed_at:
            self._deaf_since = now
        elif now - self._deaf_since > DEAF and not self._deaf:
            self._deaf = True
            self.on_deaf(f"the connection for that fails ({' '.join(str(error).split())}): {MEANS}")
        self._failed_at = now

    def _attend(self, source: Source, pair: _Pair) -> None:
        """Ask what is to be asked, and hear what is said, until the connection breaks."""
        poke = pair[0]
        heard = time.monotonic()
        tick = heard + TICK
        numbers = [each.fileno() for each in (source, self.beside) if each is not None]
        with selectors.DefaultSelector() as selector:
            for each in (source, poke, self.beside):
                if each is not None:
                    selector.register(each, selectors.EVENT_READ)
            while self._serves(pair):
                self.turn(source)
                with self._lock:
                    todo, self._todo = self._todo, deque()
                if todo:
                    source.ask(todo)
                self._quiet = numbers
                ready = [key.fileobj for key, _ in selector.select(max(tick - time.monotonic(), 0.0))]
                self._quiet = None  # before anything is read: `heard_until` looks at this last
                now = time.monotonic()
                if poke in ready:
                    _drain(poke)
                if source in ready:
                    heard = now
                    source.read()
                    self._read = now
                    if not self._channels:  # each by itself would wake this thread, at some caller's cost
                        _speaks([poke], NAP)
                if now >= tick:
                    heard += now - tick  # in which we did not run; perhaps nothing was asked, either
                    if now - heard > 2 * TICK:
                        raise ConnectionError("it doesn't answer")
                    tick = now + TICK
                    self._tidy(now)
                    source.ping()
                    self.on_tick()

    def _tidy(self, now: float) -> None:
        """Leave channels that nobody has waited for lately."""
        with self._lock:
            for channel in [each for each in self._channels.values() if not each.ears and now - each.left > LINGER]:
                del self._channels[channel.name]
                self._todo.append((False, channel))

    def _lose(self) -> None:
        self._quiet = None
        self.lost()
        self.void_all()
        with self._lock:
            self._down = True
            channels, self._channels = list(self._channels.values()), {}
            self._todo.clear()
        for channel in channels:
            channel.lose()

    def _rest(self, poke: _Pair, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._serves(poke) and (left := end - time.monotonic()) > 0:
            if _speaks([poke[0]], left):
                _drain(poke[0])


def _pair() -> _Pair:
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    return pair


def _speaks(socks: Sequence[socket.socket | int], seconds: float) -> bool:
    """Return whether one of them is readable within so many seconds."""
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(seconds if seconds < inf else None))


def _drain(poke: socket.socket) -> None:
    try:
        while poke.recv(4096):
            pass
    except BlockingIOError:
        pass
