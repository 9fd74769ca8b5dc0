"""A worker's time limit that is thrown into what an event loop does for many: it is one caller's, and no outage."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

import pytest
import uvloop
from interrupting import Interrupt, interrupted, points_of
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import shared_redis

from stampede import Cache, events
from stampede.colour import run_blocking
from stampede.engines import open_engine
from stampede.interruptions import thrown_in
from stampede.stalls import unhurried

pytestmark = [
    # A coroutine that was made, and never begun, says so.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    # What is thrown into a finalizer, or a callback of a weak reference, can't be raised anywhere.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LONG = 5  # seconds
AT_MOST = 30  # moments of one sweep
SERVERS: dict[str, Callable[[], str]] = {
    "redis": lambda: shared_redis().url,
    "memcached": lambda: shared_memcached().url,
    "postgres": lambda: prepared_postgres().postgres_url,
}

engines = pytest.mark.parametrize("engine", SERVERS)
loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@pytest.fixture
def limit() -> Iterator[Callable[[type[Exception]], None]]:
    """The time is over in this very moment, and the handler raises this."""

    def ends(signum: int, frame: object) -> None:
        raise error[0]

    def now(kind: type[Exception]) -> None:
        error[:] = [kind]
        if current_thread() is not main_thread():
            raise ConnectionError
        signal.raise_signal(signal.SIGALRM)

    error: list[type[Exception]] = []
    before = signal.signal(signal.SIGALRM, ends)
    yield now
    signal.signal(signal.SIGALRM, before)


class World:
    """A cache, and what it and its loops tell."""

    def __init__(self, engine: str, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.told: list[events.Event] = []
        self.logged: list[BaseException | None] = []
        self._new_loop = new_loop
        self.cache = Cache(SERVERS[engine](), early=0, observers=[self.told.append], on_engine_error="raise")

    def call(self, number: int) -> Any:
        """In a loop of its own, which connects."""

        async def main() -> Any:
            return await asyncio.wait_for(self.cache.aget_or_compute(f"k{number}", lambda: number), LONG)

        with asyncio.Runner(loop_factory=self._new_loop) as runner:
            runner.get_loop().set_exception_handler(lambda _, context: self.logged.append(context.get("exception")))
            return runner.run(main())

    def is_well(self, number: int) -> None:
        assert not [event for event in self.told if isinstance(event, events.EngineDown)]
        if self.cache.engine.scheme == "memcached":  # a lease that it has just given stands for a second or two
            assert self.cache.get(f"k{number}") in (None, number)
        else:
            assert self.cache.get_or_compute(f"k{number}", lambda: number) == number


def of(module: str, *names: str) -> Callable[[FrameType], bool]:
    """Frames of the loops' side of an engine."""

    def where(frame: FrameType) -> bool:
        code = frame.f_code
        return code.co_filename.endswith(f"engines/{module}.py") and (not names or code.co_name in names)

    return where


PIPES = [
    *[("kit/pipe", name) for name in ("_connect", "_flush", "heard")],
    ("kit/wire", "landed"),
    *[("{}/suspending", name) for name in ("reach", "written", "check")],
]
POSTGRES = [
    *[("{}/suspending", name) for name in ("_connected", "_reach", "_go_on", "ask")],
    *[("{}/piped", name) for name in ("send", "_flush", "_read")],
    *[("{}/talk", name) for name in ("put", "heard", "_rows")],
]


@loops
@pytest.mark.parametrize(
    "engine, module, name",
    [(engine, *each) for engine in SERVERS for each in (POSTGRES if engine == "postgres" else PIPES)],
)
def test_it_comes_out_of_a_call(engine: str, module: str, name: str, new_loop: Any) -> None:
    """A loop only logs what comes out of a callback of its: the worker would go on beyond its time."""
    world = World(engine, new_loop)
    with world.cache:
        world.call(0)
        for number in (1, 2):
            # Not the very first moment, at which the function has not begun to catch anything.
            error = interrupted(partial(world.call, number), 2, where=of(module.format(engine), name))
            assert isinstance(error, Interrupt)
            assert str(error) != "swallowed"
            world.is_well(number)


