"""What we touch of redis-py's connections that is its own, and nowhere else; seen in 5.3 to 8.1 (`make oldest`).

The library makes a connection, encrypts and logs in; from there on it is ours: its commands and replies are sent and
read without the library's own buffers, retries and warnings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from stampede.engines.kit.replies import MORE, OutOfStep

__all__ = ["packer", "parser", "refusal", "socket_of", "streams_of", "take_streams"]


def socket_of(connection: Any) -> Any:
    """`_sock`, of a connection of the blocking side; None before it is connected. There is no other way to wait for it
    together with others."""
    return connection._sock


def streams_of(connection: Any) -> tuple[Any, Any]:
    """`_reader` and `_writer`, of the suspending side: we go on with their transport."""
    return connection._reader, connection._writer


def take_streams(connection: Any) -> None:
    """From it, by who has kept them: the library would warn that they were not closed."""
    connection._reader = connection._writer = None


def packer() -> Callable[[tuple[bytes, ...]], bytes]:
    """Return hiredis' function that makes of a command what is sent."""
    from hiredis import pack_command

    return cast(Any, pack_command)  # type: ignore[no-any-return]


def parser(refused: Callable[[str], Exception]) -> Any:
    """hiredis' parser of RESP2 and of RESP3's pushes. A server's refusal is returned as an exception, not raised."""
    from hiredis import Reader

    return Reader(protocolError=OutOfStep, replyError=refused, notEnoughData=MORE)


def refusal(connection: Any) -> Any:
    """What makes an exception of a server's refusal, as `_parser.parse_error` does: the library's own kinds, by the
    first word. Before 6.0 those of clusters are known to its parser of clusters only."""
    from redis import exceptions

    made = connection._parser.parse_error
    kinds = {
        "ASK": exceptions.AskError,
        "CLUSTERDOWN": exceptions.ClusterDownError,
        "MOVED": exceptions.MovedError,
        "TRYAGAIN": exceptions.TryAgainError,
    }

    def refused(text: str) -> Exception:
        word, _, rest = text.partition(" ")
        kind: Any = kinds.get(word)
        error: Exception = made(text) if kind is None else kind(rest)
        return error

    return refused
