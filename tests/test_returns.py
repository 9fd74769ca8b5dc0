"""Leases whose claim has had no reply are given back: all of them, soon, and in nobody's time."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

import faces
from faces import BRIEF
from herd import PATIENCE, until
from memcached_server import MemcachedServer, shared_memcached
from proxy import Proxy
from servers import RedisServer
from test_redis_faults import Face

from stampede import Cache, EngineError, Lock
from stampede.guarded_locks import _sides
from stampede.returns import LockReturns, Returns, _give_back_all

Before = Callable[[RedisServer], Proxy]
Faces = Callable[..., Face]
Leaving = Callable[..., Callable[[], float]]


LATER = 600.0
"""Seconds for which no test waits."""


pytestmark = pytest.mark.redis  # those of memcached stand behind a server of Redis, too


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stampede.returns.PAUSE", 0.05)
    monkeypatch.setattr("stampede.returns.AGAIN", [0.05] * 40)


def leases(server: RedisServer) -> list[str]:
    return server.cli("KEYS", "*}l").split()


def test_any_number_in_one_batch_and_beside_all_callers(
    before: Before, face: Faces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, a thousand would be a caller's business for twenty seconds; and the rest would stand to their end."""
    monkeypatch.setattr("stampede.returns.AGAIN", ())
    server = RedisServer()
    try:
        proxy = before(server)
        proxy.delay = 0.005
        asked = face(proxy.url, "async", timeout=1.5)
        asked("warm", lambda: 1)
        server.freeze()

        async def all_of_them() -> None:
            await asyncio.gather(*(asked.cache.aget_or_compute(f"k{number}", lambda: 1) for number in range(1500)))

        assert asked._runner is not None
        asked._runner.run(all_of_them())
        assert asked.cache._core.outage is not None
        unknown = asked.cache._core.outage.unknown
        assert len(unknown) == 1500
        server.thaw()
        until(lambda: not unknown, 5.0)
        assert asked("other", lambda: 2, wait=1) == 2
        assert not leases(server)
    finally:
        server.close()


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_also_when_nobody_calls_any_more(server: RedisServer, before: Before, face: Faces, colour: str) -> None:
    """The others would wait for a lease that nobody holds, to its end."""
    proxy = before(server)
    asked = face(proxy.url, colour, timeout=BRIEF)
    asked("warm", lambda: 1)
    proxy.at(b"EVALSHA", answered=0, silent=True)
    assert asked("k", lambda: 1) == 1
    assert leases(server)
    until(lambda: not leases(server))
    until(lambda: not asked.down)  # and that is noticed, too


@pytest.mark.parametrize("colour, wait", [("sync", 0.1), ("async", 0.1), ("sync", None)])
@pytest.mark.parametrize("engine", ["redis", "memcached"])
def test_a_giving_back_that_overtakes_its_claim_is_not_the_last(
    server: RedisServer, before: Before, engine: str, colour: str, wait: float | None
) -> None:
    """What holds a claim back, a slow link or the buffers of a server that stood still, may let it go when its lease
    has been given back: nobody would compute this key, for a whole lease."""
    redis = engine == "redis"
    proxy = before(server if redis else shared_memcached())
    breakers = ("stampede.outage", *(() if redis else ("stampede.engines.memcached.servers",)))
    url = f"{engine}://127.0.0.1:{proxy.port}?{'socket_timeout' if redis else 'timeout'}=0.6"
    asked = faces.Face(url, colour, breakers=breakers, ttl=0, stale=60)
    other = faces.Face(f"{engine}://127.0.0.1:{proxy.target}", ttl=0, stale=60)
    assert asked.cache._core.outage is not None
    unknown = asked.cache._core.outage.unknown
    passes, arrived, given_back = threading.Event(), threading.Event(), threading.Semaphore(0)
    with closing(asked), closing(other):
        with pytest.raises(ZeroDivisionError):
            asked("k", lambda: 1 / 0)  # the server knows all scripts from now on
        asked("late", lambda: 1)
        # What memcached grants with one command ends by itself: it is the lease over a stale value that is held back.
        proxy.at(b"late" if redis else b"ms ", before=lambda: passes.wait(PATIENCE), after=arrived.set)
        proxy.at(b"}l" if redis else b"late t c f v\r\n", after=given_back.release, times=100)
        assert asked("late", lambda: 2, wait=wait) == 2
        if colour == "sync":  # its loop rests, else, and doesn't give it up
            until(proxy.left)
            while given_back.acquire(blocking=False):
                pass
        assert given_back.acquire(timeout=PATIENCE)
        passes.set()
        assert arrived.wait(PATIENCE)
        until(lambda: other("late", lambda: 3) == 3, 5.0)
        until(lambda: not unknown)


