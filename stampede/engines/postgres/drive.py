"""Waits for what a talk waits for, in each colour.

psycopg's own waits ask the server, once they are interrupted, to stop; and wait for seconds until it has, though it may
be one that hangs.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Callable
from typing import Any

from stampede.engines.postgres.talk import READ, Row, Talk, Talking

__all__ = ["LOOK", "Hook", "Ready", "drive", "said", "said_in_loop"]

Hook = Callable[[], object]

LOOK = 0.05
"""Seconds until a thread that waits has heard that it does so in vain."""


class Ready:
    """Waits for a connection, in one thread at a time."""

    def __init__(self, fd: int) -> None:
        self._readable, self._either = select.poll(), select.poll()
        self._readable.register(fd, select.POLLIN)
        self._either.register(fd, select.POLLIN | select.POLLOUT)

    def wait(self, wanted: int, seconds: float, look: Callable[[], object]) -> bool:
        """False: it took longer. Now and then one looks whether it is in vain."""
        poll = (self._readable if wanted == READ else self._either).poll
        if poll(1000 * min(seconds, LOOK)):
            return True
        end = time.monotonic() + seconds - LOOK
        while (left := end - time.monotonic()) > 0:
            look()
            if poll(1000 * min(left, LOOK)):
                return True
        return bool(poll(0))


def drive(talking: Talking, ready: Ready, seconds: float, moves: Hook, look: Hook) -> list[list[Row]]:
    """Return its rows. The server is called hung when nothing has moved for so many seconds; `moves` is called
    whenever something does."""
    try:
        wanted = next(talking)
        while ready.wait(wanted, seconds, look):
            moves()
            wanted = next(talking)
    except StopIteration as end:
        rows: list[list[Row]] = end.value
        return rows
    raise TimeoutError(f"it has said nothing for {seconds:g} s")


def said(made: Any, statement: str, seconds: float) -> list[Row]:
    """The rows of it, over a connection that nobody else has yet."""
    talking = Talk(made, named=False).ask((statement, ()))
    return drive(talking, Ready(made.fileno()), seconds, _nothing, _nothing)[0]


def _nothing() -> None:
    return


async def said_in_loop(made: Any, statement: str, seconds: float) -> list[Row]:
    """The same."""
    loop, fd, talking = asyncio.get_running_loop(), made.fileno(), Talk(made, named=False).ask((statement, ()))
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        async with asyncio.timeout(seconds):
            while True:
                if next(talking) != READ:
                    loop.add_writer(fd, ready.set)
                ready.clear()
                await ready.wait()
                loop.remove_writer(fd)
    except StopIteration as end:
        rows: list[list[Row]] = end.value
        return rows[0]
    finally:
        loop.remove_reader(fd)
        loop.remove_writer(fd)
