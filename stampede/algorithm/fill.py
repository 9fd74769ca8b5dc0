"""THE algorithm: one computation, however big the herd. It is written once, for both colours, over the port of the
engine (`ports.Claims`) and the `Resources` of a `Call`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from os import urandom
from random import random
from typing import Any

from stampede import events
from stampede.algorithm.admission import compute_at_origin, drop_place, leave_origin
from stampede.algorithm.call import Call
from stampede.algorithm.finish import finish, release, served
from stampede.algorithm.flight import SAFETY, Computing, Flight, nested
from stampede.algorithm.patience import compute_alone, compute_in_background, own_wait_left, patience_left, wait_left
from stampede.errors import WAY_OUT, ComputationFailed, EngineError, OriginFull, RecursiveComputation
from stampede.model import early
from stampede.model.backoff import Backoff
from stampede.model.entry import Entry
from stampede.model.ports import Ask, Busy, Failed, Found, Granted
from stampede.model.result import LeftOut, MayCompute, Nothing, Result
from stampede.runtime.colour import Bell, ended, running_loop

__all__ = ["fill", "look"]


async def fill(call: Call) -> Result:
    """Return the value that is there, another caller's, or the one computed here."""
    flights, flight = call.resources.flights, call.flight
    result: Result | None = None
    answer: Result | Granted | Busy | Failed | None = None
    anew = call.anew if call.force or call.once is not None else None
    inside = flights.computing(call.key) if flight is None else None
    if inside is not None:
        raise RecursiveComputation(f"the computation of {call.label!r} asked for its own key: {WAY_OUT}")
    try:
        while result is None:
            # 1. Join the key's flight, or lead it: of all callers in this process, one asks the engine.
            if flight is None:
                flight, leading = flights.join(call.key, call.loop, anew=anew, leader=call)
                if not leading:
                    result, flight = await follow(call, flight), None
                    continue
            try:
                # 2. Look, where it is likely to be there; then claim: it is there, or ours to compute.
                if call.ask is None and call.resources.hit_likelihood.good and not call.force and call.seen is None:
                    answer = await look(call)
                while answer is None:
                    answer = await claim(call)
                    # 3. Or another process computes it: take what is kept, or sleep until woken, and claim again.
                    if type(answer) is Busy:
                        answer = await wait_for_other(call, answer)
                    elif type(answer) is Failed:
                        answer = await after_failure(call, answer)
            except EngineError as error:
                answer = Result(error=error, as_of=call.resources.clock())  # of all its callers: one has run into it
            finally:
                if type(answer) is not Granted:
                    flights.end(flight, answer if type(answer) is Result else None)
            # 4. Compute, while the lease is renewed; then 5. fill, and the engine stores it if the lease still stands;
            # or 6. abandon the lease with a verdict. Either wakes the herd.
            result = answer if isinstance(answer, Result) else await start_computation(call, flight, answer.entry)
        return result
    finally:
        del result, answer  # an error in them refers to this frame


# -- 1. the flight ------------------------------------------------------------------------------------------------


async def follow(call: Call, flight: Flight) -> Result | None:
    """What the flight's leader got, or what is there meanwhile. None: claim again."""
    flight.latest = max(flight.latest, call.began)
    try:
        if call.loop is None and (flight.waits_in(running_loop()) or flight.led_beside()):
            return await compute_alone(
                call
            )  # our own loop, or thread, must go on for it to land, and we are blocking it
        if call.seen is not None and call.seen.fresh > 0:
            return served(call, call.seen, "computing", until=call.policy.lease)  # it's early: no need to wait
        on_timeout = await wait_for_leader(call, flight)
        if call.policy.beside and not flight.detached:
            flight.continues = True  # or we leave as one who was cancelled, and perhaps the last one
        if on_timeout is not None:
            return await on_timeout(call)
        result, offered = flight.result, flight.offered
    finally:
        flight.owner.leave(flight, call)  # with the last one its landing goes
    if call.policy.refuses_stale and any(each is not None and each.is_stale for each in (result, offered)):
        return None
    # Who came after the leader had asked may have come after an invalidation, by another process, of what it was told.
    if result is not None and call.began <= result.as_of:
        if isinstance(result.error, LeftOut) and not isinstance(result.error, Nothing):
            return await compute_alone(call)
        if result.meanwhile and patience_for(call, result) > 0:
            return None  # who led had less of it
        tell_waited(call, result.entry)
        return result.for_follower()
    if offered is not None and patience_for(call, offered) <= 0 and call.began <= offered.as_of:
        return served(call, offered.entry, "computing", until=call.policy.lease)
    return None


