"""A function that raises StopIteration, which cannot leave a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bare_cache import LONG, Gate, Room, World

from stampede import Cache
from stampede.testing import disabled


def ends() -> Any:
    return next(iter(()))


@pytest.fixture(params=["memory", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    with Cache("memory://" if request.param == "memory" else f"disk://{tmp_path}", ttl=60) as cache:
        yield cache


def stops(function: Any, *args: Any) -> StopIteration:
    try:
        function(*args)
    except StopIteration as end:
        return end
    raise AssertionError("it went on")


def test_it_comes_out_as_itself(cache: Cache) -> None:
    """A sync caller gets the StopIteration of the function, and not a RuntimeError."""

    def alone() -> Any:
        raise StopIteration("by itself")

    assert stops(cache.cached(alone)).value == "by itself"
    assert stops(cache.get_or_compute, "k", ends).value is None
    assert stops(cache.get_or_compute_many, ["a", "b"], lambda keys: ends()).value is None

    def each(n: int) -> Any:
        raise StopIteration(n)

    assert stops(cache.cached(each).many, [(5,)]).value == 5
    with disabled():
        assert stops(cache.cached(alone)).value == "by itself"
        assert stops(cache.get_or_compute, "k", ends).value is None


def test_it_may_be_an_answer(cache: Cache) -> None:
    """`raises=` may name StopIteration. The error is then stored."""
    calls = []

    @cache.cached(raises=(StopIteration,))
    def report() -> Any:
        calls.append(1)
        raise StopIteration("kept")

    assert [stops(report).value for _ in range(3)] == ["kept"] * 3
    assert len(calls) == 1


def test_whoever_awaits_gets_what_python_makes_of_it(cache: Cache) -> None:
    """An async caller gets a RuntimeError whose cause is the StopIteration, as from any coroutine."""

    async def main() -> None:
        with pytest.raises(RuntimeError, match="StopIteration") as caught:
            await cache.aget_or_compute("k", ends)
        assert isinstance(caught.value.__cause__, StopIteration)
        with pytest.raises(RuntimeError, match="StopIteration"), disabled():
            await cache.aget_or_compute("k", ends)

    asyncio.run(main())


@pytest.mark.parametrize("leader", ["thread", "loop"])
def test_followers_get_it_too(leader: str) -> None:
    """Sync followers get the StopIteration. Async followers get a RuntimeError."""
    world, gate = World(), Gate(StopIteration("shared"))

    def sync() -> Any:
        return gate()

    with Room() as room:
        if leader == "thread":
            first = room.run(lambda: stops(world.ask, sync))
        else:
            first = room.loop(lambda: asyncio.wait_for(asyncio.to_thread(stops, world.ask, sync), LONG))
        assert gate.begun.wait(LONG)
        other = room.run(lambda: stops(world.ask, sync))
        awaiting = room.loop(lambda: world.aask(sync))
        world.followers(2)
        gate.open.set()
        assert first.result(LONG).value == other.result(LONG).value == "shared"
        assert isinstance(awaiting.exception(LONG), RuntimeError)
    assert gate.calls == 1


def test_who_computes_alone_gets_it_too() -> None:
    """A sync call that computes alone, on the thread of the leader's loop, gets the StopIteration."""
    world, gate = World(), Gate()

    async def main() -> None:
        leader = asyncio.create_task(world.aask(gate.suspending))
        while not gate.begun.is_set():
            await asyncio.sleep(0)
        assert stops(world.ask, ends).value is None
        gate.open.set()
        await leader

    asyncio.run(main())
