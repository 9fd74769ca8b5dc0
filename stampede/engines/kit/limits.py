"""Limits by name inside one process, and what all engines share that decide in Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from stampede.engines.kit.expiring import Ending
from stampede.errors import EngineClosed
from stampede.model.limit_window import NOTHING, SECOND, Window, ends, give_back, micros, penalize, take, used
from stampede.model.ports import Booked, Rate, Usage
from stampede.runtime import process_lock

__all__ = ["KeptWindow", "NamedLimits", "T", "WindowLimits", "booked", "usage"]

T = TypeVar("T")


def booked(window: Window, now: int, rate: Rate, cost: int, ahead: float, was: int) -> tuple[Window, Booked]:
    """Call `window.take` with times in seconds."""
    most_ahead = -1 if ahead < 0 else micros(ahead)
    after, delay, at = take(window, now, rate.most, micros(rate.per), cost, most_ahead, was)
    return after, Booked(delay / SECOND, at is not None, at or 0)


def usage(window: Window, now: int) -> Usage:
    """Call `window.used`, and return its result in seconds."""
    starts = used(window, now)
    rate = Rate(window.most, window.per / SECOND) if window.most else None
    return Usage(rate, starts.now, starts.ahead, starts.rest / SECOND)


class WindowLimits(ABC):
    """Limits of one colour whose windows are stored elsewhere: each verb changes one window."""

    async def take(self, name: str, rate: Rate, cost: int, ahead: float, was: int = 0) -> Booked:
        return await self._changed(name, lambda window, now: booked(window, now, rate, cost, ahead, was))

    async def give_back(self, name: str, rate: Rate, cost: int, at: int) -> None:
        await self._changed(name, lambda window, now: (give_back(window, at, cost), None))

    async def penalize(self, name: str, rate: Rate, seconds: float) -> None:
        per, forbidden = micros(rate.per), micros(seconds)
        await self._changed(name, lambda window, now: (penalize(window, now, rate.most, per, forbidden), None))

    async def used(self, name: str) -> Usage:
        return await self._changed(name, lambda window, now: (window, usage(window, now)))

    async def listed(self) -> list[tuple[str, Usage]] | None:
        """Return all limits by name. None if this engine cannot list them."""
        return None

    @abstractmethod
    async def _changed(self, name: str, change: Callable[[Window, int], tuple[Window, T]]) -> T:
        """Apply `change` to the window of this name, and return its answer once the changed window is stored."""


@dataclass(slots=True)
class KeptWindow:
    """A window, and the moment after which it is empty."""

    window: Window
    end: float


class NamedLimits(WindowLimits):
    """Limits in the memory of this process, for both colours: no verb suspends."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.start_again()
        self.closed = False

    async def _changed(self, name: str, change: Callable[[Window, int], tuple[Window, T]]) -> T:
        with process_lock.lock:
            now, kept = self._now(), self._kept.get(name)
            window = NOTHING if kept is None else kept.window
            after, answer = change(window, now)
            if after is not window:
                self._kept.put(name, KeptWindow(after, (now + ends(after)) / SECOND), now / SECOND)
        return answer

    async def listed(self) -> list[tuple[str, Usage]]:
        with process_lock.lock:
            now = self._now()
            return [(name, usage(it.window, now)) for name, it in sorted(self._kept.items()) if it.end > now / SECOND]

    def _now(self) -> int:
        if self.closed:
            raise EngineClosed("memory")
        return int(self._clock() * SECOND)

    def let_go(self) -> None:
        """Note that the engine is closed."""
        self.closed = True

    def start_again(self) -> None:
        """Begin anew in a forked child, which has limits of its own."""
        self._kept: Ending[str, KeptWindow] = Ending()
