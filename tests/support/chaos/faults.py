"""What goes wrong, and when: drawn from the seed, done to the servers and the processes one after another."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Effect", "Fault", "Planned", "planned"]


class Planned(NamedTuple):
    """One fault of a round's schedule."""

    at: float  # seconds after the round's begin
    kind: str
    seconds: float
    chance: float  # 0 to 1, for what else it has to choose
    other: float  # the same once more


class Effect(NamedTuple):
    """What a kind of fault may do to callers, by what the docs say of it."""

    weight: float
    seconds: tuple[float, float]  # how long it lasts
    after: float  # seconds beyond its end in which its traces may be seen
    keeps: bool = True  # the engine forgets nothing, no lock either
    forgets: bool = False  # the engine may even forget changes that it has acknowledged, and have old values again
    again: bool = False  # and forgets more than once in a moment, perhaps which keys are the ones of today
    hides: bool = True  # engine or link can't be used, or have lost leases: no promise about other processes holds
    silent: bool = False  # and a connection stands that says nothing: who waits for news hears of that late
    unseen: float = 0.0  # seconds for which readers may go on with what there was
    lurks: bool = False  # it is met by who reads there, perhaps much later
    step: bool = False  # a clock was set: what is old can't be told


@dataclass
class Fault:
    """One that was done."""

    kind: str
    target: str
    began: float
    ended: float
    until: float  # its traces are gone then
    effect: Effect
    worker: str | None = None  # the only process that it concerns

    def __str__(self) -> str:
        return f"{self.kind} {self.target}".strip()


def planned(dice: random.Random, effects: Mapping[str, Effect], seconds: float, scale: float = 1.0) -> list[Planned]:
    """Faults for a round of so many seconds; its last third is left in peace."""
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
