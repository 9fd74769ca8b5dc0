"""Who watches what: a stream for each watched key, or range of keys, and one thread that reads all of them."""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from stampede.engines.etcd.gateway import Gateway, Member, b64, unb64
from stampede.engines.etcd.stream import Broken, Lines
from stampede.errors import EngineError
from stampede.threads import begun

__all__ = ["Ear", "Hub", "Told"]

Told: TypeAlias = Callable[[bytes | None], object]
"""Called with a key that was changed; with None where something may have been missed."""

MOST = 256
"""Streams of one process, each a connection. Who comes beyond looks, instead."""

REMEMBERED = 64
"""Changes that a stream has told, for who comes to it later and asks for what was before."""

AGAIN = 0.2
"""Seconds between two tries to have a stream back."""

IDLE = 10.0
"""Seconds after which the thread ends that has nothing to read."""

Span: TypeAlias = tuple[bytes, bytes]
"""A key, and the one that ends the range behind it; none: that key alone."""


class Ear:
    """One who is told."""

    __slots__ = ("_hub", "_stream", "told")

    def __init__(self, hub: Hub, stream: _Stream | None, told: Told) -> None:
        self._hub, self._stream, self.told = hub, stream, told

    @property
    def hears(self) -> bool:
        """Whether there is a stream that tells it."""
        return self._stream is not None and self._stream.stands

    def doubt(self) -> None:
        """There was something to be told, and it was not: its stream is dead, and nobody knows."""
        if self._stream is not None:
            self._hub.lost(self._stream)

    def close(self) -> None:
        if self._stream is not None:
            self._hub.forget(self._stream, self)


class _Stream:
    """One watch. It tells of what is removed, or, if there are `puts`, of what is written too."""

    def __init__(self, span: Span, puts: bool) -> None:
        self.span, self.puts = span, puts
        self.ears: set[Ear] = set()
        self.since = 0  # it has told all changes from this revision on
        self.changes: deque[tuple[int, bytes]] = deque(maxlen=REMEMBERED)
        self.begun = threading.Event()
        self.sock: socket.socket | None = None
        self.member: Member | None = None
        self.lines = Lines()

    @property
    def stands(self) -> bool:
        return self.sock is not None

    def tell(self, key: bytes | None) -> None:
        for ear in list(self.ears):
            ear.told(key)


