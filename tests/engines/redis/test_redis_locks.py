"""Locks on Redis: the order of waiters, processes that die, and the cost of a waiter."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

pytest.importorskip("redis")

from both_colours import Face
from herd import until
from servers import PATIENCE, RedisServer

from stampede import Cache, WaitTimeout
from stampede.engines.kit.whereabouts import here, parts_of
from stampede.engines.redis import RedisEngine, locks, wire
from stampede.model import lock_queue
from stampede.model.entry import new_id
from stampede.model.ports import Busy, Granted
from stampede.runtime.colour import run_blocking as run

LONG = 60.0

both = pytest.mark.parametrize("colour", ["sync", "async"])


@pytest.fixture
def open_(request: pytest.FixtureRequest) -> Callable[..., RedisEngine]:
    """Open engines that are closed at the end."""

    def opened(*args: Any) -> RedisEngine:
        engine = RedisEngine(*args)
        request.addfinalizer(engine.close)
        return engine

    return opened


Open = Callable[..., RedisEngine]


Faces = Callable[..., Face]


def ears(engine: RedisEngine) -> int:
    """How many waiters listen to a channel that is subscribed."""
    return sum(
        len(channel.listeners) for channel in list(engine._servers.news._channels.values()) if channel.subscribed
    )


def queued(engine: RedisEngine, token: bytes) -> Busy:
    """Ask for the lock and be refused, with a place in the queue."""
    busy = run(engine.blocking.locks.acquire("l", token, LONG, waits=True))
    assert isinstance(busy, Busy)
    return busy


@pytest.mark.usefixtures("unhurried")
def test_a_released_lock_is_kept_for_those_who_wait_in_their_order(server: RedisServer, open_: Open) -> None:
    """A released lock is kept for its waiters, in their order. A caller that comes at that moment is refused."""
    engine = open_(server.url)
    holder, waiters, stranger = new_id(), [new_id() for _ in range(4)], new_id()
    assert isinstance(run(engine.blocking.locks.acquire("l", holder, LONG)), Granted)
    for token in waiters:
        queued(engine, token)
    for token in reversed(waiters):
        queued(engine, token)  # the order of arrival counts, however often the others ask
    for token in waiters:
        assert run(engine.blocking.locks.release("l", holder))
        refused = run(engine.blocking.locks.acquire("l", stranger, LONG))
        assert isinstance(refused, Busy)
        assert refused.token == token
        assert isinstance(run(engine.blocking.locks.acquire("l", token, LONG, waits=True)), Granted)
        holder = token
    assert run(engine.blocking.locks.release("l", holder))
    assert isinstance(run(engine.blocking.locks.acquire("l", stranger, LONG)), Granted)


@pytest.mark.usefixtures("unhurried")
def test_who_has_left_the_queue_is_not_waited_for(server: RedisServer, open_: Open) -> None:
    """A waiter that has left the queue gets no turn. Otherwise the lock would be kept for it, and from all others."""
    engine = open_(server.url)
    holder, gone, named, next_one = (new_id() for _ in range(4))
    assert isinstance(run(engine.blocking.locks.acquire("l", holder, LONG)), Granted)
    for token in (gone, named, next_one):
        queued(engine, token)
    assert not run(engine.blocking.locks.release("l", gone))
    assert run(engine.blocking.locks.release("l", holder))
    assert queued(engine, next_one).token == named
    assert not run(engine.blocking.locks.release("l", named))  # it leaves when its turn has already come
    assert isinstance(run(engine.blocking.locks.acquire("l", next_one, LONG, waits=True)), Granted)


@both
def test_a_lock_that_was_waited_for_in_vain_is_free_at_once(server: RedisServer, face: Faces, colour: str) -> None:
    """If a waiter times out or is cancelled, it leaves the queue, and the lock is free after its release."""
    cache = face(server.url, colour).cache
    first, other = cache.lock("l"), cache.lock("l")
    assert first.acquire()

    async def cancelled() -> None:
        waiter = asyncio.create_task(cache.lock("l").aacquire())
        await asyncio.to_thread(until, lambda: int(server.cli("ZCARD", locks._names("l").queue.decode())) == 1)
        waiter.cancel()
        await asyncio.wait([waiter])

    assert not cache.lock("l").acquire(0.05)
    asyncio.run(cancelled())
    first.release()
    assert other.acquire(0)
    other.release()


@pytest.mark.usefixtures("unaided")
def test_a_waiter_whose_process_died_costs_nothing(server: RedisServer, open_: Open) -> None:
    """A waiter whose process has died gets no turn. Otherwise its place would keep the lock from all others."""
    engine, doomed = open_(server.url), open_(server.url)
    holder, dead, other = new_id(), new_id(), new_id()
    assert isinstance(run(engine.blocking.locks.acquire("l", holder, LONG)), Granted)
    busy = queued(doomed, dead)
    thread = threading.Thread(target=lambda: run(doomed.blocking.locks.wait("l", busy, LONG)), daemon=True)
    thread.start()
    until(lambda: ears(doomed) == 1)
    time.sleep(0.35)  # its last sign of life is recent
    doomed._servers.news._thread, news = None, doomed._servers.news
    news._closed = True  # as if the process died: it gives nothing back, and listens no more
    news.wake()
    until(lambda: server.cli("PUBSUB", "CHANNELS", "*C" + news.home) == "")
    assert run(engine.blocking.locks.release("l", holder))
    assert isinstance(run(engine.blocking.locks.acquire("l", other, LONG)), Granted)


@pytest.mark.usefixtures("unaided")
def test_a_waiter_that_hangs_costs_a_turn_and_keeps_its_place(server: RedisServer, open_: Open) -> None:
    """A frozen waiter delays the others by one turn only, and keeps its place for when it resumes."""
    engine = open_(server.url)
    holder, frozen, *others = (new_id() for _ in range(4))
    assert isinstance(run(engine.blocking.locks.acquire("l", holder, LONG)), Granted)
    for token in (frozen, *others):
        queued(engine, token)
    assert run(engine.blocking.locks.release("l", holder))
    start = time.monotonic()
    while isinstance(reply := run(engine.blocking.locks.acquire("l", others[0], LONG, waits=True)), Busy):
        assert reply.token == frozen
        run(engine.blocking.locks.wait("l", reply, LONG))
    assert time.monotonic() - start < LONG / 4
    assert isinstance(busy := queued(engine, frozen), locks._Queued)
    assert busy.ahead == 0


@pytest.mark.usefixtures("unhurried")
def test_who_has_a_place_waits_for_its_own_turn(
    server: RedisServer, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter with a place in the queue waits for its own turn. It does not ask again at every hand-over."""
    monkeypatch.setattr("stampede.engines.redis.locks.SAFETY", LONG)  # no waiter looks by itself
    engine = open_(server.url)
    holder, first, second = (new_id() for _ in range(3))
    assert isinstance(run(engine.blocking.locks.acquire("l", holder, LONG)), Granted)
    queued(engine, first)
    busy = queued(engine, second)  # refused for the holder, which has gone when the wait begins
    assert run(engine.blocking.locks.release("l", holder))
    assert isinstance(run(engine.blocking.locks.acquire("l", first, LONG, waits=True)), Granted)
    start = time.monotonic()
    run(engine.blocking.locks.wait("l", busy, 0.1))
    assert time.monotonic() - start >= 0.1
    assert run(engine.blocking.locks.release("l", first))
    start = time.monotonic()
    run(open_(server.url).blocking.locks.wait("l", busy, LONG))  # its own turn, of which another process was notified
    assert time.monotonic() - start < LONG / 4
    assert isinstance(run(engine.blocking.locks.acquire("l", second, LONG, waits=True)), Granted)


