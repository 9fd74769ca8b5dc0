"""Many callers of one process that wait for a bulkhead: only a few of them ask the engine at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from servers import wait_until

from stampede import Bulkhead, Cache, EngineError, LockTimeout
from stampede.locks import crowd
from stampede.locks.crowd import ASKERS, LOOK, Crowd, Waiter
from stampede.runtime.colour import run_blocking
from stampede.testing import FakeClock

ENGINES = ["disk", "file", "redis", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return str(request.getfixturevalue("server").url)
    if request.param == "postgres":
        from postgres_server import prepared_postgres

        return str(prepared_postgres().postgres_url)
    return f"disk://{tmp_path}?timeout=20" if request.param == "disk" else f"{request.param}://{tmp_path}"


Open = Callable[[], Cache]


@pytest.fixture
def open_(url: str) -> Iterator[Open]:
    """Open caches on one engine. Each has connections and crowds of its own, like a process."""
    opened: list[Cache] = []

    def made() -> Cache:
        opened.append(Cache("memory://", locks=url) if url.startswith("file") else Cache(url))
        return opened[-1]

    yield made
    for cache in opened:
        cache.close()


def asking(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the tokens with which the engine is asked for a place from now on."""
    locks, tokens = cache._core.engine.lock_engine.blocking.locks, []
    real = locks.acquire

    def acquire(name: str, token: bytes, *args: Any, **options: Any) -> Any:
        tokens.append(token)
        return real(name, token, *args, **options)

    monkeypatch.setattr(locks, "acquire", acquire)
    return tokens


def waiting(bulkhead: Bulkhead) -> int:
    return len(bulkhead._threads._waiting)


def visitors(bulkhead: Bulkhead, number: int, visit: Callable[[], object]) -> list[threading.Thread]:
    """Start threads that wait for their places, one behind the other."""

    def come() -> None:
        with bulkhead:
            visit()

    threads = []
    for behind in range(number):
        threads.append(threading.Thread(target=come, daemon=True))
        threads[-1].start()
        wait_until(lambda wanted=behind + 1 - ASKERS: waiting(bulkhead) >= wanted)
    return threads


