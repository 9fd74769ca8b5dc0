"""Locks keep `wait`, also where their server hangs; and nothing of those that came too late is left on it."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from herd import PATIENCE, Herd, until
from memcached_server import shared_memcached
from proxy import Proxy
from servers import shared_redis

from stampede import Cache, EngineError, Lock, LockTimeout, guarded_locks, stalls, try_lock
from stampede.colour import run_blocking
from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired
from stampede.engines.redis.verbs import LOOK
from stampede.guarded_locks import AGAIN, FADES, LEAST, MOST, Habit
from stampede.workers import Workers

Before = Callable[[Any], Proxy]

both = pytest.mark.parametrize("colour", ["sync", "async"])
engines = pytest.mark.parametrize("engine", ["redis", "memcached", "paired"])
WAIT, SOON, HUNG, LEASE = 0.2, 1.5, 3.0, 60.0
"""Seconds: a caller's patience, what is little beside it on a busy machine, how long a server that hangs may keep who
asks it (for each of two questions), and a long lease."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stampede.returns.PAUSE", 0.05)
    monkeypatch.setattr("stampede.returns.AGAIN", [0.05] * 40)


class World:
    """A server before which everything can stop, and locks on it of one colour."""

    def __init__(self, engine: str, colour: str, proxy: Proxy, hung: float) -> None:
        scheme, option = ("memcached", "timeout") if engine == "memcached" else ("redis", "socket_timeout")
        self.proxy = proxy
        self.cache = Cache(f"{scheme}://127.0.0.1:{proxy.port}?{option}={hung}")
        self.direct = Cache(f"{scheme}://127.0.0.1:{proxy.target}")
        self.on: Any = self.cache if engine != "paired" else Paired(MemoryEngine(sealed=True), self.cache.engine)
        self.runner = asyncio.Runner() if colour == "async" else None

    def lock(self, name: str = "l", make: Any = Lock, **options: Any) -> Any:
        return make(name, on=self.on, lease=LEASE, **options)

    def acquire(self, lock: Lock, *wait: float) -> bool:
        return bool(lock.acquire(*wait) if self.runner is None else self.runner.run(lock.aacquire(*wait)))

    def release(self, lock: Lock) -> None:
        if self.runner is None:
            lock.release()
        else:
            self.runner.run(lock.arelease())

    def rest(self, seconds: float) -> None:
        if self.runner is None:
            time.sleep(seconds)
        else:
            self.runner.run(asyncio.sleep(seconds))

    def warm(self) -> None:
        """How long it takes is known from now on."""
        lock = self.lock("warm")
        assert self.acquire(lock)
        self.release(lock)

    def answers(self) -> bool:
        lock = self.lock("warm", wait=1.0)
        with suppress(EngineError):
            assert self.acquire(lock)
            self.release(lock)
            return True
        return False

    def is_free(self, name: str = "l") -> bool:
        """By another way, for everybody: nobody has it, and for nobody it is kept."""
        with try_lock(name, on=self.direct) as lock:
            return bool(lock)

    def close(self) -> None:
        self.proxy.heal()
        if self.runner is not None:
            self.runner.close()
        self.cache.close()
        self.direct.close()


Worlds = Callable[..., World]


@pytest.fixture
def world(request: pytest.FixtureRequest, before: Before) -> Worlds:
    def made(engine: str, colour: str, hung: float = HUNG) -> World:
        if engine == "memcached":
            shared_memcached().empty()
        else:
            shared_redis().cli("FLUSHALL")
        server = shared_memcached() if engine == "memcached" else shared_redis()
        world = World(engine, colour, before(server), hung)
        request.addfinalizer(world.close)
        return world

    return made


def took(act: Callable[[], object], why: str = ".") -> float:
    """Seconds until it raised."""
    began = time.monotonic()
    with pytest.raises(EngineError, match=why):
        act()
    return time.monotonic() - began


@both
@engines
def test_nobody_waits_longer_for_a_lock_whose_server_hangs(world: Worlds, engine: str, colour: str) -> None:
    """A lock that is waited for 0.2 seconds, or never, would take two. And nobody would have it, for a whole lease."""
    its = world(engine, colour)
    its.warm()
    its.proxy.hold()
    lock, tried = its.lock(wait=WAIT), its.lock("t", try_lock)
    assert took(lambda: its.acquire(lock), "no answer") < WAIT + SOON
    assert took(lambda: its.acquire(tried), "no answer") < SOON
    assert took(lambda: its.acquire(its.lock("u"), 0), "no answer") < SOON
    assert not lock.held
    its.proxy.let_go()
    until(its.answers, bound=5)  # to one, and so to all: what was asked before may be on its way still
    until(lambda: its.is_free("l") and its.is_free("t") and its.is_free("u"), bound=5)
    assert its.acquire(lock)
    its.release(lock)


