"""The news of a Redis server, received by a feed (`engines/kit/feed.py`): messages of channels, and changes of keys.

Waiters subscribe to their key's channel. Local tiers' tickets are ended by the server's invalidation messages (CLIENT
TRACKING, redirected from the reading connections to this one). The connection uses RESP3, because there invalidation
messages need no channel rights. If a server refuses to redirect, there are no tickets."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

from stampede.engines.kit.feed import Channel, Feed
from stampede.engines.kit.replies import MORE
from stampede.engines.redis.clients import RedisConnector
from stampede.engines.redis.inside import packer, parser, socket_of
from stampede.engines.redis.readers import Readers

__all__ = ["ALL", "RedisNews", "follow", "key_of_scope", "refusal_of", "slot_of", "slot_of_scope"]

_log = logging.getLogger("stampede")

SLOTS = 1 << 16
SCOPES = 1 << 8  # the slots of generations, behind those of keys: scopes share them

HOW = "so a local tier serves what it keeps for a second, or for its ttl"
"""What it means that the server refuses to redirect."""

_PIECE = 1 << 16

_ELSEWHERE = ("MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN")  # about the channel's shard, not about the user's rights
_PLAIN, _SHARDED = (b"UNSUBSCRIBE", b"SUBSCRIBE"), (b"SUNSUBSCRIBE", b"SSUBSCRIBE")


class Refusal(Exception):
    """The server's answer to a command that this user may not use."""


class RedisNews(Feed):
    """One server's news. `reporter` is the id of the connection on which changes are reported, 0 while there is none. A
    reader samples the stamp of the key's slot before the question is sent. It keeps a ticket only if the reading
    connection had been asked to redirect its news to `reporter`, which is still the same. Then news that overtake the
    reply have changed the stamp already, and later news will change it."""

    def __init__(self, server: RedisConnector, *, tracks: bool = True, sharded: bool = False) -> None:
        """`tracks` says whether changes are wanted. With `sharded`, channels are those of a cluster's shard."""
        self.server = server
        self.verbs = _SHARDED if sharded else _PLAIN
        self.tracks = tracks
        self.on_refused: Callable[[str], object] = lambda how: None
        super().__init__("redis", SLOTS + SCOPES)

    def _begin(self) -> None:
        super()._begin()
        self.reporter = 0
        self._readers = Readers()
        self.beside = self._readers.wakes

    def track(self) -> None:
        """Have changes reported from now on. The connection may exist already."""
        self.tracks = True
        self.wake()

    def follow(self) -> None:
        """Start the connection if changes are wanted at all. Until they are reported, there are no tickets."""
        if self._thread is None and self.tracks:
            self.start()

    def stray(self) -> None:
        """Note that the server is no longer the right one: what it reports is of no use."""
        self.reporter = 0
        self.void_all()
        self.wake()

    def over(self) -> None:
        self._readers.close()

    def start_again(self) -> None:
        readers = self._readers
        super().start_again()
        readers.close()  # the parent's own stays

    def refused(self, reporter: int, why: Any) -> None:
        """Note that a reading connection cannot redirect its news to `reporter`. Unless the cause passes by itself,
        there are no tickets from then on, until a local tier asks for them again."""
        if self.tracks and reporter == self.reporter and not any(word in str(why) for word in _PASSING):
            self.tracks = False
            self.stray()
            self.on_refused(f"{why}: {HOW}")

    # -- tickets ------------------------------------------------------------------------------------------------

    def changed(self, key: bytes) -> None:
        """Handle a key that was changed by any client, has expired or was evicted."""
        if key == ALL:
            self.void_all()  # all scopes have a new generation
        elif (slot := slot_of(key)) is not None:
            self.stamps.void(slot, 1)

    def watch(self, sock: Any) -> bool:
        """Watch a connection whose reads are followed, so that its end is noticed even if its thread or loop is busy.
        Return False if that is impossible: then it gets no tickets. Everything that it received before its end was
        asked before: those tickets are older than what its end voids."""
        return self._readers.watch(sock)

    def reader_lost(self, *, ours: bool = False) -> None:
        """End all tickets, because a connection whose reads were followed has ended: changes of what it had read are
        not reported any more. `ours` means that this process closed it."""
        if ours:
            self.stamps.forget()
        else:
            self.stamps.lose()
        self.void_all()

    # -- the feed's thread --------------------------------------------------------------------------------------

    def connect(self) -> _Connection:
        connection = _Connection(self)
        try:
            connection.begin()
            self._check(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: _Connection) -> None:
        self.server.look()
        if not connection.current:
            raise ConnectionError("this server is not the master any more")

    def turn(self, source: _Connection) -> None:
        if self.tracks and not self.reporter and source.number:
            self.reporter = source.number
            self.stamps.find()
        self._check(source)
        if self._readers.ended():
            self.reader_lost()

    def lost(self) -> None:
        if self.reporter:
            self.stamps.lose()
        self.reporter = 0


