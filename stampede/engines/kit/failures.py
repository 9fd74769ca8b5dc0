"""What failed computations leave behind for a key, as bytes, for engines that have no other place for it. Moments are
stored as lags behind a moment that the reader knows too, such as the end of the record around the bytes."""

from __future__ import annotations

import json
from math import inf

from stampede.model.entry import Verdict
from stampede.model.record import Past

__all__ = ["decode_past", "encode_past"]

FOREVER = 1e9
"""Longest rest of a key, in seconds."""

NAME = 200
"""Longest name of an error's type."""


def encode_past(past: Past, now: float, since: float, longest: int, most: int) -> bytes:
    """Return the rest and the latest verdicts as bytes: at most `most` verdicts, each message cut to `longest`
    characters."""
    verdicts = [(token, verdict, end) for token, (verdict, end) in past.verdicts.items() if end > now][-most:]
    lags = [[token.hex(), since - end, *_cut(verdict, longest)] for token, verdict, end in verdicts]
    rest = since - min(past.rest, now + FOREVER) if past.rest > now else None
    return json.dumps([rest, _cut(past.why, longest), lags]).encode()


def _cut(verdict: Verdict, longest: int) -> list[str]:
    return [verdict.kind, verdict.type_name[:NAME], verdict.message[:longest]]


def decode_past(failures: bytes, since: float) -> Past:
    """Return what `encode_past` wrote. Raise ValueError, TypeError or the like if these bytes are something else."""
    rest, why, lags = json.loads(failures)
    verdicts = {
        bytes.fromhex(token): (Verdict(*map(str, verdict)), _moment(since, lag)) for token, lag, *verdict in lags
    }
    return Past(verdicts, -inf if rest is None else _moment(since, rest), Verdict(*map(str, why)))


def _moment(since: float, lag: float) -> float:
    if not -FOREVER <= lag < inf:
        raise ValueError("for ever")
    return since - lag
