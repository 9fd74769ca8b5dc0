"""THE algorithm: one computation, however big the herd.

`fill` is the way of every call that its local tier could not answer. It is written once, for both colours, over
the port of the engine (`ports.Claims`) and the few means of a `Call`; it knows neither bytes nor clients.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from random import random
from typing import Any, NamedTuple

from stampede import early, events
from stampede.admission import abandon, had, vacate
from stampede.call import Call, Means
from stampede.colour import Bell, Loop, ended, running_loop
from stampede.entry import Entry
from stampede.errors import WAY_OUT, ComputationFailed, EngineError, OriginFull, RecursiveComputation
from stampede.flight import SAFETY, Flight, nested
from stampede.land import drop, land, never_begun, release, served
from stampede.leader import Leader
from stampede.outcome import Landing, Leave, LeftOut, Nothing
from stampede.pace import Pace
from stampede.patience import allowance, alone, beside, limit, spare
from stampede.policy import Policy
from stampede.ports import Ask, Busy, Failed, Found, Granted

__all__ = ["Glance", "fill", "glance"]


async def fill(call: Call) -> Landing:
    """The value that is there, somebody else's, or the one computed here."""
    flights, flight = call.means.flights, call.flight
    landing: Landing | None = None
    answer: Landing | Granted | Busy | Failed | None = None
    inside = flights.computing(call.key) if flight is None else None
    if inside is not None:
        return await from_inside(call, inside)
    try:
        while landing is None:
            # 1. Join the key's flight, or lead it: of all callers in this process, one asks the engine.
            if flight is None:
                flight, leading = flights.join(call.key, call.loop, anew=call.anew, leader=call.leader)
                if not leading:
                    landing, flight = await follow(call, flight), None
                    continue
                call.flight = flight
            try:
                # 2. Look, where it is likely to be there; then claim: it is there, or ours to compute.
                if call.ask is None and call.means.looks is not None:
                    answer = await looked(call)
                while answer is None:
                    answer = await claim(call)
                    # 3. Or somebody else computes it: take what is kept, or sleep until woken, and claim again.
                    if type(answer) is Busy:
                        answer = await awaited(call, answer)
                    elif type(answer) is Failed:
                        answer = await failed(call, answer)
            except EngineError as error:
                answer = Landing(error=error, as_of=call.now)  # for all of the flight: not each must run into it
            finally:
                if type(answer) is not Granted:
                    flights.end(flight, answer if type(answer) is Landing else None)
            # 4. Compute, while the lease is renewed; then 5. fill, and the engine stores it if the lease still stands;
            # or 6. abandon the lease with a verdict. Either wakes the herd.
            landing = answer if isinstance(answer, Landing) else await computed(call, flight, answer.entry)
        return landing
    finally:
        del landing, answer  # an error in them refers to this frame


class Glance(NamedTuple):
    """A call that leads its flight, and has looked."""

    flight: Flight
    ask: Ask


async def glance(
    means: Means, key: str, label: str, policy: Policy, loop: Loop | None, leader: Leader | None, began: float
) -> Landing | Glance | None:
    """The shortest way to a value that is likely to be there: lead the flight, look, and nothing else.

    A Glance: there is more to do, and `fill` goes on with that. None: it begins.
    """
    looks = means.looks
    flight = means.flights.lead(key, loop, leader) if looks is not None and means.odds.good else None
    if looks is None or flight is None:
        return None
    ended = True
    landing: Landing | None = None
    try:
        at = means.clock()
        found = await looks.look(key)
        if found is not None and not means.era.mark and not early.may_be_due(found.entry):
            landing = seen(means, label, found, at)
        else:
            ask = terms(means, policy, began)
            landing = judged(means, label, found, at, ask)
            if landing is None:
                ended = False
                return Glance(flight, ask)
        return landing
    except EngineError as error:
        landing = Landing(error=error, as_of=means.clock())
        return landing
    finally:
        if ended:
            means.flights.end(flight, landing)
        del landing  # its error, if it has one, refers to this frame


