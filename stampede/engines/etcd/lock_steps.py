"""The steps of a lock on etcd, which block, for both colours.

A lock is a queue of keys, one for each token that has it or waits for it, in the order of the revisions that have made
them. `room.admitted` says how many of them are inside: an exclusive lock is a room for one. The revision is the fence.
Each key stands on a lease of its own, which ends it with its process.
"""

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
"""How often a question is asked again because its lease has ended, or because others come and go."""

KEPT = 60.0
"""Seconds for which it is known of a token that its lease has ended, and it was never released."""

SAFETY = 1.0
"""Seconds after which the queue is read again, though nothing was heard of it."""

LOOK = 0.1
"""Seconds between two looks of a waiter that nobody can tell."""

_Terms: TypeAlias = Mapping[str, Any]


@dataclass(slots=True)
class _Queued(Busy):
    """Busy, and what is to be waited for."""

    mine: bytes = b""  # the token that has a place; none: the caller has none
    revision: int = 0  # as of which that was so


@dataclass(slots=True)
class _Own:
    """A token of this process, with its place in a queue."""

    lease: EtcdLease
    seconds: float
    number: int = 0  # its revision; 0: it is not known whether it has a place
    granted: bool = False

    @property
    def end(self) -> float:
        return self.lease.renewed + self.lease.ttl + KEPT


