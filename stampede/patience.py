"""How long a caller waits, and for what; and what becomes of it then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from math import inf
from typing import Any

from stampede import events
from stampede.call import Call, Spawn
from stampede.entry import Entry, new_id
from stampede.errors import WaitTimeout
from stampede.flight import Flight, nested
from stampede.land import never_begun
from stampede.outcome import Landing, LeftOut

__all__ = ["alone", "limit", "spawn", "timed_out"]


def limit(call: Call) -> tuple[float, Callable[[Call], Awaitable[Landing]]]:
    """Seconds that this caller may still wait for somebody's computation, and what becomes of it then.

    One that holds a lease itself waits no longer than a lease: the other may be waiting for it.
    """
    wait = inf if call.policy.wait is None else call.policy.wait
    if call.asks_on:
        wait = 0.0
    if nested() and call.policy.lease < wait:
        return call.policy.lease - call.waited, alone
    return wait - call.waited, timed_out


async def timed_out(call: Call) -> Landing:
    raise WaitTimeout(f"somebody else has been computing {call.label!r} for {call.waited:.3g} s, and wait ran out")


async def alone(call: Call) -> Landing:
    """Compute for this caller only, and store nothing: waiting might never end."""
    began = call.now
    flight = Flight(call.means.flights, call.key, call.loop)
    try:
        with flight.inside():
            value = await call.means.colour.call(call.origin)
    except LeftOut as nothing:
        return Landing(error=nothing.with_traceback(None))
    finally:
        flight.ended = True  # for tasks and threads that outlive it in copies of its context
    call.tell(events.Computed, "alone", call.now - began, False)
    return Landing(Entry(value, new_id(), ttl=0.0, fresh=0.0, keep=0.0))


def spawn(call: Call, beside: Spawn, flight: Flight, work: Coroutine[Any, Any, Landing]) -> None:
    """Have the computation done beside its caller."""
    try:
        flight.led_by(work)
        beside(work, lambda: never_begun(call, flight))
    except BaseException:
        try:
            work.close()
        except ValueError:
            pass  # another thread is at it already
        else:
            never_begun(call, flight)
        raise
