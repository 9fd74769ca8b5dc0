"""How a computation ends: store the value, or abandon the lease. The lease is given back exactly once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import inf
from typing import Any

from stampede import events
from stampede.algorithm.call import Call
from stampede.algorithm.context import Context, NotModified
from stampede.algorithm.tags import ticket_of
from stampede.errors import CodecError, EngineError, NoComputation, OptionError, OriginFull, RecursiveComputation
from stampede.leases.keeper import Hold
from stampede.model import early
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ticket
from stampede.model.result import LeftOut, Nothing, Result, comes_back, parts_of
from stampede.model.tags import judge, names_in, packed
from stampede.runtime.chance import random
from stampede.settings.options import MOST_TAGS, checked_tags

__all__ = ["covers", "finish", "is_own", "quietly", "release", "served"]

CROWDED = 0.2
"""Seconds for which a stored value is served again without asking, after its origin was full."""

ARGS = "let its __init__ pass all of its arguments to super().__init__"


async def finish(
    call: Call, existing: Entry[Any] | None, hold: Hold, value: Any, error: BaseException | None, cost: float
) -> Result:
    """Fill with the computed value, or abandon. Either way the lease ends and all waiters wake, once."""
    # As `call.reason`, without the call.
    why = "refresh" if call.force else "missing" if existing is None else "early" if existing.fresh > 0 else "stale"
    try:
        if isinstance(value, NotModified) or isinstance(error, NotModified):
            return await not_modified(call, hold, existing, value if error is None else error, cost)
        if error is not None and hold.foreign:
            return Result(error=error)
        if isinstance(error, LeftOut) and type(error) not in call.policy.raises:
            return await left_out(call, error)
        if isinstance(error, OriginFull):
            return await turned_away(call, error, existing)
        if error is not None and (not isinstance(error, call.policy.raises) or is_own(error)):
            return await give_up(call, hold, error, existing, why, cost)
        entry = entry_of(call, existing, value, error, cost)
        if error is not None and entry.ttl <= 0 and existing is not None:
            why_not = "ttl is 0 for this exception, and the stored value stays"
            return await unkept(call, entry, error, why_not, wanted=True)
        return await store(call, hold, entry, error, why, cost, existing)
    except GeneratorExit:
        raise
    except BaseException as failure:  # raised by the user's ttl function, or by a codec
        return await give_up(call, hold, failure, existing, why, cost)


def entry_of(
    call: Call, existing: Entry[Any] | None, value: Any, error: BaseException | None, cost: float
) -> Entry[Any]:
    """Return the entry to store. Its id is the token of the lease, by which waiters of that lease recognise it. An
    exception of `raises` is stored as an answer. With a ttl of 0 it is only for those that wait for it now."""
    ttl, stale, context = call.policy.ttl_of(value if error is None else error), call.policy.stale, call.context
    if context is not None:
        ttl = ttl if context.ttl is None else context.ttl
        stale = stale if context.stale_for is None else context.stale_for
    if call.policy.jitter and ttl != inf:
        ttl *= 1 - call.policy.jitter * random()
    if error is not None:
        value = parts_of(error)
    typical, margin = early.observe(existing, cost)
    if error is not None and ttl <= 0:
        stale = 0.0
    entry = Entry(value, call.token, typical, margin, ttl, ttl, ttl + stale, error is not None)
    if context is not None:
        entry.etag, entry.modified = context.facts()
    return entry


async def not_modified(call: Call, hold: Hold, existing: Entry[Any] | None, claimed: Any, cost: float) -> Result:
    """Fill with the stored value, which is still right: it starts a new ttl. Its cost remains that of the computation
    that made it."""
    claimed.__traceback__ = None  # it is never shown, and its frames refer to it
    context: Context = claimed.context
    if context is not call.context or existing is None:
        raise NoComputation(f"{call.label!r} returned not_modified() of another computation, that of {context.key!r}")
    policy = call.policy
    ttl = policy.ttl_of(existing.value) if context.ttl is None else context.ttl
    if ttl * (1 - policy.jitter) <= existing.ttl <= ttl:
        ttl = existing.ttl
    elif policy.jitter and ttl != inf:
        ttl *= 1 - policy.jitter * random()
    stale = policy.stale if context.stale_for is None else context.stale_for
    known = existing.cost, existing.margin, ttl, ttl, ttl + stale, False, context.etag, context.modified
    entry = Entry(existing.value, call.token, *known, existing.tags)
    if (ttl, entry.etag, entry.modified) == (existing.ttl, existing.etag, existing.modified):
        entry.same_as = existing.id  # the stored bytes include these three
    return await store(call, hold, entry, None, context.reason, cost, existing)


async def store(
    call: Call,
    hold: Hold,
    entry: Entry[Any],
    error: BaseException | None,
    why: str,
    cost: float,
    existing: Entry[Any] | None,
) -> Result:
    """Fill, unless the value must not be stored. Waiters in other processes wake either way."""
    if hold.foreign:
        return Result(entry, error)
    if error is not None and not comes_back(entry, error, call.policy.raises):
        return await unkept(call, entry, error, f"{entry.value[0]} would lose some of its data when read back: {ARGS}")
    if call.context is not None and not call.context.kept:
        return await unkept(call, entry, error, "the computation called dont_keep()", wanted=True)
    if error is None and call.policy.cache_if is not None and not call.policy.cache_if(entry.value):
        return await unkept(call, entry, error, "cache_if refused it", wanted=True)
    at = call.resources.clock()
    try:
        trial = call.resources.trial
        if trial is not None and call.policy.strict:
            trial(call.key, entry)
        tagged = call.tags or entry.tags or (call.context is not None and call.context.tags)
        filling = with_tags(call, entry) if tagged else call.resources.port.fill(call.key, call.token, entry)
        stored = await call.resources.colour.shielded(filling)
    except CodecError as refusal:
        result = await unkept(call, entry, error, str(refusal), strict=call.policy.strict)
        return Result(error=refusal, as_of=result.as_of) if call.policy.strict else result
    except EngineError as trouble:  # on_engine_error="raise"
        await release(call)
        return Result(error=trouble, as_of=call.resources.clock())
    call.resources.note(events.Computed, call.resources.scope, call.label, why, cost, bool(stored))
    if stored is None:
        # Valid as of the claim; whether the lease was valid later is unknown.
        return Result(entry, error, as_of=call.asked)
    if not stored:
        longest = call.policy.hold_of(existing.cost if existing is not None else 0.0)
        late = cost > longest
        detached = call.flight is not None and call.flight.detached
        overruled = not late and (detached or hold.overruled or call.overruled)
        call.tell(events.LeaseLost, longest if late else None, overruled)
        return Result(entry, error, as_of=-inf)  # not for followers or the local tier, either
    return Result(entry, error, stored if isinstance(stored, Ticket) else None, stored=True, at=at, as_of=at)


async def with_tags(call: Call, entry: Entry[Any]) -> Ticket | bool | None:
    """Fill with an entry that has tags, of the option `tags`, of `current().tag()`, or of a value that is still right.
    False also means that one of them was invalidated while it was computed."""
    resources, tags = call.resources, call.resources.tags
    assert tags is not None
    of_call = (call.ask.tags if call.ask is not None else None) or tags.of_call(call.tags, call.policy)
    own = call.tags if call.context is None else (*call.tags, *call.context.tags)
    names = tuple(dict.fromkeys((*tags.names(checked_tags("tags", own)), *names_in(entry.tags))))
    if len(names) > MOST_TAGS:
        raise OptionError(f"{call.label!r} has {len(names)} tags, with those that it had: at most {MOST_TAGS}")
    noted = await tags.ask(tags.noted(names, of_call, call.asked, entry.keep), of_call.noted)
    if noted is None:
        call.overruled = True
        tags.hint(call.key, names)  # the next claim notes them
        await release(call)
        return False
    before, entry.tags = entry.tags, packed(names, noted)
    if entry.tags != before:
        entry.same_as = None  # the stored bytes have other ids
    stored = await resources.port.fill(call.key, call.token, entry)
    if not stored:
        return stored
    tags.hint(call.key, names, of_call.names)
    # That the lease was valid says nothing about the tags, and the result is also for callers that came meanwhile.
    current = await tags.ask(tags.current(names), None)
    if current is None:
        return None  # valid as of the claim
    if not judge(replace(entry), current):
        call.overruled = True
        return False
    return ticket_of(entry, stored, current) or True if isinstance(stored, Ticket) else stored


async def unkept(
    call: Call,
    entry: Entry[Any],
    error: BaseException | None,
    why: str,
    *,
    strict: bool = False,
    wanted: bool = False,
) -> Result:
    """Give the value to this flight only, and tell other processes that it is not stored."""
    as_of = await lease_known_valid_at(call)
    await release(call, Verdict("unkept", message=why))
    call.tell(events.Unkept, why, strict, wanted)
    return Result(entry, error, as_of=as_of)


async def left_out(call: Call, error: LeftOut) -> Result:
    """End a batch's key that its function left out. Nothing is stored, and waiters compute for themselves. A waiter's
    own function may have a value for the key. If all callers share one function (`Nothing`), waiters are told that
    there is no value."""
    error.__traceback__ = None  # it is never shown, and its frames refer to the error
    as_of = await lease_known_valid_at(call)
    if isinstance(error, Nothing) and not has_tags(call):
        await release(call, Verdict("absent", message=str(error)))
    else:
        await release(call, Verdict("unkept", message="the function of many keys has left it out"))
    return Result(error=error, as_of=as_of)


async def give_up(
    call: Call, hold: Hold, error: BaseException, existing: Entry[Any] | None, why: str, cost: float
) -> Result:
    """Abandon the lease with a verdict after a failed computation, and serve the stored value if that is allowed."""
    if hold.foreign:
        return Result(error=error)
    if is_own(error):
        await release(call)
        return Result(error=error)
    may_serve = covers(call, existing, error)
    rest = max(call.policy.retry_after, cost if may_serve else 0.0)
    if call.policy.refresh_by is not None and existing is not None:
        rest = max(rest, call.policy.lease)  # a worker that fails is not asked again at once
    verdict = Verdict("failed", f"{type(error).__module__}.{type(error).__qualname__}", message_of(error))
    as_of = await lease_known_valid_at(call)
    await release(call, verdict, rest)
    call.tell(events.Failed, why, cost, error)
    if existing and may_serve:
        return served(call, existing, "failed", until=rest, as_of=as_of)
    return Result(error=error, as_of=as_of)


async def turned_away(call: Call, error: OriginFull, existing: Entry[Any] | None) -> Result:
    """End a call whose origin is full: serve a stored value and let the key rest for a moment, or report the error."""
    as_of = await lease_known_valid_at(call)
    if existing is not None and not call.force and (existing.fresh > 0 or error.may_be_covered):
        await release(call, None, CROWDED)
        return served(call, existing, "full", until=CROWDED, as_of=as_of)
    if error.may_be_covered:
        await release(call)
        return Result(error=error)  # this call's patience has ended; others may have more
    await release(call, Verdict("full", message=message_of(error)))
    return Result(error=error, as_of=as_of)


TIME_LIMITS = frozenset({
    ("billiard.exceptions", "SoftTimeLimitExceeded"),  # Celery
    ("rq.timeouts", "BaseTimeoutException"),
    ("huey.exceptions", "TaskTimeout"),
    ("stopit.utils", "TimeoutException"),
})  # fmt: skip
"""Ordinary exceptions that mean that a worker's time limit ends one task. (Dramatiq's is no `Exception`.)"""


def is_own(error: BaseException) -> bool:
    """Return whether the error concerns only this caller and says nothing about the origin. These are a cancellation,
    an interruption, an exit, and a worker's time limit."""
    return not isinstance(error, Exception) or any(
        (kind.__module__, kind.__qualname__) in TIME_LIMITS for kind in type(error).__mro__
    )


