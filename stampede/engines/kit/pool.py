"""Connections of the blocking side, each with one question at a time: who takes one, and what is tried on another."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from stampede.engines.kit.hang_detector import NOT_TO_OTHERS, HangDetector
from stampede.engines.kit.replies import ODD, out_of_step
from stampede.errors import EngineError

__all__ = ["Pool", "Pooled", "SentOnce", "is_once"]

A = TypeVar("A")
Q = TypeVar("Q")
W = TypeVar("W", bound="Pooled")


class SentOnce(tuple[Any, ...]):
    """A command that is not sent again where the connection broke before its reply came.

    Such is a compare-and-set: it recognises its own write, but not if another client has written over that since.
    """

    __slots__ = ()


def is_once(commands: Sequence[Any]) -> bool:
    """Return whether these commands must not be sent again: the first of them is a `SentOnce` then."""
    return type(commands[0]) is SentOnce


class Pooled(Protocol):
    """A connection, or what is to be one."""

    asking: bool  # a question is under way, or was left without its answer
    since: float  # when it began to wait for what it waits for

    @property
    def stands(self) -> bool:
        """Is it connected?"""

    @property
    def current(self) -> bool:
        """Does it lead where a new one would?"""

    def speaks(self) -> bool:
        """Is there something to be read before anything was asked? Then it has broken."""

    def is_cut(self) -> bool:
        """Has another thread ended this very wait, since the server hangs?"""

    def disconnect(self) -> None: ...


class _Server(Protocol):
    name: str
    closed: bool
    max_connections: int
    timeout: float  # seconds that one waits for a connection to come free
    patience: float | None  # seconds that a reply may take
    hang_detector: HangDetector


class Pool(ABC, Generic[W, Q, A]):
    """Asks a server, from any thread. Connections wait for their next question, the last used first.

    The libraries' own pools look at a connection before they hand it out, or have threads of theirs make the next
    one. Since our questions may be asked twice, it is enough to see that it was broken.
    """

    broken: tuple[type[BaseException], ...]
    """What is raised over a connection that is of no use any more."""

    hung: type[Exception] = TimeoutError
    """What is raised where no reply came in time."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.all: list[W] = []
        self._idle: list[W | None] = [None] * server.max_connections
        """As many as may be in use; None is one that was never made. `pop` and `append` need no lock."""
        self._free = threading.Condition()
        """Those wait here for whom there is none."""
        self._waiting = 0
        self._moved = self._hung = -inf  # when one was taken by a waiter, and when a reply did not come, last

    @abstractmethod
    def made(self) -> W:
        """One that is not connected yet."""

    @abstractmethod
    def exchange(self, wire: W, question: Q) -> A:
        """The answer, over this one, which is connected first if it isn't."""

    def lost(self, wire: W, error: BaseException) -> None:
        """Disconnect, since there will be no answer, and raise the error in another form where its own would mislead.

        Replies that nobody reads would be taken for those to the next question.
        """
        if isinstance(error, RecursionError):
            return  # hanging up would get stuck half way, too: it is done before the next question
        since, cut = wire.since, wire.is_cut()
        wire.disconnect()
        if cut and isinstance(error, Exception):
            raise self.hung(NOT_TO_OTHERS) from error
        if isinstance(error, (TimeoutError, self.hung)):
            self._server.hang_detector.ends(since, self._server.patience)
            raise self.hung(str(error)) from error
        if isinstance(error, ODD):
            raise out_of_step(error) from error

    def ask(self, question: Q, *, once: bool = False) -> A:
        """Return the answer. A connection may have broken while it was idle: then the question is asked once more.
        Where the server takes no new connection (it has too many, or another password by now), it is asked over one
        that the server has taken before. `once`: it must not be sent twice."""
        try:
            wire = (self._wait() if self._waiting else self._idle.pop()) or self._new()
        except IndexError:
            wire = self._wait() or self._new()
        taken = True
        try:
            if wire.asking or not wire.current or (once and wire.stands and wire.speaks()):
                wire.disconnect()
            used = wire.stands
            try:
                return self.exchange(wire, question)
            except self.broken as error:
                if once or not used or self._server.closed or isinstance(error, self.hung):
                    raise
            return self.exchange(wire, question)
        except self.hung:  # first, if it is one that is broken, too: nobody waits as long once more
            self._hung = time.monotonic()
            if self._waiting:
                self._wake_all()
            raise
        except self.broken:
            if once:
                raise
            taken = False  # before another thread may have it
            self._give_back(wire)
            connected = self._wait(connected=True)
            if connected is None:
                raise
            wire, taken = connected, True
            return self.exchange(wire, question)
        finally:
            if taken and wire.stands and not self._server.closed:
                self._idle.append(wire)
                if self._waiting:  # asked behind: one that begins to wait now finds it
                    with self._free:
                        self._free.notify()
            elif taken:
                self._give_back(wire)

    def close(self) -> None:
        for wire in list(self.all):
            wire.disconnect()

    # -- who has which ------------------------------------------------------------------------------------------

    def _new(self) -> W:
        """One that is taken as soon as it is made."""
        try:
            wire = self.made()
        except BaseException:
            self._idle.insert(0, None)
            raise
        self.all.append(wire)
        return wire

    def _wait(self, *, connected: bool = False) -> W | None:
        """The next that comes free; or, with `connected`, the next of those that are, and None if there are none."""
        came = time.monotonic()
        with self._free:
            self._waiting += 1
            try:
                while True:
                    if self._hung >= came:  # or one after the other would find that out for itself
                        raise EngineError(f"{self._server.name}: no reply, and no connection was free")
                    if connected and not any(_leads(each) for each in self.all):
                        return None
                    if self._idle and (not connected or _leads(self._idle[-1])):  # broken ones are at the other end
                        with suppress(IndexError):  # a newcomer was faster
                            wire = self._idle.pop()
                            self._moved = time.monotonic()
                            return wire
                    left = max(came, self._moved) + self._server.timeout - time.monotonic()
                    if left <= 0:
                        waited = f"no connection has been free for {self._server.timeout:g} s"
                        raise EngineError(f"{self._server.name}: {waited}")
                    self._free.wait(left)
            except BaseException:
                self._free.notify()  # it may have been woken for one that is free
                raise
            finally:
                self._waiting -= 1

    def _wake_all(self) -> None:
        with self._free:
            self._free.notify_all()

    def _give_back(self, wire: W) -> None:
        """One that is broken; the last to be taken, as the server may take no new ones."""
        if self._server.closed:
            wire.disconnect()  # or it stays: it may have been connected just after all were
        self._idle.insert(0, wire)
        self._wake_all()


def _leads(wire: Pooled | None) -> bool:
    return wire is not None and wire.stands and wire.current
