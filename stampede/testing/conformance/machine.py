"""The state machine of `HistoriesSuite`: it asks an engine and a record each question, and compares the answers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from math import inf, isclose
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from stampede.model import record
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Busy, Failed, Found, Granted
from stampede.model.record import Record

__all__ = ["run_histories"]

PATIENCE = 0.8
"""Longest history in seconds whose answers are compared if time can't be stopped. GRACE keeps entries a bit longer."""

PASSING = {"no": 0.0, "short": 2.0, "long": 60.0, "ever": inf}
STILL = {"no": 0.0, "short": 3600.0, "long": 7200.0, "ever": inf}
"""Seconds that these names stand for: with a clock that moves, and without one, where nothing may expire."""

LAST = -1
"""The claimant that was granted the key last. Random claimants mostly hold no lease."""

VERDICTS = [None, Verdict("failed", "ValueError", "no"), Verdict("unkept"), Verdict("failed", "Other", "\U0001f40e")]
KEYS = st.sampled_from("kkkl")
CLAIMANTS = st.sampled_from(range(4))
HOLDERS = st.sampled_from([LAST, LAST, LAST, 0, 1, 2, 3])
SIDES = st.booleans()
LASTING = st.sampled_from(["no", "short", "long", "ever"])
ENDING = st.sampled_from(["short", "long"])
ENTRIES = st.fixed_dictionaries(
    {
        "fresh": LASTING,
        "stale": LASTING,
        "ttl": LASTING,
        "known": st.sampled_from([(0.0, 0.0), (1.0, 2.0), (1.0, 7000.0)]),  # cost and margin
        "raised": st.booleans(),
    }
)
SEEN = st.sampled_from(["none", "none", "there", "other"])

_names = count()


def run_histories(suite: Any, run: Callable[[Any], Any]) -> None:
    """Run random histories, the same ones each time, and report the simplest one that fails."""
    run_state_machine_as_test(
        lambda: _Machine(suite, run),  # type: ignore[arg-type]  # hypothesis only calls it
        settings=settings(
            max_examples=suite.histories, stateful_step_count=suite.steps, deadline=None, derandomize=True,
            database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
        ),
    )  # fmt: skip


