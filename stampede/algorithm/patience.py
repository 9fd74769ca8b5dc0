"""How long a caller waits, and for what; and what becomes of it then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from math import inf
from typing import Any, Generic, TypeVar

from stampede import events
from stampede.algorithm.admission import drop_place, leave_origin, load_at_origin
from stampede.algorithm.background import BackgroundPlace
from stampede.algorithm.call import Call
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


# -- for somebody else's computation ------------------------------------------------------------------------------


def wait_left(call: Call) -> tuple[float, Callable[[Call], Awaitable[Result]]]:
    """Seconds that this caller may still wait for somebody's computation, and what becomes of it then.

    One that holds a lease itself waits no longer than a lease: the other may be waiting for it.
    """
    wait = inf if call.policy.limit is None else call.policy.limit
    if call.claims_only:
        wait = 0.0
    if nested() and call.policy.lease < wait:
        return call.policy.lease - call.waited, compute_alone
    return wait - call.waited, timed_out


def patience_left(call: Call, kept: Entry[Any]) -> float:
    """The same of one that has something to be served meanwhile."""
    policy = call.policy
    if policy.patience is None or kept.fresh > 0:
        return 0.0
    wait = min(policy.patience, inf if policy.limit is None else policy.limit)
    return (min(wait, policy.lease) if nested() else wait) - call.waited


async def timed_out(call: Call) -> Result:
    option = "wait" if call.policy.limit == call.policy.wait else "deadline"
    raise WaitTimeout(f"somebody else has been computing {call.label!r} for {call.waited:.3g} s, and {option} ran out")


# -- for its own --------------------------------------------------------------------------------------------------


def own_wait_left(call: Call, kept: Entry[Any] | None) -> float:
    """Seconds that it waits for what is computed beside it, in its own name; inf: then there is no need for that."""
    policy = call.policy
    if call.force:
        return inf
    if kept is None:
        wait = inf
    elif kept.fresh > 0:
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
    kept: Entry[Any] | None,
    seconds: float,
) -> Result:
    """Have it computed in a place beside the caller, who waits for it so long. Then he goes, and it goes on."""
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
    result = delivery.take() if seconds > 0 or kept is None else None
    try:
        if result is not None:
            return result
        if kept is not None:
            return served(call, kept, "computing", until=call.policy.lease)
    finally:
        del result  # its error, if it has one, refers to this frame
    raise deadline_error(call)


def deadline_error(call: Call) -> WaitTimeout:
    return WaitTimeout(
        f"{call.label!r} has been computed for {call.waited:.3g} s, and deadline ran out: the computation goes on, and "
        "is stored for who comes next"
    )


class Delivery(Generic[T]):
    """What comes of a computation, for its caller, as long as he waits for it."""

    def __init__(self) -> None:
        self.bell = Bell()
        self._left = False
        self._result: T | None = None

    def put(self, result: T) -> None:
        if not self._left:  # or nobody would take it, with an error that refers to those who refer to this
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
        except BaseException as error:  # its caller hears of it, or nobody
            result = Result(error=error)
        delivery.put(result.for_followers())
        await call.resources.keep([(call, result)])
    finally:
        del result  # as above
        delivery.bell.ring()


async def _wait(call: Call, flight: Flight, bell: Bell, seconds: float) -> None:
    """Until it is there, or so long. A caller that is cancelled meanwhile leaves it to those who wait for it, too."""
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


# -- for nobody's -------------------------------------------------------------------------------------------------


async def compute_alone(call: Call) -> Result:
    """Compute for this caller only, and store nothing: waiting might never end."""
    flight, seconds = Flight(call.resources.flights, call.key, call.loop), own_wait_left(call, None)
    if seconds < inf and call.background is not None and call.background.reserve():
        return await compute_in_background(
            call, call.background, flight, lambda: _compute_alone(call, flight), None, seconds
        )
    return await _compute_alone(call, flight)


async def _compute_alone(call: Call, flight: Flight) -> Result:
    began = call.now
    try:
        with Computing(flight):
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
        flight.ended = True  # for tasks and threads that outlive it in copies of its context
    call.tell(events.Computed, "alone", call.now - began, False)
    return Result(Entry(value, new_id(), ttl=0.0, fresh=0.0, keep=0.0))
