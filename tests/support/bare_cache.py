"""A minimal cache, and helpers for tests with threads: calls, gates, rooms."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from stampede.algorithm.call import Call, Resources
from stampede.algorithm.fill import fill
from stampede.algorithm.finish import quietly
from stampede.algorithm.flight import Flights
from stampede.engines.memory import MemoryEngine
from stampede.events import Event
from stampede.leases.keeper import Hold, keeper
from stampede.model.ports import Ask, Granted
from stampede.model.result import Result
from stampede.runtime.colour import BLOCKING, SUSPENDING, run_blocking, running_loop
from stampede.settings.options import Policy

PLAIN = Policy(early=0.0)
LONG = 10.0  # seconds after which a test is given up; nothing waits so long


class World:
    """A minimal cache: an engine, flights, and calls from blocking and async code."""

    def __init__(self) -> None:
        self.engine = MemoryEngine(100)
        self.flights = Flights()
        self.told: list[Event] = []

    def call(self, key: str, origin: Callable[[], Any], policy: Policy, *, suspending: bool, **terms: Any) -> Call:
        draws = terms.pop("draws", False)
        side = self.engine.suspending if suspending else self.engine.blocking
        resources = Resources(
            scope="", port=side.claims, flights=self.flights,
            colour=SUSPENDING if suspending else BLOCKING, clock=time.monotonic, hold=self._hold,
            note=lambda kind, *what: self.told.append(kind(*what)), keep=_kept_nowhere, draws=draws,
            give_back=self._give_back,
        )  # fmt: skip
        loop = running_loop() if suspending else None
        beside = terms.pop("beside", None)
        call = Call(key, key, origin, policy, resources, loop, time.monotonic(), **terms)
        call.background = beside
        return call

    def _give_back(self, key: str, token: bytes) -> None:
        run_blocking(quietly(self.engine.blocking.claims.abandon, key, token))

    def _hold(self, call: Call, max_hold: float) -> Hold:
        loop = call.loop
        return Hold(
            keeper, self.engine.blocking.claims, call.key, call.token, call.policy.lease, max_hold,
            lambda: self._give_back(call.key, call.token), None if loop is None else lambda: not loop.is_closed(),
        )  # fmt: skip

    def ask(self, origin: Callable[[], Any], key: str = "k", policy: Policy = PLAIN, **terms: Any) -> Any:
        return value(run_blocking(answered(self.call(key, origin, policy, suspending=False, **terms))))

    async def aask(self, origin: Callable[[], Any], key: str = "k", policy: Policy = PLAIN, **terms: Any) -> Any:
        return value(await answered(self.call(key, origin, policy, suspending=True, **terms)))

    def invalidate(self, key: str = "k") -> None:
        run_blocking(self.engine.blocking.store.invalidate(key))
        self.flights.detach(key)

    @property
    def leased(self) -> bool:
        """Return whether there is a valid lease of the key "k"."""
        reply = run_blocking(self.engine.blocking.claims.claim("k", b"the test", Ask(1.0, force=False)))
        run_blocking(self.engine.blocking.claims.abandon("k", b"the test"))
        return not isinstance(reply, Granted)

    def followers(self, number: int, key: str = "k") -> None:
        """Wait until so many callers follow the key's flight."""
        until(lambda: (flight := self.flights._flights.get(key)) is not None and flight.callers > number)


async def _kept_nowhere(ends: list[tuple[Call, Result]]) -> None: ...


def answered(call: Call) -> Coroutine[Any, Any, Result]:
    """Return the coroutine that answers the call."""
    work = fill(call)
    call.answered_by(work)
    return work


def value(result: Result) -> Any:
    if result.error is not None:
        raise result.error
    assert result.entry is not None
    return result.entry.value


def until(true: Callable[[], bool]) -> None:
    """Wait until this is true. Nothing reports that a thread has begun to wait, so look again and again."""
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


class Gate:
    """An origin that reports when it has begun, and returns when the gate is opened. It counts its calls."""

    def __init__(self, result: Any = "value") -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.result = result
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        self.begun.set()
        assert self.open.wait(LONG)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    async def suspending(self) -> Any:
        self.calls += 1
        self.begun.set()
        end = time.monotonic() + LONG
        while not self.open.is_set():
            assert time.monotonic() < end
            await asyncio.sleep(0.001)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class Room:
    """Threads for the callers of one test."""

    def __enter__(self) -> Room:
        self._threads = ThreadPoolExecutor(16)
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown()

    def run(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._threads.submit(function, *args)

    def loop(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        return self._threads.submit(lambda: asyncio.run(main()))


def never() -> Any:
    raise AssertionError("a second computation")
