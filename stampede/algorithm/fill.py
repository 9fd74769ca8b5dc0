"""The algorithm: for one key, one caller computes and all others wait, however many there are. It is written once, as
coroutines, for blocking and for async callers. It talks to the engine through one port (`ports.Claims`), and a `Call`
brings everything else."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from math import inf
from os import urandom
from typing import Any

from stampede import events
from stampede.algorithm.admission import compute_at_origin, drop_place, leave_origin
from stampede.algorithm.call import Call
from stampede.algorithm.finish import finish, is_own, quietly, release, served
from stampede.algorithm.flight import SAFETY, Computing, Flight, nested
from stampede.algorithm.patience import compute_alone, compute_in_background, own_wait_left, patience_left, wait_left
from stampede.errors import WAY_OUT, ComputationFailed, EngineError, OriginFull, RecursiveComputation
from stampede.model import early
from stampede.model.backoff import Backoff
from stampede.model.entry import Entry
from stampede.model.ports import Ask, Busy, Failed, Found, Granted
from stampede.model.result import LeftOut, MayCompute, Nothing, Result
from stampede.runtime.chance import random
from stampede.runtime.colour import Bell, ended, running_loop

__all__ = ["fill", "look"]

_log = logging.getLogger("stampede")


async def fill(call: Call) -> Result:
    """Answer one call: return the stored value, the result of another caller, or the value computed here. The comments
    number the six steps. A call that becomes a follower, and gets no usable result, starts again at 1."""
    flights, flight = call.resources.flights, call.flight
    result: Result | None = None
    answer: Result | Granted | Busy | Failed | None = None
    anew = call.anew if call.force or call.once is not None else None
    inside = flights.computing(call.key) if flight is None else None
    if inside is not None:
        raise RecursiveComputation(f"the computation of {call.label!r} asked for its own key: {WAY_OUT}")
    try:
        while result is None:
            # 1. Join the flight of the key, or lead a new one. In this process, only its leader asks the engine.
            if flight is None:
                flight, leading = flights.join(call.key, call.loop, anew=anew, leader=call)
                if not leading:
                    result, flight = await follow(call, flight), None
                    continue
            try:
                # 2. If a hit is likely, read the key first. Then claim: the engine returns the value or grants a lease.
                likely = call.resources.hit_likelihood.good or call.looked is not None
                if call.ask is None and likely and not call.force and call.seen is None:
                    answer = await look(call)
                while answer is None:
                    answer = await claim(call)
                    # 3. Busy: another process computes. Serve what is stored, or sleep until woken; then claim again.
                    if type(answer) is Busy:
                        answer = await wait_for_other(call, answer)
                    elif type(answer) is Failed:
                        answer = await after_failure(call, answer)
            except EngineError as error:
                answer = Result(error=error, as_of=call.resources.clock())  # for the followers, too
            finally:
                if type(answer) is not Granted:
                    flights.end(flight, answer if type(answer) is Result else None)
            # 4. Granted: compute while the lease is renewed. Then 5. fill: the engine stores the value if the lease is
            # still valid; or, after an error, 6. abandon the lease with a verdict. Both wake all waiters.
            result = answer if isinstance(answer, Result) else await start_computation(call, flight, answer.entry)
        return result
    finally:
        del result, answer  # an error inside them refers to this frame


# -- 1. join a flight, or lead it ---------------------------------------------------------------------------------


async def follow(call: Call, flight: Flight) -> Result | None:
    """Wait for the leader of the flight. Return its result or what it offers; None if the caller must claim itself."""
    flight.latest, call.looked = max(flight.latest, call.began), None
    try:
        if call.loop is None and (flight.waits_in(running_loop()) or flight.led_beside()):
            # The leader needs this thread or event loop to finish, and this blocking call would stop it.
            return await compute_alone(call)
        if call.seen is not None and call.seen.fresh > 0:
            return served(call, call.seen, "computing", until=call.policy.lease)  # fresh, and only due for a refresh
        on_timeout = await wait_for_leader(call, flight)
        if call.policy.beside and not flight.detached:
            flight.continues = True  # leaving without more time is no cancellation: the computation goes on
        if on_timeout is not None:
            return await on_timeout(call)
        result, offered = flight.result, flight.offered
    finally:
        flight.owner.leave(flight, call)  # the last follower to leave also drops the result
    if call.policy.refuses_stale and any(each is not None and each.is_stale for each in (result, offered)):
        return None
    # A caller that began after the leader asked the engine may have begun after another process invalidated what
    # the leader was told. Such a caller asks the engine itself.
    if result is not None and call.began <= result.as_of:
        if isinstance(result.error, LeftOut) and not isinstance(result.error, Nothing):
            return await compute_alone(call)
        if result.meanwhile and patience_for(call, result) > 0:
            return None  # the leader's patience ended sooner than ours
        tell_waited(call, result.entry)
        return result.for_follower()
    if offered is not None and patience_for(call, offered) <= 0 and call.began <= offered.as_of:
        return served(call, offered.entry, "computing", until=call.policy.lease)
    return None


async def wait_for_leader(call: Call, flight: Flight) -> Callable[[Call], Awaitable[Result]] | None:
    """Wait until the leader has finished, or until its offer is good enough for this caller. Return None then. If the
    caller's time ends first, return the function that decides what happens."""
    while not flight.detached:
        bell, offered = flight.bell, flight.offered  # the bell first: `offer` sets `offered` and then changes the bell
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
    """Return how many seconds the caller waits for something better than the offer; 0 if the offer is not for it."""
    if offered.entry is None or call.began > offered.as_of or (call.policy.refuses_stale and offered.is_stale):
        return 0.0
    return patience_left(call, offered.entry)


