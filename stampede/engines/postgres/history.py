"""The record of locks: what goes into it, and what people are told of it."""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from pathlib import PurePath

from stampede import forks
from stampede.engines.postgres.line import Line
from stampede.ports import Problem, Records, Released, Reports

__all__ = ["History", "PostgresReports", "name_of", "readable", "who"]

RELEASED = """SELECT number, name, host, process, program, fence, date_part('epoch', taken),
        date_part('epoch', released), problem, exception, message, traceback
    FROM stampede.past
    WHERE (problem <> '' OR NOT $1) AND date_part('epoch', released) > stampede.clock() - $2
    ORDER BY number DESC LIMIT $3"""

Details = tuple[bytes | None, bytes | None, bytes | None]

_MOST = 10_000
_LONGEST = 64


class History(Records):
    """It goes back for so many seconds and rows."""

    def __init__(self, seconds: float | None, rows: int) -> None:
        self.bounds = seconds, rows
        self._problems: dict[bytes, Problem] = {}

    def failed(self, token: bytes, problem: Problem) -> None:
        while len(self._problems) >= _MOST:
            self._problems.pop(next(iter(self._problems)), None)
        self._problems[token] = problem

    def details(self, token: bytes) -> Details | None:
        """Of a lock's problem, if there is one."""
        its = self._problems.get(token)
        return None if its is None else (readable(its.exception), readable(its.message), readable(its.traceback))

    def told(self, token: bytes) -> None:
        """Its release has had an answer."""
        self._problems.pop(token, None)


@cache
def who() -> tuple[str, int, str]:
    """This process, for people: host, number, program."""
    program = PurePath(sys.argv[0] if sys.argv else "").name
    return _plain(socket.gethostname()), os.getpid(), _plain(program)


forks.in_child(lambda: who.cache_clear())


def _plain(text: str) -> str:
    """As every database can have it."""
    return text.encode("ascii", "backslashreplace").decode().replace("\0", "\\0")[:_LONGEST]


def readable(text: str) -> bytes:
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace")


class PostgresReports(Reports):
    """Of one database."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def released(self, *, failed: bool, since: float, most: int) -> list[Released]:
        rows = await self._line.ask((RELEASED, (failed, float(since), most)))
        released = [Released(number, name_of(name), *others) for number, name, *others in rows]
        return sorted(released, key=lambda each: each.released, reverse=True)


def name_of(raw: bytes) -> str:
    """A name for people, as any text is."""
    return raw.decode("utf-8", "backslashreplace")
