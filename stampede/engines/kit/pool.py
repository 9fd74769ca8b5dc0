"""Connections of the blocking side, one question at a time on each: handing them out, and trying again on another."""

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
    """A command that is not sent again if the connection breaks before its reply. A compare-and-set is such a command:
    it recognises its own write, but not if another client has written over that since."""

    __slots__ = ()


def is_once(commands: Sequence[Any]) -> bool:
    """Return whether these commands must not be sent again; then the first of them is a `SentOnce`."""
    return type(commands[0]) is SentOnce


class Pooled(Protocol):
    """A connection, or a place for one."""

    asking: bool  # a question is under way, or was left without its reply
    since: float  # when its current wait began

    @property
    def stands(self) -> bool:
        """Whether it is connected."""

    @property
    def current(self) -> bool:
        """Whether it leads where a new connection would."""

    def speaks(self) -> bool:
        """Return whether something can be read before anything was asked. Then the connection has broken."""

    def is_cut(self) -> bool:
        """Return whether another thread has ended this very wait, because the server hangs."""

    def disconnect(self) -> None: ...


class _Server(Protocol):
    name: str
    closed: bool
    max_connections: int
    timeout: float  # seconds to wait for a free connection
    patience: float | None  # seconds that a reply may take
    hang_detector: HangDetector


class Pool(ABC, Generic[W, Q, A]):
    """Connections to one server, for callers from any thread. The connection used last takes the next question. The
    libraries' own pools check a connection before they hand it out, or make the next one in a thread. Our questions may
    be asked twice, so it is enough to notice that a connection was broken."""

    broken: tuple[type[BaseException], ...]
    """Errors that mean that the connection is of no use any more."""

    hung: type[Exception] = TimeoutError
    """The error that means that no reply came in time."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.all: list[W] = []
        self._idle: list[W | None] = [None] * server.max_connections
        """The free places: a connection, or None where none was made yet. `pop` and `append` need no lock."""
        self._free = threading.Condition()
        """Callers wait here while no connection is free."""
        self._waiting = 0
        self._moved = self._hung = -inf  # when a waiter last got one, and when a reply last did not come

    @abstractmethod
    def made(self) -> W:
        """Return a new connection, not yet connected."""

    @abstractmethod
    def exchange(self, wire: W, question: Q) -> A:
        """Send the question over this connection, which is connected first if necessary, and return the answer."""

    def lost(self, wire: W, error: BaseException) -> None:
        """Disconnect, since no answer will come, and raise a clearer error if this one would mislead. Without that,
        replies that were never read would be taken for replies to the next question."""
        if isinstance(error, RecursionError):
            return  # disconnecting would fail half-way, too; it is done before the next question
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
        """Return the answer. If an idle connection turns out to be broken, the question is asked once more. If the
        server accepts no new connection (too many, or a changed password), it is asked over one that was accepted
        before. With `once`, it is never sent twice."""
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
        except self.hung:  # before `broken`, which may include it: no caller waits that long twice
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
                if self._waiting:  # checked after the append: a caller that begins to wait now finds the connection
                    with self._free:
                        self._free.notify()
            elif taken:
                self._give_back(wire)

    def close(self) -> None:
        for wire in list(self.all):
            wire.disconnect()

    # -- handing out --------------------------------------------------------------------------------------------

    def _new(self) -> W:
        """Return a new connection, which is in use at once."""
        try:
            wire = self.made()
        except BaseException:
            self._idle.insert(0, None)
            raise
        self.all.append(wire)
        return wire

    def _wait(self, *, connected: bool = False) -> W | None:
        """Return the next free place. With `connected`, the next free connection that works, or None if there are
        none."""
        came = time.monotonic()
        with self._free:
            self._waiting += 1
            try:
                while True:
                    if self._hung >= came:  # or each caller in turn would find that out by itself
                        raise EngineError(f"{self._server.name}: no reply, and no connection was free")
                    if connected and not any(_leads(each) for each in self.all):
                        return None
                    if self._idle and (not connected or _leads(self._idle[-1])):  # broken ones are at the front
                        with suppress(IndexError):  # a new caller was faster
                            wire = self._idle.pop()
                            self._moved = time.monotonic()
                            return wire
                    left = max(came, self._moved) + self._server.timeout - time.monotonic()
                    if left <= 0:
                        waited = f"no connection has been free for {self._server.timeout:g} s"
                        raise EngineError(f"{self._server.name}: {waited}")
                    self._free.wait(left)
            except BaseException:
                self._free.notify()  # it may have been woken for a free connection
                raise
            finally:
                self._waiting -= 1

    def _wake_all(self) -> None:
        with self._free:
            self._free.notify_all()

    def _give_back(self, wire: W) -> None:
        """Give back the place of a broken connection. It is taken last, as the server may accept no new connections."""
        if self._server.closed:
            wire.disconnect()  # it may have connected just after `close` went through all
        self._idle.insert(0, wire)
        self._wake_all()


def _leads(wire: Pooled | None) -> bool:
    return wire is not None and wire.stands and wire.current
