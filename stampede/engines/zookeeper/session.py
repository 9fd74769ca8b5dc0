"""Sessions of kazoo's. A lost one is never used again: what stood on it has gone, and kazoo goes on with another."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, KazooException, NodeExistsError, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL

from stampede.engines.zookeeper.line import MARGIN, RELAY, TAKEN_ON, ZooKeeperLine
from stampede.errors import EngineClosed, EngineError
from stampede.runtime import forks
from stampede.runtime.threads import begun, signals_blocked

__all__ = ["Sessions", "ZooKeeperSession"]

LEASES = [count * 10**power for power in range(5) for count in (1, 1.5, 2, 3, 4, 5, 6, 8)]
"""Seconds of the leases that sessions are made for, so that few do for all."""

_ODD = ValueError, IndexError, struct.error
"""What kazoo hands to the caller, as it is, of a reply that it can't decode."""

Told = Callable[[], object]


class ZooKeeperSession:
    """One session of one server's clients; all its questions go to the server in their order."""

    def __init__(self, hosts: str, asked: float, timeout: float, login: str, tls: dict[str, Any]) -> None:
        self.timeout = timeout
        self.dead = False
        self._lock = threading.RLock()
        self._once: dict[tuple[str, bool], set[Told]] = {}
        self._always: dict[str, set[Told]] = {}
        secrets: dict[str, Any] = {"auth_data": [("digest", login)], "default_acl": CREATOR_ALL_ACL} if login else {}
        again = KazooRetry(max_tries=-1, delay=0.05, backoff=1.5, max_delay=0.5)
        self.client = client = KazooClient(hosts, asked, connection_retry=again, **secrets, **tls)
        self._line = ZooKeeperLine(client, timeout)
        client.add_listener(self._changed)

    @property
    def seconds(self) -> float:
        """After which the servers end it, if they hear nothing."""
        return self._line.seconds

    def start(self) -> None:
        try:
            with signals_blocked():  # for the client's threads
                connected = self.client.start_async()
            patience = self.timeout + TAKEN_ON * (len(self.client.hosts) - 1)  # for those that are down
            if not (connected.wait(patience) and self._line.granted.wait(self.timeout)):
                raise KazooTimeoutError("no session")
        except (KazooException, KazooTimeoutError, OSError, RuntimeError, *_ODD) as error:
            self.close()
            raise EngineError(f"zookeeper: no server of {self.client.hosts} answers: {error!r}") from error

    def close(self) -> None:
        """For good, with all that stands on it."""
        self.dead = True
        self._ring()
        begun("stampede-zookeeper-end", self._end)  # it may hang; where there is no thread for it, the servers end it

    def _end(self) -> None:
        try:
            self.client.stop()
            self.client.close()
        except Exception:  # kazoo raises a plain one, where it was never begun, has ended, or goes on
            return

    def vouch(self, lease: float, asked: float) -> None:
        """Returns when it outlasts such a lease from that moment on, as far as it has not ended by then.

        Its server may be cut off from the leader as soon as it has answered. Then the leader goes by what it was told
        before, in which nothing of now may be, nor of long before, if this process stood still.
        """
        if not self._outlasts(asked + lease, asked):
            self.told(self.client.exists_async("/"))
            if not self._outlasts(asked + lease, asked):  # nor is the connection a new one
                time.sleep(RELAY)

    def _outlasts(self, end: float, asked: float) -> bool:
        return self._line.known(asked - RELAY) + self.seconds >= end

    # -- questions ------------------------------------------------------------------------------------------------

    def told(self, question: Any, until: float | None = None) -> Any:
        """The answer. EngineError: there is none, and nobody knows what became of the question."""
        try:
            return question.get(timeout=self.timeout if until is None else max(until - time.monotonic(), 0.001))
        except (NoNodeError, NodeExistsError, BadVersionError):
            raise
        except KazooException as error:
            raise EngineError(f"zookeeper: {type(error).__name__} {error}") from error
        except self.client.handler.timeout_exception as error:
            raise EngineError(f"zookeeper: no answer for {self.timeout:g} s") from error
        except _ODD as error:
            raise EngineError(f"zookeeper: a reply that can't be read: {error}") from error

    def make(self, path: str) -> None:
        """A node, and all above it."""
        parts = path.strip("/").split("/")
        made = [self.client.create_async("/" + "/".join(parts[: count + 1])) for count in range(len(parts))]
        for each in made:
            try:
                self.told(each)
            except NodeExistsError:
                pass

    # -- news -----------------------------------------------------------------------------------------------------

    def once(self, path: str, seen: frozenset[str] | None, told: Told) -> Callable[[], None]:
        """Have it called when the node has gone; or, if there are some `seen`, when its children aren't these any more.
        Returns what ends that."""
        key = (path, seen is not None)
        with self._lock:
            fresh = key not in self._once
            self._once.setdefault(key, set()).add(told)
        watch = (lambda _: self._ring_once(key)) if fresh else None
        try:
            if seen is not None:
                if frozenset(self.told(self.client.get_children_async(path, watch=watch))) != seen:
                    told()
            elif fresh:
                self.told(self.client.get_async(path, watch=watch))
        except NoNodeError:
            self._ring_once(key)
        except BaseException:
            self._ring_once(key)
            raise
        if self.dead:
            told()

        def end() -> None:
            with self._lock:
                self._once.get(key, set()).discard(told)

        return end

    def always(self, path: str, told: Told) -> Callable[[], None]:
        """Have it called after each change of a node, there or not; returns what ends that."""
        with self._lock:
            self._always.setdefault(path, set()).add(told)
        self.told(self.client.exists_async(path, watch=self._event))  # one of kazoo's, however often it is asked for
        if self.dead:
            told()

        def end() -> None:
            with self._lock:
                those = self._always.get(path, set())
                those.discard(told)
                if not those:
                    self._always.pop(path, None)

        return end

    def _event(self, event: Any) -> None:
        with self._lock:
            those = list(self._always.get(event.path, ()))

        def tell(_: object) -> None:
            for told in those:
                told()

        if those and event.type != "NONE":  # told when the next change is watched for, or that would be missed
            self.client.exists_async(event.path, watch=self._event).rawlink(tell)
        else:
            tell(event)

    def _ring_once(self, key: tuple[str, bool]) -> None:
        with self._lock:
            those = self._once.pop(key, set())
        for told in those:
            told()

    def _ring(self) -> None:
        """Something may have been missed."""
        with self._lock:
            once, self._once = self._once, {}
            those = [told for each in (*once.values(), *self._always.values()) for told in each]
        for told in those:
            told()

    def _changed(self, state: str) -> None:
        if state == KazooState.LOST:
            self.close()
        elif state == KazooState.CONNECTED:
            with self._lock:
                paths = list(self._always)
            for path in paths:
                self.client.exists_async(path, watch=self._event)
        self._ring()


