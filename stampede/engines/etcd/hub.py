"""Watches of one process: a stream for each watched key, or range of keys, and one thread that reads all streams."""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, TypeAlias

from stampede.engines.etcd.gateway import Gateway, Member, b64
from stampede.engines.etcd.stream import Broken, Lines
from stampede.errors import EngineError
from stampede.threads import begun

__all__ = ["Ear", "Hub", "Span", "Told"]

Told: TypeAlias = Callable[[Sequence[Any] | None], object]
"""Called with etcd's events, in their order. None: the stream has ended, and tells nothing more."""

MOST = 256
"""Streams of one process, each a connection. Waiters beyond that look again, instead of being told."""

IDLE = 10.0
"""Seconds after which the thread ends if there is no stream."""

Span: TypeAlias = tuple[bytes, bytes]
"""A key, and the one that ends the range behind it; none: that key alone."""


class Ear:
    """A listener of one stream. The hub drops it after `until`, if that is set."""

    def __init__(self, hub: Hub, stream: _Stream | None, told: Told) -> None:
        self._hub, self._stream, self.told = hub, stream, told
        self.until = inf

    @property
    def hears(self) -> bool:
        """Whether there is a stream that tells it."""
        return self._stream is not None and self._stream.open

    def close(self) -> None:
        if self._stream is not None:
            self._hub.forget(self._stream, self)


class _Stream:
    def __init__(self, span: Span, member: Member, sock: socket.socket, lines: Lines) -> None:
        self.span, self.member, self.sock, self.lines = span, member, sock, lines
        self.ears: set[Ear] = set()
        self.open = True

    def tell(self, events: Sequence[Any] | None) -> None:
        for ear in list(self.ears):
            ear.told(events)


class Hub:
    """The streams of one engine, for listeners of both colours."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        gateway.leaving = self.left
        self._closed = False
        self.start_again()

    def start_again(self) -> None:
        """Begin anew, also in a forked child: open streams are the parent's, and only closed here."""
        for sock in [each.sock for each in getattr(self, "_streams", {}).values()] + [getattr(self, "_wake", None)]:
            if sock is not None:
                sock.close()
        self._lock = threading.RLock()
        self._streams: dict[Span, _Stream] = {}
        self._new: deque[_Stream] = deque()
        self._reader: threading.Thread | None = None
        self._wake: socket.socket | None = None

    def watch(self, span: Span, told: Told) -> Ear:
        """Have `told` called after each change that comes after this has returned.

        It blocks until the server has begun to watch. Where there are too many streams, the ear hears nothing.
        """
        with self._lock:
            stream = self._streams.get(span)
            if stream is None and len(self._streams) >= MOST:
                return Ear(self, None, told)
        made = self._made(span) if stream is None else None
        with self._lock:
            stream = self._streams.get(span)  # another thread may have been faster
            room = not self._closed and len(self._streams) < MOST
            if stream is None and made is not None and room and self._started():
                stream, made = self._streams.setdefault(span, made), None
                self._new.append(stream)
                self._poke()
            ear = Ear(self, stream, told)
            if stream is not None:
                stream.ears.add(ear)
        if made is not None:
            made.sock.close()
        return ear

    def _made(self, span: Span) -> _Stream:
        key, end = span
        terms: dict[str, Any] = {"key": b64(key)} | ({"range_end": b64(end)} if end else {})
        member, sock = self._gateway.stream("/v3/watch", {"create_request": terms})
        lines, said = Lines(), list[Any]()
        try:
            while not said:
                said = lines.feed(sock.recv(1 << 16))
            _events(said[0])
        except (OSError, Broken) as error:
            sock.close()
            self._gateway.leave(member)
            raise EngineError(f"{self._gateway.called}: a watch was not begun: {error}") from error
        sock.setblocking(False)
        return _Stream(span, member, sock, lines)

    def forget(self, stream: _Stream, ear: Ear) -> None:
        with self._lock:
            stream.ears.discard(ear)
            if not stream.ears:
                self._drop(stream)

    def left(self, member: Member) -> None:
        """End the streams of a member that gives no answers: it tells nothing either."""
        with self._lock:
            those = [each for each in self._streams.values() if each.member == member]
        for stream in those:
            self._drop(stream)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = list(self._streams.values())
            self._poke()
        for stream in streams:
            self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        with self._lock:
            if self._streams.get(stream.span) is stream:
                del self._streams[stream.span]
            was_open, stream.open = stream.open, False
            if was_open:
                with suppress(OSError):  # the thread, which reads it, closes it
                    stream.sock.shutdown(socket.SHUT_RDWR)
        if was_open:
            stream.tell(None)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _started(self) -> bool:
        if self._reader is None:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.setblocking(False)
            self._wake, self._reader = theirs, begun("stampede-etcd-watch", self._read, ours, theirs)
        return self._reader is not None

    def _poke(self) -> None:
        if self._wake is not None:
            with suppress(OSError):
                self._wake.send(b"\0")

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
                for stream in new:
                    selector.register(stream.sock, selectors.EVENT_READ, stream)
                for key, _ in ready:
                    if key.data is None:
                        with suppress(BlockingIOError):
                            ours.recv(4096)
                    else:
                        self._readable(selector, key.data)
                self._drop_the_idle()

    def _readable(self, selector: selectors.BaseSelector, stream: _Stream) -> None:
        try:
            while stream.open:
                for said in stream.lines.feed(stream.sock.recv(1 << 16)):
                    stream.tell(_events(said))
                if not isinstance(stream.sock, ssl.SSLSocket):  # TLS may have read more than it gives
                    return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except (OSError, Broken):
            pass
        selector.unregister(stream.sock)
        stream.sock.close()
        self._drop(stream)

    def _drop_the_idle(self) -> None:
        now = time.monotonic()
        with self._lock:
            idle = [each for each in self._streams.values() if all(ear.until <= now for ear in each.ears)]
        for stream in idle:
            self._drop(stream)


def _events(said: Any) -> Sequence[Any]:
    """The events of one line of a stream. Broken: the server has ended the watch."""
    try:
        result = said["result"]
        if result.get("canceled"):
            raise Broken(str(result.get("cancel_reason")))
        events: Sequence[Any] = result.get("events", ())
        return [each for each in events if each["kv"]["key"]]
    except (TypeError, KeyError, AttributeError) as error:
        raise Broken(f"it says {str(said)[:80]}") from error
