"""How each colour asks a cell, and what becomes of its trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
from stampede.engines.kit.errands import Errands, Run, here
from stampede.errors import EngineClosed, EngineError, StampedeError
from stampede.loops import PerLoop

__all__ = ["LoopsWay", "OpenCell", "Way"]


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


class Way:
    """How the callers of one colour ask a cell."""

    def __init__(self, opened: OpenCell, run: Run = here) -> None:
        self._open = opened
        self._cell: SuspendingCell = _Stepwise(opened.cell, run)

    def its(self) -> SuspendingCell:
        """The cell that is asked."""
        return self._cell

    async def read(self, names: Sequence[str]) -> list[Seen]:
        """What each has; names are different, and as many as you like."""
        with self._open.asking():
            its = self.its()
            return [seen for some in self._open.portions(names) for seen in await its.read(some)]

    async def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        with self._open.asking():
            return await self.its().swap(name, version, data, ttl)

    async def watch(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
        """Of a cell that tells of changes."""
        with self._open.asking():
            its = self.its()
            watching = its if isinstance(its, SuspendingWatchingCell) else self._cell
            assert isinstance(watching, SuspendingWatchingCell)
            return await watching.watch(name, told)


class LoopsWay(Way):
    """Of event loops: by a client of each loop's own if the author has one for asyncio; otherwise in threads."""

    def __init__(self, opened: OpenCell) -> None:
        super().__init__(opened, Errands().run)
        self._loops: PerLoop[SuspendingCell] = PerLoop()

    def its(self) -> SuspendingCell:
        loop = asyncio.get_running_loop()
        own = self._loops.get(loop)
        if own is None:
            own = self._open.cell.suspending() or self._cell
            self._loops.put(loop, own)
        return own

    def close(self) -> None:
        for loop, own in self._loops.take_all():
            if loop is running_loop() or loop.is_closed():
                own.close()
            else:
                soon(loop, own.close)

    def start_again(self) -> None:
        """In a forked child: the loops are the parent's."""
        self._loops = PerLoop()


class _Stepwise(SuspendingWatchingCell):
    """A cell of blocking verbs: `run` has each of them done."""

    def __init__(self, cell: Cell, run: Run) -> None:
        self._cell, self._run = cell, run

    async def read(self, names: Sequence[str]) -> list[Seen]:
        return await self._run(self._cell.read, names)

    async def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        return await self._run(self._cell.swap, name, version, data, ttl)

    async def watch(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
        assert isinstance(self._cell, WatchingCell)
        end = await self._run(self._cell.watch, name, told)
        return end if self._run is here else lambda: self._aside(end)

    def _aside(self, end: Callable[[], object]) -> None:
        """A blocking step of which nobody waits for the end."""
        asyncio.ensure_future(self._run(end)).add_done_callback(_heard)


def _heard(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()  # a watch that can't be ended ends with its connection
