"""An exception at any moment of ours leaves nothing behind, be it of a signal's handler or for want of stack."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any
from weakref import WeakSet

import pytest
import trio
from herd import until
from interrupting import Interrupt, Point, interrupted, moments_of, points_of
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import shared_redis

from stampede import Cache, EngineError, WaitTimeout
from stampede.entry import Entry
from stampede.flight import Flights
from stampede.guarded_locks import _sides
from stampede.outcome import Landing
from stampede.places import _beside, _refreshers
from stampede.ports import Ask, Granted

# A coroutine that was made, and never begun, says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]
# What is thrown into a finalizer, or a callback of a weak reference, can't be raised anywhere.
thrown_in = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LONG, LONGER = 5, 30  # seconds; leases are much longer, and may be looked at after a third of theirs
EVERY = 1_000_000
AT_MOST = {
    "memory": EVERY,
    "disk": 60,
    "redis": 60,
    "memcached": 40,
    "postgres": 40,
}  # moments of one verb; SWEEP=whole for all
ENGINES = ["memory://?entries=20", "memory://?codec=sealed", "disk://{}", "redis", "memcached", "postgres"]


def engines_and(verbs: list[str], more: list[str]) -> pytest.MarkDecorator:
    """Each of these verbs on all engines, and of more ones, which differ above them, on one."""
    some = [(engine, verb) for engine in ENGINES for verb in verbs] + [(ENGINES[0], verb) for verb in more]
    return pytest.mark.parametrize("cache, verb", some, indirect=["cache"])


@pytest.fixture(autouse=True)
def _all_is_told() -> Iterator[None]:
    """What was interrupted before it began says so here, and in no later test."""
    yield
    gc.collect()


@pytest.fixture(params=ENGINES, ids=lambda url: url.partition(":")[0] + ("-sealed" if "sealed" in url else ""))
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    servers = {
        "redis": lambda: shared_redis().url,
        "memcached": lambda: shared_memcached().url,
        "postgres": lambda: prepared_postgres().postgres_url,
    }
    url = servers.get(request.param, lambda: request.param.format(tmp_path))()
    logging.getLogger("stampede").setLevel(logging.CRITICAL)
    with Cache(url, ttl=600, lease=60, early=0, on_engine_error="raise") as cache:
        yield cache
        until(all_is_told, LONGER)  # what was interrupted before it began says so here
    logging.getLogger("stampede").setLevel(logging.NOTSET)


@pytest.fixture
def cache_of_objects() -> Iterator[Cache]:
    with Cache("memory://", ttl=600, early=0) as cache:
        yield cache


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """Another thread."""
    with ThreadPoolExecutor(1) as other:
        yield other


said: WeakSet[Any] = WeakSet()
"""Of what a hook was told that kept it: Python 3.13.0 never lets go of that, as it has come back to life."""


def all_is_told() -> bool:
    gc.collect()
    return not any(is_new(each) and each not in said for each in gc.get_objects())


def flying(cache: Cache) -> bool:
    """Is there a flight that somebody would follow?"""
    return any(flight.is_under_way() for flight in list(cache._core.flights._flights.values()))


def nothing_is_left(cache: Cache) -> None:
    deadline = monotonic() + LONG
    while flying(cache) and monotonic() < deadline:
        sleep(0.001)
    assert not flying(cache)
    tier = cache._core.front.tier
    if tier is not None and not tier._writing:
        each, queue = tier._end.newer, 0
        while each is not tier._end:
            each, queue = each.newer, queue + 1
        assert queue == len(tier)


def verb_of(function: Any, verb: str) -> Callable[[int], Any]:
    if verb == "many":
        return lambda number: function.many([(number,), (-number - 1000,)])
    if verb == "set":
        return lambda number: function.set(number, number)
    return function if verb == "call" else function.refresh


def swept(
    cache: Cache, act: Callable[[int], Any], still: Callable[[int], Any], *, whole: bool = False, loses: bool = False
) -> None:
    """Do it again and again, interrupted a little later each time; after each time, look at how things are.

    `loses`: what is thrown into a finalizer, or a callback of an event loop, is only logged.
    """
    points: list[Point] = []
    points_of(lambda: act(-2), points.append)
    assert points
    at_most = EVERY if whole or os.environ.get("SWEEP") == "whole" else AT_MOST[cache.engine.scheme]
    # What has a connection makes a new one after each interruption, and may be interrupted there.
    moments = moments_of(act) if cache.engine.scheme == "memory" else []
    many = max(len(points), len(moments))
    numbers = range(0, many, max(1, many // at_most))
    errors = []
    for number in numbers:
        errors.append(interrupted(partial(act, number), number, moments))
        assert not isinstance(errors[-1], EngineError)  # it would count as down
        if cache.engine.scheme != "postgres":  # psycopg may swallow it, which loses nothing
            assert loses or str(errors[-1]) != "swallowed"
        if cache.engine.scheme != "memcached":
            still(number)  # while the error, and with it all frames, are kept
            errors.clear()
    for number in numbers if errors else ():  # a lease that memcached has just given stands for a second or two
        still(number)


@engines_and(["call", "refresh", "many", "set"], ["deadline", "deadline of many"])
@thrown_in
def test_a_call_that_is_interrupted(cache: Cache, other: ThreadPoolExecutor, verb: str) -> None:
    """A key would hang for ever in all other threads, or for a lease in other processes."""
    verb, limited = verb.removeprefix("deadline").removeprefix(" of ") or "call", verb.startswith("deadline")
    function = cache.cached(deadline=LONGER if limited else None)(lambda number: number)
    act = verb_of(function, verb)

    def still(number: int) -> None:
        assert other.submit(function, number).result(LONG) == number
        nothing_is_left(cache)

    function(-1)
    swept(cache, act, still)


@pytest.mark.parametrize("cache", [ENGINES[0], "redis"], indirect=True)
@pytest.mark.parametrize("terms", [{}, {"deadline": LONGER}, {"chunk": 1}], ids=["all", "beside", "chunks"])
@thrown_in
def test_a_loader_that_is_interrupted(cache: Cache, other: ThreadPoolExecutor, terms: dict[str, Any]) -> None:
    """The keys of those that nobody loads any more would hang."""

    @cache.cached.many(**terms)
    def function(numbers: list[int]) -> dict[int, int]:
        return {number: number for number in numbers}

    def still(number: int) -> None:
        ids = [number, -number - 1000]
        assert other.submit(function, ids).result(LONG) == {each: each for each in ids}
        nothing_is_left(cache)

    function([-1])
    swept(cache, lambda number: function([number, -number - 1000]), still)


@pytest.mark.parametrize("verb", ["call", "many"])
@thrown_in
def test_an_impatient_call_that_is_interrupted(cache_of_objects: Cache, other: ThreadPoolExecutor, verb: str) -> None:
    """What is stale would stay so for ever, or whoever comes later would wait for as long."""
    serial = count()
    function = cache_of_objects.cached(patience=LONGER, stale=600)(lambda number: next(serial))
    act = verb_of(function, verb)
    for number in range(-3, 1000):
        for each in (number, -number - 1000):
            function.set(-1, each, ttl=0)

    def still(number: int) -> None:
        assert other.submit(act, number).result(LONG) != -1
        nothing_is_left(cache_of_objects)

    swept(cache_of_objects, act, still)
    until(lambda: not _beside._taken, LONG)


@thrown_in
def test_a_leader_that_is_interrupted_as_it_offers_what_is_stale() -> None:
    """Its followers, who would rather wait for what is fresh, would wait for a bell that nobody rings any more."""
    for number in range(100):
        flights, rung = Flights(), Event()
        flight, _ = flights.join("k", None)
        flights.join("k", None)[0].bell.listen(rung.set)
        error = interrupted(partial(flights.offer, flight, Landing(Entry("stale", b"stale"))), number)
        if error is None:
            break
        flights.end(flight, None)
        assert rung.is_set(), error
    assert number > 5


@thrown_in
@pytest.mark.parametrize("what", ["call", "lock"])
def test_a_question_of_who_was_interrupted_is_none_that_hangs(what: str) -> None:
    """For seconds all impatient callers would do without the engine, and locks be refused, as if it hung."""
    with Cache(shared_redis().url, early=0) as cache:
        function, lock = cache.cached(wait=1)(lambda number: number), cache.lock("n", wait=1)

        def locked() -> None:
            with lock:
                pass

        act = (lambda: function.refresh(1)) if what == "call" else locked
        questions: Any = cache._core.outage if what == "call" else _sides.get(cache.engine)
        asked = questions.at(None)
        points: list[Point] = []
        points_of(act, points.append)
        for number in [number for number, (code, _) in enumerate(points) if "guarded" in code.co_filename]:
            interrupted(act, number)
            deadline = monotonic() + LONG / 2
            while asked.hangs_for(0) and monotonic() < deadline:
                sleep(0.0005)  # what another thread has asked for it is still to be answered
            assert not asked.hangs_for(0)


@thrown_in
@pytest.mark.parametrize("terms", [{"background": True}, {"patience": LONG}, {"deadline": LONG}], ids=str)
@pytest.mark.parametrize("verb", ["call", "many"])
def test_a_place_that_was_reserved_is_free_again(other: ThreadPoolExecutor, verb: str, terms: dict[str, Any]) -> None:
    """After a few interruptions nothing would ever be refreshed again, or everybody compute for himself."""
    computed: dict[int, int] = {}

    def still(number: int) -> None:
        deadline = monotonic() + LONG
        while (_refreshers._taken or _beside._taken) and monotonic() < deadline:
            sleep(0.0005)
        assert not _refreshers._taken
        assert not _beside._taken
        assert other.submit(function, number).result(LONG) == number

    with Cache("memory://", ttl=0, stale=600, early=0, lease=60) as cache:
        function = cache.cached(**terms)(lambda number: computed.setdefault(number, number))
        act = verb_of(function, verb)
        for number in range(-1012, 1500):
            function(number)
        moments = moments_of(act)
        for number in range(1500):
            if interrupted(partial(act, number), number, moments) is None:
                break
            still(number)
        assert number > 100


@thrown_in
def test_a_follower_that_is_interrupted(cache_of_objects: Cache, other: ThreadPoolExecutor) -> None:
    """He would count as a caller for ever: the computation would go on when nobody waits for it any more."""
    begun, go_on = Event(), Event()

    @cache_of_objects.cached(wait=0)
    def function(number: int) -> int:
        begun.set()
        return go_on.wait(LONG) and number

    def call(number: int) -> None:
        with suppress(WaitTimeout):
            function(1)

    def still(number: int) -> None:
        (flight,) = cache_of_objects._core.flights._flights.values()
        assert flight.callers == 1

    leader = other.submit(function, 1)
    begun.wait(LONG)
    try:
        swept(cache_of_objects, call, still, loses=True)
    finally:
        go_on.set()
    assert leader.result(LONG) == 1


@pytest.mark.parametrize("cache", ["disk://{}"], indirect=True)
@thrown_in
def test_a_write_that_is_interrupted_keeps_no_other_process_waiting(cache: Cache, tmp_path: Path) -> None:
    """The gate between processes would stay locked for as long as somebody keeps the traceback."""

    def still(number: int) -> None:
        elsewhere.set("k", number)  # by an open file of its own, as another process has

    with Cache(f"disk://{tmp_path}?timeout=1", on_engine_error="raise") as elsewhere:
        swept(cache, lambda number: cache.set("k", number), still)


def is_new(thing: object) -> bool:
    """A coroutine that was never begun: Python 3.12 wants to warn of that itself, and has no stack left for it."""
    return inspect.iscoroutine(thing) and inspect.getcoroutinestate(thing) == inspect.CORO_CREATED


# A client that has no stack left to connect with drops its socket as it is; which closes itself, and says so.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@engines_and(["call", "refresh", "many"], ["deadline", "deadline of many"])
def test_a_call_at_the_end_of_the_stack(cache: Cache, other: ThreadPoolExecutor, verb: str) -> None:
    """A RecursionError is an ordinary exception, and comes where there is no stack for a `finally` either."""
    verb, limited = verb.removeprefix("deadline").removeprefix(" of ") or "call", verb.startswith("deadline")
    function = cache.cached(deadline=LONGER if limited else None)(lambda number: number)
    act = verb_of(function, verb)

    def deep(frames: int, number: int) -> Any:
        return deep(frames - 1, number) if frames else act(number)

    act(-1)
    errors, limit, depth = 0, sys.getrecursionlimit(), len(inspect.stack())
    untold: list[Any] = []  # by finalizers, which can't raise
    hook, sys.unraisablehook = sys.unraisablehook, untold.append  # pytest's own has no stack left to note it with
    try:
        sys.setrecursionlimit(depth + 150)
        for frames in range(150):
            try:
                deep(frames, frames)
            except (RecursionError, EngineError):
                errors += 1
            assert other.submit(function, frames).result(LONG) == frames
    finally:
        sys.setrecursionlimit(limit)
        sys.unraisablehook = hook
        said.update(each.object for each in untold if is_new(each.object))
    assert errors > 10
    # A `__del__` that came no further than its own frame had no stack at all, which is Python's to tell.
    told = [each for each in untold if getattr(each.exc_traceback, "tb_next", None) and not is_new(each.object)]
    assert not [(each.object, each.exc_value) for each in told]
    nothing_is_left(cache)


@engines_and(["call"], ["deadline", "loader", "loader with a deadline"])
@thrown_in
def test_a_task_that_is_interrupted(cache: Cache, other: ThreadPoolExecutor, verb: str) -> None:
    """The same for a caller that suspends, and its computation, which is a task of its own."""
    terms: Any = {"deadline": LONGER} if "deadline" in verb else {}

    @cache.cached(**terms)
    async def function(number: int) -> int:
        await asyncio.sleep(0)
        return number

    @cache.cached.many(**terms)
    async def loader(numbers: list[int]) -> dict[int, int]:
        await asyncio.sleep(0)
        return {number: number for number in numbers}

    async def call(number: int) -> int:
        return (await loader([number, -number - 1000]))[number] if "loader" in verb else await function(number)

    def still(number: int) -> None:
        assert runner.run(asyncio.wait_for(call(number), LONG)) == number
        runner.run(asyncio.wait_for(landed(), LONG))
        nothing_is_left(cache)

    async def landed() -> None:
        while flying(cache):  # a computation whose caller was interrupted goes on while its loop runs
            await asyncio.sleep(0.001)

    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda *_: None)
        runner.run(call(-1))
        swept(cache, lambda number: runner.run(call(number)), still, loses=True)


@pytest.mark.parametrize("verb", ["claim", "acquire"])
@pytest.mark.parametrize("cache", ["disk://{}"], indirect=True)
def test_what_a_thread_does_for_a_task_that_was_interrupted(cache: Cache, verb: str) -> None:
    """A lease that was granted behind its giving back would lock the key for as long as it lasts."""
    engine: Any = cache.engine
    rows, took, go_on = engine._rows, Event(), Event()
    port = engine.aclaims if verb == "claim" else engine.alocks
    take, terms = getattr(rows, verb), Ask(60) if verb == "claim" else 60

    def late(*args: Any) -> Any:
        go_on.wait(LONG)
        reply = take(*args)
        took.set()
        return reply

    async def main() -> None:
        setattr(rows, verb, late)
        work = getattr(port, verb)("k", b"interrupted", terms)
        work.send(None)
        with pytest.raises(Interrupt):
            work.throw(Interrupt())
        await (port.abandon if verb == "claim" else port.release)("k", b"interrupted")
        go_on.set()
        took.wait(LONG)
        while not isinstance(await getattr(port, verb)("k", b"later", terms), Granted):
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), LONG))


def test_a_task_factory_that_fails(cache: Cache) -> None:
    """Its flight and lease would lock the key, for ever and for a lease, as nobody has begun to compute."""
    fails: list[bool] = []

    @cache.cached
    async def function(number: int) -> int:
        return number

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        if fails and fails.pop():
            raise MemoryError
        return asyncio.Task(work, loop=loop, **options)

    async def main() -> None:
        await function(0)
        asyncio.get_running_loop().set_task_factory(factory)
        for number in range(1, 10):
            fails[:] = [True] + [False] * (number - 1)
            with suppress(MemoryError):
                await function(number)
            fails.clear()
            assert await asyncio.wait_for(function(number), LONG) == number

    asyncio.run(main())
    nothing_is_left(cache)


def test_where_no_asyncio_loop_runs(cache: Cache) -> None:
    """A call under trio would claim, find that it can't suspend, and leave the key locked."""
    with pytest.raises(RuntimeError, match="no asyncio loop"):
        trio.run(cache.aget_or_compute, "k", lambda: "value")
    assert cache.get_or_compute("k", lambda: "value") == "value"
    nothing_is_left(cache)