@engines
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of coroutines that get no turn
def test_a_loop_that_ends_while_its_locks_are_asked_for(world: Worlds, engine: str) -> None:
    """What is withdrawn while all tasks are cancelled goes on beside its caller, in a loop that gets no turn."""
    its = world(engine, "async")
    names = ["l", "t", "u"]

    async def main() -> None:
        assert await its.lock("warm").aacquire()  # on a connection of this loop's
        its.proxy.hold()
        asking = [asyncio.ensure_future(its.lock(name).aacquire(LEASE)) for name in names]
        await asyncio.wait(asking, timeout=0.05)

    asyncio.run(main())
    its.proxy.let_go()
    until(lambda: all(its.is_free(name) for name in names), bound=5)
    gc.collect()


@both
@engines
def test_nor_for_one_that_hangs_while_it_waits(world: Worlds, engine: str, colour: str) -> None:
    """Its looks at whether the lock is free would have no end; and its place in the queue would keep others out."""
    its = world(engine, colour)
    its.warm()
    held = Lock("l", on=its.direct, lease=LEASE)
    assert held.acquire()
    threading.Timer(WAIT / 2, its.proxy.hold).start()
    assert took(lambda: its.acquire(its.lock(wait=WAIT)), "no answer") < WAIT + SOON
    its.proxy.let_go()
    held.release()
    until(its.is_free, bound=5)
    if engine != "memcached":
        until(lambda: not shared_redis().cli("KEYS", "*}Q"), bound=5)


@both
@engines
def test_nor_for_its_release(world: Worlds, engine: str, colour: str) -> None:
    """Who knows that it hangs needn't be patient; nor be kept out of the lock for a lease, because it can't be told."""
    its = world(engine, colour)
    lock = its.lock()
    assert its.acquire(lock)
    its.proxy.hold()
    took(lambda: its.acquire(its.lock("other"), 0))
    assert took(lambda: its.release(lock), "no answer") < SOON
    assert not lock.held
    its.proxy.let_go()
    until(its.is_free, bound=5)


@pytest.fixture
def alarmed() -> Iterator[None]:
    """An alarm interrupts whom it finds, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


@both
@engines
def test_a_release_that_overtakes_its_acquire_is_not_the_last(
    world: Worlds, monkeypatch: pytest.MonkeyPatch, engine: str, colour: str
) -> None:
    """What holds a question back, a slow link or the buffers of a server that stood still, may let it go when it has
    been given back: nobody would have the lock, for a whole lease."""
    its = world(engine, colour, 0.6)
    its.warm()
    passes, arrived, given_back = threading.Event(), threading.Event(), threading.Semaphore(0)
    its.proxy.at(b"late", before=lambda: passes.wait(PATIENCE), after=arrived.set)
    its.proxy.at(b"late", after=given_back.release, times=100)
    with monkeypatch.context() as patch:
        patch.setattr("stampede.guarded_locks.LEAST", 0.1)
        took(lambda: its.acquire(its.lock("late"), 0))
    if colour == "sync":  # its loop rests, else, and doesn't give it up
        until(its.proxy.left)
        while given_back.acquire(blocking=False):
            pass
    assert given_back.acquire(timeout=PATIENCE)
    passes.set()
    assert arrived.wait(PATIENCE)
    until(lambda: its.is_free("late"), bound=5)


@pytest.mark.usefixtures("alarmed")
@engines
def test_nor_is_that_of_one_who_was_interrupted(world: Worlds, engine: str) -> None:
    """The same where its release had an answer: there was nothing yet."""
    its = world(engine, "sync", 0.6)
    its.warm()
    passes, arrived, given_back = threading.Event(), threading.Event(), threading.Event()
    its.proxy.at(b"late", before=lambda: passes.wait(PATIENCE), after=arrived.set)
    its.proxy.at(b"late", after=given_back.set)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        its.lock("late").acquire()
    assert given_back.wait(PATIENCE)
    passes.set()
    assert arrived.wait(PATIENCE)
    until(lambda: its.is_free("late"), bound=5)


@pytest.mark.usefixtures("alarmed")
@both
@engines
def test_nor_does_who_is_interrupted_while_it_asks(world: Worlds, engine: str, colour: str) -> None:
    """The lock that it may have been granted would be given back as if it had all the time; or never."""
    its = world(engine, colour)
    its.warm()
    its.proxy.hold()
    began = time.monotonic()
    if colour == "async":
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(its.lock(wait=LEASE).aacquire(), WAIT / 2))
    else:
        signal.setitimer(signal.ITIMER_REAL, WAIT / 2)
        with pytest.raises(KeyboardInterrupt):
            its.lock(wait=LEASE).acquire()
    assert time.monotonic() - began < WAIT + SOON
    its.proxy.let_go()
    until(its.is_free, bound=5)


@both
@pytest.mark.parametrize("engine", ["redis", "memcached"])
def test_who_has_waited_for_the_engine_does_not_wait_again_to_withdraw(world: Worlds, engine: str, colour: str) -> None:
    """A lock that is waited for without end costs the engine's time-out, and the same again for giving it back."""
    its = world(engine, colour, 0.75)
    its.warm()
    its.proxy.hold()
    assert took(lambda: its.acquire(its.lock())) < 2 * 0.75
    its.proxy.let_go()
    until(its.is_free, bound=5)


