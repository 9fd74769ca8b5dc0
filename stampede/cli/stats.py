"""`stampede stats`: what an engine or its servers hold now, whichever process stored it."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from typing import Any

from stampede.cli.address import cache_of, chosen
from stampede.cli.show import say, table
from stampede.errors import OptionError

__all__ = ["stats"]


def stats(options: Namespace) -> int:
    """Print the facts about each server, or about the directory of `disk://`."""
    with cache_of(chosen(options).settings) as cache:
        facts = cache.engine.facts()
        if not facts:
            raise OptionError(
                f"{cache.engine.called} can't say what it holds: use its own tools; for one process's counts, call "
                "get_cache().stats() in that process"
            )
    if options.json:
        named = {
            name: {re.sub(r"\W+", "_", what): each for what, each in values.items()} for name, values in facts.items()
        }
        say(json.dumps(named, indent=2))
        return 0
    for name, values in facts.items():
        say(name)
        table(["", "now"], [(what, _text(value)) for what, value in values.items()])
    return 0


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else value or "no limit"