async def wait_for_leader(call: Call, flight: Flight) -> Callable[[Call], Awaitable[Result]] | None:
    """Wait until it has, or until what is offered will do; or what becomes of it."""
    while not flight.detached:
        bell, offered = flight.bell, flight.offered  # in this order: an offer comes with another bell
        if bell.rung and bell is flight.bell:
            break
        patience, on_timeout = wait_left(call)
        if offered is not None:
            patience = patience_for(call, offered)
            if patience <= 0:
                break
        if patience <= 0:
            return on_timeout
        pause = patience if flight.watched else min(patience, SAFETY)
        if not await call.resources.colour.park(bell, pause) and not flight.watched:
            flight.look(call.resources.clock())
    return None


def patience_for(call: Call, offered: Result) -> float:
    """None with what it can't be given: it asks the engine itself."""
    if offered.entry is None or call.began > offered.as_of or (call.policy.refuses_stale and offered.is_stale):
        return 0.0
    return patience_left(call, offered.entry)


# -- 2. the question ----------------------------------------------------------------------------------------------


async def look(call: Call) -> Result | None:
    """Return what is there and good, by a plain read: a hit needs no decision. None: claim."""
    resources = call.resources
    if resources.look is None:
        return None
    ask = call.ask = Ask(call.policy.lease)
    at = resources.clock()
    found = await resources.look(call.key)
    if found is None:
        return None
    entry = found.entry
    if resources.marks.mark and resources.predates_mark(entry):
        ask.seen = entry.id
        return None
    if entry.fresh <= entry.ttl / 2 and early.due(entry, draw(call, ask)):  # never before half of ttl
        return None
    resources.hit_likelihood.saw(True)
    resources.note(events.Found, resources.scope, call.label, entry.cost)
    return Result(entry, ticket=found.ticket, at=at, as_of=at)


def draw(call: Call, ask: Ask) -> float:
    """Draw how early this call would refresh the key; -inf: the local tier has drawn that, or it doesn't."""
    if call.resources.draws and call.policy.early and not ask.force:
        ask.draw = early.draw(call.policy.early, random)
    return -inf if ask.draw is None else ask.draw


async def claim(call: Call) -> Result | Granted | Busy | Failed | None:
    """The value, or the right to compute it, or who has that, or how it failed. None: one more question.

    If its outcome is unknown, it may have been granted: our own lease must not lock us out.
    """
    resources, ask, first = call.resources, call.ask, call.asked == -inf
    if ask is None:
        seen = call.seen.id if call.seen is not None else None
        ask = call.ask = Ask(call.policy.lease, seen=seen, force=call.force)
    if first:
        if not call.token:
            token = urandom(8)  # a `new_id`, and a call less
            call.token = resources.id_of(token) if resources.marks.mark else token
        if resources.draws and ask.draw is None:
            draw(call, ask)
    call.asked = at = resources.clock()
    try:
        call.may_hold_lease = True
        reply = await resources.port.claim(call.key, call.token, ask)
        if first and resources.look is not None:
            resources.hit_likelihood.saw(isinstance(reply, Found))
        if isinstance(reply, Granted):
            if reply.entry is not None:
                drop_refused_stale(call, reply)
                if reply.entry is not None and not call.force and call.flight is not None:  # its followers may have it
                    offer = Result(reply.entry, until=call.policy.lease, as_of=at)
                    resources.flights.offer(call.flight, offer)
            return reply
        call.may_hold_lease = False
    except GeneratorExit:
        raise  # nothing can be awaited: what it may owe is given back with its flight
    except BaseException:
        await release(call)
        raise
    if not isinstance(reply, Found):
        drop_refused_stale(call, reply)
        return reply
    entry = reply.entry
    if resources.marks.mark and resources.predates_mark(entry):
        ask.seen = entry.id  # it was made stale with all others
        await back_off(call)  # it is another one each time
    elif ask.draw is not None and call.seen is None and early.due(entry, ask.draw):
        call.seen, ask.seen = entry, entry.id  # is anybody refreshing it already?
    else:
        if reply.own:
            call.tell(events.Served, "outage")
        else:
            tell_found(call, entry)
        return Result(entry, ticket=reply.ticket, at=at, as_of=at)
    return None


def drop_refused_stale(call: Call, reply: Granted | Busy | Failed) -> None:
    """What of it this call may be served: nothing stale, if it says so; its followers may have said nothing of it."""
    entry = reply.entry = call.resources.softened(reply.entry)
    if entry is None or entry.fresh > 0 or not call.policy.refuses_stale:
        return
    reply.entry = None
    if call.flight is not None and type(reply) is not Failed and not call.force:
        call.resources.flights.offer(call.flight, Result(entry, until=call.policy.lease, as_of=call.asked))