def test_thousands_of_waiters_are_no_more_trouble_than_a_few(server: RedisServer, open_: Open) -> None:
    """Each waiter asks only a few times, however many there are: it is woken for its own turn only."""
    cache, order, count = Cache(server.url), [], 300

    async def visit(number: int) -> None:
        async with cache.lock("l", wait=PATIENCE):
            order.append(number)

    async def main() -> None:
        async with cache.lock("l"):
            visits = [asyncio.create_task(visit(number)) for number in range(count)]
            await asyncio.to_thread(until, lambda: int(server.cli("ZCARD", locks._names("l").queue.decode())) == count)
        await asyncio.gather(*visits)

    channels = locks._names("l").channel.decode() + "*"
    with cache.lock("l") as first:  # the server knows the scripts, and this process listens
        assert first.held
        until(lambda: not cache.lock("l").acquire(0.1) and server.cli("PUBSUB", "CHANNELS", channels))
    before = calls(server)
    with cache:
        asyncio.run(main())
    assert order == list(range(count))
    assert calls(server) - before < 5 * count  # each asks, looks, asks and releases


def calls(server: RedisServer) -> int:
    """How many scripts the server has run so far."""
    stats = re.findall(r"cmdstat_eval(?:sha)?:calls=(\d+)", server.cli("INFO", "commandstats"))
    return sum(map(int, stats))


@pytest.mark.parametrize("places", [1, inf, 3])
def test_who_holds_it_is_told(server: RedisServer, open_: Open, places: float) -> None:
    """The engine tells the host, process and fence of a lock's holder, and the start of its hold, also if renewed."""
    ours = open_(server.url).blocking.locks
    token, began = new_id(), time.time()
    granted = run(ours.acquire("l", token, 20.0, room=places))
    assert isinstance(granted, Granted)
    run(open_(server.url).blocking.locks.acquire("l", new_id(), 20.0, waits=True))
    for _ in range(2):
        (held,) = run(open_(server.url).blocking.locks.held())
        assert (held.host, held.pid) == parts_of(here())
        assert (held.fence, held.waiting) == (granted.fence, 1)
        assert held.since is not None and began - 1 < held.since < time.time() + 1
        assert held.seconds is not None and 0 <= held.seconds < PATIENCE
        assert run(ours.renew("l", token, 20.0))


