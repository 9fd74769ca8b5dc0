"""A process' way to one broker: one connection, and one daemon thread that speaks and reads there.

What is asked before the broker is there, or while it is away, waits for it, until its caller has no more time; what was
asked and not answered when a connection broke is asked again on the next, where it does no harm twice. The thread tells
the broker every now and then that this process lives, whatever its event loops do.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from stampede.engines.kit.url import Address
from stampede.engines.kit.whereabouts import here
from stampede.engines.zmq import wire
from stampede.engines.zmq.curve import AGAIN, ClientKeys, client_socket
from stampede.engines.zmq.wire import Word
from stampede.errors import EngineClosed, EngineError
from stampede.runtime.colour import Bell, Colour, running_loop
from stampede.runtime.threads import begun

__all__ = ["BrokerLink"]

_log = logging.getLogger("stampede")

BEAT = 0.25
"""Seconds between two words to a broker that has something of ours."""

RARE = 5.0
"""The same where it has nothing."""

SIGN, DEAF = 500, 2500
"""Milliseconds between two signs of life that libzmq asks for, and without any after which it connects anew: the
connection may be one that leads nowhere."""


@dataclass(slots=True, eq=False)
class BrokerRequest:
    """One that has been asked, until it is answered: by a record, or an error of ours."""

    number: int
    asked: bytes
    once: bool  # it must not be done twice
    sent: bool = False
    bell: Bell = field(default_factory=Bell)
    kind: int = 0
    payload: bytes = b""
    error: EngineError | None = None


class BrokerLink:
    """To one broker. `alone`: there is no other, so that its trouble is all of the engine's."""

    def __init__(self, place: Address, keys: ClientKeys | None, timeout: float, *, alone: bool = True) -> None:
        self.place = place
        self._alone = alone
        self.name = f"zmq://{place}"
        self.fence = 0  # the highest that we were given
        self._keys = keys
        self._timeout = timeout
        self._begin()

    def _begin(self) -> None:
        self._id = os.urandom(16)
        self._lock = threading.RLock()  # a finalizer, or a signal, may ask in the middle of this
        self._numbers = itertools.count(1)
        self._questions: dict[int, BrokerRequest] = {}
        self._todo: deque[BrokerRequest] = deque()
        self._ears: dict[bytes, set[Bell]] = {}  # of who waits for a name to come free, anywhere
        self._turns: dict[bytes, Bell] = {}  # by the tokens of who have a place in a queue
        self._thread: threading.Thread | None = None
        self._poke: tuple[socket.socket, socket.socket] | None = None
        self._poked = False
        self._closed = False
        self._met = False  # a broker has welcomed us
        self.why = ""  # what went wrong last
        self._talk: _Talk | None = None
        self.held = 0  # how much the broker has of ours

    # -- asking ---------------------------------------------------------------------------------------------------

    async def ask(self, colour: Colour, kind: int, payload: bytes = b"") -> tuple[int, bytes]:
        """What it answers. EngineError if there is no answer in time, or it is trouble."""
        question = self._asked(kind, payload)
        try:
            await colour.park(question.bell, self._timeout)
        finally:
            self._questions.pop(question.number, None)  # whoever is interrupted wants it no more
        if question.error is not None:
            raise question.error
        if not question.bell.rung:
            why = self.why or ("" if self._met else "is it running?")
            raise self._trouble(f"no answer from {self.name} within {self._timeout:g} s{why and ': '}{why}")
        if question.kind == Word.TROUBLE:
            raise self._trouble(f"{self.name}: {question.payload.decode('utf-8', 'replace')}")
        return question.kind, question.payload

    async def listed(self, colour: Colour, kind: int, prefix: str = "") -> list[list[Any]]:
        """All rows of a list, page by page."""
        found: list[list[Any]] = []
        at, sought = 0, prefix.encode("utf-8", "surrogatepass")
        while True:
            _, payload = await self.ask(colour, kind, wire.page(at, sought))
            at, rows = json.loads(payload)
            found += rows
            if not at:
                return found

    def _trouble(self, why: str) -> EngineError:
        error = EngineError(why)
        error.partial = not self._alone
        return error

    def _asked(self, kind: int, payload: bytes) -> BrokerRequest:
        with self._lock:
            if self._closed:
                raise EngineClosed(self.name)
            number = next(self._numbers)
            asked, once = wire.record(kind, number, payload), kind in (Word.TAKE, Word.GIVE_BACK)
            question = self._questions[number] = BrokerRequest(number, asked, once)
            self._todo.append(question)
        self._start()
        self._wake()
        return question

    # -- what is heard unasked --------------------------------------------------------------------------------------

    @contextmanager
    def listen(self, name: bytes) -> Iterator[Bell]:
        """Rings when somebody has left this lock; or when nobody can say any more."""
        bell = Bell()
        with self._lock:
            self._ears.setdefault(name, set()).add(bell)
        try:
            yield bell
        finally:
            with self._lock:
                ears = self._ears.get(name)
                if ears is not None:
                    ears.discard(bell)
                    if not ears:
                        self._ears.pop(name, None)

    def queued(self, token: bytes) -> Bell:
        """Rings when the turn of this token has come. To be had before it is asked for."""
        with self._lock:
            bell = self._turns.get(token)
            if bell is None or bell.rung:
                bell = self._turns[token] = Bell()
            return bell

    def left(self, token: bytes) -> None:
        """It has no place any more."""
        self._turns.pop(token, None)

    def _ring(self, kind: int, what: bytes) -> None:
        with self._lock:
            if kind == Word.TURN:
                turn = self._turns.get(what)
                bells = [] if turn is None else [turn]
            else:
                bells = list(self._ears.pop(what, ()))
        for bell in bells:
            bell.ring()

    def _ring_all(self) -> None:
        """Nobody knows what has been missed: everybody asks again."""
        with self._lock:
            bells = [bell for ears in self._ears.values() for bell in ears] + list(self._turns.values())
        for bell in bells:
            bell.ring()

    # -- its life -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is not None or self._closed:
                return
            poke = self._poke = socket.socketpair()
            for end in poke:
                end.setblocking(False)
            thread = begun("stampede-zmq", self._live, poke)
            if self._poke is poke:
                self._thread = thread
            if thread is None:
                self._poke = None
                for end in poke:
                    end.close()
                raise EngineError(f"{self.name}: there is no thread to be had for its connection")

    def _wake(self) -> None:
        poke = self._poke
        if poke is not None and not self._poked:
            self._poked = True
            with suppress(OSError):  # it has been poked often enough, or the thread has ended
                poke[1].send(b"!")

    def close(self) -> None:
        """Say goodbye, and let everybody go."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._poked = False
            self._wake()
        if thread is not None and thread is not threading.current_thread() and running_loop() is None:
            thread.join(1.0)
        self._fail_all(lambda: EngineClosed(self.name))
        self._ring_all()

    def start_again(self) -> None:
        """In a forked child: the connection is the parent's, and so is what it holds."""
        _inherited.append(self._talk)
        poke = self._poke
        self._begin()
        for end in poke or ():
            end.close()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _live(self, poke: tuple[socket.socket, socket.socket]) -> None:
        pid = os.getpid()
        try:
            while not self._closed:
                try:
                    self._talk = _Talk(self, poke[0])
                    self._talk.run()
                except Exception as error:  # whatever it was: without this thread nobody is answered any more
                    self.why = str(error)
                    _log.debug("the connection to %s is made anew: %s", self.name, error)
                    time.sleep(AGAIN / 1000)
        finally:
            if os.getpid() == pid:
                for end in poke:
                    end.close()

    def _fail_all(self, error: Callable[[], EngineError]) -> None:
        with self._lock:
            questions, self._questions = list(self._questions.values()), {}
            self._todo.clear()
        for question in questions:
            question.error = error()
            question.bell.ring()

    def heard(self, kind: int, number: int, payload: bytes) -> None:
        """A record that answers, or tells; by the thread."""
        if kind in (Word.TURN, Word.FREED):
            self._ring(kind, payload)
            return
        question = self._questions.pop(number, None)
        if question is not None:
            question.kind, question.payload = kind, payload
            question.bell.ring()

    def welcomed(self, known: bool) -> None:
        """It knows us; or it is another one, or has taken us for dead: what was told meanwhile is lost."""
        self.why = ""
        if not known and self._met:
            self._ring_all()
        self._met = True

    @property
    def _busy(self) -> bool:
        return bool(self.held or self._questions or self._turns or self._ears)


