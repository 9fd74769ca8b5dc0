"""What goes into the record of locks and of failed computations: who we are, and how what was done has failed."""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from pathlib import PurePath

from stampede import forks
from stampede.ports import Problem, Records

__all__ = ["History", "readable", "who"]

Details = tuple[bytes | None, bytes | None, bytes | None]

_MOST = 10_000
_LONGEST = 64


class History(Records):
    """It goes back for so many seconds and rows. With `failures`, failed computations are in it, too."""

    def __init__(self, seconds: float | None, rows: int, *, failures: bool) -> None:
        self.bounds = seconds, rows
        self.failures = failures
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