@both
@engines
def test_a_server_that_is_slow_is_no_server_that_hangs(world: Worlds, engine: str, colour: str) -> None:
    """Locks would be had by nobody whose server is far away, or takes a while to connect to."""
    its = world(engine, colour)
    its.proxy.delay = 0.12
    for number in range(3):
        with_it = its.lock(f"l{number}", try_lock)
        assert its.acquire(with_it)
        its.release(with_it)


@pytest.mark.alone
@both
@engines
def test_a_slow_server_keeps_nobody_for_more_than_one_question(world: Worlds, engine: str, colour: str) -> None:
    """A wait would have all its time again after each answer: to look, to ask once more, to leave the queue."""
    its = world(engine, colour)
    its.warm()
    held = Lock("l", on=its.direct, lease=LEASE)
    assert held.acquire()
    assert not its.acquire(its.lock(wait=2 * LOOK))  # no script is missing any more
    its.proxy.delay = 0.2 if engine != "memcached" else 0.1
    began = time.monotonic()
    assert not its.acquire(its.lock(), 0)
    question = time.monotonic() - began
    for wait in (0.3, 0.35):
        began = time.monotonic()
        assert not its.acquire(its.lock(wait=wait))
        assert time.monotonic() - began < wait + 1.75 * question
        its.rest(question)  # it leaves the queue, and keeps a connection for that
    its.proxy.delay = 0.0
    held.release()
    until(its.is_free, bound=5)


@both
@pytest.mark.parametrize("engine", ["redis", "memcached"])
def test_whose_time_is_over_looks_no_more(world: Worlds, engine: str, colour: str) -> None:
    """A slow server would be asked once more, by one who asks it for the lock anyhow."""
    its = world(engine, colour)
    held = Lock("looked-for", on=its.direct, lease=LEASE)
    assert held.acquire()

    async def waits(port: Any, timeout: float) -> None:
        busy = await port.acquire("looked-for", b"waits", LEASE)
        its.proxy.at(b"looked-for", sent=0, times=100)  # who asks from here on is cut off
        await port.wait("looked-for", busy, timeout)
        its.proxy.heal()

    def wait(timeout: float) -> None:
        if its.runner is None:
            run_blocking(waits(its.cache.engine.locks, timeout))
        else:
            its.runner.run(waits(its.cache.engine.alocks, timeout))

    wait(1e-6)  # less than anybody waits between two looks, whatever else the machine does
    with pytest.raises(EngineError):
        wait(3 * LOOK)
    its.proxy.heal()
    held.release()


