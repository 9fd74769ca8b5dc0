"""A lock's queue as this process knows it, while one of its callers waits for the lock.

The queue is read once, and a watch tells of each change from then on. So the next holder knows that its turn has come
by the event of the release alone: who is first in the queue has the lock, and nobody can come in before a place that
is there already. For the same reason an old state may keep a caller waiting, but never lets it in too early.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from stampede.engines.etcd.names import QueuedKey, place_of
from stampede.engines.etcd.watches import KeyWatch, Span, Watches
from stampede.model.room import admitted
from stampede.runtime.colour import Bell
from stampede.runtime.watch import watch

__all__ = ["Queue", "inside"]

LINGER = 1.0
"""Seconds for which the watch is kept when nobody waits any more: the next one may come at once."""


class _Waiter(NamedTuple):
    turn: bool  # it waits for the turn of its token; else for the end of it
    revision: int  # at which the token had a place
    bell: Bell


class Queue:
    """The places of one lock, in their order, and the waiters of this process."""

    def __init__(self, watches: Watches, span: Span, read: Callable[[], tuple[Sequence[QueuedKey], int]]) -> None:
        self._watches, self._span, self._read = watches, span, read
        self._lock, self._opening = threading.RLock(), threading.Lock()
        self._places: dict[bytes, QueuedKey] = {}  # by token
        self._seen = 0  # the revision as of which they are known
        self._watch: KeyWatch | None = None
        self._until = 0.0  # when the watch is of no more use, if nobody waits then
        self._waiters: dict[bytes, list[_Waiter]] = {}
        self.heard = 0.0

    @property
    def hears(self) -> bool:
        its = self._watch
        return its is not None and its.hears

    def open(self) -> None:
        """Read the queue, and have it watched from there. Blocking; another caller may be about it."""
        if not self._opening.acquire(blocking=False):
            return
        try:
            places, revision = self._read()
            with self._lock:
                if revision >= self._seen:  # else the watch was faster
                    self._places, self._seen = {each.token: each for each in places}, revision
                self.heard = time.monotonic()
                bells = self._bells(list(self._waiters), frozenset())
            for bell in bells:
                bell.ring()
            if not self.hears:
                self._watch = self._watches.watch(self._span, self._told, revision + 1)
        finally:
            self._opening.release()

    def place(self, token: bytes) -> QueuedKey | None:
        return self._places.get(token)

    def admits(self, token: bytes) -> bool:
        """Whether this token is inside, as far as is known."""
        with self._lock:
            return any(each.token == token for each in inside(self._places))

    def first(self) -> QueuedKey | None:
        with self._lock:
            return next(iter(self._places.values()), None)

    @contextmanager
    def waiter(self, token: bytes, turn: bool, revision: int) -> Iterator[Bell]:
        """A bell that rings when it is this token's turn; and, also without `turn`, when the token has left."""
        mine = _Waiter(turn, revision, Bell())
        with self._lock:
            self._waiters.setdefault(token, []).append(mine)
        try:
            yield mine.bell
        finally:
            with self._lock:
                those = self._waiters[token]
                those.remove(mine)
                if not those:
                    del self._waiters[token]
                if not self._waiters:
                    self._until = time.monotonic() + LINGER
                    watch.add(self, self._until)

    def look(self, now: float) -> None:
        """End the watch that nobody needs any more."""
        with self._lock:
            if self._watch is not None and not self._waiters and now >= self._until:
                self._watch.close()

    def worth_asking(self, token: bytes, turn: bool, revision: int) -> bool:
        """Whether what such a waiter waits for has come already."""
        with self._lock:
            if token not in self._places:  # or the news of its place has not come yet
                return self._seen >= revision
            return turn and self.admits(token)

    def _told(self, events: Sequence[Mapping[str, Any]] | None) -> None:
        with self._lock:
            if events is None:
                bells = [each.bell for those in self._waiters.values() for each in those]
            else:
                self.heard = time.monotonic()
                left = self._change(events)
                bells = self._bells([each.token for each in inside(self._places)], left)
        for bell in bells:
            bell.ring()

    def _change(self, events: Sequence[Mapping[str, Any]]) -> set[bytes]:
        """The tokens that have left."""
        left: set[bytes] = set()
        for event in events:
            place = place_of(event["kv"])
            if place.changed < self._seen:  # it was read already
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
    """Return those of a queue that have the lock."""
    its = places.values() if isinstance(places, Mapping) else places
    return list(islice(its, admitted(each.room for each in its)))
