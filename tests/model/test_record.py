"""The record of a key: each rule of its transitions is tested once, here."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from stampede.model import record
from stampede.model.entry import GRACE, Entry, Verdict
from stampede.model.ports import Ask, Busy, Failed, Found, Granted
from stampede.model.record import NOTHING, VERDICT, Kept, Lease, Past, Record

NOW, ME, OTHER = 1_000.0, b"mine....", b"another."
NO = Verdict("failed", "ValueError", "no")


def some(fresh: float = 60.0, keep: float | None = None, **known: Any) -> Entry[str]:
    return Entry("value", b"its id..", ttl=60.0, fresh=fresh, keep=fresh if keep is None else keep, **known)


def kept(fresh: float = 60.0, keep: float | None = None, ago: float = 0.0, **known: Any) -> Kept:
    """Return an entry that was stored `ago` seconds ago."""
    it = record.set(NOTHING, some(fresh, keep, **known), NOW - ago)[0].kept
    assert isinstance(it, Kept)
    return it


def lease(token: bytes = OTHER, left: float = 10.0) -> Lease:
    return Lease(token, NOW + left, 7, "host:1")


def failed(token: bytes = OTHER, verdict: Verdict | None = NO, rest: float = 0.0, ago: float = 0.0) -> Past:
    return Past().with_failure(token, verdict, rest, NOW - ago)


def claim(it: Record, **terms: Any) -> Any:
    return record.claim(it, ME, Ask(10.0, **terms), NOW)


CLAIMS: dict[str, tuple[Record, dict[str, Any], object]] = {
    "nothing is there": (NOTHING, {}, Granted()),
    "something fresh": (Record(kept()), {}, Found(some())),
    "the last moment": (Record(kept(ago=59.5)), {}, Found(some(0.5))),
    "its end": (Record(kept(ago=60.0)), {}, Granted()),
    "something stale": (Record(kept(60.0, 90.0, ago=70.0)), {}, Granted(some(-10.0, 20.0))),
    "for ever": (Record(kept(inf)), {}, Found(some(inf))),
    # the caller has waited
    "fresh while he waited": (Record(kept(0.0, 90.0, ago=5.0)), {"since": 6.0}, Found(some(-5.0, 85.0))),
    "but not so long": (Record(kept(0.0, 90.0, ago=5.0)), {"since": 5.0}, Granted(some(-5.0, 85.0))),
    "kept for those who waited": (Record(kept(0.0, ago=0.5)), {"since": 1.0}, Found(some(-0.5))),
    "for as long as the grace": (Record(kept(0.0, ago=GRACE)), {"since": 9.0}, Granted()),
    "it is served to nobody else": (Record(kept(0.0, ago=0.5)), {}, Granted()),
    # the stored value does not suffice
    "seen": (Record(kept()), {"seen": b"its id.."}, Granted(some())),
    "by force": (Record(kept()), {"force": True}, Granted(some())),
    "due": (Record(kept(10.0, margin=20.0)), {"draw": 0.0}, Granted(some(10.0, margin=20.0))),
    "by the draw": (Record(kept(20.0, cost=10.0)), {"draw": 2.0}, Granted(some(20.0, cost=10.0))),
    "not due": (Record(kept(20.0, cost=10.0)), {"draw": 1.0}, Found(some(20.0, cost=10.0))),
    # another caller computes
    "somebody": (Record(None, lease()), {}, Busy(OTHER, 10.0)),
    "and there is something stale": (Record(kept(0.0, 30.0), lease()), {}, Busy(OTHER, 10.0, some(0.0, 30.0))),
    "and what is fresh is found": (Record(kept(), lease()), {}, Found(some())),
    "his lease has ended": (Record(None, lease(left=0.0)), {}, Granted()),
    "the caller himself": (Record(None, lease(ME)), {}, Granted(fence=7)),
    "somebody, until he is overruled": (Record(None, lease()), {"force": True}, Granted()),
    # an earlier computation failed
    "the awaited one failed": (Record(past=failed()), {"awaited": OTHER}, Failed(NO)),
    "one that nobody awaited": (Record(past=failed()), {}, Granted()),
    "it is told for a while": (Record(past=failed(ago=VERDICT)), {"awaited": OTHER}, Granted()),
    "before who computes now": (Record(None, lease(b"a third."), failed()), {"awaited": OTHER}, Failed(NO)),
    "what is good comes first": (Record(kept(), past=failed()), {"awaited": OTHER}, Found(some())),
    "what is stale comes with it": (
        Record(kept(0.0, 30.0), past=failed()), {"awaited": OTHER}, Failed(NO, some(0.0, 30.0)),
    ),
    "the key rests": (Record(past=failed(rest=30.0)), {}, Failed(NO, rest=30.0)),
    "a rest outlives its verdict": (
        Record(past=failed(rest=30.0, ago=20.0)), {"awaited": OTHER}, Failed(NO, rest=10.0),
    ),
    "a rest without a verdict": (
        Record(past=failed(verdict=None, rest=30.0)), {}, Failed(Verdict("failed"), rest=30.0),
    ),
    "a rest ends": (Record(past=failed(rest=30.0, ago=30.0)), {}, Granted()),
    "a rest is ended by force": (Record(past=failed(rest=30.0)), {"force": True}, Granted()),
    "and not by its holder": (Record(None, lease(ME), failed(rest=30.0)), {}, Failed(NO, rest=30.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", CLAIMS)
def test_what_a_claim_is_told(case: str) -> None:
    """A claim gets the reply that its case demands. Each engine that uses records gives its callers this reply."""
    it, terms, told = CLAIMS[case]
    after, reply, woken = claim(it, **terms)
    assert reply == told
    if isinstance(told, Granted):
        assert after == Record(it.kept, Lease(ME, NOW + 10.0, told.fence, "host:1" if told.fence else ""), it.past)
        assert woken == (None if it.lease is None or it.lease.token == ME else it.lease.token)
    else:
        assert after is it and woken is None


def test_a_new_lease_has_the_fence_and_the_holder_that_are_given() -> None:
    """A new lease has the given fence and holder. Otherwise a lock's fences would not grow."""
    after, reply, _ = record.claim(Record(None, lease(left=0.0)), ME, Ask(10.0), NOW, fence=8, holder="host:2")
    assert reply == Granted(fence=8)
    assert after.lease == Lease(ME, NOW + 10.0, 8, "host:2")


