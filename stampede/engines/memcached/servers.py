"""The servers of a URL, and which of them has a key. Clients and ring are pymemcache's."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from ssl import SSLContext
from typing import TYPE_CHECKING, Any, Protocol

from stampede.engines.kit.hang_detector import HangDetector
from stampede.engines.memcached.meta import MetaReply
from stampede.errors import EngineClosed, EngineError, OptionError
from stampede.model.breaker import Breaker

if TYPE_CHECKING:
    from pymemcache.client.base import Client

__all__ = ["TRIES", "MemcachedLine", "MemcachedNode", "NoRoom", "Servers", "accepted", "checked", "trouble"]

TRIES = 100
"""Attempts at a change, at most, while other clients are faster."""

OLDEST = (1, 6, 13)

_DEFAULTS: dict[str, Any] = {"connect_timeout": 0.5, "timeout": 1.0, "no_delay": True}
"""Options of pymemcache's clients. The time-outs are short, since calls go on without an engine that hangs."""


class MemcachedNode:
    """One server: its address, its options, and its state."""

    max_connections = 50  # of the blocking colour
    timeout = 20.0  # seconds for which a thread waits for a free connection

    def __init__(self, address: tuple[str, int] | str, options: Mapping[str, Any]) -> None:
        self.address = address
        self.name = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else address
        self.options = _DEFAULTS | dict(options)
        self.patience: float | None = self.options["timeout"]  # seconds that a reply may take
        self.others: list[MemcachedNode] = []  # the other servers of the ring
        self.breaker = Breaker()
        self.hang_detector = HangDetector()
        self.longest = 0  # bytes of the largest item that it stores; 0: not asked yet
        self.closed = False

    def admit(self) -> None:
        """Raise EngineError if this server of a ring was down a moment ago. A single server is always asked: its cache
        decides when."""
        if self.others and not self.breaker.allow(time.monotonic()):
            raise trouble(self, ConnectionError("it was down a moment ago"))

    def client(self) -> Client:
        """Return a client of pymemcache that is not connected yet."""
        from pymemcache.client.base import Client

        return Client(self.address, **self.options)


class Servers:
    """The servers of a URL. A key's name decides its server, and no other one replaces it while it is down."""

    def __init__(self, addresses: Sequence[str], options: Mapping[str, Any]) -> None:
        from pymemcache.client.base import normalize_server_spec
        from pymemcache.client.rendezvous import RendezvousHash

        if not isinstance(options.get("tls_context"), SSLContext | None):
            raise OptionError(f"tls_context is {options['tls_context']!r}: give an ssl.SSLContext")
        try:
            self.all = [MemcachedNode(normalize_server_spec(address), options) for address in addresses]
            for server in self.all:
                server.client()
        except (TypeError, ValueError) as wrong:
            raise OptionError(f"memcached://{','.join(addresses)}: {wrong}") from wrong
        if not self.all:
            raise OptionError("memcached:// names no server: give memcached://host:port,host:port")
        for server in self.all:
            server.others = [other for other in self.all if other is not server]
        self.closed = False
        self._by_name = {server.name: server for server in self.all}
        self._ring = RendezvousHash(list(self._by_name), hash_function=_score)
        self._only = self.all[0] if len(self._by_name) == 1 else None

    def close(self) -> None:
        self.closed = True
        for server in self.all:
            server.closed = True

    def check(self) -> None:
        """Raise EngineClosed if `close` was called."""
        if self.closed:
            raise EngineClosed(f"memcached://{','.join(self._by_name)}")

    def of(self, name: bytes) -> MemcachedNode:
        return self._only or self._by_name[self._ring.get_node(name)]

    def groups(self, names: Sequence[bytes]) -> dict[MemcachedNode, list[int]]:
        """Return for each server the positions of its names."""
        groups: defaultdict[MemcachedNode, list[int]] = defaultdict(list)
        for at, name in enumerate(names):
            groups[self.of(name)].append(at)
        return groups


def _score(text: str, seed: int) -> int:
    """Return the score of a server for a key. pymemcache's own, in Python, takes longer than asking the server."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") + seed


class MemcachedLine(Protocol):
    """The way in which one colour sends commands."""

    servers: Servers

    async def ask(
        self, server: MemcachedNode, *commands: bytes, since: float | None = None
    ) -> tuple[list[MetaReply], float]:
        """Send the commands together, and return their replies, in order, and a moment before they were sent. Raise
        EngineError if no reply comes, or a refusal. If a connection turns out to be closed, send again over a new one.
        `since`: a command contains a CAS number that was read at that moment. A restarted server counts anew. So the
        commands are sent once, over a connection that has lasted since then, and so leads to the server that gave the
        number. If there is no such connection, all replies are OTHER, as if the item had another number."""


def checked(server: MemcachedNode, version: bytes) -> None:
    """Raise EngineError if this version of the server does not have the whole meta protocol."""
    found = tuple(int(part) for part in re.findall(rb"\d+", version)[:3])
    if found < OLDEST:
        words, needed = version.decode("ascii", "replace"), ".".join(map(str, OLDEST))
        raise EngineError(f"{server.name} is memcached {words}: stampede needs {needed} or newer (its meta protocol)")


def trouble(server: MemcachedNode, error: BaseException) -> EngineError:
    """Return the error of this library for any other. It is `partial` if another server of the ring is up."""
    if server.closed:  # another thread has closed the engine: the connection in use may raise anything
        return EngineClosed(f"memcached://{server.name}")
    if isinstance(error, EngineError):
        return error
    failure = EngineError(f"{server.name}: {type(error).__name__}: {error}")
    failure.partial = any(not other.breaker.open for other in server.others)
    return failure


class NoRoom(EngineError):
    """The server answers, but does not store the value. Reads go on."""

    partial = refused = True


def accepted(server: MemcachedNode, replies: list[MetaReply]) -> list[MetaReply]:
    """Return the replies. If one is a refusal, raise an error with the server's words: NoRoom for an item above its
    limit ("large") or one for which it finds no space ("out of memory"), else EngineError."""
    for reply in replies:
        if reply.text:
            words = f"{server.name}: {reply.text.decode('utf-8', 'replace')}"
            raise NoRoom(words) if b"large" in reply.text or b"out of memory" in reply.text else EngineError(words)
    return replies
