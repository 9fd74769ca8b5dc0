"""THE algorithm: one computation, however big the herd.

`fill` is the way of every call that its local tier could not answer. It is written once, for both colours, over
the port of the engine (`ports.Claims`) and the few means of a `Call`; it knows neither bytes nor clients.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from random import random
from typing import Any

from stampede import early, events
from stampede.call import Call, Means, Opening
from stampede.colour import Bell, Loop, ended, running_loop
from stampede.entry import Entry
from stampede.errors import WAY_OUT, ComputationFailed, EngineError, RecursiveComputation
from stampede.flight import SAFETY, Flight
from stampede.land import drop, land, never_begun, release, served
from stampede.leader import Leader
from stampede.outcome import Landing, LeftOut, Nothing
from stampede.pace import Pace
from stampede.patience import allowance, alone, beside, limit, spare
from stampede.policy import Policy
from stampede.ports import Ask, Busy, Failed, Found, Granted, Looks, Reply

__all__ = ["admitted", "fill", "opened"]


async def opened(
    means: Means,
    key: str,
    label: str,
    policy: Policy,
    loop: Loop | None,
    token: bytes,
    leader: Leader | None = None,
    waited: float = 0.0,
) -> Landing | Opening | None:
    """The shortest way to a value that is there: lead the flight, claim, and nothing else.

    What is not so simple is left to `fill`: an Opening is what it goes on with; None: there is a flight to join.
    """
    flight = means.flights.lead(key, loop, leader)
    if flight is None:
        return None
    try:
        ask, at = terms(means, policy, waited), means.clock()
        try:
            found = await looked(means, means.looks, key, ask) if means.looks is not None else None
            if found is None:
                at = means.clock()
                reply = await means.port.claim(key, token, ask)
        except GeneratorExit:
            raise
        except BaseException as error:  # to be raised where the algorithm claims
            return Opening(flight, ask, at, error)
        if found is None:
            means.habit.saw(type(reply) is Found)
            if type(reply) is not Found or not good(means, ask, reply.entry):
                return Opening(flight, ask, at, reply)
            found = reply
        means.note(events.Found, means.scope, label)
        landing = Landing(found.entry, ticket=found.ticket, at=at, as_of=at)
        means.flights.end(flight, landing)
        return landing
    except BaseException:  # closed while it was asked, or interrupted: nothing can be awaited any more
        never_begun(Call(key, label, _nobody, policy, means, loop, 0.0, leader=leader, token=token), flight)
        raise


def _nobody() -> None:
    """Who has only opened computes nothing."""


async def looked(means: Means, looks: Looks, key: str, ask: Ask) -> Found | None:
    """What is there and good, where a hit is to be expected: it needs no decision, and so no claim."""
    if not means.habit.hits:
        return None
    began = means.clock() if ask.patience < inf else 0.0
    found = await looks.look(key, ask.patience)
    if found is not None and good(means, ask, found.entry):
        means.habit.saw(True)
        return found
    if began:
        ask.patience -= means.clock() - began
    if found is not None and means.era.is_over(found.entry):
        ask.seen = found.entry.id
    return None


def good(means: Means, ask: Ask, entry: Entry[Any]) -> bool:
    """Is it, for this call, if it is fresh? Not what was made stale with all others, nor what is due."""
    if means.era.mark and means.era.is_over(entry):
        return False
    return ask.draw is None or not early.due(entry, ask.draw)


async def fill(call: Call) -> Landing:
    """The value that is there, somebody else's, or the one computed here."""
    if call.opening is not None:
        return await lead(call, call.opening.flight)
    flights = call.means.flights
    inside = flights.computing(call.key)
    if inside is not None:
        if inside.answers is not None:
            return await inside.answers(call)
        raise RecursiveComputation(f"the computation of {call.label!r} asked for its own key: {WAY_OUT}")
    while True:
        flight, leading = flights.join(call.key, call.loop, anew=call.anew, leader=call.leader)
        if leading:
            return await lead(call, flight)
        landing = await follow(call, flight)
        if landing is not None:
            return landing


