"""A Redis server's news, as `engines/kit/feed.py` hears them: messages of channels, and changes of keys.

Waiters subscribe to their key's channel; the local tier's tickets are voided by the server's own invalidation
messages (CLIENT TRACKING, which the reading connections redirect to this one). RESP3, since there invalidation
messages need no channel rights. Where a server refuses to redirect, there are no tickets.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stampede.engines.kit.feed import Channel, Feed
from stampede.engines.kit.replies import MORE
from stampede.engines.redis.clients import RedisConnector
from stampede.engines.redis.inside import packer, parser, socket_of
from stampede.engines.redis.readers import Readers

__all__ = ["GENERATIONS", "RedisNews", "follow", "refusal_of", "slot_of"]

_log = logging.getLogger("stampede")

SLOTS = 1 << 16
GENERATIONS = SLOTS  # the slot of all generations, behind those of keys

HOW = "so a local tier believes what it keeps for a second, or for its ttl"
"""What it means that the server refuses to redirect."""

_PIECE = 1 << 16

_ELSEWHERE = ("MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN")  # a channel's shard, not the user, is the trouble
_PLAIN, _SHARDED = (b"UNSUBSCRIBE", b"SUBSCRIBE"), (b"SUNSUBSCRIBE", b"SSUBSCRIBE")


class Refusal(Exception):
    """The server's answer to a question that this user may not ask."""


class RedisNews(Feed):
    """One server's news. `told` is the id of the connection that is told of changes, 0 while there is none.

    Whoever reads samples the stamp of the key's slot before the question is sent, and keeps a ticket only if the
    reading connection had been told to redirect its news to `told`, which is still the one: then news that overtake
    the reply have changed the stamp already, and those that come later will.
    """

    def __init__(self, server: RedisConnector, *, tracks: bool = True, sharded: bool = False) -> None:
        """With `sharded`, channels are those of a cluster's shard."""
        self.server = server
        self.verbs = _SHARDED if sharded else _PLAIN
        self.tracks = tracks
        self.on_refused: Callable[[str], object] = lambda how: None
        super().__init__("redis", SLOTS + 1)

    def _begin(self) -> None:
        super()._begin()
        self.told = 0
        self._readers = Readers()
        self.beside = self._readers.wakes

    def track(self) -> None:
        """Changes are wanted, from now on; the connection may be there already."""
        self.tracks = True
        self.wake()

    def follow(self) -> None:
        """Have changes told, if this is wanted at all. Until they are, there are no tickets."""
        if self._thread is None and self.tracks:
            self.start()

    def stray(self) -> None:
        """The server is not the right one any more: what it tells is of no use."""
        self.told = 0
        self.void_all()
        self.wake()

    def over(self) -> None:
        self._readers.close()

    def start_again(self) -> None:
        readers = self._readers
        super().start_again()
        readers.close()  # the parent's own stays

    def refused(self, told: int, why: Any) -> None:
        """A reading connection can't have its news redirected to that one. Until a local tier asks for it again, or
        for good if the server refuses on principle, there are no tickets."""
        if self.tracks and told == self.told and not any(word in str(why) for word in _PASSING):
            self.tracks = False
            self.stray()
            self.on_refused(f"{why}: {HOW}")

    # -- tickets ------------------------------------------------------------------------------------------------

    def changed(self, key: bytes) -> None:
        """By whomever, or ended, or evicted."""
        slot = slot_of(key)
        if slot == GENERATIONS:
            self.void_all()  # hits don't ask for the generation: whatever is kept may be of an older one
        elif slot is not None:
            self.stamps.void(slot, 1)

    def watch(self, sock: Any) -> bool:
        """Have it noticed when a connection ends whose reads are followed, whatever its thread or loop does then.
        All that it has been told by then it had asked before: its tickets are older than what is voided. False: it
        can't be, and it has no tickets."""
        return self._readers.watch(sock)

    def reader_lost(self, *, ours: bool = False) -> None:
        """A connection whose reads were followed has ended: of changes in what it had read the server tells nobody.
        `ours`: we have closed it."""
        if ours:
            self.stamps.forget()
        else:
            self.stamps.lose()
        self.void_all()

    # -- the feed's thread --------------------------------------------------------------------------------------

    def connect(self) -> _Told:
        told = _Told(self)
        self._check(told)
        return told

    def _check(self, told: _Told) -> None:
        self.server.look()
        if not told.current:
            raise ConnectionError("this is not the master any more")

    def turn(self, source: _Told) -> None:
        if self.tracks and not self.told and source.number:
            self.told = source.number
            self.stamps.find()
        self._check(source)
        if self._readers.ended():
            self.reader_lost()

    def lost(self) -> None:
        if self.told:
            self.stamps.lose()
        self.told = 0


