"""`stampede stats`: what an engine or its servers hold now, whichever process stored it."""

from __future__ import annotations

import json
import re
import time
from argparse import Namespace
from itertools import count
from typing import Any

from stampede.api.cache import Cache
from stampede.cli.address import cache_of, chosen
from stampede.cli.show import say, table
from stampede.errors import OptionError

__all__ = ["print_facts", "stats"]


def stats(options: Namespace) -> int:
    """Print the facts about each server, or about the directory of `disk://`."""
    with cache_of(chosen(options).settings) as cache:
        if not options.json:
            print_facts(cache, options.every)
            return 0
        named = {
            name: {re.sub(r"\W+", "_", what): each for what, each in values.items()}
            for name, values in _facts(cache).items()
        }
        say(json.dumps(named, indent=2))
    return 0


def print_facts(cache: Cache, every: float | None = None, most: int | None = None) -> None:
    """Print what the engine holds; `every` so many seconds again, with the changes per second, `most` times."""
    before: dict[str, dict[str, Any]] = {}
    for turn in count(1):
        facts = _facts(cache)
        for name, values in facts.items():
            say(name)
            rows = [(what, _text(value)) for what, value in values.items()]
            if every is None or not before:
                table(["", "now"], rows)
            else:
                rates = [_rate(value, before.get(name, {}).get(what), every) for what, value in values.items()]
                table(["", "now", "per second"], [(*row, rate) for row, rate in zip(rows, rates, strict=True)])
        if every is None or turn == most:
            return
        before = facts
        time.sleep(every)
        say()


def _facts(cache: Cache) -> dict[str, dict[str, Any]]:
    facts = cache.engine.facts()
    if not facts:
        raise OptionError(
            f"{cache.engine.called} can't say what it holds: use its own tools; for one process's counts, call "
            "get_cache().stats() in that process"
        )
    return {name: dict(values) for name, values in facts.items()}


def _rate(now: Any, before: Any, every: float) -> str:
    if isinstance(now, (int, float)) and isinstance(before, (int, float)) and now != before:
        return f"{(now - before) / every:+,.1f}"
    return ""


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else value or "no limit"
