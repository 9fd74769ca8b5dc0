"""A proxy in front of a server on the loopback. It injects faults: at once, or at a chosen byte.

::

    proxy = Proxy(server.port)
    proxy.hold()                                   # accept connections, but pass no data until let_go()
    proxy.cut()                                    # cut all connections now
    proxy.piece, proxy.delay = 1, 0.01             # replies arrive late, and byte by byte
    proxy.rate = 1e6                               # bytes per second, for each connection and direction
    proxy.double = True                            # every piece of a reply arrives twice
    proxy.at(b"GET", sent=7)                       # cut the next request with these bytes after its 7th byte
    proxy.at(b"GET", answered=3, times=2)          # cut the replies to the next two after their 3rd byte
    proxy.at(b"GET", answered=3, silent=True)      # pass 3 bytes of the reply, then nothing, but do not cut
    proxy.forge = lambda data: data.replace(b"A", b"B")   # change the data that goes to the server
    proxy.alter = lambda data: b"+OK\\r\\n" + data    # change the data that comes from the server
    proxy.at(b"GET", before=server.restart)        # call this before the request passes; cut nothing
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Proxy"]

_PIECE = 1 << 16


@dataclass
class _Fault:
    needle: bytes
    sent: int | None
    answered: int | None
    before: Callable[[], object] | None
    after: Callable[[], object] | None
    silent: bool
    times: int


class Proxy:
    """Forwards connections to `port`, with one thread for each direction of each connection."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay = 0.0  # seconds before each piece of a reply
        self.piece = _PIECE  # bytes of a reply that are sent together
        self.rate: float | None = None  # bytes per second of a connection, in each direction
        self.double = False  # every piece of a reply arrives twice
        self.alter: Callable[[bytes], bytes] | None = None  # changes each piece from the server
        self.forge: Callable[[bytes], bytes] | None = None  # changes each piece to the server
        self.met = 0  # number of faults that have happened
        self.heard = 0  # how often clients have sent something, also if it was not passed on
        self.accepted = 0
        self.turns = 0  # how often a server has replied to what a client had sent, over all connections
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._pairs: set[_Pair] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    # -- faults --------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Accept connections and keep them open, but pass no data in either direction."""
        self._open.clear()

    def let_go(self) -> None:
        """Pass all data that was held back."""
        self._open.set()

    def cut(self) -> None:
        """Cut all open connections."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.cut()

    def at(
        self,
        needle: bytes,
        *,
        sent: int | None = None,
        answered: int | None = None,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
        silent: bool = False,
        times: int = 1,
    ) -> None:
        """Cut the connection at the next requests that contain `needle`: after this many bytes of the request or reply.

        `silent`: the connection stays open, but no more data passes.

        `before` is called before the request passes, and `after` before its reply passes.
        """
        with self._lock:
            self._faults.append(_Fault(needle, sent, answered, before, after, silent, times))

    def left(self) -> bool:
        """Whether a client has disconnected before its request passed."""
        with self._lock:
            return any(pair.left() for pair in self._pairs)

    def heal(self) -> None:
        """End all faults."""
        with self._lock:
            self._faults.clear()
        self.delay, self.piece, self.double, self.alter, self.forge = 0.0, _PIECE, False, None, None
        self.let_go()

    def close(self) -> None:
        self._closed = True
        # Closing alone would leave the thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.let_go()
        self.cut()

    # -- implementation -------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 5.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = _Pair(self, client, server)
            with self._lock:
                self._pairs.add(pair)
            pair.start()
            if self._closed:
                pair.cut()

    def _found(self, data: bytes) -> _Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.needle in data:
                    fault.times -= 1
                    if fault.times <= 0:
                        self._faults.remove(fault)
                    self.met += 1
                    return fault
        return None

    def _slowly(self, end: socket.socket, data: bytes) -> None:
        while data:
            some, data = data[: 1 << 14], data[1 << 14 :]
            if self.rate:
                time.sleep(len(some) / self.rate)
            end.sendall(some)

    def _wait(self) -> None:
        self._open.wait()


class _Pair:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._fault: _Fault | None = None  # the fault of the next reply
        self._asked = False  # since the last reply

    def start(self) -> None:
        for work in (self._up, self._down):
            threading.Thread(target=self._run, args=(work,), name="proxy", daemon=True).start()

    def left(self) -> bool:
        try:
            return not self._client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError as error:
            return not isinstance(error, BlockingIOError)

    def cut(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            with contextlib.suppress(OSError):
                work()
        finally:
            if work != self._up or self._fault is None:
                self.cut()
            else:  # the client no longer waits, but the server still replies
                with contextlib.suppress(OSError):
                    self._server.shutdown(socket.SHUT_WR)
            with self._proxy._lock:
                last = self not in self._proxy._pairs
                self._proxy._pairs.discard(self)
            if last:
                self._client.close()
                self._server.close()

    def _up(self) -> None:
        while data := self._client.recv(_PIECE):
            self._proxy.heard += 1
            self._proxy._wait()
            self._asked = True
            if self._proxy.forge is not None:
                data = self._proxy.forge(data)
            fault = self._proxy._found(data)
            if fault is not None:
                if fault.before is not None:
                    fault.before()
                self._fault = fault
                if fault.sent is not None:
                    self._server.sendall(data[: fault.sent])
                    return
            self._proxy._slowly(self._server, data)

    def _down(self) -> None:
        left: int | None = None  # bytes of replies before the cut
        silent = False
        while data := self._server.recv(_PIECE):
            self._proxy._wait()
            if self._asked:
                self._asked = False
                self._proxy.turns += 1
            # Look here, not earlier: a client with a reply may send its next request before this loop continues.
            fault, self._fault = self._fault, None
            if fault is not None:
                left, silent = fault.answered, fault.silent
                if fault.after is not None:
                    fault.after()
            alter = self._proxy.alter
            if alter is not None:
                data = alter(data)
            while data:
                some, data = data[: self._proxy.piece], data[self._proxy.piece :]
                if self._proxy.delay:
                    time.sleep(self._proxy.delay)
                if left is not None:
                    some = some[:left]
                    left -= len(some)
                self._proxy._slowly(self._client, some * 2 if self._proxy.double else some)
                if left == 0 and not silent:
                    return
