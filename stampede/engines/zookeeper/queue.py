"""The names of a lock's nodes. They contain everything about a place, so that one list shows holders and waiters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

from stampede.model.lock_queue import admitted

__all__ = ["QueuedNode", "beginning", "inside", "places", "quoted", "unquoted"]

_DIGITS = 10
"""The digits of the number that the server appends to the name of a sequential node."""


class QueuedNode(NamedTuple):
    """A place in a lock's queue: a token that has the lock or waits for it."""

    number: int
    node: str
    token: bytes
    room: float
    lease: float  # the seconds of the lease that was asked for


def beginning(token: bytes, room: float, lease: float) -> str:
    """Return the beginning of a node's name. It contains the token, by which a node is found whose creation got no
    reply."""
    return f"{token.hex()}_{room:.15g}_{lease:.3f}_"


def places(nodes: Iterable[str]) -> list[QueuedNode]:
    """Return the places of a queue, in the order of their creation. A node that another program has made counts as the
    place of an exclusive lock."""
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
    """Return how many places of a queue have the lock: they are the first ones."""
    return admitted(each.room for each in queue)


def quoted(name: str) -> str:
    """Return the name of a lock in a form that is valid as the name of one node."""
    return "n" + quote(name, safe="", errors="surrogatepass")


def unquoted(node: str) -> str:
    return unquote(node[1:], errors="surrogatepass")
