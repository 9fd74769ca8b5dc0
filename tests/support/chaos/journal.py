"""The journal of a process: one line for each start and each end. The lines survive a SIGKILL of the process."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from typing import Any

__all__ = ["Journal"]


class Journal:
    """Writes each line to a pipe immediately. Forked children share the pipe."""

    def __init__(self, name: str, fd: int) -> None:
        self._name = name
        self._fd = fd
        self._count = itertools.count()

    def new(self) -> str:
        """A unique name."""
        return f"{self._name}.{os.getpid()}.{next(self._count)}"

    def write(self, what: str, *details: Any) -> None:
        os.write(self._fd, json.dumps([what, os.getpid(), *details]).encode() + b"\n")

    def watch_for_stalls(self) -> None:
        """Write down every period in which this process did not run, for any reason."""

        def watch() -> None:
            while True:
                before = time.monotonic()
                time.sleep(0.02)
                now = time.monotonic()
                if now - before > 0.1:
                    self.write("stall", before, now)

        threading.Thread(target=watch, name="chaos-stalls", daemon=True).start()
