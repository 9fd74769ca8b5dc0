"""Limits by name inside one process; and what those of all engines that decide in Python share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stampede import decisions
from stampede.engines.leases import Ending
from stampede.errors import EngineClosed
from stampede.ports import Booked, Rate, Usage
from stampede.window import NOTHING, SECOND, Window, ends, give_back, micros, penalize, take, used

__all__ = ["NamedLimits", "booked", "usage"]


def booked(window: Window, now: int, rate: Rate, cost: int, ahead: float) -> tuple[Window, Booked]:
    """As `window.take`, in seconds."""
    most_ahead = -1 if ahead < 0 else micros(ahead)
    after, delay, at = take(window, now, rate.most, micros(rate.per), cost, most_ahead)
    return after, Booked(delay / SECOND, at is not None, at or 0)


def usage(window: Window, now: int) -> Usage:
    """The same of `window.used`."""
    starts = used(window, now)
    rate = Rate(window.most, window.per / SECOND) if window.most else None
    return Usage(rate, starts.now, starts.ahead, starts.rest / SECOND)


@dataclass(slots=True)
class _Kept:
    window: Window
    end: float


class NamedLimits:
    """Limits, in both colours: no verb suspends."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.start_again()
        self.closed = False

    async def take(self, name: str, rate: Rate, cost: int, ahead: float) -> Booked:
        with decisions.lock:
            now = self._now()
            after, answer = booked(self._window(name), now, rate, cost, ahead)
            self._keep(name, after, now)
        return answer

    async def give_back(self, name: str, rate: Rate, cost: int, at: int) -> None:
        with decisions.lock:
            self._keep(name, give_back(self._window(name), at, cost), self._now())

    async def penalize(self, name: str, rate: Rate, seconds: float) -> None:
        with decisions.lock:
            now = self._now()
            self._keep(name, penalize(self._window(name), now, rate.most, micros(rate.per), micros(seconds)), now)

    async def used(self, name: str) -> Usage:
        with decisions.lock:
            return usage(self._window(name), self._now())

    async def listed(self) -> list[tuple[str, Usage]]:
        with decisions.lock:
            now = self._now()
            return [(name, usage(it.window, now)) for name, it in sorted(self._kept.items()) if it.end > now / SECOND]

    def _now(self) -> int:
        if self.closed:
            raise EngineClosed("memory")
        return int(self._clock() * SECOND)

    def _window(self, name: str) -> Window:
        kept = self._kept.get(name)
        return NOTHING if kept is None else kept.window

    def _keep(self, name: str, window: Window, now: int) -> None:
        if window != NOTHING:
            self._kept.put(name, _Kept(window, (now + ends(window)) / SECOND), now / SECOND)

    def let_go(self) -> None:
        """It is closed."""
        self.closed = True

    def start_again(self) -> None:
        """A forked child has limits of its own, as they are when it begins with nothing."""
        self._kept: Ending[str, _Kept] = Ending()
