"""Connections of the blocking side, each with one question at a time: who takes one, and what is tried on another."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from stampede.engines.kit.replies import ODD, out_of_step
from stampede.engines.kit.vigil import NOT_TO_OTHERS, Vigil
from stampede.errors import EngineError

__all__ = ["Once", "Pool", "Pooled", "is_once"]

A = TypeVar("A")
Q = TypeVar("Q")
W = TypeVar("W", bound="Pooled")


class Once(tuple[Any, ...]):
    """A command that is not sent again where the connection broke before its reply came.

    Such is a compare-and-set: it recognises its own write, but not if another client has written over that since.
    """

    __slots__ = ()


def is_once(commands: Sequence[Any]) -> bool:
    """Return whether commands that go out together, of which the first may be a `Once`, are not to be sent again."""
    return type(commands[0]) is Once


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
    vigil: Vigil


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
        self._line: deque[_Place[W]] = deque()
        """Who waits for one that comes free, in the order of arrival."""
        self._lock = threading.RLock()
        self._moved = -inf  # when a connection was handed over last

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
            self._server.vigil.ends(since, self._server.patience)
            raise self.hung(str(error)) from error
        if isinstance(error, ODD):
            raise out_of_step(error) from error

    def ask(self, question: Q, *, once: bool = False) -> A:
        """Return the answer. A connection may have broken while it was idle: then the question is asked once more.
        Where the server takes no new connection (it has too many, or another password by now), it is asked over one
        that the server has taken before. `once`: it must not be sent twice."""
        try:
            wire = (self._wait() if self._line else self._idle.pop()) or self._new()
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
            self._give_up()
            raise
        except self.broken:
            if once:
                raise
            taken = False  # before another thread may have it
            self._give_back(wire)
            connected = self._take_connected()
            if connected is None:
                raise
            wire, taken = connected, True
            return self.exchange(wire, question)
        finally:
            if taken and wire.stands and not self._server.closed:
                self._idle.append(wire)
                if self._line:  # asked behind: one that begins to wait now finds it
                    self._hand_on()
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

    def _wait(self) -> W | None:
        """The next that comes free."""
        place = _Place[W](connected=False)
        if not self._stand(place, self._server.timeout):
            waited = f"no connection has been free for {self._server.timeout:g} s"
            raise EngineError(f"{self._server.name}: {waited}")
        if place.given_up:  # or one after the other would find that out for itself
            raise EngineError(f"{self._server.name}: no reply, and no connection was free")
        return place.wire

    def _take_connected(self) -> W | None:
        """One that is connected, as soon as it is free. None if there are none, or it takes longer than a reply may."""
        if not any(_leads(each) for each in self.all):
            return None
        place = _Place[W](connected=True)
        self._stand(place, self._server.patience or self._server.timeout)
        return place.wire

    def _stand(self, place: _Place[W], seconds: float) -> bool:
        """Stand in line until a connection is handed over. False: nobody's has been for so long."""
        left = seconds
        with self._lock:
            self._line.append(place)
        try:
            self._hand_on()  # one may have come free before
            while not place.gate.acquire(timeout=left):
                with self._lock:
                    left = self._moved + seconds - time.monotonic()
                    if left <= 0 and place in self._line:
                        self._line.remove(place)
                        return False
                    left = max(left, 0.0)  # or it was handed over just now
            return True
        except BaseException:
            with self._lock:
                if place in self._line:
                    self._line.remove(place)
                elif not place.given_up:
                    self._idle.append(place.wire)
            self._hand_on()
            raise

    def _give_up(self) -> None:
        """A reply was not waited for any longer: who has no connection yet need not find that out."""
        with self._lock:
            for place in self._line:
                place.given_up = True
                place.gate.release()
            self._line.clear()

    def _give_back(self, wire: W) -> None:
        """One that is broken; the last to be taken, as the server may take no new ones."""
        if self._server.closed:
            wire.disconnect()  # or it stays: it may have been connected just after all were
        self._idle.insert(0, wire)
        self._hand_on()

    def _hand_on(self) -> None:
        """Hand idle connections to those who stand in line, in the order of arrival. Who wants one that is connected
        goes without, if none is any more."""
        with self._lock:
            if not any(_leads(each) for each in self.all):
                for place in [place for place in self._line if place.connected]:
                    self._line.remove(place)
                    place.gate.release()
            for place in [*self._line] if self._idle else ():
                fit = [wire for wire in self._idle if not place.connected or (wire is not None and _leads(wire))]
                if not fit:
                    continue
                try:
                    self._idle.remove(fit[-1])
                except ValueError:
                    continue  # a newcomer was faster
                self._line.remove(place)
                place.wire, self._moved = fit[-1], time.monotonic()
                place.gate.release()


class _Place(Generic[W]):
    """One who stands in line for a connection, behind a gate that opens when it is handed over."""

    def __init__(self, *, connected: bool) -> None:
        self.connected = connected  # only one that is connected will do
        self.wire: W | None = None
        self.given_up = False
        self.gate = threading.Lock()
        self.gate.acquire()


def _leads(wire: Pooled) -> bool:
    return wire.stands and wire.current
