"""What stands in the names of a lock's nodes, so that one list of them says who is inside, and who waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple
from urllib.parse import quote, unquote

__all__ = ["Place", "beginning", "inside", "places", "quoted", "unquoted"]

_DIGITS = 10
"""Of the number that the server appends."""


class Place(NamedTuple):
    """Who has a place in a lock's queue, and may be inside."""

    number: int
    node: str
    token: bytes
    room: float
    lease: float  # seconds that were asked for


def beginning(token: bytes, room: float, lease: float) -> str:
    """Of the name of a node. The token is in it, so that one whose creation had no answer is found again."""
    return f"{token.hex()}_{room:.15g}_{lease:.3f}_"


def places(nodes: Iterable[str]) -> list[Place]:
    """In the order of their creation. What others have made there may be anything: it is a holder like any other."""
    return sorted(map(_place, nodes))


def _place(node: str) -> Place:
    digits = node[-_DIGITS:]
    number = int(digits) if len(digits) == _DIGITS and digits.isdecimal() else -1
    try:
        token, room, lease, _ = node.split("_")
        return Place(number, node, bytes.fromhex(token), float(room), float(lease))
    except ValueError:
        return Place(number, node, node.encode(), 1.0, 1.0)


def inside(queue: Sequence[Place]) -> int:
    """How many are: the one at index i is, if i is less than the rooms of all up to it; nobody is behind one that
    isn't."""
    least = inf
    for index, each in enumerate(queue):
        least = min(least, each.room)
        if index >= least:
            return index
    return len(queue)


def quoted(name: str) -> str:
    """A name of anybody's as that of one node."""
    return "n" + quote(name, safe="", errors="surrogatepass")


def unquoted(node: str) -> str:
    return unquote(node[1:], errors="surrogatepass")