@loops
@pytest.mark.parametrize(
    "engine, module",
    [
        *product(["redis", "memcached"], ["{}/suspending", "kit/pipe", "kit/wire", "kit/landing", "kit/attendant"]),
        *product(["postgres"], ["{}/suspending", "{}/piped", "{}/talk", "kit/attendant"]),
    ],
)
def test_it_is_no_outage(engine: str, module: str, new_loop: Any) -> None:
    """Whatever a loop does for all would end with one worker's time, and the engine count as down."""
    where = of(module.format(engine))
    points: list[object] = []
    world = World(engine, new_loop)
    with world.cache:
        world.call(-1)
        points_of(partial(world.call, -2), points.append, where)
        assert points
        step = max(1, len(points) // AT_MOST)
        first = 0 if new_loop is asyncio.new_event_loop else step // 2  # the other loop's lie between those
        for number in range(first, len(points), step):
            error = interrupted(partial(world.call, number), number, where=where)
            assert error is None or isinstance(error, Interrupt)
            world.is_well(number)


@engines
def test_while_something_is_sent(engine: str) -> None:
    """That is where most signals come. A connection that is being made would end as if its server had closed it."""

    def where(frame: FrameType) -> bool:
        return frame.f_code.co_name == "write" and frame.f_code.co_filename.endswith("selector_events.py")

    points: list[object] = []
    world = World(engine, asyncio.new_event_loop)
    with world.cache:
        world.call(-1)
        points_of(partial(world.call, -2), points.append, where)
        for number in range(len(points)):
            error = interrupted(partial(world.call, number), number, where=where)
            assert error is None or isinstance(error, Interrupt)
            world.is_well(number)


@loops
def test_what_compiled_code_is_interrupted_by_is_known(new_loop: Any, limit: Any) -> None:
    """Under uvloop nothing that a handler raises would be known: it stands behind frames that Python doesn't have."""
    logged: list[BaseException] = []

    async def main() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(lambda _, context: logged.append(context["exception"]))
        loop.call_soon(signal.raise_signal, signal.SIGALRM)
        loop.call_later(0, done.set)
        await done.wait()

    with pytest.raises(TimeoutError):
        limit(TimeoutError)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert [thrown_in(error) for error in logged] == [True]


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize(
    "url, error", [("redis+sentinel://127.0.0.1:1/s", TimeoutError), ("redis+cluster://127.0.0.1:1", ValueError)]
)
def test_while_the_servers_are_found(
    url: str, error: type[Exception], colour: str, limit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be taken for one server's silence, and the next one be asked, beyond the worker's time."""
    import redis.asyncio.connection
    import redis.connection

    def connects(*_: object) -> Any:
        if tries:
            raise ConnectionError("refused")
        tries.append(True)
        limit(error)

    async def aconnects(*_: object) -> Any:
        connects()

    tries: list[bool] = []

    monkeypatch.setattr(redis.connection.Connection, "_connect", connects)
    monkeypatch.setattr(redis.asyncio.connection.Connection, "_connect", aconnects)
    engine: Any = open_engine(url)
    with pytest.raises(error) as caught:
        run_blocking(engine.claims.get(["k"])) if colour == "sync" else asyncio.run(engine.aclaims.get(["k"]))
    assert thrown_in(caught.value)
    engine.close()


def test_while_it_is_connected_to_once_more(limit: Any) -> None:
    """It would be taken for a server that hangs: the time-out of the first try came out in its place."""
    tries = 0

    async def connect() -> None:
        nonlocal tries
        tries += 1
        if tries == 2:
            limit(TimeoutError)
        await asyncio.sleep(0)
        time.sleep(0.15)  # the loop doesn't run
        await asyncio.sleep(0)
        raise TimeoutError("hung")

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(unhurried(connect, TimeoutError))
    assert tries == 2
    assert thrown_in(caught.value)