def test_renewed_from_now() -> None:
    """A renewed lease ends the given number of seconds from now, and the rest of the record stays the same."""
    it = Record(kept(), lease(ME, 1.0), failed())
    after, stands, woken = record.renew(it, ME, 30.0, NOW)
    assert stands and woken is None
    assert after == Record(it.kept, lease(ME, 30.0), it.past)


FELL: dict[str, Record] = {
    "there is none": NOTHING,
    "another's": Record(None, lease()),
    "one that has ended": Record(kept(), lease(ME, 0.0)),
}


@pytest.mark.parametrize("case", FELL)
def test_a_lease_that_does_not_stand_gives_no_right(case: str) -> None:
    """A lease that is missing, has ended or belongs to another caller gives no right to renew, fill or abandon."""
    it = FELL[case]
    other = Entry("late", b"late id.")
    for after, done, woken in (
        record.renew(it, ME, 30.0, NOW), record.fill(it, ME, other, NOW), record.abandon(it, ME, NO, 9.0, NOW),
    ):  # fmt: skip
        assert (after is it, done, woken) == (True, False, None)


def test_a_fill_stores_and_forgets() -> None:
    """A fill stores the value, removes the lease and the failures, and wakes the waiters."""
    after, stored, woken = record.fill(Record(kept(0.0, 9.0), lease(ME), failed(rest=9.0)), ME, some(60.0, 90.0), NOW)
    assert (stored, woken) == (True, ME)
    assert after == Record(Kept(some(60.0, 90.0), NOW + 60.0, NOW + 90.0))


def test_a_fill_that_is_sent_again_has_been_stored() -> None:
    """If a fill is sent again because its reply was lost, the answer is that the value was stored."""
    there = Record(kept())
    assert record.fill(there, ME, some(), NOW) == (there, True, None)
    assert record.replace(there, b"older id", some(), NOW) == (there, True, None)
    gone = Record(kept(ago=60.0 + GRACE))
    assert record.fill(gone, ME, some(), NOW) == (gone, False, None)


def test_an_entry_is_kept_no_shorter_than_it_is_fresh() -> None:
    """An entry is kept at least as long as it is fresh."""
    after, _, _ = record.set(NOTHING, some(60.0, 0.0), NOW)
    assert after.kept is not None and after.kept.keep == NOW + 60.0


