"""Promise 7 on each server: if the server or the network fails, calls still work, and later use the server again.

There is one test for each fault. Faults that only one engine can meet (a full Redis, a role without rights, a ring of
memcacheds) are tested in that engine's own file. Servers that hang are tested in `test_hung_engines.py`, where the
time-outs themselves are checked.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")
pytest.importorskip("psycopg")

import both_colours
from both_colours import LONG, Number, never
from herd import PATIENCE, Herd, Origin, until, until_async
from memcached_server import MemcachedServer, shared_memcached
from postgres_server import PostgresServer, prepared_postgres
from proxy import Proxy
from servers import RedisServer, shared_redis

from stampede import Cache, EngineError, LockLost, events
from stampede.model.entry import new_id

BRIEF = 1.0
"""Seconds that a reply may take in tests in which a reply never comes."""

WAIT = 15.0
"""Seconds that a caller waits for another one. It is less than a lease, which a caller that is locked out waits for."""

engines = pytest.mark.parametrize("engine", ["redis", "memcached", "postgres"])
both = pytest.mark.parametrize("colour", ["sync", "async"])


def url_of(engine: str, port: int, timeout: float = PATIENCE) -> str:
    return {
        "redis": f"redis://127.0.0.1:{port}/0?socket_timeout={timeout}&socket_connect_timeout={timeout}",
        "memcached": f"memcached://127.0.0.1:{port}?timeout={timeout}&connect_timeout={timeout}",
        "postgres": f"postgres://root@127.0.0.1:{port}/postgres?sslmode=disable&timeout={timeout}",
    }[engine]


class Face(both_colours.Face):
    """One cache that pauses only shortly between two requests to a dead server."""

    def __init__(self, engine: str, port: int, colour: str = "sync", *, timeout: float = PATIENCE, **options: Any):
        breakers = ["stampede.outages.outage"] + ["stampede.engines.memcached.servers"] * (engine == "memcached")
        super().__init__(url_of(engine, port, timeout), colour, breakers=breakers, **options)

    def back(self) -> None:
        """Wait until the cache uses its engine again."""
        until(lambda: self(new_id().hex(), Number()) and not self.down)


Faces = Callable[..., Face]
Before = Callable[[Any], Proxy]


@pytest.fixture(autouse=True)
def _generations_are_asked_for_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generations of memcached are believed for a second, and a restarted server has lost them. What is computed
    during an outage is kept for longer than a test takes."""
    monkeypatch.setattr("stampede.engines.kit.generations.KNOWN", 0.05)
    monkeypatch.setattr("stampede.outages.outage.REFUGE_TTL", LONG)


@pytest.fixture
def server(engine: str) -> Any:
    """The server that all tests share, emptied."""
    if engine == "redis":
        shared_redis().cli("FLUSHALL")
        return shared_redis()
    if engine == "memcached":
        shared_memcached().empty()
        return shared_memcached()
    return prepared_postgres()


_own: dict[str, Callable[[], Any]] = {
    "redis": cache(RedisServer),
    "memcached": cache(MemcachedServer),
    "postgres": cache(PostgresServer),
}


@pytest.fixture
def own(engine: str) -> Iterator[Any]:
    """A server that the test may stop and freeze. It is empty, and works again after the test."""
    mine = _own[engine]()
    mine.prepare() if engine == "postgres" else mine.restart()
    yield mine
    mine.start() if mine._process is None else mine.thaw()


# -- servers that die or hang -----------------------------------------------------------------------------------------


def down(server: Any, proxy: Proxy) -> Iterator[None]:
    """The server is killed, and started again."""
    server.stop()
    yield
    server.start()


def hung(server: Any, proxy: Proxy) -> Iterator[None]:
    """The kernel accepts connections, but the server never replies."""
    server.freeze()
    yield
    server.thaw()


def blackholed(server: Any, proxy: Proxy) -> Iterator[None]:
    """The network loses all packets."""
    proxy.hold()
    yield
    proxy.cut()
    proxy.let_go()


Trouble = Callable[[Any, Proxy], Iterator[None]]


AT_START, IN_USE = "at start", "in use"


