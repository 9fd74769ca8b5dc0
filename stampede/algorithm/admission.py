"""What a computation gives, or raises, in a place at its origin, where that has caps.

Whoever waits for a place has its key's lease, which is renewed meanwhile: so one caller of each key waits there, and
all others wait for him. What it waits is no part of the computation's cost, nor of the time for which its lease is
renewed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from math import inf
from typing import Any, TypeVar

from stampede.algorithm.call import Call, Gate, OriginPlace
from stampede.algorithm.flight import Flight
from stampede.errors import OriginFull
from stampede.metrics.table import ORIGIN, PLACES, add, histogram
from stampede.model.entry import Entry
from stampede.outages.keeper import Hold
from stampede.runtime.colour import ended

__all__ = ["compute_at_origin", "drop_place", "leave_origin", "load_at_origin"]

T = TypeVar("T")


class _Stay:
    """A computation's time at its origin. What it leaves running has its context, and so this, for longer."""

    __slots__ = ("origin", "over")

    def __init__(self, origin: str) -> None:
        self.origin, self.over = origin, False


_inside: ContextVar[tuple[_Stay, ...]] = ContextVar("stampede_origins", default=())


async def compute_at_origin(
    call: Call, kept: Entry[Any] | None, hold: Hold, flight: Flight, longest: float
) -> tuple[Any, BaseException | None, float]:
    """The value or the error, and the seconds that it has taken. The place is the call's until it has landed."""
    gate = gate_of(call)
    if gate is not None:
        try:
            await enter(call, kept, gate, longest)
        except OriginFull as full:
            return None, full.with_traceback(None), 0.0
    hold.bound(longest)  # also of who needs no place
    flight.computes(call.label, call.policy.lease, longest)
    began, work = call.now, call.resources.colour.call(call.origin)
    return *await ended(work if call.place is None else run_in_place(call, call.place, work)), call.now - began


async def load_at_origin(
    call: Call, kept: Entry[Any] | None, begin: Callable[[], object], work: Coroutine[Any, Any, T]
) -> T:
    """What a batch's work gives, likewise. OriginFull: it has not begun."""
    gate = gate_of(call)
    try:
        if gate is not None:
            await enter(call, kept, gate, inf)
    except BaseException:
        work.close()
        raise
    begin()
    return await (work if call.place is None else run_in_place(call, call.place, work))


async def enter(call: Call, kept: Entry[Any] | None, gate: Gate, longest: float) -> None:
    """Take a place at the origin for this call. OriginFull: there was none in time."""
    began, outcome, origin = call.now, "full", call.policy.origin or ""
    try:
        call.place = await gate.enter(call.resources.colour, place_wait(call, kept, gate), call.policy.lease, longest)
        outcome = "entered"
        add(PLACES, origin)
    finally:
        histogram(ORIGIN, origin, outcome).observe(call.now - began)


async def run_in_place(call: Call, place: OriginPlace, work: Coroutine[Any, Any, T]) -> T:
    """What it gives. What it calls meanwhile needs no other place there."""
    began, before, stay, failed = call.now, _inside.get(), _Stay(place.origin), False
    _inside.set((*before, stay))
    try:
        return await work
    except Exception:
        failed = True
        raise
    finally:
        stay.over = True
        _inside.set(before)  # no reset: one that is destroyed ends in another context
        place.ended(call.resources.scope, call.now - began, failed=failed)


async def leave_origin(call: Call) -> None:
    """Let the next one in."""
    place, call.place = call.place, None
    if place is not None:
        add(PLACES, place.origin, amount=-1)
        await call.resources.colour.shielded(place.leave())


def drop_place(call: Call) -> None:
    """The same where nothing can be awaited any more."""
    place, call.place = call.place, None
    if place is not None:
        add(PLACES, place.origin, amount=-1)
        place.drop()


def gate_of(call: Call) -> Gate | None:
    """The caps under which this call computes. One that computes at this origin already has its place there."""
    origin = call.policy.origin
    if origin is None or any(each.origin == origin and not each.over for each in _inside.get()):
        return None
    return None if call.resources.gates is None else call.resources.gates.gate_of(origin)


def place_wait(call: Call, kept: Entry[Any] | None, gate: Gate) -> float:
    """Seconds that it waits for a place: none, where what is kept does as well. An early refresh gives way."""
    spared = kept is not None and not call.force and (kept.fresh > 0 or gate.when_full == "stale")
    if spared or gate.when_full == "raise":
        return 0.0
    left = inf if call.policy.limit is None else max(call.policy.limit - call.waited, 0.0)
    return min(left, call.policy.lease) if call.nested else left  # who is inside may wait for its other lease
