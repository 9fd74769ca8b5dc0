"""A caller with a `wait` waits no longer, also for an engine that hangs."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from faces import LONG, Face
from herd import PATIENCE, Herd, until
from memcached_server import shared_memcached
from proxy import Proxy
from servers import shared_redis

from stampede import Cache, WaitTimeout
from stampede.colour import BLOCKING, run_blocking
from stampede.engines.redis.scripts import Scripts
from stampede.workers import Late, Workers, within

pytestmark = pytest.mark.alone

Before = Callable[[Any], Proxy]
Faces = Callable[..., Face]

both = pytest.mark.parametrize("colour", ["sync", "async"])
engines = pytest.mark.parametrize("engine", ["redis", "memcached"])
WAIT, SOON = 0.1, 0.3
"""Seconds: a caller's patience, and what is not much more on a busy machine (an engine that hangs takes 1.0)."""


def hanging(engine: str, before: Before) -> tuple[Proxy, str]:
    """What can be made to hang, emptied; and its URL, with all times as they are by default."""
    if engine == "redis":
        shared_redis().cli("FLUSHALL")
        proxy = before(shared_redis())
    else:
        shared_memcached().empty()
        proxy = before(shared_memcached())
    return proxy, f"{engine}://127.0.0.1:{proxy.port}"


@both
@engines
def test_nobody_waits_longer_for_an_engine_that_hangs(before: Before, face: Faces, engine: str, colour: str) -> None:
    """The first to meet it would wait for a second, and one a second after it, whatever patience they have."""
    proxy, url = hanging(engine, before)
    asked = face(url, colour, pause=0.2, lease=5)
    asked("warm", lambda: 1, wait=WAIT)
    proxy.hold()
    took: list[float] = []
    for number in range(40):
        began = time.monotonic()
        assert asked(f"k{number}", lambda number=number: number, wait=WAIT) == number
        took.append(time.monotonic() - began)
        time.sleep(0.03)
    assert max(took) < SOON
    assert median(took[1:6]) < WAIT  # it is known that the first one's question has no answer
    proxy.cut()
    proxy.let_go()
    until(lambda: asked("other", lambda: 1, wait=WAIT) and not asked.down)
    for number in range(0, 40, 8):
        asked.run("set", f"k{number}", -1)
        assert asked(f"k{number}", lambda: 0, wait=WAIT) == -1


@both
@engines
@pytest.mark.parametrize("change", [None, ("invalidate", "k"), ("clear",)])
def test_nor_for_the_value_to_be_stored(
    before: Before, face: Faces, engine: str, colour: str, change: tuple[str, ...] | None
) -> None:
    """The value is there: only the engine doesn't take it; or isn't to have it any more."""
    proxy, url = hanging(engine, before)
    asked = face(url, colour)
    asked("warm", lambda: 1)
    ends: list[float] = []

    def origin() -> int:
        if change is not None:
            getattr(asked.cache, change[0])(*change[1:])
        proxy.hold()
        ends.append(time.monotonic())
        return 1

    assert asked("k", origin, wait=WAIT) == 1
    assert time.monotonic() - ends[0] < SOON
    proxy.let_go()
    if change is None:
        until(lambda: asked.run("get", "k") == 1)  # it was on its way


@engines
def test_nor_does_a_functions_first_call_hold_its_loop_up(before: Before, engine: str) -> None:
    """All tasks of the loop would stand still for a second, for each function that is called then."""
    proxy, url = hanging(engine, before)
    lags: list[float] = []

    async def ticks() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - began)

    async def called() -> None:
        clock, began = asyncio.create_task(ticks()), time.monotonic()
        assert await f() == 1
        assert time.monotonic() - began < SOON
        clock.cancel()

    with Cache(url) as cache:

        @cache.cached(wait=WAIT)
        async def f() -> int:
            return 1

        proxy.hold()
        asyncio.run(called())
        proxy.cut()
        proxy.let_go()
    assert max(lags) < SOON


