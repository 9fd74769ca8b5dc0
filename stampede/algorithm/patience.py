"""How long a caller waits, for which computation, and what happens when its time is over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from math import inf
from typing import Any, Generic, TypeVar

from stampede import events
from stampede.algorithm.admission import drop_place, leave_origin, load_at_origin
from stampede.algorithm.background import BackgroundPlace
from stampede.algorithm.call import Call
from stampede.algorithm.context import Context, Inside
from stampede.algorithm.finish import served
from stampede.algorithm.flight import Computing, Flight, nested
from stampede.errors import WaitTimeout
from stampede.model.entry import Entry, new_id
from stampede.model.result import LeftOut, Result
from stampede.runtime.colour import Bell

__all__ = [
    "Delivery",
    "compute_alone",
    "compute_in_background",
    "deadline_error",
    "own_wait_left",
    "patience_left",
    "timed_out",
    "wait_left",
]

T = TypeVar("T")


# -- for the computation of another caller --------------------------------------------------------------------------


def wait_left(call: Call) -> tuple[float, Callable[[Call], Awaitable[Result]]]:
    """Return how many seconds the caller may still wait for another caller's computation, and what to do after that. A
    caller that holds a lease itself waits at most one lease: the other computation may be waiting for this one."""
    wait = inf if call.policy.limit is None else call.policy.limit
    if call.claims_only:
        wait = 0.0
    if nested() and call.policy.lease < wait:
        return call.policy.lease - call.waited, compute_alone
    return wait - call.waited, timed_out


def patience_left(call: Call, existing: Entry[Any]) -> float:
    """Return how many seconds the caller still waits for a fresh value before it takes the stored one."""
    policy = call.policy
    if policy.patience is None or existing.fresh > 0:
        return 0.0
    wait = min(policy.patience, inf if policy.limit is None else policy.limit)
    return (min(wait, policy.lease) if nested() else wait) - call.waited


async def timed_out(call: Call) -> Result:
    option = "wait" if call.policy.limit == call.policy.wait else "deadline"
    raise WaitTimeout(f"another caller has been computing {call.label!r} for {call.waited:.3g} s, and {option} ran out")


# -- for the caller's own computation ------------------------------------------------------------------------------


def own_wait_left(call: Call, existing: Entry[Any] | None) -> float:
    """Return how many seconds the caller waits for its own computation, if that runs in the background. inf means that
    it waits until the end, so that no background place is needed."""
    policy = call.policy
    if call.force:
        return inf
    if existing is None:
        wait = inf
    elif existing.fresh > 0:
        return 0.0
    elif policy.patience is not None:
        wait = policy.patience
    else:
        wait = 0.0 if policy.background else inf
    return min(wait, inf if policy.deadline is None else policy.deadline) - call.waited


async def compute_in_background(
    call: Call,
    place: BackgroundPlace,
    flight: Flight,
    begin: Callable[[], Coroutine[Any, Any, Result]],
    existing: Entry[Any] | None,
    seconds: float,
) -> Result:
    """Compute in a background place, and wait `seconds` for the value. After that the computation goes on alone. The
    caller then gets the stored value, or WaitTimeout if there is none."""
    delivery: Delivery[Result] = Delivery()
    flight.hand_over()
    work = _deliver(call, delivery, begin)
    flight.led_by(work)
    longest = call.policy.hold_of(call.seen.cost if call.seen is not None else 0.0)
    cancel = place.begin(work, delivery.bell, longest, waits=seconds > 0)
    if seconds > 0:
        if not flight.ended:
            flight.cancel = cancel
        await _wait(call, flight, delivery.bell, seconds)
    result = delivery.take() if seconds > 0 or existing is None else None
    try:
        if result is not None:
            return result
        if existing is not None:
            return served(call, existing, "computing", until=call.policy.lease)
    finally:
        del result  # its error, if it has one, refers to this frame
    raise deadline_error(call)


def deadline_error(call: Call) -> WaitTimeout:
    return WaitTimeout(
        f"{call.label!r} has been computed for {call.waited:.3g} s, and deadline ran out: the computation goes on, and "
        "its value is stored for later callers"
    )


class Delivery(Generic[T]):
    """The result of a background computation, for its caller, until the caller stops waiting."""

    def __init__(self) -> None:
        self.bell = Bell()
        self._left = False
        self._result: T | None = None

    def put(self, result: T) -> None:
        if not self._left:  # an error that is never taken would refer to this object, and keep it alive
            self._result = result
        self.bell.ring()

    def take(self) -> T | None:
        self._left = True
        result, self._result = self._result, None
        try:
            return result
        finally:
            del result  # its error, if it has one, refers to this frame


async def _deliver(call: Call, delivery: Delivery[Result], begin: Callable[[], Coroutine[Any, Any, Result]]) -> None:
    result = None
    try:
        try:
            result = await begin()
        except GeneratorExit:
            raise
        except BaseException as error:  # the caller raises it, if it still waits
            result = Result(error=error)
        delivery.put(result.for_followers())
        await call.resources.keep([(call, result)])
    finally:
        del result  # an error inside it refers to this frame
        delivery.bell.ring()


async def _wait(call: Call, flight: Flight, bell: Bell, seconds: float) -> None:
    """Wait for the bell, at most `seconds`. If the caller is cancelled, only the last caller ends the computation."""
    colour = call.resources.colour
    try:
        await colour.park(bell, seconds)
    except GeneratorExit:
        flight.leave()
        raise
    except BaseException:
        if flight.leave():
            await colour.shielded(colour.park(bell, None))
        raise


# -- for no other computation ----------------------------------------------------------------------------------------


async def compute_alone(call: Call) -> Result:
    """Compute for this caller only, and store nothing. This is for a caller whose wait might never end."""
    flight, seconds = Flight(call.resources.flights, call.key, call.loop), own_wait_left(call, None)
    if seconds < inf and call.background is not None and call.background.reserve():
        return await compute_in_background(
            call, call.background, flight, lambda: _compute_alone(call, flight), None, seconds
        )
    return await _compute_alone(call, flight)


async def _compute_alone(call: Call, flight: Flight) -> Result:
    began = call.now
    try:
        with Computing(flight), Inside(Context(call.label)):
            try:
                value = await load_at_origin(call, None, lambda: None, call.resources.colour.call(call.origin))
            except GeneratorExit:
                drop_place(call)
                raise
            finally:
                await leave_origin(call)
    except LeftOut as nothing:
        return Result(error=nothing.with_traceback(None))
    finally:
        flight.ended = True  # tasks and threads that outlive it have copies of its context
    call.tell(events.Computed, "alone", call.now - began, False)
    return Result(Entry(value, new_id(), ttl=0.0, fresh=0.0, keep=0.0))