@pytest.mark.parametrize("engine", ["redis", "memcached"])
def test_nor_is_that_of_one_who_was_interrupted(server: RedisServer, before: Before, engine: str) -> None:
    """The same where its giving back had an answer: there was nothing yet."""
    redis = engine == "redis"
    proxy = before(server if redis else shared_memcached())
    asked = faces.Face(f"{engine}://127.0.0.1:{proxy.port}", ttl=0, stale=60)
    other = faces.Face(f"{engine}://127.0.0.1:{proxy.target}", ttl=0, stale=60)
    assert asked.cache._core.outage is not None
    unknown = asked.cache._core.outage.unknown
    passes, arrived, given_back = threading.Event(), threading.Event(), threading.Event()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    was = signal.signal(signal.SIGALRM, interrupt)
    with closing(asked), closing(other):
        with pytest.raises(ZeroDivisionError):
            asked("k", lambda: 1 / 0)
        asked("late", lambda: 1)
        proxy.at(b"late" if redis else b"ms ", before=lambda: passes.wait(PATIENCE), after=arrived.set)
        proxy.at(b"}l" if redis else b"late t c f v\r\n", after=given_back.set)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            asked("late", lambda: 2)
        signal.signal(signal.SIGALRM, was)
        assert given_back.wait(PATIENCE)
        passes.set()
        assert arrived.wait(PATIENCE)
        until(lambda: other("late", lambda: 3) == 3, 5.0)
        until(lambda: not unknown)


class One:
    """An engine of one server."""

    def server_of(self, name: str, *, lock: bool = False) -> None:
        return None


class Place(One):
    """Where every lock is as `there` says."""

    releases: Any = None

    def __init__(self) -> None:
        self.locks = self
        self.there: list[bool] = []
        self.asked = 0

    async def release(self, name: str, token: bytes) -> bool:
        self.asked += 1
        return self.there.pop()