class _Machine(RuleBasedStateMachine):
    """Four claimants: two of them ask one client, and two the other."""

    def __init__(self, suite: Any, run: Callable[[Any], Any]) -> None:
        super().__init__()
        self.suite, self.run = suite, run
        self.began = time.monotonic()
        self.now: Callable[[], float] = suite.clock or time.monotonic
        self.records: defaultdict[str, Record] = defaultdict(Record)
        self.history = next(_names)
        self.ids = count(1)
        self.last: dict[str, Entry[Any]] = {}
        self.holders: dict[str, int] = {}
        self.seconds = suite.durations or (STILL if suite.clock is None else PASSING)
        self.blur = suite.blur or (2.0 if suite.clock is None else 0.0)
        self.sides = [_ports(suite.engine, suite.suspending), _ports(suite.peer, suite.suspending)]

    # -- questions

    @rule(
        key=KEYS, by=CLAIMANTS, lease=ENDING, since=LASTING, seen=SEEN, awaited=st.none() | HOLDERS,
        force=st.sampled_from([False, False, False, True]), draw=st.sampled_from([None, None, 0.0, 1.0]),
    )  # fmt: skip
    def claim(
        self, key: str, by: int, lease: str, since: str, seen: str, awaited: int | None, force: bool, draw: float | None
    ) -> None:
        claims, store = self.sides[by % 2]
        ours, theirs = self.seen(store, key, seen)
        waited = None if awaited is None else self.token(key, self.holder(key, awaited))
        ask = Ask(
            self.seconds[lease], self.seconds[since], theirs, waited, force, draw=draw if self.suite.draws else None
        )
        reply = self.run(claims.claim(self.name(key), self.token(key, by), ask))
        ask.seen = ours
        expected = self.expected(key, lambda it, now: record.claim(it, self.token(key, by), ask, now))
        if isinstance(expected, Granted):
            self.holders[key] = by
        self.same(reply, expected)

    @rule(key=KEYS, by=HOLDERS, entry=st.none() | ENTRIES)
    def fill(self, key: str, by: int, entry: dict[str, Any] | None) -> None:
        """Fill with a new entry; with None, repeat the last fill."""
        by = self.holder(key, by)
        made = self.last.get(key) if entry is None else self.made(key, **entry)
        if made is not None and (entry is not None or self.suite.ids_last):
            reply = self.run(self.sides[by % 2][0].fill(self.name(key), self.token(key, by), made))
            self.same(reply, self.expected(key, lambda it, now: record.fill(it, self.token(key, by), made, now)))

    @rule(key=KEYS, by=HOLDERS, verdict=st.sampled_from(VERDICTS), rest=st.sampled_from(["no", "short", "long"]))
    def abandon(self, key: str, by: int, verdict: Verdict | None, rest: str) -> None:
        by = self.holder(key, by)
        reply = self.run(
            self.sides[by % 2][0].abandon(self.name(key), self.token(key, by), verdict, self.seconds[rest])
        )
        seconds = self.seconds[rest]
        expected = self.expected(key, lambda it, now: record.abandon(it, self.token(key, by), verdict, seconds, now))
        self.same(reply, expected)

    @rule(key=KEYS, by=HOLDERS, lease=ENDING)
    def renew(self, key: str, by: int, lease: str) -> None:
        by = self.holder(key, by)
        reply = self.run(self.sides[by % 2][0].renew(self.name(key), self.token(key, by), self.seconds[lease]))
        seconds = self.seconds[lease]
        self.same(reply, self.expected(key, lambda it, now: record.renew(it, self.token(key, by), seconds, now)))

    @rule(key=KEYS, entry=ENTRIES, side=SIDES)
    def set(self, key: str, entry: dict[str, Any], side: bool) -> None:
        made = self.made(key, **entry)
        self.run(self.sides[side][1].set(self.name(key), made))
        self.expected(key, lambda it, now: record.set(it, made, now))

    @rule(key=KEYS, entry=ENTRIES, side=SIDES, seen=SEEN)
    def replace(self, key: str, entry: dict[str, Any], side: bool, seen: str) -> None:
        store = self.sides[side][1]
        made = self.made(key, **entry)
        ours, theirs = self.seen(store, key, seen)
        reply = self.run(store.replace(self.name(key), theirs, made))
        self.same(reply, self.expected(key, lambda it, now: record.replace(it, ours, made, now)))

    @rule(key=KEYS, side=SIDES)
    def expire(self, key: str, side: bool) -> None:
        self.same(self.run(self.sides[side][1].expire(self.name(key))), self.expected(key, record.expire))

    @rule(key=KEYS, side=SIDES)
    def invalidate(self, key: str, side: bool) -> None:
        self.same(self.run(self.sides[side][1].invalidate(self.name(key))), self.expected(key, record.invalidate))

    @rule(key=KEYS, side=SIDES)
    def get(self, key: str, side: bool) -> None:
        (reply,) = self.run(self.sides[side][1].get([self.name(key)]))
        self.same(reply, self.kept(key))

    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        if self.suite.clock is not None:
            self.suite.clock.advance(data.draw(st.sampled_from(self.suite.passes)))
            self.began = time.monotonic()

    # -- answers of the record

    def expected(self, key: str, change: Callable[[Record, float], record.Change[Any]]) -> Any:
        self.records[key], answer, _ = change(self.records[key], self.now())
        return answer

    def kept(self, key: str) -> Entry[Any] | None:
        return record.served(self.records[key].kept, self.now())

    # -- names, tokens and entries

    def name(self, key: str) -> str:
        return f"{self.history} {key}"

    def holder(self, key: str, by: int) -> int:
        return self.holders.get(key, 0) if by == LAST else by

    def token(self, key: str, number: int) -> bytes:
        """Return a token of eight bytes, unique to this key and this history."""
        return f"{self.history % 10**6:06}{key}{number}".encode()

    def made(self, key: str, fresh: str, stale: str, ttl: str, known: tuple[float, float], raised: bool) -> Entry[Any]:
        """Return a new entry with its own id, and note it as the last one, for a repeated fill."""
        id, seconds = b"%08d" % next(self.ids), self.seconds
        keep = seconds[fresh] + seconds[stale]
        ttl_of = max(seconds[fresh], seconds[ttl])
        made = self.last[key] = Entry(b"value " + id, id, *known, ttl_of, seconds[fresh], keep, raised)
        return made

    def seen(self, store: Any, key: str, which: str) -> tuple[bytes | None, bytes | None]:
        """Return the id of the current entry as the record has it, and as the engine has it."""
        if which != "there":
            return (None, None) if which == "none" else (b"another.", b"another.")
        kept, (there,) = self.kept(key), self.run(store.get([self.name(key)]))
        return None if kept is None else kept.id, None if there is None else there.id

    # -- comparing answers

    def same(self, reply: Any, expected: Any) -> None:
        if self.blur and time.monotonic() - self.began > PATIENCE:
            return  # this machine is too slow at the moment: an entry may have expired
        assert self.alike(reply, expected), f"the engine answers {reply!r}, but the record says {expected!r}"

    def alike(self, reply: Any, expected: Any) -> bool:
        match reply, expected:
            case (Entry(), Entry()):
                fields = ["value", "cost", "margin", "ttl", "raised"] + ["id"] * self.suite.ids_last
                same = all(getattr(reply, field) == getattr(expected, field) for field in fields)
                return same and self.close(reply.fresh, expected.fresh) and self.close(reply.keep, expected.keep)
            case (Found(), Found()) | (Granted(), Granted()):
                return self.alike(reply.entry, expected.entry)
            case (Busy(), Busy()):
                same = reply.token == expected.token
                return same and self.close(reply.lease, expected.lease) and self.alike(reply.entry, expected.entry)
            case (Failed(), Failed()):
                same = reply.verdict == expected.verdict and self.close(reply.rest, expected.rest)
                return same and self.alike(reply.entry, expected.entry)
            case _:
                return bool(reply == expected)

    def close(self, reply: float, expected: float) -> bool:
        return reply == expected or isclose(reply, expected, rel_tol=0, abs_tol=self.blur or 1e-6)


def _ports(engine: Any, suspending: bool) -> tuple[Any, Any]:
    side = engine.suspending if suspending else engine.blocking
    return side.claims, side.store
