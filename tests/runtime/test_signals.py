"""Signal handlers that use a cache, in the thread of a loop that sleeps."""

from __future__ import annotations

import asyncio
import signal
from time import monotonic

from stampede import Cache

LONG = 5  # seconds


def test_a_handler_s_invalidation_wakes_who_waits() -> None:
    """If a signal handler invalidates a key, its waiters are woken, even if the loop sleeps at that moment."""
    computes = 0

    async def compute() -> int:
        nonlocal computes
        computes += 1
        if computes == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.02)  # by then the loop sleeps
            await asyncio.sleep(LONG)
        return computes

    async def main() -> None:
        leader = asyncio.ensure_future(cache.aget_or_compute("k", compute))
        follower = asyncio.ensure_future(cache.aget_or_compute("k", compute))
        began = monotonic()
        assert await follower == 2
        assert monotonic() - began < LONG / 2
        leader.cancel()

    with Cache("memory://", early=0) as cache:
        before = signal.signal(signal.SIGALRM, lambda *_: cache.invalidate("k"))
        try:
            asyncio.run(main())
        finally:
            signal.signal(signal.SIGALRM, before)