@pytest.fixture
def alarmed() -> Iterator[None]:
    """An alarm interrupts whom it finds, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarmed")
@engines
def test_nor_for_a_lease_to_be_given_back_by_who_is_interrupted_twice(before: Before, face: Faces, engine: str) -> None:
    """The second Ctrl-C, of one who sees that nothing happens, would have it wait for a second more."""
    proxy, url = hanging(engine, before)
    asked = face(url)
    asked("warm", lambda: 1)
    began: list[float] = []

    def origin() -> int:
        proxy.hold()
        began.append(time.monotonic())
        signal.setitimer(signal.ITIMER_REAL, WAIT / 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked("k", origin, wait=WAIT)
    assert time.monotonic() - began[0] < WAIT / 2 + SOON


@pytest.mark.usefixtures("alarmed")
@engines
def test_nor_by_who_is_interrupted_while_it_asks(before: Before, face: Faces, engine: str) -> None:
    """The lease that it may have been granted would be given back as if it had all the time."""
    proxy, url = hanging(engine, before)
    asked = face(url)
    asked("warm", lambda: 1)
    proxy.hold()
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, WAIT / 2)
    with pytest.raises(KeyboardInterrupt):
        asked("k", lambda: 1, wait=WAIT)
    assert time.monotonic() - began < WAIT / 2 + SOON


@engines
def test_the_question_of_a_loop_that_was_left_is_forgotten(
    before: Before, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody in that loop hears its answer: all who are impatient would do without the engine for ever."""
    proxy, url = hanging(engine, before)
    monkeypatch.setattr("stampede.guarded.FORGOTTEN", 0.2)
    with Cache(url) as cache, asyncio.Runner() as left:
        left.run(cache.aget_or_compute("warm", lambda: 1))
        proxy.hold()
        assert left.run(cache.aget_or_compute("k", lambda: 1, wait=WAIT)) == 1
        proxy.let_go()

        def stored() -> bool:
            return cache.get_or_compute("other", lambda: 2, wait=WAIT) == cache.get("other") == 2

        until(stored, bound=5)


@both
@engines
def test_nor_for_one_that_hangs_while_somebody_computes(before: Before, face: Faces, engine: str, colour: str) -> None:
    """Who looks now and then whether the value is there would wait for the answer to one of these looks."""
    proxy, url = hanging(engine, before)
    holder, waiter = face(f"{engine}://127.0.0.1:{proxy.target}"), face(url, colour)
    begun, end = threading.Event(), threading.Event()
    herd = Herd(lambda: holder("k", lambda: (begun.set(), end.wait(LONG))[1]))
    assert begun.wait(LONG)
    waiter("warm", lambda: 1)
    threading.Timer(WAIT / 2, proxy.hold).start()
    began = time.monotonic()
    with suppress(WaitTimeout):
        waiter("k", lambda: 2, wait=WAIT)
    assert time.monotonic() - began < WAIT + SOON
    end.set()
    assert herd.join() == [True]


@engines
def test_nor_for_one_thing_after_the_other(before: Before, face: Faces, engine: str) -> None:
    """Who asks for today's generation first, and joins a flight then, would have all his time again."""
    proxy, url = hanging(engine, before)
    asked = face(url)
    asked("warm", lambda: 1)
    proxy.hold()
    herd = Herd(lambda: asked("k", lambda: 1))
    until(lambda: asked.cache._core.flights._flights)
    generations = asked.cache._core.engine.recalls._generations
    generations.forget() if engine == "redis" else generations.known.clear()
    began = time.monotonic()
    with suppress(WaitTimeout):
        asked("k", lambda: 1, wait=4 * WAIT)
    assert time.monotonic() - began < 4 * WAIT + SOON
    assert herd.join() == [1]


@both
def test_a_value_that_is_not_sent_leaves_no_lease(before: Before, face: Faces, colour: str) -> None:
    """As another question hangs, it is kept here only: all other processes would wait for a lease that nobody holds."""
    proxy, url = hanging("redis", before)
    asked = face(url, colour, lease=30)
    asked("warm", lambda: 1)

    def origin() -> int:
        proxy.hold()
        hangs = Herd(lambda: asked.cache.get_or_compute("hangs", lambda: 1, wait=0.01))
        time.sleep(WAIT + 0.1)
        return hangs.join()[0]

    assert asked("k", origin, wait=WAIT) == 1
    proxy.let_go()
    until(lambda: not shared_redis().cli("KEYS", "*}l"), bound=5)


