"""The steps of a lock on ZooKeeper, which block, for both colours.

A lock is a node. Below it each token that has the lock, or waits for it, has an ephemeral sequential node, which ends
with its session. Within one session a lease is kept by its own process, which removes what isn't renewed in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import uniform
from typing import Any

from kazoo.exceptions import NoNodeError

from stampede.engines.kit.concurrency import ConcurrencyLimit
from stampede.engines.kit.whereabouts import here, parts_of
from stampede.engines.kit.worker_threads import Run
from stampede.engines.zookeeper.line import MARGIN
from stampede.engines.zookeeper.queue import QueuedNode, beginning, inside, places, quoted, unquoted
from stampede.engines.zookeeper.session import Sessions, ZooKeeperSession
from stampede.errors import EngineError
from stampede.model.backoff import look_again
from stampede.model.ports import Busy, Granted, Held
from stampede.runtime.colour import Bell, Colour
from stampede.runtime.threads import begun

__all__ = ["ZooKeeperLockSteps", "ZooKeeperLocks"]

TRIES = 10
"""How often a lock is asked for again because its node has gone meanwhile."""

WAITING = 30.0
"""Seconds for which a waiter has its place without asking again; lock.py asks more often."""

SAFETY = 1.0
"""Seconds after which the next one in the queue asks again, though nobody has told it of anything."""

LOOK = 0.1
"""The same of one that nobody can tell."""

ROUND = 0.1
"""Seconds between two looks at what is over, or is to be removed yet."""


@dataclass(slots=True)
class _Queued(Busy):
    """Busy, and what has to go before that can change."""

    session: ZooKeeperSession | None = None
    path: str = ""  # what is to be watched: a node, or the children of one
    seen: frozenset[str] | None = None  # those
    ahead: int = 0  # how many come before


@dataclass(slots=True, eq=False)
class _Own:
    """A token of this process, with its place in a queue."""

    name: str
    token: bytes
    top: str  # the node of the lock
    session: ZooKeeperSession
    end: float
    node: str = ""  # as far as it is known
    fence: int = 0
    granted: bool = False

    @property
    def path(self) -> str:
        return f"{self.top}/{self.node}"


class ZooKeeperLockSteps:
    """The locks of one engine, as this process asks for them."""

    def __init__(self, sessions: Sessions, root: str) -> None:
        self._sessions, self._locks = sessions, f"{root}/lock"
        self.start_again()

    def start_again(self) -> None:
        """Also in a forked child: locks are the parent's."""
        self._owned: dict[tuple[str, bytes], _Own] = {}
        self._leaving: set[_Own] = set()
        self._lock = threading.RLock()
        self._sweeper: threading.Thread | None = None
        self._turns = ConcurrencyLimit("zookeeper", self._sessions.timeout)

    def check(self) -> None:
        self._sessions.check()

    # -- acquire --------------------------------------------------------------------------------------------------

    def acquire(self, name: str, token: bytes, seconds: float, waits: bool, room: float) -> Granted | Busy:
        with self._turns.turn():
            return self._acquired(name, token, seconds, waits, room)

    def _acquired(self, name: str, token: bytes, seconds: float, waits: bool, room: float) -> Granted | Busy:
        for _ in range(TRIES):
            own, sent = self._standing(name, token), time.monotonic()
            session = self._sessions.of(seconds) if own is None else own.session
            session.vouch(seconds, sent)
            if own is None:
                own = self._put(_Own(name, token, self._top(name), session, sent + max(seconds, WAITING)))
                try:
                    queue = self._made(own, seconds, room)
                except EngineError:
                    self._end(own)  # it may be there all the same
                    raise
            else:
                queue = self._relisted(own)
            elder = next((each for each in queue if each.token == token), None)
            if elder is not None and elder.node != own.node and elder in queue[: inside(queue)]:
                return self._anothers(own, elder)
            index = next((at for at, each in enumerate(queue) if each.node == own.node), None)
            if index is None:  # it has no node: another has removed it, or it was never made
                self._forget(own)
                continue
            if self._owned.get((name, token)) is not own:  # it was released meanwhile
                self._end(own)
                continue
            if index >= inside(queue):
                return self._refused(own, queue, index, room, waits)
            own.granted, own.end = True, sent + seconds
            if own.session.dead or own.end <= time.monotonic():
                self._end(own)
                continue
            return Granted(fence=own.fence)
        raise EngineError("zookeeper: this lock is lost faster than it can be had")

    def _made(self, own: _Own, seconds: float, room: float) -> list[QueuedNode]:
        """The queue with a place of ours. Both questions go in one round trip: a session's are answered in turn."""
        client, top = own.session.client, own.top
        path = f"{top}/{beginning(own.token, room, seconds)}"
        asked = client.create_async(path, here().encode(), ephemeral=True, sequence=True, include_data=True)
        listed = client.get_children_async(top)
        until = time.monotonic() + own.session.timeout
        try:
            made, stat = own.session.told(asked, until)
            own.node, own.fence = made.rpartition("/")[2], stat.czxid
            return places(own.session.told(listed, until))
        except NoNodeError:
            own.session.make(top)
            return []

    def _listed(self, own: _Own) -> list[QueuedNode]:
        """The queue as it is, in one round trip.

        A server that has lost the others knows of no session that they have ended. So its leader is asked by a `sync`,
        behind which the list is answered: who is in it has its session yet.
        """
        client, top = own.session.client, own.top
        client.sync_async(top)
        try:
            queue = places(own.session.told(client.get_children_async(top)))
            if not own.node:  # its creation had no answer: it is found by its token
                own.node = next((each.node for each in queue if each.token == own.token), "")
            if own.node and not own.fence:
                own.fence = own.session.told(client.get_async(own.path))[1].czxid
        except NoNodeError:
            return []
        return queue

    def _relisted(self, own: _Own) -> list[QueuedNode]:
        """The same, of one who waits: where the connection is lost with the question, it is asked on the next one."""
        until = time.monotonic() + own.session.timeout
        while True:
            try:
                return self._listed(own)
            except EngineError:
                if own.session.dead or time.monotonic() + ROUND > until:
                    raise

    def _anothers(self, own: _Own, elder: QueuedNode) -> Granted:
        """Another process has the lock by this very token, and keeps it: it can't be renewed from here."""
        stat = own.session.told(own.session.client.exists_async(f"{own.top}/{elder.node}"))
        self.release(own.name, own.token)
        if stat is None:
            raise EngineError("zookeeper: the lock was lost while it was asked for")
        return Granted(fence=stat.czxid)

    def _refused(self, own: _Own, queue: list[QueuedNode], index: int, room: float, waits: bool) -> Busy:
        own.granted, before = False, queue[index - 1]
        if waits:
            own.end = time.monotonic() + WAITING
        else:
            self.release(own.name, own.token)
            queue = queue[:index] + queue[index + 1 :]
        first, top = queue[0], own.top
        path, seen = (f"{top}/{before.node}", None) if room == 1 else (top, frozenset(each.node for each in queue))
        return _Queued(first.token, first.lease, None, session=own.session, path=path, seen=seen, ahead=index)

    def watch(self, busy: _Queued, told: Callable[[], object]) -> Callable[[], None]:
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
        path = own.path
        own.session.client.sync_async(path)  # see `_listed`
        if own.session.told(own.session.client.exists_async(path)) is None or own.session.dead:
            self._forget(own)
            return False
        own.end = sent + seconds
        return True

    # -- release --------------------------------------------------------------------------------------------------

    def release(self, name: str, token: bytes) -> bool:
        own = self._standing(name, token)
        if own is None:
            return self._broken(name, token)
        self._forget(own)
        try:
            return self._removed(own) and own.granted
        except EngineError:
            self._end(own)
            raise

    def _removed(self, own: _Own) -> bool:
        if not own.node:
            self._listed(own)
        try:
            return bool(own.node) and bool(own.session.told(own.session.client.delete_async(own.path)))
        except NoNodeError:
            return False

    def _broken(self, name: str, token: bytes) -> bool:
        """Another process's lock: its holder learns of that when it renews."""
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

    def _standing(self, name: str, token: bytes) -> _Own | None:
        own = self._owned.get((name, token))
        if own is not None and (own.session.dead or own.end <= time.monotonic()):
            self._end(own)
            return None
        return own

    def _put(self, own: _Own) -> _Own:
        with self._lock:
            self._owned[own.name, own.token] = own
            self._sweeps()
        return own

    def _forget(self, own: _Own) -> None:
        with self._lock:
            if self._owned.get((own.name, own.token)) is own:
                del self._owned[own.name, own.token]

    def _end(self, own: _Own) -> None:
        """Have its node removed by the sweeper: the node would stand for as long as the session of this process."""
        with self._lock:
            self._forget(own)
            self._leaving.add(own)
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
                for own in [each for each in self._owned.values() if each.end <= now]:
                    self._end(own)
                leaving = list(self._leaving)
                if not leaving and not self._owned:
                    self._sweeper = None
                    return
            for own in leaving:
                if own.session.dead or (own.session.client.connected and self._swept(own)):
                    self._leaving.discard(own)

    def _swept(self, own: _Own) -> bool:
        try:
            self._removed(own)
        except EngineError:
            return False
        return True

    # -- who has what ---------------------------------------------------------------------------------------------

    def holder(self, name: str) -> list[tuple[bytes, float]]:
        session = self._sessions.of(1.0)
        try:
            queue = places(session.told(session.client.get_children_async(self._top(name))))
        except NoNodeError:
            return []
        return [(each.token, self._seconds(name, each)) for each in queue[: inside(queue)]]

    def _seconds(self, name: str, place: QueuedNode) -> float:
        """For how long it stands yet: of another process's we know only how long its lease is."""
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
                found.append(self._held(name, each, data, stat, len(queue) - count))
        return found

    def _held(self, name: str, place: QueuedNode, data: bytes, stat: Any, waiting: int) -> Held:
        host, pid = parts_of(data.decode("utf-8", "replace"))
        since = stat.ctime / 1000
        seconds, left = max(time.time() - since, 0.0), self._seconds(name, place)
        return Held(name, host, pid, None, stat.czxid, since, seconds, left, False, waiting)


class ZooKeeperLocks:
    """Locks of one colour: `run` has blocking steps done."""

    def __init__(self, steps: ZooKeeperLockSteps, run: Run, colour: Colour) -> None:
        self._steps, self._run, self._colour = steps, run, colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        return await self._run(self._steps.acquire, name, token, lease, waits, room)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return await self._run(self._steps.renew, name, token, lease)

    async def release(self, name: str, token: bytes) -> bool:
        return await self._run(self._steps.release, name, token)

    async def held(self, prefix: str = "") -> list[Held]:
        return await self._run(self._steps.held, prefix)

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return await self._run(self._steps.holder, name)

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        end, bell = time.monotonic() + timeout, Bell()
        unwatch, rest = None, LOOK
        if isinstance(busy, _Queued):
            with suppress(EngineError):  # then we look
                unwatch = await self._run(self._steps.watch, busy, bell.ring)
                rest = look_again(busy.ahead - 1, -1.0, 0.0, SAFETY) * uniform(0.9, 1.1)
        try:
            if not bell.rung and (left := min(end - time.monotonic(), rest)) > 0:
                await self._colour.park(bell, left)
        finally:
            if unwatch is not None:
                unwatch()
        self._steps.check()
