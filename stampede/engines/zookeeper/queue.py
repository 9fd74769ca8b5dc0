"""What stands in the names of a lock's nodes, so that one list of them says who is inside, and who waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

from stampede.model.room import admitted

__all__ = ["QueuedNode", "beginning", "inside", "places", "quoted", "unquoted"]

_DIGITS = 10
"""Of the number that the server appends."""


class QueuedNode(NamedTuple):
    """A token that has the lock, or waits for it."""

    number: int
    node: str
    token: bytes
    room: float
    lease: float  # seconds that were asked for


def beginning(token: bytes, room: float, lease: float) -> str:
    """Of the name of a node. The token is in it, so that one whose creation had no answer is found again."""
    return f"{token.hex()}_{room:.15g}_{lease:.3f}_"


def places(nodes: Iterable[str]) -> list[QueuedNode]:
    """In the order of their creation. What others have made there may be anything: it is a holder like any other."""
    return sorted(map(_place, nodes))


def _place(node: str) -> QueuedNode:
    digits = node[-_DIGITS:]
    number = int(digits) if len(digits) == _DIGITS and digits.isdecimal() else -1
    try:
        token, room, lease, _ = node.split("_")
        return QueuedNode(number, node, bytes.fromhex(token), float(room), float(lease))
    except ValueError:
        return QueuedNode(number, node, node.encode(), 1.0, 1.0)


def inside(queue: Sequence[QueuedNode]) -> int:
    """Return how many of a queue have the lock: the first ones."""
    return admitted(each.room for each in queue)


def quoted(name: str) -> str:
    """A name of anybody's as that of one node."""
    return "n" + quote(name, safe="", errors="surrogatepass")


def unquoted(node: str) -> str:
    return unquote(node[1:], errors="surrogatepass")
