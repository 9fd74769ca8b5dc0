"""`stampede stats`: what an engine or its servers say of themselves at this moment, whoever stored what they hold."""

from __future__ import annotations

import json
import re
from typing import Any

from stampede.cli.address import cache_of
from stampede.cli.show import say, table
from stampede.errors import OptionError
from stampede.settings import CacheSettings

__all__ = ["stats"]


def stats(settings: CacheSettings, *, as_json: bool) -> int:
    """Print the facts of each server; of `disk://`, of its directory."""
    with cache_of(settings) as cache:
        facts = cache.engine.facts()
        if not facts:
            raise OptionError(
                f"{cache.engine.called} isn't asked for what it holds: its own tools tell; and what one process has of "
                "it, that process does, by get_cache().stats()"
            )
    if as_json:
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
