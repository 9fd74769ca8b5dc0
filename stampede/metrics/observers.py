"""One observer that calls all others, and protects calls from their errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from inspect import iscoroutinefunction

from stampede.errors import OptionError
from stampede.events import Event, Observer

log = logging.getLogger("stampede")


class _Inside(threading.local):
    def __init__(self) -> None:
        self.numbers: set[int] = set()


class Collector:
    """An observer that needs no events: it reads the statistics of all caches when metrics are collected."""

    def __call__(self, event: Event) -> None:
        """Do nothing."""


class Observers:
    """The observers of one cache. Each is called for each event, in the thread and at the moment it happens. So a slow
    observer should use a queue. An exception of an observer is logged, once for each observer, and does not reach the
    caller. If an observer's own calls cause events, it does not get these."""

    __slots__ = ("_inside", "_observers", "_reported")

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(each for each in observers if not isinstance(each, Collector))
        self._reported: set[int] = set()
        self._inside = _Inside()
        for observer in self._observers:
            if not callable(observer):
                raise OptionError(f"observers holds {observer!r}: give functions of an event")
            if iscoroutinefunction(observer) or iscoroutinefunction(type(observer).__call__):
                raise OptionError(f"observers holds {observer!r}: give a plain function, as it would not be awaited")

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._observers)

    def __len__(self) -> int:
        return len(self._observers)

    def emit(self, event: Event) -> None:
        """Call all observers with an event."""
        inside = self._inside.numbers
        for number, observer in enumerate(self._observers):
            if number in inside:
                continue
            inside.add(number)
            try:
                observer(event)
            except Exception as error:  # the user's own
                self._complain(number, error)
            finally:
                inside.discard(number)

    def _complain(self, number: int, error: Exception) -> None:
        if number not in self._reported:
            self._reported.add(number)
            log.error("observer %r raised; later errors of it are not logged", self._observers[number], exc_info=error)
