"""Who we are to the people who ask who computes: the host, and the number of the process."""

from __future__ import annotations

import os
import socket
from functools import cache

from stampede.runtime import forks

__all__ = ["here", "parts_of"]

_LONGEST = 64


@cache
def here() -> str:
    """This process, as `host:pid`."""
    return f"{socket.gethostname()[:_LONGEST]}:{os.getpid()}"


def parts_of(holder: str) -> tuple[str | None, int | None]:
    """The host and the process's number; None is what isn't known."""
    host, _, pid = holder.rpartition(":")
    return host or None, int(pid) if pid.isascii() and pid.isdigit() else None


forks.in_child(lambda: here.cache_clear())