async def after_failure(call: Call, reply: Failed) -> Result:
    """What came of the computation that this one waited for; or why the key rests."""
    verdict, at, kept = reply.verdict, call.asked, reply.entry or call.seen
    if verdict.kind == "absent":
        return Result(error=Nothing(verdict.message), as_of=at)
    if kept is not None:
        return served(call, kept, "resting", until=reply.rest, as_of=at if reply.entry else -inf)
    if verdict.kind == "unkept":
        return await compute_alone(call)
    if verdict.kind == "full":
        return Result(error=OriginFull(verdict.message), as_of=at)
    return Result(error=ComputationFailed(call.label, verdict.type_name, verdict.message), as_of=at)


# -- 3. somebody else computes ------------------------------------------------------------------------------------


async def wait_for_other(call: Call, busy: Busy) -> Result | None:
    """What the news bring, or what is kept, to whom has no patience left. None: claim again."""
    resources, at, kept = call.resources, call.asked, busy.entry or call.seen
    as_of = at if busy.entry else -inf
    if kept is not None and patience_left(call, kept) <= 0:
        return served(call, kept, "computing", until=busy.lease, as_of=as_of)
    patience, on_timeout = wait_left(call)
    if patience <= 0:
        return await on_timeout(call)
    if busy.entry is not None and call.flight is not None and call.flight.offered is None:
        resources.flights.offer(
            call.flight, Result(busy.entry, until=busy.lease, as_of=at)
        )  # each follower waits for it
    if kept is not None:
        patience = min(patience, patience_left(call, kept))
    news = await resources.port.wait(call.key, busy, patience)
    if news is None and kept is not None and patience_left(call, kept) <= 0:
        return served(call, kept, "computing", until=busy.lease, as_of=as_of)
    if news is None:  # whatever woke us, again and again
        await back_off(call, patience)
    ask = call.ask
    assert ask is not None
    ask.since, ask.awaited = call.waited, busy.token
    ask.draw = None  # what was computed while we waited is good, however short its life
    if news is None or (resources.marks.mark and resources.predates_mark(news.entry)):
        return None
    if call.flight is not None and call.flight.latest > at:
        return None  # a claim answers those, too, that came since: each of them would be woken only to ask again
    tell_found(call, news.entry)
    # It may have been under way for long: what is sure is that its lease stood when we asked.
    return Result(news.entry, ticket=news.ticket, at=at, as_of=at)


async def back_off(call: Call, most: float = inf) -> None:
    """A waiter's questions have a pace, whatever it is told."""
    call.backoff = call.backoff or Backoff()
    seconds = min(call.backoff.rest(call.resources.clock()), most)
    if seconds > 0:
        await call.resources.colour.park(Bell(), seconds)


def tell_found(call: Call, entry: Entry[Any] | None) -> None:
    if call.ask is None or call.ask.awaited is None:
        call.tell(events.Found, 0.0 if entry is None else entry.cost)
    else:
        tell_waited(call, entry)


def tell_waited(call: Call, entry: Entry[Any] | None) -> None:
    call.from_others = True
    call.tell(events.Waited, call.waited, 0.0 if entry is None else entry.cost)


# -- 4. to 6. the computation -------------------------------------------------------------------------------------


async def start_computation(call: Call, flight: Flight, kept: Entry[Any] | None) -> Result:
    """Its value, or its error: computed by this caller, or in a place beside him, as long as he can wait for it."""
    if call.claims_only:
        return MayCompute(kept)
    seconds = own_wait_left(call, kept) if call.background is not None else inf
    if call.background is not None and seconds < inf and call.background.reserve():
        return await compute_in_background(
            call, call.background, flight, lambda: compute(call, flight, kept), kept, seconds
        )
    return await call.resources.colour.aside(compute(call, flight, kept), flight)


async def compute(call: Call, flight: Flight, kept: Entry[Any] | None) -> Result:
    """Compute while the lease is renewed, and fill: the engine stores only if the lease still stands."""
    resources = call.resources
    began = resources.clock()
    result: Result | None = None
    try:
        longest = call.policy.hold_of(kept.cost if kept else 0.0)
        if call.policy.origin is not None:
            call.nested = nested()
        with resources.hold(call, longest if call.policy.origin is None else inf) as hold, Computing(flight):
            # No name is given to its error, which refers to us: Python 3.12 links each frame to its caller's.
            if call.policy.origin is not None:
                result = await finish(call, kept, hold, *await compute_at_origin(call, kept, hold, flight, longest))
            else:
                flight.computes(call.label, call.policy.lease, longest)
                work = ended(resources.colour.call(call.origin))
                result = await finish(call, kept, hold, *await work, resources.clock() - began)
    except BaseException:
        # Nothing can be awaited any more: the loop was closed under us, or there is no thread to be had.
        drop_place(call)
        raise
    finally:
        resources.flights.end(flight, result)
    try:
        if call.place is not None:
            await leave_origin(call)
        return result
    finally:
        del result  # as above
