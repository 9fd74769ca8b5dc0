"""News from a server, for both colours: one connection receives them, and one daemon thread reads it.

Waiters listen to channels, and local values are valid under stamps, which news change. While there is no connection,
local values are not trusted, and no waiter relies on a message. An engine inherits from `Feed` and says how it
connects; its `Source` says how to subscribe to names, and what has come."""

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
"""Seconds that a channel stays subscribed after its last waiter, so that the next herd finds it subscribed."""

TICK = 1.0
"""Seconds between two pings. Without them, a connection that was cut silently would never be noticed."""

AGAIN = 0.5
"""Seconds before a lost connection is made again."""

NAP = 0.005
"""Seconds for which news may accumulate while no waiter needs a message."""

LATELY = 0.05
"""Seconds for which local hits trust that nothing has come since everything that had come was read."""

DEAF = 2.0
"""Seconds without a connection, while the server answers on others, before a warning is given."""

MEANS = "until it is made, waiters look ten times a second, and a local tier keeps nothing"
"""What it costs that there is no connection for news."""

_Pair: TypeAlias = tuple[socket.socket, socket.socket]
"""The thread's end of a socket pair, and the end by which others wake the thread."""


class Channel:
    """One name, subscribed or about to be."""

    __slots__ = ("left", "listeners", "name", "ready", "subscribed")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.listeners: set[Listener] = set()
        self.ready = Bell()  # rings when the answer is known: subscribed, refused or lost
        self.subscribed = False
        self.left = 0.0  # when the last listener left

    def take(self, message: bytes) -> list[Listener]:
        """Remove and return the listeners that get this message. Of thousands that wait for their turn, it is one."""
        receivers = [listener for listener in self.listeners if not message or listener.only in (b"", message)]
        self.listeners.difference_update(receivers)
        return receivers

    def lose(self) -> None:
        """Wake all listeners, so that they ask again: no message will come any more."""
        self.subscribed = False
        self.ready.ring()
        for listener in list(self.listeners):
            listener.bell.ring()


class Listener:
    """One waiter of a channel. `bell` rings at the first message, or when the news are lost."""

    __slots__ = ("_channel", "bell", "message", "only")

    def __init__(self, channel: Channel, only: bytes) -> None:
        self._channel = channel
        self.only = only
        self.bell = Bell()
        self.message = b""

    @property
    def ready(self) -> Bell:
        """The bell that rings as soon as it is known whether messages will come."""
        return self._channel.ready

    @property
    def hears(self) -> bool:
        return self._channel.subscribed


class Source(Protocol):
    """A connection that receives news, used by the feed's thread alone. If a method raises, the connection is lost."""

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when something has come."""

    def ask(self, some: Sequence[tuple[bool, Channel]]) -> None:
        """Subscribe to these channels (True), or leave them (False). Report each subscription by `Feed.answered`."""

    def ping(self) -> None:
        """Ask for an answer, so that something comes soon."""

    def read(self) -> None:
        """Read what has come, and report it by `ring`, `answered` and `gone`, and to the feed's stamps."""

    def close(self) -> None: ...


class NothingToHear(Exception):
    """There is nothing to connect to, now or later."""


