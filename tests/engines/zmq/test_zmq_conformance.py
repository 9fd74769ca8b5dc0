"""Brokers pass the suite of all engines of locks. The peer is another client of the same broker."""

from __future__ import annotations

from broker_server import BrokerThread, ZmqEngine

from stampede.model.ports import Engine
from stampede.testing.conformance import LocksSuite


class TestZmq(LocksSuite):
    short = 0.1

    def make_engine(self) -> Engine:
        self.broker = BrokerThread()
        return ZmqEngine(self.broker.place, timeout=20)

    def make_peer(self, engine: Engine) -> Engine:
        return ZmqEngine(self.broker.place, timeout=20)

    def drop_engine(self, engine: Engine) -> None:
        engine.close()
        if engine is self.engine:
            self.broker.stop()


class TestZmqAsync(TestZmq):
    suspending = True
