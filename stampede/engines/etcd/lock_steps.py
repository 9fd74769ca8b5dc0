"""The steps of a lock on etcd, which block, for both colours.

A lock is a queue of keys, one for each token that has the lock or waits for it, in the order of the revisions that
created them. `room.admitted` decides how many of the first ones have the lock: an exclusive lock is a room for one. The
revision is the fence. Each key has its own lease, so that it is removed if its process ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from stampede.engines.etcd.gateway import Gateway, Gone, b64
from stampede.engines.etcd.leases import EtcdLease, Leases
from stampede.engines.etcd.names import EtcdNames, QueuedKey, place_of, value_of
from stampede.engines.etcd.queue import Queue, inside
from stampede.engines.etcd.watches import Watches
from stampede.engines.kit.expiring import Ending
from stampede.engines.kit.whereabouts import parts_of
from stampede.engines.kit.worker_threads import Run
from stampede.errors import EngineClosed, EngineError
from stampede.model.ports import Busy, Granted, Held
from stampede.runtime.colour import Colour

__all__ = ["EtcdLockSteps", "EtcdLocks"]

TRIES = 10
"""How often `acquire` tries again if its lease ends, or if the queue changes at the same time."""

KEPT = 60.0
"""Seconds for which a token that was never released is remembered after its lease has ended."""

SAFETY = 1.0
"""Seconds after which a waiter reads the queue again if no event has come."""

LOOK = 0.1
"""Seconds between two attempts of a waiter that gets no events."""

_Terms: TypeAlias = Mapping[str, Any]


@dataclass(slots=True)
class _Queued(Busy):
    """Busy, and what the caller waits for."""

    own_token: bytes = b""  # the caller's token, if it has a place in the queue
    revision: int = 0  # as of which this was the state


@dataclass(slots=True)
class _OwnPlace:
    """A token of this process, with its place in a queue."""

    lease: EtcdLease
    seconds: float
    number: int = 0  # the revision of its key; 0: it is not known whether it has a place
    granted: bool = False

    @property
    def end(self) -> float:
        return self.lease.renewed + self.lease.ttl + KEPT


class EtcdLockSteps:
    """The blocking steps of all locks of one engine, and the places that this process has."""

    def __init__(self, gateway: Gateway, leases: Leases, watches: Watches, names: EtcdNames) -> None:
        self._gateway, self._leases, self._watches, self._names = gateway, leases, watches, names
        self.start_again()

    def start_again(self) -> None:
        """Begin with no places; also in a forked child, where they are the parent's."""
        self._owned: Ending[tuple[str, bytes], _OwnPlace] = Ending()
        self._queues: WeakValueDictionary[str, Queue] = WeakValueDictionary()

    def queue(self, name: str) -> Queue:
        """Return the queue of a lock as this process knows it. It lives while callers refer to it."""
        found = self._queues.get(name)
        return found or self._queues.setdefault(
            name, Queue(self._watches, self._names.queue(name), lambda: self._all(name))
        )

    # -- acquire --------------------------------------------------------------------------------------------------

    def known(self, name: str, token: bytes, seconds: float) -> Granted | Busy | None:
        """Answer a waiter that has a place in the queue, without a request. None: the answer is not known."""
        own = self._owned.get((name, token))
        return None if own is None or own.lease.left < seconds else self._known(name, token, own)

    def _known(self, name: str, token: bytes, own: _OwnPlace) -> Granted | Busy | None:
        queue = self._queues.get(name)
        place = None if queue is None else queue.place(token)
        if queue is None or place is None or place.number != own.number:
            return None
        if queue.admits(token):
            own.granted = True
            return Granted(fence=own.number)
        first = queue.first()
        if first is not None and queue.watched and time.monotonic() - queue.updated < 2 * SAFETY:
            return _Queued(first.token, first.seconds, None, own_token=token, revision=own.number)
        return None

    def acquire(self, name: str, token: bytes, seconds: float, waits: bool, room: float) -> Granted | Busy:
        new = False
        for _ in range(TRIES):
            own = self._owned.get((name, token))
            if own is None or own.lease.left <= 0:
                own = _OwnPlace(self._leases.take(seconds, new=new), seconds)
                self._owned.put((name, token), own, time.monotonic())
            try:
                answer = self._known(name, token, own) if waits else None
                answer = answer or self._asked(name, token, own, waits, room)
                if isinstance(answer, Busy):
                    if not waits:
                        self._withdraw(name, token, own)
                    elif own.lease.left < own.lease.ttl * 2 / 3 and not self._leases.renew(own.lease):
                        raise Gone("the lease of the place in the queue has ended")
                    return answer
                if answer is not None and (own.lease.left >= seconds or self._renewed(name, token, own, seconds)):
                    own.granted = True
                    return answer
            except Gone:  # the lease has ended, and its key is removed
                if self._owned.get((name, token)) is not own:  # another thread has released it meanwhile
                    raise
                answer, new = None, True
                own.lease.ttl = 0.0
            if answer is not None:  # the lease ended while the reply was on its way
                self._owned.pop((name, token), None)
        raise EngineError(f"{self._gateway.called}: this lock's leases end before it can be taken: use a longer lease")

    def _asked(self, name: str, token: bytes, own: _OwnPlace, waits: bool, room: float) -> Granted | Busy | None:
        """Send the request of `acquire`. None: the queue has changed at the same time; try again."""
        key, whole = self._key(name, token), self._whole(name)
        value = value_of(room, own.seconds)
        put: _Terms = {"request_put": {"key": key, "value": value, "lease": str(own.lease.id)}}
        get: _Terms = {"request_range": {"key": key}}
        look: list[_Terms] = [{"request_range": {**whole, **_OLDEST, "limit": "1" if room == 1 else "0"}}]
        # A caller that wants an exclusive lock and does not wait gets no place in the queue, not even for a moment.
        at_once = room == 1 and not waits
        absent = whole if at_once else {"key": key}
        terms = {**absent, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        queue = self._queues.get(name)
        if waits and queue is not None and queue.watched and queue.first() is not None:
            look = []  # events will tell this process of its turn, and reading a long queue costs more
        reply = self._txn([terms], [put, *look], [get, *look])
        places = reply.places[-1] if look else []
        if reply.done:
            own.number = reply.revision
        elif existing := reply.places[0]:
            if own.lease.id != existing[0].lease:
                self._adopt(own, existing[0])
            own.number = existing[0].number
        elif not places:
            return None
        if any(each.token == token for each in inside(places)):
            return Granted(fence=own.number)
        first = places[0] if places or queue is None else queue.first()
        if first is None:
            return None
        revision = own.number or reply.revision
        return _Queued(first.token, first.seconds, None, own_token=token if own.number else b"", revision=revision)

    def _adopt(self, own: _OwnPlace, place: QueuedKey) -> None:
        """Keep a place with its present lease: another process has handed it over, or an earlier reply was lost."""
        self._leases.revoke(own.lease.id)
        own.lease = EtcdLease(place.lease, 0.0, time.monotonic())
        if not self._leases.renew(own.lease):
            raise Gone("the lease has just ended")

    def _withdraw(self, name: str, token: bytes, own: _OwnPlace) -> None:
        """Remove all traces of a caller that was refused and does not wait."""
        if own.number:
            self.release(name, token)
        else:
            self._owned.pop((name, token), None)
            self._leases.give_back(own.lease, own.seconds)

    def _key(self, name: str, token: bytes) -> str:
        return b64(self._names.place(name, token))

    def _whole(self, name: str) -> dict[str, str]:
        """Return the range of a lock's queue."""
        start, end = self._names.queue(name)
        return {"key": b64(start), "range_end": b64(end)}

    def _txn(self, compare: Sequence[_Terms], success: Sequence[_Terms], failure: Sequence[_Terms]) -> _TxnReply:
        terms = {"compare": compare, "success": success, "failure": failure}
        return _TxnReply(self._gateway.ask("/v3/kv/txn", terms))

    def _all(self, name: str) -> tuple[Sequence[QueuedKey], int]:
        """Read the queue. Return its places in their order, and the revision of this state."""
        reply = self._gateway.ask("/v3/kv/range", {**self._whole(name), **_OLDEST})
        return [place_of(kv) for kv in reply.get("kvs", ())], int(reply["header"]["revision"])

    # -- while it is held -----------------------------------------------------------------------------------------

    def renew(self, name: str, token: bytes, seconds: float) -> bool:
        own = self._owned.get((name, token))
        if own is None:  # another process may have handed the lock over
            place = next((each for each in self._all(name)[0] if each.token == token), None)
            if place is None:
                return False
            own = _OwnPlace(EtcdLease(place.lease, 0.0, time.monotonic()), seconds, place.number, granted=True)
            self._owned.put((name, token), own, time.monotonic())
        renewed = self._renewed(name, token, own, seconds)
        if not renewed:
            self._owned.pop((name, token), None)
        return renewed

    def hand_over(self, name: str, token: bytes, seconds: float) -> bool:
        """Renew the lock and forget it. The process that takes it on finds its lease in its key."""
        renewed = self.renew(name, token, seconds)
        self._owned.pop((name, token), None)
        return renewed

    def _renewed(self, name: str, token: bytes, own: _OwnPlace, seconds: float) -> bool:
        """Extend a place to so many seconds from now. False: it has ended."""
        if not self._leases.renew(own.lease):
            return False
        return own.lease.left >= seconds or self._moved(name, token, own, seconds)

    def _moved(self, name: str, token: bytes, own: _OwnPlace, seconds: float) -> bool:
        """Attach a place to a new, longer lease. False: it has ended."""
        key, old = self._key(name, token), own.lease
        exists = {"key": key, "target": "CREATE", "result": "GREATER", "create_revision": "0"}
        new = self._leases.take(seconds)
        put = {"request_put": {"key": key, "lease": str(new.id), "ignore_value": True}}
        try:
            done = self._txn([exists], [put], []).done
        except EngineError:
            self._owned.pop((name, token), None)  # the next renewal reads which of the two leases it has
            raise
        if done:
            own.lease, own.seconds = new, seconds
            self._leases.revoke(old.id)
        return done

    # -- release --------------------------------------------------------------------------------------------------

    def release(self, name: str, token: bytes) -> bool:
        own = self._owned.pop((name, token), None)
        if own is None:
            return self._broken(name, token)
        if not own.number:  # a request may still be on its way: without its lease it fails
            self._leases.revoke(own.lease.id)
            return False
        reply = self._gateway.ask("/v3/kv/deleterange", {"key": self._key(name, token)})
        if int(reply.get("deleted", 0)):
            self._leases.give_back(own.lease, own.seconds)
            return own.granted
        # No key, but a lease: our request was sent twice, and the first one has removed the key.
        return self._leases.revoke(own.lease.id) and own.granted

    def _broken(self, name: str, token: bytes) -> bool:
        """Release the lock of another process, whose holder learns of it at its next renewal."""
        places, _ = self._all(name)
        place = next((each for each in places if each.token == token), None)
        if place is None:
            return False
        if not (place.lease and self._leases.revoke(place.lease)):
            self._gateway.ask("/v3/kv/deleterange", {"key": b64(place.key)})
        return place in inside(places)

    # -- holders --------------------------------------------------------------------------------------------------

    def holder(self, name: str) -> list[tuple[bytes, float]]:
        return [(each.token, self._leases.left(each.lease)) for each in inside(self._all(name)[0])]

    def held(self, prefix: str) -> list[Held]:
        start, end = self._names.below(prefix)
        reply = self._gateway.ask("/v3/kv/range", {"key": b64(start), "range_end": b64(end), **_OLDEST})
        queues: dict[str, list[QueuedKey]] = {}
        for each in [place_of(kv) for kv in reply.get("kvs", ())]:
            queues.setdefault(self._names.name_of(each.key), []).append(each)
        found = []
        for name, places in queues.items():
            holders = inside(places)
            for each in holders:
                host, pid = parts_of(each.holder)
                seconds = max(time.time() - each.since, 0.0)
                left, waiting = self._leases.left(each.lease), len(places) - len(holders)
                found.append(Held(name, host, pid, None, each.number, each.since, seconds, left, False, waiting))
        return found


_OLDEST = {"sort_target": "CREATE", "sort_order": "ASCEND"}


class _TxnReply:
    """The reply to a transaction. `done`: its condition was true."""

    def __init__(self, reply: _Terms) -> None:
        self.done = bool(reply.get("succeeded"))
        self.revision = int(reply["header"]["revision"])
        ranges = [each["response_range"] for each in reply.get("responses", ()) if "response_range" in each]
        self.places = [[place_of(kv) for kv in each.get("kvs", ())] for each in ranges]


class EtcdLocks:
    """`Locks`, `Holds` and `Handover` of one colour. `run` executes the steps, which block."""

    def __init__(self, steps: EtcdLockSteps, gateway: Gateway, run: Run, colour: Colour) -> None:
        self._steps, self._gateway, self._run, self._colour = steps, gateway, run, colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        if waits and (answer := self._steps.known(name, token, lease)) is not None:
            return answer
        return await self._run(self._steps.acquire, name, token, lease, waits, room)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return await self._run(self._steps.renew, name, token, lease)

    async def hand_over(self, name: str, token: bytes, lease: float) -> bool:
        return await self._run(self._steps.hand_over, name, token, lease)

    async def release(self, name: str, token: bytes) -> bool:
        return await self._run(self._steps.release, name, token)

    async def held(self, prefix: str = "") -> list[Held]:
        return await self._run(self._steps.held, prefix)

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return await self._run(self._steps.holder, name)

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        end, queue = time.monotonic() + timeout, self._steps.queue(name)
        own_token, revision = (busy.own_token, busy.revision) if isinstance(busy, _Queued) else (b"", 0)
        token, turn = own_token or busy.token, bool(own_token)
        with queue.waiter(token, turn, revision) as bell:  # before the queue is read: an event in between rings it
            if not queue.watched or time.monotonic() - queue.updated >= SAFETY:
                with suppress(EngineError):  # a member is down: poll, by another member
                    await self._run(queue.open)
            left = min(end - time.monotonic(), SAFETY if queue.watched else LOOK)
            changed = queue.watched and queue.worth_asking(token, turn, revision)
            if left > 0 and not changed and not self._gateway.closed:
                await self._colour.park(bell, left)
        if self._gateway.closed:
            raise EngineClosed(self._gateway.called)
