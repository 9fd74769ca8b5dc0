"""A process' link to one broker: one connection, and one daemon thread that sends and receives on it.

A question asked while the broker can't be reached waits for it until the caller's time is up. When a connection breaks,
unanswered questions are asked again on the next connection, except those that must not be carried out twice. The thread
sends regular signs of life, so that a blocked event loop doesn't make this process look dead."""

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
"""Seconds between two signs of life to a broker that holds something of ours, or is to answer us."""

IDLE_BEAT = 5.0
"""Seconds between two signs of life to a broker that holds nothing of ours."""

PULSE, TIMEOUT = 500, 2500
"""Milliseconds between two heartbeats of libzmq, and without an answer until it reconnects: the other end of the
connection may have vanished without closing it."""


@dataclass(slots=True, eq=False)
class BrokerRequest:
    """A question on its way, until it is answered by a record of the broker or by an error of our own."""

    number: int
    asked: bytes
    once: bool  # it must not be carried out twice
    sent: bool = False
    bell: Bell = field(default_factory=Bell)
    kind: int = 0
    payload: bytes = b""
    error: EngineError | None = None


class BrokerLink:
    """The connection to one broker. `alone`: the engine has no other broker, so if this one is down, the engine is."""

    def __init__(self, place: Address, keys: ClientKeys | None, timeout: float, *, alone: bool = True) -> None:
        self.place = place
        self._alone = alone
        self.name = f"zmq://{place}"
        self.fence = 0  # the highest fence that we were granted
        self._keys = keys
        self._timeout = timeout
        self._begin()

    def _begin(self) -> None:
        self._id = os.urandom(16)
        self._lock = threading.RLock()  # a finalizer or a signal handler may ask while this thread has it
        self._numbers = itertools.count(1)
        self._questions: dict[int, BrokerRequest] = {}
        self._todo: deque[BrokerRequest] = deque()
        self._listeners: dict[bytes, set[Bell]] = {}  # by the name that is waited for, whatever thread or loop waits
        self._turns: dict[bytes, Bell] = {}  # by the token that has a place in a queue
        self._thread: threading.Thread | None = None
        self._poke: tuple[socket.socket, socket.socket] | None = None
        self._poked = False
        self._closed = False
        self._met = False  # a broker has welcomed us at least once
        self.why = ""  # what went wrong last
        self._connection: _Connection | None = None
        self.held = 0  # number of locks that the broker holds for us

    # -- asking ---------------------------------------------------------------------------------------------------

    async def ask(self, colour: Colour, kind: int, payload: bytes = b"") -> tuple[int, bytes]:
        """Return the kind and the payload of the broker's answer. Raise EngineError if there is no answer in time, or
        if the broker reports trouble."""
        question = self._asked(kind, payload)
        try:
            await colour.park(question.bell, self._timeout)
        finally:
            self._questions.pop(question.number, None)  # an interrupted caller wants no answer any more
        if question.error is not None:
            raise question.error
        if not question.bell.rung:
            why = self.why or ("" if self._met else "is it running?")
            raise self._trouble(f"no answer from {self.name} within {self._timeout:g} s{why and ': '}{why}")
        if question.kind == Word.TROUBLE:
            raise self._trouble(f"{self.name}: {question.payload.decode('utf-8', 'replace')}")
        return question.kind, question.payload

    async def listed(self, colour: Colour, kind: int, prefix: str = "") -> list[list[Any]]:
        """Return all rows of a list. They are requested page by page."""
        found: list[list[Any]] = []
        at, sought = 0, prefix.encode("utf-8", "surrogatepass")
        while True:
            _, payload = await self.ask(colour, kind, wire.pack_page(at, sought))
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

    # -- notices from the broker --------------------------------------------------------------------------------------

    @contextmanager
    def listen(self, name: bytes) -> Iterator[Bell]:
        """Give a bell that rings when a holder has left this lock, or when we may have missed that."""
        bell = Bell()
        with self._lock:
            self._listeners.setdefault(name, set()).add(bell)
        try:
            yield bell
        finally:
            with self._lock:
                listeners = self._listeners.get(name)
                if listeners is not None:
                    listeners.discard(bell)
                    if not listeners:
                        self._listeners.pop(name, None)

    def turn_bell(self, token: bytes) -> Bell:
        """Return a bell that rings when it is this token's turn. Call this before asking for the lock."""
        with self._lock:
            bell = self._turns.get(token)
            if bell is None or bell.rung:
                bell = self._turns[token] = Bell()
            return bell

    def forget_turn(self, token: bytes) -> None:
        """Forget this token's bell: it has no place in a queue any more."""
        self._turns.pop(token, None)

    def _ring(self, kind: int, what: bytes) -> None:
        with self._lock:
            if kind == Word.TURN:
                turn = self._turns.get(what)
                bells = [] if turn is None else [turn]
            else:
                bells = list(self._listeners.pop(what, ()))
        for bell in bells:
            bell.ring()

    def _ring_all(self) -> None:
        """Wake all waiters, so that they ask again: any of their notices may have been lost."""
        with self._lock:
            bells = [bell for listeners in self._listeners.values() for bell in listeners] + list(self._turns.values())
        for bell in bells:
            bell.ring()

    # -- start and end -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is not None or self._closed:
                return
            poke = self._poke = socket.socketpair()
            for end in poke:
                end.setblocking(False)
            thread = begun("stampede-zmq", self._run, poke)
            if self._poke is poke:
                self._thread = thread
            if thread is None:
                self._poke = None
                for end in poke:
                    end.close()
                raise EngineError(f"{self.name}: could not start a thread for its connection")

    def _wake(self) -> None:
        poke = self._poke
        if poke is not None and not self._poked:
            self._poked = True
            with suppress(OSError):  # its buffer is full of pokes, or the thread has ended
                poke[1].send(b"!")

    def close(self) -> None:
        """Close the connection, and fail every question that waits for an answer."""
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
        """Begin anew in a forked child: the connection, and the locks held over it, belong to the parent."""
        _inherited.append(self._connection)
        poke = self._poke
        self._begin()
        for end in poke or ():
            end.close()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self, poke: tuple[socket.socket, socket.socket]) -> None:
        pid = os.getpid()
        try:
            while not self._closed:
                try:
                    self._connection = _Connection(self, poke[0])
                    self._connection.run()
                except Exception as error:  # of any kind: without this thread no caller gets an answer
                    self.why = str(error)
                    _log.debug("reconnecting to %s after an error: %s", self.name, error)
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

    def received(self, kind: int, number: int, payload: bytes) -> None:
        """Handle an answer or a notice of the broker. The link's thread calls this."""
        if kind in (Word.TURN, Word.FREED):
            self._ring(kind, payload)
            return
        question = self._questions.pop(number, None)
        if question is not None:
            question.kind, question.payload = kind, payload
            question.bell.ring()

    def welcomed(self, known: bool) -> None:
        """Note that the broker accepts us. If we are not `known` to it (any more), notices may be lost."""
        self.why = ""
        if not known and self._met:
            self._ring_all()
        self._met = True

    @property
    def _busy(self) -> bool:
        return bool(self.held or self._questions or self._turns or self._listeners)


