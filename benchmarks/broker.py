"""The capacity of a broker on one core: pairs of acquire and release, leases held at once, and the cost of each.

The broker is a process on one core; its clients are on the others. Clients are connections that speak the broker's
protocol and do nothing else, each with one question under way: so the broker is what is measured. Its CPU is the time
that the kernel gave to all its threads (`/proc/PID/task/*/schedstat`), so other load on the machine doesn't count.

    python benchmarks/broker.py [--quick]
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import zmq
from _measure import machine as described
from _measure import pin, table

from stampede import Lock
from stampede.engines import open_engine
from stampede.engines.zmq import wire
from stampede.engines.zmq.machine import Capacity, ClientSession, Machine
from stampede.engines.zmq.wire import Word
from stampede.runtime.colour import run_blocking

CLIENTS = 50
TURNS = 400
CORES = sorted(os.sched_getaffinity(0))


class Broker:
    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "stampede", "serve", "--bind", f"127.0.0.1:{self.port}", "--grace", "0s"]
        command = ["taskset", "-c", str(CORES[0]), *command, "--longest", "1h"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.url = f"zmq://127.0.0.1:{self.port}"

    def spent(self) -> float:
        """Return the CPU time of the broker, in seconds."""
        spent = 0
        for each in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                spent += int(each.read_text().split()[0])
        return spent / 1e9

    def megabytes(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def running() -> Iterator[Broker]:
    broker = Broker()
    try:
        yield broker
    finally:
        broker.end()


class Clients:
    """Connections to the broker, which have introduced themselves."""

    def __init__(self, broker: Broker, number: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.dealers = [self._context.socket(zmq.DEALER) for _ in range(number)]
        self.poller = zmq.Poller()
        self.numbers = [1] * number
        for each in self.dealers:
            each.linger = 0
            each.connect(f"tcp://127.0.0.1:{broker.port}")
            self.poller.register(each, zmq.POLLIN)
            each.send(wire.VERSION + wire.record(Word.HELLO, 1, wire.pack_hello(0, "bench:1")))
        for each in self.dealers:
            each.recv()

    def ask(self, which: int, kind: int, payload: bytes) -> None:
        self.dealers[which].send(wire.VERSION + wire.record(kind, self.numbers[which], payload))
        self.numbers[which] += 1

    def beat(self) -> None:
        for which, number in enumerate(self.numbers):
            self.dealers[which].send(wire.VERSION + wire.record(Word.BEAT, number))

    def close(self) -> None:
        self._context.destroy(linger=0)


def pairs(broker: Broker, seconds: float) -> tuple[float, float]:
    """Return the number of pairs per second, and the microseconds of the broker's CPU for each."""
    clients = Clients(broker, CLIENTS)
    names = [wire.pack_lock(b"lock %d" % which, b"token%d" % which, 10.0) for which in range(CLIENTS)]
    places = {each: which for which, each in enumerate(clients.dealers)}
    holds = [False] * CLIENTS
    done, began, spent, beat = 0, time.perf_counter(), broker.spent(), 0.0
    for which in range(CLIENTS):
        clients.ask(which, Word.ACQUIRE, names[which])
    while (now := time.perf_counter()) - began < seconds:
        if now - beat > 0.25:
            beat = now
            clients.beat()
        for dealer, _ in clients.poller.poll():
            which = places[dealer]
            kind = next(wire.records(dealer.recv()))[0]
            if kind not in (Word.GRANTED, Word.YES):
                continue  # a beat's
            holds[which] = not holds[which]
            done += not holds[which]
            clients.ask(which, Word.RELEASE if holds[which] else Word.ACQUIRE, names[which])
    took, cpu = time.perf_counter() - began, broker.spent() - spent
    clients.close()
    return done / took, cpu / done * 1e6


def hold(clients: Clients, first: int, number: int) -> None:
    """Take leases of `number` names on the first connection, 250 in a message."""
    dealer = clients.dealers[0]
    for start in range(first, first + number, 250):
        some = range(start, min(start + 250, first + number))
        said = [
            wire.record(
                Word.ACQUIRE, clients.numbers[0] + at, wire.pack_lock(b"held %d" % each, b"%08d" % each, 3600.0)
            )
            for at, each in enumerate(some)
        ]
        clients.numbers[0] += len(some)
        dealer.send(wire.VERSION + b"".join(said))
        granted = 0
        while granted < len(some):
            granted += sum(kind == Word.GRANTED for kind, _, _ in wire.records(dealer.recv()))


def held(broker: Broker, counts: list[int], seconds: float) -> list[list[object]]:
    clients, rows, before = Clients(broker, 1), list[list[object]](), 0
    for count in counts:
        hold(clients, before, count - before)
        before = count
        rate, cpu = pairs(broker, seconds)
        rows.append([f"{count:,}", f"{broker.megabytes():.0f}", f"{rate:,.0f}", f"{cpu:.1f}"])
        clients.beat()
    clients.close()
    return rows


