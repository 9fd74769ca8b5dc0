"""The steps of a lock on ZooKeeper, which block, for both colours. A lock is a node. Each token that has the lock or
waits for it has an ephemeral sequential node below, which ends with its session. ZooKeeper has no leases: the process
itself removes its node if the lease is not renewed in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
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
from stampede.runtime.chance import uniform
from stampede.runtime.colour import Bell, Colour
from stampede.runtime.threads import begun

__all__ = ["ZooKeeperLockSteps", "ZooKeeperLocks"]

TRIES = 10
"""How often `acquire` tries again if its node is removed meanwhile."""

WAITING = 30.0
"""Seconds for which a waiter keeps its place without asking again. Waiters of `locks` ask more often."""

SAFETY = 1.0
"""Seconds after which the first waiter in the queue asks again if it was not notified."""

LOOK = 0.1
"""Seconds between two attempts of a waiter that has no watch."""

ROUND = 0.1
"""Seconds between two rounds of the sweeper, which removes nodes."""


@dataclass(slots=True)
class _Queued(Busy):
    """Busy, and which node the caller watches while it waits."""

    session: ZooKeeperSession | None = None
    path: str = ""  # the node to watch, or the parent of the nodes to watch
    seen: frozenset[str] | None = None  # the children of `path`, if they are watched
    ahead: int = 0  # the number of places before this one


@dataclass(slots=True, eq=False)
class _OwnPlace:
    """A token of this process, with its place in a queue."""

    name: str
    token: bytes
    top: str  # the node of the lock
    session: ZooKeeperSession
    end: float
    node: str = ""  # "": not known, because its creation got no reply
    fence: int = 0
    granted: bool = False

    @property
    def path(self) -> str:
        return f"{self.top}/{self.node}"


class ZooKeeperLockSteps:
    """The blocking steps of all locks of one engine, and the places that this process has."""

    def __init__(self, sessions: Sessions, root: str) -> None:
        self._sessions, self._locks = sessions, f"{root}/lock"
        self.start_again()

    def start_again(self) -> None:
        """Begin with no places; also in a forked child, where they are the parent's."""
        self._owned: dict[tuple[str, bytes], _OwnPlace] = {}
        self._to_remove: set[_OwnPlace] = set()
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
            own, sent = self._own(name, token), time.monotonic()
            session = self._sessions.of(seconds) if own is None else own.session
            session.ensure_outlasts(seconds, sent)
            if own is None:
                own = self._put(_OwnPlace(name, token, self._top(name), session, sent + max(seconds, WAITING)))
                try:
                    queue = self._create(own, seconds, room)
                except EngineError:
                    self._remove_later(own)  # the node may exist all the same
                    raise
            else:
                queue = self._reread_queue(own)
            earlier = next((each for each in queue if each.token == token), None)
            if earlier is not None and earlier.node != own.node and earlier in queue[: inside(queue)]:
                return self._held_elsewhere(own, earlier)
            index = next((at for at, each in enumerate(queue) if each.node == own.node), None)
            if index is None:  # the node was removed, or it was never made
                self._forget(own)
                continue
            if self._owned.get((name, token)) is not own:  # another thread has released it meanwhile
                self._remove_later(own)
                continue
            if index >= inside(queue):
                return self._refused(own, queue, index, room, waits)
            own.granted, own.end = True, sent + seconds
            if own.session.dead or own.end <= time.monotonic():
                self._remove_later(own)
                continue
            return Granted(fence=own.fence)
        raise EngineError("zookeeper: the lock's node was lost each time before the lock was taken: use a longer lease")

    def _create(self, own: _OwnPlace, seconds: float, room: float) -> list[QueuedNode]:
        """Create our node and return the queue. Both requests take one round trip, since a server executes the requests
        of a session in their order."""
        client, top = own.session.client, own.top
        path = f"{top}/{beginning(own.token, room, seconds)}"
        asked = client.create_async(path, here().encode(), ephemeral=True, sequence=True, include_data=True)
        listed = client.get_children_async(top)
        until = time.monotonic() + own.session.timeout
        try:
            made, stat = own.session.reply(asked, until)
            own.node, own.fence = made.rpartition("/")[2], stat.czxid
            return places(own.session.reply(listed, until))
        except NoNodeError:
            own.session.make(top)
            return []

    def _read_queue(self, own: _OwnPlace) -> list[QueuedNode]:
        """Return the present queue, in one round trip. A server that is cut off from the others does not know which
        sessions they have ended. So a `sync` comes first, which needs the leader: the list after it contains only nodes
        of sessions that are alive."""
        client, top = own.session.client, own.top
        client.sync_async(top)
        try:
            queue = places(own.session.reply(client.get_children_async(top)))
            if not own.node:  # its creation got no reply: find it by its token
                own.node = next((each.node for each in queue if each.token == own.token), "")
            if own.node and not own.fence:
                own.fence = own.session.reply(client.get_async(own.path))[1].czxid
        except NoNodeError:
            return []
        return queue

    def _reread_queue(self, own: _OwnPlace) -> list[QueuedNode]:
        """Return the present queue for a waiter. If the connection is lost, ask again on the next one."""
        until = time.monotonic() + own.session.timeout
        while True:
            try:
                return self._read_queue(own)
            except EngineError:
                if own.session.dead or time.monotonic() + ROUND > until:
                    raise

    def _held_elsewhere(self, own: _OwnPlace, earlier: QueuedNode) -> Granted:
        """Grant a lock that another process holds with the same token. Its node stays there: it can't be renewed from
        this process."""
        stat = own.session.reply(own.session.client.exists_async(f"{own.top}/{earlier.node}"))
        self.release(own.name, own.token)
        if stat is None:
            raise EngineError("zookeeper: the lock was lost while it was being taken: try again")
        return Granted(fence=stat.czxid)

    def _refused(self, own: _OwnPlace, queue: list[QueuedNode], index: int, room: float, waits: bool) -> Busy:
        own.granted, before = False, queue[index - 1]
        if waits:
            own.end = time.monotonic() + WAITING
        else:
            self.release(own.name, own.token)
            queue = queue[:index] + queue[index + 1 :]
        first, top = queue[0], own.top
        path, seen = (f"{top}/{before.node}", None) if room == 1 else (top, frozenset(each.node for each in queue))
        return _Queued(first.token, first.lease, None, session=own.session, path=path, seen=seen, ahead=index)

    def watch(self, busy: _Queued, notify: Callable[[], object]) -> Callable[[], None]:
        """Call `notify` when a waiter should ask again. Return a function that ends the watch."""
        assert busy.session is not None
        return busy.session.watch_once(busy.path, busy.seen, notify)

    # -- while it is held -----------------------------------------------------------------------------------------

    def renew(self, name: str, token: bytes, seconds: float) -> bool:
        own = self._own(name, token)
        if own is None or not own.granted:
            return False
        if own.session.seconds < seconds + MARGIN:
            raise EngineError(
                f"zookeeper: this lock's session allows leases of at most {own.session.seconds - MARGIN:g} s, "
                f"and not {seconds:g} s: take the lock with the longer lease, or give session= in the URL"
            )
        sent = time.monotonic()
        own.session.ensure_outlasts(seconds, sent)
        path = own.path
        own.session.client.sync_async(path)  # see `_read_queue`
        if own.session.reply(own.session.client.exists_async(path)) is None or own.session.dead:
            self._forget(own)
            return False
        own.end = sent + seconds
        return True

    # -- release --------------------------------------------------------------------------------------------------

    def release(self, name: str, token: bytes) -> bool:
        own = self._own(name, token)
        if own is None:
            return self._break(name, token)
        self._forget(own)
        try:
            return self._remove(own) and own.granted
        except EngineError:
            self._remove_later(own)
            raise

    def _remove(self, own: _OwnPlace) -> bool:
        """Remove the node of a place. False: there was none."""
        if not own.node:
            self._read_queue(own)
        try:
            return bool(own.node) and bool(own.session.reply(own.session.client.delete_async(own.path)))
        except NoNodeError:
            return False

    def _break(self, name: str, token: bytes) -> bool:
        """Release the lock of another process, whose holder learns of it at its next renewal."""
        session, top = self._sessions.of(1.0), self._top(name)
        try:
            queue = places(session.reply(session.client.get_children_async(top)))
            index = next((at for at, each in enumerate(queue) if each.token == token), None)
            if index is None:
                return False
            session.reply(session.client.delete_async(f"{top}/{queue[index].node}"))
        except NoNodeError:
            return False
        return index < inside(queue)

    # -- the places of this process -------------------------------------------------------------------------------

    def _top(self, name: str) -> str:
        return f"{self._locks}/{quoted(name)}"

    def _own(self, name: str, token: bytes) -> _OwnPlace | None:
        """Return the place of a token of this process, if it is still valid."""
        own = self._owned.get((name, token))
        if own is not None and (own.session.dead or own.end <= time.monotonic()):
            self._remove_later(own)
            return None
        return own

    def _put(self, own: _OwnPlace) -> _OwnPlace:
        with self._lock:
            self._owned[own.name, own.token] = own
            self._start_sweeper()
        return own

    def _forget(self, own: _OwnPlace) -> None:
        with self._lock:
            if self._owned.get((own.name, own.token)) is own:
                del self._owned[own.name, own.token]

    def _remove_later(self, own: _OwnPlace) -> None:
        """Let the sweeper remove a node, which would otherwise remain as long as the session of this process."""
        with self._lock:
            self._forget(own)
            self._to_remove.add(own)
            self._start_sweeper()

    def _start_sweeper(self) -> None:
        if self._sweeper is None:
            self._sweeper = begun("stampede-zookeeper", self._sweep)

    def _sweep(self) -> None:
        """Remove the nodes that were not renewed in time, and those whose removal has failed before."""
        while True:
            time.sleep(ROUND)
            now = time.monotonic()
            with self._lock:
                for own in [each for each in self._owned.values() if each.end <= now]:
                    self._remove_later(own)
                to_remove = list(self._to_remove)
                if not to_remove and not self._owned:
                    self._sweeper = None
                    return
            for own in to_remove:
                if own.session.dead or (own.session.client.connected and self._try_remove(own)):
                    self._to_remove.discard(own)

    def _try_remove(self, own: _OwnPlace) -> bool:
        try:
            self._remove(own)
        except EngineError:
            return False
        return True

    # -- holders --------------------------------------------------------------------------------------------------

    def holder(self, name: str) -> list[tuple[bytes, float]]:
        session = self._sessions.of(1.0)
        try:
            queue = places(session.reply(session.client.get_children_async(self._top(name))))
        except NoNodeError:
            return []
        return [(each.token, self._left(name, each)) for each in queue[: inside(queue)]]

    def _left(self, name: str, place: QueuedNode) -> float:
        """Return the seconds left of a lease. For another process's lock only the full length of its lease is known."""
        own = self._owned.get((name, place.token))
        return place.lease if own is None else max(own.end - time.monotonic(), 0.0)

    def held(self, prefix: str) -> list[Held]:
        session = self._sessions.of(1.0)
        client, found = session.client, []
        try:
            names = list(session.reply(client.get_children_async(self._locks)))
        except NoNodeError:
            return []
        names = [each for each in names if unquoted(each).startswith(prefix)]
        asked = [(each, client.get_children_async(f"{self._locks}/{each}")) for each in names]
        for node, question in asked:
            name = unquoted(node)
            try:
                queue = places(session.reply(question))
            except NoNodeError:
                continue
            count = inside(queue)
            holders = [(each, client.get_async(f"{self._locks}/{node}/{each.node}")) for each in queue[:count]]
            for each, content in holders:
                try:
                    data, stat = session.reply(content)
                except NoNodeError:
                    continue
                found.append(self._held(name, each, data, stat, len(queue) - count))
        return found

    def _held(self, name: str, place: QueuedNode, data: bytes, stat: Any, waiting: int) -> Held:
        host, pid = parts_of(data.decode("utf-8", "replace"))
        since = stat.ctime / 1000
        seconds, left = max(time.time() - since, 0.0), self._left(name, place)
        return Held(name, host, pid, None, stat.czxid, since, seconds, left, False, waiting)


class ZooKeeperLocks:
    """`Locks` and `Holds` of one colour. `run` executes the steps, which block."""

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
            with suppress(EngineError):  # no watch: poll
                unwatch = await self._run(self._steps.watch, busy, bell.ring)
                rest = look_again(busy.ahead - 1, -1.0, 0.0, SAFETY) * uniform(0.9, 1.1)
        try:
            if not bell.rung and (left := min(end - time.monotonic(), rest)) > 0:
                await self._colour.park(bell, left)
        finally:
            if unwatch is not None:
                unwatch()
        self._steps.check()
