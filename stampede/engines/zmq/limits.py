"""The limits of a broker: a window for each name, and the time as an argument."""

from __future__ import annotations

from itertools import islice

from stampede.engines.kit.expiring import Ending
from stampede.engines.kit.limits import KeptWindow, booked, usage
from stampede.engines.zmq.machine import Refused
from stampede.model.ports import Booked, Rate, Usage
from stampede.model.window import NOTHING, SECOND, Window, ends, give_back, micros, note, penalize, slack

__all__ = ["Counts"]


class Counts:
    """All limits of one broker. `quiet`: until then a predecessor's starts may lie in windows of which nothing is known
    here; so none of a length that is not over begins, until they can lie there no more, or it is quiet no more."""

    def __init__(self, now: float, *, quiet: float, most: int) -> None:
        self._began, self._quiet = now, now + quiet
        self._most = most
        self._kept: Ending[bytes, KeptWindow] = Ending()

    def take(self, name: bytes, rate: Rate, cost: int, ahead: float, now: float, was: int = 0) -> Booked:
        _check(rate)
        window = self._window(name, rate, now)
        try:
            after, answer = booked(window, int(now * SECOND), rate, cost, ahead, was)
        except ValueError as error:
            raise Refused(str(error)) from error
        if after is not window or window.rest:
            self._keep(name, after, now)
        return answer

    def note(self, name: bytes, rate: Rate, cost: int, at: float, now: float) -> None:
        """What another broker has granted, `at` by our clock."""
        _check(rate)
        window, moment = self._window(name, rate, now), int(at * SECOND)
        self._keep(name, note(window, int(now * SECOND), rate.most, micros(rate.per), cost, moment), now)

    def give_back(self, name: bytes, cost: int, at: int, now: float) -> None:
        kept = self._kept.get(name)
        if kept is not None:
            self._keep(name, give_back(kept.window, at, cost), now)

    def penalize(self, name: bytes, rate: Rate, seconds: float, now: float) -> None:
        _check(rate)
        if not seconds >= 0:
            raise Refused(f"a penalty of {seconds} s")
        window = self._window(name, rate, now)
        self._keep(name, penalize(window, int(now * SECOND), rate.most, micros(rate.per), micros(seconds)), now)

    def used(self, name: bytes, now: float) -> Usage:
        kept = self._kept.living(name, now)
        return usage(NOTHING if kept is None else kept.window, int(now * SECOND))

    def names(self, start: int, end: int) -> list[bytes]:
        return list(islice(self._kept, start, end))

    def _window(self, name: bytes, rate: Rate, now: float) -> Window:
        kept = self._kept.get(name)
        if kept is not None:
            return kept.window
        per = micros(rate.per)
        left = min(self._began + (per + slack(per)) / SECOND, self._quiet) - now
        return penalize(NOTHING, int(now * SECOND), rate.most, per, micros(left)) if left > 0 else NOTHING

    def _keep(self, name: bytes, window: Window, now: float) -> None:
        if name not in self._kept and len(self._kept) >= self._most:
            for old, kept in [*self._kept.items()]:
                if kept.end <= now:
                    del self._kept[old]
            if len(self._kept) >= self._most:
                raise Refused(f"it has {len(self._kept)} limits, and may have no more: see --max-limits")
        self._kept.put(name, KeptWindow(window, now + ends(window) / SECOND), now)


def _check(rate: Rate) -> None:
    if not (rate.most > 0 and rate.per > 0):
        raise Refused(f"a limit of {rate.most} per {rate.per} s")
