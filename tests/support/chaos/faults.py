"""The faults of a round: drawn from the seed, and applied to the servers and the processes one after another."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Effect", "Fault", "Planned", "planned"]


class Planned(NamedTuple):
    """One fault of a round's schedule."""

    at: float  # seconds after the start of the round
    kind: str
    seconds: float
    chance: float  # 0 to 1, for any other choice that the fault needs
    other: float  # 0 to 1, for a second choice


class Effect(NamedTuple):
    """The effects that a kind of fault may have on callers, according to the docs."""

    weight: float
    seconds: tuple[float, float]  # shortest and longest duration
    after: float  # seconds after its end in which callers may still notice it
    keeps: bool = True  # the engine loses nothing, not even locks
    forgets: bool = False  # the engine may lose changes that it has acknowledged, and return old values again
    again: bool = False  # the engine loses data repeatedly, perhaps also the current generations
    hides: bool = True  # the engine or link fails, or leases are lost: promises about other processes do not hold
    silent: bool = False  # a connection stays open without data: its listeners notice the fault late
    unseen: float = 0.0  # seconds for which readers may still return the old value
    lurks: bool = False  # a process notices it only when it reads there, perhaps much later
    step: bool = False  # a clock was set: the age of a value is unknown


@dataclass
class Fault:
    """A fault that was applied."""

    kind: str
    target: str
    began: float
    ended: float
    until: float  # callers no longer notice it after this moment
    effect: Effect
    worker: str | None = None  # the only process that it affects

    def __str__(self) -> str:
        return f"{self.kind} {self.target}".strip()


def planned(dice: random.Random, effects: Mapping[str, Effect], seconds: float, scale: float = 1.0) -> list[Planned]:
    """Faults for a round of this many seconds. The last third of the round has none."""
    schedule, at = [], 0.1 + dice.random() * scale
    while True:
        kind = dice.choices(list(effects), [effect.weight for effect in effects.values()])[0]
        low, high = effects[kind].seconds
        length = dice.uniform(low, high) * scale
        fault = Planned(at, kind, length, dice.random(), dice.random())
        if at + length > seconds * 0.6:
            if schedule:
                return schedule
            fault = fault._replace(at=seconds * 0.1, seconds=seconds * 0.3)
        schedule.append(fault)
        at = fault.at + fault.seconds + dice.uniform(0.2, 3.0) * scale
