"""The name of this process for people who ask which process computes: the host and the process number."""

from __future__ import annotations

import os
import socket
from functools import cache

from stampede.runtime import forks

__all__ = ["here", "parts_of"]

_LONGEST = 64


@cache
def here() -> str:
    """Return this process as `host:pid`."""
    return f"{socket.gethostname()[:_LONGEST]}:{os.getpid()}"


def parts_of(holder: str) -> tuple[str | None, int | None]:
    """Return the host and the process number. None stands for an unknown part."""
    host, _, pid = holder.rpartition(":")
    return host or None, int(pid) if pid.isascii() and pid.isdigit() else None


forks.in_child(lambda: here.cache_clear())
