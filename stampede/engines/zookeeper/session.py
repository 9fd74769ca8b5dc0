"""Sessions of kazoo. A lost session is never used again: its nodes are removed, and kazoo would continue with a new one
under the same client."""

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
"""The lengths of leases, in seconds, for which sessions are made. A lease uses the next longer one: few are needed."""

_ODD = ValueError, IndexError, struct.error
"""The errors that kazoo passes to the caller if it can't decode a reply."""

Notify = Callable[[], object]


class ZooKeeperSession:
    """A session with a client of its own. Its requests reach the server in their order."""

    def __init__(self, hosts: str, asked: float, timeout: float, login: str, tls: dict[str, Any]) -> None:
        self.timeout = timeout
        self.dead = False
        self._lock = threading.RLock()
        self._once: dict[tuple[str, bool], set[Notify]] = {}
        self._always: dict[str, set[Notify]] = {}
        secrets: dict[str, Any] = {"auth_data": [("digest", login)], "default_acl": CREATOR_ALL_ACL} if login else {}
        again = KazooRetry(max_tries=-1, delay=0.05, backoff=1.5, max_delay=0.5)
        self.client = client = KazooClient(hosts, asked, connection_retry=again, **secrets, **tls)
        self._line = ZooKeeperLine(client, timeout)
        client.add_listener(self._on_state)

    @property
    def seconds(self) -> float:
        """The session's time-out: the servers end it so many seconds after its last sign of life."""
        return self._line.seconds

    def start(self) -> None:
        """Connect, or raise EngineError."""
        try:
            with signals_blocked():  # for the client's threads
                connected = self.client.start_async()
            patience = self.timeout + TAKEN_ON * (len(self.client.hosts) - 1)  # more time for servers that are down
            if not (connected.wait(patience) and self._line.granted.wait(self.timeout)):
                raise KazooTimeoutError("no session")
        except (KazooException, KazooTimeoutError, OSError, RuntimeError, *_ODD) as error:
            self.close()
            raise EngineError(f"zookeeper: no server of {self.client.hosts} answers: {error!r}") from error

    def close(self) -> None:
        """End the session for good; the servers then remove its nodes."""
        self.dead = True
        self._notify_all()
        begun("stampede-zookeeper-end", self._end)  # in a thread, as it may hang; without one, the servers end it later

    def _end(self) -> None:
        try:
            self.client.stop()
            self.client.close()
        except Exception:  # kazoo raises a plain Exception if the client was not started, has ended, or still runs
            return

    def ensure_outlasts(self, lease: float, asked: float) -> None:
        """Return when the session, unless it has ended already, outlasts a lease that begins at `asked`. Our server may
        lose its leader right after a reply. Then the leader knows only the signs of life that it has asked for before.
        The latest of these may be old if this process was frozen: send another one, and wait until the leader knows
        it."""
        if not self._outlasts(asked + lease, asked):
            self.reply(self.client.exists_async("/"))
            if not self._outlasts(asked + lease, asked):  # it does if the connection is a new one
                time.sleep(RELAY)

    def _outlasts(self, end: float, asked: float) -> bool:
        return self._line.last_sign(asked - RELAY) + self.seconds >= end

    # -- requests -------------------------------------------------------------------------------------------------

    def reply(self, question: Any, until: float | None = None) -> Any:
        """Wait for the reply to an asynchronous request of kazoo. EngineError: there is none, and it is not known
        whether the request was executed."""
        try:
            return question.get(timeout=self.timeout if until is None else max(until - time.monotonic(), 0.001))
        except (NoNodeError, NodeExistsError, BadVersionError):
            raise
        except KazooException as error:
            raise EngineError(f"zookeeper: {type(error).__name__} {error}") from error
        except self.client.handler.timeout_exception as error:
            raise EngineError(f"zookeeper: no reply for {self.timeout:g} s") from error
        except _ODD as error:
            raise EngineError(f"zookeeper: a reply that can't be read: {error}") from error

    def make(self, path: str) -> None:
        """Make a node and all nodes above it."""
        parts = path.strip("/").split("/")
        made = [self.client.create_async("/" + "/".join(parts[: count + 1])) for count in range(len(parts))]
        for each in made:
            try:
                self.reply(each)
            except NodeExistsError:
                pass

    # -- watches --------------------------------------------------------------------------------------------------

    def watch_once(self, path: str, seen: frozenset[str] | None, notify: Notify) -> Callable[[], None]:
        """Call `notify` when a node is removed; with `seen`, when the names of its children differ from these. Return a
        function that ends the watch."""
        key = (path, seen is not None)
        with self._lock:
            fresh = key not in self._once
            self._once.setdefault(key, set()).add(notify)
        watch = (lambda _: self._notify_once(key)) if fresh else None
        try:
            if seen is not None:
                if frozenset(self.reply(self.client.get_children_async(path, watch=watch))) != seen:
                    notify()
            elif fresh:
                self.reply(self.client.get_async(path, watch=watch))
        except NoNodeError:
            self._notify_once(key)
        except BaseException:
            self._notify_once(key)
            raise
        if self.dead:
            notify()

        def end() -> None:
            with self._lock:
                self._once.get(key, set()).discard(notify)

        return end

    def watch_always(self, path: str, notify: Notify) -> Callable[[], None]:
        """Call `notify` after each change of a node, which need not exist. Return a function that ends the watch."""
        with self._lock:
            self._always.setdefault(path, set()).add(notify)
        self.reply(self.client.exists_async(path, watch=self._on_event))  # kazoo keeps one watch, however often we ask
        if self.dead:
            notify()

        def end() -> None:
            with self._lock:
                callbacks = self._always.get(path, set())
                callbacks.discard(notify)
                if not callbacks:
                    self._always.pop(path, None)

        return end

    def _on_event(self, event: Any) -> None:
        with self._lock:
            callbacks = list(self._always.get(event.path, ()))

        def notify_all(_: object) -> None:
            for notify in callbacks:
                notify()

        if callbacks and event.type != "NONE":  # notify after the next watch is set, or a change in between is missed
            self.client.exists_async(event.path, watch=self._on_event).rawlink(notify_all)
        else:
            notify_all(event)

    def _notify_once(self, key: tuple[str, bool]) -> None:
        with self._lock:
            callbacks = self._once.pop(key, set())
        for notify in callbacks:
            notify()

    def _notify_all(self) -> None:
        """Notify all watchers, because a change may have been missed."""
        with self._lock:
            once, self._once = self._once, {}
            callbacks = [notify for each in (*once.values(), *self._always.values()) for notify in each]
        for notify in callbacks:
            notify()

    def _on_state(self, state: str) -> None:
        if state == KazooState.LOST:
            self.close()
        elif state == KazooState.CONNECTED:
            with self._lock:
                paths = list(self._always)
            for path in paths:
                self.client.exists_async(path, watch=self._on_event)
        self._notify_all()


class Sessions:
    """The sessions of one engine in this process, by their lengths. Most engines need one."""

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
        """Begin without sessions in a forked child. The parent's are never used, but kept: the garbage collector would
        close them."""
        self._parents += self._sessions.values()
        self._sessions, self._lock = {}, threading.Lock()
        forks.closing(self, partial(_close, self._sessions))

    def of(self, lease: float) -> ZooKeeperSession:
        """Return a session whose time-out exceeds a lease by `MARGIN`, and start it if needed."""
        length = max(next((each for each in LEASES if each >= lease), LEASES[-1]) + MARGIN, self._least)
        session = self._sessions.get(length)
        if session is None or session.dead:
            session = self._begun(length)
        if session.seconds < lease + MARGIN:
            most = max(session.seconds - MARGIN, 0.0)
            raise EngineError(
                f"zookeeper: a lease of {lease:g} s is too long: give {most:g} s at most, because "
                f"the servers end sessions after {session.seconds:g} s, or raise their maxSessionTimeout"
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
