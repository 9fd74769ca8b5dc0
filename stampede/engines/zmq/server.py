"""The broker: one thread, one socket, and the machine that decides.

When a client dies, the kernel closes its connection. Its locks are freed if it stays away for a moment: a living client
reconnects at once. A client that is silent on an open connection may be dead, frozen or cut off. Its locks remain until
their leases end, and only its places in queues are given up."""

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
"""Seconds between two checks of all clients."""

QUIET = 0.35
"""Seconds of silence after which a client is sent a message, which fails if its connection was closed."""

GONE = 1.0
"""Seconds within which a client may reconnect before it is considered dead."""

SILENT = 1.0
"""Seconds of silence after which a client loses its places in queues."""

FORGOTTEN = 60.0
"""Seconds of silence after which a client without locks and places is forgotten."""

BATCH = 256
"""Number of messages that are read before answers are sent."""

PAGE = 100
"""Rows in one page of a list: about so many, because the rows of one lock are not split."""

SCANNED = 1000
"""Names that are scanned for one page."""

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


class Memory:
    """A file that stores the longest lease that an earlier broker may have granted. No file: it granted none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            known = json.loads(path.read_text())
            self.longest = float(known["longest"])
        except FileNotFoundError:
            self.longest = 0.0
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise OptionError(f"{path} is not a memory file: {error!r}: remove it, and give --grace") from error
        self.note(self.longest)  # fail now, not with the first lock, if the file can't be written

    def note(self, longest: float) -> None:
        """Store the longest lease. Call this before it is granted, because the broker may end at any moment."""
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
    """A server of locks and limits. It runs until it is stopped. `quiet` is its grace period: the seconds in which it
    grants nothing, and clients only renew what they held before. It must be as long as the longest lease that an
    earlier broker at this address may have granted; the file `memory` stores that. `keys` is the directory of CURVE
    keys; without it, the broker listens on loopback only. `peers` are other brokers, which share its limits and its
    keys."""

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
                    f"{address} is not loopback: give --keys DIR, or anyone who can reach it controls all locks. "
                    "--make-keys DIR makes the keys"
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
        self._some_closed = False  # connections were closed; libzmq does not say which
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
        """Serve until `stop` is called, then close."""
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
                self._peers.drain()
                if monitor in ready:
                    self._read_monitor()
                self._read()
                now = self._clock()
                self.machine.pass_time(now)
                if now >= self._tick + TICK:
                    self._check_clients(now)
                self._send(now)
                self._peers.send()
            if self._memory is not None and not self.machine.leases:
                self._memory.note(0.0)
        finally:
            self.close()

    def stop(self) -> None:
        """End `run`. This may be called from any thread, or from a signal handler."""
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
            self._receive(parts, now)

    def _receive(self, parts: list[bytes], now: float) -> None:
        """Handle one message, whatever is in it. At worst, its sender gets no answer."""
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
                    self._queue(id, wire.record(Word.WHO, 0))
                    return
                elif kind != Word.BEAT:
                    self._queue(id, self._answer(client, kind, number, payload, now))
        except wire.Malformed as error:
            self._malformed += 1
            _log.debug("the broker ignores a malformed message of a client: %s", error)
        except Exception:  # our own bug: the broker's other clients go on
            self._malformed += 1
            _log.exception("the broker failed to handle a message of a client, and goes on")
        if client is not None:
            client.last_heard = now

    def _greet(self, id: bytes, number: int, payload: bytes, now: float) -> ClientSession | None:
        fence, holder = wire.unpack_hello(payload)
        try:
            session, known = self.machine.hello(id, holder, now)
        except Refused as refused:
            self._queue(id, wire.record(Word.TROUBLE, 0, str(refused).encode()))
            return None
        if fence < time.time() * 1e6 + _AHEAD:  # granted by an earlier broker whose clock was ahead
            self.machine.fence = max(self.machine.fence, fence)
        self._queue(id, wire.record(Word.WELCOME, number, wire.WELCOME.pack(known)))
        return session

    def _answer(self, session: ClientSession, kind: int, number: int, payload: bytes, now: float) -> bytes:
        machine = self.machine
        try:
            if kind in (Word.ACQUIRE, Word.RENEW, Word.RELEASE, Word.WATCH, Word.HAND_OVER):
                lease, room, fence, waits, token, name = wire.unpack_lock(payload)
                if self._memory is not None and self._memory.longest < lease <= machine.limits.longest:
                    self._memory.note(min(1.5 * lease, machine.limits.longest))
                if kind == Word.ACQUIRE:
                    reply = machine.acquire(session, name, token, lease, room, waits, now)
                    if reply.granted:
                        return wire.record(Word.GRANTED, number, wire.GRANTED.pack(reply.fence))
                    return wire.record(Word.BUSY, number, wire.pack_busy(reply.left, reply.token))
                if kind == Word.RENEW:
                    done = machine.renew(session, name, token, lease, room, fence, now)
                elif kind == Word.HAND_OVER:
                    done = machine.hand_over(name, token, lease, now)
                elif kind == Word.RELEASE:
                    done = machine.release(session, name, token, now)
                else:
                    done = machine.watch(session, name, token, now)
                return wire.record(Word.YES if done else Word.NO, number)
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
        except (Refused, ValueError, OverflowError) as refused:  # or a number out of range
            return wire.record(Word.TROUBLE, number, str(refused).encode())
        return wire.record(Word.TROUBLE, number, b"unknown question: the broker may be older than its client")

    def _count(self, kind: int, number: int, payload: bytes, now: float) -> bytes:
        counts = self.counts
        if kind == Word.USED:
            return wire.record(Word.ROWS, number, json.dumps(_usage_row(counts.used(payload, now))).encode())
        most, per, cost, seconds, at, name = wire.unpack_limit(payload)
        rate = Rate(most, per)
        if kind == Word.TAKE:
            answer = counts.take(name, rate, cost, seconds, now, at)
            if answer.booked and not at:
                self._peers.note(name, rate, cost, answer.delay)
            return wire.record(Word.BOOKED, number, wire.BOOKED.pack(*answer))
        if kind == Word.GIVE_BACK:
            counts.give_back(name, cost, at, now)
        elif kind == Word.PENALIZE:
            counts.penalize(name, rate, seconds, now)
            self._peers.note(name, rate, 0, seconds)
        elif cost:
            counts.note(name, rate, cost, now + max(seconds, 0.0), now)
        else:
            counts.penalize(name, rate, seconds, now)
        return wire.record(Word.YES, number)

    # -- lists ----------------------------------------------------------------------------------------------------

    def _page(self, kind: int, payload: bytes, now: float) -> list[Any]:
        """Return where the next page begins (0: there is none), and the rows of this page. Each page counts the names
        again: a lock may be missing if an older one was dropped between two pages."""
        start, prefix = wire.unpack_page(payload)
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
            return [] if usage.rate is None else [[name.hex(), *_usage_row(usage)]]
        return [[name.hex(), token.hex(), *row] for token, *row in islice(self.machine.rows(name, now), PAGE)]

    def _stats(self, now: float) -> dict[str, Any]:
        machine = self.machine
        return {
            "up": now - self.started, "quiet": max(machine.quiet - now, 0.0), "clients": len(machine.sessions),
            "leases": machine.leases, "granted": machine.granted, "malformed": self._malformed,
        }  # fmt: skip

    # -- clients that are gone ---------------------------------------------------------------------------------------

    def _read_monitor(self) -> None:
        with suppress(zmq.Again):
            while True:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._some_closed = True

    def _check_clients(self, now: float) -> None:
        self._tick = now
        some, self._some_closed = self._some_closed, False
        probe = wire.record(Word.BEAT, 0)
        for id, session in list(self.machine.sessions.items()):
            silence = now - session.last_heard
            if session.gone < inf:
                if now - session.gone >= GONE:
                    self.machine.end(session, now)
            elif session.idle:
                if silence > FORGOTTEN:
                    self.machine.end(session, now)
            elif some or silence > QUIET:
                self._queue(id, probe)
                if silence > SILENT and session.waits:
                    self.machine.give_up(session, now)

    # -- sending --------------------------------------------------------------------------------------------------

    def _queue(self, id: bytes, said: bytes) -> None:
        out = self._out.get(id)
        if out is None:
            self._out[id] = [said]
        else:
            out.append(said)

    def _send(self, now: float) -> None:
        notices = self.machine.notices
        if notices:
            for session, turn, what in notices:
                if not session.over:
                    self._queue(session.id, wire.record(Word.TURN if turn else Word.FREED, 0, what))
            notices.clear()
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
                continue  # this client doesn't read; it will ask again
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    _log.warning("the broker can't send an answer to a client: %s", error)
                client = self.machine.sessions.get(id)
                if client is not None:
                    client.gone = min(client.gone, now)


def _usage_row(usage: Usage) -> list[float]:
    rate = usage.rate or Rate(0, 0.0)
    return [rate.most, rate.per, usage.used, usage.ahead, usage.penalized]


_AHEAD = 3600e6
"""Microseconds by which a client's fence may be ahead of our clock; one that is more ahead is ignored."""

_MORE = zmq.SNDMORE | zmq.NOBLOCK

_MOST_INSIDE = 500
"""Most holders of one lock that are listed."""
