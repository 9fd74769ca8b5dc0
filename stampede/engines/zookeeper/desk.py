"""What a lock's queue is asked: blocking, for both colours.

A lock is a node; below it stands an ephemeral sequential one for each token that has it or waits for it, which ends
with its session. Within one session a lease is kept by its own process: who isn't renewed in time is removed by it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kazoo.exceptions import NoNodeError

from stampede.engines.whereabouts import here, parts_of
from stampede.engines.zookeeper.line import MARGIN
from stampede.engines.zookeeper.queue import Place, beginning, inside, places, quoted, unquoted
from stampede.engines.zookeeper.session import Session, Sessions
from stampede.errors import EngineError
from stampede.ports import Busy, Granted, Held
from stampede.threads import begun

__all__ = ["Desk", "Queued"]

TRIES = 10
"""How often a lock is asked for again because its node has gone meanwhile."""

WAITING = 30.0
"""Seconds for which one who waits has its place without asking again."""

ROUND = 0.1
"""Seconds between two looks at what is over, or is to be removed yet."""


@dataclass(slots=True)
class Queued(Busy):
    """Busy, and what has to go before that can change."""

    session: Session | None = None
    path: str = ""  # what is to be watched: a node, or the children of one
    seen: frozenset[str] | None = None  # those


@dataclass(slots=True)
class _Own:
    """A token of this process, with its place in a queue."""

    session: Session
    end: float
    node: str = ""  # as far as it is known
    fence: int = 0
    granted: bool = False
    leaving: bool = False  # its removal has been asked for
    lock: threading.Lock = field(default_factory=threading.Lock)


class Desk:
    """The locks of one engine, as this process asks for them."""

    def __init__(self, sessions: Sessions, root: str) -> None:
        self._sessions, self._locks = sessions, f"{root}/lock"
        self.start_again()

    def start_again(self) -> None:
        """Also in a forked child: locks are the parent's."""
        self._owned: dict[tuple[str, bytes], _Own] = {}
        self._owed: dict[tuple[str, bytes, int], _Own] = {}
        self._lock = threading.RLock()
        self._sweeper: threading.Thread | None = None

    def check(self) -> None:
        self._sessions.check()

    def close(self) -> None:
        with self._lock:
            self._owned.clear()
            self._owed.clear()

    # -- acquire --------------------------------------------------------------------------------------------------

    def acquire(self, name: str, token: bytes, seconds: float, waits: bool, room: float) -> Granted | Busy:
        for _ in range(TRIES):
            own = self._standing(name, token)
            sent, fresh = time.monotonic(), own is None
            session = self._sessions.of(seconds) if own is None else own.session
            session.vouch(seconds, sent)
            if own is None:
                own = self._put(name, token, _Own(session, sent + max(seconds, WAITING)))
                try:
                    queue = self._made(name, token, own, seconds, room)
                except EngineError:
                    if not waits:
                        self._owe(name, token, own)
                    raise
            else:
                queue = self._listed(name, token, own)
            if queue is None:
                continue
            elder = next((each for each in queue if each.token == token), None)
            if elder is not None and elder.node != own.node and elder in queue[: inside(queue)]:
                return self._anothers(name, token, own, elder)
            index = next((at for at, each in enumerate(queue) if each.node == own.node), None)
            if index is None:  # somebody has removed it
                self._forget(name, token, own)
                continue
            if index >= inside(queue):
                return self._refused(name, token, own, queue, index, room, waits)
            if not fresh and (stat := self._seen(name, own)):
                own.fence = stat.czxid
            elif not fresh:
                self._forget(name, token, own)
                continue
            own.granted, own.end = True, sent + seconds
            if own.session.dead or own.end <= time.monotonic() or not own.fence:
                self._owe(name, token, own)
                continue
            return Granted(fence=own.fence)
        raise EngineError("zookeeper: this lock is lost faster than it can be had")

    def _made(self, name: str, token: bytes, own: _Own, seconds: float, room: float) -> list[Place] | None:
        """The queue with a place of ours. Both questions go in one round trip: a session's are answered in turn."""
        client, top = own.session.client, self._top(name)
        path = f"{top}/{beginning(token, room, seconds)}"
        asked = client.create_async(path, here().encode(), ephemeral=True, sequence=True, include_data=True)
        listed = client.get_children_async(top)
        until = time.monotonic() + own.session.timeout
        try:
            made, stat = own.session.told(asked, until)
            own.node, own.fence = made.rpartition("/")[2], stat.czxid
            return places(own.session.told(listed, until))
        except NoNodeError:
            self._forget(name, token, own)
            own.session.make(top)
            return None

    def _listed(self, name: str, token: bytes, own: _Own) -> list[Place] | None:
        """The queue as it is. One of ours whose creation had no answer is found by its token."""
        client, top = own.session.client, self._top(name)
        if not own.node:
            client.sync_async(top)  # this server may be another, and behind the one that has created it
        try:
            queue = places(own.session.told(client.get_children_async(top)))
        except NoNodeError:
            self._forget(name, token, own)
            return None
        if not own.node:
            own.node = next((each.node for each in queue if each.token == token), "")
        return queue

    def _refused(
        self, name: str, token: bytes, own: _Own, queue: list[Place], index: int, room: float, waits: bool
    ) -> Busy:
        own.granted = False
        before = queue[index - 1]
        if waits:
            own.end = time.monotonic() + WAITING
        else:
            self._leave(name, token, own)
            queue = queue[:index] + queue[index + 1 :]
        first, top = queue[0], self._top(name)
        if room == 1:
            return Queued(first.token, first.lease, None, own.session, f"{top}/{before.node}")
        return Queued(first.token, first.lease, None, own.session, top, frozenset(each.node for each in queue))

    def _anothers(self, name: str, token: bytes, own: _Own, elder: Place) -> Granted:
        """Another process of ours has the lock by this very token, and keeps it: it can't be renewed from here."""
        fence = own.session.told(own.session.client.exists_async(f"{self._top(name)}/{elder.node}"))
        self._leave(name, token, own)
        if fence is None:
            raise EngineError("zookeeper: the lock was lost while it was asked for")
        return Granted(fence=fence.czxid)

    def watch(self, busy: Queued, told: Callable[[], object]) -> Callable[[], None]:
        """Have it called when it is worth to ask again; returns what ends that."""
        assert busy.session is not None
        return busy.session.once(busy.path, busy.seen, told)

    # -- while it is held -----------------------------------------------------------------------------------------

    def renew(self, name: str, token: bytes, seconds: float) -> bool:
        own = self._standing(name, token)
        if own is None or not own.granted:
            return False
        if own.session.seconds < seconds + MARGIN:
            raise EngineError(
                f"zookeeper: this lock was taken for a lease of at most {own.session.seconds - MARGIN:g} s, "
                f"and can't have one of {seconds:g}: take it with that, or with session= in the URL"
            )
        sent = time.monotonic()
        own.session.vouch(seconds, sent)
        if self._seen(name, own) is None or own.session.dead:
            self._forget(name, token, own)
            return False
        own.end = sent + seconds
        return True

    def _seen(self, name: str, own: _Own) -> Any:
        """Its node, in one round trip. A server that has lost the others knows of no session that they have ended: so
        its leader is asked, and what is sent behind that is answered behind it."""
        path = self._path(name, own)
        own.session.client.sync_async(path)
        return own.session.told(own.session.client.exists_async(path))

    # -- release --------------------------------------------------------------------------------------------------

    def release(self, name: str, token: bytes) -> bool:
        own = self._standing(name, token)
        return self._broken(name, token) if own is None else self._leave(name, token, own)

    def _leave(self, name: str, token: bytes, own: _Own) -> bool:
        """Remove it. What has no answer is asked again by the sweeper, until it is done or the session has ended."""
        granted, leaving = own.granted, own.leaving
        own.leaving = True
        try:
            if not own.node and (self._listed(name, token, own) is None or not own.node):
                self._forget(name, token, own)
                return False
            return self._left(name, token, own, own.session.client.delete_async(self._path(name, own)), leaving)
        except EngineError:
            own.granted = granted
            self._owe(name, token, own, keep=True)
            raise

    def _left(self, name: str, token: bytes, own: _Own, question: Any, leaving: bool = False) -> bool:
        try:
            own.session.told(question)
        except NoNodeError:
            self._forget(name, token, own)
            return leaving and own.granted  # then it is gone by the question that had no answer
        except EngineError:
            self._owe(name, token, own, keep=True)
            raise
        self._forget(name, token, own)
        return own.granted

    def _broken(self, name: str, token: bytes) -> bool:
        """Another process's: it learns of that when it renews."""
        session, top = self._sessions.of(1.0), self._top(name)
        try:
            queue = places(session.told(session.client.get_children_async(top)))
            index = next((at for at, each in enumerate(queue) if each.token == token), None)
            if index is None:
                return False
            session.told(session.client.delete_async(f"{top}/{queue[index].node}"))
        except NoNodeError:
            return False
        return index < inside(queue)

    # -- what this process has ------------------------------------------------------------------------------------

    def _top(self, name: str) -> str:
        return f"{self._locks}/{quoted(name)}"

    def _path(self, name: str, own: _Own) -> str:
        return f"{self._top(name)}/{own.node}"

    def _standing(self, name: str, token: bytes) -> _Own | None:
        own = self._owned.get((name, token))
        if own is not None and (own.session.dead or own.end <= time.monotonic()):
            self._owe(name, token, own)
            return None
        return own

    def _put(self, name: str, token: bytes, own: _Own) -> _Own:
        with self._lock:
            self._owned[name, token] = own
            self._sweeps()
        return own

    def _forget(self, name: str, token: bytes, own: _Own) -> None:
        with self._lock:
            if self._owned.get((name, token)) is own:
                del self._owned[name, token]
            self._owed.pop((name, token, id(own)), None)

    def _owe(self, name: str, token: bytes, own: _Own, *, keep: bool = False) -> None:
        """Have it removed, in nobody's time."""
        with self._lock:
            if not keep:
                self._forget(name, token, own)
            self._owed[name, token, id(own)] = own
            self._sweeps()

    def _sweeps(self) -> None:
        if self._sweeper is None:
            self._sweeper = begun("stampede-zookeeper", self._sweep)

    def _sweep(self) -> None:
        """Remove what wasn't renewed in time, and what could not be removed when it was to be."""
        while True:
            time.sleep(ROUND)
            now = time.monotonic()
            with self._lock:
                for (name, token), own in list(self._owned.items()):
                    if own.end <= now:
                        self._owe(name, token, own)
                owed = list(self._owed.items())
                if not owed and not self._owned:
                    self._sweeper = None
                    return
            for (name, token, _), own in owed:
                if own.session.dead:  # nor is there anything of it
                    self._forget(name, token, own)
                elif own.session.client.connected:
                    self._swept(name, token, own)

    def _swept(self, name: str, token: bytes, own: _Own) -> None:
        try:
            self._leave(name, token, own)
        except EngineError:
            return

    # -- who has what ---------------------------------------------------------------------------------------------

    def holder(self, name: str) -> list[tuple[bytes, float]]:
        session = self._sessions.of(1.0)
        try:
            queue = places(session.told(session.client.get_children_async(self._top(name))))
        except NoNodeError:
            return []
        return [(each.token, self._seconds(name, each)) for each in queue[: inside(queue)]]

    def _seconds(self, name: str, place: Place) -> float:
        """That it stands for yet: of another process's we know only how long its lease is."""
        own = self._owned.get((name, place.token))
        return place.lease if own is None else max(own.end - time.monotonic(), 0.0)

    def held(self, prefix: str) -> list[Held]:
        session = self._sessions.of(1.0)
        client, found = session.client, []
        try:
            names = list(session.told(client.get_children_async(self._locks)))
        except NoNodeError:
            return []
        names = [each for each in names if unquoted(each).startswith(prefix)]
        asked = [(each, client.get_children_async(f"{self._locks}/{each}")) for each in names]
        for node, question in asked:
            name = unquoted(node)
            try:
                queue = places(session.told(question))
            except NoNodeError:
                continue
            count = inside(queue)
            those = [(each, client.get_async(f"{self._locks}/{node}/{each.node}")) for each in queue[:count]]
            for each, asked_of in those:
                try:
                    data, stat = session.told(asked_of)
                except NoNodeError:
                    continue
                host, pid = parts_of(data.decode("utf-8", "replace"))
                since = stat.ctime / 1000
                seconds, left = max(time.time() - since, 0.0), self._seconds(name, each)
                found.append(Held(name, host, pid, None, stat.czxid, since, seconds, left, False, len(queue) - count))
        return found