@both
def test_what_is_withdrawn_takes_a_moment_or_none(world: Worlds, colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gives up would wait for as long again, to leave the queue of a server that is slow, or hangs."""
    its, waits, real = world("redis", colour), list[float](), guarded_locks.within

    async def counted(colour: Any, work: Any, seconds: float, late: Any) -> Any:
        waits.append(seconds)
        return await real(colour, work, seconds, late)

    monkeypatch.setattr(guarded_locks, "within", counted)
    its.warm()
    held = Lock("l", on=its.direct, lease=LEASE)
    assert held.acquire()
    assert not its.acquire(its.lock(wait=2 * LOOK))
    assert waits and max(waits) <= stalls.LATE
    its.proxy.hold()
    assert took(lambda: its.acquire(its.lock("t"), 0), "no answer")
    waits.clear()
    assert took(lambda: its.acquire(its.lock("u"), 0), "no answer")
    assert waits == []
    its.proxy.let_go()
    held.release()
    until(its.is_free, bound=5)


@engines
def test_many_share_one_outage(world: Worlds, engine: str) -> None:
    """Each of them would have a connection of its own wait for the server."""
    its = world(engine, "sync")
    its.warm()
    its.proxy.hold()
    took(lambda: its.lock(wait=WAIT).acquire())
    assert max(Herd(*[lambda: took(lambda: its.lock(wait=WAIT).acquire(), "no answer")] * 20).join()) < SOON
    its.proxy.let_go()
    until(its.is_free, bound=5)


def test_a_server_that_hangs_says_nothing_of_the_others_of_its_ring(before: Before) -> None:
    """Locks that the other servers have would be had by nobody."""
    proxy, well = before(shared_memcached()), shared_memcached().port
    with Cache(f"memcached://127.0.0.1:{proxy.port},127.0.0.1:{well}") as cache:
        at = {name: str(cache.engine.server_of(name, lock=True)) for name in map(str, range(40))}
        hung, others = ([name for name in at if (str(proxy.port) in at[name]) is its] for its in (True, False))
        assert hung
        assert others
        for name in others:
            with try_lock(name, on=cache) as lock:
                assert lock
        proxy.hold()
        herd = Herd(lambda: [took(lambda name=name: try_lock(name, on=cache).acquire()) for name in hung[:4]])
        while herd.waiting:
            for name in others:
                with try_lock(name, on=cache) as lock:
                    assert lock
        assert len(herd.join()[0]) == len(hung[:4])
        proxy.let_go()


@both
def test_who_waits_for_long_takes_no_thread_for_it(world: Worlds, colour: str) -> None:
    """Each would take one of a bounded number, for as long as it waits."""
    its = world("redis", colour)
    held = Lock("l", on=its.direct, lease=LEASE)
    assert held.acquire()
    asking: list[int] = []

    def count() -> None:
        names = [thread.name for thread in threading.enumerate()]
        asking.append(names.count("stampede-ask") + names.count("stampede-wait"))

    count()
    letting_go = threading.Timer(WAIT, lambda: (count(), held.release()))
    letting_go.start()
    lock = its.lock(wait=LEASE)
    assert its.acquire(lock)
    letting_go.join()
    assert asking[0] == asking[1]
    its.release(lock)


@both
@engines
def test_who_waits_in_vain_is_told_so_and_not_that_it_hangs(world: Worlds, engine: str, colour: str) -> None:
    """Somebody else has the lock, and the server is well."""
    its = world(engine, colour)
    its.warm()
    held = Lock("l", on=its.direct, lease=LEASE)
    assert held.acquire()
    assert its.acquire(its.lock(wait=WAIT)) is False
    with pytest.raises(LockTimeout):
        its.lock(wait=0).__enter__()
    held.release()
    assert its.is_free()


def test_who_finds_no_place_to_wait_in_has_its_lock_all_the_same(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as may do wait already: it would be told that the server hangs, or wait where nothing bounds it."""
    monkeypatch.setattr("stampede.workers._waiters", Workers(0, "stampede-wait"))
    its = world("redis", "sync")
    held, lock = Lock("l", on=its.direct, lease=LEASE), its.lock(wait=HUNG)
    assert held.acquire()
    assert not lock.acquire(WAIT)
    letting_go = threading.Timer(WAIT, held.release)
    letting_go.start()
    assert lock.acquire()
    letting_go.join()
    lock.release()


def test_how_long_an_engine_has_is_what_it_has_needed() -> None:
    """A server that is far away would be said to hang, and one that hangs be waited for."""
    habit = Habit()
    assert habit.grace(0.0) == MOST  # nobody knows
    habit.answered(0.001, 0.0)
    assert habit.grace(0.0) == LEAST
    habit.answered(0.4, 1.0)
    habit.answered(0.001, 2.0)
    assert 0.7 < habit.grace(2.0) < 0.8
    habit.answered(2 * MOST, 2.0)  # it stood still, for once
    assert 0.7 < habit.grace(2.0) < 0.8
    assert habit.grace(2.0 + 4 * FADES) == LEAST
    habit.failed(AGAIN / 2)  # it refuses: the next question has its answer as soon
    assert not habit.silent
    habit.failed(LEAST)
    assert habit.silent
    assert habit.grace(2.0 + 4 * FADES) == AGAIN
    habit.answered(0.7, 3.0)
    assert not habit.silent
    assert habit.grace(3.0) == MOST


def test_an_engine_that_has_never_answered_and_hangs_is_known_to() -> None:
    """Each lock would wait a second for it."""
    habit = Habit()
    habit.failed(MOST)
    assert habit.grace(0.0) == AGAIN
    habit.answered(20.0, 0.0)
    assert habit.grace(0.0) == LEAST
