"""A worker's time limit that comes inside the user's function is an error of its caller, not of the origin."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import current_thread, main_thread
from typing import Any

import pytest
from herd import Origin, until

from stampede import Cache, events
from stampede.algorithm.finish import TIME_LIMITS

LONG = 5  # seconds


def limit_of(module: str, name: str) -> type[Exception]:
    """Return a time limit as a framework defines it. The module of its class, or of a base class, identifies it."""
    declared = type(name, (Exception,), {"__module__": module})
    return type("Mine", (declared,), {})


@pytest.fixture(params=sorted(TIME_LIMITS), ids=".".join)
def limit(request: pytest.FixtureRequest) -> Iterator[type[Exception]]:
    """The exception that the handler of an alarm raises."""
    kind = limit_of(*request.param)

    def ends(signum: int, frame: object) -> None:
        raise kind

    before = signal.signal(signal.SIGALRM, ends)
    yield kind
    signal.signal(signal.SIGALRM, before)


def now() -> None:
    """End the time limit at this moment, if this is the main thread."""
    if current_thread() is main_thread():
        signal.raise_signal(signal.SIGALRM)


def test_the_declared_names_are_those_of_the_frameworks() -> None:
    """The declared time limits exist in their frameworks. A renamed one would count as a failure of the origin."""
    rq = pytest.importorskip("rq.timeouts")
    assert (rq.JobTimeoutException.__mro__[1].__module__, rq.JobTimeoutException.__mro__[1].__qualname__) in TIME_LIMITS
    billiard = pytest.importorskip("billiard.exceptions")
    assert (billiard.__name__, billiard.SoftTimeLimitExceeded.__qualname__) in TIME_LIMITS


@pytest.mark.parametrize("at", ["once", "many"])
def test_a_computation_that_runs_out_of_time(limit: type[Exception], at: str) -> None:
    """If a time limit ends a computation, its caller gets the limit's exception, and not a stale value. The exception
    is not stored, and other callers can compute the key at once."""
    told: list[events.Event] = []
    ends: list[bool] = []

    def function() -> int:
        if ends:
            ends.clear()
            now()
        return 1

    with Cache("memory://", stale=60, early=0, retry_after=60, raises=Exception, observers=[told.append]) as cache:
        assert cache.get_or_compute("k", function) == 1
        cache.expire("k")
        ends.append(True)
        with pytest.raises(limit):
            cache.get_or_compute("k", function) if at == "once" else cache.get_or_compute_many(
                ["k", "other"], lambda names: dict.fromkeys(names, function())
            )
        told.clear()
        assert cache.get_or_compute("k", function) == 1
        assert [type(event) for event in told] == [events.Computed]


def test_a_follower_is_not_out_of_time(limit: type[Exception]) -> None:
    """A thread that waits for a worker's computation does not get the worker's time limit. It computes instead."""
    origin = Origin(open=True)

    def function() -> int:
        if current_thread() is main_thread():
            follower.append(other.submit(cache.get_or_compute, "k", origin))
            until(lambda: any(each.callers == 2 for each in list(cache._core.flights._flights.values())))
            now()
        return 0

    follower: list[Any] = []
    with Cache("memory://", early=0) as cache, ThreadPoolExecutor(1) as other:
        with pytest.raises(limit):
            cache.get_or_compute("k", function)
        assert follower[0].result(LONG) == 1


@pytest.mark.parametrize("error", [TimeoutError, OSError, ValueError])
def test_any_other_exception_is_the_function_s(error: type[Exception]) -> None:
    """Any other exception, of a handler or the function, is a failure: a stale value is served instead."""

    def ends(signum: int, frame: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, ends)
    try:
        with Cache("memory://", stale=60, early=0) as cache:
            cache.set("k", "kept")
            cache.expire("k")
            assert cache.get_or_compute("k", now) == "kept"
            with pytest.raises(error):
                cache.get_or_compute("other", now)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_of_the_function_is_the_caller_s(error: type[BaseException]) -> None:
    """Ctrl-C reaches its caller. No stale value is served instead, and other callers can compute at once."""

    def interrupted() -> Any:
        raise error

    with Cache("memory://", stale=60, early=0, retry_after=60) as cache:
        cache.set("k", "kept")
        cache.expire("k")
        act: Callable[[], Any] = lambda: cache.get_or_compute("k", interrupted)  # noqa: E731
        with pytest.raises(error):
            act()
        assert cache.get_or_compute("k", lambda: "new") == "new"