def test_what_may_come_late_is_asked_for_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server would hear for ever of each question that it has not answered; or of what it has answered, again."""
    monkeypatch.setattr("stampede.returns.AGAIN", (0.0, 0.0))
    monkeypatch.setattr("stampede.returns.begun", lambda *_: None)  # it is we who give back
    place: Any = Place()
    returns = LockReturns(place)

    def asked(*there: bool, late: bool) -> int:
        place.there, place.asked = list(reversed(there)), 0
        returns.add("l", b"token", late=late)
        while returns:
            returns.try_all()
        return int(place.asked)

    assert asked(False, late=False) == 1
    assert asked(False, False, False, late=True) == 3
    assert asked(False, True, late=True) == 2
    returns.add("l", b"token", late=True)
    returns.forget(b"token")
    assert not returns


@pytest.mark.parametrize("whose", ["cache", "lock"])
def test_a_closed_engine_is_owed_nothing(monkeypatch: pytest.MonkeyPatch, server: RedisServer, whose: str) -> None:
    """The thread that gives back would stay for half a minute, with its cache, as what it waits for may come late."""
    monkeypatch.setattr("stampede.returns.AGAIN", (LATER,))
    monkeypatch.setattr("stampede.returns.PAUSE", LATER)
    cache = Cache(server.url)
    with cache.lock("l"):
        pass
    owed = cache._core.outage.unknown if whose == "cache" else _sides[cache.engine].returns  # type: ignore[union-attr]
    owed.add("k", b"a token!", late=True)
    owed.hurry()
    until(lambda: len(owed._again) == 1)
    thread = owed._thread
    assert thread is not None
    cache.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not owed


def test_one_lock_that_the_server_refuses_keeps_no_others() -> None:
    """All that go to it together would go in vain, again and again."""

    class Refuses(Place):
        async def release(self, name: str, token: bytes) -> bool:
            if name == "odd":
                error = EngineError("not this one")
                error.partial = True
                raise error
            return True

        def release_many(self, held: object) -> list[bool]:
            raise EngineError("not all of these")

    place: Any = Refuses()
    place.releases = place
    returns = LockReturns(place)
    returns._thread = threading.current_thread()  # it is we who give back
    for name in ("odd", "even", "other"):
        returns.add(name, name.encode())
    returns.try_all()
    assert len(returns) == 3
    returns.try_all()
    assert len(returns) == 1


def test_an_engine_that_is_down_is_asked_for_the_last_time_once() -> None:
    """A process would leave it a time-out later for each cache and each kind of thing that it owes."""

    class Down(Place):
        async def release(self, name: str, token: bytes) -> bool:
            self.asked += 1
            raise EngineError("down")

    down: Any = Down()
    well: Any = Place()
    well.there = [True]
    owing = [LockReturns(down), LockReturns(well), LockReturns(down)]
    for returns in owing:
        returns._thread = threading.current_thread()  # it is we who give back
        returns.add("l", b"token")
    _give_back_all(owing)
    assert (down.asked, well.asked) == (1, 1)


class Shaken(One):
    """An engine of which nothing is known, and whose first answer an interruption takes the place of."""

    many = None
    down = False

    def __init__(self) -> None:
        self.given_back: list[str] = []
        self.claims = self

    def may_ask(self) -> bool:
        return not self.down

    def failed(self, error: EngineError) -> None: ...
    def answered(self) -> None: ...

    async def abandon(self, key: str, token: bytes) -> None:
        self.given_back.append(key)
        if len(self.given_back) == 1:
            raise asyncio.CancelledError


def test_an_interruption_ends_no_giving_back() -> None:
    """Nothing would be given back any more by this process."""
    engine: Any = Shaken()
    unknown = Returns(engine, engine)
    unknown.add("k", b"token")
    until(lambda: not unknown)
    assert engine.given_back == ["k", "k"]


def test_an_outage_of_days_is_no_mountain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease for each second of it, which has long ended, would be the first thing that the server hears of us."""
    monkeypatch.setattr("stampede.returns.MOST", 10)
    engine: Any = Shaken()
    engine.down = True
    unknown = Returns(engine, engine)
    for number in range(25):
        unknown.add(f"k{number}", b"token %d" % number)
    until(lambda: len(unknown) == 10)
    engine.given_back.append("")
    engine.down = False
    until(lambda: not unknown)
    assert engine.given_back[1:] == [f"k{number}" for number in range(15, 25)]


def test_also_at_exit(server: RedisServer, before: Before) -> None:
    """A worker that ends after a lost reply would leave its grant standing."""
    proxy = before(server)
    script = f"""
import stampede.returns
from stampede import Cache
stampede.returns.PAUSE = 60
cache = Cache("{proxy.url}?socket_timeout=0.2", lease=60)
cache.get_or_compute("warm", lambda: 1)
print("warm", flush=True)
input()
print(cache.get_or_compute("k", lambda: 1), flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "warm\n"
    proxy.at(b"EVALSHA", answered=0, silent=True)
    process.communicate("\n", timeout=20)
    assert process.returncode == 0
    assert not leases(server)


LEAVES = """
import asyncio, atexit, sys, threading
from stampede import Cache, Lock

