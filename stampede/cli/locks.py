"""`stampede locks`: who holds what since when, and how locks were held before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import inf
from typing import Any

from stampede.cli.address import engine_of_locks
from stampede.cli.keys import long
from stampede.cli.screen import Screen
from stampede.colour import run_blocking
from stampede.errors import OptionError
from stampede.hands import holds_of
from stampede.ports import Engine, Held, Holds, Released, Reports

__all__ = ["break_lock", "history", "locks"]


def locks(screen: Screen, url: str, *, as_json: bool) -> int:
    """Print the locks that are held; 0 also if there is none."""
    with engine_of_locks(url) as engine:
        found = run_blocking(_holds(engine).held())
        if found is None:
            raise OptionError(f"{engine.called} can't list its locks")
    held = sorted(found, key=lambda each: (each.since or inf, each.name))
    if as_json:
        return _print_json(screen, held)
    if not held:
        screen.say("no lock is held")
        return 0
    screen.table(
        ["lock", "held by", "program", "since", "for", "lease left", "waiting"],
        [
            (
                _shown(each.name), _place(each), _shown(each.program or "?"), _moment(each.since),
                "?" if each.seconds is None else long(each.seconds), long(each.lease),
                "?" if each.waiting is None else str(each.waiting),
            )
            for each in held
        ],
    )  # fmt: skip
    return 0


def break_lock(screen: Screen, url: str, name: str) -> int:
    """Take it from those who have it; 1 if nobody does. They are told as of any lock that is lost."""
    with engine_of_locks(url) as engine:
        holds = _holds(engine)
        if engine.locks is None or not engine.breaks:
            raise OptionError(f"nobody can take a lock of {engine.called} from its holder: end that process")
        inside = run_blocking(holds.holder(name))
        broken = [run_blocking(engine.locks.release(name, token)) for token, _ in inside]
    if not any(broken):
        screen.say(f"nobody has the lock {_shown(name)}")
        return 1
    screen.say(f"the lock {_shown(name)} is taken from {sum(broken)} who had it: what they do under it goes on, and")
    screen.say("they are told at its next renewal, and at the end of their blocks")
    return 0


def history(screen: Screen, url: str, *, failed: bool, since: float, most: int, as_json: bool) -> int:
    """Print the record, newest first."""
    with engine_of_locks(url) as engine:
        reports = _reports(engine.reports, engine.called)
        released = run_blocking(reports.released(failed=failed, since=since, most=most))
    if as_json:
        return _print_json(screen, released)
    if not released:
        screen.say("nothing has failed" if failed else "nothing is in the record")
        return 0
    screen.table(
        ["lock", "held by", "program", "taken", "for", "problem", "what was said"],
        [
            (
                _shown(each.name) + (" (computed)" if each.kind == "computation" else ""), _place(each),
                _shown(each.program or "?"), _moment(each.taken),
                "?" if each.taken is None else long(each.released - each.taken), each.problem or "none", _said(each),
            )
            for each in released
        ],
    )  # fmt: skip
    if len(released) == most:
        screen.say(f"the last {most}; --most tells more, and --json all that is known of each")
    return 0


def _holds(engine: Engine) -> Holds:
    if not engine.shared:
        raise OptionError(f"{engine.called} lives inside each process: from here there is nothing of it to be seen")
    return holds_of(engine)


def _reports(reports: Reports | None, called: str) -> Reports:
    if reports is None:
        raise OptionError(f"{called} keeps no record of its locks: postgres:// does")
    return reports


def _print_json(screen: Screen, rows: Sequence[Held | Released]) -> int:
    """A list of objects; moments in ISO 8601."""
    screen.say(json.dumps([_plain(asdict(each)) for each in rows], indent=2))
    return 0


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    for name in ("since", "taken", "released"):
        if fields.get(name) is not None:
            fields[name] = datetime.fromtimestamp(fields[name], UTC).isoformat()
    return fields


def _place(each: Held | Released) -> str:
    return _shown(f"{each.host or '?'}:{each.pid or '?'}")


def _moment(seconds: float | None) -> str:
    return "?" if seconds is None else f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"


def _said(each: Released) -> str:
    lines = [line for line in (each.message or "").splitlines() if line.strip()]
    return _shown(": ".join(filter(None, [each.exception, lines[0] if lines else ""])))[:200]


def _shown(text: str) -> str:
    """Without what would move a terminal's cursor, or change its colours: names are anybody's."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
