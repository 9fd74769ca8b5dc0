"""The ZeroMQ engine: locks and limits on our own broker, `stampede serve`, which needs no other server.

machine.py   what a broker decides about locks; limits.py, about limits
server.py    the broker: how it talks to its clients;  peers.py   how it talks to other brokers
wire.py      the messages between client and broker
client.py    a process' connection to a broker;  locks.py   the engine's ports over it
curve.py     keys, and sockets"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stampede.engines.kit.url import Address, Kind, addresses_of, duration, options_of, parts_of, safe_url, text
from stampede.engines.zmq.client import BrokerLink
from stampede.engines.zmq.curve import client_keys
from stampede.engines.zmq.locks import Links, ZmqLimits, ZmqLocks
from stampede.engines.zmq.server import PORT
from stampede.engines.zmq.wire import Word
from stampede.errors import EngineError, OptionError
from stampede.model.ports import Engine, Side
from stampede.runtime import forks
from stampede.runtime.colour import BLOCKING, SUSPENDING, Colour, run_blocking

__all__ = ["ZmqEngine", "check_url", "from_url"]

OPTIONS: dict[str, Kind] = {"timeout": duration, "keys": text}


class ZmqEngine(Engine):
    """An engine of locks and limits on one broker, or on several brokers, among which the names are distributed.

    `timeout` is the number of seconds to wait for an answer. `keys` is the directory with `server.key` and
    `client.key_secret`; brokers that are not on loopback require it. A process has one connection to each broker, and
    one thread for that connection. All its threads and event loops share it."""

    scheme = "zmq"
    pushes = True
    fair = True
    rooms = True

    def __init__(self, *places: Address, timeout: float = 1.0, keys: str | None = None) -> None:
        known = None if keys is None else client_keys(Path(keys).expanduser())
        self._links = links = Links([BrokerLink(place, known, timeout, alone=len(places) == 1) for place in places])
        self.blocking, self.suspending = _side(links, BLOCKING), _side(links, SUSPENDING)
        self._closing = forks.closing(self, links.close)
        forks.in_child(links.start_again)

    def ping(self) -> float:
        start = time.perf_counter()
        for link in self._links.links:
            run_blocking(link.ask(BLOCKING, Word.PING))
        return time.perf_counter() - start

    def grace(self) -> Mapping[str, float]:
        seconds = {link.name: self._stats(link)["quiet"] for link in self._links.links}
        return {name: left for name, left in seconds.items() if left > 0}

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        for link in self._links.links:
            try:
                found[link.name] = self._stats(link)
            except EngineError as error:
                found[link.name] = {"down": str(error)}
        return found

    def _stats(self, link: BrokerLink) -> Any:
        return json.loads(run_blocking(link.ask(BLOCKING, Word.STATS))[1])

    def close(self) -> None:
        self._closing()


def _side(links: Links, colour: Colour) -> Side:
    locks = ZmqLocks(links, colour)
    return Side(locks=locks, limits=ZmqLimits(links, colour), holds=locks, handover=locks)


def _parsed(url: str, **options: Any) -> tuple[list[Address], dict[str, Any]]:
    parts = parts_of(url)
    if "@" in parts.netloc or parts.path.strip("/"):
        raise OptionError(f"{safe_url(url)!r} has a user or a path: give a URL such as 'zmq://localhost:{PORT}'")
    places = addresses_of(url, PORT)
    if len(set(places)) < len(places):
        raise OptionError(f"{safe_url(url)!r} names a broker twice: name each one once")
    return places, options_of(url, options, OPTIONS)


def from_url(url: str, **options: Any) -> ZmqEngine:
    """Return the engine of `zmq://host:port` or `zmq://host:port,host:port`, with `?keys=DIR` beyond loopback."""
    places, found = _parsed(url, **options)
    return ZmqEngine(*places, **found)


check_url = _parsed
