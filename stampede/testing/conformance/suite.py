"""The base of the suites: a new engine for each test, a colour, and time."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import unittest
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Busy, Claims, Engine, Found, Granted, Shows, Side, Store
from stampede.runtime.colour import run_blocking
from stampede.testing.clock import FakeClock

__all__ = [
    "HERD",
    "KEYS",
    "LONG",
    "SOON",
    "VALUES",
    "Beside",
    "KeyedSuite",
    "Suite",
    "is_granted",
    "not_none",
    "require",
    "some",
    "soon",
]

T = TypeVar("T")
Case = Callable[[Any], Coroutine[Any, Any, None]]

LONG = 60.0  # seconds of a lease or a timeout that does not end during a test
SOON = 10.0  # seconds after which a test gives up waiting
HERD = 16

KEYS = [
    "", " ", "a", "A", "a ", " a", "a\n", "a\r\n", "a\tb", "a\x00", "a\x00b", "\x00", "\x7f", "{a}", "}a{", "a:b",
    "a/b", "../a", ".", "..", "a%00", "a%20b", "*", "?", "'", '"', "\\", "é", "e\u0301", "K", "\u212a", "ß", "SS",
    "\U0001f40e", "\ufeff", "\uffff", "k" * 10_000, "k" * 9_999 + "l", "\U0001f40e" * 1_000,
    "\ud800", "\udcff", "\ud83d\udc0e",
]  # fmt: skip
"""Keys that are easily confused or misread. Every str is a valid key, also one with a lone surrogate."""

VALUES = [b"", b"\x00", b"0", b"END\r\n", b"\r\n", bytes(range(256)), "é".encode(), b"\xff" * 3, b"x" * 1_000_000]


class Suite:
    """The base class of the suites. A test is a coroutine, which runs in the suite's colour."""

    suspending: ClassVar[bool] = False
    short: ClassVar[float] = 0.2  # the shortest useful lease of the engine, in seconds
    slack: ClassVar[float] = 0.0  # seconds by which leases may end late: some servers have coarse clocks
    largest: ClassVar[int | None] = None  # longest value in bytes, if the engine can't store a megabyte
    clock: FakeClock | None = None  # the clock of the engine, if `make_engine` gave it one

    engine: Engine
    peer: Engine

    def make_engine(self) -> Engine:
        """Return a new, empty engine."""
        raise NotImplementedError

    def make_peer(self, engine: Engine) -> Engine:
        """Return another client of the same store, as another process would have; or the engine itself."""
        return engine

    def drop_engine(self, engine: Engine) -> None:
        """Close an engine that `make_engine` or `make_peer` returned."""
        engine.close()

    def __init_subclass__(cls, **terms: Any) -> None:
        super().__init_subclass__(**terms)
        for name, case in list(vars(cls).items()):
            if name.startswith("test_") and inspect.iscoroutinefunction(case):
                setattr(cls, name, _as_test(case))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make an engine and its peer for one test, and drop them at the end."""
        self.engine = self.make_engine()
        try:
            self.peer = self.make_peer(self.engine)
            try:
                yield
            finally:
                if self.peer is not self.engine:
                    self.drop_engine(self.peer)
        finally:
            self.drop_engine(self.engine)
            for name in ("engine", "peer"):  # pytest keeps every instance until it exits
                vars(self).pop(name, None)

    def test_it_declares_what_it_can(self) -> None:
        """An engine must declare its abilities; otherwise a cache could not know what to rely on."""
        with self.opened():
            assert isinstance(self.engine, Engine)
            flags = (self.engine.shared, self.engine.pushes, self.engine.coherent)
            assert all(flag is True or flag is False for flag in flags)
            assert 0 <= self.engine.ping() < SOON

    # -- colour

    def side(self, engine: Engine) -> Side:
        """Return what `engine` does for callers of this suite's colour."""
        return engine.suspending if self.suspending else engine.blocking

    def beside(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Run a coroutine concurrently, in a task or in a thread. Await the returned object to get its result."""
        return asyncio.ensure_future(work) if self.suspending else Beside(work)

    async def pause(self, seconds: float) -> None:
        """Let real time pass, for concurrent coroutines or for a server's clock."""
        if self.suspending:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)

    # -- time

    @property
    def beyond(self) -> float:
        """Seconds after which a short lease has certainly ended."""
        return 1.5 * self.short + self.slack

    async def lapse(self, seconds: float) -> None:
        """Let so many seconds pass on the engine's clock."""
        if self.clock is not None:
            self.clock.advance(seconds)
        else:
            await self.pause(seconds)

    async def until(self, ask: Callable[[], Awaitable[T]], good: Callable[[T], bool], within: float = SOON) -> T:
        """Ask repeatedly while the engine's time passes, and return the first answer that is `good`."""
        step = self.short / 8
        for _ in range(int(within / step) + 1):
            answer = await ask()
            if good(answer):
                return answer
            await self.lapse(step)
        raise AssertionError(f"after {within} s the answer is still {answer!r}")

    async def in_time(
        self, begin: Callable[[], Awaitable[T | None]], go_on: Callable[[T], Awaitable[bool]] | None = None
    ) -> T:
        """Begin with a short lease, and go on before it ends. If this machine was too slow for that, begin again."""
        for _ in range(20):
            begun = await begin()
            if begun is not None and (go_on is None or await go_on(begun)):
                return begun
        raise AssertionError("in 20 tries, the lease ended too early each time")

    def declared(self, what: bool, name: str) -> None:
        """Skip the test if the engine does not declare this ability."""
        if not what:
            raise unittest.SkipTest(f"{self.engine.scheme}:// declares that it does not support {name}")