class Feed(ABC):
    """The news of one server."""

    beside: Any = None
    """An object with a file descriptor that also wakes the thread when it is readable."""

    def __init__(self, kind: str, slots: int) -> None:
        self._kind = kind
        self.stamps = NewsStamps.of(slots)
        self.pulse = Pulse(self.heard_until, self.stamps.stood)
        self.on_void: Callable[[], object] = lambda: None  # called when no ticket is valid any more
        self.on_tick: Callable[[], object] = lambda: None  # called by the thread once in TICK
        self.on_deaf: Callable[[str], object] = lambda how: None  # called once if no connection can be made for DEAF
        self.answered_others: Callable[[], float] = lambda: 0.0  # when the server last answered on another connection
        self._begin()

    def _begin(self) -> None:
        self.home = os.urandom(6).hex()  # part of the channels on which this process alone listens
        self.mute = False  # this user may not subscribe, or nothing publishes news
        self._lock = threading.RLock()  # a finalizer, or a signal, may listen in the middle of this
        self._channels: dict[bytes, Channel] = {}
        self._todo: deque[tuple[bool, Channel]] = deque()  # what the thread has to ask for
        self._thread: threading.Thread | None = None
        self._poke: _Pair | None = None
        self._down = False
        self._closed = False
        self._deaf = False  # the warning was given
        self._deaf_since, self._failed_at = 0.0, inf
        self._read = 0.0  # when all that had come was read
        self._quiet: list[int] | None = None  # file descriptors that the thread waits for; None while it does not wait

    # -- for engines --------------------------------------------------------------------------------------------

    @abstractmethod
    def connect(self) -> Source:
        """Return a new connection. The thread calls this."""

    def want(self, channel: Channel) -> None:
        """Have the thread subscribe to this channel soon. The lock is held meanwhile."""
        self._todo.append((True, channel))
        self.wake()

    def turn(self, source: Any) -> None:
        """Do what is due before the thread waits, which is never longer than TICK. Raise if this connection is of no
        use any more."""
        return

    def lost(self) -> None:
        """React to a lost connection: what it kept valid is not known to be valid any more."""
        self.stamps.lose()

    # -- waiting ------------------------------------------------------------------------------------------------

    @contextmanager
    def listen(self, name: bytes, only: bytes = b"") -> Iterator[Listener]:
        """Listen to a channel: messages sent after `ready` has rung arrive. With `only`, messages with another text do
        not."""
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
            channel.listeners.add(listener)
        try:
            yield listener
        finally:
            with self._lock:
                channel.listeners.discard(listener)
                channel.left = time.monotonic()

    def start(self) -> None:
        """Start the thread, which connects soon."""
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
                pass  # enough wake-ups are pending
            except OSError:
                pass  # the thread has ended

    def over(self) -> None:
        """Release what the feed used: no thread reads it now or later."""
        return

    def close(self) -> None:
        """Wake all listeners. The thread ends by itself."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self.wake()
        self._lose()
        if thread is None:
            self.over()

    def start_again(self) -> None:
        """Begin anew in a forked child: the connection, with all that it will receive, belongs to the parent."""
        inherited = self._poke
        self._begin()
        self.void_all()
        for end in inherited or ():
            end.close()

    # -- stamps -------------------------------------------------------------------------------------------------

    def ticket(self, slot: int, stamp: int) -> Ticket:
        """Return a ticket for what was read after this stamp was."""
        return Ticket(self.stamps, slot, stamp, self.pulse)

    def stored(self, slot: int, stamp: int) -> Ticket | None:
        """Return a ticket for a value that this process has just stored, or None if there can be none. `stamp` was read
        before the value was sent. The server must be certain to report this change, and all changes in their order,
        each by itself. The ticket begins with the first news of the slot. If those are about an older change, the news
        about this value end it. News about a later change always do."""
        with process_lock.lock:
            changes = self.stamps[slot] - stamp
            if changes == 0:
                self.stamps.void(slot)  # what was read meanwhile may be older than the value
            return self.ticket(slot, self.stamps[slot] + 1 - changes) if changes in (0, 1) else None

    def void(self, slot: int) -> None:
        """End the tickets of a slot."""
        self.stamps.void(slot)

    def void_all(self) -> None:
        """End all tickets."""
        self.stamps.void_all()
        self.on_void()

    def heard_until(self, now: float) -> float:
        """Return until when local hits may trust the stamps, or a moment in the past if they may not trust them now.
        Any thread may ask. The reading thread may not have run for long: then this looks whether something waits to be
        read. If the whole machine was frozen, nothing may have come yet; the age of the last message shows that."""
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

    # -- what has come: called by the thread -----------------------------------------------------------------------

    def ring(self, name: bytes, message: bytes) -> None:
        """Deliver a message to the listeners of a channel."""
        with self._lock:
            channel = self._channels.get(name)
            if channel is None:
                return
            receivers = channel.take(message)
        for listener in receivers:
            listener.message = message
            listener.bell.ring()

    def answered(self, channel: Channel, subscribed: bool) -> None:
        """Note that the server has accepted the subscription of a channel, or refused it."""
        channel.subscribed = subscribed
        channel.ready.ring()
        if not subscribed:
            with self._lock:
                if self._channels.get(channel.name) is channel:
                    del self._channels[channel.name]

    def gone(self, name: bytes) -> None:
        """Wake the listeners of a channel that the server has ended by itself, so that they ask again."""
        with self._lock:
            channel = self._channels.pop(name, None)
        if channel is not None:
            channel.lose()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _serves(self, poke: _Pair) -> bool:
        """Return whether the thread with this pair should go on. It should not if another thread has taken its
        place."""
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
                except Exception as error:  # whatever the error is, the answer is to connect again
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
        """Warn once if no connection can be made while the server answers others. An outage of the server is reported
        elsewhere."""
        now = time.monotonic()
        if now - began > DEAF:  # the connection worked for a while
            self._deaf, self._deaf_since = False, now
        elif self.answered_others() < self._failed_at:
            self._deaf_since = now
        elif now - self._deaf_since > DEAF and not self._deaf:
            self._deaf = True
            self.on_deaf(f"the connection that would report them fails ({' '.join(str(error).split())}): {MEANS}")
        self._failed_at = now

    def _attend(self, source: Source, pair: _Pair) -> None:
        """Subscribe as wanted and read what comes, until the connection breaks."""
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
                    if not self._channels:  # waking for each message would slow down callers
                        _speaks([poke], NAP)
                if now >= tick:
                    heard += now - tick  # this process did not run for so long, and perhaps did not ask, either
                    if now - heard > 2 * TICK:
                        raise ConnectionError("the server does not answer")
                    tick = now + TICK
                    self._tidy(now)
                    source.ping()
                    self.on_tick()

    def _tidy(self, now: float) -> None:
        """Leave channels that have had no waiter lately."""
        with self._lock:
            for channel in [
                each for each in self._channels.values() if not each.listeners and now - each.left > LINGER
            ]:
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
    """Return whether one of these sockets is readable within so many seconds."""
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