def test_nothing_is_left_of_a_lock(server: RedisServer, open_: Open) -> None:
    """Every key of a lock has an end. Otherwise a lock for each user would fill the server."""
    engine = open_(server.url)
    holder, waiter = new_id(), new_id()
    assert isinstance(run(engine.blocking.locks.acquire("l", holder, LONG)), Granted)
    queued(engine, waiter)
    assert run(engine.blocking.locks.renew("l", holder, LONG))
    its = [key for key in server.cli("KEYS", "{*").split("\n") if key.startswith("{" + locks.tag_of("l").decode())]
    assert len(its) == 3
    for key in its:
        assert 0 < int(server.cli("PTTL", key)) <= 1000 * (LONG + 10 + locks.QUEUE)
    run(engine.blocking.locks.release("l", waiter))
    assert run(engine.blocking.locks.release("l", holder))
    for key in server.cli("KEYS", "{" + locks.tag_of("l").decode() + "*").split():
        assert 0 < int(server.cli("PTTL", key)) <= 10_000


@both
def test_a_key_without_an_end_makes_nobody_spin(server: RedisServer, face: Faces, colour: str) -> None:
    """A lease without an end, which a foreign client has made, does not make waiters ask without a pause."""
    asked = face(server.url, colour)
    asked.cache.get("k")  # from now on the cache knows its prefix
    server.cli("SET", wire.names(asked.cache._root.prefix + "k").lease.decode(), "somebody")
    before = calls(server)
    with pytest.raises(WaitTimeout):
        asked("k", lambda: 1, wait=0.3)
    assert calls(server) - before < 40


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_machine_of_rooms(server: RedisServer, open_: Open, seed: int) -> None:
    """The scripts decide in the same way as `lock_queue` does in Python."""
    engine, dice, model, now = open_(server.url), random.Random(seed), lock_queue.EMPTY, 1000.0
    tokens, rooms = [new_id() for _ in range(6)], [1, 1, 2, 3, inf, inf]
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
    assert fences == sorted(set(fences)) and len(fences) > 10


def test_one_who_was_called_and_died_costs_a_turn(
    server: RedisServer, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter that dies when it is called delays the readers behind it by one turn only."""
    monkeypatch.setattr(locks, "SAFETY", 0.1)
    engine, tokens = open_(server.url), [new_id() for _ in range(4)]
    inside, writer, dead, reader = tokens
    assert isinstance(run(engine.blocking.locks.acquire("l", inside, LONG, room=inf)), Granted)
    for token, its in ((writer, 1), (dead, inf), (reader, inf)):
        refused = run(engine.blocking.locks.acquire("l", token, LONG, waits=True, room=its))
        assert isinstance(refused, Busy)
    assert run(engine.blocking.locks.release("l", writer)) is False  # the writer leaves, and the next one is called
    start = time.monotonic()
    while isinstance(refused, Busy) and time.monotonic() < start + PATIENCE:
        run(engine.blocking.locks.wait("l", refused, PATIENCE))
        refused = run(engine.blocking.locks.acquire("l", reader, LONG, waits=True, room=inf))
    assert isinstance(refused, Granted)


def test_a_dead_writer_keeps_nobody_out(server: RedisServer, open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead writer in the queue does not make later readers wait for the earlier ones."""
    engine, doomed = open_(server.url), open_(server.url)
    inside, dead, reader = (new_id() for _ in range(3))
    assert isinstance(run(engine.blocking.locks.acquire("l", inside, LONG, room=inf)), Granted)
    busy = queued(doomed, dead)
    with monkeypatch.context() as patch:
        patch.setattr(locks, "LOOK", LONG)
        patch.setattr(locks, "SAFETY", LONG)
        threading.Thread(target=lambda: run(doomed.blocking.locks.wait("l", busy, LONG)), daemon=True).start()
        until(lambda: ears(doomed) == 1)
    doomed._servers.news._thread, news = None, doomed._servers.news
    news._closed = True  # as if the process died
    news.wake()
    start = time.monotonic()
    refused = run(engine.blocking.locks.acquire("l", reader, LONG, waits=True, room=inf))
    while isinstance(refused, Busy) and time.monotonic() < start + PATIENCE:
        run(engine.blocking.locks.wait("l", refused, PATIENCE))
        refused = run(engine.blocking.locks.acquire("l", reader, LONG, waits=True, room=inf))
    assert isinstance(refused, Granted)


def test_foreign_bytes_are_no_lock(server: RedisServer, open_: Open) -> None:
    """Foreign bytes in the place of a lock keep no caller out."""
    for bytes_ in ("", "somebody", "\x81\xa6inside"):
        server.cli("SET", locks._names("l").lock.decode(), bytes_)
        token = new_id()
        assert isinstance(run(open_(server.url).blocking.locks.acquire("l", token, LONG)), Granted)