# -- 2. look, then claim ------------------------------------------------------------------------------------------


async def look(call: Call) -> Result | None:
    """Read the entry without claiming, and return it if it is good enough. None means that the caller must claim."""
    resources = call.resources
    if resources.look is None:
        return None
    ask = call.ask = Ask(call.policy.lease)
    if call.tags and resources.tags is not None:
        ask.tags = resources.tags.of_call(call.tags, call.policy)
    at = resources.clock()
    if call.looked is not None:
        ask.looked, at, call.looked = call.looked, call.began, None
    found = await resources.look(call.key, ask)
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
    """Draw how early this call refreshes the key. Return -inf for never: the local tier draws, or `early` is off."""
    if call.resources.draws and call.policy.early and not ask.force:
        ask.draw = early.draw(call.policy.early, random)
    return -inf if ask.draw is None else ask.draw


async def claim(call: Call) -> Result | Granted | Busy | Failed | None:
    """Ask the engine once: the value, the right to compute it, its holder, or a failure. Return None to ask again. If
    the claim raises, its outcome is unknown and the lease may have been granted. It is released here, or other
    processes would wait until it ends."""
    resources, ask, first = call.resources, call.ask, call.asked == -inf
    if ask is None:
        seen = call.seen.id if call.seen is not None else None
        ask = call.ask = Ask(call.policy.lease, seen=seen, force=call.force)
        if call.tags and resources.tags is not None:
            ask.tags = resources.tags.of_call(call.tags, call.policy)
    if first:
        if not call.token:
            token = urandom(8)  # as `new_id`, without the call
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
                if reply.entry is not None and not call.force and call.flight is not None:  # followers may take it
                    offer = Result(reply.entry, until=call.policy.lease, as_of=at)
                    resources.flights.offer(call.flight, offer)
            return reply
        call.may_hold_lease = False
    except GeneratorExit:
        raise  # nothing can be awaited now; `Flights.end` gives the lease back, if there is one
    except BaseException:
        await release(call)
        raise
    if not isinstance(reply, Found):
        drop_refused_stale(call, reply)
        return reply
    entry = reply.entry
    if resources.marks.mark and resources.predates_mark(entry):
        ask.seen = entry.id  # `expire_all` made it stale
        await back_off(call)  # others may go on storing such entries, each with another id
    elif ask.draw is not None and call.seen is None and early.due(entry, ask.draw):
        call.seen, ask.seen = entry, entry.id  # claim again: another process may be refreshing it already
    else:
        if reply.own:
            call.tell(events.Served, "outage")
        else:
            tell_found(call, entry)
        return Result(entry, ticket=reply.ticket, at=at, as_of=at)
    return None


def drop_refused_stale(call: Call, reply: Granted | Busy | Failed) -> None:
    """Remove a stale entry from the reply if this call refuses stale values, and offer it to the followers."""
    entry = reply.entry = call.resources.softened(reply.entry)
    if entry is None or entry.fresh > 0 or not call.policy.refuses_stale:
        return
    reply.entry = None
    if call.flight is not None and type(reply) is not Failed and not call.force:
        call.resources.flights.offer(call.flight, Result(entry, until=call.policy.lease, as_of=call.asked))


async def after_failure(call: Call, reply: Failed) -> Result:
    """Return the outcome of a call whose awaited computation failed, or whose key rests after a failure."""
    verdict, at, existing = reply.verdict, call.asked, reply.entry or call.seen
    if verdict.kind == "absent":
        return Result(error=Nothing(verdict.message), as_of=at)
    if existing is not None:
        return served(call, existing, "resting", until=reply.rest, as_of=at if reply.entry else -inf)
    if verdict.kind == "unkept":
        return await compute_alone(call)
    if verdict.kind == "full":
        return Result(error=OriginFull(verdict.message), as_of=at)
    return Result(error=ComputationFailed(call.label, verdict.type_name, verdict.message), as_of=at)


# -- 3. another process computes ----------------------------------------------------------------------------------


