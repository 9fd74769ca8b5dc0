"""A lock's queue as this process knows it, while its callers wait for the lock.

The queue is read once; from then on a watch reports each change. So the event of a release is enough for the next
waiter to know that it has the lock: the first place in the queue has the lock, and no new place can come before an
existing one. For the same reason, an outdated state may let a caller wait too long, but never lets it in too early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from stampede.engines.etcd.names import QueuedKey, place_of
from stampede.engines.etcd.watches import KeyWatch, Span, Watches
from stampede.model.lock_queue import admitted
from stampede.runtime.colour import Bell
from stampede.runtime.watch import watch

__all__ = ["Queue", "inside"]

LINGER = 1.0
"""Seconds for which the watch is kept after the last waiter: the next one may come soon."""


class _Waiter(NamedTuple):
    turn: bool  # True: it waits until its token has the lock; False: it waits until the token has left
    revision: int  # as of which the token had a place
    bell: Bell


class Queue:
    """The places of one lock, in their order, and the waiters of this process for it."""

    def __init__(self, watches: Watches, span: Span, read: Callable[[], tuple[Sequence[QueuedKey], int]]) -> None:
        self._watches, self._span, self._read = watches, span, read
        self._lock, self._opening = threading.RLock(), threading.Lock()
        self._places: dict[bytes, QueuedKey] = {}  # by token
        self._seen = 0  # the revision as of which the places are known
        self._watch: KeyWatch | None = None
        self._until = 0.0  # when the watch is closed, if there are no waiters then
        self._waiters: dict[bytes, list[_Waiter]] = {}
        self.updated = 0.0  # when the queue was last read, or the last event came

    @property
    def watched(self) -> bool:
        """Whether events come in."""
        watch = self._watch
        return watch is not None and watch.active

    def open(self) -> None:
        """Read the queue, and watch it from there; return at once if another caller does so just now. This blocks."""
        if not self._opening.acquire(blocking=False):
            return
        try:
            places, revision = self._read()
            with self._lock:
                if revision >= self._seen:  # else the watch has already reported a later state
                    self._places, self._seen = {each.token: each for each in places}, revision
                self.updated = time.monotonic()
                bells = self._bells(list(self._waiters), frozenset())
            for bell in bells:
                bell.ring()
            if not self.watched:
                self._watch = self._watches.watch(self._span, self._on_events, revision + 1)
        finally:
            self._opening.release()

    def place(self, token: bytes) -> QueuedKey | None:
        return self._places.get(token)

    def admits(self, token: bytes) -> bool:
        """Return whether this token has the lock, as far as is known."""
        with self._lock:
            return any(each.token == token for each in inside(self._places))

    def first(self) -> QueuedKey | None:
        with self._lock:
            return next(iter(self._places.values()), None)

    @contextmanager
    def waiter(self, token: bytes, turn: bool, revision: int) -> Iterator[Bell]:
        """Lend a bell that rings when the token has left the queue; with `turn`, also when it has the lock."""
        waiter = _Waiter(turn, revision, Bell())
        with self._lock:
            self._waiters.setdefault(token, []).append(waiter)
        try:
            yield waiter.bell
        finally:
            with self._lock:
                waiters = self._waiters[token]
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[token]
                if not self._waiters:
                    self._until = time.monotonic() + LINGER
                    watch.add(self, self._until)

    def look(self, now: float) -> None:
        """Close the watch if it is not needed any more."""
        with self._lock:
            if self._watch is not None and not self._waiters and now >= self._until:
                self._watch.close()

    def worth_asking(self, token: bytes, turn: bool, revision: int) -> bool:
        """Return whether the event that such a waiter waits for has already happened."""
        with self._lock:
            if token not in self._places:  # it has left, unless the event of its arrival has not come yet
                return self._seen >= revision
            return turn and self.admits(token)

    def _on_events(self, events: Sequence[Mapping[str, Any]] | None) -> None:
        with self._lock:
            if events is None:  # the watch has ended: all waiters must ask
                bells = [each.bell for waiters in self._waiters.values() for each in waiters]
            else:
                self.updated = time.monotonic()
                left = self._change(events)
                bells = self._bells([each.token for each in inside(self._places)], left)
        for bell in bells:
            bell.ring()

    def _change(self, events: Sequence[Mapping[str, Any]]) -> set[bytes]:
        """Apply events to the places, and return the tokens that have left."""
        left: set[bytes] = set()
        for event in events:
            place = place_of(event["kv"])
            if place.changed < self._seen:  # `open` has read a later state
                continue
            self._seen = place.changed
            if event.get("type") == "DELETE":
                self._places.pop(place.token, None)
                left.add(place.token)
            else:
                self._places[place.token] = place
        return left

    def _bells(self, turns: Sequence[bytes], left: set[bytes] | frozenset[bytes]) -> list[Bell]:
        found = []
        for token in {*turns, *left}:
            found += [
                each.bell
                for each in self._waiters.get(token, ())
                if not each.bell.rung and (token in left or self.worth_asking(token, each.turn, each.revision))
            ]
        return found


def inside(places: Mapping[bytes, QueuedKey] | Sequence[QueuedKey]) -> Sequence[QueuedKey]:
    """Return the places of a queue that have the lock: the first ones."""
    queue = places.values() if isinstance(places, Mapping) else places
    return list(islice(queue, admitted(each.room for each in queue)))