@both
def test_a_lease_that_comes_too_late_is_given_back(before: Before, face: Faces, colour: str) -> None:
    """The others would wait for one that nobody holds."""
    proxy, url = hanging("redis", before)
    asked = face(url, colour)
    asked("warm", lambda: 1)
    proxy.hold()
    assert asked("k", lambda: 1, wait=WAIT) == 1
    came = threading.Event()
    proxy.at(Scripts().claim.hash, after=came.set)
    proxy.let_go()
    assert came.wait(PATIENCE)
    until(lambda: not shared_redis().cli("KEYS", "*}l"))
    until(lambda: not asked.down)  # that it could be given back is noticed
    assert asked("k", lambda: 2, wait=WAIT) == 2


@both
@engines
def test_a_batch_waits_for_an_engine_that_is_slow(before: Before, face: Faces, engine: str, colour: str) -> None:
    """That it waits for nobody's computation would be taken for impatience: each process would compute all of it."""
    proxy, url = hanging(engine, before)
    asked = face(url, colour, lease=5)
    asked.run("set", "k", 1)
    proxy.delay = 0.12
    assert asked.many(["k"], lambda keys: dict.fromkeys(keys, 2)) == {"k": 1}


@engines
def test_nor_where_no_place_is_left_to_wait_in(
    before: Before, face: Faces, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds none would wait where nothing bounds it; or not hear of what others compute."""
    monkeypatch.setattr("stampede.workers._waiters", Workers(1, "stampede-wait"))
    monkeypatch.setattr("stampede.workers.MOMENT", 0.05)
    proxy, url = hanging(engine, before)
    holder, waiter = face(f"{engine}://127.0.0.1:{proxy.target}"), face(url)
    keys, begun, end = ["a", "b", "c"], Herd(), threading.Event()
    for key in keys:
        held = threading.Event()
        begun = Herd(lambda key=key, held=held: holder(key, lambda: (held.set(), end.wait(LONG), key)[2]))
        assert held.wait(LONG)
    waiter("warm", lambda: 1)
    well = Herd(*[lambda key=key: waiter(key, lambda: "mine", wait=2.0) for key in keys])
    threading.Timer(WAIT, end.set).start()
    assert well.join() == keys
    assert begun.join() == ["c"]


@engines
def test_nor_for_one_that_hangs_where_no_place_is_left(
    before: Before, face: Faces, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look for itself, and wait for the answer."""
    monkeypatch.setattr("stampede.workers._waiters", Workers(0, "stampede-wait"))
    test_nor_for_one_that_hangs_while_somebody_computes(before, face, engine, "sync")


@engines
def test_nor_where_no_place_is_left_to_ask_in(
    before: Before, face: Faces, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are places wait for an engine that hangs: the next would ask it as if it had all the time."""
    monkeypatch.setattr("stampede.workers._askers", Workers(1, "stampede-ask"))
    proxy, url = hanging(engine, before)
    asked = face(url)
    asked("warm", lambda: 1, wait=WAIT)
    proxy.hold()
    herd = Herd(lambda: asked("hangs", lambda: 1, wait=10 * WAIT))
    until(lambda: asked.cache._core.outage._asked)
    began = time.monotonic()
    assert asked("k", lambda: 2, wait=WAIT) == 2
    assert time.monotonic() - began < SOON
    assert herd.join() == [1]


def test_a_place_that_is_found_when_the_time_is_over() -> None:
    """A process that doesn't run in between would ask to wait for less than no time: a ValueError."""

    async def answer() -> int:
        return 1

    told: list[Any] = []
    answered = threading.Event()

    def late(result: Any, error: BaseException | None) -> None:
        told.append(error or result)
        answered.set()

    got = run_blocking(within(BLOCKING, answer(), -1.0, late))
    assert got == 1 or (got is Late.LATE and answered.wait(PATIENCE) and told == [1])
