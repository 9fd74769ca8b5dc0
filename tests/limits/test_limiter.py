"""`Limiter` and `limited`, in both colours, over engines that need no server."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from herd import until, until_async
from watched_limits import Watched, pairwise_by

from stampede import Cache, EngineError, Limiter, LimitTimeout, OptionError, limited
from stampede.engines import open_engine
from stampede.engines.memory import MemoryEngine
from stampede.limits import limiter as limiters
from stampede.model.ports import Booked, Engine, Rate
from stampede.runtime.colour import BLOCKING, SUSPENDING
from stampede.testing import FakeClock, isolated


def lead(limiter: Limiter, port: Any) -> None:
    """Make a limiter use these limits, in both colours."""
    limiter._blocking, limiter._suspending = limiters.LimitsSide(BLOCKING, port), limiters.LimitsSide(SUSPENDING, port)


def in_a_loop(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


@pytest.fixture(params=["memory", "file", "disk"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    engine = open_engine("memory://" if request.param == "memory" else f"{request.param}://{tmp_path}")
    yield engine
    engine.close()


def limiter(engine: Engine, name: str = "github", max: int = 2, per: Any = 60, **options: Any) -> Limiter:
    return Limiter(name, max=max, per=per, on=engine, **options)


def test_so_many_start_and_the_next_is_told_how_long(engine: Engine) -> None:
    """`max` callers may start. The next one learns how many seconds it has to wait."""
    ours, other = limiter(engine, wait="100ms"), limiter(engine, "gitlab")
    assert ours.ready_in() == 0.0
    assert ours.acquire(cost=2)
    assert not ours.try_acquire()
    assert not ours.acquire(wait=1)
    assert 55 < ours.ready_in() <= 61.2
    with pytest.raises(LimitTimeout, match=r"'github' allows 2 per 60 s, and wait ran out: 0.1 s") as told, ours:
        raise AssertionError("it was let in")
    assert 55 < told.value.seconds <= 61.2
    assert isinstance(told.value, TimeoutError)
    assert ours.used()[:3] == (Rate(2, 60.0), 2, 0)
    assert other.try_acquire()


@in_a_loop
async def test_the_same_of_its_twins(engine: Engine) -> None:
    """The async methods use the same limit as the blocking ones."""
    ours = limiter(engine, wait=0.1)
    assert await ours.aacquire() and ours.try_acquire()
    assert not await ours.atry_acquire()
    assert 55 < await ours.aready_in() <= 61.2
    with pytest.raises(LimitTimeout):
        async with ours:
            raise AssertionError("it was let in")
    await ours.apenalize(600)
    assert (await ours.aused()).penalized > 590 and ours.ready_in() > 590


def test_who_waits_starts_as_soon_as_it_may(engine: Engine) -> None:
    """Waiters start as soon as they may, without polling. No window contains more than `max` starts."""
    ours, began = limiter(engine, max=3, per=0.05), time.monotonic()
    starts = Watched(ours).starts
    for _ in range(30):
        with ours:
            pass
    assert len(starts) == 30
    assert all(late - early > 50_000 for early, late in pairwise_by(3, starts))
    assert time.monotonic() - began < 5.0


@in_a_loop
async def test_decorated_functions_of_both_colours_share_the_limit_of_their_name() -> None:
    """Plain and async functions that are decorated with one limit name share that limit."""
    with isolated():
        cache = Cache("memory://")

        @limited("api", max=3, per=60, wait=0, on=cache)
        def plain(number: int) -> int:
            return number

        @limited("api", max=3, per=60, wait=0, on=cache, cost=2)
        async def awaited(number: int) -> int:
            return number

        assert plain(1) == 1 and await awaited(2) == 2
        assert plain.__name__ == "plain" and asyncio.iscoroutinefunction(awaited)
        with pytest.raises(LimitTimeout):
            plain(3)
        with pytest.raises(LimitTimeout):
            await awaited(4)
        assert not cache.limiter("api", max=3, per=60).try_acquire()
        with pytest.raises(OptionError, match="generator"):
            limited("api", max=3, per=60)(lambda: (yield))  # type: ignore[misc]
        with pytest.raises(OptionError, match="generator"):
            limited("api", max=3, per=60)(functools.partial(lambda: (yield)))  # type: ignore[misc]
        with pytest.raises(OptionError, match="below @staticmethod"):
            limited("api", max=3, per=60)(staticmethod(len))  # type: ignore[arg-type]


@in_a_loop
async def test_a_caller_that_is_cancelled_gives_its_start_back(engine: Engine) -> None:
    """A cancelled caller gives back its start. Otherwise later callers would wait for it."""
    ours = limiter(engine, max=1)
    assert ours.try_acquire()
    waiting = asyncio.create_task(ours.aacquire())
    await until_async(lambda: ours.used().ahead)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await ours.aused()).ahead == 0
    assert await ours.aready_in() < 61.2


def test_a_penalty_is_heard_by_who_sleeps(engine: Engine) -> None:
    """A penalty also holds for callers that have booked and sleep. Otherwise they would ignore a Retry-After."""
    ours, answers = limiter(engine, max=1, per=4), []
    assert ours.try_acquire()
    sleeper = Thread(target=lambda: answers.append(ours.acquire(wait=600)))
    sleeper.start()
    until(lambda: ours.used().ahead)
    ours.penalize("1h")
    sleeper.join(10)
    assert answers == [False]
    assert ours.used().ahead == 0


class _Down:
    async def take(self, *asked: object) -> Booked:
        raise EngineError("it is down")


def test_an_engine_that_is_down_lets_nobody_start_unless_that_is_wanted(engine: Engine) -> None:
    """While the engine is down, no caller may start. With when_down="allow", each process keeps the limit by itself."""
    strict, open_ = limiter(engine), limiter(engine, when_down="allow")
    for each in strict, open_:
        lead(each, _Down())
    with pytest.raises(EngineError):
        strict.try_acquire()
    assert [open_.try_acquire() for _ in range(3)] == [True, True, False]


def test_a_start_that_nobody_disputes_is_one_question_however_far_the_engine_is(engine: Engine) -> None:
    """A free start takes one request, even if the reply takes longer than a start may be late."""
    ours = limiter(engine, max=2, per=0.5)
    limits = Watched(ours, away=0.03)
    assert ours.acquire(wait=30) and ours.try_acquire()
    assert limits.asked == 2
    assert ours.acquire(wait=30)  # a waiter asks again when its start is due, once or twice
    assert limits.asked <= 5


@in_a_loop
async def test_who_wakes_late_keeps_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that wakes late keeps its turn. It does not go behind callers that came later."""
    clock, order = FakeClock(), list[int]()
    monkeypatch.setattr(limiters, "monotonic", clock)
    ours = limiter(MemoryEngine(clock=clock), max=2, per=0.3)
    assert ours.acquire(cost=2)

    async def start(number: int) -> None:
        await ours.aacquire()
        order.append(number)

    tasks = list[asyncio.Task[None]]()
    for number in range(4):
        tasks.append(asyncio.create_task(start(number)))
        await until_async(lambda: ours.used().ahead == number + 1)
    clock.advance(0.35)  # they sleep for 0.3 or 0.6 seconds of real time, and the next two are late then
    await until_async(lambda: len(order) == 2)
    clock.advance(0.35)
    await asyncio.gather(*tasks)
    assert [sorted(order[:2]), sorted(order[2:])] == [[0, 1], [2, 3]]


