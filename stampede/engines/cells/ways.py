"""How each colour asks a cell, and what becomes of its trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from stampede.colour import running_loop, soon
from stampede.engines.cells.protocol import (
    Cell,
    Faster,
    Seen,
    SuspendingCell,
    SuspendingWatchingCell,
    Version,
    WatchingCell,
)  # fmt: skip
from stampede.engines.kit.errands import Errands
from stampede.errors import EngineClosed, EngineError, StampedeError
from stampede.loops import PerLoop

__all__ = ["BesideWay", "HereWay", "OpenCell", "Way"]


class OpenCell:
    """A cell, as long as it is not closed, and those who wait for something in it."""

    def __init__(self, cell: Cell, scheme: str) -> None:
        self.cell = cell
        self.scheme = scheme
        self.watches = isinstance(cell, WatchingCell)
        self._closed = False
        self._waiting: dict[object, Callable[[], object]] = {}

    @contextmanager
    def waiting(self, ring: Callable[[], object]) -> Iterator[None]:
        """Have who waits woken when the engine is closed."""
        number = object()
        self._waiting[number] = ring
        try:
            self.check()
            yield
        finally:
            self._waiting.pop(number, None)

    def check(self) -> None:
        """EngineClosed, once it is."""
        if self._closed:
            raise EngineClosed(self.scheme)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Whatever its author's code raises is trouble of the store."""
        self.check()
        try:
            yield
        except StampedeError:
            raise
        except Exception as error:
            if self._closed:  # under our hands, which may raise anything
                raise EngineClosed(self.scheme) from error
            raise EngineError(f"{self.scheme}: {type(error).__name__}: {error}") from error

    def portions(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        """As many names as one read may have."""
        most = self.cell.at_once or len(names)
        for at in range(0, len(names), most or 1):
            yield names[at : at + most]

    def close(self) -> None:
        self._closed = True
        for ring in list(self._waiting.values()):
            ring()
        self.cell.close()

    def start_again(self) -> None:
        """In a forked child: who waits is the parent's, and so are connections."""
        self._waiting = {}
        self.cell.start_again()


class Way(Protocol):
    """How one colour asks."""

    async def read(self, names: Sequence[str]) -> list[Seen]:
        """What each has; names are different, and as many as you like."""
        ...

    async def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster: ...

    async def watch(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
        """Of a cell that tells of changes."""
        ...


class HereWay:
    """In the caller's own thread."""

    def __init__(self, opened: OpenCell) -> None:
        self._open = opened
        self._cell = opened.cell

    async def read(self, names: Sequence[str]) -> list[Seen]:
        return self.read_now(names)

    async def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        return self.swap_now(name, version, data, ttl)

    async def watch(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
        return self.watch_now(name, told)

    def read_now(self, names: Sequence[str]) -> list[Seen]:
        with self._open.asking():
            return [seen for some in self._open.portions(names) for seen in self._cell.read(some)]

    def swap_now(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        with self._open.asking():
            return self._cell.swap(name, version, data, ttl)

    def watch_now(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
        assert isinstance(self._cell, WatchingCell)
        with self._open.asking():
            return self._cell.watch(name, told)


class BesideWay(HereWay):
    """Beside an event loop, in threads; or, where the author has a client for that, in the loop."""

    def __init__(self, opened: OpenCell) -> None:
        super().__init__(opened)
        self._loops: PerLoop[SuspendingCell] = PerLoop()
        self._errands = Errands()

    def _own(self) -> SuspendingCell | None:
        """The cell of this loop, if there are such."""
        loop = asyncio.get_running_loop()
        own = self._loops.get(loop)
        if own is None:
            with self._open.asking():
                own = self._cell.suspending()
            if own is not None:
                self._loops.put(loop, own)
        return own

    async def read(self, names: Sequence[str]) -> list[Seen]:
        own = self._own()
        if own is None:
            return await self._errands.run(self.read_now, names)
        with self._open.asking():
            return [seen for some in self._open.portions(names) for seen in await own.read(some)]

    async def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        own = self._own()
        if own is None:
            return await self._errands.run(self.swap_now, name, version, data, ttl)
        with self._open.asking():
            return await own.swap(name, version, data, ttl)

    async def watch(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
        own = self._own()
        if not isinstance(own, SuspendingWatchingCell):
            end = await self._errands.run(self.watch_now, name, told)
            return lambda: self._aside(end)
        with self._open.asking():
            return await own.watch(name, told)

    def _aside(self, end: Callable[[], object]) -> None:
        """A blocking errand of which nobody waits for the end."""
        asyncio.ensure_future(self._errands.run(end)).add_done_callback(_heard)

    def close(self) -> None:
        for loop, own in self._loops.take_all():
            if loop is running_loop() or loop.is_closed():
                own.close()
            else:
                soon(loop, own.close)

    def start_again(self) -> None:
        """In a forked child: the loops are the parent's."""
        self._loops = PerLoop()


def _heard(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()  # a watch that can't be ended ends with its connection