# -- 1. the flight ------------------------------------------------------------------------------------------------


async def from_inside(call: Call, flight: Flight) -> Landing:
    """Asked by the key's own computation."""
    if flight.answers is not None:
        return await flight.answers(call)
    raise RecursiveComputation(f"the computation of {call.label!r} asked for its own key: {WAY_OUT}")


async def follow(call: Call, flight: Flight) -> Landing | None:
    """What the flight's leader got, or what is there meanwhile. None: claim again."""
    flight.latest = max(flight.latest, call.began)
    try:
        if call.loop is None and (flight.waits_in(running_loop()) or flight.led_beside()):
            return await alone(call)  # our own loop, or thread, must go on for it to land, and we are blocking it
        if call.seen is not None and call.seen.fresh > 0:
            return served(call, call.seen, "computing", until=call.policy.lease)  # it's early: no need to wait
        verdict_of_waiting = await heard(call, flight)
        if call.policy.beside and not flight.detached:
            flight.goes_on = True  # or we leave as one who was cancelled, and perhaps the last one
        if verdict_of_waiting is not None:
            return await verdict_of_waiting(call)
        landing, offered = flight.landing, flight.offered
    finally:
        flight.owner.leave(flight, call.leader)  # with the last one its landing goes
    if call.policy.refuses_stale and any(each is not None and each.is_stale for each in (landing, offered)):
        return None
    # Who came after the leader had asked may have come after an invalidation, by another process, of what it was told.
    if landing is not None and call.began <= landing.as_of:
        if isinstance(landing.error, LeftOut) and not isinstance(landing.error, Nothing):
            return await alone(call)
        if landing.meanwhile and patience_with(call, landing) > 0:
            return None  # who led had less of it
        tell_waited(call, landing.entry)
        return landing.for_follower()
    if offered is not None and patience_with(call, offered) <= 0 and call.began <= offered.as_of:
        return served(call, offered.entry, "computing", until=call.policy.lease)
    return None


async def heard(call: Call, flight: Flight) -> Callable[[Call], Awaitable[Landing]] | None:
    """Wait until it has, or until what is offered will do; or what becomes of it."""
    while not flight.detached:
        bell, offered = flight.bell, flight.offered  # in this order: an offer comes with another bell
        if bell.rung and bell is flight.bell:
            break
        patience, verdict_of_waiting = limit(call)
        if offered is not None:
            patience = patience_with(call, offered)
            if patience <= 0:
                break
        if patience <= 0:
            return verdict_of_waiting
        pause = patience if flight.watched else min(patience, SAFETY)
        if not await call.means.colour.park(bell, pause) and not flight.watched:
            flight.look(call.now)
    return None


def patience_with(call: Call, offered: Landing) -> float:
    """None with what it can't be given: it asks the engine itself."""
    if offered.entry is None or call.began > offered.as_of or (call.policy.refuses_stale and offered.is_stale):
        return 0.0
    return spare(call, offered.entry)


# -- 2. the claim -------------------------------------------------------------------------------------------------


async def claim(call: Call) -> Landing | Granted | Busy | Failed | None:
    """The value, or the right to compute it, or who has that, or how it failed. None: one more question.

    If its outcome is unknown, it may have been granted: our own lease must not lock us out.
    """
    means, first = call.means, call.asked == -inf
    ask = call.ask or opening_of(call)
    call.asked = at = means.clock()
    try:
        call.owes(True)
        reply = await means.port.claim(call.key, call.token, ask)
        if first and means.looks is not None:
            means.odds.saw(isinstance(reply, Found))
        if isinstance(reply, Granted):
            return granted(call, reply)
        call.owes(False)
    except GeneratorExit:
        raise  # nothing can be awaited: what it may owe is given back with its flight
    except BaseException:
        await release(call)
        raise
    if not isinstance(reply, Found):
        kept(call, reply)
        return reply
    entry = reply.entry
    if means.era.mark and means.era.is_over(entry):
        ask.seen = entry.id  # it was made stale with all others
        await rest(call)  # it is another one each time
    elif ask.draw is not None and call.seen is None and early.due(entry, ask.draw):
        call.seen, ask.seen = entry, entry.id  # is anybody refreshing it already?
    else:
        if reply.own:
            call.tell(events.Served, "outage")
        else:
            tell_found(call, entry)
        return Landing(entry, ticket=reply.ticket, at=at, as_of=at)
    return None