async def lead(call: Call, flight: Flight) -> Landing:
    """Claim for the whole flight; compute if the claim is granted."""
    answer = await admitted(call, flight)
    if isinstance(answer, Landing):
        try:
            return answer
        finally:
            del answer  # its error, if it has one, refers to this frame
    kept = answer.entry
    if call.spawn is not None:
        seconds = allowance(call, kept)
        if seconds < inf and call.spawn.reserve():
            return await beside(call, call.spawn, flight, lambda: compute(call, flight, kept), kept, seconds)
    flight.unborn = lambda: never_begun(call, flight)
    return await call.means.colour.aside(compute(call, flight, kept), flight)


async def admitted(call: Call, flight: Flight) -> Landing | Granted:
    """The claim of a whole flight: it ends here, unless it is granted; what is kept meanwhile is for its followers."""
    answer: Landing | Granted | None = None
    means, call.flight = call.means, flight
    try:
        answer = await claim(call)
    except EngineError as error:
        answer = Landing(error=error, as_of=call.now)  # for all of the flight: not each must run into it
    finally:
        if not isinstance(answer, Granted):
            means.flights.end(flight, answer)
    if isinstance(answer, Granted) and answer.entry is not None and not call.force:
        means.flights.offer(flight, Landing(answer.entry, until=call.policy.lease, as_of=call.asked))
    try:
        return answer
    finally:
        del answer  # its error, if it has one, refers to this frame


async def claim(call: Call) -> Landing | Granted:
    """The value, or the right to compute it; while somebody else computes, sleep until woken and claim again."""
    due, pace = call.seen, None
    ask = call.opening.ask if call.opening else terms(call.means, call.policy, 0.0, due, force=call.force)
    while True:
        call.asked = call.opening.at if call.opening else call.now
        reply = await asked(call, ask)
        at = call.asked
        match reply:
            case Found() if call.means.era.mark and call.means.era.is_over(reply.entry):
                ask.seen = reply.entry.id  # it was made stale with all others: one more question
                pace = pace or Pace()
                if (rest := pace.rest(call.now)) > 0:  # it is another one each time
                    await call.means.colour.park(Bell(), rest)
            case Found() if ask.draw is not None and due is None and early.due(reply.entry, ask.draw):
                due = reply.entry
                ask.seen = due.id  # one more question: is anybody refreshing it already?
            case Found():
                tell_found(call, ask)
                return Landing(reply.entry, ticket=reply.ticket, at=at, as_of=at)
            case Granted():
                return reply
            case Failed(verdict=verdict) if verdict.kind == "absent":
                return Landing(error=Nothing(verdict.message), as_of=at)
            case Failed(verdict, entry, rest):
                if entry or due:
                    return served(call, entry or due, "resting", until=rest, as_of=at if entry else -inf)
                if verdict.kind == "unkept":
                    return await alone(call)
                error = ComputationFailed(call.label, verdict.type_name, verdict.message)
                return Landing(error=error, as_of=at)
            case Busy():
                pace = pace or Pace()
                landing = await awaited(call, ask, reply, due, pace)
                if landing is not None:
                    return landing


async def awaited(call: Call, ask: Ask, busy: Busy, due: Entry[Any] | None, pace: Pace) -> Landing | None:
    """Somebody computes: what the news bring, or what is kept, to whom has no patience left. None: claim again."""
    means, at, kept = call.means, call.asked, busy.entry or due
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
    if news is None and (rest := pace.rest(call.now)) > 0:  # whatever woke us, again and again
        await means.colour.park(Bell(), min(rest, patience))
    ask.since, ask.awaited = call.waited, busy.token
    ask.draw = None  # what was computed while we waited is good, however short its life
    if news is None or means.era.is_over(news.entry):
        return None
    tell_found(call, ask)
    # It may have been under way for long: what is sure is that its lease stood when we asked.
    told = Landing(news.entry, ticket=news.ticket, at=at, as_of=at)
    return told if call.flight is None or call.flight.latest <= at else await told_anew(call, ask, told)


