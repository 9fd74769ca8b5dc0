"""Locks of the Postgres engine: their rules, holders and waiters that die, and the record."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from math import inf
from threading import Thread

import pytest

pytest.importorskip("psycopg")

from herd import until
from postgres_server import PostgresServer, process, shared_postgres

from stampede.engines.postgres import PostgresEngine
from stampede.locks.lock import Lock
from stampede.model import lock_queue
from stampede.model.entry import new_id
from stampede.model.ports import Busy, Granted
from stampede.runtime.colour import run_blocking as run

LONG = 60.0
SOON = 10.0

Open = Callable[[], PostgresEngine]


@pytest.fixture
def server() -> PostgresServer:
    server = shared_postgres()
    server.prepare()
    return server


@pytest.fixture
def open_(server: PostgresServer, request: pytest.FixtureRequest) -> Open:
    def opened() -> PostgresEngine:
        engine = PostgresEngine(server.postgres_url)
        request.addfinalizer(engine.close)
        return engine

    return opened


@pytest.mark.parametrize("rooms", [[1, 1, 2, 3, inf, inf], [1] * 6], ids=["many", "exclusive"])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_machine_of_rooms(server: PostgresServer, open_: Open, seed: int, rooms: list[float]) -> None:
    """The functions in the database decide in the same way as `lock_queue` does in Python."""
    engine, dice, model, now = open_(), random.Random(seed), lock_queue.EMPTY, 1000.0
    tokens = [new_id() for _ in range(6)]
    waiting: list[tuple[bytes, float]] = []
    fences: list[int] = []

    def asks(token: bytes, its: float, waits: bool) -> bool:
        nonlocal model
        again = any(each.token == token for each in model.inside)
        model, expected, _ = lock_queue.acquire(model, token, LONG, its, now, waits=waits)
        answer = run(engine.blocking.locks.acquire("l", token, LONG, waits=waits, room=its))
        assert isinstance(answer, Granted) == isinstance(expected, Granted)
        if isinstance(answer, Granted) and not again:
            fences.append(answer.fence)
        if isinstance(answer, Busy):
            assert answer.token != token and answer.lease > 0
        return isinstance(answer, Granted)

    for _ in range(150):
        number = dice.randrange(len(tokens))
        token, its = tokens[number], rooms[number]
        verb = dice.choice(["enter", "queue", "queue", "renew", "release", "release"])
        if verb == "release" and model.inside and dice.random() < 0.7:
            token = dice.choice(model.inside).token
        if verb in ("enter", "queue") and (token, its) not in waiting:
            if not asks(token, its, verb == "queue") and verb == "queue":
                waiting.append((token, its))
        elif verb == "renew":
            model, stood, _ = lock_queue.renew(model, token, LONG, now)
            assert run(engine.blocking.locks.renew("l", token, LONG)) == stood
        elif verb == "release":
            model, stood, _ = lock_queue.release(model, token, now)
            assert run(engine.blocking.locks.release("l", token)) == stood
            waiting = [each for each in waiting if each[0] != token]
        waiting = [each for each in waiting if not asks(*each, True)]
        assert {token for token, _ in run(engine.blocking.holds.holder("l"))} == {each.token for each in model.inside}
    assert fences == sorted(set(fences)) and len(fences) > 10
    for token in tokens:
        run(engine.blocking.locks.release("l", token))
    for table in ("locks", "waiting"):
        assert server.ask(f"SELECT count(*) FROM stampede.{table}") == [(0,)]


READS = """
lock = cache.lock("l", shared=True, lease=60)
lock.acquire()
print("there", flush=True)
sys.stdin.readline()
"""

WRITES = """
from threading import Thread
Thread(target=cache.lock("l", lease=60).acquire).start()
print("there", flush=True)
sys.stdin.readline()
"""


def test_who_is_killed_inside_or_in_the_queue_keeps_nobody_out(server: PostgresServer, open_: Open) -> None:
    """A killed reader does not block a writer until its lease ends. A killed writer in the queue blocks no reader."""
    reader, late = (Lock("l", open_(), shared=True, wait=SOON) for _ in range(2))
    took: list[float] = []

    def write() -> None:
        with Lock("l", open_(), wait=SOON):
            took.append(time.monotonic())

    with process(server.postgres_url, READS) as doomed:
        waits = Thread(target=write)
        waits.start()
        until(lambda: server.ask("SELECT count(*) FROM stampede.waiting") == [(1,)])
        doomed.kill()
        start = time.monotonic()
        waits.join(SOON)
    assert took, "it waits for the end of the lease"
    print(f"taken over after {(took[0] - start) * 1000:.0f} ms")

    assert reader.acquire()
    with process(server.postgres_url, WRITES) as doomed:
        until(lambda: server.ask("SELECT count(*) FROM stampede.waiting") == [(1,)])
        assert not late.acquire(wait=0)
        doomed.kill()
        assert late.acquire()
    for each in (reader, late):
        each.release()
    problems = server.ask("SELECT problem FROM stampede.history ORDER BY number")
    assert problems == [("disconnected",), ("",), ("",), ("",)]


def test_a_holder_is_one_of_many_from_the_moment_that_a_reader_comes(server: PostgresServer, open_: Open) -> None:
    """A waiter for an exclusive lock keeps its turn when a reader comes, and the holder can still renew and release."""
    engine, other = open_(), open_()
    holder, next_, reader = (new_id() for _ in range(3))
    assert isinstance(run(engine.blocking.locks.acquire("l", holder, LONG)), Granted)
    busy = run(other.blocking.locks.acquire("l", next_, LONG, waits=True))
    assert isinstance(run(engine.blocking.locks.acquire("l", reader, LONG, waits=True, room=inf)), Busy)
    assert run(engine.blocking.locks.renew("l", holder, LONG))
    woken: list[None] = []
    assert isinstance(busy, Busy)
    waits = Thread(target=lambda: woken.append(run(other.blocking.locks.wait("l", busy, LONG))))
    waits.start()
    assert run(engine.blocking.locks.release("l", holder))
    waits.join(SOON)
    assert woken == [None]
    assert isinstance(run(other.blocking.locks.acquire("l", next_, LONG, waits=True)), Granted)
    assert isinstance(run(engine.blocking.locks.acquire("l", reader, LONG, waits=True, room=inf)), Busy)
    assert run(other.blocking.locks.release("l", next_))
    assert isinstance(run(engine.blocking.locks.acquire("l", reader, LONG, waits=True, room=inf)), Granted)
    assert server.ask("SELECT name, waiting FROM stampede.held") == [("l", 0)]
    assert run(engine.blocking.locks.release("l", reader))