def has_tags(call: Call) -> bool:
    context, existing = call.context, call.existing
    named = call.tags or (context is not None and context.tags) or (existing is not None and existing.tags)
    return bool(named)


async def lease_known_valid_at(call: Call) -> float:
    """Return the latest moment at which our lease is known to be valid: earlier callers may share the result. For a
    value with tags this is the claim: that the lease is valid later says nothing about tags."""
    if not call.followed or has_tags(call):
        return call.asked
    at = call.resources.clock()
    try:
        return at if await call.resources.port.renew(call.key, call.token, call.policy.lease) else -inf
    except EngineError:
        return call.asked


def covers(call: Call, existing: Entry[Any] | None, error: BaseException) -> bool:
    """Return whether the stored value may be served in place of this error."""
    if existing is None or call.force or isinstance(error, (CodecError, RecursiveComputation, *call.policy.raises)):
        return False
    return not is_own(error)


def served(
    call: Call, entry: Entry[Any] | None, why: str, until: float | None = None, *, as_of: float = -inf
) -> Result:
    """Return a result that serves the stored entry. Without `as_of` it is for this caller only. Such an entry comes
    from the local tier, and may have been invalidated before followers came."""
    call.tell(events.Served, why)
    return Result(entry, until=until, meanwhile=why == "computing", as_of=as_of)


def message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # raise the caller's own error, not that of its __str__
        return f"(no message: its __str__ raised {type(failure).__name__})"


async def release(call: Call, verdict: Verdict | None = None, rest: float = 0.0) -> None:
    """Give the lease back, even if the caller is cancelled meanwhile."""
    await call.resources.colour.shielded(quietly(call.resources.port.abandon, call.key, call.token, verdict, rest))
    call.may_hold_lease = False


async def quietly(verb: Callable[..., Awaitable[object]], *what: Any) -> None:
    """Call a verb that gives something back, and ignore an EngineError: a lease ends by itself."""
    try:
        await verb(*what)
    except EngineError:
        pass
