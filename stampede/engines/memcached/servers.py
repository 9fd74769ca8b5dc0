"""The servers of a URL, and which of them has a key: pymemcache's clients and its ring."""

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
"""How often a change is tried again because another client was faster."""

OLDEST = (1, 6, 13)

_DEFAULTS: dict[str, Any] = {"connect_timeout": 0.5, "timeout": 1.0, "no_delay": True}
"""Short, since calls go on without an engine that hangs."""


class MemcachedNode:
    """One server, as the ways to connect to it."""

    max_connections = 50  # of the blocking colour
    timeout = 20.0  # seconds for which a thread waits for one of them

    def __init__(self, address: tuple[str, int] | str, options: Mapping[str, Any]) -> None:
        self.address = address
        self.name = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else address
        self.options = _DEFAULTS | dict(options)
        self.patience: float | None = self.options["timeout"]  # seconds that a reply may take
        self.others: list[MemcachedNode] = []  # of its ring
        self.breaker = Breaker()
        self.hang_detector = HangDetector()
        self.longest = 0  # bytes of an item that it takes; 0: not asked yet
        self.closed = False

    def admit(self) -> None:
        """EngineError if it was down a moment ago. A server alone is asked always: its cache knows when to."""
        if self.others and not self.breaker.allow(time.monotonic()):
            raise trouble(self, ConnectionError("it was down a moment ago"))

    def client(self) -> Client:
        """A connection of pymemcache, not yet connected."""
        from pymemcache.client.base import Client

        return Client(self.address, **self.options)


class Servers:
    """All of them. A key has its server by its name alone, and none other while that is down: see the docs."""

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
        """EngineClosed, once it is."""
        if self.closed:
            raise EngineClosed(f"memcached://{','.join(self._by_name)}")

    def of(self, name: bytes) -> MemcachedNode:
        return self._only or self._by_name[self._ring.get_node(name)]

    def groups(self, names: Sequence[bytes]) -> dict[MemcachedNode, list[int]]:
        """The positions of names, by server."""
        groups: defaultdict[MemcachedNode, list[int]] = defaultdict(list)
        for at, name in enumerate(names):
            groups[self.of(name)].append(at)
        return groups


def _score(text: str, seed: int) -> int:
    """pymemcache's own, in Python, takes longer than the question to the server."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") + seed


class MemcachedLine(Protocol):
    """How one colour asks."""

    servers: Servers

    async def ask(
        self, server: MemcachedNode, *commands: bytes, since: float | None = None
    ) -> tuple[list[MetaReply], float]:
        """The replies, in order, of what goes out together, and a moment before it was sent. EngineError if there are
        none, or a refusal. It may be sent again, over a new connection, where the old one turns out to be closed.

        `since`: a CAS number is in it, which was asked for at that moment. Numbers begin anew with a server. So it is
        sent once, over a connection that has stood since then, and so leads to the server that gave the number. If
        there is none, all replies are OTHER, as if the number were another one.
        """


def checked(server: MemcachedNode, version: bytes) -> None:
    """EngineError from a server that has no meta protocol."""
    found = tuple(int(part) for part in re.findall(rb"\d+", version)[:3])
    if found < OLDEST:
        told, needed = version.decode("ascii", "replace"), ".".join(map(str, OLDEST))
        raise EngineError(f"{server.name} is memcached {told}: stampede needs {needed} or newer (its meta protocol)")


def trouble(server: MemcachedNode, error: BaseException) -> EngineError:
    """What went wrong, as ours."""
    if server.closed:  # then the connection was closed under our hands, which may raise anything
        return EngineClosed(f"memcached://{server.name}")
    if isinstance(error, EngineError):
        return error
    failure = EngineError(f"{server.name}: {type(error).__name__}: {error}")
    failure.partial = any(not other.breaker.open for other in server.others)
    return failure


class NoRoom(EngineError):
    """The server answers, but takes no more: what it has can be asked for."""

    partial = refused = True


def accepted(server: MemcachedNode, replies: list[MetaReply]) -> list[MetaReply]:
    """The same, or an error in the server's own words if one of them is a refusal: "large" is an item above its limit,
    "out of memory" one for which it finds no room."""
    for reply in replies:
        if reply.text:
            told = f"{server.name}: {reply.text.decode('utf-8', 'replace')}"
            raise NoRoom(told) if b"large" in reply.text or b"out of memory" in reply.text else EngineError(told)
    return replies
