"""The private parts of redis-py that are used, and nowhere else; present in 5.3 to 8.1 (`make oldest`). The library
makes a connection, encrypts and logs in. From then on commands and replies are sent and read here, without the
library's buffers, retries and warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from stampede.engines.kit.replies import MORE, OutOfStep

__all__ = ["packer", "parser", "refusal", "socket_of", "streams_of", "take_streams"]


def socket_of(connection: Any) -> Any:
    """Return `_sock` of a blocking connection, None before it is connected. There is no public way to wait for several
    connections together."""
    return connection._sock


def streams_of(connection: Any) -> tuple[Any, Any]:
    """Return `_reader` and `_writer` of a suspending connection. Their transport is used from then on."""
    return connection._reader, connection._writer


def take_streams(connection: Any) -> None:
    """Detach the streams from the connection, so that the library does not warn that they were not closed."""
    connection._reader = connection._writer = None


def packer() -> Callable[[tuple[bytes, ...]], bytes]:
    """Return hiredis' function that encodes a command."""
    from hiredis import pack_command

    return cast(Any, pack_command)  # type: ignore[no-any-return]


def parser(refused: Callable[[str], Exception]) -> Any:
    """Return hiredis' parser of RESP2 and of RESP3's pushes. It returns a server's refusal as an exception, and does
    not raise it."""
    from hiredis import Reader

    return Reader(protocolError=OutOfStep, replyError=refused, notEnoughData=MORE)


def refusal(connection: Any) -> Any:
    """Return the function that makes an exception of a server's refusal, from `_parser.parse_error`: the first word
    selects the class. Before redis-py 6.0, only its parser for clusters knew the classes of clusters."""
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
