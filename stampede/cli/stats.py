"""`stampede stats`: what an engine or its servers say of themselves at this moment, whoever stored what they hold."""

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
    """Print the facts of each server; of `disk://`, of its directory."""
    with cache_of(chosen(options).settings) as cache:
        facts = cache.engine.facts()
        if not facts:
            raise OptionError(
                f"{cache.engine.called} isn't asked for what it holds: its own tools tell; and what one process has of "
                "it, that process does, by get_cache().stats()"
            )
    if options.json:
        named = {name: {re.sub(r"\W+", "_", what): each for what, each in its.items()} for name, its in facts.items()}
        say(json.dumps(named, indent=2))
        return 0
    for name, its in facts.items():
        say(name)
        table(["", "now"], [(what, _text(value)) for what, value in its.items()])
    return 0


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else value or "no limit"