@engines
@pytest.mark.parametrize(
    "trouble, when",
    # At the start, a network that loses everything is no different from a server that hangs.
    [(down, AT_START), (hung, AT_START), (down, IN_USE), (hung, IN_USE), (blackholed, IN_USE)],
)
def test_an_engine_in_trouble_is_no_outage(
    own: Any, before: Before, face: Faces, trouble: Trouble, when: str, engine: str, colour: str
) -> None:
    """Promise 7: while the engine is in trouble, each key is computed once and each change raises an error. Later, the
    engine is used again without help."""
    proxy, warm, origin = before(own), Number(), Number(0.02)
    terms = {"local": True, "timeout": PATIENCE if trouble is down else BRIEF}
    asked = face(engine, proxy.port, colour, **terms) if when == IN_USE else None
    if asked is not None:
        assert [asked("warm", warm) for _ in range(3)] == [1, 1, 1]
    course = trouble(own, proxy)
    next(course)
    try:
        if asked is None:
            asked = face(engine, proxy.port, colour, **terms)
        assert asked.herd(8, "k", origin) == [1] * 8
        assert [asked("k", origin) for _ in range(3)] == [1] * 3
        assert origin.calls == 1
        assert asked.count(events.EngineDown) == 1
        changes: list[list[Any]] = [["clear"], ["set", "other", 1], ["expire", "k"], ["invalidate", "k"]]
        for change in changes if trouble is down else changes[-1:]:  # each waits for a time-out
            with pytest.raises(EngineError):
                asked.run(*change)
        assert asked("k", origin) == 2  # in any case, it is removed from this process
        with pytest.raises(EngineError):
            asked.lock("l")
    finally:
        for _ in course:
            pass
    asked.back()
    time.sleep(0.05)  # the server may have lost the generation, too, which may be believed for this long
    asked.invalidate("k")
    assert asked("k", lambda: "stored") == "stored"
    until(lambda: asked.lock("l"))
    assert face(engine, own.port)("k", never) == "stored"


@engines
def test_a_herd_goes_on_when_its_engine_dies(own: Any, face: Faces, engine: str, colour: str) -> None:
    """Promises 3 and 7: if the engine dies, waiters of another process's computation compute the value, once."""
    origin, mine = Origin(), Number(0.05)
    holder, waiter = face(engine, own.port), face(engine, own.port, colour)
    holding = Herd(lambda: holder("k", origin))
    origin.has_begun()
    waiting = Herd(lambda: waiter.herd(4, "k", mine))
    time.sleep(0.1)  # they should wait by now; if they do not, they meet the dead server first
    own.stop()
    assert waiting.join() == [[1] * 4]
    assert mine.calls == 1
    origin.let_on()
    assert holding.join() == [1]
    own.start()
    waiter.back()
    assert waiter("k", lambda: "new") == "new"


@engines
def test_a_slow_engine_is_no_dead_one(server: Any, before: Before, face: Faces, engine: str, colour: str) -> None:
    """A slow engine is not treated as down. Otherwise, each process would compute for itself."""
    proxy, origin = before(server), Number(0.05)
    proxy.delay = 0.02
    faces = [face(engine, proxy.port, colour) for _ in range(2)]
    got = Herd(*[lambda each=each: each.herd(4, "k", origin) for each in faces]).join()
    assert got == [[1] * 4] * 2
    assert origin.calls == 1
    assert not any(each.count(events.EngineDown) for each in faces)


# -- connections that are cut ---------------------------------------------------------------------------------------


class Broken:
    """A cache behind a proxy, and one that connects to the server directly."""

    def __init__(self, engine: str, server: Any, before: Before, face: Faces, colour: str, **options: Any) -> None:
        self.proxy = before(server)
        self.ours = face(engine, self.proxy.port, colour, pause=1e-6, **{"lease": LONG, **options})
        self.theirs = face(engine, server.port, lease=LONG)
        self.ours("warm", lambda: 1)
        self.theirs("warm", lambda: 1)
        self._met = 0

    def at(self, number: int, key: str, **fault: Any) -> None:
        """Let this fault happen to one of the requests that name the key, counted from 0. All engines send the same
        ones: a claim, perhaps after a look, and then a fill; or a change."""
        self.proxy.heal()
        for _ in range(number):
            self.proxy.at(key.encode())
        self._met = self.proxy.met + number
        self.proxy.at(key.encode(), **fault)

    @property
    def happened(self) -> bool:
        return self.proxy.met > self._met

    def check(self, key: str) -> None:
        """No caller is locked out, and no old value comes back."""
        assert self.ours(key, lambda: "second", wait=WAIT) in ("first", "second")
        assert self.theirs(key, lambda: "third", wait=WAIT) in ("first", "second", "third")
        self.theirs.invalidate(key)
        assert self.theirs(key, lambda: "fourth", wait=WAIT) == "fourth"
        assert self.ours(key, never, wait=WAIT) == "fourth"


