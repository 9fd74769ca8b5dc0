"""`stampede get`, `stampede keys` and `stampede invalidate`."""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from math import inf
from typing import Any

from stampede.api.status import Holder
from stampede.cli.address import UnreadableEntry, chosen, find, holder, invalidate, listed
from stampede.cli.show import long, say
from stampede.errors import OptionError
from stampede.model.entry import Entry

__all__ = ["forget", "get", "keys"]


def get(options: Namespace) -> int:
    """Print the value and what is known about it, and who computes it; 1 if there is none."""
    cache, key, function, as_json = chosen(options), options.key, options.function, options.json
    entry, who = find(cache.settings, key, function), holder(cache.settings, key, function)
    if as_json:
        say(_json(key, entry, who))
    elif entry is None:
        say(f"nothing is kept under {key!r} in {cache}")
    else:
        say(_shown(entry))
        say(f"  {_facts(entry)}")
    if who is not None and not as_json:
        say(f"  computed now by {who}")
    return 0 if entry is not None else 1


def keys(options: Namespace) -> int:
    """Print the keys, one a line, or a list of them; 1 if there is none."""
    cache, prefix, found = chosen(options), options.prefix, False
    if options.json:
        names = list(listed(cache.settings, prefix))
        say(json.dumps(names, indent=2))
        found = bool(names)
    else:
        for key in listed(cache.settings, prefix):
            say(key)
            found = True
    if not found:
        begin = f" begins with {prefix!r}" if prefix else ""
        hint = "To list a function's keys, name it: stampede keys shop.reports:report"
        if ":" in prefix:
            hint = "If that is a function of another cache, name the cache: --cache NAME"
        print(f"stampede: no key of {cache}{begin or ' is its own'}. {hint}", file=sys.stderr)
    return 0 if found else 1


def forget(options: Namespace) -> int:
    """Invalidate, and say whether there was a value."""
    cache, key = chosen(options), options.key
    there = invalidate(cache.settings, key, options.function)
    nothing = f"nothing was kept under {key!r} in {cache}; a computation under way is not stored"
    say(f"{key!r} is gone from {cache}" if there else nothing)
    return 0


def _shown(entry: Entry[Any]) -> str:
    if isinstance(entry.value, UnreadableEntry):
        return f"(a value that can't be read here: {entry.value.why})"
    if entry.raised:
        name, arguments = entry.value[:2]
        return f"raises {name}{tuple(arguments)!r}"
    return repr(entry.value)


def _facts(entry: Entry[Any]) -> str:
    facts = [f"stored {long(entry.ttl - entry.fresh)} ago"] if 0 < entry.fresh < inf else []
    facts.append(f"fresh for {long(entry.fresh)}" if entry.fresh > 0 else f"stale since {long(-entry.fresh)}")
    facts.append(f"kept for {long(entry.keep)}")
    facts += [f"took {entry.cost:.3g} s to compute"] if entry.cost else []
    return ", ".join(facts)


def _object(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _json(key: str, entry: Entry[Any] | None, who: Holder | None) -> str:
    """One object; a duration that has no end is null."""
    computed = {} if who is None else {"holder": {"host": who.host, "pid": who.pid, "lease": who.lease}}
    if entry is None:
        return json.dumps({"key": key, "found": False, **computed})
    if isinstance(entry.value, UnreadableEntry):
        raise OptionError(f"the value can't be read here: {entry.value.why}")
    durations = {name: getattr(entry, name) for name in ("fresh", "keep", "ttl", "cost", "margin")}
    facts = {name: None if seconds == inf else round(seconds, 6) for name, seconds in durations.items()}
    try:
        return json.dumps(
            {"key": key, "found": True, "value": entry.value, "raised": entry.raised, **facts, **computed},
            allow_nan=False,
            default=_object,
        )
    except (TypeError, ValueError) as error:
        raise OptionError(f"the value is no JSON ({error}): leave --json out") from error
