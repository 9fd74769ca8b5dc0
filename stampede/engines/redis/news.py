"""News from the server, for both colours: one connection that is told, and one daemon thread that reads it.

Waiters subscribe to their key's channel; the local tier's tickets are voided by the server's own invalidation
messages (CLIENT TRACKING, which the reading connections redirect to this one). Only the thread touches the socket.
RESP3, since there invalidation messages need no channel rights.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from stampede.colour import Bell
from stampede.engines.redis.readers import Readers
from stampede.engines.redis.resp import MORE, Parser, parser
from stampede.interruptions import pass_on
from stampede.threads import begun

__all__ = ["GENERATIONS", "Ear", "News", "Stamps", "follow", "slot_of"]

_log = logging.getLogger("stampede")

LINGER = 5.0
"""Seconds that a channel stays subscribed after its last waiter: the next herd finds it so."""

SOON = 1.0
"""Seconds within which connections that end are taken for one loss, also if there are news yet."""

TICK = 1.0
"""Seconds between two pings: a connection that was cut without a word would tell nothing."""

AGAIN = 0.5
"""Seconds before a lost connection is made again."""

NAP = 0.005
"""Seconds for which invalidations are let come together, while nobody waits for a message."""

SLOTS = 1 << 16
GENERATIONS = SLOTS  # the slot of all generations, behind those of keys

_PIECE = 1 << 16

_ELSEWHERE = ("MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN")  # a channel's shard, not the user, is the trouble
_PLAIN, _SHARDED = (b"SUBSCRIBE", b"UNSUBSCRIBE"), (b"SSUBSCRIBE", b"SUNSUBSCRIBE")

_Pair: TypeAlias = tuple[socket.socket, socket.socket]
"""What the thread is woken by: its end, and the others'."""


class Refusal(Exception):
    """The server's answer to a subscription that this user may not have."""


class _Channel:
    """One channel, subscribed or about to be."""

    __slots__ = ("_only", "ears", "left", "name", "ready", "stands")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.ears: set[Ear] = set()
        self._only: dict[bytes, set[Ear]] = {}  # the same, by whose messages they hear
        self.ready = Bell()  # there is an answer: subscribed, refused or lost
        self.stands = False
        self.left = 0.0  # when the last ear did

    def add(self, ear: Ear) -> None:
        self.ears.add(ear)
        self._only.setdefault(ear.only, set()).add(ear)

    def discard(self, ear: Ear) -> None:
        self.ears.discard(ear)
        some = self._only.get(ear.only)
        if some is not None:
            some.discard(ear)
            if not some:
                del self._only[ear.only]

    def take(self, message: bytes) -> list[Ear]:
        """Those that hear this message; of thousands that wait for their turn it is one."""
        heard = [ear for only in {b"", message} for ear in self._only.get(only, ())] if message else list(self.ears)
        for ear in heard:
            self.discard(ear)
        return heard

    def lose(self) -> None:
        """There will be no messages any more: everybody asks again."""
        self.stands = False
        self.ready.ring()
        for ear in list(self.ears):
            ear.bell.ring()


class Ear:
    """What one waiter hears: `bell` rings at the first message, or when the news are lost."""

    __slots__ = ("_channel", "bell", "message", "only")

    def __init__(self, channel: _Channel, only: bytes) -> None:
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


class Stamps(array):  # type: ignore[type-arg]
    """One word a slot; and while the server is lost, what stood there before: so much was true when it went."""

    heard = 0.0  # when there was word of the server last
    _before: Any = None
    _at = 0.0
    _lost = False

    def remember(self) -> None:
        """A connection has ended. Those of a server that dies or hangs end one by one, each when somebody looks at it:
        the first tells what was true, until the server has been heard of again."""
        if self._before is None or self.heard - self._at > SOON:
            self._before = self[:]
        self._at = time.monotonic()

    def lose(self) -> None:
        """There are no news any more: it is the server that has gone."""
        self.remember()
        self._lost = True

    def find(self) -> None:
        """There are news again: of what was changed meanwhile there were none."""
        self._lost, self.heard = False, time.monotonic()

    def stood(self, slot: int, stamp: int) -> bool:
        """Did a ticket hold until the server was lost?"""
        return self._lost and self._before[slot] == stamp