CUTS = [("sent", byte) for byte in range(0, 180, 20)] + [("answered", byte) for byte in (0, 1, 2, 3, 5, 8, 13, 21, 34)]
"""Each colour makes half of these cuts. The other half are made in the test that cuts twice."""


@both
@engines
@pytest.mark.parametrize("times", [1, 2])
def test_a_cut_at_every_step(server: Any, before: Before, face: Faces, engine: str, times: int, colour: str) -> None:
    """A call succeeds although its connection is cut at any byte. It is not locked out by its own lease, and stores no
    old value late.

    A request that is cut off once is sent again immediately on another connection. If it is cut off twice, that is an
    outage, and a lease may remain until its end.
    """
    broken = Broken(engine, server, before, face, colour, lease=LONG if times == 1 else 3.0)
    cut = []
    for number in range(2):
        for where, byte in CUTS[((colour == "sync") + times + number) % 2 :: 2]:
            key = f"{number}-{where}-{byte}."
            broken.at(number, key, **{where: byte}, times=times)
            assert broken.ours(key, lambda: "first") == "first"
            cut += [key] if broken.happened else []
    assert len(cut) > 5
    broken.proxy.heal()
    broken.ours.back()
    for key in cut:
        broken.check(key)


@both
@engines
def test_half_a_reply_and_silence(server: Any, before: Before, face: Faces, engine: str, colour: str) -> None:
    """A call succeeds if half of a reply comes and the connection then stays open but silent."""
    broken = Broken(engine, server, before, face, colour, timeout=BRIEF)
    for number in range(2):
        key = f"silent-{number}."
        broken.at(number, key, answered=2, silent=True)
        assert broken.ours(key, lambda: "first") == "first"
        assert broken.happened
        broken.proxy.heal()
        broken.ours.back()
        broken.check(key)


@engines
def test_an_invalidation_around_every_step(server: Any, before: Before, face: Faces, engine: str, colour: str) -> None:
    """Promise 4: a fill that arrives late or twice, as its reply was lost, brings back no invalidated value."""
    broken, late = Broken(engine, server, before, face, colour), 0
    faults: list[dict[str, Any]] = [{"when": "before"}, {"when": "after"}]
    faults += [{"when": "after", "answered": 0}, {"when": "after", "answered": 2}]
    for number in range(3):
        for count, fault in enumerate(faults):
            key, begun, invalidated = f"{number}-{count}.", threading.Event(), list[bool]()

            def act(key: str = key, begun: threading.Event = begun, invalidated: list[bool] = invalidated) -> None:
                broken.theirs.invalidate(key)
                invalidated.append(begun.is_set())

            def origin(begun: threading.Event = begun) -> str:
                begun.set()
                return "old"

            how = dict(fault)
            broken.at(number, key, **{how.pop("when"): act}, **how)
            assert broken.ours(key, origin) == "old"
            broken.proxy.heal()
            broken.ours.back()
            if invalidated == [True]:
                late += 1
                assert broken.theirs(key, lambda: "new", wait=WAIT) == "new"
                assert broken.ours(key, never, wait=WAIT) == "new"
    assert late >= 3


@engines
def test_byte_by_byte(server: Any, before: Before, face: Faces, engine: str, colour: str) -> None:
    """Replies and news that arrive byte by byte are read correctly."""
    proxy, origin = before(server), Origin()
    proxy.piece = 1
    holder, waiter = face(engine, server.port), face(engine, proxy.port, colour, local=True)
    holding = Herd(lambda: holder("k", origin))
    origin.has_begun()
    waiting = Herd(lambda: waiter.herd(4, "k", never))
    time.sleep(0.1)  # they should wait by now; if they do not, they find the value
    origin.let_on()
    assert waiting.join() + holding.join() == [[1] * 4, 1]
    assert not waiter.count(events.EngineDown)


CHANGES: dict[str, tuple[Any, ...]] = {"invalidate": (), "expire": (), "set": ("new",)}


@both
@engines
@pytest.mark.parametrize("verb", list(CHANGES))
def test_a_change_that_is_cut_off_is_done_or_an_error(
    server: Any, before: Before, face: Faces, engine: str, verb: str, colour: str
) -> None:
    """Promise 4: a change whose connection is cut once is sent again. If it is cut twice, an error is raised."""
    broken = Broken(engine, server, before, face, colour)
    faults: list[dict[str, int]] = [{"sent": 8}, {"sent": 60}, {"answered": 0}, {"answered": 2}]
    for number, fault in enumerate(faults):
        for times in (1, 2):
            key = f"{verb}-{number}-{times}."
            broken.theirs.cache.set(key, "old")
            broken.at(0, "", **fault, times=times)
            try:
                broken.ours.run(verb, key, *CHANGES[verb])
            except EngineError:
                assert times == 2  # after one cut, the request is sent again immediately
                broken.proxy.heal()
                broken.ours.run(verb, key, *CHANGES[verb])
            assert broken.happened
            assert broken.theirs(key, lambda: "new", wait=WAIT) == "new"
            assert broken.ours(key, lambda: "new", wait=WAIT) == "new"


