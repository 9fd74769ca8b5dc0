"""`python -m chaos`: play rounds on one engine after another, and print what they did and what was wrong."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import pytest

from chaos.engines import ENGINES, World
from chaos.report import Tally, story
from chaos.round import LONG, SHORT, Size, played

_ENOUGH = 12
"""The number of findings after which an engine is not tested further."""


def main() -> int:
    options = argparse.ArgumentParser(prog="make soak", description=__doc__)
    options.add_argument("--engine", action="append", choices=list(ENGINES), help="default: all, one after another")
    options.add_argument("--minutes", type=float, default=5.0, help="for each engine (default: 5)")
    options.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    options.add_argument("--round", type=int, help="play only this round of the seed")
    options.add_argument("--fault", action="append", help="only faults of this kind (more of them: once for each)")
    options.add_argument("--pause", type=float, default=LONG.pause, help="seconds between two calls of each caller")
    options.add_argument("--short", action="store_true", help="rounds as short as those of the tests")
    chosen = options.parse_args()
    size = SHORT if chosen.short else replace(LONG, pause=chosen.pause)
    findings = 0
    for name in chosen.engine or ENGINES:
        print(f"== {name}, seed {chosen.seed}", flush=True)
        try:
            world = ENGINES[name]()
        except (pytest.skip.Exception, pytest.fail.Exception) as missing:
            print(f"left out: {missing}")
            continue
        try:
            findings += _soaked(world, chosen.seed, chosen.round, chosen.minutes * 60, size, chosen.fault or [])
        finally:
            world.close()
    return 1 if findings else 0


def _soaked(world: World, seed: int, only: int | None, seconds: float, size: Size, kinds: list[str]) -> int:
    tally, number, began = Tally(), only or 0, time.monotonic()
    while True:
        try:
            outcome = played(world, seed, number, size, kinds)
        except KeyboardInterrupt:
            break
        tally.add(outcome)
        faults = ", ".join(map(str, outcome.history.faults)) or "no faults"
        print(f"round {number}: {len(outcome.history.calls):,} calls; {faults}", flush=True)
        begin = min((call.began for call in outcome.history.calls.values()), default=0.0)
        for finding in outcome.findings[:_ENOUGH]:
            print("\n".join(story(finding, outcome.history, begin)), flush=True)
        if outcome.findings:
            how = f"--engine {world.name} --seed {seed} --round {number}"
            how += " --short" if size is SHORT else f" --pause {size.pause}" if size.pause != LONG.pause else ""
            how += "".join(f" --fault {kind}" for kind in kinds)
            print(f"{len(outcome.findings)} findings; again with: make soak ARGS='{how}'", flush=True)
        number += 1
        if only is not None or tally.findings >= _ENOUGH or time.monotonic() - began > seconds:
            break
    print("\n".join(tally.lines()), flush=True)
    return tally.findings


if __name__ == "__main__":
    sys.exit(main())