class News:
    """One server's news. `told` is the id of the connection that is told of changes, 0 while there is none.

    Whoever reads samples the stamp of the key's slot before the question is sent, and keeps a ticket only if the
    reading connection had been told to redirect its news to `told`, which is still the one: then news that overtake
    the reply have changed the stamp already, and those that come later will.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        tracks: bool = True,
        sharded: bool = False,
        current: Callable[[Any], bool] = lambda connection: True,
    ) -> None:
        """`connect` makes a blocking connection that speaks RESP3 and is not connected yet; `current` says later
        whether it still leads to the right server. With `sharded`, channels are those of a cluster's shard."""
        self._connect = connect
        self._current = current
        self._subscribe, self._unsubscribe = _SHARDED if sharded else _PLAIN
        self.tracks = tracks
        self.stamps = Stamps("Q", bytes(8 * (SLOTS + 1)))
        self.on_void: Callable[[], object] = lambda: None  # a cluster's other shards: generations live on one of them
        self.on_tick: Callable[[], object] = lambda: None  # called by the thread once in TICK
        self._epochs = itertools.count(1)
        self._begin()

    def _begin(self) -> None:
        self.home = os.urandom(6).hex().encode()  # part of the channels on which this process alone listens
        self.told = 0
        self._readers = Readers()
        self._number = 0  # of the connection, told or not
        self._lock = threading.RLock()  # a finalizer, or a signal, may listen in the middle of this
        self._channels: dict[bytes, _Channel] = {}
        self._todo: deque[tuple[bytes, _Channel | None]] = deque()  # verbs to send, and what their answer is for
        self._expected: deque[tuple[bytes, _Channel | None]] = deque()
        self._thread: threading.Thread | None = None
        self._poke: _Pair | None = None
        self._down = False
        self._mute = False  # this user may not subscribe
        self._closed = False

    # -- waiting ------------------------------------------------------------------------------------------------

    @contextmanager
    def listen(self, name: bytes, only: bytes = b"") -> Iterator[Ear]:
        """An ear for a channel, and what is sent after `ready` has rung. With `only`, messages for others are not."""
        self.start()
        with self._lock:
            channel = self._channels.get(name)
            if channel is None:
                channel = _Channel(name)
                if self._down or self._mute or self._closed:
                    channel.ready.ring()
                else:
                    self._channels[name] = channel
                    self._ask(self._subscribe, channel)
            ear = Ear(channel, only)
            channel.add(ear)
        try:
            yield ear
        finally:
            with self._lock:
                channel.discard(ear)
                channel.left = time.monotonic()

    def track(self) -> None:
        """Changes are wanted, from now on; the connection may be there already."""
        self.tracks = True
        self._wake()

    def follow(self) -> None:
        """Have changes told, if this is wanted at all. Until they are, there are no tickets."""
        if self._thread is None and self.tracks:
            self.start()

    def start(self) -> None:
        """Have a connection, soon."""
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    poke = self._poke = _pair()
                    thread = begun("stampede-redis-news", self._live, poke)
                    if self._poke is poke:  # or a finalizer that interrupted us has started another one
                        self._thread, self._poke = thread, poke if thread is not None else None
                    if thread is None:
                        for end in poke:
                            end.close()

    def _serves(self, poke: _Pair) -> bool:
        """Is the thread with this one to go on? Not if another has come in its place."""
        return self._poke is poke and not self._closed

    def stray(self) -> None:
        """The server is not the right one any more: what it tells is of no use."""
        self.told = 0
        self._void_all()
        self._wake()

    def close(self) -> None:
        """Let everybody go. The thread ends by itself."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(TICK)
        self._lose()
        if thread is None or not thread.is_alive():
            self._readers.close()

    def start_again(self) -> None:
        """In a forked child: the connection is the parent's, and nothing is known of what it will be told."""
        readers, inherited = self._readers, self._poke
        self._begin()
        self._void_all()
        readers.close()  # the parent's own stays
        for end in inherited or ():
            end.close()

    def _ask(self, verb: bytes, channel: _Channel | None) -> None:
        """Under the lock: have the thread send it."""
        self._todo.append((verb, channel))
        self._wake()

    def _wake(self) -> None:
        if self._poke is not None:
            try:
                self._poke[1].send(b"!")
            except BlockingIOError:
                pass  # it has been poked often enough
            except OSError as error:
                pass_on(error)  # else the thread has ended

    # -- tickets ------------------------------------------------------------------------------------------------

    def void(self, slot: int) -> None:
        """From any thread: two at once may count as one, which is as good for all who had sampled before."""
        self.stamps[slot] += 1

    def _void(self, key: bytes) -> None:
        slot = slot_of(key)
        if slot == GENERATIONS:
            self._void_all()  # hits don't ask for the generation: whatever is kept may be of an older one
        elif slot is not None:
            self.void(slot)

    def _void_all(self) -> None:
        self.void_all()
        self.on_void()

    def watch(self, sock: Any) -> bool:
        """Have it noticed when a connection ends whose reads are followed, whatever its thread or loop does then.
        All that it has been told by then it had asked before: its tickets are older than what is voided. False: it
        can't be, and it has no tickets."""
        return self._readers.watch(sock)

    def reader_lost(self) -> None:
        """A connection whose reads were followed has ended: of changes in what it had read the server tells nobody."""
        self.stamps.remember()
        self._void_all()

    def void_all(self) -> None:
        """No ticket holds any more."""
        epoch = next(self._epochs) << 32  # no slot has had so many news by itself
        self.stamps[:] = array("Q", [epoch]) * len(self.stamps)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _live(self, poke: _Pair) -> None:
        pid = os.getpid()
        try:
            while self._serves(poke):
                connection = None
                try:
                    connection = self._connected()
                    self._attend(connection, poke)
                except Exception as error:  # whatever it was, there are no news until they are back
                    _log.debug("no news from Redis: %s", error)
                finally:
                    if os.getpid() == pid:
                        if self._poke is poke:
                            self._lose()
                        if connection is not None:
                            connection.disconnect()
                self._rest(poke)
        finally:
            if os.getpid() == pid:
                for end in poke:
                    end.close()

    def _connected(self) -> Any:
        connection = self._connect()
        connection.connect()
        connection.send_command(b"CLIENT", b"ID")
        number: Any = connection.read_response()
        if type(number) is not int:  # nobody could tell the server to redirect to it
            raise ConnectionError(f"that is no reply to CLIENT ID: {number!r}")
        self._check(connection)
        with self._lock:
            self._down = self._mute = False
        self._number = number
        return connection

    def _check(self, connection: Any) -> None:
        if not self._current(connection):
            raise ConnectionError("this is not the master any more")

    def _attend(self, connection: Any, pair: _Pair) -> None:
        """Send what is to be sent, and hear what is said, until the connection breaks."""
        pushes, sock, poke = parser(Refusal), connection._sock, pair[0]
        heard = time.monotonic()
        tick = heard + TICK
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(poke, selectors.EVENT_READ)
            if self._readers.wakes is not None:
                selector.register(self._readers.wakes, selectors.EVENT_READ)
            while self._serves(pair):
                if self.tracks and not self.told:
                    self.told = self._number
                    self.stamps.find()
                self._check(connection)
                self._send(connection)
                ready = [key.fileobj for key, _ in selector.select(max(tick - time.monotonic(), 0.0))]
                now = time.monotonic()
                if poke in ready:
                    _drain(poke)
                if sock in ready:
                    heard = now
                    self._read(sock, pushes)
                    if not self._channels:
                        _nap(poke)
                if (now >= tick or self._readers.wakes in ready) and self._readers.ended():
                    self.reader_lost()
                if now >= tick:
                    heard += now - tick  # in which we did not run; perhaps nothing was asked, either
                    if now - heard > 2 * TICK:
                        raise ConnectionError("it doesn't answer")
                    tick = now + TICK
                    self._tidy(now)
                    self.on_tick()

    def _send(self, connection: Any) -> None:
        with self._lock:
            todo, self._todo = self._todo, deque()
        self._expected.extend(todo)
        if todo:
            commands = [(verb,) if channel is None else (verb, channel.name) for verb, channel in todo]
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)

    def _read(self, sock: Any, pushes: Parser) -> None:
        """All that has come. By the parser itself: the library would log pushes, and look twice before each."""
        more = True
        while more:
            data = sock.recv(_PIECE)
            if not data:
                raise ConnectionError("the server closed the connection")
            self.stamps.heard = time.monotonic()
            pushes.feed(data)
            more = hasattr(sock, "pending") and sock.pending() > 0  # what TLS has read already
        while (push := pushes.gets()) is not MORE:
            self._hear(push)

    def _hear(self, push: Any) -> None:
        match push:
            case [b"message" | b"smessage", bytes() as channel, bytes() as message]:
                self._ring(channel, message)
            case [b"invalidate", None]:
                self._void_all()
            case [b"invalidate", keys]:
                for key in keys:
                    self._void(key)
            case [b"subscribe" | b"ssubscribe", *_]:
                self._answer(True)
            case [b"sunsubscribe", channel, *_] if not self._asked_to_leave(channel):
                self._gone(channel)
            case Refusal():
                _log.debug("no subscription: %s", push)
                self._mute = not str(push).startswith(_ELSEWHERE)
                self._answer(False)
            case _:
                self._answer(False)

    def _answer(self, stands: bool) -> None:
        _, channel = self._expected.popleft()
        if channel is not None:
            channel.stands = stands
            channel.ready.ring()
            if not stands:
                with self._lock:
                    if self._channels.get(channel.name) is channel:
                        del self._channels[channel.name]

    def _asked_to_leave(self, name: bytes) -> bool:
        return any(
            verb == self._unsubscribe and channel is not None and channel.name == name
            for verb, channel in self._expected
        )

    def _gone(self, name: bytes) -> None:
        """Its slot is another shard's from now on: who waits asks there."""
        with self._lock:
            channel = self._channels.pop(name, None)
        if channel is not None:
            channel.lose()

    def _ring(self, name: bytes, message: bytes) -> None:
        with self._lock:
            channel = self._channels.get(name)
            if channel is None:
                return
            heard = channel.take(message)
        for ear in heard:
            ear.message = message
            ear.bell.ring()

    def _tidy(self, now: float) -> None:
        """Ask whether anybody is there, and leave channels that nobody has waited for lately."""
        with self._lock:
            idle = [each for each in self._channels.values() if not each.ears and now - each.left > LINGER]
            for channel in idle:
                del self._channels[channel.name]
                self._todo.append((self._unsubscribe, channel))
            self._todo.append((b"PING", None))

    def _lose(self) -> None:
        """There are no news: what they kept true is not known to be so, and waiters ask again."""
        if self.told:
            self.stamps.lose()
        self.told = 0
        self._void_all()
        with self._lock:
            self._down = True
            channels, self._channels = list(self._channels.values()), {}
            self._todo.clear()
            self._expected.clear()
        for channel in channels:
            channel.lose()

    def _rest(self, poke: _Pair) -> None:
        end = time.monotonic() + AGAIN
        with selectors.DefaultSelector() as selector:
            selector.register(poke[0], selectors.EVENT_READ)
            while self._serves(poke) and (left := end - time.monotonic()) > 0:
                if selector.select(left):
                    _drain(poke[0])


def follow(told: int) -> tuple[bytes, ...]:
    """The command that has changes in what a connection reads told to another one."""
    return (b"CLIENT", b"TRACKING", b"ON", b"REDIRECT", b"%d" % told)


def slot_of(key: bytes) -> int | None:
    """The slot of an entry's or a generation's key; None for keys that no ticket is about."""
    if key[25:27] == b"}:":
        try:
            return int(key[1:5], 16)
        except ValueError:
            return None
    return GENERATIONS if key.startswith(b"{stampede}g") else None


def _pair() -> _Pair:
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    return pair


def _nap(poke: socket.socket) -> None:
    """Let news come together while nobody waits for one: each would wake this thread, at some caller's cost."""
    with selectors.DefaultSelector() as selector:
        selector.register(poke, selectors.EVENT_READ)
        selector.select(NAP)


def _drain(poke: socket.socket) -> None:
    try:
        while poke.recv(4096):
            pass
    except BlockingIOError:
        pass
