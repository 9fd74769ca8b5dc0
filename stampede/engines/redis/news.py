"""News from the server, for both colours: one connection that subscribes, and one thread that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stampede.colour import Bell

__all__ = ["Ear", "News"]


class Ear:
    """One waiter's."""

    __slots__ = ("bell", "hears", "message", "ready")

    def __init__(self) -> None:
        self.ready = Bell()  # the subscription stands, or there will be none
        self.bell = Bell()
        self.message = b""
        self.hears = False


class News:
    @contextmanager
    def listen(self, channel: bytes) -> Iterator[Ear]:
        ear = Ear()
        ear.ready.ring()
        yield ear
