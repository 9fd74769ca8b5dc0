"""Processes take a lock, some of them are paused, and all record their events. A checker then finds violations.

All times are from the machine's monotonic clock, which its processes share.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from disk_world import PATIENCE, Connection, Other, other

from stampede import EngineError, Lock, LockLost
from stampede.engines import open_engine

__all__ = ["Event", "History", "Pause", "played", "wrongs"]


class Event(NamedTuple):
    """Events of a process that takes the lock: `granted`; `held` or `lost` when it checks; `leaving`, and then `left`,
    `loud` (LockLost) or `unknown` (another error). Events of the resource: `written` or `refused`. Events of the test
    that pauses the process: `frozen` and `thawed`."""

    at: float
    who: str
    what: str
    fence: int = 0
    ends: float = inf  # end of the lease, as the process knows it


class Pause(NamedTuple):
    """The pause of a holder. `keeps`: the holder keeps the lock during the pause, even after its lease ends."""

    who: str
    keeps: bool = False


@dataclass(slots=True)
class Stay:
    """One stay inside the lock: from the grant to its end."""

    who: str
    fence: int
    granted: float
    ends: float
    looks: list[Event] = field(default_factory=list)
    writes: list[Event] = field(default_factory=list)
    leaving: float = inf
    frozen: float = inf
    thawed: float = inf
    end: str = ""

    @property
    def paused_beyond_its_end(self) -> bool:
        return self.ends < self.thawed < inf

    def until(self, keeps: bool) -> float:
        """The end of the time inside: when it leaves, its lease ends, or it notices the loss, whichever is first."""
        until = min([self.leaving, self.ends, *(look.at for look in self.looks if look.what == "lost")])
        return max(until, self.thawed) if keeps and self.frozen < inf else until

    def __str__(self) -> str:
        return f"{self.who} with fence {self.fence}"


def stays(events: Iterable[Event]) -> list[Stay]:
    """All stays, in the order of the grants. A grant does not count if it ended before its process heard of it."""
    found: list[Stay] = []
    last: dict[str, Stay] = {}
    for event in events:
        if event.what == "granted":
            last[event.who] = stay = Stay(event.who, event.fence, event.at, event.ends)
            found.append(stay)
            continue
        stay = last[event.who]
        if event.what in ("held", "lost"):
            stay.looks.append(event)
            stay.ends = event.ends
        elif event.what in ("written", "refused"):
            stay.writes.append(event)
        elif event.what in ("left", "loud", "unknown"):
            stay.end = event.what
        else:
            setattr(stay, event.what, event.at)
    return sorted((stay for stay in found if stay.granted < stay.ends), key=lambda stay: stay.granted)


def wrongs(events: list[Event], pause: Pause, *, visits: int, crowd: Iterable[str]) -> list[str]:
    """The violations, in words. `visits`: how often each process of the crowd must enter and leave normally."""
    all_ = stays(sorted(events, key=lambda event: event.at))
    return [
        *_two(all_, pause),
        *_fences(all_),
        *_late(all_, pause),
        *_unheard(all_),
        *_stuck(all_, pause, visits, crowd),
    ]


def _two(all_: list[Stay], pause: Pause) -> Iterator[str]:
    for at, second in enumerate(all_):
        for first in all_[:at]:
            if (over := first.until(pause.keeps) - second.granted) > 0:
                yield f"two inside: {second} came {over:.6f} s before {first} had left"


def _fences(all_: list[Stay]) -> Iterator[str]:
    for first, second in pairwise(all_):
        if second.fence <= first.fence:
            yield f"a fence that doesn't grow: {second} came after {first}"


def _late(all_: list[Stay], pause: Pause) -> Iterator[str]:
    writes = sorted((write for stay in all_ for write in stay.writes), key=lambda write: write.at)
    highest = -inf
    for write in writes:
        if write.what == "written":
            if write.fence < highest:
                yield f"a late write: {write.who} wrote with fence {write.fence} after {highest}"
            highest = max(highest, write.fence)
    paused = [stay for stay in all_ if stay.who == pause.who and stay.paused_beyond_its_end]
    if not paused:
        yield f"nobody was paused beyond its end: {pause.who} was to be"
    for stay in paused:
        if not any(write.what == "refused" for write in stay.writes):
            yield f"a late write that was not refused, or not tried: of {stay}"


def _unheard(all_: list[Stay]) -> Iterator[str]:
    for stay in all_:
        lost = False
        for look in stay.looks:
            if look.what == "held" and (lost or look.at >= look.ends):
                yield f"a loss unheard of: {stay} believed that it had it {look.at - look.ends:.6f} s after its end"
            lost = lost or look.what == "lost"
        if stay.paused_beyond_its_end:
            first = next((look for look in stay.looks if look.at >= stay.thawed), None)
            if first is None or first.what != "lost":
                yield f"a loss unheard of: {stay} woke up, and didn't learn it at its first look"
        if (lost or stay.paused_beyond_its_end) and stay.end not in ("loud", "unknown"):
            yield f"a block that ended without a word: {stay} had lost it"


def _stuck(all_: list[Stay], pause: Pause, visits: int, crowd: Iterable[str]) -> Iterator[str]:
    done = defaultdict[str, int](int)
    for stay in all_:
        done[stay.who] += stay.end == "left"
    for who in crowd:
        if done[who] < visits:
            yield f"no progress: {who} was inside {done[who]} times, and not {visits}"
    for stay in all_:
        if stay.frozen < inf and not pause.keeps:
            others = [each for each in all_ if each.who != stay.who and stay.granted < each.granted < stay.thawed]
            if not others:
                yield f"no progress: nobody got in while {stay} was paused"


# -- the players -------------------------------------------------------------------------------------------------


@dataclass
class History:
    """The events of one lock, and its current state."""

    pause: Pause
    crowd: dict[str, Other]
    lease: float
    events: list[Event] = field(default_factory=list)
    seen: int = -1  # the highest fence that the protected resource has seen
    paused: bool = False
    waits: bool = False  # whether the paused process waits for its next word
    thaws: float = inf
    left: set[str] = field(default_factory=set)

    def begin(self) -> None:
        self.crowd[self.pause.who].tell()

    def take(self, who: str, event: Event) -> None:
        match event.what:
            case "done":
                self.left.add(who)
            case "write":
                self._write(who, event.fence)
            case "granted":
                self.events.append(event)
                if who == self.pause.who and not self.paused and event.at < event.ends:  # else it came too late
                    self._freeze()
                else:
                    self.crowd[who].tell()
            case _:
                self.events.append(event)

    def _freeze(self) -> None:
        """Freeze the holder, which waits for a word. The other processes wait for the lock, or soon will."""
        self.paused = self.waits = True
        for who, each in self.crowd.items():
            if who != self.pause.who:
                each.tell()
        self.crowd[self.pause.who].freeze()
        self._note("frozen")
        if self.pause.keeps:
            self.thaws = time.monotonic() + 1.5 * self.lease

    def _write(self, who: str, fence: int) -> None:
        """The protected resource: it refuses a write with an older fence."""
        taken = fence >= self.seen
        self.seen = max(fence, self.seen)
        self.events.append(Event(time.monotonic(), who, "written" if taken else "refused", fence))
        self.crowd[who].tell()
        if self.waits and who != self.pause.who:
            self.waits = False
            self.crowd[self.pause.who].tell()
            if not self.pause.keeps:
                self.thaw()

    def thaw(self) -> None:
        self.thaws = inf
        self._note("thawed")
        self.crowd[self.pause.who].thaw()

    def _note(self, what: str) -> None:
        self.events.append(Event(time.monotonic(), self.pause.who, what))


def played(url: str, lease: float, visits: int, *, keeps: bool) -> list[History]:
    """Play two locks at once. The paused holder is blocking code for one lock, and async code for the other."""
    histories: list[History] = []
    whose: dict[Connection, tuple[History, str]] = {}
    with ExitStack() as stack:
        for colour in ("blocking", "async"):
            crowd = {}
            for number, suspending in enumerate([colour == "async", True, False]):
                crowd[f"{colour} {number}"] = stack.enter_context(
                    other(contend, url, f"{colour} {number}", lease, visits, suspending)
                )
            history = History(Pause(f"{colour} 0", keeps), crowd, lease)
            histories.append(history)
            whose |= {each.pipe: (history, who) for who, each in crowd.items()}
        for history in histories:
            history.begin()
        while any(len(history.left) < len(history.crowd) for history in histories):
            thaws = min(history.thaws for history in histories)
            ready = wait([*whose], max(min(thaws - time.monotonic(), PATIENCE), 0.0))
            assert ready or thaws < inf, f"nobody says anything: {[history.events[-9:] for history in histories]}"
            for pipe in ready:
                history, who = whose[pipe]  # type: ignore[index]
                try:
                    history.take(who, pipe.recv())  # type: ignore[union-attr]
                except EOFError:
                    raise AssertionError(f"{who} has ended: {history.events[-9:]}") from None
            for history in histories:
                if history.thaws <= time.monotonic():
                    history.thaw()
    return histories


class _Contender:
    """The part that blocking and async contenders share."""

    def __init__(self, pipe: Connection, who: str, lock: Lock) -> None:
        self.pipe, self.who, self.lock = pipe, who, lock
        self.fence = 0
        self.tries = 0

    def granted(self) -> None:
        self.hold: Any = self.lock._last.hold  # type: ignore[union-attr]
        assert self.lock.fence is not None
        self.fence = self.lock.fence
        self.say("granted")

    def failed(self) -> None:
        """After an engine error, as on a busy machine, the contender tries again. The fifth error is raised."""
        self.tries += 1
        if self.tries == 5:
            raise
        if self.fence:
            self.say("unknown")

    def say(self, what: str) -> None:
        self.pipe.send(Event(time.monotonic(), self.who, what, self.fence, self.hold.ends))

    def look(self) -> None:
        at, lost = time.monotonic(), self.lock.lost
        self.pipe.send(Event(at, self.who, "lost" if lost else "held", self.fence, self.hold.ends))


def contend(pipe: Connection, url: str, who: str, lease: float, visits: int, suspending: bool) -> None:
    """Enter and leave until `visits` stays ended normally. Inside, wait for a word, write, and then check the lock."""
    engine = open_engine(url)
    contender = _Contender(pipe, who, Lock(who.split()[0], on=engine, lease=lease, wait=PATIENCE))
    pipe.recv()
    asyncio.run(_suspending(contender, visits)) if suspending else _blocking(contender, visits)
    contender.say("done")
    pipe.recv()


def _blocking(me: _Contender, visits: int) -> None:
    while visits:
        me.fence = 0
        try:
            with me.lock:
                me.granted()
                me.pipe.recv()
                me.say("write")
                me.pipe.recv()
                me.look()
                me.say("leaving")
        except LockLost:
            me.say("loud")
        except EngineError:
            me.failed()
        else:
            me.say("left")
            visits -= 1


async def _suspending(me: _Contender, visits: int) -> None:
    while visits:
        me.fence = 0
        try:
            async with me.lock:
                me.granted()
                await asyncio.to_thread(me.pipe.recv)
                me.say("write")
                await asyncio.to_thread(me.pipe.recv)
                me.look()
                me.say("leaving")
        except LockLost:
            me.say("loud")
        except EngineError:
            me.failed()
        else:
            me.say("left")
            visits -= 1