async def wait_for_other(call: Call, busy: Busy) -> Result | None:
    """Sleep until the key changes or the caller's patience ends. Return a result; None if the caller must claim."""
    resources, at, existing = call.resources, call.asked, busy.entry or call.seen
    as_of = at if busy.entry else -inf
    if existing is not None and patience_left(call, existing) <= 0:
        return served(call, existing, "computing", until=busy.lease, as_of=as_of)
    patience, on_timeout = wait_left(call)
    if patience <= 0:
        return await on_timeout(call)
    if busy.entry is not None and call.flight is not None and call.flight.offered is None:
        # Each follower decides by its own patience whether to take this.
        resources.flights.offer(call.flight, Result(busy.entry, until=busy.lease, as_of=at))
    if existing is not None:
        patience = min(patience, patience_left(call, existing))
    news = await resources.port.wait(call.key, busy, patience)
    if news is None and existing is not None and patience_left(call, existing) <= 0:
        return served(call, existing, "computing", until=busy.lease, as_of=as_of)
    if news is None:  # whatever the reason for waking, do not spin
        await back_off(call, patience)
    ask = call.ask
    assert ask is not None
    ask.since, ask.awaited = call.waited, busy.token
    ask.draw = None  # a value computed while we waited is good, however short its life
    if news is None or news.entry.tags or (resources.marks.mark and resources.predates_mark(news.entry)):
        return None  # a claim also asks for the tags
    if call.flight is not None and call.flight.latest > at:
        # The answer to a new claim is also good for followers that came after `at`: they need not ask again.
        return None
    tell_found(call, news.entry)
    # The computation may have begun long ago. Known is only that its lease was valid when we asked.
    return Result(news.entry, ticket=news.ticket, at=at, as_of=at)


async def back_off(call: Call, most: float = inf) -> None:
    """Pause before the next question, at most `most` seconds, if this call has asked often in a short time."""
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


# -- 4. to 6. compute, then fill or abandon ------------------------------------------------------------------------


async def start_computation(call: Call, flight: Flight, existing: Entry[Any] | None) -> Result:
    """Compute, or have the value computed in the background if the caller may stop waiting for it. A call for many keys
    does neither: it gets `MayCompute`, and computes all its keys together."""
    if call.claims_only:
        return MayCompute(existing)
    seconds = own_wait_left(call, existing) if call.background is not None else inf
    if call.background is not None and seconds < inf and call.background.reserve():
        return await compute_in_background(
            call, call.background, flight, lambda: compute(call, flight, existing), existing, seconds
        )
    return await call.resources.colour.aside(compute(call, flight, existing), flight)


async def compute(call: Call, flight: Flight, existing: Entry[Any] | None) -> Result:
    """Run the user's function while the lease is renewed, then store its value, or abandon the lease."""
    resources = call.resources
    began = resources.clock()
    result: Result | None = None
    try:
        longest = call.policy.hold_of(existing.cost if existing else 0.0)
        if call.policy.origin is not None:
            call.nested = nested()
        call.existing = existing
        with resources.hold(call, longest if call.policy.origin is None else inf) as hold:
            if call.policy.refresh_by is not None and existing is not None and not call.force:
                result = await ask_worker(call, existing)
                if result is not None:
                    return result
            with Computing(flight):
                # Do not bind the error to a name: it refers to this frame, as Python 3.12 links each frame to its
                # caller's.
                if call.policy.origin is not None:
                    result = await finish(
                        call, existing, hold, *await compute_at_origin(call, existing, hold, flight, longest)
                    )
                else:
                    flight.computes(call.label, call.policy.lease, longest)
                    work = ended(resources.colour.call(call.origin))
                    result = await finish(call, existing, hold, *await work, resources.clock() - began)
    except BaseException:
        # Nothing can be awaited any more: the event loop was closed, or no thread could be started.
        drop_place(call)
        raise
    finally:
        resources.flights.end(flight, result)
    try:
        if call.place is not None:
            await leave_origin(call)
        return result
    finally:
        del result  # an error inside it refers to this frame


async def ask_worker(call: Call, existing: Entry[Any]) -> Result | None:
    """Ask a worker to refresh the value (`refresh_by`), and serve the stored value. Return None if the worker can't be
    asked. The lease is left to the worker: it is not renewed, and the worker takes it over. Until then no other caller
    asks a worker. The lease ends with the value, so that no caller waits for a worker without a value to serve."""
    assert call.policy.refresh_by is not None
    resources, began = call.resources, call.resources.clock()
    _, error = await ended(resources.colour.call(call.policy.refresh_by))
    try:
        if error is not None and not is_own(error):
            _log.warning("%r can't be refreshed by a worker, and is computed here: %r", call.label, error)
            return None
        if error is not None:
            await release(call)
            return Result(error=error)
    finally:
        del error  # it refers to this frame
    rest = min(call.policy.lease, existing.keep - (resources.clock() - began))
    if rest > 0:
        await resources.colour.shielded(quietly(resources.port.renew, call.key, call.token, rest))
        call.may_hold_lease = False
    else:
        await release(call)
    return served(call, existing, "computing", until=max(rest, 0.0), as_of=call.asked)