def granted(call: Call, reply: Granted) -> Granted:
    """The same; its followers may have what is kept."""
    kept(call, reply)
    if reply.entry is not None and not call.force and call.flight is not None:
        call.means.flights.offer(call.flight, Landing(reply.entry, until=call.policy.lease, as_of=call.asked))
    return reply


async def looked(call: Call) -> Landing | None:
    """What is there and good, where a hit is to be expected: it needs no decision, and so no claim."""
    means, ask = call.means, opening_of(call)
    if means.looks is None or not means.odds.good or ask.force or ask.seen is not None:
        return None
    at = means.clock()
    found = await means.looks.look(call.key)
    return judged(means, call.label, found, at, ask)


def judged(means: Means, label: str, found: Found | None, at: float, ask: Ask) -> Landing | None:
    """What a look has found, unless there is something to be decided about it."""
    if found is None:
        return None
    if means.era.mark and means.era.is_over(found.entry):
        ask.seen = found.entry.id
        return None
    if ask.draw is not None and early.due(found.entry, ask.draw):
        return None
    return seen(means, label, found, at)


def seen(means: Means, label: str, found: Found, at: float) -> Landing:
    """A hit."""
    means.odds.saw(True)
    means.note(events.Found, means.scope, label, found.entry.cost)
    return Landing(found.entry, ticket=found.ticket, at=at, as_of=at)


def opening_of(call: Call) -> Ask:
    """The terms of its first question."""
    seen = call.seen.id if call.seen is not None else None
    call.ask = terms(call.means, call.policy, call.began, seen, force=call.force)
    return call.ask


def terms(means: Means, policy: Policy, began: float, seen: bytes | None = None, *, force: bool = False) -> Ask:
    """What a call asks for."""
    draw = early.draw(policy.early, random) if means.draws and policy.early and not force else None
    return Ask(policy.lease, seen=seen, force=force, draw=draw)


def kept(call: Call, reply: Granted | Busy | Failed) -> None:
    """What of it this call may be served: nothing stale, if it says so; its followers may have said nothing of it."""
    entry = reply.entry = call.means.era.told(reply.entry)
    if entry is None or entry.fresh > 0 or not call.policy.refuses_stale:
        return
    reply.entry = None
    if call.flight is not None and type(reply) is not Failed and not call.force:
        call.means.flights.offer(call.flight, Landing(entry, until=call.policy.lease, as_of=call.asked))


async def failed(call: Call, reply: Failed) -> Landing:
    """What came of the computation that this one waited for; or why the key rests."""
    verdict, at, kept = reply.verdict, call.asked, reply.entry or call.seen
    if verdict.kind == "absent":
        return Landing(error=Nothing(verdict.message), as_of=at)
    if kept is not None:
        return served(call, kept, "resting", until=reply.rest, as_of=at if reply.entry else -inf)
    if verdict.kind == "unkept":
        return await alone(call)
    if verdict.kind == "full":
        return Landing(error=OriginFull(verdict.message), as_of=at)
    return Landing(error=ComputationFailed(call.label, verdict.type_name, verdict.message), as_of=at)


# -- 3. somebody else computes ------------------------------------------------------------------------------------


