"""Brokers for the tests: in threads of this process, or as processes of `stampede serve`."""

from __future__ import annotations

import atexit
import socket
import sys
import threading
from typing import Any

import pytest
from server_process import ServerProcess, free_port

pytest.importorskip("zmq")

from stampede.engines.kit.url import Address
from stampede.engines.zmq import ZmqEngine
from stampede.engines.zmq.machine import Capacity
from stampede.engines.zmq.server import Broker

__all__ = ["Address", "BrokerProcess", "BrokerThread", "Capacity", "ZmqEngine"]

HOUR = Capacity(longest=3600.0)


class BrokerThread:
    """A new broker, on its own port."""

    def __init__(self, *, quiet: float = 0.0, limits: Capacity = HOUR, port: int | None = None, **options: Any) -> None:
        self.port = port or free_port()
        self.place = Address("127.0.0.1", self.port)
        self.url = f"zmq://{self.place}"
        self.broker = Broker([str(self.place)], quiet=quiet, limits=limits, **options)
        self._thread = threading.Thread(target=self.broker.run, daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        self.broker.stop()
        self._thread.join(10)
        atexit.unregister(self.stop)


class BrokerProcess(ServerProcess):
    """A process of `stampede serve` that can be killed, frozen, and started again on its port."""

    kind = "zmq"

    def __init__(self, *options: str) -> None:
        self._options = options
        super().__init__()

    @property
    def url(self) -> str:
        return f"zmq://127.0.0.1:{self.port}"

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-m", "stampede", "serve", "--bind", f"127.0.0.1:{port}", *self._options]

    def _answers(self, port: int) -> bool:
        with socket.create_connection(("127.0.0.1", port), 1.0) as probe:
            probe.settimeout(1.0)
            return probe.recv(1) == b"\xff"  # the greeting of ZMTP