class Hub:
    """Those of one engine, in both colours."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        gateway.leaving = self.left
        self._closed = False
        self.start_again()

    def start_again(self) -> None:
        """Also in a forked child: what is open is the parent's, and only closed here."""
        for sock in [each.sock for each in getattr(self, "_streams", {}).values()] + [getattr(self, "_wake", None)]:
            if sock is not None:
                sock.close()
        self._lock = threading.RLock()
        self._streams: dict[tuple[Span, bool], _Stream] = {}
        self._new: deque[tuple[_Stream, socket.socket]] = deque()
        self._reader: threading.Thread | None = None
        self._mender: threading.Thread | None = None
        self._wake: socket.socket | None = None

    def watch(self, span: Span, told: Told, *, revision: int = 0, puts: bool = False) -> Ear:
        """Have `told` called after each change from this revision on; without one, after each that comes when this
        has returned. It may block for as long as a connection takes."""
        with self._lock:
            stream = None if self._closed else self._streams.get((span, puts))
            mine = stream is None and len(self._streams) < MOST and not self._closed
            if mine:
                stream = self._streams[span, puts] = _Stream(span, puts)
            ear = Ear(self, stream, told)
            if stream is not None:
                stream.ears.add(ear)
        if stream is None:
            return ear
        try:
            if mine:
                self._open(stream, revision)
            if not revision:
                if not stream.begun.wait(self._gateway.timeout):
                    raise EngineError(f"{self._gateway.called}: a watch was not begun")
            elif not mine:
                self._catch_up(stream, ear, revision)
        except BaseException:
            ear.close()
            self.lost(stream)  # for others, who have come to it meanwhile
            raise
        return ear

    def _catch_up(self, stream: _Stream, ear: Ear, revision: int) -> None:
        with self._lock:
            known = 0 < stream.since <= revision and stream.stands
            if known and len(stream.changes) == REMEMBERED:
                known = stream.changes[0][0] < revision
            missed = [key for number, key in stream.changes if number >= revision] if known else [None]
        for key in missed:
            ear.told(key)

    def forget(self, stream: _Stream, ear: Ear) -> None:
        with self._lock:
            stream.ears.discard(ear)
            if not stream.ears and self._streams.get((stream.span, stream.puts)) is stream:
                del self._streams[stream.span, stream.puts]
                self._hang_up(stream)

    def lost(self, stream: _Stream) -> None:
        """There is no word of it any more: all who hear it are told to look for themselves, and it is begun anew."""
        with self._lock:
            if self._closed or self._streams.get((stream.span, stream.puts)) is not stream:
                return
            member = stream.member if stream.stands else None
            self._hang_up(stream)
            if self._mender is None:
                self._mender = begun("stampede-etcd-watch", self._mend)
        if member is not None:
            self._gateway.leave(member)
        stream.tell(None)

    def left(self, member: Member) -> None:
        """It has no answers: nor will it tell anything."""
        with self._lock:
            those = [each for each in self._streams.values() if each.stands and each.member == member]
        for stream in those:
            self.lost(stream)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams, self._streams = list(self._streams.values()), {}
            for stream in streams:
                self._hang_up(stream)
            self._poke()
        for stream in streams:
            stream.begun.set()
            stream.tell(None)

    # -- connections ----------------------------------------------------------------------------------------------

    def _open(self, stream: _Stream, revision: int) -> None:
        key, end = stream.span
        terms: dict[str, Any] = {"key": b64(key)} | ({"range_end": b64(end)} if end else {})
        if revision:
            terms["start_revision"] = str(revision)
        if not stream.puts:
            terms["filters"] = ["NOPUT"]
        member, sock = self._gateway.stream("/v3/watch", {"create_request": terms})
        sock.setblocking(False)
        with self._lock:
            if self._closed or not stream.ears:
                sock.close()
                return
            if self._reader is None and not self._start():
                sock.close()
                raise EngineError(f"{self._gateway.called}: there is no thread to be had")
            stream.sock, stream.member, stream.lines, stream.since = sock, member, Lines(), revision
            stream.changes.clear()
            self._new.append((stream, sock))
            self._poke()

    def _start(self) -> bool:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._wake, self._reader = theirs, begun("stampede-etcd-watch", self._read, ours, theirs)
        return self._reader is not None

    def _poke(self) -> None:
        if self._wake is not None:
            with suppress(OSError):
                self._wake.send(b"\0")

    def _hang_up(self, stream: _Stream) -> None:
        sock, stream.sock = stream.sock, None
        stream.begun.clear()
        if sock is not None:
            with suppress(OSError):  # and the reader, who has it, closes it
                sock.shutdown(socket.SHUT_RDWR)

    def _mend(self) -> None:
        """Have streams back, for those who go on to hear them."""
        while True:
            with self._lock:
                lost = [each for each in self._streams.values() if not each.stands]
                if not lost or self._closed:
                    self._mender = None
                    return
            for stream in lost:
                try:
                    self._open(stream, 0)
                except EngineError:
                    break
            time.sleep(AGAIN)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _read(self, ours: socket.socket, theirs: socket.socket) -> None:
        with selectors.DefaultSelector() as selector, ours, theirs:
            selector.register(ours, selectors.EVENT_READ)
            while True:
                ready = selector.select(IDLE)
                with self._lock:
                    new, alone = list(self._new), len(selector.get_map()) == 1
                    self._new.clear()
                    if not new and alone and (self._closed or not ready):
                        if self._wake is theirs:
                            self._wake = self._reader = None
                        return
                for stream, sock in new:  # also what was hung up by now, so that it is closed
                    selector.register(sock, selectors.EVENT_READ, stream)
                for key, _ in ready:
                    if key.data is None:
                        with suppress(BlockingIOError):
                            ours.recv(4096)
                    else:
                        self._readable(selector, key.data, key.fileobj)  # type: ignore[arg-type]

    def _readable(self, selector: selectors.BaseSelector, stream: _Stream, sock: socket.socket) -> None:
        try:
            while stream.sock is sock:
                for said in stream.lines.feed(sock.recv(1 << 16)):
                    self._said(stream, said)
                if not isinstance(sock, ssl.SSLSocket):  # TLS may have read more than it gives
                    return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except Exception:  # whatever a server says: the stream is opened anew, and others of this thread go on
            pass
        selector.unregister(sock)
        sock.close()
        if stream.sock is sock:
            self.lost(stream)

    def _said(self, stream: _Stream, said: dict[str, Any]) -> None:
        result = said.get("result", {})
        if "error" in said or result.get("canceled"):
            raise Broken(str(said.get("error") or result.get("cancel_reason")))
        if result.get("created"):
            again = not stream.since  # what was changed before that was told to nobody
            stream.since = stream.since or int(result["header"]["revision"]) + 1
            stream.begun.set()
            if again:
                stream.tell(None)
        for event in result.get("events", ()):
            key = unb64(event["kv"]["key"])
            with self._lock:
                stream.changes.append((int(event["kv"]["mod_revision"]), key))
            stream.tell(key)
