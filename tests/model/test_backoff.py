"""How often one waiter asks, whatever the engine replies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stampede import Cache, WaitTimeout
from stampede.engines import memory
from stampede.engines.memory.locks import MemoryLocks
from stampede.model.backoff import AT_ONCE, EVERY, FARTHEST, Backoff, look_again
from stampede.model.entry import new_id
from stampede.model.ports import Ask
from stampede.testing.clock import FakeClock


def test_the_first_questions_are_free_and_the_others_take_their_time() -> None:
    """A waiter asks again at once only a few times. Then it pauses, so that needless wake-ups do not make it spin."""
    pace, clock, asked = Backoff(), FakeClock(1000.0), 0
    assert [pace.rest(clock()) for _ in range(AT_ONCE)] == [0.0] * AT_ONCE
    while clock() < 1010.0:
        asked += 1
        clock.advance(pace.rest(clock()))
    assert asked <= 10.0 / EVERY + 1
    clock.advance(AT_ONCE * EVERY)
    assert pace.rest(clock()) == 0.0


def test_who_is_far_back_looks_rarely() -> None:
    """The waiters far back ask rarely. The first one asks soon after the lease of a holder that died."""
    assert look_again(0, 5.0, 0.2, 1.0) == 1.0
    assert look_again(0, 0.3, 0.2, 1.0) == 0.3
    assert look_again(3, 0.3, 0.2, 1.0) == pytest.approx(0.9)
    assert look_again(0, -1.0, 0.2, 1.0) == 1.0  # a lease without an end
    assert look_again(10_000, 1e9, 0.2, 1.0) == FARTHEST
    assert sum(1 / look_again(ahead, 1e9, 0.2, 1.0) for ahead in range(1000)) < 40


def test_no_answer_makes_a_waiter_spin(colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an engine wakes waiters for no reason, they do not ask it thousands of times a second."""
    cache, asked = Cache("memory://"), []
    claim, acquire = memory._Verbs.claim, MemoryLocks.acquire

    async def woken(*args: Any) -> None: ...

    async def claims(*args: Any) -> Any:
        asked.append("claim")
        return await claim(*args)

    async def acquires(*args: Any, **terms: Any) -> Any:
        asked.append("acquire")
        return await acquire(*args, **terms)

    with cache.lock("l"):
        monkeypatch.setattr(memory._Verbs, "claim", claims)
        monkeypatch.setattr(MemoryLocks, "acquire", acquires)
        for port in (memory._Verbs, MemoryLocks):
            monkeypatch.setattr(port, "wait", woken)
        assert cache.engine.blocking.claims is not None
        cache = Cache(engine=cache.engine)  # its ports are the new ones
        asyncio.run(cache.engine.blocking.claims.claim(cache._root.prefix + "k", new_id(), Ask(60.0)))

        async def suspending() -> None:
            assert not await cache.lock("l").aacquire(0.2)
            with pytest.raises(WaitTimeout):
                await cache.aget_or_compute("k", lambda: 1, wait=0.2)

        if colour == "async":
            asyncio.run(suspending())
        else:
            assert not cache.lock("l").acquire(0.2)
            with pytest.raises(WaitTimeout):
                cache.get_or_compute("k", lambda: 1, wait=0.2)
    assert 0 < asked.count("claim") < 3 * AT_ONCE
    assert 0 < asked.count("acquire") < 3 * AT_ONCE
