"""What a cache keeps in this process: the local tier in front of its engine, or the memory engine's own.

A resident is kept only as long as it is known to be true: under the engine's ticket; where the engine has none to
give, for `believed` seconds, under a ticket of our own that this process's own changes void.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stampede.local_tier.residents import Resident, Residents
from stampede.model import early
from stampede.model.entry import Entry
from stampede.model.policy import Policy
from stampede.model.ports import Ticket
from stampede.model.result import Result

__all__ = ["LocalTier"]

_clock = time.monotonic
_SLOTS = 1024


class LocalTier:
    """The residents of one cache. With no tier it keeps nothing."""

    def __init__(
        self,
        residents: Residents | None,
        *,
        shared: bool,
        believed: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.residents = residents
        self.shared = shared  # the tier stands before an engine, and isn't the engine's own
        self._believed = believed  # for how many seconds what nobody tells of is true; None: all changes are told
        self._stamps = array("Q", bytes(8 * _SLOTS))
        self._next = itertools.count(1)  # no stamp comes twice, so that changing one takes no lock to inherit locked

    def sample(self, key: str) -> Ticket:
        """Return a ticket that this process's next change of the key voids. Take it before the engine is asked; the
        residents of the engine's own tier need none."""
        slot = hash(key) % _SLOTS
        return Ticket(self._stamps, slot, self._stamps[slot])

    def hit(self, key: str) -> Resident | None:
        """The resident, if it needs no thought."""
        resident, now = self.residents.get(key) if self.residents is not None else None, _clock()
        if resident is None or resident.end <= now or not _is_valid(resident, now):
            return None
        resident.hits += 1
        return resident

    def known(self, key: str) -> Entry[Any] | None:
        """What was kept of this key last, whatever has become of it."""
        resident = self.residents.get(key) if self.residents is not None else None
        return None if resident is None else resident.entry

    def kept(self, key: str) -> Entry[Any] | None:
        """What may be served as stale while the engine can't be asked: nothing says that it has been changed since."""
        resident = self.residents.get(key) if self.residents is not None else None
        now = _clock()
        if resident is None or resident.keep <= now:
            return None
        if not _holds(resident) and not _held_until_loss(resident):
            return None
        return replace(resident.entry, fresh=min(resident.fresh - now, 0.0), keep=resident.keep - now)

    def is_due(self, key: str) -> bool:
        """Is there a resident, fresh and true, whose early moment has come?"""
        resident = self.residents.get(key) if self.residents is not None else None
        return resident is not None and _is_due(resident, _clock())

    def take_due(self, key: str) -> Entry[Any] | None:
        """That one's entry, for who is to refresh it. Other callers go on hitting it meanwhile."""
        resident = self.residents.get(key) if self.residents is not None else None
        now = _clock()
        if resident is None or not _is_due(resident, now):
            return None
        resident.end = resident.fresh
        return replace(resident.entry, fresh=resident.fresh - now, keep=resident.keep - now)

    def place(self, key: str, scope: str, result: Result, sample: Ticket | None) -> Resident | None:
        """The resident of what a call ended with, if that is known to be true. A new one isn't hit yet."""
        residents, entry = self.residents, result.entry
        if residents is None or entry is None or entry.raised:
            return None
        resident = residents.get(key)
        if (
            resident is None
            or resident.entry.id != entry.id
            or (resident.stamp is not None and not _holds(resident))
            or (self.shared and resident.fresh <= _clock())  # believed for as long as it may be: a new one begins
        ):
            resident = self._resident(key, scope, entry, result, sample)
            if resident is None:
                return None
            residents.put(resident)
        resident.scope = scope
        return resident

    def open(self, resident: Resident, result: Result, policy: Policy) -> None:
        """Let it be hit from now on, until its early moment, which is drawn here."""
        entry = resident.entry
        if result.until is not None:
            resident.end = min(resident.fresh, _clock() + result.until)
        elif resident.end == 0.0:
            ahead = early.lead(entry, early.draw(policy.early)) if policy.early else 0.0
            # Of the entry's own end: that this process believes it for a second only brings its refresh no nearer.
            fresh = result.at + entry.fresh if self.shared and self._believed() is not None else resident.fresh
            resident.end = min(resident.fresh, fresh - ahead)

    def _resident(
        self, key: str, scope: str, entry: Entry[Any], result: Result, sample: Ticket | None
    ) -> Resident | None:
        if not self.shared or result.at == 0.0 or entry.fresh <= 0:
            return None
        ticket, believed = result.ticket, self._believed()
        if ticket is None:
            if believed is None or sample is None:
                return None  # a change may be under way: the next call reads it under a ticket
            ticket = sample
        fresh, keep = entry.fresh, entry.keep
        if believed is not None:
            fresh = min(fresh, believed)
            if ticket is sample:
                keep = min(keep, believed)  # nobody tells us what others do to it: then it isn't even stale
        fresh += result.at
        return Resident(key, scope, entry, 0.0, fresh, result.at + keep, ticket)

    def drop(self, key: str) -> None:
        """This process changes the key: what it keeps, and what it is about to keep, is true no more."""
        self._stamps[hash(key) % _SLOTS] = next(self._next)
        if self.shared and self.residents is not None:
            self.residents.drop(key)

    def drop_older(self, key: str) -> None:
        """The key is of an older generation: the engine's own resident has no reader left, either."""
        if self.residents is not None:
            self.residents.drop(key)

    def drop_all(self, scope: str | None = None) -> None:
        """The same for all keys of a function, or for all."""
        for slot in range(_SLOTS):
            self._stamps[slot] = next(self._next)
        if self.residents is not None and scope is not None:
            self.residents.drop_scope(scope)
        elif self.residents is not None:
            self.residents.clear()

    def soften_all(self, scope: str | None = None) -> None:
        """All of a function, or all, is stale by now: what is kept here for no engine stays."""
        if self.shared or self.residents is None:
            self.drop_all(scope)
        else:
            self.residents.stop_hits(scope)


def _held_until_loss(resident: Resident) -> bool:
    """Return whether the ticket, which has ended, held until the server was lost."""
    return resident.stamp is not None and resident.pulse.stood(resident.slot, resident.stamp)


def _holds(resident: Resident) -> bool:
    return resident.stamp is None or (resident.stamps is not None and resident.stamps[resident.slot] == resident.stamp)


def _is_due(resident: Resident, now: float) -> bool:
    return 0.0 < resident.end <= now < resident.fresh and _is_valid(resident, now)


def _is_valid(resident: Resident, now: float) -> bool:
    """Return whether the ticket holds, and every change that has come is heard of. The order of the two matters."""
    return resident.pulse.holds(now) and _holds(resident)
