"""What a lock's queue is asked, in transactions: blocking, for both colours.

A lock is a queue of keys, one for each token that has it or waits for it, in the order of the revisions that have made
them. The one at index i is inside if i is less than the rooms of all up to it, itself included; as soon as one isn't,
none behind it is. The revision is the fence. Each key stands on a lease of its own, which ends it with its process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeAlias

from stampede.engines.etcd.gateway import Gateway, Gone, b64
from stampede.engines.etcd.hub import Span
from stampede.engines.etcd.leases import Lease, Leases
from stampede.engines.etcd.names import Names, Place, place_of, value_of
from stampede.engines.kit.owned import Owned
from stampede.engines.whereabouts import parts_of
from stampede.errors import EngineError
from stampede.ports import Busy, Granted, Held

__all__ = ["Desk", "Queued", "turn_has_come"]

TRIES = 10
"""How often a question is asked again because its lease has ended meanwhile, or others were faster."""

RACES = 3
"""How often of those others were."""

TOGETHER = 100
"""Keys of one transaction."""

KEPT = 60.0
"""Seconds for which it is known of a token that its lease has ended, and it was never released."""


_Terms: TypeAlias = Mapping[str, Any]


@dataclass(slots=True)
class Queued(Busy):
    """Busy, and what has to go before that can change."""

    mine: bytes = b""  # the token that has a place; none: who asked has none
    span: Span = (b"", b"")  # what is to be watched: one key, or all of the lock
    near: bytes = b""  # the token to be watched, if it is this very process that will say so
    revision: int = 0  # as of which that was so
    before: list[Place] = field(default_factory=list)  # all that come first, if there is more than one to go by
    room: float = 1


@dataclass(slots=True)
class _Own:
    """A token of this process, with its place in a queue."""

    lease: Lease
    seconds: float
    number: int = 0  # its revision, as far as it is known
    granted: bool = False
    sure: bool = True  # no question about it is under way somewhere, to be answered when nobody waits for it


class Desk:
    """The locks of one engine, as this process asks for them."""

    def __init__(self, gateway: Gateway, leases: Leases, names: Names) -> None:
        self._gateway, self._leases, self._names = gateway, leases, names
        self.start_again()

    def start_again(self) -> None:
        """Also in a forked child: locks are the parent's."""
        self._owned: Owned[str, _Own] = Owned(lambda own: own.lease.left < -KEPT)
        self._heard: dict[bytes, set[Callable[[bytes | None], object]]] = {}
        self._lock = threading.RLock()

    # -- acquire --------------------------------------------------------------------------------------------------

    def acquire(self, name: str, token: bytes, seconds: float, waits: bool, room: float) -> Granted | Busy:
        own = self._owned.get(name, token)
        keeps = waits or (own is not None and own.number > 0)
        for tried in range(TRIES):
            if own is not None and own.lease.left <= 0:  # nor is its place
                self._forget(name, token)
                own = None
            if own is None:
                own = _Own(self._leases.take(seconds), seconds)
                self._owned.put(name, token, own)  # before it is asked for: what may be there is to be given back
            try:
                # Where others come and go, one who doesn't wait takes a place for a moment, so as not to try for ever.
                answer = self._asked(name, token, own, waits or tried > RACES, room)
            except Gone:  # the lease has ended, and whatever stood on it
                self._forget(name, token)
                own = _Own(self._leases.take(seconds, new=True), seconds)
                self._owned.put(name, token, own)
                continue
            if answer is None:
                continue
            if isinstance(answer, Busy):
                if not own.number:  # no place, then: nor is one to come of a question that went astray
                    if not own.sure:
                        self._leases.revoke(own.lease.id)
                    self._owned.pop(name, token)
                    if own.sure:
                        self._leases.give_back(own.lease, seconds)
                elif not keeps:
                    self.release(name, token)
                return answer
            own.granted = True
            if own.lease.left >= seconds or self._stands(name, token, own, seconds):
                return answer
            self._forget(name, token)  # it ended while we were told of it
            own = None
        raise EngineError(f"{self._gateway.called}: the leases of this lock end faster than it can be had")

    def _asked(self, name: str, token: bytes, own: _Own, waits: bool, room: float) -> Granted | Busy | None:
        """None: it is to be asked again."""
        its = _Keys(self._names, name, token)
        put: _Terms = {
            "request_put": {"key": its.key, "value": value_of(room, own.seconds), "lease": str(own.lease.id)}
        }
        # In one step with it: who was there, in as few words as will do.
        if room != 1:
            look: list[_Terms] = [its.get, its.all]
        elif not own.number:
            look = [its.get, its.first, its.last_two]
        else:
            look = [its.get, its.first, its.last_before(own.number)]
        empty = {**its.range, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        absent = {"key": its.key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        told = self._txn([absent if waits else empty], [put, *look[1:]] if waits else [put], look, own)
        if told.done:
            own.number = told.revision
            if not waits:
                return Granted(fence=own.number)
        elif (mine := told.places[0]) and (mine[0].number != own.number or mine[0].lease != own.lease.id):
            self._adopt(own, mine[0])
            return None  # a reply was lost, or another process had it: now we know which place is ours
        first, others = told.places[1 - len(look)], told.places[-1]
        if not told.done and not mine:
            if room != 1 and _has_room(others, room):
                return self._squeezed(its, put, others, told.revision, own)
            if not first:
                return None  # it came free, between two questions
            (there,) = first[:1]
            near = self._near(name, there)
            return Queued(there.token, there.seconds, None, b"", (there.key, b""), near, told.revision)
        before = [each for each in others if each.number < own.number]
        if not before or (room != 1 and turn_has_come(before, room)):
            return Granted(fence=own.number)
        holder = (first if room == 1 else before)[0]
        if room == 1:
            last = before[0]
            span, near, before = (last.key, b""), self._near(name, last), []
        else:
            span, near = self._names.queue(name), b""
        # Its own lease may be what ends first: who waits renews it.
        return Queued(holder.token, holder.seconds, None, token, span, near, told.revision, before, room)

    def _squeezed(
        self, its: _Keys, put: _Terms, there: Sequence[Place], revision: int, own: _Own
    ) -> Granted | Busy | None:
        """There was room for one more who doesn't wait: if nobody has come since, it is ours."""
        alone = {**its.range, "target": "MOD", "result": "LESS", "mod_revision": str(revision + 1)}
        told = self._txn([alone], [put], [its.get], own)
        if not told.done:
            return None
        own.number = told.revision
        return Granted(fence=told.revision)

    def _adopt(self, own: _Own, place: Place) -> None:
        """It stands on the lease that it stands on, whichever we had for it."""
        spare, own.number = own.lease, place.number
        if place.lease == spare.id:
            return
        own.lease = Lease(place.lease, 0.0, time.monotonic())
        if own.sure:
            self._leases.give_back(spare, own.seconds)
        else:
            self._leases.revoke(spare.id)
        if not self._leases.renew(own.lease):
            raise Gone("its lease has just ended")

    def _txn(self, compare: list[Any], success: list[Any], failure: list[Any], *owns: _Own) -> _Told:
        def doubt() -> None:
            for own in owns:
                own.sure = False

        try:
            terms = {"compare": compare, "success": success, "failure": failure}
            return _Told(self._gateway.ask("/v3/kv/txn", terms, doubt=doubt))
        except Gone:
            raise
        except BaseException:
            doubt()
            raise

    def _near(self, name: str, place: Place) -> bytes:
        """Its token, if it is one of ours, so that nobody need tell us of its end."""
        return place.token if self.has(name, place.token) else b""

    def has(self, name: str, token: bytes) -> bool:
        """Whether it is one of ours, with a place."""
        return self._owned.get(name, token) is not None

    # -- while it is held -----------------------------------------------------------------------------------------

    def renew(self, name: str, token: bytes, seconds: float) -> bool:
        own = self._owned.get(name, token)
        if own is not None:
            if self._stands(name, token, own, seconds):
                return True
            self._forget(name, token)
            return False
        ((*places,),) = self._txn([], [_Keys(self._names, name, token).get], []).places
        if not places:
            return False
        (place,) = places
        own = _Own(Lease(place.lease, 0.0, time.monotonic()), seconds, place.number, granted=True)
        if not self._stands(name, token, own, seconds):
            return False
        self._owned.put(name, token, own)  # another process has handed it to us
        return True

    def hand_over(self, name: str, token: bytes, seconds: float) -> bool:
        """Have it stand so long from now, and know nothing of it: who takes it on finds out on which lease it does."""
        stands = self.renew(name, token, seconds)
        if stands:
            self._forget(name, token)
        return stands

    def _stands(self, name: str, token: bytes, own: _Own, seconds: float) -> bool:
        """Have it stand so long from now."""
        if not self._leases.renew(own.lease):
            return False
        return own.lease.left >= seconds or self._moved(name, token, own, seconds)

    def _moved(self, name: str, token: bytes, own: _Own, seconds: float) -> bool:
        """The same, on a lease that is longer than the one it had."""
        its, old = _Keys(self._names, name, token), own.lease
        there = {"key": its.key, "target": "CREATE", "result": "GREATER", "create_revision": "0"}
        new = self._leases.take(seconds)
        put = {"request_put": {"key": its.key, "lease": str(new.id), "ignore_value": True}}
        try:
            done = self._txn([there], [put], [], own).done
        except BaseException:
            self._owned.pop(name, token)  # on which of both it stands, the next renewal looks up
            raise
        if not done:
            self._leases.give_back(new, seconds)
            return False
        own.lease, own.seconds = new, seconds
        self._leases.revoke(old.id)
        return True

    def keep_waiting(self, name: str, token: bytes) -> bool:
        """Keep a place in the queue. False: it has gone."""
        own = self._owned.get(name, token)
        if own is None or own.lease.left > own.lease.ttl * 2 / 3:
            return own is not None
        return self._leases.renew(own.lease)

    def left(self, name: str, token: bytes) -> float:
        """Seconds until that is to be done."""
        own = self._owned.get(name, token)
        return inf if own is None else max(own.lease.left - own.lease.ttl * 2 / 3, 0.0)

    def gone(self, span: Span) -> bool:
        """Whether the key that was to be watched isn't there any more."""
        told = self._gateway.ask("/v3/kv/range", {"key": b64(span[0]), "count_only": True})
        return not int(told.get("count", 0))

    # -- release --------------------------------------------------------------------------------------------------

    def release(self, name: str, token: bytes) -> bool:
        own = self._owned.get(name, token)
        if own is None:
            return self._broken(name, token)
        if not own.sure:
            return self._revoked(name, token, own)
        told = self._txn([], [{"request_delete_range": {"key": _Keys(self._names, name, token).key}}], [], own)
        return self._released(name, token, own, told.deleted[0])

    def _released(self, name: str, token: bytes, own: _Own, deleted: bool) -> bool:
        if not own.sure:  # asked twice: was it there the first time? Its lease, on which nothing else stood, says so
            return self._revoked(name, token, own)
        self._forget(name, token)
        if deleted:
            self._leases.give_back(own.lease, own.seconds)
        return deleted and own.granted

    def _revoked(self, name: str, token: bytes, own: _Own) -> bool:
        """With its lease: a question about it that comes yet, from somewhere, finds none to stand on."""
        stood = self._leases.revoke(own.lease.id)
        self._forget(name, token)
        return stood and own.granted

    def _broken(self, name: str, token: bytes) -> bool:
        """Another process's: it learns of that when it renews its lease."""
        its = _Keys(self._names, name, token)
        (there,) = self._txn([], [its.all], []).places
        inside = dict(zip((each.token for each in there), _inside(there), strict=True))
        place = next((each for each in there if each.token == token), None)
        if place is None:
            return False
        if not (place.lease and self._leases.revoke(place.lease)):
            self._txn([], [{"request_delete_range": {"key": its.key}}], [])
        return inside[token]

    def _forget(self, name: str, token: bytes) -> None:
        self._owned.pop(name, token)
        self.tell(name, token)

    # -- those of this process that wait for one another ----------------------------------------------------------

    def hear(self, key: bytes, told: Callable[[bytes | None], object]) -> Callable[[], None]:
        """Have it called when this key of ours is gone by our own doing; returns what ends that."""
        with self._lock:
            those = self._heard.setdefault(key, set())
            those.add(told)

        def end() -> None:
            with self._lock:
                those.discard(told)
                if not those and self._heard.get(key) is those:
                    del self._heard[key]

        return end

    def tell(self, name: str, token: bytes) -> None:
        key = self._names.place(name, token)
        with self._lock:
            those = list(self._heard.get(key, ()))
        for told in those:
            told(key)

    # -- who has what ---------------------------------------------------------------------------------------------

    def holder(self, name: str) -> list[tuple[bytes, float]]:
        (there,) = self._txn([], [_Keys(self._names, name, b"").all], []).places
        inside = [each for each, is_in in zip(there, _inside(there), strict=True) if is_in]
        return [(each.token, self._leases.left(each.lease)) for each in inside]

    def held(self, prefix: str) -> list[Held]:
        start, end = self._names.below(prefix)
        every = {"request_range": {"key": b64(start), "range_end": b64(end), **_OLDEST}}
        queues: dict[str, list[Place]] = {}
        for each in self._txn([], [every], []).places[0]:
            queues.setdefault(self._names.name_of(each.key), []).append(each)
        found = []
        for name, there in queues.items():
            inside = [each for each, is_in in zip(there, _inside(there), strict=True) if is_in]
            for each in inside:
                host, pid = parts_of(each.holder)
                seconds = max(time.time() - each.since, 0.0)
                left, waiting = self._leases.left(each.lease), len(there) - len(inside)
                found.append(Held(name, host, pid, None, each.number, each.since, seconds, left, False, waiting))
        return found


_OLDEST = {"sort_target": "CREATE", "sort_order": "ASCEND"}
_NEWEST = {"sort_target": "CREATE", "sort_order": "DESCEND"}


class _Keys:
    """What is asked of one lock."""

    def __init__(self, names: Names, name: str, token: bytes) -> None:
        start, end = names.queue(name)
        self.key = b64(names.place(name, token))
        self.range = {"key": b64(start), "range_end": b64(end)}
        self.get: _Terms = {"request_range": {"key": self.key}}
        self.all: _Terms = {"request_range": {**self.range, **_OLDEST}}
        self.first: _Terms = {"request_range": {**self.range, **_OLDEST, "limit": "1"}}
        self.last_two: _Terms = {"request_range": {**self.range, **_NEWEST, "limit": "2", "keys_only": True}}

    def last_before(self, number: int) -> _Terms:
        newest = {**self.range, **_NEWEST, "limit": "1", "keys_only": True, "max_create_revision": str(number - 1)}
        return {"request_range": newest}


class _Told:
    """What a transaction has answered."""

    def __init__(self, told: _Terms) -> None:
        self.done = bool(told.get("succeeded"))
        self.revision = int(told["header"]["revision"])
        responses = told.get("responses", ())
        ranges = [each["response_range"] for each in responses if "response_range" in each]
        self.places = [[place_of(kv) for kv in each.get("kvs", ())] for each in ranges]
        deletes = [each["response_delete_range"] for each in responses if "response_delete_range" in each]
        self.deleted = [bool(int(each.get("deleted", 0))) for each in deletes]


def _inside(queue: Sequence[Place]) -> list[bool]:
    """Of each whether it is: nobody is who comes behind one that isn't."""
    answers: list[bool] = []
    least = inf
    for index, each in enumerate(queue):
        least = min(least, each.room)
        answers.append(index < least and all(answers[-1:]))
    return answers


def _has_room(there: Sequence[Place], room: float) -> bool:
    """For one more who doesn't wait."""
    return all(_inside(there)) and len(there) + 1 <= min([room, *(each.room for each in there)])


def turn_has_come(before: Sequence[Place], room: float) -> bool:
    """Of one of this room behind those."""
    rooms = [each.room for each in before] + [room]
    return all(index < min(rooms[: index + 1]) for index in range(len(rooms)))
