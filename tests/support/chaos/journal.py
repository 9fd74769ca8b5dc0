"""What a process tells while it lives: a line for each beginning and each end, which outlives a SIGKILL."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from typing import Any

__all__ = ["Journal"]


class Journal:
    """Lines into a pipe, each written at once; also by forked children, which share it."""

    def __init__(self, name: str, fd: int) -> None:
        self._name = name
        self._fd = fd
        self._count = itertools.count()

    def new(self) -> str:
        """A name that nothing else has."""
        return f"{self._name}.{os.getpid()}.{next(self._count)}"

    def write(self, what: str, *details: Any) -> None:
        os.write(self._fd, json.dumps([what, os.getpid(), *details]).encode() + b"\n")

    def watch_for_stalls(self) -> None:
        """Tell of every moment in which this process didn't come to run, whoever is to blame."""

        def watch() -> None:
            while True:
                before = time.monotonic()
                time.sleep(0.02)
                now = time.monotonic()
                if now - before > 0.1:
                    self.write("stall", before, now)

        threading.Thread(target=watch, name="chaos-stalls", daemon=True).start()
