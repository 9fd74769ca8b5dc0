"""The ZeroMQ engine: locks on brokers of our own, `stampede serve`, for who wants no other server.

machine.py   what a broker decides of locks, and counts.py of limits;  server.py   how it talks to its clients
wire.py      what both say
link.py      a process' connection to a broker;  locks.py, limits.py   the ports over it;  lists.py   what people see
curve.py     keys;  memory.py   what outlives a broker;  peers.py   other brokers
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from stampede import forks
from stampede.colour import BLOCKING, SUSPENDING, Colour, run_blocking
from stampede.engines.url import Kind, number, options_of, parts_of, safe_url, text
from stampede.engines.zmq.curve import client_keys
from stampede.engines.zmq.limits import ZmqLimits
from stampede.engines.zmq.link import Link, Place
from stampede.engines.zmq.lists import ZmqLists
from stampede.engines.zmq.locks import Links, ZmqLocks
from stampede.engines.zmq.server import PORT
from stampede.engines.zmq.wire import Word
from stampede.errors import OptionError
from stampede.ports import Engine, Side

__all__ = ["ZmqEngine", "check_url", "from_url"]

OPTIONS: dict[str, Kind] = {"timeout": number, "keys": text}


class ZmqEngine(Engine):
    """Locks on one broker, or on several, among which names are spread.

    `timeout`: the seconds for which an answer is waited for. `keys`: the directory with `server.key` and
    `client.key_secret`, for brokers that are not on loopback. A process has one connection to each broker, and one
    thread for it, for all its threads and event loops.
    """

    scheme = "zmq"
    pushes = True
    fair = True
    rooms = True

    def __init__(self, *places: Place, timeout: float = 1.0, keys: str | None = None) -> None:
        if not places:
            raise OptionError(f"ZmqEngine takes the places of brokers: {_EXAMPLE}")
        if timeout <= 0:
            raise OptionError(f"timeout is {timeout!r}: give more than 0 seconds")
        known = None if keys is None else client_keys(Path(keys).expanduser())
        self._links = links = Links([Link(place, known, timeout, alone=len(places) == 1) for place in places])
        self.blocking, self.suspending = _side(links, BLOCKING), _side(links, SUSPENDING)
        self._closing = forks.closing(self, links.close)
        forks.in_child(links.start_again)

    def ping(self) -> float:
        start = time.perf_counter()
        for link in self._links.links:
            run_blocking(link.ask(BLOCKING, Word.PING))
        return time.perf_counter() - start

    def grace(self) -> Mapping[str, float]:
        return run_blocking(ZmqLists(self._links, BLOCKING).grace())

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        return run_blocking(ZmqLists(self._links, BLOCKING).facts())

    def close(self) -> None:
        self._closing()


_EXAMPLE = "give a URL such as 'zmq://localhost', or 'zmq://lock1:7867,lock2:7867'"


def _side(links: Links, colour: Colour) -> Side:
    locks = ZmqLocks(links, colour)
    return Side(locks=locks, limits=ZmqLimits(links, colour), holds=ZmqLists(links, colour), hands=locks)


def _parsed(url: str, **options: Any) -> tuple[list[Place], dict[str, Any]]:
    parts = parts_of(url)
    if "@" in parts.netloc or parts.path.strip("/"):
        raise OptionError(f"{safe_url(url)!r} has a user or a path, of which brokers know nothing: {_EXAMPLE}")
    places = [_place(each.strip(), url) for each in unquote(parts.netloc).split(",") if each.strip()]
    if not places:
        raise OptionError(f"{safe_url(url)!r} names no broker: {_EXAMPLE}")
    if len(set(places)) < len(places):
        raise OptionError(f"{safe_url(url)!r} names a broker twice")
    return places, options_of(url, options, OPTIONS)


def _place(told: str, url: str) -> Place:
    host, colon, port = told.rpartition(":")
    if not colon or told.endswith("]"):
        host, port = told, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise OptionError(f"{safe_url(url)!r}: {told!r} is no host and port: {_EXAMPLE}")
    return Place(host, int(port))


def from_url(url: str, **options: Any) -> ZmqEngine:
    """`zmq://host:port`, or `zmq://host:port,host:port`, with `?keys=DIR` where it isn't loopback."""
    places, found = _parsed(url, **options)
    return ZmqEngine(*places, **found)


def check_url(url: str) -> None:
    _parsed(url)
