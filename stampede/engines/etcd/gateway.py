"""Requests to etcd, over the JSON gateway that each member offers besides gRPC. This uses HTTP because the library of
gRPC does not survive a fork, and serves only one event loop of a process."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from stampede.engines.kit.concurrency import AT_ONCE, ConcurrencyLimit
from stampede.engines.kit.url import Address
from stampede.errors import EngineClosed, EngineError
from stampede.runtime.chance import randrange

__all__ = ["MOST", "Gateway", "Gone", "Stream", "b64", "unb64"]

T = TypeVar("T")

MOST = 256
"""The most streams of one process: each needs a connection. Further waiters poll instead of being notified."""

CONNECT = 1.0
"""The most seconds to wait for a member to accept a connection, if there are other members."""

SHORTEST = 0.2
"""The seconds that each member has at least for its reply."""

REST = 0.05
"""Seconds before the next request after all members have failed: they are probably electing a leader."""

_NOT_FOUND, _UNAUTHENTICATED = 5, 16
_PASSES = {4, 8, 14}  # a time-out, too many requests, no leader: the request may have been executed all the same


class Gone(EngineError):
    """Raised if the object of a request does not exist: its lease has ended."""


class _OutcomeUnknown(EngineError):
    """Raised if it is not known whether a request was executed."""


class Stream(NamedTuple):
    """A reply that does not end. Each line is JSON."""

    reply: urllib3.BaseHTTPResponse
    sock: socket.socket
    lines: Iterator[bytes]


class Gateway:
    """The members of a cluster, for all threads. If one member does not reply, the request goes to the next one. A
    request that must not be executed twice goes to the next member only if the first has certainly not received it."""

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
        """Begin with no connections; also in a forked child, where the open ones are the parent's."""
        self._parents = getattr(self, "_pools", None)
        self._pools = urllib3.PoolManager(len(self.members), maxsize=AT_ONCE + MOST, ssl_context=self._tls)
        self._token = ""
        self._lock = threading.RLock()
        self._turns = ConcurrencyLimit(self.called, self.timeout)

    def close(self) -> None:
        self.closed = True
        self._pools.clear()

    # -- requests -------------------------------------------------------------------------------------------------

    def ask(self, path: str, question: Mapping[str, Any], *, twice: bool = True) -> dict[str, Any]:
        """Send a request and return the reply. `twice`: it may be sent again if its outcome is not known."""
        with self._turns.turn():
            return self._asked(path, question, _answer, twice=twice)[1]

    def stream(self, path: str, question: Mapping[str, Any]) -> tuple[Address, Stream]:
        """Open a stream, read its first line, and return it with the member that sends it."""
        return self._asked(path, question, _open_stream)

    def _asked(
        self,
        path: str,
        question: Mapping[str, Any],
        read: Callable[[urllib3.BaseHTTPResponse], T],
        *,
        twice: bool = True,
    ) -> tuple[Address, T]:
        body, end, logged_in_again = json.dumps(question).encode(), time.monotonic() + self.timeout, False
        tried = refused = 0  # `refused`: the members in a row that did not receive the request
        while True:
            member = self.member()
            tried += 1
            try:
                self._log_in(end)
                last = not twice or len(self.members) == 1
                return member, self._tried(member, path, body, end, read, last=last)
            except _Unauthenticated as denied:
                if logged_in_again or self._login is None:
                    raise EngineError(f"{self.called}: {denied}") from denied
                logged_in_again, self._token = True, ""
            except _NotReceived as trouble:
                refused += 1
                self.leave(member)
                if time.monotonic() > end or refused >= 2 * len(self.members):
                    raise EngineError(f"{member}: {trouble}") from trouble.__cause__
            except _OutcomeUnknown as trouble:
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
            raise _NotReceived(f"no connection: {error}") from error
        except HTTPError as error:
            if self.closed:
                raise EngineClosed(self.called) from error
            raise _OutcomeUnknown(f"no reply: {type(error).__name__}: {error}") from error

    def facts(self) -> dict[str, dict[str, str]]:
        """Return the version and the role of each member, or why it could not be asked."""
        found = {}
        for member in self.members:
            end = time.monotonic() + self.timeout
            try:
                self._log_in(end)
                reply = self._tried(member, "/v3/maintenance/status", b"{}", end, _answer, last=False)
                role = "leader" if reply["header"]["member_id"] == reply.get("leader") else "member"
                found[str(member)] = {"etcd": str(reply["version"]), "role": role}
            except (EngineError, _NotReceived, _Unauthenticated) as trouble:
                found[str(member)] = {"trouble": str(trouble)}
        return found

    def member(self) -> Address:
        """Return the member that gets the next request."""
        return self.members[self._at]

    def leave(self, member: Address) -> None:
        """Send the next requests to another member than this one."""
        if self.members[self._at] is member:
            self._at = (self._at + 1) % len(self.members)
            self.leaving(member)

    def headers(self) -> dict[str, str]:
        # With `hasleader`, a member that has lost its leader ends its watches, which would otherwise be silent.
        headers = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
        return headers | {"Authorization": self._token} if self._token else headers

    def _log_in(self, end: float) -> None:
        if self._login is None or self._token:
            return
        with self._lock:
            if not self._token:
                body = json.dumps(self._login).encode()
                alone = len(self.members) == 1
                reply = self._tried(self.member(), "/v3/auth/authenticate", body, end, _answer, last=alone)
                self._token = str(reply["token"])


class _NotReceived(Exception):
    """Raised if a member has certainly not received a request."""


class _Unauthenticated(Exception):
    """Raised if a member does not know the token (any more). It has not executed the request."""


def _answer(reply: urllib3.BaseHTTPResponse) -> dict[str, Any]:
    return _parsed(reply.status, reply.data)


def _open_stream(reply: urllib3.BaseHTTPResponse) -> Stream:
    try:
        if reply.status != 200:
            _answer(reply)
        lines = iter(reply)
        result = _parsed(reply.status, next(lines, b"")).get("result", {})
        sock: socket.socket | None = getattr(reply.connection, "sock", None)
        if sock is None or not result.get("created") or result.get("canceled"):
            raise EngineError(f"etcd: a watch could not be opened: {result.get('cancel_reason')}")
        sock.settimeout(None)
    except BaseException:
        reply.close()
        raise
    return Stream(reply, sock, lines)


def _parsed(status: int, data: bytes) -> dict[str, Any]:
    """Return the reply, or raise what it means: Gone, EngineError, or one of the private errors above."""
    try:
        reply = json.loads(data)
        if not isinstance(reply, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise _OutcomeUnknown(f"HTTP {status}, and the body is no reply of etcd: {data[:80]!r}") from error
    if status == 200 and "error" not in reply:
        return reply
    message, code = str(reply.get("message") or reply.get("error")), reply.get("code")
    if code == _NOT_FOUND:
        raise Gone(message)
    if code == _UNAUTHENTICATED or "auth store is old" in message:
        raise _Unauthenticated(message)
    if message == "unexpected EOF":  # the member has received only a part of the request
        raise _NotReceived(message)
    if code in _PASSES or "leader" in message:
        raise _OutcomeUnknown(message)
    raise EngineError(f"etcd: {message}")


def b64(data: bytes) -> str:
    return b64encode(data).decode()


def unb64(text: str) -> bytes:
    return b64decode(text)
