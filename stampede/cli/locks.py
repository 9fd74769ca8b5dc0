"""`stampede locks`: the locks that are held, their holders, and the record of locks that were held before."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import inf
from typing import Any

from stampede.cli.address import EngineAnswer, addresses, ask, engine_at, urls_of_locks
from stampede.cli.show import long, say, shown, table
from stampede.errors import OptionError
from stampede.locks.holding import holds_of
from stampede.model.ports import Engine, Held, Released, Reports
from stampede.runtime.colour import run_blocking

__all__ = ["locks"]


def locks(options: Namespace) -> int:
    """Print the locks that are held, or the record of locks, or take a lock from its holder."""
    if not options.history and (options.failed or options.since is not None):
        raise OptionError("--failed and --since select from the record: give --history, too")
    if options.name is not None and (options.history or options.json):
        raise OptionError("--break takes a lock from its holder, and shows nothing: leave --history and --json out")
    urls = addresses(options, urls_of_locks)
    if options.name is not None:
        return break_lock(urls, options.name)
    if not options.history:
        return held_now(urls, as_json=options.json)
    since = inf if options.since is None else options.since
    return history(urls, failed=options.failed, since=since, most=options.most, as_json=options.json)


def held_now(urls: Sequence[str], *, as_json: bool) -> int:
    """Print the locks that are held. Return 0 also if there is none."""
    answers = ask(urls, _held)
    held = [(on, each) for _, on, (some, _) in answers.given for each in some]
    held.sort(key=lambda each: (each[1].since or inf, each[1].name))
    if as_json:
        return _print_json(held) or answers.end()
    grace = {server: left for each in answers.given for server, left in each.answer[1].items()}
    for server, left in grace.items():
        say(f"{server} has just been started, and for another {long(left)} grants only what was held before")
    if not held and answers.given:
        known = "no lock is known to be held" if grace else "no lock is held"
        say(known + (f" on {answers.on}" if len(urls) > 1 else ""))
    if held:
        _print_held(held, several=len(urls) > 1)
    return answers.end()


def _print_held(held: Sequence[tuple[str, Held]], *, several: bool) -> None:
    table(
        ["lock", "held by", "program", "since", "for", "lease left", "waiting", *(["on"] if several else [])],
        [
            (
                shown(each.name), _place(each), shown(each.program or "?"), _moment(each.since),
                "?" if each.seconds is None else long(each.seconds), long(each.lease),
                "?" if each.waiting is None else str(each.waiting), *([on] if several else []),
            )
            for on, each in held
        ],
    )  # fmt: skip


def break_lock(urls: Sequence[str], name: str) -> int:
    """Take a lock from its holders. Return 1 if there is none. They learn of it as of any other lost lock."""
    answers = ask(urls, lambda engine: _inside(engine, name))
    places = [each for each in answers.given if each.answer]
    if len(places) > 1:
        both = " and ".join(each.on for each in places)
        raise OptionError(f"the lock {shown(name)} is held on {both}: give the address of the one that you mean")
    taken = sum(_broken(each.url, name) for each in places)
    if taken:
        say(f"the lock {shown(name)} was taken from {taken} holder(s){_at(places, urls)}")
        say("code that still runs under it learns of the loss at the lock's next renewal, or at the end of its block")
    else:
        say(f"no process holds the lock {shown(name)}{_at(answers.given, urls)}")
    answers.end(refusals=not taken)
    return int(not taken)


def _broken(url: str, name: str) -> int:
    with engine_at(url) as whole:
        engine = whole.lock_engine
        if engine.blocking.locks is None or not engine.breaks:
            raise OptionError(f"a lock of {engine.called} can't be taken from its holder: end that process")
        return sum(run_blocking(engine.blocking.locks.release(name, token)) for token in _inside(engine, name))


def _inside(engine: Engine, name: str) -> list[bytes]:
    return [token for token, _ in run_blocking(holds_of(engine).holder(name)) if token]


def _at(places: Sequence[EngineAnswer[Any]], asked: Sequence[str]) -> str:
    return f" on {' or '.join(each.on for each in places)}" if len(asked) > 1 and places else ""


def history(urls: Sequence[str], *, failed: bool, since: float, most: int, as_json: bool) -> int:
    """Print the record of locks, newest first."""
    answers = ask(urls, lambda engine: run_blocking(_reports(engine).released(failed=failed, since=since, most=most)))
    missing = answers.end(refusals=False)
    if not answers.given and not missing:
        raise OptionError("none of these engines keeps a record of its locks: postgres:// does")
    released = [(on, each) for _, on, some in answers.given for each in some]
    released.sort(key=lambda each: each[1].released, reverse=True)
    del released[most:]
    if as_json:
        return _print_json(released) or missing
    if not released:
        say("no lock in the record had a problem" if failed else "no lock is in the record")
        return missing
    table(
        ["lock", "held by", "program", "taken", "for", "problem", "what was said"],
        [
            (
                shown(each.name), _place(each), shown(each.program or "?"), _moment(each.taken),
                "?" if each.taken is None else long(each.released - each.taken), each.problem or "none", _said(each),
            )
            for _, each in released
        ],
    )  # fmt: skip
    if len(released) == most:
        say(f"only the last {most}: --most shows more, and --json all that is known about each")
    return missing


def _held(engine: Engine) -> tuple[list[Held], Mapping[str, float]]:
    """Return the locks that are held; and the servers that may not know all locks yet, with how long that lasts."""
    found, grace = run_blocking(holds_of(engine).held()), engine.lock_engine.grace()
    if found is None:
        raise OptionError(f"{engine.called} can't list its locks")
    return list(found), grace


def _reports(whole: Engine) -> Reports:
    engine = whole.lock_engine
    if engine.reports is None:
        raise OptionError(f"{engine.called} keeps no record of its locks: postgres:// does")
    return engine.reports


def _print_json(rows: Sequence[tuple[str, Held | Released]]) -> int:
    say(json.dumps([_plain({**asdict(each), "on": on}) for on, each in rows], indent=2))
    return 0


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    for name in ("since", "taken", "released"):
        if fields.get(name) is not None:
            fields[name] = datetime.fromtimestamp(fields[name], UTC).isoformat()
    return fields


def _place(each: Held | Released) -> str:
    return shown(f"{each.host or '?'}:{each.pid or '?'}")


def _moment(seconds: float | None) -> str:
    return "?" if seconds is None else f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"


def _said(each: Released) -> str:
    lines = [line for line in (each.message or "").splitlines() if line.strip()]
    return shown(": ".join(filter(None, [each.exception, lines[0] if lines else ""])))[:200]
