"""What the suites have in common: an engine of its own for every case, a colour, and time."""

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
    "some",
    "soon",
    "surely",
    "there",
]

T = TypeVar("T")
Case = Callable[[Any], Coroutine[Any, Any, None]]

LONG = 60.0  # a lease, or a timeout, that no test sits out
SOON = 10.0  # what has not happened by then won't
HERD = 16

KEYS = [
    "", " ", "a", "A", "a ", " a", "a\n", "a\r\n", "a\tb", "a\x00", "a\x00b", "\x00", "\x7f", "{a}", "}a{", "a:b",
    "a/b", "../a", ".", "..", "a%00", "a%20b", "*", "?", "'", '"', "\\", "é", "e\u0301", "K", "\u212a", "ß", "SS",
    "\U0001f40e", "\ufeff", "\uffff", "k" * 10_000, "k" * 9_999 + "l", "\U0001f40e" * 1_000,
    "\ud800", "\udcff", "\ud83d\udc0e",
]  # fmt: skip
"""Keys that are easily taken for each other, or for something else. Any str is one, half a surrogate pair too."""

VALUES = [b"", b"\x00", b"0", b"END\r\n", b"\r\n", bytes(range(256)), "é".encode(), b"\xff" * 3, b"x" * 1_000_000]


class Suite:
    """What the suites have in common: an engine, a colour, and time. A case is a coroutine."""

    suspending: ClassVar[bool] = False
    short: ClassVar[float] = 0.2  # the shortest lease that the engine tells from none, in seconds
    slack: ClassVar[float] = 0.0  # seconds by which its leases may end late: some clocks tick slowly
    largest: ClassVar[int | None] = None  # bytes of a value that the engine has room for; None: it is a megabyte
    clock: FakeClock | None = None  # the one that `make_engine` gave its engine, if it did

    engine: Engine
    peer: Engine

    def make_engine(self) -> Engine:
        """A new engine with nothing in it."""
        raise NotImplementedError

    def make_peer(self, engine: Engine) -> Engine:
        """Another client of the same store, as another process would have; or the engine itself."""
        return engine

    def drop_engine(self, engine: Engine) -> None:
        engine.close()

    def __init_subclass__(cls, **terms: Any) -> None:
        super().__init_subclass__(**terms)
        for name, case in list(vars(cls).items()):
            if name.startswith("test_") and inspect.iscoroutinefunction(case):
                setattr(cls, name, _as_test(case))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """An engine for one case, and its peer."""
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
            for name in ("engine", "peer"):  # pytest keeps all instances to its end
                vars(self).pop(name, None)

    def test_it_declares_what_it_can(self) -> None:
        """A cache could not tell what to rely on."""
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
        """Have a coroutine run beside this one, in a task or in a thread. Await what this returns."""
        return asyncio.ensure_future(work) if self.suspending else Beside(work)

    async def pause(self, seconds: float) -> None:
        """Real time, for those who run beside us to get ahead, or for a server's clock."""
        if self.suspending:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)

    # -- time

    @property
    def beyond(self) -> float:
        """Seconds after which a short lease has ended."""
        return 1.5 * self.short + self.slack

    async def lapse(self, seconds: float) -> None:
        """Let so much of the engine's time pass."""
        if self.clock is not None:
            self.clock.advance(seconds)
        else:
            await self.pause(seconds)

    async def until(self, ask: Callable[[], Awaitable[T]], good: Callable[[T], bool], within: float = SOON) -> T:
        """The first good answer, asked for again and again as the engine's time passes."""
        step = self.short / 8
        for _ in range(int(within / step) + 1):
            answer = await ask()
            if good(answer):
                return answer
            await self.lapse(step)
        raise AssertionError(f"after {within} s it is still {answer!r}")

    async def in_time(
        self, begin: Callable[[], Awaitable[T | None]], go_on: Callable[[T], Awaitable[bool]] | None = None
    ) -> T:
        """Begin with a short lease, and go on while it stands; begin again if this machine was too slow for that."""
        for _ in range(20):
            begun = await begin()
            if begun is not None and (go_on is None or await go_on(begun)):
                return begun
        raise AssertionError("the lease has always ended before its time")

    def declared(self, what: bool, name: str) -> None:
        if not what:
            raise unittest.SkipTest(f"{self.engine.scheme}:// declares that it is not {name}")


def _as_test(case: Case) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        with self.opened():
            run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run if self.suspending else run_blocking
            run(case(self))

    # not functools.wraps: pytest would look through it, and take cases for what they are not
    test.__name__, test.__qualname__, test.__doc__ = case.__name__, case.__qualname__, case.__doc__
    return test


class Beside:
    """A coroutine of the blocking colour, in a thread of its own; awaiting it joins the thread."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._ended: Future[Any] = Future()
        threading.Thread(target=self._live, args=(work,), daemon=True).start()

    def _live(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._ended.set_result(run_blocking(work))
        except BaseException as error:
            self._ended.set_exception(error)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._end().__await__()

    async def _end(self) -> Any:
        return self._ended.result(2 * LONG)


def some(value: Any = b"value", *, fresh: float = LONG, keep: float | None = None, **known: Any) -> Entry[Any]:
    """An entry, fresh for a minute unless told otherwise."""
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh if keep is None else keep, **known)


def is_granted(reply: object) -> bool:
    return isinstance(reply, Granted)


def surely(what: T | None) -> T:
    """What must be there."""
    assert what is not None
    return what


@contextmanager
def soon() -> Iterator[None]:
    """For what nobody may sit out."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SOON


def there(port: T | None) -> T:
    if port is None:
        raise unittest.SkipTest("the engine has no such port")
    return port


class KeyedSuite(Suite):
    """The ports of an engine with values."""

    @property
    def claims(self) -> Claims:
        return there(self.side(self.engine).claims)

    @property
    def store(self) -> Store:
        return there(self.side(self.engine).store)

    async def listed(self, prefix: str) -> list[str]:
        """The keys that the peer has, from the first page to the last."""
        lists = there(self.side(self.peer).lists)
        found, after = await lists.page(prefix)
        while after is not None:
            more, after = await lists.page(prefix, after)
            found += more
        return found

    @property
    def far_shows(self) -> Shows:
        return there(self.side(self.peer).shows)

    @property
    def far_claims(self) -> Claims:
        """The same of the peer."""
        return there(self.side(self.peer).claims)

    @property
    def far_store(self) -> Store:
        return there(self.side(self.peer).store)

    async def told(
        self, kind: type[T], key: str = "k", port: Claims | None = None, *, token: bytes = b"", **terms: Any
    ) -> T:
        """What a passer-by is told, who asks the peer, or this port; it must be of this kind."""
        reply = await (port or self.far_claims).claim(key, token or new_id(), Ask(terms.pop("lease", LONG), **terms))
        assert isinstance(reply, kind), reply
        return reply

    async def granted(self, key: str = "k", **terms: Any) -> bytes:
        """A new token that has just been granted the key."""
        token = new_id()
        await self.told(Granted, key, self.claims, token=token, **terms)
        return token

    async def busy(self, key: str = "k", **terms: Any) -> Busy:
        return await self.told(Busy, key, **terms)

    async def found(self, key: str = "k", **terms: Any) -> Entry[Any]:
        return (await self.told(Found, key, **terms)).entry

    async def kept(self, key: str = "k") -> Entry[Any] | None:
        return (await self.store.get([key]))[0]

    async def surely_kept(self, key: str = "k") -> Entry[Any]:
        return surely(await self.kept(key))