class _Connection:
    """The connection that receives the news."""

    def __init__(self, news: RedisNews) -> None:
        self._news = news
        self.current = True
        self._expected: deque[Callable[[Any], object]] = deque()  # handlers of the next answers
        self._leaving: list[bytes] = []
        self.connection: Any = news.server.connection(protocol=3)
        self.number = 0
        self._pushes = parser(Refusal)

    def begin(self) -> None:
        self.number = self._number()
        self._news.server.met(self)
        self._sock = socket_of(self.connection)

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
                self._expected.append(lambda _: self._leaving.pop(0))  # answers come in this order

    def ping(self) -> None:
        self._send([(b"PING",)])
        self._expected.append(lambda _: None)

    def _send(self, commands: list[tuple[bytes, ...]]) -> None:
        self._sock.sendall(b"".join(map(packer(), commands)))

    def read(self) -> None:
        """Read with hiredis' parser: the library would log pushes, and look twice before each."""
        more = True
        while more:
            data = self._sock.recv(_PIECE)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._news.stamps.heard = time.monotonic()
            self._pushes.feed(data)
            more = hasattr(self._sock, "pending") and self._sock.pending() > 0  # bytes that TLS has read already
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
                self._news.gone(channel)  # its slot moved to another shard: waiters must ask there
            case _:
                self._expected.popleft()(push)

    def _subscribed(self, channel: Channel, answer: Any) -> None:
        subscribed = not isinstance(answer, Refusal)
        if not subscribed:
            _log.debug("no subscription: %s", answer)
            self._news.mute = not str(answer).startswith(_ELSEWHERE)
        self._news.answered(channel, subscribed)

    def _number(self) -> int:
        from redis.exceptions import ResponseError

        self.connection.connect()
        self.connection.send_command(b"CLIENT", b"ID")
        try:
            number: Any = self.connection.read_response()
        except ResponseError as refusal:
            self._news.refused(0, refusal)
            if self._news.tracks:
                raise  # the cause passes by itself
            return 0
        if type(number) is not int:  # the server could not be asked to redirect to it
            raise ConnectionError(f"unexpected reply to CLIENT ID: {number!r}")
        return number

    def close(self) -> None:
        self.connection.disconnect()


_PASSING = ("does not exist", "BUSY", "LOADING")
"""Refusals whose cause passes by itself. For example, the connection to redirect to has just gone."""


def refusal_of(receiver: Any, reader: Any) -> str | None:
    """Return why the server does not report to one connection the changes of what the other reads. None if it does."""
    from redis.exceptions import ResponseError

    def ask(connection: Any, *command: bytes) -> Any:
        connection.send_command(*command)
        return connection.read_response()

    try:
        ask(reader, *follow(ask(receiver, b"CLIENT", b"ID")))
        return None
    except ResponseError as refusal:
        return f"{refusal}: {HOW}"
    finally:
        receiver.disconnect()
        reader.disconnect()


def follow(reporter: int) -> tuple[bytes, ...]:
    """Return the command that redirects changes of what a connection reads to another connection."""
    return (b"CLIENT", b"TRACKING", b"ON", b"REDIRECT", b"%d" % reporter)


def slot_of(key: bytes) -> int | None:
    """Return the slot of an entry's or a generation's key. None for other keys, which have no tickets."""
    if key[25:27] == b"}:":
        try:
            return int(key[1:5], 16)
        except ValueError:
            return None
    return SLOTS + crc32(key) % SCOPES if key.startswith(ALL) else None


ALL = b"{stampede}g"
"""The key of the generation of all scopes."""


def key_of_scope(scope: str) -> bytes:
    """Return the key of a scope's own generation."""
    return ALL + b":" + scope.encode("utf-8", "surrogatepass")


def slot_of_scope(scope: str) -> int:
    return SLOTS + crc32(key_of_scope(scope)) % SCOPES
