"""The limits of a broker: a window for each name. The time is an argument."""

from __future__ import annotations

from itertools import islice

from stampede.engines.kit.expiring import Ending
from stampede.engines.kit.limits import KeptWindow, booked, usage
from stampede.engines.zmq.machine import Refused
from stampede.model.limit_window import NOTHING, SECOND, Window, ends, give_back, micros, note, penalize, slack
from stampede.model.ports import Booked, Rate, Usage

__all__ = ["Counts"]


class Counts:
    """All limits of one broker. `quiet` is the length of its grace in seconds. An earlier broker may have granted
    starts that this one knows nothing of. So a limit that is new here begins when such starts have left its window, or
    when the grace is over."""

    def __init__(self, now: float, *, quiet: float, most: int) -> None:
        self._began, self._quiet = now, now + quiet
        self._most = most
        self._windows: Ending[bytes, KeptWindow] = Ending()

    def take(self, name: bytes, rate: Rate, cost: int, ahead: float, now: float, was: int = 0) -> Booked:
        _check(rate)
        window = self._window(name, rate, now)
        try:
            after, answer = booked(window, int(now * SECOND), rate, cost, ahead, was)
        except ValueError as error:
            raise Refused(str(error)) from error
        if after is not window or window.rest:
            self._store(name, after, now)
        return answer

    def note(self, name: bytes, rate: Rate, cost: int, at: float, now: float) -> None:
        """Count a start that another broker granted. `at` is its time by our clock."""
        _check(rate)
        window, moment = self._window(name, rate, now), int(at * SECOND)
        self._store(name, note(window, int(now * SECOND), rate.most, micros(rate.per), cost, moment), now)

    def give_back(self, name: bytes, cost: int, at: int, now: float) -> None:
        stored = self._windows.get(name)
        if stored is not None:
            self._store(name, give_back(stored.window, at, cost), now)

    def penalize(self, name: bytes, rate: Rate, seconds: float, now: float) -> None:
        _check(rate)
        if not seconds >= 0:
            raise Refused(f"a penalty of {seconds} s: it must not be negative")
        window = self._window(name, rate, now)
        self._store(name, penalize(window, int(now * SECOND), rate.most, micros(rate.per), micros(seconds)), now)

    def used(self, name: bytes, now: float) -> Usage:
        stored = self._windows.living(name, now)
        return usage(NOTHING if stored is None else stored.window, int(now * SECOND))

    def names(self, start: int, end: int) -> list[bytes]:
        return list(islice(self._windows, start, end))

    def _window(self, name: bytes, rate: Rate, now: float) -> Window:
        stored = self._windows.get(name)
        if stored is not None:
            return stored.window
        per = micros(rate.per)
        left = min(self._began + (per + slack(per)) / SECOND, self._quiet) - now
        return penalize(NOTHING, int(now * SECOND), rate.most, per, micros(left)) if left > 0 else NOTHING

    def _store(self, name: bytes, window: Window, now: float) -> None:
        if name not in self._windows and len(self._windows) >= self._most:
            for old, stored in [*self._windows.items()]:
                if stored.end <= now:
                    del self._windows[old]
            if len(self._windows) >= self._most:
                raise Refused(f"it has {len(self._windows)} limits already, its maximum: see --max-limits")
        self._windows.put(name, KeptWindow(window, now + ends(window) / SECOND), now)


def _check(rate: Rate) -> None:
    if not (rate.most > 0 and rate.per > 0):
        raise Refused(f"a limit of {rate.most} per {rate.per} s: both must be positive")