@in_a_loop
async def test_who_waits_moves_up_when_others_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """If waiters are cancelled, those behind them move up."""
    clock, tasks = FakeClock(), list[asyncio.Task[bool]]()
    monkeypatch.setattr(limiters, "monotonic", clock)
    ours = limiter(MemoryEngine(clock=clock), max=1, per=0.4)
    await ours.aacquire()
    for number in range(4):
        tasks.append(asyncio.create_task(ours.aacquire()))
        await until_async(lambda: ours.used().ahead == number + 1)
    for gone in tasks[:3]:
        gone.cancel()
    await asyncio.gather(*tasks[:3], return_exceptions=True)
    await until_async(lambda: ours.ready_in() > 0.5)  # the next start is the fourth's, and is not free any more
    clock.advance(0.5)
    assert await tasks[3]


class _Hung(_Down):
    """Limits of an engine that hangs until its client's time-out. The simulated clock advances by that at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        self.asked = self.given_back = 0
        self.answers: list[Booked] = []
        self.timeout = 1.0
        monkeypatch.setattr(limiters, "monotonic", lambda: self.now)

    async def take(self, *asked: object) -> Booked:
        self.asked += 1
        if self.answers:
            return self.answers.pop(0)
        self.now += self.timeout
        return await super().take(*asked)

    async def give_back(self, *asked: object) -> None:
        self.given_back += 1


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> _Hung:
    return _Hung(monkeypatch)


def hangs(limiter: Limiter, hung: _Hung) -> Limiter:
    lead(limiter, hung)
    return limiter


def test_an_engine_that_hangs_costs_one_caller_a_second_its_time_out(engine: Engine, hung: _Hung) -> None:
    """While an engine hangs, one caller a second waits for it. Others fail, or start if the options allow, at once."""
    strict, open_ = hangs(limiter(engine), hung), hangs(limiter(engine, "other", when_down="allow"), hung)
    with pytest.raises(EngineError, match="it is down"):
        strict.try_acquire()
    for verb in strict.try_acquire, strict.ready_in, lambda: asyncio.run(strict.aacquire()):
        with pytest.raises(EngineError, match="did not answer a moment ago"):
            verb()
    assert open_.try_acquire() and asyncio.run(open_.atry_acquire())
    assert hung.asked == 1
    hung.now += 1.0
    assert not open_.try_acquire() and not open_.try_acquire()
    assert hung.asked == 2
    hung.now += 1.0
    hung.answers = [Booked(0.0, True, 1)] * 2
    assert strict.try_acquire() and strict.try_acquire()


def test_an_error_that_comes_at_once_keeps_nobody_from_asking(engine: Engine, hung: _Hung) -> None:
    """After an error that comes quickly, such as a connection reset, the next caller asks the engine again."""
    ours, hung.timeout = hangs(limiter(engine), hung), 0.01
    with pytest.raises(EngineError):
        ours.try_acquire()
    hung.answers = [Booked(0.0, True, 1)]
    assert ours.try_acquire()


def test_an_engine_that_hangs_is_not_asked_to_take_a_booking_back(engine: Engine, hung: _Hung) -> None:
    """A caller that waited for one time-out does not wait for another one to give back its booking."""
    ours, hung.answers = hangs(limiter(engine), hung), [Booked(0.001, True, 1)]
    with pytest.raises(EngineError):
        ours.acquire()
    assert (hung.asked, hung.given_back) == (2, 0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Limiter("", max=1, per=1), "the name of a limit is ''"),
        (lambda: Limiter("x", max=0, per=1), "max is 0"),
        (lambda: Limiter("x", max=1, per=0), "per is 0"),
        (lambda: Limiter("x", max=1, per=1, when_down="open"), "when_down is 'open'"),
        (lambda: Limiter("x", max=1, per=1).try_acquire(2), "cost is 2: it can never start, as max is 1"),
        (lambda: limited("x", max=1, per=1, cost=0), "cost is 0"),
        (lambda: Limiter("x", max=1, per=1).penalize(None), "seconds is None: .* finite"),
        (lambda: Limiter("x", max=1, per=1).penalize("forever"), "seconds is 'forever': .* finite"),
    ],
)
def test_what_can_not_be_is_refused(make: Callable[[], object], message: str) -> None:
    """Invalid options are refused. Otherwise they would make a limit that the user does not want."""
    with pytest.raises(OptionError, match=message):
        make()