def test_a_crowd_asks_the_engine_a_few_questions(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few callers of a process ask the engine, where each question costs more the more waiters there are."""
    monkeypatch.setattr(crowd, "LENT", 60.0)
    cache, other = open_(), open_().bulkhead("b", concurrency=2)
    bulkhead, tokens = cache.bulkhead("b", concurrency=2, wait=30), asking(cache, monkeypatch)
    with other, other:
        threads = visitors(bulkhead, 20, lambda: None)
        wait_until(lambda: len({*tokens}) >= ASKERS)  # the last of them may be about to ask
        assert len({*tokens}) == ASKERS
    for each in threads:
        each.join(20)
        assert not each.is_alive()
    assert len({*tokens}) <= ASKERS + 2  # one more for each place that was granted


def test_a_place_goes_back_after_a_moment(open_: Open) -> None:
    """A process with many callers gives its places back after a moment, so other processes get some, too."""
    busy, other = open_().bulkhead("b", concurrency=2, wait=30), open_().bulkhead("b", concurrency=2, wait=20)
    over = threading.Event()

    def come_again() -> None:
        while not over.is_set():
            with busy:
                time.sleep(0.002)

    threads = [threading.Thread(target=come_again, daemon=True) for _ in range(ASKERS + 8)]
    for each in threads:
        each.start()
    try:
        wait_until(lambda: waiting(busy) > 2)
        with other:
            assert not over.is_set()
    finally:
        over.set()
    for each in threads:
        each.join(20)


def test_threads_and_tasks_wait_side_by_side(open_: Open) -> None:
    """Threads and tasks share a bulkhead: all get places, never too many at once, and a cancelled task loses none."""
    bulkhead = open_().bulkhead("b", concurrency=2, wait=30)
    now, most, lock = 0, 0, threading.Lock()

    def step(by: int) -> None:
        nonlocal now, most
        with lock:
            now += by
            most = max(most, now)

    def visit() -> None:
        with bulkhead:
            step(1)
            time.sleep(0.002)
            step(-1)

    async def avisit() -> None:
        async with bulkhead:
            step(1)
            try:
                await asyncio.sleep(0.002)
            finally:
                step(-1)

    async def main() -> None:
        with ThreadPoolExecutor(8) as pool:
            threads = [asyncio.get_running_loop().run_in_executor(pool, visit) for _ in range(24)]
            tasks = [asyncio.ensure_future(avisit()) for _ in range(24)]
            for number, task in enumerate(tasks):
                if number % 3 == 0:
                    await asyncio.sleep(0.001)
                    task.cancel()
            await asyncio.gather(*threads)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}

    asyncio.run(main())
    assert now == 0 and 1 <= most <= 2
    assert bulkhead.acquire(wait=5) and bulkhead.acquire(wait=5)
    bulkhead.release()
    bulkhead.release()


@pytest.mark.parametrize("url", ["redis"], indirect=True)
def test_wait_bounds_the_wait(open_: Open) -> None:
    """`wait` also bounds the wait of a caller that has not asked the engine yet."""
    cache, other = open_(), open_().bulkhead("b", concurrency=2)
    bulkhead = cache.bulkhead("b", concurrency=2, wait=30)
    with other, other:
        threads = visitors(bulkhead, ASKERS + 1, lambda: None)
        began = time.monotonic()
        with (
            pytest.raises(LockTimeout, match="2 holders are inside 'b'"),
            cache.bulkhead("b", concurrency=2, wait=0.05),
        ):
            pass
        assert time.monotonic() - began < 5
    for each in threads:
        each.join(20)


# -- the crowd itself ---------------------------------------------------------------------------------------------


class Place:
    lost = False

    def __init__(self) -> None:
        self.since = time.monotonic()

    def again(self) -> Place:
        return self

    def let_go(self) -> None:
        self.lost = True


@pytest.fixture
def full(lent: None) -> Iterator[tuple[Crowd, list[Waiter]]]:
    """A crowd with the most askers that it may have."""
    made: Crowd = Crowd(30.0)
    with ExitStack() as stack:
        askers = [stack.enter_context(made.joined()) for _ in range(ASKERS)]
        assert all(called(made, each) for each in askers)
        yield made, askers


def called(its: Crowd, me: Waiter) -> bool:
    return run_blocking(its.turn(me, 0.0))


Full = tuple[Crowd, list[Waiter]]


def test_a_place_that_is_not_taken_goes_to_the_next(full: Full) -> None:
    """If a caller is cancelled just as it gets a place, the place goes to the next caller."""
    its, place = full[0], Place()
    with ExitStack() as cancelled:
        first = cancelled.enter_context(its.joined())
        with its.joined() as second:
            assert its.hand_on(place)
            assert called(its, first) and not called(its, second)
            cancelled.close()
            assert called(its, second) and second.place is place
            second.place = None
    assert not place.lost


def test_a_short_lease_shortens_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Askers that have stopped, as with an event loop that has ended, delay others for no longer than the lease."""
    bulkhead = Cache("null://").bulkhead("b", concurrency=2, lease=1.0)
    its, clock = bulkhead._threads, FakeClock()
    monkeypatch.setattr(crowd, "monotonic", clock)
    with ExitStack() as stack:
        askers = [stack.enter_context(its.joined()) for _ in range(ASKERS)]
        assert all(called(its, each) for each in askers)
        with its.joined() as me:
            clock.advance(0.5)
            assert not called(its, me)
            clock.advance(1.0)
            assert called(its, me)


def test_places_go_on_in_the_order_of_arrival(full: Full) -> None:
    its, places = full[0], [Place(), Place()]
    with its.joined() as first, its.joined() as second:
        assert all(its.hand_on(each) for each in places)
        assert [first.place, second.place] == places


def test_a_place_that_nobody_takes_goes_back(full: Full) -> None:
    its, place = full[0], Place()
    with its.joined():
        assert its.hand_on(place)
    assert place.lost
    assert not its.hand_on(Place())


def test_askers_that_are_not_heard_of_do_not_count(full: Full, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loop of the askers is blocked, other callers of the process may ask instead."""
    its, askers = full
    with its.joined() as me:
        later = time.monotonic() + 2 * LOOK + 1
        monkeypatch.setattr(crowd, "monotonic", lambda: later)
        for each in askers:
            its.heard(each)
        assert not called(its, me)
        later += 2 * LOOK + 1
        assert called(its, me)


def test_what_two_askers_in_a_row_hear_is_told_to_all(full: Full) -> None:
    """If two askers in a row get an EngineError, all waiters get it. Otherwise each would wait for a time-out."""
    its, askers = full
    with its.joined() as first, its.joined() as second:
        its.leave(askers[0], EngineError("no answer"))
        assert called(its, first) and not called(its, second)
        its.leave(askers[1], EngineError("no answer"))
        with pytest.raises(EngineError, match="no answer"):
            called(its, second)


# -- who gets a place ---------------------------------------------------------------------------------------------


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process keep its places for so long that a slow machine does not matter."""
    monkeypatch.setattr(crowd, "LENT", 60.0)


def blocked(bulkhead: Bulkhead, tasks: int, over: threading.Event) -> threading.Thread:
    """Run an event loop in a thread, with tasks that wait for places. It is blocked until `over`."""
    ready = threading.Event()

    async def main() -> None:
        async def visit() -> None:
            async with bulkhead:
                pass

        waiting = [asyncio.ensure_future(visit()) for _ in range(tasks)]
        await asyncio.sleep(0)
        wanted = crowd.crowd_of(
            bulkhead._engine.lock_engine, "b", 2, lease=bulkhead._lease, loop=asyncio.get_running_loop()
        )
        while len(wanted._asking) < ASKERS:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # they have asked
        ready.set()
        over.wait(30)
        await asyncio.gather(*waiting)

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(20)
    return thread


@pytest.mark.usefixtures("lent")
def test_a_blocked_loop_is_given_no_place_of_a_thread(open_: Open) -> None:
    """A thread's place never goes to a task of a blocked loop, which would keep it for a whole lease."""
    bulkhead, over = open_().bulkhead("b", concurrency=2, lease=60, wait=20), threading.Event()
    first, second = bulkhead.acquire(), bulkhead.acquire()
    loop = blocked(bulkhead, 8, over)
    began = time.monotonic()
    try:
        threads = [threading.Thread(target=lambda: bulkhead.acquire().release(), daemon=True) for _ in range(4)]
        for each in threads:
            each.start()
        first.release()
        second.release()
        for each in threads:
            each.join(20)
            assert not each.is_alive()
        assert time.monotonic() - began < 15
    finally:
        over.set()
    loop.join(20)
    assert not loop.is_alive()


@pytest.mark.usefixtures("lent")
def test_a_closed_loop_s_waiters_are_given_nothing(open_: Open) -> None:
    """A place never goes to a task of a closed loop, which would keep it for a whole lease."""
    bulkhead = open_().bulkhead("b", concurrency=2, lease=60, wait=20)
    first, second = bulkhead.acquire(), bulkhead.acquire()
    loop, tasks = asyncio.new_event_loop(), list[Any]()

    async def visit() -> None:
        async with bulkhead:
            pass

    async def start() -> None:
        tasks.extend(asyncio.ensure_future(visit()) for _ in range(12))
        await asyncio.sleep(0.2)

    loop.run_until_complete(start())
    loop.close()
    first.release()
    second.release()
    began = time.monotonic()
    for _ in range(6):
        with bulkhead:
            pass
    assert time.monotonic() - began < 15
    for task in tasks:
        task._log_destroy_pending = False


@pytest.mark.usefixtures("lent")
@pytest.mark.parametrize("url", ["redis"], indirect=True)
def test_what_was_extended_is_not_handed_on(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extended place is not handed on: if its next holder died, it would remain taken for too long."""
    handed: list[Any] = []
    monkeypatch.setattr(Crowd, "hand_on", lambda its, place: handed.append(place))
    bulkhead = open_().bulkhead("b", concurrency=2)
    first, second = bulkhead.acquire(), bulkhead.acquire()
    first.extend(600)
    first.release()
    second.release()
    assert handed == [second]