class _Talk:
    """One socket of a link, from its making to its end; by the link's thread."""

    def __init__(self, link: BrokerLink, poke: socket.socket) -> None:
        self._link = link
        self._poke = poke
        self._known = False  # we have been welcomed
        self._beat = time.monotonic()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = client_socket(self._context, link._id, link._keys)
        self._socket.sndhwm = 10_000
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout, self._socket.handshake_ivl = SIGN, DEAF, DEAF
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()

    def run(self) -> None:
        """Until the link is closed."""
        pid = os.getpid()
        try:
            for each in (self._socket, self._monitor, self._poke):
                self._poller.register(each, zmq.POLLIN)
            self._socket.connect(f"tcp://{self._link.place}")
            while not self._link._closed:
                self._turn()
        finally:
            if os.getpid() == pid:
                self._monitor.close(linger=0)
                self._socket.close(linger=200)
                self._context.term()

    def _turn(self) -> None:
        link, now = self._link, time.monotonic()
        if self._known:
            self._send()
        if now >= self._beat + (BEAT if link._busy else RARE):
            self._beat = now
            if self._known:
                self._put([wire.record(Word.BEAT, 0)])
            else:
                self._greet()
        wait = self._beat + (BEAT if link._busy else RARE) - time.monotonic()
        ready = dict(self._poller.poll(int(max(wait, 0.0) * 1000) + 1))
        if self._poke.fileno() in ready:
            with suppress(BlockingIOError):
                while self._poke.recv(4096):
                    pass
            link._poked = False  # behind that, and before what is to be sent is looked at
        if self._monitor in ready:
            self._watch()
        if self._socket in ready:
            self._read()

    def _watch(self) -> None:
        """How the connection is."""
        with suppress(zmq.Again):
            while True:
                told = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                event = told["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._greet()
                elif event == zmq.EVENT_DISCONNECTED:
                    self._known = False
                    self._link.why = "its connection has been closed"
                elif event == zmq.EVENT_CONNECT_RETRIED:
                    self._link.why = self._link.why or "nobody listens there"
                else:
                    self._link.why = "it refuses our key, or has another one than ours says"

    def _greet(self) -> None:
        """Who we are, first. What is not answered is asked as soon as it is known that we are known."""
        link = self._link
        self._known = False
        self._put([wire.record(Word.HELLO, 0, wire.hello(link.fence, here()))])

    def _send(self) -> None:
        link = self._link
        some: list[BrokerRequest] = []
        while link._todo:
            question = link._todo.popleft()
            if question.number in link._questions:  # somebody wants it still
                some.append(question)
        if some and not self._put([each.asked for each in some]):
            link._todo.extendleft(reversed(some))
            return
        for question in some:
            question.sent = True

    def _put(self, some: list[bytes]) -> bool:
        """Whether it is on its way. Not if too much is already, or there is no connection."""
        try:
            for message in wire.messages(some):
                self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _read(self) -> None:
        link = self._link
        try:
            while True:
                message = self._socket.recv(zmq.NOBLOCK)
                for kind, number, payload in wire.records(message):
                    if kind == Word.WELCOME:
                        link.welcomed(*wire.WELCOME.unpack(payload))
                        self._known = True
                        with link._lock:  # what was asked and not answered, in its order
                            again = [each for each in link._questions.values() if not (each.once and each.sent)]
                            link._todo = deque(again)
                    elif kind == Word.WHO:
                        self._greet()
                    elif kind == Word.TROUBLE and number == 0:
                        why = payload.decode("utf-8", "replace")
                        link._fail_all(partial(EngineError, f"{link.name}: {why}"))
                    elif kind != Word.BEAT:
                        link.heard(kind, number, payload)
        except zmq.Again:
            return


_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

_inherited: list[Any] = []
"""Of a forked child: collected there, sockets of its parent's would be closed, which says so aloud."""
