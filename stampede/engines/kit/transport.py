"""Closing transports of asyncio and uvloop in ways they do not support: from outside the loop, and after a fork."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["disown", "disown_number", "shut"]


def shut(transport: Any) -> None:
    """Close the transport, even if its loop no longer runs."""
    encrypted = transport.get_extra_info("sslcontext") is not None
    try:
        # TLS says goodbye and waits for an answer, for which a loop that ends has no turn.
        transport.abort() if encrypted else transport.close()
    except RuntimeError:  # the loop was closed (uvloop closes its sockets then): nothing else would close this socket
        ssl: Any = getattr(transport, "_ssl_protocol", None)
        lost: Any = getattr(ssl, "_transport", None) if encrypted else transport
        if getattr(lost, "_sock", None) is not None:
            lost._sock.close()
            lost._sock = None


def disown(transport: Any) -> None:
    """Detach the transport in a forked child, without the server noticing. A normal close would remove it from its
    loop's epoll, which is shared with the parent. Its file descriptor stays in use: the transport may close that number
    some day, and would close another file that has it by then."""
    _inherited.append(transport)
    shared = transport.get_extra_info("socket")
    number = -1 if shared is None else shared.fileno()
    if number >= 0:
        disown_number(number)


def disown_number(number: int) -> None:
    """Make this file descriptor lead nowhere, and keep its number in use."""
    os.close(number)
    nowhere = os.open(os.devnull, os.O_RDWR)  # usually this very number, the lowest one that is free
    if nowhere != number:
        os.dup2(nowhere, number, inheritable=False)
        os.close(nowhere)


_inherited: list[Any] = []
