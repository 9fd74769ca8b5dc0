"""Runs computations in a place at their origin, where the origin has caps. A caller that waits for a place holds the
lease of its key, which is renewed meanwhile. So one caller of each key waits for a place, and all others wait for that
caller. The wait counts neither as cost of the computation nor as part of the time for which the lease is renewed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from math import inf
from typing import Any, TypeVar

from stampede.algorithm.call import Call, Gate, OriginPlace
from stampede.algorithm.flight import Flight
from stampede.errors import OriginFull
from stampede.leases.keeper import Hold
from stampede.metrics.table import ORIGIN, PLACES, add, histogram
from stampede.model.entry import Entry
from stampede.runtime.colour import ended

__all__ = ["compute_at_origin", "drop_place", "leave_origin", "load_at_origin"]

T = TypeVar("T")


class _Stay:
    """A computation's stay at its origin. Tasks that it leaves running keep this in their context for longer."""

    __slots__ = ("origin", "over")

    def __init__(self, origin: str) -> None:
        self.origin, self.over = origin, False


_inside: ContextVar[tuple[_Stay, ...]] = ContextVar("stampede_origins", default=())


async def compute_at_origin(
    call: Call, existing: Entry[Any] | None, hold: Hold, flight: Flight, longest: float
) -> tuple[Any, BaseException | None, float]:
    """Compute in a place at the origin. Return the value or the error, and the seconds that the computation took. The
    call keeps its place until the value is stored."""
    gate = gate_of(call)
    if gate is not None:
        try:
            await enter(call, existing, gate, longest)
        except OriginFull as full:
            return None, full.with_traceback(None), 0.0
    hold.bound(longest)  # also if no place is needed
    flight.computes(call.label, call.policy.lease, longest)
    began, work = call.now, call.resources.colour.call(call.origin)
    return *await ended(work if call.place is None else run_in_place(call, call.place, work)), call.now - began


async def load_at_origin(
    call: Call, existing: Entry[Any] | None, begin: Callable[[], object], work: Coroutine[Any, Any, T]
) -> T:
    """Run a batch's work in a place at the origin. If OriginFull is raised, the work has not begun."""
    gate = gate_of(call)
    try:
        if gate is not None:
            await enter(call, existing, gate, inf)
    except BaseException:
        work.close()
        raise
    begin()
    return await (work if call.place is None else run_in_place(call, call.place, work))


async def enter(call: Call, existing: Entry[Any] | None, gate: Gate, longest: float) -> None:
    """Take a place at the origin for this call. Raise OriginFull if none was free in time."""
    began, outcome, origin = call.now, "full", call.policy.origin or ""
    try:
        call.place = await gate.enter(
            call.resources.colour, place_wait(call, existing, gate), call.policy.lease, longest
        )
        outcome = "entered"
        add(PLACES, origin)
    finally:
        histogram(ORIGIN, origin, outcome).observe(call.now - began)


async def run_in_place(call: Call, place: OriginPlace, work: Coroutine[Any, Any, T]) -> T:
    """Run the work. Calls that it makes to the same origin need no second place."""
    began, before, stay, failed = call.now, _inside.get(), _Stay(place.origin), False
    _inside.set((*before, stay))
    try:
        return await work
    except Exception:
        failed = True
        raise
    finally:
        stay.over = True
        _inside.set(before)  # not `reset`: a coroutine that is destroyed ends in another context
        place.ended(call.resources.scope, call.now - began, failed=failed)


async def leave_origin(call: Call) -> None:
    """Give the place back, so that the next computation may start."""
    place, call.place = call.place, None
    if place is not None:
        add(PLACES, place.origin, amount=-1)
        await call.resources.colour.shielded(place.leave())


def drop_place(call: Call) -> None:
    """Give the place back where nothing can be awaited any more."""
    place, call.place = call.place, None
    if place is not None:
        add(PLACES, place.origin, amount=-1)
        place.drop()


def gate_of(call: Call) -> Gate | None:
    """Return the caps for this call, or None: the origin has none, or the call is inside a computation with a place."""
    origin = call.policy.origin
    if origin is None or any(each.origin == origin and not each.over for each in _inside.get()):
        return None
    return None if call.resources.gates is None else call.resources.gates.gate_of(origin)


def place_wait(call: Call, existing: Entry[Any] | None, gate: Gate) -> float:
    """Return how many seconds the call waits for a place: 0 if a stored value is good enough instead. An early refresh
    never waits, and leaves the place to others."""
    spared = existing is not None and not call.force and (existing.fresh > 0 or gate.when_full == "stale")
    if spared or gate.when_full == "raise":
        return 0.0
    left = inf if call.policy.limit is None else max(call.policy.limit - call.waited, 0.0)
    # The place may be held by a computation that waits for our other lease.
    return min(left, call.policy.lease) if call.nested else left
