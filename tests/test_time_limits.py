"""A worker's time limit, thrown in by a signal's handler, comes out of the call as itself, and says nothing of it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from types import MethodType
from typing import Any

import pytest
from herd import Origin, until

from stampede import Cache, events
from stampede.codec.pickled import Pickled
from stampede.codec.sealed import Sealed
from stampede.codec.structured import Structured
from stampede.interruptions import pass_on, thrown_in

# A coroutine that was made, and never begun, says so.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

LONG = 5  # seconds
VALUE = {"numbers": [*range(10)], "words": [str(number) for number in range(10)]}
CODECS: dict[str, dict[str, Any]] = {
    "sealed": {},
    "signed": {"signing_key": "k", "compress": 1000},
    "msgpack": {"codec": "msgpack"},
    "json": {"codec": "json"},
    "pickle": {"codec": "pickle", "signing_key": "k"},
}


class Limit(Exception):
    """As SoftTimeLimitExceeded, JobTimeoutException."""


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """An alarm is the end of a worker's time."""

    def ends(signum: int, frame: object) -> None:
        raise Limit

    before = signal.signal(signal.SIGALRM, ends)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """Another thread, which no signal reaches."""
    with ThreadPoolExecutor(1) as other:
        yield other


@pytest.fixture(params=["memory://?codec=sealed", "disk://{}"], ids=["memory", "disk"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.param).format(tmp_path)


codecs = pytest.mark.parametrize(
    "url, codec",
    [("memory://?codec=sealed", codec) for codec in CODECS] + [("disk://{}", "sealed")],
    ids=[*CODECS, "disk"],
    indirect=["url"],
)


def now() -> None:
    """The time is over in this very moment: in the main thread."""
    if current_thread() is main_thread():
        signal.raise_signal(signal.SIGALRM)


class Ring:
    """Rings once, where it is asked to."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self) -> None:
        if self.armed:
            self.armed = False
            now()

    def rings(self, act: Callable[[], object]) -> None:
        """The limit comes out of it."""
        self.armed = True
        with pytest.raises(Limit):
            act()
        assert not self.armed


@pytest.fixture(params=["before", "behind"])
def ring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ring:
    """Rings around the codecs' work: in the middle of C code nobody is told of a signal."""
    ring = Ring()

    def ringing(work: Callable[..., Any]) -> Callable[..., Any]:
        def rings(*args: Any) -> Any:
            if request.param == "before":
                ring()
            done = work(*args)
            ring()
            return done

        return rings

    for body in (Sealed, Structured, Pickled):
        for name in ("dump", "load"):
            monkeypatch.setattr(body, name, ringing(getattr(body, name)))
    return ring


@codecs
@pytest.mark.parametrize("verb", ["get", "get_many", "peek", "hit", "many"])
def test_while_a_value_is_read(url: str, codec: str, verb: str, ring: Ring) -> None:
    """A hit would be taken for damaged bytes, and computed anew; and the worker would go on beyond its time."""
    told: list[events.Event] = []
    computed = 0

    def function(number: int) -> dict[str, Any]:
        nonlocal computed
        computed += 1
        return VALUE

    with Cache(url, early=0, **CODECS[codec], observers=[told.append]) as cache:
        cached = cache.cached(function)
        cache.set("k", VALUE)
        act: Callable[[], Any] = {
            "get": lambda: cache.get("k"),
            "get_many": lambda: cache.get_many(["k"]),
            "peek": lambda: cached.peek(1),
            "hit": lambda: cached(1),
            "many": lambda: cached.many([(1,)]),
        }[verb]
        cached(1)
        ring.rings(act)
        assert cache.get("k") == cached(1) == VALUE
    assert computed == 1
    assert not [event for event in told if isinstance(event, (events.BadBytes, events.Failed, events.Unkept))]


@codecs
@pytest.mark.parametrize("verb", ["set", "miss", "refresh", "many"])
def test_while_a_value_is_written(url: str, codec: str, verb: str, ring: Ring, other: ThreadPoolExecutor) -> None:
    """It would be given out and never kept, or be refused as one that can't be stored; and the worker would go on."""
    told: list[events.Event] = []
    with Cache(url, early=0, lease=60, **CODECS[codec], observers=[told.append]) as cache:

        @cache.cached
        def function(number: int) -> dict[str, Any]:
            return VALUE

        act: Callable[[], Any] = {
            "set": lambda: function.set(VALUE, 1),
            "miss": lambda: function(1),
            "refresh": lambda: function.refresh(1),
            "many": lambda: function.many([(1,), (2,)]),
        }[verb]
        ring.rings(act)
        assert other.submit(function.many, [(1,), (2,)]).result(LONG) == [VALUE] * 2  # or something was left
        assert function(1) == VALUE
    assert not [event for event in told if isinstance(event, (events.BadBytes, events.Failed, events.Unkept))]


@pytest.mark.parametrize("verb", ["get", "hit", "miss", "set"])
def test_a_task(url: str, verb: str, ring: Ring) -> None:
    """The same of callers that suspend."""

    async def asked() -> Any:
        return await act()

    with Cache(url, early=0, lease=60) as cache, asyncio.Runner() as runner:

        @cache.cached
        async def function(number: int) -> dict[str, Any]:
            return VALUE

        act: Callable[[], Any] = {
            "get": lambda: cache.aget("k"),
            "hit": lambda: function(0),
            "miss": lambda: function(1),
            "set": lambda: function.set(VALUE, 1),
        }[verb]
        runner.run(cache.aset("k", VALUE))
        runner.run(function(0))
        ring.rings(lambda: runner.run(asked()))
        assert runner.run(asyncio.wait_for(function(1), LONG)) == VALUE  # or something was left
        assert runner.run(cache.aget("k")) == VALUE


def method(self: object, signum: int, frame: object) -> None:
    raise Limit


class Handler:
    def __call__(self, signum: int, frame: object) -> None:
        method(self, signum, frame)


HANDLERS: dict[str, Any] = {
    "function": lambda signum, frame: method(0, signum, frame),
    "method": MethodType(method, 0),
    "partial": partial(method, 0),
    "callable": Handler(),
    "any arguments": lambda *_: method(0, 0, None),
}


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
def test_what_a_handler_raises_is_known(handler: Any) -> None:
    """Whatever kind of handler a framework installs, its exception would be taken for the codec's, or the origin's."""
    signal.signal(signal.SIGALRM, handler)
    with pytest.raises(Limit) as caught:
        now()
    assert thrown_in(caught.value)


def test_who_is_handed_a_frame_may_fail_for_itself() -> None:
    """A function that tells of itself would never be known to fail: each caller would compute it anew."""

    def told(frame: object, context: int = 1) -> None:
        raise OSError("could not get source code")

    for call in (lambda: told(sys._getframe()), lambda: told(sys._getframe(), 5)):
        with pytest.raises(OSError) as caught:
            call()
        assert not thrown_in(caught.value)


def test_what_was_made_of_it_is_not_raised() -> None:
    """Clients make their own error of a TimeoutError: a server would be called hung, as our time is over."""

    def client() -> None:
        try:
            now()
        except Limit:
            raise OSError("no reply")  # noqa: B904  as such clients do

    def edge() -> None:
        try:
            client()
        except OSError as error:
            pass_on(error)

    with pytest.raises(Limit) as caught:
        edge()
    assert caught.value.__context__ is None


def test_one_that_is_being_handled_is_over() -> None:
    """Who tidies up after its time limit would be interrupted by it again, at each error that concerns nobody."""

    def failing(event: events.Event) -> None:
        raise ValueError

    with Cache("memory://?codec=sealed", early=0, observers=[failing]) as cache:
        try:
            now()
        except Limit:
            assert cache.get_or_compute("k", lambda: alarm) is alarm  # which the codec refuses
        else:
            raise AssertionError


@pytest.mark.parametrize("error", [Limit, TimeoutError])
@pytest.mark.parametrize("at", ["once", "many"])
def test_a_computation_that_runs_out_of_time(error: type[Exception], at: str) -> None:
    """A stale value would be served in place of the worker's own exception, or that be kept as the function's answer;
    and the others, whose time is not over, would be given it."""
    told: list[events.Event] = []
    limits: list[bool] = []

    def ends(signum: int, frame: object) -> None:
        raise error

    def function() -> int:
        if limits:
            limits.clear()
            now()
        return 1

    with Cache("memory://", stale=60, early=0, retry_after=60, raises=Exception, observers=[told.append]) as cache:
        signal.signal(signal.SIGALRM, ends)
        assert cache.get_or_compute("k", function) == 1
        cache.expire("k")
        limits.append(True)
        with pytest.raises(error):
            cache.get_or_compute("k", function) if at == "once" else cache.get_or_compute_many(
                ["k", "other"], lambda names: dict.fromkeys(names, function())
            )
        told.clear()
        assert cache.get_or_compute("k", function) == 1
        assert [type(event) for event in told] == [events.Computed]


def test_who_follows_is_not_out_of_time(other: ThreadPoolExecutor) -> None:
    """A thread that waits for the worker's computation would end with the worker's time limit."""
    origin = Origin(open=True)

    def function() -> int:
        if current_thread() is main_thread():
            follower.append(other.submit(cache.get_or_compute, "k", origin))
            until(lambda: any(each.callers == 2 for each in list(cache._core.flights._flights.values())))
            now()
        return 0

    follower: list[Any] = []
    with Cache("memory://", early=0) as cache:
        with pytest.raises(Limit):
            cache.get_or_compute("k", function)
        assert follower[0].result(LONG) == 1


def test_in_an_observer() -> None:
    """It would be logged as the observer's error, and the worker go on."""
    ring = Ring()
    with Cache("memory://", observers=[lambda event: ring()]) as cache:
        ring.rings(lambda: cache.get_or_compute("k", lambda: 1))
        assert cache.get_or_compute("k", lambda: 2) in (1, 2)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_in_an_object_s_own_key(colour: str) -> None:
    """The generated hit would take it for a key that can't be had, and go the long way to the value."""
    ring, cache = Ring(), Cache("memory://", early=0)

    class Shop:
        def __stampede_key__(self) -> int:
            ring()
            return 1

        @cache.cached
        def price(self) -> int:
            return 1

        @cache.cached
        async def aprice(self) -> int:
            return 1

    with asyncio.Runner() as runner:
        shop = Shop()
        act = shop.price if colour == "sync" else lambda: runner.run(shop.aprice())
        for _ in range(3):
            assert act() == 1
            ring.rings(act)


@pytest.mark.parametrize("part", ["__init__", "__str__"])
def test_in_an_error_of_the_function_s(part: str) -> None:
    """It would be taken for an error that can't be kept, or has no message."""
    ring = Ring()

    class Failure(Exception):
        pass

    def rings(self: Failure, *args: object) -> str | None:
        ring()
        return None if part == "__init__" else "it failed"

    def fail() -> int:
        error = Failure("it failed")
        ring.armed = True
        raise error

    setattr(Failure, part, rings)
    with Cache("memory://?codec=sealed", early=0, raises=Failure if part == "__init__" else ()) as cache:
        with pytest.raises(Limit):
            cache.get_or_compute("k", fail)
        assert cache.get_or_compute("k", lambda: 1) == 1
