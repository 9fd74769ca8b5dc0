"""Questions to etcd, over the JSON gateway that every member has beside gRPC.

HTTP, since gRPC's own library survives no fork, and serves no second event loop of a process.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import randrange
from typing import Any, NamedTuple, TypeVar

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from stampede.engines.kit.concurrency import AT_ONCE, ConcurrencyLimit
from stampede.engines.kit.url import Address
from stampede.errors import EngineClosed, EngineError

__all__ = ["MOST", "Gateway", "Gone", "Stream", "b64", "unb64"]

T = TypeVar("T")

MOST = 256
"""Streams of one process, each a connection. Waiters beyond that look again, instead of being told."""

CONNECT = 1.0
"""Seconds for which a member that doesn't even take the connection is tried, where there are others."""

SHORTEST = 0.2
"""Seconds that any member has for an answer."""

REST = 0.05
"""Seconds before the next one is asked, where all are of the same mind: they choose a leader."""

_NOT_FOUND, _UNAUTHENTICATED = 5, 16
_PASSES = {4, 8, 14}  # out of time, of room for requests, of a leader: it may be done all the same


class Gone(EngineError):
    """What it was asked about isn't there: a lease that has ended."""


class _Unknown(EngineError):
    """What became of a question isn't known."""


class Stream(NamedTuple):
    """A reply that never ends. Its lines are JSON."""

    reply: urllib3.BaseHTTPResponse
    sock: socket.socket
    lines: Iterator[bytes]


class Gateway:
    """The members of one cluster, asked from any thread. A question goes to another one if it has no answer here.

    One that must not be asked twice only goes on where it has surely not been asked.
    """

    def __init__(
        self,
        members: Sequence[Address],
        *,
        tls: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
        timeout: float = 1.0,
    ) -> None:
        self.members = list(members)
        self.called = "etcd://" + ",".join(map(str, members))
        self.timeout = timeout
        self.closed = False
        self._tls = tls
        self._login = {"name": user, "password": password} if user else None
        self._at = randrange(len(members))
        self.leaving: Callable[[Address], object] = lambda _: None
        self.start_again()

    def start_again(self) -> None:
        """Also in a forked child: connections are the parent's, as long as it has them."""
        self._parents = getattr(self, "_pools", None)
        self._pools = urllib3.PoolManager(len(self.members), maxsize=AT_ONCE + MOST, ssl_context=self._tls)
        self._token = ""
        self._lock = threading.RLock()
        self._turns = ConcurrencyLimit(self.called, self.timeout)

    def close(self) -> None:
        self.closed = True
        self._pools.clear()

    # -- one question ---------------------------------------------------------------------------------------------

    def ask(self, path: str, question: Mapping[str, Any], *, twice: bool = True) -> dict[str, Any]:
        """The answer. `twice`: it may be asked again where what became of it isn't known."""
        with self._turns.turn():
            return self._asked(path, question, _answer, twice=twice)[1]

    def stream(self, path: str, question: Mapping[str, Any]) -> tuple[Address, Stream]:
        """The answers to this, one line each, behind the first one; and the member that gives them."""
        return self._asked(path, question, _begun)

    def _asked(
        self,
        path: str,
        question: Mapping[str, Any],
        read: Callable[[urllib3.BaseHTTPResponse], T],
        *,
        twice: bool = True,
    ) -> tuple[Address, T]:
        body, end, anew = json.dumps(question).encode(), time.monotonic() + self.timeout, False
        tried = refused = 0  # the latter since the last one that took the question
        while True:
            member = self.member()
            tried += 1
            try:
                self._log_in(end)
                last = not twice or len(self.members) == 1
                return member, self._tried(member, path, body, end, read, last=last)
            except _Unauthenticated as denied:
                if anew or self._login is None:
                    raise EngineError(f"{self.called}: {denied}") from denied
                anew, self._token = True, ""
            except _Unasked as trouble:
                refused += 1
                self.leave(member)
                if time.monotonic() > end or refused >= 2 * len(self.members):
                    raise EngineError(f"{member}: {trouble}") from trouble.__cause__
            except _Unknown as trouble:
                refused = 0
                self.leave(member)
                if not twice or time.monotonic() + REST + SHORTEST > end:
                    raise EngineError(f"{member}: {trouble}") from trouble.__cause__
                if tried >= len(self.members):
                    time.sleep(REST)

    def _tried(
        self,
        member: Address,
        path: str,
        body: bytes,
        end: float,
        read: Callable[[urllib3.BaseHTTPResponse], T],
        *,
        last: bool,
    ) -> T:
        left = max(end - time.monotonic(), SHORTEST)
        part = left if last else max(left / min(len(self.members), 3), SHORTEST)
        timeout = urllib3.Timeout(connect=left if last else min(part, CONNECT), read=part)
        if self.closed:
            raise EngineClosed(self.called)
        try:
            pool = self._pools.connection_from_host(member.host, member.port, "https" if self._tls else "http")
            reply = pool.urlopen(
                "POST", path, body, self.headers(), False, redirect=False, timeout=timeout, preload_content=False
            )
            return read(reply)
        except (NewConnectionError, ConnectTimeoutError) as error:
            raise _Unasked(f"no connection: {error}") from error
        except HTTPError as error:
            if self.closed:
                raise EngineClosed(self.called) from error
            raise _Unknown(f"no answer: {type(error).__name__}: {error}") from error

    def facts(self) -> dict[str, dict[str, str]]:
        """What each member says of itself."""
        found = {}
        for member in self.members:
            end = time.monotonic() + self.timeout
            try:
                self._log_in(end)
                told = self._tried(member, "/v3/maintenance/status", b"{}", end, _answer, last=False)
                role = "leader" if told["header"]["member_id"] == told.get("leader") else "member"
                found[str(member)] = {"etcd": str(told["version"]), "role": role}
            except (EngineError, _Unasked, _Unauthenticated) as trouble:
                found[str(member)] = {"trouble": str(trouble)}
        return found

    def member(self) -> Address:
        """The one that is asked now."""
        return self.members[self._at]

    def leave(self, member: Address) -> None:
        """Ask the next one from now on."""
        if self.members[self._at] is member:
            self._at = (self._at + 1) % len(self.members)
            self.leaving(member)

    def headers(self) -> dict[str, str]:
        # A member that has lost its leader says so, then, and doesn't keep who watches waiting.
        headers = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
        return headers | {"Authorization": self._token} if self._token else headers

    def _log_in(self, end: float) -> None:
        if self._login is None or self._token:
            return
        with self._lock:
            if not self._token:
                body = json.dumps(self._login).encode()
                alone = len(self.members) == 1
                told = self._tried(self.member(), "/v3/auth/authenticate", body, end, _answer, last=alone)
                self._token = str(told["token"])