def _as_test(case: Case) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        with self.opened():
            run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run if self.suspending else run_blocking
            run(case(self))

    # not functools.wraps: pytest would unwrap it, and see a coroutine function
    test.__name__, test.__qualname__, test.__doc__ = case.__name__, case.__qualname__, case.__doc__
    return test


class Beside:
    """A coroutine of the blocking colour that runs in its own thread. Awaiting it waits for the thread's result."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._ended: Future[Any] = Future()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._ended.set_result(run_blocking(work))
        except BaseException as error:
            self._ended.set_exception(error)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._end().__await__()

    async def _end(self) -> Any:
        return self._ended.result(2 * LONG)


def some(value: Any = b"value", *, fresh: float = LONG, keep: float | None = None, **known: Any) -> Entry[Any]:
    """Return a new entry. It is fresh for LONG, and kept as long as it is fresh, unless the arguments differ."""
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh if keep is None else keep, **known)


def is_granted(reply: object) -> bool:
    return isinstance(reply, Granted)


def not_none(what: T | None) -> T:
    """Return `what`. Fail if it is None."""
    assert what is not None
    return what


@contextmanager
def soon() -> Iterator[None]:
    """Fail if the block takes longer than SOON."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SOON


def require(port: T | None) -> T:
    """Return `port`. Skip the test if the engine has no such port."""
    if port is None:
        raise unittest.SkipTest("the engine has no such port")
    return port


class KeyedSuite(Suite):
    """The base class of the suites for engines that store values."""

    @property
    def claims(self) -> Claims:
        return require(self.side(self.engine).claims)

    @property
    def store(self) -> Store:
        return require(self.side(self.engine).store)

    async def listed(self, prefix: str) -> list[str]:
        """Return the keys that the peer lists, from all pages."""
        lists = require(self.side(self.peer).lists)
        found, after = await lists.page(prefix)
        while after is not None:
            more, after = await lists.page(prefix, after)
            found += more
        return found

    @property
    def far_shows(self) -> Shows:
        return require(self.side(self.peer).shows)

    @property
    def far_claims(self) -> Claims:
        """The Claims port of the peer."""
        return require(self.side(self.peer).claims)

    @property
    def far_store(self) -> Store:
        return require(self.side(self.peer).store)

    async def expect(
        self, kind: type[T], key: str = "k", port: Claims | None = None, *, token: bytes = b"", **terms: Any
    ) -> T:
        """Claim a key on the peer or on `port`, and return the reply. Fail if it is not of this kind."""
        reply = await (port or self.far_claims).claim(key, token or new_id(), Ask(terms.pop("lease", LONG), **terms))
        assert isinstance(reply, kind), reply
        return reply

    async def granted(self, key: str = "k", **terms: Any) -> bytes:
        """Return a new token to which the key was just granted."""
        token = new_id()
        await self.expect(Granted, key, self.claims, token=token, **terms)
        return token

    async def busy(self, key: str = "k", **terms: Any) -> Busy:
        """Claim a key on the peer, which must refuse it, and return the reply."""
        return await self.expect(Busy, key, **terms)

    async def found(self, key: str = "k", **terms: Any) -> Entry[Any]:
        """Claim a key on the peer, which must find its entry, and return the entry."""
        return (await self.expect(Found, key, **terms)).entry

    async def peek(self, key: str = "k") -> Entry[Any] | None:
        """Return the stored entry of a key, or None."""
        return (await self.store.get([key]))[0]

    async def stored(self, key: str = "k") -> Entry[Any]:
        """Return the stored entry of a key. Fail if there is none."""
        return not_none(await self.peek(key))
