"""Other brokers, which are told of every start that this one has granted: each counts those of all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from stampede.engines.zmq import wire
from stampede.engines.zmq.curve import client_keys, client_socket
from stampede.engines.zmq.wire import Word
from stampede.model.ports import Rate

__all__ = ["Peers"]


class Peers:
    """A connection to each. One that is away misses what is granted meanwhile."""

    def __init__(self, context: zmq.Context[Any], addresses: Sequence[str], keys: Path | None) -> None:
        known = None if keys is None or not addresses else client_keys(keys)
        self.sockets: list[zmq.Socket[Any]] = []
        self._granted: list[bytes] = []
        for address in addresses:
            self.sockets.append(client_socket(context, os.urandom(16), known))
            self.sockets[-1].connect(f"tcp://{address}")

    def granted(self, name: bytes, rate: Rate, cost: int, delay: float) -> None:
        """A start is made in so many seconds; or, of cost 0, none is before."""
        if self.sockets:
            self._granted.append(wire.record(Word.NOTE, 0, wire.counting(name, rate.most, rate.per, cost, delay, 0)))

    def tell(self) -> None:
        """All that has been granted since. Who we are goes before it, as each may be a new one by now."""
        if not self._granted:
            return
        greeting = wire.record(Word.HELLO, 0, wire.hello(0, "broker"))
        messages = list(wire.messages([greeting, *self._granted]))
        self._granted = []
        for each in self.sockets:
            with suppress(zmq.Again):  # it is away, or doesn't read
                for message in messages:
                    each.send(message, zmq.NOBLOCK)

    def hear(self) -> None:
        """That they have heard."""
        for each in self.sockets:
            with suppress(zmq.Again):
                while True:
                    each.recv(zmq.NOBLOCK)