class _Connection:
    """One socket of a link, from its creation to its end. Only the link's thread uses it."""

    def __init__(self, link: BrokerLink, poke: socket.socket) -> None:
        self._link = link
        self._poke = poke
        self._known = False  # the broker has welcomed us on this connection
        self._beat = time.monotonic()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = client_socket(self._context, link._id, link._keys)
        self._socket.sndhwm = 10_000
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout, self._socket.handshake_ivl = PULSE, TIMEOUT, TIMEOUT
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()

    def run(self) -> None:
        """Send and receive until the link is closed."""
        pid = os.getpid()
        try:
            for each in (self._socket, self._monitor, self._poke):
                self._poller.register(each, zmq.POLLIN)
            self._socket.connect(f"tcp://{self._link.place}")
            while not self._link._closed:
                self._step()
        finally:
            if os.getpid() == pid:
                self._monitor.close(linger=0)
                self._socket.close(linger=200)
                self._context.term()

    def _step(self) -> None:
        link, now = self._link, time.monotonic()
        if self._known:
            self._send()
        if now >= self._beat + (BEAT if link._busy else IDLE_BEAT):
            self._beat = now
            if self._known:
                self._try_send([wire.record(Word.BEAT, 0)])
            else:
                self._greet()
        wait = self._beat + (BEAT if link._busy else IDLE_BEAT) - time.monotonic()
        ready = dict(self._poller.poll(int(max(wait, 0.0) * 1000) + 1))
        if self._poke.fileno() in ready:
            with suppress(BlockingIOError):
                while self._poke.recv(4096):
                    pass
            link._poked = False  # after reading the pokes and before reading `_todo`: no poke is lost
        if self._monitor in ready:
            self._read_monitor()
        if self._socket in ready:
            self._read()

    def _read_monitor(self) -> None:
        """Read the socket's events, and note why the broker can't be reached."""
        with suppress(zmq.Again):
            while True:
                message = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                event = message["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._greet()
                elif event == zmq.EVENT_DISCONNECTED:
                    self._known = False
                    self._link.why = "the connection was closed"
                elif event == zmq.EVENT_CONNECT_RETRIED:
                    self._link.why = self._link.why or "nothing listens there"
                else:
                    self._link.why = "it refuses our key, or its own key is not the one in our server.key"

    def _greet(self) -> None:
        """Introduce this process. Unanswered questions are asked again as soon as the broker welcomes us."""
        link = self._link
        self._known = False
        self._try_send([wire.record(Word.HELLO, 0, wire.pack_hello(link.fence, here()))])

    def _send(self) -> None:
        link = self._link
        some: list[BrokerRequest] = []
        while link._todo:
            question = link._todo.popleft()
            if question.number in link._questions:  # its caller still waits
                some.append(question)
        if some and not self._try_send([each.asked for each in some]):
            link._todo.extendleft(reversed(some))
            return
        for question in some:
            question.sent = True

    def _try_send(self, some: list[bytes]) -> bool:
        """Send these records. Return false if there is no connection, or too much is on its way already."""
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
                        with link._lock:  # ask the unanswered questions again, in their order
                            again = [each for each in link._questions.values() if not (each.once and each.sent)]
                            link._todo = deque(again)
                    elif kind == Word.WHO:
                        self._greet()
                    elif kind == Word.TROUBLE and number == 0:
                        why = payload.decode("utf-8", "replace")
                        link._fail_all(partial(EngineError, f"{link.name}: {why}"))
                    elif kind != Word.BEAT:
                        link.received(kind, number, payload)
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
"""Connections of a forked child's parent. If the child let them be collected, it would close sockets of its parent,
with warnings."""
