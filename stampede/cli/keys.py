"""`stampede get`, `stampede keys` and `stampede invalidate`."""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from math import inf
from typing import Any

from stampede.api.status import Holder
from stampede.cli.address import UnreadableEntry, chosen, find, holder, invalidate, invalidate_tags, listed
from stampede.cli.show import long, say
from stampede.errors import OptionError
from stampede.model.entry import Entry

__all__ = ["forget", "get", "keys"]


def get(options: Namespace) -> int:
    """Print a key's value, what is known about it, and which process computes it. Return 1 if there is no value."""
    cache, key, function, as_json = chosen(options), options.key, options.function, options.json
    entry, computing = find(cache.settings, key, function), holder(cache.settings, key, function)
    if as_json:
        say(_json(key, entry, computing))
    elif entry is None:
        say(f"no value is stored under {key!r} in {cache}")
    else:
        say(_shown(entry))
        say(f"  {_facts(entry)}")
    if computing is not None and not as_json:
        say(f"  computed now by {computing}")
    return 0 if entry is not None else 1


def keys(options: Namespace) -> int:
    """Print the keys, one on each line, or as a JSON list. Return 1 if there is none."""
    cache, prefix, tag, found = chosen(options), options.prefix, options.tag, False
    if options.json:
        names = list(listed(cache.settings, prefix, tag))
        say(json.dumps(names, indent=2))
        found = bool(names)
    else:
        for key in listed(cache.settings, prefix, tag):
            say(key)
            found = True
    if not found:
        which = (f" begins with {prefix!r}" if prefix else " is its own") + (f" and carries {tag!r}" if tag else "")
        hint = "To list a function's keys, name it: stampede keys shop.reports:report"
        if ":" in prefix:
            hint = "If that is a function of another cache, name the cache: --cache NAME"
        print(f"stampede: no key of {cache}{which}. {hint}", file=sys.stderr)
    return 0 if found else 1


def forget(options: Namespace) -> int:
    """Invalidate a key, and print whether there was a value; or invalidate what carries one of the tags."""
    cache, key, tags = chosen(options), options.key, options.tag
    if tags:
        if options.function:
            raise OptionError("--function is for KEY: a tag ends what carries it in the whole cache")
        invalidate_tags(cache.settings, tags)
        which = " or ".join(map(repr, tags))
        say(f"what carries {which} was removed from {cache}; what is being computed for it will not be stored")
        return 0
    there = invalidate(cache.settings, key, options.function)
    nothing = f"no value was stored under {key!r} in {cache}; a computation under way will not be stored"
    say(f"{key!r} was removed from {cache}" if there else nothing)
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
        raise TypeError(f"JSON has no form for a {type(value).__name__}")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _json(key: str, entry: Entry[Any] | None, lease: Holder | None) -> str:
    """Return an entry and its lease as one JSON object. A duration without an end is null."""
    computed = {} if lease is None else {"holder": {"host": lease.host, "pid": lease.pid, "lease": lease.lease}}
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
        raise OptionError(f"the value can't be written as JSON ({error}): leave --json out") from error
