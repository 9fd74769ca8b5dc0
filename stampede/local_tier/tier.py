"""What a cache keeps in this process: the local tier in front of its engine, or the memory engine's own. A resident is
kept only while it is known to be valid. That is as long as the engine's ticket holds. If the engine gives no ticket, it
is `believed` seconds, and a ticket of our own ends with any change by this process."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from stampede.local_tier.pulses import TagPulse, TagStamps, are_valid, flat
from stampede.local_tier.residents import Resident, Residents
from stampede.model import early
from stampede.model.entry import Entry
from stampede.model.ports import Ticket
from stampede.model.result import Result
from stampede.model.tags import Tag, judge, key_of_tag, names_in
from stampede.settings.options import Policy

__all__ = ["LocalTier"]

_clock = time.monotonic
_SLOTS = 1024

Guard: TypeAlias = Callable[[Ticket], Ticket]
"""Makes a ticket depend on something else, too."""


class LocalTier:
    """The residents of one cache. If `residents` is None, nothing is kept."""

    def __init__(
        self,
        residents: Residents | None,
        *,
        shared: bool,
        believed: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.residents = residents
        self.tag_stamps = TagStamps() if residents is None else residents.tag_stamps
        self.shared = shared  # the tier is in front of a shared engine, and is not the engine's own
        # Seconds for which an entry without ticket is valid; None: the engine reports all changes.
        self._believed = believed
        self._stamps = array("Q", bytes(8 * _SLOTS))
        # No stamp is used twice, so changing one needs no lock that a forked child might inherit locked.
        self._next = itertools.count(1)

    def sample(self, key: str) -> Ticket:
        """Return a ticket that ends with the next change of the key by this process. Take it before asking the engine.
        The residents of an engine's own tier need none."""
        slot = hash(key) % _SLOTS
        return Ticket(self._stamps, slot, self._stamps[slot])

    def hit(self, key: str) -> Resident | None:
        """Return the resident if it can be served without any further question."""
        resident, now = self.residents.get(key) if self.residents is not None else None, _clock()
        if resident is None or resident.end <= now or not _is_valid(resident, now):
            return None
        resident.hits += 1
        return resident

    def known(self, key: str) -> Entry[Any] | None:
        """Return the last entry of the key, even if it is no longer valid."""
        resident = self.residents.get(key) if self.residents is not None else None
        return None if resident is None else resident.entry

    def kept(self, key: str) -> Entry[Any] | None:
        """Return what may be served as stale while the engine is down, if nothing says that it was changed."""
        resident = self.residents.get(key) if self.residents is not None else None
        now = _clock()
        if resident is None or resident.keep <= now:
            return None
        if not (_holds(resident) and resident.pulse.stands(now)) and not _held_until_loss(resident):
            return None
        return replace(resident.entry, fresh=min(resident.fresh - now, 0.0), keep=resident.keep - now)

    def is_due(self, key: str) -> bool:
        """Return whether there is a valid, fresh resident whose early moment has come."""
        resident = self.residents.get(key) if self.residents is not None else None
        return resident is not None and _is_due(resident, _clock())

    def take_due(self, key: str) -> Entry[Any] | None:
        """Return an entry that is due, for the caller that refreshes it. Others continue to hit it meanwhile."""
        resident = self.residents.get(key) if self.residents is not None else None
        now = _clock()
        if resident is None or not _is_due(resident, now):
            return None
        resident.end = resident.fresh
        return replace(resident.entry, fresh=resident.fresh - now, keep=resident.keep - now)

    def place(
        self, key: str, scope: str, result: Result, sample: Ticket | None, guard: Guard = lambda ticket: ticket
    ) -> Resident | None:
        """Return a resident for the result, if that is known to be valid. A new one is not hit before `open`. `guard`
        makes the engine's ticket depend on the generation, too."""
        residents, entry = self.residents, result.entry
        if residents is None or entry is None or entry.raised:
            return None
        resident = residents.get(key)
        if (
            resident is None
            or resident.entry.id != entry.id
            or (self.shared and resident.stamp is not None and not _holds(resident))
            or (self.shared and not resident.pulse.holds(_clock()))
            or (self.shared and resident.fresh <= _clock())  # its time without a ticket has ended: a new one begins
        ):
            resident = self._resident(key, scope, entry, result, sample, guard)
            if resident is None:
                return None
            residents.put(resident)
        elif entry.tags and resident.stamp is None and not self._watch_tags(residents, resident):
            return None
        resident.scope = scope
        return resident

    def open(self, resident: Resident, result: Result, policy: Policy) -> None:
        """Allow hits until the resident's early moment, which is drawn here."""
        entry = resident.entry
        if result.until is not None:
            resident.end = min(resident.fresh, _clock() + result.until)
        elif resident.end == 0.0:
            ahead = early.lead(entry, early.draw(policy.early)) if policy.early else 0.0
            # Count from the entry's own end: a short validity in this process does not bring the refresh nearer.
            fresh = result.at + entry.fresh if self.shared and self._believed() is not None else resident.fresh
            resident.end = min(resident.fresh, fresh - ahead)

    def _resident(
        self, key: str, scope: str, entry: Entry[Any], result: Result, sample: Ticket | None, guard: Guard
    ) -> Resident | None:
        if not self.shared or result.at == 0.0 or entry.fresh <= 0:
            return None
        ticket, believed = result.ticket, self._believed()
        if ticket is not None:
            ticket = guard(ticket)
        if ticket is None:
            if believed is None or sample is None:
                return None  # a change may be under way: the next call reads the key under a ticket
            ticket = sample
        proof = self._ticket_of_tagged(entry, ticket, result.at) if entry.tags else ticket
        if proof is None:
            return None
        fresh, keep = entry.fresh, entry.keep
        if believed is not None:
            fresh = min(fresh, believed)
            if ticket is sample:
                # Changes by others are not reported: after this it may not be served as stale, either.
                keep = min(keep, believed)
        fresh += result.at
        return Resident(key, scope, entry, 0.0, fresh, result.at + keep, proof)

    def _ticket_of_tagged(self, entry: Entry[Any], ticket: Ticket, at: float) -> Ticket | None:
        """Return the ticket of an entry with tags, which was asked for at this moment, or None if a tag has ended."""
        ended, names, proofs = self.tag_stamps, list(names_in(entry.tags)), flat(ticket)
        stamp = ended.stamps[0]  # before looking

        def has_ended() -> bool:
            return ended.ended_since(names, at)

        pulse = TagPulse(lambda now: are_valid(proofs, now) and not has_ended(), proofs, has_ended)
        return None if has_ended() else Ticket(ended.stamps, 0, stamp, pulse)

    def _watch_tags(self, residents: Residents, resident: Resident) -> bool:
        """Let hits on a resident of the memory engine's own tier depend on its tags, which are in the same tier. Return
        whether these are valid now."""

        def holds(now: float) -> bool:
            entry = resident.entry
            tags = {name: tag for name in names_in(entry.tags) if (tag := self._tag(residents, name, now)) is not None}
            return bool(judge(replace(entry), tags))

        stamp, pulse = residents.tag_stamps.stamps[0], TagPulse(holds)
        if not pulse.holds(_clock()):
            return False
        resident.stamps, resident.slot, resident.pulse = residents.tag_stamps.stamps, 0, pulse
        resident.stamp = stamp
        return True

    def _tag(self, residents: Residents, name: bytes, now: float) -> Tag | None:
        found = residents.get(key_of_tag(name))
        if found is None or found.keep <= now:
            return None
        found.hits += 1  # so that it is not evicted
        return Tag.of(found.entry)

    def end_tags(self, names: Sequence[bytes]) -> None:
        """Look at their tags again before a resident is served that carries one of these."""
        self.tag_stamps.end(names, _clock())

    def drop(self, key: str) -> None:
        """Drop a key that this process changes: neither its resident nor a value under way is valid any more."""
        self._stamps[hash(key) % _SLOTS] = next(self._next)
        if self.shared and self.residents is not None:
            self.residents.drop(key)

    def drop_older(self, key: str) -> None:
        """Drop a key of an older generation, also from an engine's own tier, because no caller reads it any more."""
        if self.residents is not None:
            self.residents.drop(key)

    def drop_all(self, scope: str | None = None) -> None:
        """Drop all keys of a function, or all keys."""
        for slot in range(_SLOTS):
            self._stamps[slot] = next(self._next)
        if self.residents is not None and scope is not None:
            self.residents.drop_scope(scope)
        elif self.residents is not None:
            self.residents.clear()

    def soften_all(self, scope: str | None = None) -> None:
        """Make all residents of a function stale, or all (None). A tier that is the store itself keeps the values."""
        if self.shared or self.residents is None:
            self.drop_all(scope)
        else:
            self.residents.stop_hits(scope)


def _held_until_loss(resident: Resident) -> bool:
    """Return whether the ticket held until the server was lost."""
    return resident.stamp is not None and resident.pulse.stood(resident.slot, resident.stamp)


def _holds(resident: Resident) -> bool:
    stamps = resident.stamps
    if resident.stamp is None or (stamps is not None and stamps[resident.slot] == resident.stamp):
        return True
    pulse = resident.pulse
    if stamps is None or type(pulse) is not TagPulse:
        return False
    stamp = stamps[resident.slot]  # a tag has been invalidated, perhaps another one
    if not pulse.look(_clock()):
        return False
    resident.stamp = stamp
    return True


def _is_due(resident: Resident, now: float) -> bool:
    return 0.0 < resident.end <= now < resident.fresh and _is_valid(resident, now)


def _is_valid(resident: Resident, now: float) -> bool:
    """Return whether the ticket holds, and all changes that have arrived are known. The order of the two matters."""
    return resident.pulse.holds(now) and _holds(resident)
