"""What the reply to each command looks like. One of another shape is a reply to something else: out of step. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["COMMANDS", "SCRIPTS", "Shape", "is_number"]

Shape: TypeAlias = Callable[[Any], bool]

_ENTRY = 50  # bytes of ours before the value: see wire.py
_FOUND, _GRANTED, _BUSY, _FAILED, _REFUSED, _LARGE = range(6)
_DAMAGED = -3


def is_number(reply: Any) -> bool:
    return type(reply) is int


def _done(reply: Any) -> bool:
    return bool(reply == b"OK")


def _text(reply: Any) -> bool:
    return reply is None or type(reply) is bytes


def _texts(reply: Any) -> bool:
    return type(reply) is list and len(reply) >= 2 and all(type(text) is bytes for text in reply)


def _some(reply: Any) -> bool:
    return type(reply) is list


def _entry(reply: Any) -> bool:
    return type(reply) is bytes and len(reply) >= _ENTRY


def _kept(reply: Any) -> bool:
    return reply is None or reply in ([], [_DAMAGED]) or (
        type(reply) is list and len(reply) == 2 and type(reply[0]) is int and _entry(reply[1])
    )  # fmt: skip


def _claimed(reply: Any) -> bool:
    if type(reply) is not list or not reply or type(reply[0]) is not int:
        return False
    # All of it compared in one step: every hit's reply is looked at here.
    return (reply[0], *map(type, reply)) in _CLAIMED and (reply[2] is None or len(reply[2]) >= _ENTRY)


_CLAIMED = {
    (what, int, int, entry, *more)
    for what, more, entries in (
        (_FOUND, (), (bytes,)),
        (_GRANTED, (), (bytes, type(None))),
        (_BUSY, (bytes, int), (bytes, type(None))),
        (_FAILED, (bytes, int), (bytes, type(None))),
        (_REFUSED, (bytes,), (bytes, type(None))),
        (_LARGE, (), (type(None),)),
    )
    for entry in entries
}
"""What a claim's answer is, and of which types its parts are."""


def _locked(reply: Any) -> bool:
    """{1, fence} or {0, token, ms left, how many are before it}."""
    if type(reply) is not list or len(reply) < 2 or type(reply[0]) is not int:
        return False
    told, *more = reply[1:]
    if reply[0]:
        return type(told) is int and not more
    return type(told) is bytes and len(more) == 2 and all(type(each) is int for each in more)


def _inside(reply: Any) -> bool:
    """{how many wait, microseconds, and of each: token, ms left, fence, who it is}."""
    kinds = [type(each) for each in reply] if type(reply) is list else []
    return len(kinds) % 4 == 2 and kinds == [int, int] + [bytes, int, int, bytes] * (len(kinds) // 4)


def _limited(reply: Any) -> bool:
    """{delay, 1 if it is booked, when} or {now, window}."""
    return type(reply) is list and [type(each) for each in reply] in ([int, int, int], [int, bytes])


SCRIPTS: dict[str, Shape] = {
    "claim": _claimed,
    "get": _kept,
    "acquire": _locked,
    "generation": _texts,
    "holder": _inside,
    "limit": _limited,
}
"""By verb; all others answer with a number."""

COMMANDS: dict[bytes, Shape] = {
    b"GET": _text,
    b"GETEX": _text,
    b"PTTL": is_number,
    b"SET": _done,
    b"ASKING": _done,
    b"CLIENT": _done,
    b"CLUSTER": _some,
}
