"""Ends of asyncio's and uvloop's connections which those don't know: from outside of the loop, and behind a fork."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["disown", "disown_number", "shut"]


def shut(transport: Any) -> None:
    """Close it, also when its loop runs no more."""
    encrypted = transport.get_extra_info("sslcontext") is not None
    try:
        # TLS says goodbye and waits for an answer, for which a loop that ends has no turn.
        transport.abort() if encrypted else transport.close()
    except RuntimeError:  # the loop was closed (uvloop closes its sockets then): nobody but us would close this one
        ssl: Any = getattr(transport, "_ssl_protocol", None)
        lost: Any = getattr(ssl, "_transport", None) if encrypted else transport
        if getattr(lost, "_sock", None) is not None:
            lost._sock.close()
            lost._sock = None


def disown(transport: Any) -> None:
    """In a forked child: it leads nowhere from here on, and its server hears nothing of that.

    Closed as usual, it would be taken out of its loop's epoll, which is the parent's too. Its number stays taken: the
    transport, which knows nothing of this, may close that some day, and would close what has it by then.
    """
    _inherited.append(transport)
    shared = transport.get_extra_info("socket")
    number = -1 if shared is None else shared.fileno()
    if number >= 0:
        disown_number(number)


def disown_number(number: int) -> None:
    """The same of a connection of which there is no more than this."""
    os.close(number)
    nowhere = os.open(os.devnull, os.O_RDWR)  # this very number, as a rule: it is the lowest that is free
    if nowhere != number:
        os.dup2(nowhere, number, inheritable=False)
        os.close(nowhere)


_inherited: list[Any] = []