@both
@engines
def test_a_lock_whose_reply_is_cut_off(server: Any, before: Before, face: Faces, engine: str, colour: str) -> None:
    """If the reply to a lock's request is cut off, no two callers have the lock. It is free again after its lease."""
    broken = Broken(engine, server, before, face, colour)
    runner = broken.ours._runner
    for times in (1, 2):
        for byte in (0, 3):
            # After one cut it is released by its holder, and after two by its end.
            lock = broken.ours.cache.lock(f"lock-{times}-{byte}.", lease=LONG if times == 1 else 1.0)

            def run(verb: str, lock: Any = lock) -> Any:
                return getattr(lock, verb)() if runner is None else runner.run(getattr(lock, "a" + verb)())

            broken.at(0, lock.name, answered=byte, times=times)
            with suppress(EngineError):
                if run("acquire"):
                    assert not broken.theirs.lock(lock.name)
                    broken.at(0, lock.name, answered=byte)
                    run("release")
            assert broken.proxy.met
            assert not lock.held
            broken.proxy.heal()
            until(lambda lock=lock: broken.theirs.lock(lock.name))


# -- servers that lose their data, at each step of a computation ------------------------------------------------------


def flush(server: Any) -> None:
    server.cli("FLUSHALL") if isinstance(server, RedisServer) else server.empty()


def restart(server: Any) -> None:
    server.restart()


@pytest.mark.parametrize("engine", ["redis", "memcached"])
@pytest.mark.parametrize("forget", [flush, restart])
def test_a_server_that_forgets_at_every_step(
    own: Any, before: Before, face: Faces, forget: Callable[[Any], None], engine: str, colour: str
) -> None:
    """If the server loses its data at any step, the call succeeds, and no older value replaces a newer one."""
    broken = Broken(engine, own, before, face, colour, local=True)
    for number in range(3):
        for when in ("before", "after", "computing"):
            key, done = f"{number}-{when}.", threading.Event()

            def act(done: threading.Event = done) -> None:
                forget(own)
                done.set()

            def origin(when: str = when, act: Callable[[], None] = act) -> str:
                if when == "computing":
                    act()
                return "first"

            if when != "computing":
                broken.at(number, key, **{when: act})
            assert broken.ours(key, origin) == "first"
            if when != "computing" and not broken.happened:  # there are fewer requests
                continue
            assert done.wait(PATIENCE)
            broken.proxy.heal()
            broken.ours.back()
            time.sleep(0.06)  # a lost generation may be believed for this long
            broken.theirs.back()
            broken.theirs.invalidate(key)
            assert broken.theirs(key, lambda: "third", wait=WAIT) == "third"
            until(lambda key=key: broken.ours(key, lambda: "old?", wait=WAIT) == "third")


@pytest.mark.parametrize("engine", ["redis", "memcached"])
@pytest.mark.parametrize("forget", [flush, restart])
def test_a_lock_that_was_forgotten_is_lost(
    own: Any, face: Faces, forget: Callable[[Any], None], engine: str, colour: str
) -> None:
    """If the server loses a lock, its holder learns that the lock is lost. Otherwise, two holders would be inside."""
    asked, other = face(engine, own.port, colour), face(engine, own.port)
    lock = asked.cache.lock("l", lease=2.0)

    def forgotten() -> None:
        assert not other.lock("l")
        forget(own)
        assert other.lock("l")

    def inside() -> None:
        with lock:
            forgotten()
            until(lambda: lock.lost)

    async def suspending() -> None:
        async with lock:
            await asyncio.to_thread(forgotten)
            await until_async(lambda: lock.lost)

    with pytest.raises(LockLost):
        inside() if asked._runner is None else asked._runner.run(suspending())
    assert not lock.held


def test_by_default_a_dead_engine_is_asked_once_a_second() -> None:
    """By default, a dead engine is asked once a second. The other tests shorten this pause."""
    with Cache("redis://127.0.0.1:1") as asked:
        outage = asked._core.outage
        assert outage is not None
        assert outage.breaker.pause == 1.0
