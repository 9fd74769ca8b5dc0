"""The model of an engine: the simplest implementation of `stampede.model.ports`, with each verb as one step.

The explorer runs the algorithm on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from stampede.model import record
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Found, Granted, Reply
from stampede.model.record import NOTHING, Change, Keeps, Past, Record

__all__ = ["Listener", "Model", "Place"]

T = TypeVar("T")

POLL = 20.0
"""Seconds after which the model's `wait` returns without a wake-up: the safety poll of every push engine."""


@dataclass(slots=True, eq=False)
class Listener:
    """A waiter that sleeps until a lease ends."""

    heard: bool = False
    deaf: bool = False  # the message was lost: only the safety poll can wake it
    news: Entry[Any] | None = None  # the value, if the push carries it


@dataclass(slots=True)
class Place:
    """Everything that the engine stores about one key, and the waiters for its lease."""

    record: Record = field(default_factory=Record)
    lease: float = 0.0  # seconds of the last granted lease
    listeners: list[Listener] = field(default_factory=list)


class Model:
    """An engine that follows the contract, with a clock that the caller controls. Each verb is one step."""

    poll = POLL

    def __init__(self, clock: Callable[[], float], *, news: bool = False) -> None:
        self.clock = clock
        self.news = news
        self.places: defaultdict[str, Place] = defaultdict(Place)

    def change(self, key: str, ask: Callable[[Record, float], Change[T]], news: Entry[Any] | None = None) -> T:
        place = self.places[key]
        place.record, answer, fallen = ask(place.record, self.clock())
        if fallen is not None:
            self.wake(place, news)
        return answer

    def wake(self, place: Place, news: Entry[Any] | None = None) -> None:
        """Wake all waiters, because the lease has ended."""
        listeners, place.listeners = place.listeners, []
        for listener in listeners:
            listener.heard = True
            listener.news = news if self.news else None

    def stands(self, key: str) -> bytes | None:
        """The token of the valid lease, or None."""
        lease = self.places[key].record.lease
        return lease.token if lease is not None and lease.end > self.clock() else None

    def end(self, key: str) -> float:
        """The end of the current or last lease."""
        lease = self.places[key].record.lease
        return -inf if lease is None else lease.end

    def kept(self, key: str) -> Entry[Any] | None:
        """The value that may be served, with its remaining times."""
        return record.served(self.places[key].record.kept, self.clock())

    def look(self, key: str) -> Found | None:
        kept, now = self.places[key].record.kept, self.clock()
        return Found(record.left(kept, now)) if kept is not None and kept.fresh > now else None

    def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        reply = self.change(key, lambda it, now: record.claim(it, token, ask, now))
        if isinstance(reply, Granted):
            self.places[key].lease = ask.lease
        return reply

    def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        return self.change(key, lambda it, now: record.fill(it, token, entry, now), entry)

    def abandon(self, key: str, token: bytes, verdict: Verdict | None, rest: float) -> bool:
        return self.change(key, lambda it, now: record.abandon(it, token, verdict, rest, now))

    def put(self, key: str, entry: Entry[Any]) -> None:
        self.change(key, lambda it, now: record.set(it, entry, now), entry)

    def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        return self.change(key, lambda it, now: record.replace(it, seen, entry, now), entry)

    def invalidate(self, key: str) -> bool:
        return self.change(key, record.invalidate)

    def expire(self, key: str) -> bool:
        return self.change(key, record.expire)

    def renew(self, key: str, token: bytes, seconds: float) -> bool:
        """Let the lease end this many seconds from now."""
        return self.change(key, lambda it, now: record.renew(it, token, seconds, now))

    def listen(self, key: str, token: bytes) -> Listener:
        """Return a listener for a lease. If the lease has already ended, the listener is woken at once."""
        listener = Listener(heard=self.stands(key) != token)
        if not listener.heard:
            self.places[key].listeners.append(listener)
        return listener

    def lapse(self, key: str) -> None:
        """End the lease early, as if its holder were frozen or cut off."""
        place = self.places[key]
        place.record = Record(place.record.kept, None, place.record.past)
        self.wake(place)

    def forget(self) -> None:
        """Restart the engine with no data."""
        for place in [*self.places.values()]:
            place.record = NOTHING
            self.wake(place)

    def summary(self) -> tuple[object, ...]:
        """Everything that the next answers of the engine depend on."""
        now = self.clock()
        return tuple([
            (
                key, _kept(place.record.kept, now), self.stands(key), max(self.end(key) - now, 0.0),
                _past(place.record.past, now), sum([not listener.heard for listener in place.listeners]),
            )
            for key, place in sorted(self.places.items())
        ])  # fmt: skip


def _kept(kept: Keeps | None, now: float) -> tuple[object, ...] | None:
    return None if kept is None or kept.gone <= now else (kept.entry.value, kept.fresh - now, kept.keep - now)


def _past(past: Past | None, now: float) -> tuple[object, ...] | None:
    if past is None or past.end <= now:
        return None
    told = sorted((token, end - now) for token, (_, end) in past.verdicts.items() if end > now)
    return max(past.rest - now, 0.0), *told