def test_what_an_abandoned_lease_leaves() -> None:
    """An abandoned lease leaves its verdict for its waiters, and a rest for later callers. Old verdicts are dropped."""
    it = Record(kept(0.0, 9.0), lease(ME), failed())
    after, dropped, woken = record.abandon(it, ME, None, 0.0, NOW)
    assert (after, dropped, woken) == (Record(it.kept, None, it.past), True, ME)
    past = record.abandon(it, ME, NO, 30.0, NOW)[0].past
    assert past == Past({OTHER: (NO, NOW + VERDICT), ME: (NO, NOW + VERDICT)}, NOW + 30.0, NO)
    later = past.with_failure(b"a third.", Verdict("unkept"), 0.0, NOW + VERDICT)
    assert later == Past({b"a third.": (Verdict("unkept"), NOW + 2 * VERDICT)}, NOW + 30.0, NO)  # the rest remains
    assert later.with_failure(ME, None, 1.0, NOW).rest == NOW + 1.0  # the last rest counts


def test_of_many_verdicts_the_oldest_go() -> None:
    """If a key has too many verdicts, the oldest are dropped. Otherwise they would pile up."""
    past = Past()
    for number in range(record.MOST + 2):
        past = past.with_failure(b"%d" % number, NO, 0.0, NOW)
    assert list(past.verdicts) == [b"%d" % number for number in range(2, record.MOST + 2)]


def test_set_forgets_what_was_going_on() -> None:
    """`set` removes the lease, so that a computation under way is not stored over the new value."""
    after, _, woken = record.set(Record(kept(), lease(), failed(rest=9.0)), some(5.0), NOW)
    assert (after, woken) == (Record(Kept(some(5.0), NOW + 5.0, NOW + 5.0)), OTHER)


def test_replaced_is_what_was_seen() -> None:
    """`replace` stores only if the value is still the one that was seen. Otherwise one of two changes would be lost."""
    there, new = Record(kept(0.0, 30.0), lease()), Entry("new", b"new id..", fresh=5.0, keep=5.0)
    for it, seen in (there, b"its id.."), (NOTHING, None), (Record(kept(ago=60.0)), None):
        after, replaced, woken = record.replace(it, seen, new, NOW)
        assert (after, replaced) == (Record(Kept(new, NOW + 5.0, NOW + 5.0)), True)
        assert woken == (OTHER if it is there else None)
    for it, seen in (there, b"older id"), (there, None), (NOTHING, b"its id.."), (Record(kept(ago=60.0)), b"its id.."):
        assert record.replace(it, seen, new, NOW) == (it, False, None)


def test_expired_is_stale_and_kept() -> None:
    """An expired value is not fresh any more, but it is kept as a stale value."""
    it = Record(kept(60.0, 90.0), lease(), failed(rest=9.0))
    assert record.expire(it, NOW) == (Record(Kept(some(60.0, 90.0), NOW, NOW + 90.0), None, it.past), True, OTHER)
    stale = Record(kept(0.0, 90.0), lease(), failed(rest=9.0))
    assert record.expire(stale, NOW) == (Record(stale.kept, None, stale.past), False, OTHER)
    for it in NOTHING, Record(kept(0.0, 90.0)), Record(past=failed(rest=9.0)):
        after, was_fresh, woken = record.expire(it, NOW)
        assert (after is it, was_fresh, woken) == (True, False, None)


def test_invalidated_is_nothing() -> None:
    """`invalidate` removes the value, the lease and the failures. The answer is whether a value was there."""
    assert record.invalidate(Record(kept(), lease(), failed(rest=9.0)), NOW) == (NOTHING, True, OTHER)
    assert record.invalidate(Record(kept(0.0, 9.0)), NOW) == (NOTHING, True, None)
    for it in NOTHING, Record(kept(0.0, ago=0.5)), Record(past=failed()):
        assert record.invalidate(it, NOW) == (NOTHING, False, None)


ENDS = {
    NOW + 60.0 + GRACE: Record(kept()),
    NOW + GRACE: Record(kept(0.0)),
    NOW + 10.0: Record(None, lease()),
    NOW + VERDICT: Record(past=failed()),
    NOW + 30.0: Record(kept(20.0), lease(), failed(rest=30.0)),
    -inf: NOTHING,
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_record(end: float) -> None:
    """A record ends when its last part ends. Otherwise engines would delete it too early, or keep it for ever."""
    assert ENDS[end].end == end