async def told_anew(call: Call, ask: Ask, told: Landing) -> Landing:
    """The same for those, too, who came since the question: they would all be woken only to ask again."""
    call.asked = at = call.now
    try:
        reply = await asked(call, ask)
    except EngineError:
        return told
    if isinstance(reply, Found) and not call.means.era.is_over(reply.entry):
        return Landing(reply.entry, ticket=reply.ticket, at=at, as_of=at)
    if isinstance(reply, Granted):
        await release(call)  # it has changed meanwhile, and we have our value
    return told


def terms(means: Means, policy: Policy, waited: float, seen: Entry[Any] | None = None, *, force: bool = False) -> Ask:
    """What a call's first claim asks for."""
    draw = early.draw(policy.early, random) if means.draws and policy.early and not force else None
    patience = inf if policy.limit is None else policy.limit - waited
    return Ask(policy.lease, seen=seen.id if seen else None, force=force, patience=patience, draw=draw)


async def asked(call: Call, ask: Ask) -> Reply:
    """One claim, or a look before it. If a claim's outcome is unknown, it may have been granted: our own lease must not
    lock us out."""
    opening, call.opening = call.opening, None
    if opening is None and call.policy.limit is not None:
        ask.patience = call.policy.limit - call.waited  # one, for all that it waits for
    looks = call.means.looks if opening is None and not (ask.force or ask.seen or ask.awaited) else None
    if looks is not None:
        found = await looked(call.means, looks, call.key, ask)
        if found is not None:
            call.owes(False)
            return found
        call.asked = call.now
    try:
        if opening is None:
            call.owes(True)
            reply = await call.means.port.claim(call.key, call.token, ask)
            if looks is not None:
                call.means.habit.saw(type(reply) is Found)
        else:
            reply = opening.answer()
        if type(reply) is not Granted:
            call.owes(False)
        if call.means.era.mark and type(reply) is not Found:
            call.means.era.told(reply.entry)
        if call.policy.refuses_stale and type(reply) is not Found and reply.entry is not None:
            reply.entry = refused(call, reply, reply.entry)
        return reply
    except GeneratorExit:
        drop(call)
        raise
    except BaseException:
        await release(call)
        raise


def refused(call: Call, reply: Reply, entry: Entry[Any]) -> Entry[Any] | None:
    """None of what is stale for this call; its followers may have said nothing against it."""
    if entry.fresh > 0:
        return entry
    if call.flight is not None and isinstance(reply, (Busy, Granted)) and not call.force:
        call.means.flights.offer(call.flight, Landing(entry, until=call.policy.lease, as_of=call.asked))
    return None


async def compute(call: Call, flight: Flight, kept: Entry[Any] | None) -> Landing:
    """Compute while the lease is renewed, and fill: the engine stores only if the lease still stands."""
    means, began = call.means, call.now
    landing: Landing | None = None
    try:
        longest = call.policy.hold_of(kept.cost if kept else 0.0)
        flight.computes(call.label, call.policy.lease, longest)
        with means.hold(call, longest) as hold, flight.inside():
            # No name is given to its error, which refers to us: Python 3.12 links each frame to its caller's.
            landing = await land(call, kept, hold, *await ended(means.colour.call(call.origin)), call.now - began)
    except BaseException:
        # Nothing can be awaited any more: the loop was closed under us, or there is no thread to be had.
        drop(call)
        raise
    finally:
        means.flights.end(flight, landing)
    try:
        return landing
    finally:
        del landing  # as above


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
        call.tell(events.Waited, call.waited)
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


def tell_found(call: Call, ask: Ask) -> None:
    if ask.awaited is None:
        call.tell(events.Found)
    else:
        call.tell(events.Waited, call.waited)