class EtcdLockSteps:
    """The locks of one engine, as this process asks for them."""

    def __init__(self, gateway: Gateway, leases: Leases, watches: Watches, names: EtcdNames) -> None:
        self._gateway, self._leases, self._watches, self._names = gateway, leases, watches, names
        self.start_again()

    def start_again(self) -> None:
        """Also in a forked child: locks are the parent's."""
        self._owned: Ending[tuple[str, bytes], _Own] = Ending()
        self._queues: WeakValueDictionary[str, Queue] = WeakValueDictionary()

    def queue(self, name: str) -> Queue:
        """What this process knows of a lock's queue, while its callers wait there."""
        found = self._queues.get(name)
        return found or self._queues.setdefault(
            name, Queue(self._watches, self._names.queue(name), lambda: self._all(name))
        )

    # -- acquire --------------------------------------------------------------------------------------------------

    def at_hand(self, name: str, token: bytes, seconds: float) -> Granted | Busy | None:
        """The answer to one who has a place in the queue, if this process knows it. It asks nobody."""
        own = self._owned.get((name, token))
        return None if own is None or own.lease.left < seconds else self._known(name, token, own)

    def _known(self, name: str, token: bytes, own: _Own) -> Granted | Busy | None:
        queue = self._queues.get(name)
        place = None if queue is None else queue.place(token)
        if queue is None or place is None or place.number != own.number:
            return None
        if queue.admits(token):
            own.granted = True
            return Granted(fence=own.number)
        first = queue.first()
        if first is not None and queue.hears and time.monotonic() - queue.heard < 2 * SAFETY:
            return _Queued(first.token, first.seconds, None, mine=token, revision=own.number)
        return None

    def acquire(self, name: str, token: bytes, seconds: float, waits: bool, room: float) -> Granted | Busy:
        new = False
        for _ in range(TRIES):
            own = self._owned.get((name, token))
            if own is None or own.lease.left <= 0:
                own = _Own(self._leases.take(seconds, new=new), seconds)
                self._owned.put((name, token), own, time.monotonic())
            try:
                answer = self._known(name, token, own) if waits else None
                answer = answer or self._asked(name, token, own, waits, room)
                if isinstance(answer, Busy):
                    if not waits:
                        self._withdraw(name, token, own)
                    elif own.lease.left < own.lease.ttl * 2 / 3 and not self._leases.renew(own.lease):
                        raise Gone("the place in the queue has ended")
                    return answer
                if answer is not None and (own.lease.left >= seconds or self._stands(name, token, own, seconds)):
                    own.granted = True
                    return answer
            except Gone:  # the lease has ended, and what stood on it
                if self._owned.get((name, token)) is not own:  # it was released meanwhile
                    raise
                answer, new = None, True
                own.lease.ttl = 0.0
            if answer is not None:  # it ended while we were told of it
                self._owned.pop((name, token), None)
        raise EngineError(f"{self._gateway.called}: the leases of this lock end faster than it can be had")

    def _asked(self, name: str, token: bytes, own: _Own, waits: bool, room: float) -> Granted | Busy | None:
        """None: others were faster."""
        key, whole = self._key(name, token), self._whole(name)
        value = value_of(room, own.seconds)
        put: _Terms = {"request_put": {"key": key, "value": value, "lease": str(own.lease.id)}}
        get: _Terms = {"request_range": {"key": key}}
        look: list[_Terms] = [{"request_range": {**whole, **_OLDEST, "limit": "1" if room == 1 else "0"}}]
        # Who takes an exclusive lock and doesn't wait has no place in its queue, not even for a moment.
        at_once = room == 1 and not waits
        absent = whole if at_once else {"key": key}
        terms = {**absent, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        queue = self._queues.get(name)
        if waits and queue is not None and queue.hears and queue.first() is not None:
            look = []  # this process hears of the queue: it is told of its turn, and a look costs more in a crowd
        told = self._txn([terms], [put, *look], [get, *look])
        there = told.places[-1] if look else []
        if told.done:
            own.number = told.revision
        elif mine := told.places[0]:
            if own.lease.id != mine[0].lease:
                self._adopt(own, mine[0])
            own.number = mine[0].number
        elif not there:
            return None
        if any(each.token == token for each in inside(there)):
            return Granted(fence=own.number)
        first = there[0] if there or queue is None else queue.first()
        if first is None:
            return None
        revision = own.number or told.revision
        return _Queued(first.token, first.seconds, None, mine=token if own.number else b"", revision=revision)

    def _adopt(self, own: _Own, place: QueuedKey) -> None:
        """Keep a place by the lease that it has: it was handed over by another process, or the reply to it was lost."""
        self._leases.revoke(own.lease.id)
        own.lease = EtcdLease(place.lease, 0.0, time.monotonic())
        if not self._leases.renew(own.lease):
            raise Gone("its lease has just ended")

    def _withdraw(self, name: str, token: bytes, own: _Own) -> None:
        """Leave nothing of one who was refused, and doesn't wait."""
        if own.number:
            self.release(name, token)
        else:
            self._owned.pop((name, token), None)
            self._leases.give_back(own.lease, own.seconds)

    def _key(self, name: str, token: bytes) -> str:
        return b64(self._names.place(name, token))

    def _whole(self, name: str) -> dict[str, str]:
        """The range of a lock's queue."""
        start, end = self._names.queue(name)
        return {"key": b64(start), "range_end": b64(end)}

    def _txn(self, compare: Sequence[_Terms], success: Sequence[_Terms], failure: Sequence[_Terms]) -> _Told:
        terms = {"compare": compare, "success": success, "failure": failure}
        return _Told(self._gateway.ask("/v3/kv/txn", terms))

    def _all(self, name: str) -> tuple[Sequence[QueuedKey], int]:
        """The queue, in its order, and the revision at which it was read."""
        told = self._gateway.ask("/v3/kv/range", {**self._whole(name), **_OLDEST})
        return [place_of(kv) for kv in told.get("kvs", ())], int(told["header"]["revision"])

    # -- while it is held -----------------------------------------------------------------------------------------

    def renew(self, name: str, token: bytes, seconds: float) -> bool:
        own = self._owned.get((name, token))
        if own is None:  # another process may have handed it to us
            place = next((each for each in self._all(name)[0] if each.token == token), None)
            if place is None:
                return False
            own = _Own(EtcdLease(place.lease, 0.0, time.monotonic()), seconds, place.number, granted=True)
            self._owned.put((name, token), own, time.monotonic())
        stands = self._stands(name, token, own, seconds)
        if not stands:
            self._owned.pop((name, token), None)
        return stands

    def hand_over(self, name: str, token: bytes, seconds: float) -> bool:
        """Let it stand so long from now, and forget it: another process finds out on which lease it stands."""
        stands = self.renew(name, token, seconds)
        self._owned.pop((name, token), None)
        return stands

    def _stands(self, name: str, token: bytes, own: _Own, seconds: float) -> bool:
        """Let it stand so long from now. False: it has ended."""
        if not self._leases.renew(own.lease):
            return False
        return own.lease.left >= seconds or self._moved(name, token, own, seconds)

    def _moved(self, name: str, token: bytes, own: _Own, seconds: float) -> bool:
        """The same, on a longer lease than the one that it has."""
        key, old = self._key(name, token), own.lease
        there = {"key": key, "target": "CREATE", "result": "GREATER", "create_revision": "0"}
        new = self._leases.take(seconds)
        put = {"request_put": {"key": key, "lease": str(new.id), "ignore_value": True}}
        try:
            done = self._txn([there], [put], []).done
        except EngineError:
            self._owned.pop((name, token), None)  # on which of both it stands, the next renewal looks up
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
        if not own.number:  # the question may come yet, and finds no lease to stand on
            self._leases.revoke(own.lease.id)
            return False
        told = self._gateway.ask("/v3/kv/deleterange", {"key": self._key(name, token)})
        if int(told.get("deleted", 0)):
            self._leases.give_back(own.lease, own.seconds)
            return own.granted
        return self._leases.revoke(own.lease.id) and own.granted  # it was asked twice, if there is a lease

    def _broken(self, name: str, token: bytes) -> bool:
        """Another process's lock: its holder learns of that by the end of its lease."""
        there, _ = self._all(name)
        place = next((each for each in there if each.token == token), None)
        if place is None:
            return False
        if not (place.lease and self._leases.revoke(place.lease)):
            self._gateway.ask("/v3/kv/deleterange", {"key": b64(place.key)})
        return place in inside(there)

    # -- who has what ---------------------------------------------------------------------------------------------

    def holder(self, name: str) -> list[tuple[bytes, float]]:
        return [(each.token, self._leases.left(each.lease)) for each in inside(self._all(name)[0])]

    def held(self, prefix: str) -> list[Held]:
        start, end = self._names.below(prefix)
        told = self._gateway.ask("/v3/kv/range", {"key": b64(start), "range_end": b64(end), **_OLDEST})
        queues: dict[str, list[QueuedKey]] = {}
        for each in [place_of(kv) for kv in told.get("kvs", ())]:
            queues.setdefault(self._names.name_of(each.key), []).append(each)
        found = []
        for name, there in queues.items():
            those = inside(there)
            for each in those:
                host, pid = parts_of(each.holder)
                seconds = max(time.time() - each.since, 0.0)
                left, waiting = self._leases.left(each.lease), len(there) - len(those)
                found.append(Held(name, host, pid, None, each.number, each.since, seconds, left, False, waiting))
        return found


_OLDEST = {"sort_target": "CREATE", "sort_order": "ASCEND"}


class _Told:
    """What a transaction has answered."""

    def __init__(self, told: _Terms) -> None:
        self.done = bool(told.get("succeeded"))
        self.revision = int(told["header"]["revision"])
        ranges = [each["response_range"] for each in told.get("responses", ()) if "response_range" in each]
        self.places = [[place_of(kv) for kv in each.get("kvs", ())] for each in ranges]


class EtcdLocks:
    """Locks of one colour: `run` has blocking steps done."""

    def __init__(self, steps: EtcdLockSteps, gateway: Gateway, run: Run, colour: Colour) -> None:
        self._steps, self._gateway, self._run, self._colour = steps, gateway, run, colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        if waits and (answer := self._steps.at_hand(name, token, lease)) is not None:
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
        mine, revision = (busy.mine, busy.revision) if isinstance(busy, _Queued) else (b"", 0)
        token, turn = mine or busy.token, bool(mine)
        with queue.waiter(token, turn, revision) as bell:
            if not queue.hears or time.monotonic() - queue.heard >= SAFETY:
                with suppress(EngineError):  # a member may be down: then we look, at another
                    await self._run(queue.open)
            left = min(end - time.monotonic(), SAFETY if queue.hears else LOOK)
            known = queue.hears and queue.worth_asking(token, turn, revision)
            if left > 0 and not known and not self._gateway.closed:
                await self._colour.park(bell, left)
        if self._gateway.closed:
            raise EngineClosed(self._gateway.called)
