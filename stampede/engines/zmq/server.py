"""The broker: one thread, one socket, and the machine that decides.

Of a client's death the kernel tells, which closes its connection: it is free of locks as soon as it has been away for a
moment, since who lives comes back at once. Of one that is silent, and whose connection stands, nobody can say whether
it is dead, frozen or cut off: its locks stand for their leases, and only its places in queues are given up.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from stampede.engines.zmq import wire
from stampede.engines.zmq.curve import Doorman, pair_of
from stampede.engines.zmq.limits import Counts
from stampede.engines.zmq.machine import LIMITS, Capacity, ClientSession, Machine, Refused
from stampede.engines.zmq.peers import Peers
from stampede.engines.zmq.wire import Word
from stampede.errors import EngineError, OptionError
from stampede.model.ports import Rate, Usage

__all__ = ["PORT", "Broker"]

_log = logging.getLogger("stampede")

PORT = 7867

TICK = 0.1
"""Seconds between two looks at who is still there."""

QUIET = 0.35
"""Seconds without a word after which a client is sent one: that fails if its connection has been closed."""

GONE = 1.0
"""Seconds for which a closed connection may be made again, before its client is taken for dead."""

SILENT = 1.0
"""Seconds without a word after which nobody waits behind a client."""

FORGOTTEN = 60.0
"""The same after which one that has nothing is forgotten."""

BATCH = 256
"""Messages that are read before answers go out."""

PAGE = 100
"""Rows of a list that are told at once, of so many locks or limits at most."""

SCANNED = 1000
"""Names that are looked at for one page."""

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


class Memory:
    """A file that says how long a lease may stand that its last broker has granted. None was, if it isn't there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            known = json.loads(path.read_text())
            self.longest = float(known["longest"])
        except FileNotFoundError:
            self.longest = 0.0
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise OptionError(f"{path} is no memory of a broker: {error!r}: remove it, and give --grace") from error
        self.note(self.longest)  # or it is found out with the first lock that nothing can be written there

    def note(self, longest: float) -> None:
        """Before anything so long is granted: a broker may end in the next moment."""
        new = self._path.with_name(self._path.name + ".new")
        try:
            with new.open("w") as file:
                json.dump({"longest": longest}, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            raise OptionError(f"{self._path} can't be written: {error}") from error
        self.longest = longest


class Broker:
    """Serves locks until it is told to stop.

    `quiet`: seconds for which nothing is granted, but what clients held before: as long as the longest lease that a
    broker of this address may have granted; which `memory`, a file, knows. `keys`: the directory of CURVE keys, without
    which it listens on loopback only. `peers`: other brokers, which share its limits, and its keys.
    """

    def __init__(
        self,
        bind: Sequence[str] = (f"127.0.0.1:{PORT}",),
        *,
        keys: Path | None = None,
        quiet: float | None = None,
        memory: Path | None = None,
        peers: Sequence[str] = (),
        limits: Capacity = LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for address in bind:
            if keys is None and address.rpartition(":")[0] not in _LOOPBACK:
                raise OptionError(
                    f"{address} is not loopback: give --keys DIR, or whoever gets there has all locks. "
                    "--make-keys DIR makes them"
                )
        self._clock = clock
        self.started = now = clock()
        self._memory = None if memory is None else Memory(memory)
        if quiet is None:
            quiet = limits.longest if self._memory is None else self._memory.longest
        self.quiet = quiet
        self.machine = Machine(now, quiet=quiet, fence=int(time.time() * 1e6), limits=limits)
        self.counts = Counts(now, quiet=quiet, most=limits.limits)
        self._out: dict[bytes, list[bytes]] = {}
        self._closed_some = False  # connections, whose they were nobody says
        self._malformed = 0
        self._tick = now
        self._poke = socket.socketpair()
        for end in self._poke:
            end.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._doorman = None if keys is None else Doorman(self._context, keys)
            self._peers = Peers(self._context, peers, keys)
            self._router = router = self._context.socket(zmq.ROUTER)
            router.router_mandatory = True
            router.router_handover = True
            router.linger = 0
            router.maxmsgsize = wire.LARGEST
            router.ipv6 = any("[" in address for address in bind)
            router.backlog = 1024
            router.handshake_ivl = 5000
            if keys is not None:
                own = pair_of(keys)
                router.curve_server = True
                router.curve_publickey, router.curve_secretkey = own.public, own.secret
                router.zap_domain = b"stampede"
            self._monitor = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            for address in bind:
                self._bind(address)
        except BaseException:
            self.close()
            raise

    def _bind(self, address: str) -> None:
        try:
            self._router.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            raise EngineError(f"can't listen on {address}: {error}") from error

    def run(self) -> None:
        """Until `stop`. Then it is closed."""
        router, monitor, doorman = self._router, self._monitor, self._doorman
        poller = zmq.Poller()
        for each in (router, monitor, self._poke[0], *(() if doorman is None else (doorman.socket,))):
            poller.register(each, zmq.POLLIN)
        for each in self._peers.sockets:
            poller.register(each, zmq.POLLIN)
        try:
            while True:
                now = self._clock()
                until = min(self._tick + TICK, self.machine.next_due())
                ready = dict(poller.poll(int(max(until - now, 0.0) * 1000) + (until > now)))
                if self._poke[0].fileno() in ready:
                    break
                if doorman is not None and doorman.socket in ready:
                    doorman.answer()
                self._peers.hear()
                if monitor in ready:
                    self._hear_of_ends()
                self._read()
                now = self._clock()
                self.machine.pass_time(now)
                if now >= self._tick + TICK:
                    self._look(now)
                self._send(now)
                self._peers.tell()
            if self._memory is not None and not self.machine.leases:
                self._memory.note(0.0)
        finally:
            self.close()

    def stop(self) -> None:
        """From any thread, or a signal's handler."""
        with suppress(OSError):
            self._poke[1].send(b"!")

    def close(self) -> None:
        self._context.destroy(linger=0)
        for end in self._poke:
            end.close()

    # -- reading --------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        recv, now = self._router.recv_multipart, self._clock()
        for _ in range(BATCH):
            try:
                parts = recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear(parts, now)

    def _hear(self, parts: list[bytes], now: float) -> None:
        """Whatever it is: the worst that comes of it is that who sent it has no answer."""
        client = None
        try:
            if len(parts) != 2:
                raise wire.Malformed("not one frame")
            id, message = parts
            client = self.machine.sessions.get(id)
            for kind, number, payload in wire.records(message):
                if kind == Word.HELLO:
                    client = self._greet(id, number, payload, now)
                elif client is None:
                    self._say(id, wire.record(Word.WHO, 0))
                    return
                elif kind != Word.BEAT:
                    self._say(id, self._answer(client, kind, number, payload, now))
        except wire.Malformed as error:
            self._malformed += 1
            _log.debug("a broker's client says what is none of ours: %s", error)
        except Exception:  # our own bug: the broker's other clients go on
            self._malformed += 1
            _log.exception("a broker could not make anything of what a client said, and goes on")
        if client is not None:
            client.heard = now

    def _greet(self, id: bytes, number: int, payload: bytes, now: float) -> ClientSession | None:
        fence, holder = wire.heard_hello(payload)
        try:
            session, known = self.machine.hello(id, holder, now)
        except Refused as refused:
            self._say(id, wire.record(Word.TROUBLE, 0, str(refused).encode()))
            return None
        if fence < time.time() * 1e6 + _AHEAD:  # what it was given by a predecessor whose clock was ahead
            self.machine.fence = max(self.machine.fence, fence)
        self._say(id, wire.record(Word.WELCOME, number, wire.WELCOME.pack(known)))
        return session

    def _answer(self, session: ClientSession, kind: int, number: int, payload: bytes, now: float) -> bytes:
        machine = self.machine
        try:
            if kind in (Word.ACQUIRE, Word.RENEW, Word.RELEASE, Word.WATCH, Word.HAND_OVER):
                lease, room, fence, waits, token, name = wire.asked(payload)
                if self._memory is not None and self._memory.longest < lease <= machine.limits.longest:
                    self._memory.note(min(1.5 * lease, machine.limits.longest))
                if kind == Word.ACQUIRE:
                    reply = machine.acquire(session, name, token, lease, room, waits, now)
                    if reply.granted:
                        return wire.record(Word.GRANTED, number, wire.GRANTED.pack(reply.fence))
                    return wire.record(Word.BUSY, number, wire.busy(reply.left, reply.token))
                if kind == Word.RENEW:
                    stands = machine.renew(session, name, token, lease, room, fence, now)
                elif kind == Word.HAND_OVER:
                    stands = machine.hand_over(name, token, lease, now)
                elif kind == Word.RELEASE:
                    stands = machine.release(session, name, token, now)
                else:
                    stands = machine.watch(session, name, token, now)
                return wire.record(Word.YES if stands else Word.NO, number)
            if kind in (Word.HELD, Word.LIMITS):
                return wire.record(Word.ROWS, number, json.dumps(self._page(kind, payload, now)).encode())
            if Word.TAKE <= kind <= Word.NOTE:
                return self._count(kind, number, payload, now)
            if kind == Word.PING:
                return wire.record(Word.YES, number)
            if kind == Word.HOLDER:
                found = islice(machine.inside(payload, now), _MOST_INSIDE)
                rows = [(token.hex(), ends - now) for token, ends in found]
                return wire.record(Word.ROWS, number, json.dumps(rows).encode())
            if kind == Word.STATS:
                return wire.record(Word.ROWS, number, json.dumps(self._stats(now)).encode())
        except (Refused, ValueError, OverflowError) as refused:  # or a number that is none
            return wire.record(Word.TROUBLE, number, str(refused).encode())
        return wire.record(Word.TROUBLE, number, b"it knows no such question: it is older than its client, perhaps")

    def _count(self, kind: int, number: int, payload: bytes, now: float) -> bytes:
        counts = self.counts
        if kind == Word.USED:
            return wire.record(Word.ROWS, number, json.dumps(_told(counts.used(payload, now))).encode())
        most, per, cost, seconds, at, name = wire.counted(payload)
        rate = Rate(most, per)
        if kind == Word.TAKE:
            answer = counts.take(name, rate, cost, seconds, now, at)
            if answer.booked and not at:
                self._peers.granted(name, rate, cost, answer.delay)
            return wire.record(Word.BOOKED, number, wire.BOOKED.pack(*answer))
        if kind == Word.GIVE_BACK:
            counts.give_back(name, cost, at, now)
        elif kind == Word.PENALIZE:
            counts.penalize(name, rate, seconds, now)
            self._peers.granted(name, rate, 0, seconds)
        elif cost:
            counts.note(name, rate, cost, now + max(seconds, 0.0), now)
        else:
            counts.penalize(name, rate, seconds, now)
        return wire.record(Word.YES, number)

    # -- lists ----------------------------------------------------------------------------------------------------

    def _page(self, kind: int, payload: bytes, now: float) -> list[Any]:
        """Where the next page begins (0: there is none), and the rows of this one. Each page counts the names anew: a
        lock may be missing if an older one was dropped between two pages."""
        start, prefix = wire.heard_page(payload)
        names = (self.machine if kind == Word.HELD else self.counts).names(start, start + SCANNED)
        rows = list[Any]()
        for at, name in enumerate(names, start + 1):
            if name.startswith(prefix):
                rows += self._rows(kind, name, now)
                if len(rows) >= PAGE:
                    return [at, rows]
        return [start + SCANNED if len(names) == SCANNED else 0, rows]

    def _rows(self, kind: int, name: bytes, now: float) -> list[list[Any]]:
        if kind == Word.LIMITS:
            usage = self.counts.used(name, now)
            return [] if usage.rate is None else [[name.hex(), *_told(usage)]]
        return [[name.hex(), token.hex(), *row] for token, *row in islice(self.machine.rows(name, now), PAGE)]

    def _stats(self, now: float) -> dict[str, Any]:
        machine = self.machine
        return {
            "up": now - self.started, "quiet": max(machine.quiet - now, 0.0), "clients": len(machine.sessions),
            "leases": machine.leases, "granted": machine.granted, "malformed": self._malformed,
        }  # fmt: skip

    # -- who is still there ---------------------------------------------------------------------------------------

    def _hear_of_ends(self) -> None:
        with suppress(zmq.Again):
            while True:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._closed_some = True

    def _look(self, now: float) -> None:
        self._tick = now
        some, self._closed_some = self._closed_some, False
        probe = wire.record(Word.BEAT, 0)
        for id, session in list(self.machine.sessions.items()):
            silence = now - session.heard
            if session.gone < inf:
                if now - session.gone >= GONE:
                    self.machine.end(session, now)
            elif session.idle:
                if silence > FORGOTTEN:
                    self.machine.end(session, now)
            elif some or silence > QUIET:
                self._say(id, probe)
                if silence > SILENT and session.waits:
                    self.machine.give_up(session, now)

    # -- sending --------------------------------------------------------------------------------------------------

    def _say(self, id: bytes, said: bytes) -> None:
        out = self._out.get(id)
        if out is None:
            self._out[id] = [said]
        else:
            out.append(said)

    def _send(self, now: float) -> None:
        told = self.machine.told
        if told:
            for session, turn, what in told:
                if not session.over:
                    self._say(session.id, wire.record(Word.TURN if turn else Word.FREED, 0, what))
            told.clear()
        if not self._out:
            return
        out, self._out = self._out, {}
        send = self._router.send
        for id, said in out.items():
            try:
                for message in wire.messages(said):
                    send(id, _MORE)
                    send(message, zmq.NOBLOCK)
            except zmq.Again:
                continue  # it doesn't read what it is told, and will ask again
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    _log.warning("a broker can't answer a client: %s", error)
                client = self.machine.sessions.get(id)
                if client is not None:
                    client.gone = min(client.gone, now)


def _told(usage: Usage) -> list[float]:
    rate = usage.rate or Rate(0, 0.0)
    return [rate.most, rate.per, usage.used, usage.ahead, usage.penalized]


_AHEAD = 3600e6
"""Microseconds by which a fence may be ahead of our clock."""

_MORE = zmq.SNDMORE | zmq.NOBLOCK

_MOST_INSIDE = 500
"""Of one lock, that are told."""
