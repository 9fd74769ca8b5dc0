"""What failed computations have left of a key, as bytes, for engines that keep nothing else.

Its moments are told as lags behind one that its reader can tell, too, such as the end of what they are kept in.
"""

from __future__ import annotations

import json
from math import inf

from stampede.model.entry import Verdict
from stampede.model.record import Past

__all__ = ["heard", "told"]

FOREVER = 1e9
"""Seconds for which a key rests at most."""

NAME = 200
"""How long the name of an error's type may be, at most."""


def told(past: Past, now: float, since: float, longest: int, most: int) -> bytes:
    """The rest, and as many verdicts as that, the latest; their messages no longer than this."""
    verdicts = [(token, verdict, end) for token, (verdict, end) in past.verdicts.items() if end > now][-most:]
    lags = [[token.hex(), since - end, *_cut(verdict, longest)] for token, verdict, end in verdicts]
    rest = since - min(past.rest, now + FOREVER) if past.rest > now else None
    return json.dumps([rest, _cut(past.why, longest), lags]).encode()


def _cut(verdict: Verdict, longest: int) -> list[str]:
    return [verdict.kind, verdict.type_name[:NAME], verdict.message[:longest]]


def heard(failures: bytes, since: float) -> Past:
    """ValueError, TypeError and the like, where that is none."""
    rest, why, lags = json.loads(failures)
    verdicts = {
        bytes.fromhex(token): (Verdict(*map(str, verdict)), _moment(since, lag)) for token, lag, *verdict in lags
    }
    return Past(verdicts, -inf if rest is None else _moment(since, rest), Verdict(*map(str, why)))


def _moment(since: float, lag: float) -> float:
    if not -FOREVER <= lag < inf:
        raise ValueError("for ever")
    return since - lag
