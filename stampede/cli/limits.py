"""`stampede limits`: how much of each limit is used."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from stampede.cli.address import addresses, ask, urls_of_limits
from stampede.cli.show import long, say, shown, table
from stampede.errors import OptionError
from stampede.model.ports import Engine, Rate, Usage
from stampede.runtime.colour import run_blocking

__all__ = ["limits"]


def limits(options: Namespace) -> int:
    """Print all known limits. Return 0 also if there is none."""
    urls = addresses(options, urls_of_limits)
    answers = ask(urls, _listed)
    rows = [(name, on, use.rate, use) for _, on, some in answers.given for name, use in some if use.rate is not None]
    if options.json:
        say(json.dumps([_plain(*each) for each in rows], indent=2))
    elif rows:
        several = len(urls) > 1
        table(
            ["limit", "allowed", "used now", "booked ahead", "penalized for", *(["on"] if several else [])],
            [(shown(name), *_columns(use, rate), *([on] if several else [])) for name, on, rate, use in rows],
        )
    elif answers.given:
        say("no limit is in use" + (f" on {answers.on}" if len(urls) > 1 else ""))
    return answers.end()


def _listed(engine: Engine) -> list[tuple[str, Usage]]:
    limits = engine.blocking.limits
    listed = None if limits is None else run_blocking(limits.listed())
    if listed is None:
        raise OptionError(f"{engine.called} can't list its limits: file, disk, redis, postgres and zmq can")
    return listed


def _plain(name: str, on: str, rate: Rate, use: Usage) -> dict[str, Any]:
    return {
        "name": name,
        "max": rate.most,
        "per": rate.per,
        "used": use.used,
        "ahead": use.ahead,
        "penalized": use.penalized,
        "on": on,
    }


def _columns(use: Usage, rate: Rate) -> tuple[str, ...]:
    allowed, penalty = f"{rate.most} per {rate.per:g} s", long(use.penalized) if use.penalized else "-"
    return allowed, str(use.used), str(use.ahead), penalty
