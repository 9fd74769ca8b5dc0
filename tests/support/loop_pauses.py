"""Measures for how long an event loop was blocked, and where: its thread slept outside the loop's selector."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from types import TracebackType

__all__ = ["BEAT", "Pauses"]

BEAT = 0.005


class Pauses:
    """Watches the running loop during a block. A loop that only waits for a processor does not count as blocked."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.where = ""

    async def __aenter__(self) -> Pauses:
        self._beat = time.monotonic()
        self._over = threading.Event()
        self._beats = asyncio.get_running_loop().create_task(self._go_on())
        self._thread = threading.Thread(target=self._watch, args=(threading.get_native_id(), threading.get_ident()))
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beats.cancel()
        self._over.set()
        self._thread.join()

    async def _go_on(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT)

    def _watch(self, native: int, ident: int) -> None:
        pause, last = 0.0, time.monotonic()
        while not self._over.wait(BEAT):
            now = time.monotonic()
            # A long step means that this thread did not run. Then the loop's thread may have waited for it.
            step, last = min(now - last, 4 * BEAT), now
            pause = 0.0 if now - self._beat < 4 * BEAT or _runs(native) else pause + step
            if pause > self.longest:
                self.longest, self.where = pause, "".join(traceback.format_stack(sys._current_frames()[ident]))


def _runs(thread: int) -> bool:
    with open(f"/proc/self/task/{thread}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "R"