async def awaited(call: Call, busy: Busy) -> Landing | None:
    """What the news bring, or what is kept, to whom has no patience left. None: claim again."""
    means, at, kept = call.means, call.asked, busy.entry or call.seen
    as_of = at if busy.entry else -inf
    if kept is not None and spare(call, kept) <= 0:
        return served(call, kept, "computing", until=busy.lease, as_of=as_of)
    patience, verdict_of_waiting = limit(call)
    if patience <= 0:
        return await verdict_of_waiting(call)
    if busy.entry is not None and call.flight is not None and call.flight.offered is None:
        means.flights.offer(call.flight, Landing(busy.entry, until=busy.lease, as_of=at))  # each follower waits for it
    if kept is not None:
        patience = min(patience, spare(call, kept))
    news = await means.port.wait(call.key, busy, patience)
    if news is None and kept is not None and spare(call, kept) <= 0:
        return served(call, kept, "computing", until=busy.lease, as_of=as_of)
    if news is None:  # whatever woke us, again and again
        await rest(call, patience)
    ask = call.ask or opening_of(call)
    ask.since, ask.awaited = call.waited, busy.token
    ask.draw = None  # what was computed while we waited is good, however short its life
    if news is None or means.era.is_over(news.entry):
        return None
    # It may have been under way for long: what is sure is that its lease stood when we asked.
    told = Landing(news.entry, ticket=news.ticket, at=at, as_of=at)
    if call.flight is not None and call.flight.latest > at:
        return await told_anew(call, told)
    tell_found(call, told.entry)
    return told


async def told_anew(call: Call, told: Landing) -> Landing:
    """The same for those, too, who came since the question: they would all be woken only to ask again."""
    try:
        answer = await claim(call)
    except EngineError:
        answer = None
    if type(answer) is Landing:
        return answer
    if type(answer) is Granted:
        await release(call)  # it has changed meanwhile, and we have our value
    tell_found(call, told.entry)
    return told


async def rest(call: Call, most: float = inf) -> None:
    """A waiter's questions have a pace, whatever it is told."""
    call.pace = call.pace or Pace()
    seconds = min(call.pace.rest(call.now), most)
    if seconds > 0:
        await call.means.colour.park(Bell(), seconds)


def tell_found(call: Call, entry: Entry[Any] | None) -> None:
    if call.ask is None or call.ask.awaited is None:
        call.tell(events.Found, 0.0 if entry is None else entry.cost)
    else:
        tell_waited(call, entry)


def tell_waited(call: Call, entry: Entry[Any] | None) -> None:
    call.others = True
    call.tell(events.Waited, call.waited, 0.0 if entry is None else entry.cost)


# -- 4. to 6. the computation -------------------------------------------------------------------------------------


async def computed(call: Call, flight: Flight, kept: Entry[Any] | None) -> Landing:
    """Its value, or its error: computed by this caller, or in a place beside him, as long as he can wait for it."""
    if call.asks_on:
        return Leave(kept)
    seconds = allowance(call, kept) if call.spawn is not None else inf
    if call.spawn is not None and seconds < inf and call.spawn.reserve():
        return await beside(call, call.spawn, flight, lambda: compute(call, flight, kept), kept, seconds)
    flight.unborn = lambda: never_begun(call, flight)
    return await call.means.colour.aside(compute(call, flight, kept), flight)


async def compute(call: Call, flight: Flight, kept: Entry[Any] | None) -> Landing:
    """Compute while the lease is renewed, and fill: the engine stores only if the lease still stands."""
    means, began = call.means, call.now
    landing: Landing | None = None
    try:
        longest = call.policy.hold_of(kept.cost if kept else 0.0)
        if call.policy.origin is not None:
            call.nested = nested()
        with means.hold(call, longest if call.policy.origin is None else inf) as hold, flight.inside():
            # No name is given to its error, which refers to us: Python 3.12 links each frame to its caller's.
            if call.policy.origin is not None:
                landing = await land(call, kept, hold, *await had(call, kept, hold, flight, longest))
            else:
                flight.computes(call.label, call.policy.lease, longest)
                landing = await land(call, kept, hold, *await ended(means.colour.call(call.origin)), call.now - began)
    except BaseException:
        # Nothing can be awaited any more: the loop was closed under us, or there is no thread to be had.
        drop(call)
        abandon(call)
        raise
    finally:
        means.flights.end(flight, landing)
    try:
        if call.place is not None:
            await vacate(call)
        return landing
    finally:
        del landing  # as above