class _Told:
    """The connection that is told."""

    def __init__(self, news: RedisNews) -> None:
        self._news = news
        self.current = True
        self._expected: deque[Callable[[Any], object]] = deque()  # what the next answers are for
        self._leaving: list[bytes] = []
        self.connection: Any = news.server.connection(protocol=3)
        self.number = self._number()
        news.server.met(self)
        self._sock = socket_of(self.connection)
        self._pushes = parser(Refusal)

    def fileno(self) -> int:
        number: int = self._sock.fileno()
        return number

    def ask(self, some: Sequence[tuple[bool, Channel]]) -> None:
        self._send([(self._news.verbs[wanted], channel.name) for wanted, channel in some])
        for wanted, channel in some:
            if wanted:
                self._expected.append(partial(self._subscribed, channel))
            else:
                self._leaving.append(channel.name)
                self._expected.append(lambda _: self._leaving.pop(0))  # they are answered in this order

    def ping(self) -> None:
        self._send([(b"PING",)])
        self._expected.append(lambda _: None)

    def _send(self, commands: list[tuple[bytes, ...]]) -> None:
        self._sock.sendall(b"".join(map(packer(), commands)))

    def read(self) -> None:
        """By the parser itself: the library would log pushes, and look twice before each."""
        more = True
        while more:
            data = self._sock.recv(_PIECE)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._news.stamps.heard = time.monotonic()
            self._pushes.feed(data)
            more = hasattr(self._sock, "pending") and self._sock.pending() > 0  # what TLS has read already
        while (push := self._pushes.gets()) is not MORE:
            self._hear(push)

    def _hear(self, push: Any) -> None:
        match push:
            case [b"message" | b"smessage", bytes() as channel, bytes() as message]:
                self._news.ring(channel, message)
            case [b"invalidate", None]:
                self._news.void_all()
            case [b"invalidate", keys]:
                for key in keys:
                    self._news.changed(key)
            case [b"sunsubscribe", channel, *_] if channel not in self._leaving:
                self._news.gone(channel)  # its slot is another shard's from now on: who waits asks there
            case _:
                self._expected.popleft()(push)

    def _subscribed(self, channel: Channel, answer: Any) -> None:
        stands = not isinstance(answer, Refusal)
        if not stands:
            _log.debug("no subscription: %s", answer)
            self._news.mute = not str(answer).startswith(_ELSEWHERE)
        self._news.answered(channel, stands)

    def _number(self) -> int:
        from redis.exceptions import ResponseError

        self.connection.connect()
        self.connection.send_command(b"CLIENT", b"ID")
        try:
            number: Any = self.connection.read_response()
        except ResponseError as refusal:
            self._news.refused(0, refusal)
            if self._news.tracks:
                raise  # it passes
            return 0
        if type(number) is not int:  # nobody could tell the server to redirect to it
            raise ConnectionError(f"that is no reply to CLIENT ID: {number!r}")
        return number

    def close(self) -> None:
        self.connection.disconnect()


_PASSING = ("does not exist", "BUSY", "LOADING")
"""What passes by itself: the connection to redirect to has just gone, for one."""


def refusal_of(told: Any, reader: Any) -> str | None:
    """Of a server that these two connections lead to: why changes in what one reads are not told to the other."""
    from redis.exceptions import ResponseError

    def ask(connection: Any, *command: bytes) -> Any:
        connection.send_command(*command)
        return connection.read_response()

    try:
        ask(reader, *follow(ask(told, b"CLIENT", b"ID")))
        return None
    except ResponseError as refusal:
        return f"{refusal}: {HOW}"
    finally:
        told.disconnect()
        reader.disconnect()


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
