"""Links to other brokers, which share limits with this one: each tells the others of every start that it grants."""

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
    """The connections to all peers. A peer that can't be reached misses what is note meanwhile."""

    def __init__(self, context: zmq.Context[Any], addresses: Sequence[str], keys: Path | None) -> None:
        known = None if keys is None or not addresses else client_keys(keys)
        self.sockets: list[zmq.Socket[Any]] = []
        self._granted: list[bytes] = []
        for address in addresses:
            self.sockets.append(client_socket(context, os.urandom(16), known))
            self.sockets[-1].connect(f"tcp://{address}")

    def note(self, name: bytes, rate: Rate, cost: int, delay: float) -> None:
        """Note a start in `delay` seconds, for the next `send`. A cost of 0 means a penalty: no start before then."""
        if self.sockets:
            self._granted.append(wire.record(Word.NOTE, 0, wire.pack_limit(name, rate.most, rate.per, cost, delay, 0)))

    def send(self) -> None:
        """Send what was note since the last call. A greeting precedes it, because a peer may have been restarted."""
        if not self._granted:
            return
        greeting = wire.record(Word.HELLO, 0, wire.pack_hello(0, "broker"))
        messages = list(wire.messages([greeting, *self._granted]))
        self._granted = []
        for each in self.sockets:
            with suppress(zmq.Again):  # the peer can't be reached, or doesn't read
                for message in messages:
                    each.send(message, zmq.NOBLOCK)

    def drain(self) -> None:
        """Read and discard the answers of all peers."""
        for each in self.sockets:
            with suppress(zmq.Again):
                while True:
                    each.recv(zmq.NOBLOCK)
