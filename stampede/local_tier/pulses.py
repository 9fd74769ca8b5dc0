"""Residents that depend on more than their own entry: on the generation of their function, and on tags.

A hit compares one stamp, that of the entry. Whatever else it depends on is looked at by the resident's pulse, which is
then believed for `LAG` seconds. So a new generation of one function, or a tag that is invalidated, costs other values
nothing.

What this process invalidates itself ends at once. Values of a function are dropped. Residents with tags compare,
instead of their entry's stamp, one that each invalidation of any tag changes (`TagStamps`). After that, the next hit
looks at its own tags again, and mostly finds that none has ended."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf

from stampede.model.ports import Pulse, Ticket

__all__ = ["LAG", "ScopePulse", "TagPulse", "TagStamps", "are_valid", "flat"]

LAG = 0.02
"""Seconds for which what a resident depends on is believed without looking at it."""

MOST = 10_000
"""The most invalidated tags that are remembered."""


class TagStamps:
    """What this process has invalidated: the stamp of all residents with tags, and the time of each tag."""

    def __init__(self) -> None:
        self.stamps = array("Q", [0])
        self._next = count(1)  # no stamp is used twice, whichever threads invalidate at once
        # The times of tags, and that of those which were forgotten, in one object.
        self._ended: tuple[dict[bytes, float], float] = ({}, -inf)

    def end(self, names: Iterable[bytes], now: float) -> None:
        """Note that these tags are invalidated now. The next hit on each resident with tags looks at its own."""
        ended, _ = self._ended
        if len(ended) > MOST:
            self._ended = ended, _ = {}, now
        for name in names:
            ended[name] = now
        self.stamps[0] = next(self._next)

    def ended_since(self, names: Iterable[bytes], at: float) -> bool:
        """Return whether one of the tags was invalidated at this moment or later."""
        ended, others = self._ended
        return others >= at or (bool(ended) and any(ended.get(name, -inf) >= at for name in names))


class ScopePulse(Pulse):
    """The pulse of all residents of one function, in one generation."""

    __slots__ = ("_engine", "_proofs", "_unchanged")

    def __init__(self, engine: Pulse, unchanged: Callable[[], Sequence[Ticket] | None]) -> None:
        """`engine` is the pulse of the residents' tickets. `unchanged` returns the proofs that the generation is still
        the current one, or None if it is not."""
        self._engine = engine
        self._unchanged = unchanged
        self._proofs: Sequence[Ticket] = ()
        self.until = 0.0
        self.stood = self._stood

    def holds(self, now: float) -> bool:
        if self.until <= now and self._engine.holds(now):
            proofs = self._unchanged()
            if proofs is not None:
                self._proofs, self.until = proofs, now + LAG
        return self.until > now

    def stands(self, now: float) -> bool:
        return bool(self._proofs) and all(map(_is_valid, self._proofs))

    def _stood(self, slot: int, stamp: int) -> bool:
        proofs = self._proofs
        return bool(proofs) and self._engine.stood(slot, stamp) and all(map(_is_valid_or_stood, proofs))


class TagPulse(Pulse):
    """The pulse of one resident with tags."""

    __slots__ = ("_ended", "_holds", "_proofs")

    def __init__(
        self, holds: Callable[[float], bool], proofs: Sequence[Ticket] = (), ended: Callable[[], bool] = lambda: False
    ) -> None:
        """`holds` returns whether all that the resident depends on is valid now, and `ended` whether this process has
        invalidated one of its tags."""
        self._holds = holds
        self._ended = ended
        self._proofs = proofs
        self.until = 0.0
        self.stood = self._stood

    def holds(self, now: float) -> bool:
        if self.until <= now and self._holds(now):
            self.until = now + LAG
        return self.until > now

    def look(self, now: float) -> bool:
        """Look at everything now."""
        self.until = 0.0
        return self.holds(now)

    def _stood(self, slot: int, stamp: int) -> bool:
        return bool(self._proofs) and not self._ended() and all(map(_is_valid_or_stood, self._proofs))

    def stands(self, now: float) -> bool:
        return self.holds(now)


def are_valid(proofs: Sequence[Ticket], now: float) -> bool:
    return all(each.pulse.holds(now) and _is_valid(each) for each in proofs)


def _is_valid(ticket: Ticket) -> bool:
    return ticket.stamps[ticket.slot] == ticket.stamp


def _is_valid_or_stood(ticket: Ticket) -> bool:
    return (_is_valid(ticket) and ticket.pulse.stands(0.0)) or ticket.pulse.stood(ticket.slot, ticket.stamp)


def flat(ticket: Ticket) -> tuple[Ticket, ...]:
    """Return an entry's ticket, and those of its tags."""
    return (ticket._replace(tags=()), *ticket.tags)