def decided(counts: list[int]) -> list[list[object]]:
    """Return the microseconds of the machine alone: for a pair; for a hand-over, with so many in the queue; and for one
    reader that leaves and comes back, among so many."""
    rows: list[list[object]] = []
    for count in counts:
        machine = Machine(0.0, quiet=0.0, fence=0, limits=Capacity(3600.0, queue=1_000_000))
        session, _ = machine.hello(b"c", "h:1", 0.0)
        for each in range(count):
            machine.acquire(session, b"held %d" % each, b"t", 3600.0, 1, False, 0.0)
            machine.acquire(session, b"readers", b"%d" % each, 3600.0, inf, False, 0.0)
            machine.acquire(session, b"queue", b"%d" % each, 3600.0, 1, True, 0.0)
        samples: list[list[float]] = [[], [], []]
        for start in range(0, 5 * TURNS, TURNS):
            pairs = [(b"l", b"t", 1.0, False)] * TURNS
            queued = [(b"queue", b"%d" % (each % count), 1.0, True) for each in range(start, start + TURNS)]
            readers = [(b"readers", b"7", inf, False)] * TURNS
            for sample, some in zip(samples, (pairs, queued, readers), strict=True):
                sample.append(_microseconds(machine, session, some))
                machine.notices.clear()
        rows.append([f"{count:,}", *(f"{median(sample):.1f}" for sample in samples)])
    return rows


def _microseconds(machine: Machine, session: ClientSession, some: list[tuple[bytes, bytes, float, bool]]) -> float:
    """Return the microseconds of releasing each lock and asking for it again."""
    began = time.perf_counter()
    for name, token, room, waits in some:
        machine.release(session, name, token, 1.0)
        machine.acquire(session, name, token, 10.0, room, waits, 1.0)
    return (time.perf_counter() - began) / len(some) * 1e6


def handed_over(broker: Broker, times: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of round trips, and from a release until a waiter of another engine has the lock."""
    one, other = open_engine(broker.url), open_engine(broker.url)
    trips = sorted(one.ping() * 1000 for _ in range(200))
    first, second = Lock("handed", on=one, wait=10), Lock("handed", on=other, wait=10)
    first.acquire()
    lags, entered = list[float](), list[float]()
    for _ in range(times):
        thread = threading.Thread(target=_take, args=(second, entered))
        thread.start()
        time.sleep(0.02)
        began = time.perf_counter()
        first.release()
        thread.join()
        lags.append((entered.pop() - began) * 1000)
        first, second = second, first  # whoever took it was a thread that has ended: it is given back from here
    first.release()
    for each in (one, other):
        each.close()
    return trips, sorted(lags)


def _take(lock: Lock, entered: list[float]) -> None:
    lock.acquire()
    entered.append(time.perf_counter())


def uncontended(broker: Broker, times: int) -> float:
    """Return the microseconds of a pair through the engine, from one thread."""
    engine = open_engine(broker.url)
    locks = engine.blocking.locks
    assert locks is not None
    began = time.perf_counter()
    for _ in range(times):
        run_blocking(locks.acquire("mine", b"t", 10.0))
        run_blocking(locks.release("mine", b"t"))
    took = time.perf_counter() - began
    engine.close()
    return took / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    pin(CORES[-1])
    seconds, counts = (0.5, [100, 10_000]) if quick else (3.0, [100, 1_000, 10_000, 100_000])
    print(f"\n### A broker, {described()}\n")
    with running() as broker:
        rates = [pairs(broker, seconds / 3) for _ in range(1 if quick else 15)]
        rate, best = median(each[0] for each in rates), max(each[0] for each in rates)
        cpu = median(each[1] for each in rates)
        print(
            f"{CLIENTS} clients, each with a lock of its own: {rate:,.0f} pairs a second, {best:,.0f} in the best one;"
        )
        print(f"{cpu:.0f} µs of the broker's CPU for each, so that its core bears {1e6 / cpu:,.0f}.\n")
        took = uncontended(broker, 200 if quick else 3000)
        print(f"By the engine, one thread: {took:.0f} µs a pair.\n")
        trips, lags = handed_over(broker, 20 if quick else 300)
        trip, p50, p99 = median(trips), median(lags), quantiles(lags, n=100)[98]
        print(f"Hand-over: {p50:.2f} ms (p99 {p99:.2f}), a round trip {trip:.2f} ms.\n")
    with running() as broker:
        table(["leases held", "MB", "pairs/s", "CPU of each, µs"], held(broker, counts, seconds))
    head = ["held, inside and waiting, each", "a pair, µs", "a hand-over, µs", "a reader, µs"]
    table(head, decided(counts))


if __name__ == "__main__":
    main()
