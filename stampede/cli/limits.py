"""`stampede limits`: what is used of each."""

from __future__ import annotations

import json

from stampede.cli.keys import long
from stampede.cli.screen import Screen
from stampede.colour import run_blocking
from stampede.engines import open_engine
from stampede.errors import OptionError
from stampede.ports import Rate, Usage

__all__ = ["limits"]


def limits(screen: Screen, url: str, *, as_json: bool) -> int:
    """Print the limits of which anything is known; 0 also if there is none."""
    engine = open_engine(url)
    try:
        listed = None if engine.limits is None else run_blocking(engine.limits.listed())
    finally:
        engine.close()
    if listed is None:
        raise OptionError(f"{engine.called} can't list its limits: file, disk, redis and postgres can")
    if as_json:
        rows = [
            {
                "name": name,
                "max": its.rate.most,
                "per": its.rate.per,
                "used": its.used,
                "ahead": its.ahead,
                "penalized": its.penalized,
            }
            for name, its in listed
            if its.rate is not None
        ]
        screen.say(json.dumps(rows, indent=2))
        return 0
    if not listed:
        screen.say("no limit is in use")
        return 0
    screen.table(
        ["limit", "allowed", "used now", "booked ahead", "penalized for"],
        [(_shown(name), *_told(its, its.rate)) for name, its in listed if its.rate is not None],
    )
    return 0


def _told(its: Usage, rate: Rate) -> tuple[str, ...]:
    allowed, penalty = f"{rate.most} per {rate.per:g} s", long(its.penalized) if its.penalized else "-"
    return allowed, str(its.used), str(its.ahead), penalty


def _shown(name: str) -> str:
    """Without what would move a terminal's cursor: names are anybody's."""
    return name if name.isprintable() else ascii(name)[1:-1]