class Sessions:
    """Those of one engine and process, by their lengths: most have one."""

    def __init__(
        self,
        hosts: str,
        *,
        login: str = "",
        timeout: float = 1.0,
        least: float = 0.0,
        tls: dict[str, Any] | None = None,
    ) -> None:
        self.timeout, self._least = timeout, least
        self._terms = hosts, login, tls or {}
        self._parents: list[ZooKeeperSession] = []
        self._sessions: dict[float, ZooKeeperSession] = {}
        self._closed = False
        self._lock = threading.Lock()
        forks.closing(self, partial(_close, self._sessions))

    def start_again(self) -> None:
        """In a forked child: the parent's are kept, so that nobody closes them, and never used."""
        self._parents += self._sessions.values()
        self._sessions, self._lock = {}, threading.Lock()
        forks.closing(self, partial(_close, self._sessions))

    def of(self, lease: float) -> ZooKeeperSession:
        """One that outlasts such a lease."""
        length = max(next((each for each in LEASES if each >= lease), LEASES[-1]) + MARGIN, self._least)
        session = self._sessions.get(length)
        if session is None or session.dead:
            session = self._begun(length)
        if session.seconds < lease + MARGIN:
            most = max(session.seconds - MARGIN, 0.0)
            raise EngineError(
                f"zookeeper: a lock can't have a lease of {lease:g} s, but of {most:g} at most: "
                f"its servers end sessions after {session.seconds:g} s (their maxSessionTimeout)"
            )
        return session

    def _begun(self, length: float) -> ZooKeeperSession:
        if not self._lock.acquire(timeout=2 * self.timeout):
            raise EngineError("zookeeper: no server answers")
        try:
            self.check()
            session = self._sessions.get(length)
            if session is None or session.dead:
                hosts, login, tls = self._terms
                session = ZooKeeperSession(hosts, length, self.timeout, login, tls)
                session.start()
                self._sessions[length] = session
            return session
        finally:
            self._lock.release()

    def check(self) -> None:
        if self._closed:
            raise EngineClosed("zookeeper")

    def close(self) -> None:
        self._closed = True
        _close(self._sessions)


def _close(sessions: dict[float, ZooKeeperSession]) -> None:
    for session in list(sessions.values()):
        session.close()