def refused(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

if sys.argv[2:]:  # as it is since Python 3.12
    atexit.register(setattr, threading.Thread, "start", refused)

url, count = sys.argv[1], 60
cache = Cache(url, lease=60, early=0)
locks = [Lock(f"l{number}", on=cache, lease=60) for number in range(15)]
assert all(lock.acquire() for lock in locks)
begun = threading.Semaphore(0)

async def compute():
    begun.release()
    await asyncio.sleep(60)

async def all_of_them():
    await asyncio.gather(*(cache.aget_or_compute(f"k{number}", compute) for number in range(count)))

threading.Thread(target=asyncio.run, args=(all_of_them(),), daemon=True).start()
for _ in range(count):
    begun.acquire()
print("held", flush=True)
input()
"""


@pytest.fixture
def leaving(request: pytest.FixtureRequest) -> Leaving:
    """A process that holds 15 locks and 60 leases; how long it takes to leave."""

    def made(url: str, *terms: str) -> Callable[[], float]:
        command = [sys.executable, "-c", LEAVES, url, *terms]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        request.addfinalizer(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"

        def leave() -> float:
            began = time.monotonic()
            process.communicate("\n", timeout=PATIENCE)
            assert process.returncode == 0
            return time.monotonic() - began

        return leave

    return made


@pytest.mark.parametrize("engine", ["redis", "memcached"])
def test_who_leaves_a_server_that_hangs_waits_for_it_once(leaving: Leaving, engine: str) -> None:
    """Each lock, and each key that is being computed, would keep the process for a time-out of its own."""
    redis = engine == "redis"
    with closing(RedisServer() if redis else MemcachedServer()) as server:
        leave = leaving(f"{engine}://127.0.0.1:{server.port}?{'socket_timeout' if redis else 'timeout'}=0.5")
        server.freeze()
        try:
            assert leave() < 3.0
        finally:
            server.thaw()


@pytest.mark.parametrize("terms", [(), ("threadless",)], ids=["threads", "none"])
@pytest.mark.parametrize("engine", ["redis", "memcached"])
def test_nor_for_as_long_as_its_time_out(leaving: Leaving, engine: str, terms: tuple[str, ...]) -> None:
    """A script would be done, or have met its error, and stay for five seconds more, or as long as its URL says."""
    redis = engine == "redis"
    with closing(RedisServer() if redis else MemcachedServer()) as server:
        option = "socket_timeout" if redis else "timeout"
        leave = leaving(f"{engine}://127.0.0.1:{server.port}?{option}={LATER}", *terms)
        server.freeze()
        try:
            assert leave() < 5.0
        finally:
            server.thaw()


@pytest.mark.parametrize("engine", ["redis", "memcached"])
def test_who_leaves_gives_all_back_together(server: RedisServer, before: Before, leaving: Leaving, engine: str) -> None:
    """One by one, a thousand keys that are being computed would keep the process for twenty seconds."""
    redis = engine == "redis"
    proxy = before(server if redis else shared_memcached())
    leave = leaving(f"{engine}://127.0.0.1:{proxy.port}")
    proxy.at(b"EVALSHA" if redis else b" t c f v\r\n", times=10_000)
    leave()
    assert proxy.met <= 10
    with closing(Cache(f"{engine}://127.0.0.1:{proxy.target}", early=0)) as other:
        assert [other.get_or_compute(f"k{number}", lambda: 1, wait=0.5) for number in range(60)] == [1] * 60
        locks = [Lock(f"l{number}", on=other) for number in range(15)]
        assert all(lock.acquire(0) for lock in locks)
        for lock in locks:
            lock.release()


def test_who_is_refused_by_a_lost_lease_of_this_process_is_soon_let_in(
    server: RedisServer, before: Before, face: Faces
) -> None:
    """The next call after the outage would find the key computed by nobody, and wait for a whole lease."""
    proxy = before(server)
    asked = face(proxy.url, lease=60, timeout=BRIEF)
    asked("warm", lambda: 1)
    proxy.at(b"EVALSHA", answered=0, silent=True)
    assert asked("k", lambda: 1, ttl=0.01) == 1
    began = time.monotonic()
    until(lambda: asked("k", lambda: 2, ttl=0.01, wait=5) == 2)
    assert time.monotonic() - began < 3


def test_what_is_granted_behind_its_giving_back_is_given_back_again() -> None:
    """A claim that comes late may overtake nothing, and be owed once more while others of its batch are given back."""

    class Slow:
        def __init__(self) -> None:
            self.granted = {"slow"}

        async def release(self, name: str, token: bytes) -> bool:
            had = name in self.granted
            self.granted.discard(name)
            if name == "slow" and had:
                self.granted.add("late")
                returns.add("late", b"late")
            return had

    place: Any = Place()
    place.locks = Slow()
    returns = LockReturns(place)
    returns._thread = threading.current_thread()  # it is this one that gives back
    returns.add("late", b"late")
    returns.add("slow", b"slow")
    returns.try_all()
    returns.try_all()
    assert not place.locks.granted
    assert not returns