class _Unasked(Exception):
    """It has not come to the question."""


class _Unauthenticated(Exception):
    """A token that isn't known any more; nothing was done."""


def _answer(reply: urllib3.BaseHTTPResponse) -> dict[str, Any]:
    return _said(reply.status, reply.data)


def _begun(reply: urllib3.BaseHTTPResponse) -> Stream:
    try:
        if reply.status != 200:
            _answer(reply)
        lines = iter(reply)
        result = _said(reply.status, next(lines, b"")).get("result", {})
        sock: socket.socket | None = getattr(reply.connection, "sock", None)
        if sock is None or not result.get("created") or result.get("canceled"):
            raise EngineError(f"etcd: a watch was not begun: {result.get('cancel_reason')}")
        sock.settimeout(None)
    except BaseException:
        reply.close()
        raise
    return Stream(reply, sock, lines)


def _said(status: int, data: bytes) -> dict[str, Any]:
    try:
        told = json.loads(data)
        if not isinstance(told, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise _Unknown(f"HTTP {status}, and none of etcd's answers: {data[:80]!r}") from error
    if status == 200 and "error" not in told:
        return told
    message, code = str(told.get("message") or told.get("error")), told.get("code")
    if code == _NOT_FOUND:
        raise Gone(message)
    if code == _UNAUTHENTICATED or "auth store is old" in message:
        raise _Unauthenticated(message)
    if message == "unexpected EOF":  # half a question has come to it
        raise _Unasked(message)
    if code in _PASSES or "leader" in message:
        raise _Unknown(message)
    raise EngineError(f"etcd: {message}")


def b64(data: bytes) -> str:
    return b64encode(data).decode()


def unb64(text: str) -> bytes:
    return b64decode(text)
