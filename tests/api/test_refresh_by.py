"""`refresh_by=` of `@cached`: workers of a task queue refresh a value, and its callers get the stored one meanwhile."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from herd import Herd, until

from stampede import Cache, OptionError, cached, get_cache, refreshing
from stampede.testing import FakeClock, isolated

BRIEF = 0.2
"""The seconds of a lease that ends during the test."""


@pytest.fixture(params=["memory", "disk", "redis", "sql"])
def caches(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Cache]]:
    """Make caches of two processes: all are on one engine."""
    opened: list[Cache] = []
    if request.param == "redis":
        pytest.importorskip("redis")
        url = request.getfixturevalue("server").url
    elif request.param == "sql":
        pytest.importorskip("sqlalchemy")
        url = f"sql+sqlite:///{tmp_path}/values.db"
    else:
        url = f"{request.param}://" + ("" if request.param == "memory" else str(tmp_path))

    def make(**options: Any) -> Cache:
        if request.param == "memory" and opened:
            return opened[0]
        opened.append(Cache(url, ttl=600, stale="1h", **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


LONG = 60.0
"""The seconds of a lease that does not end during the test."""


class Shop:
    """A function of one cache, and the queue of its tasks."""

    def __init__(self, cache: Cache, colour: str, **options: Any) -> None:
        self.queued: list[Any] = []
        self.computed = 0
        self.fails = False
        options = {"refresh_by": self.enqueue, "version": 1, "lease": LONG, **options}

        def price(item: str, *, shop: int = 1) -> int:
            if self.fails:
                raise ValueError("no price")
            self.computed += 1
            return self.computed

        async def suspending(item: str, *, shop: int = 1) -> int:
            return price(item, shop=shop)

        suspending.__qualname__ = price.__qualname__
        self.price: Any = cache.cached(**options)(price if colour == "sync" else suspending)

    def enqueue(self, *args: Any, **kwargs: Any) -> None:
        self.queued.append((args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(self.price(*args, **kwargs))

    def work(self) -> None:
        """Run all tasks that are queued, as a worker does."""
        while self.queued:
            args, kwargs = self.queued.pop(0)
            run(self.price.refresh(*args, **kwargs))


def run(answer: Any) -> Any:
    return asyncio.run(answer) if inspect.isawaitable(answer) else answer


def test_a_stale_value_is_refreshed_by_a_worker(caches: Any, colour: str) -> None:
    """The first caller that finds a stale value enqueues the refresh, with its arguments. All get the stale value."""
    shop = Shop(caches(), colour)
    assert shop("tea", shop=2) == 1
    run(shop.price.expire("tea", shop=2))
    assert [shop("tea", shop=2) for _ in range(5)] == [1] * 5
    assert shop.queued == [(("tea",), {"shop": 2})]
    shop.work()
    assert (shop("tea", shop=2), shop.computed, shop.queued) == (2, 2, [])


def test_one_task_for_the_fleet(caches: Any, colour: str) -> None:
    """While the worker has not begun, no other process enqueues the task, too."""
    first, second = (Shop(caches(), colour) for _ in range(2))
    first("tea")
    run(first.price.expire("tea"))
    assert [first("tea"), second("tea"), first("tea")] == [1, 1, 1]
    assert len(first.queued) + len(second.queued) == 1
    first.work()
    second.work()
    assert first("tea") == second("tea")


def test_a_herd(caches: Any) -> None:
    """However many callers find the stale value at once, one of them enqueues."""
    shop = Shop(caches(), "sync")
    shop("tea")
    shop.price.expire("tea")
    assert Herd(*[lambda: shop("tea")] * 8).join() == [1] * 8
    assert len(shop.queued) == 1


def test_a_worker_that_does_not_come(caches: Any, colour: str) -> None:
    """If the worker has not computed the value within a lease, the task is enqueued again."""
    shop = Shop(caches(), colour, lease=BRIEF)
    run(shop.price.set(7, "tea"))
    run(shop.price.expire("tea"))
    until(lambda: shop("tea") == 7 and len(shop.queued) >= 2)
    assert shop.computed == 0


def failed(cache: Cache, lease: float) -> Shop:
    """A shop whose worker has failed to compute a stale price."""
    shop = Shop(cache, "sync", lease=lease)
    shop.price.set(1, "tea")
    shop.price.expire("tea")
    shop("tea")
    shop.fails = True
    with pytest.raises(ValueError, match="no price"):
        shop.work()
    return shop


def test_a_worker_that_fails(caches: Any) -> None:
    """After a failure in the worker, the stored value is served, and no task is enqueued for a lease."""
    shop = failed(caches(), LONG)
    assert [shop("tea") for _ in range(5)] == [1] * 5
    assert shop.queued == []


def test_a_worker_that_failed_is_asked_again(caches: Any) -> None:
    """A lease after the failure, the task is enqueued again."""
    shop = failed(caches(), BRIEF)
    until(lambda: shop("tea") == 1 and len(shop.queued) > 0)


def test_a_missing_value_is_computed_here(caches: Any, colour: str) -> None:
    """A caller that has nothing to serve computes the value itself."""
    shop = Shop(caches(), colour)
    assert shop("tea") == 1
    run(shop.price.invalidate("tea"))
    assert (shop("tea"), shop.queued) == (2, [])


def test_an_early_refresh(colour: str) -> None:
    """A fresh value whose early moment has come is refreshed by a worker, too."""
    with isolated(clock=(clock := FakeClock())):
        shop = Shop(get_cache(), colour, ttl=100, early=3e9)
        assert shop("tea") == 1
        assert (shop("tea"), shop.queued) == (1, [])  # never before half of ttl
        clock.advance(60)
        until(lambda: shop("tea") == 1 and len(shop.queued) == 1)
        shop.work()
        assert shop("tea") == 2


def test_no_key_rests_without_a_value(colour: str) -> None:
    """If the value ends before the worker has computed it, the next caller computes it, and does not get an error."""
    with isolated(clock=(clock := FakeClock())):
        shop = Shop(get_cache(), colour, ttl=100, early=3e9, lease=50)
        assert shop("tea") == 1
        clock.advance(99)
        until(lambda: shop("tea") == 1 and len(shop.queued) == 1)
        clock.advance(2)
        assert shop("tea") == 2


def ends_value(how: str, shop: Shop) -> None:
    if how == "tags":
        shop.price.cache.invalidate_tags("prices")
    elif how == "invalidate_all":
        run(shop.price.invalidate_all())
    else:
        run(shop.price.invalidate("tea"))


@pytest.mark.parametrize("how", ["invalidate", "invalidate_all", "tags"])
def test_a_value_that_is_removed_before_the_worker_comes(caches: Any, colour: str, how: str) -> None:
    """If the value is invalidated while a worker is to refresh it, the next caller computes it, and gets no error."""
    shop = Shop(caches(), colour, tags=["prices"], lease=BRIEF)
    run(shop.price.set(7, "tea"))
    run(shop.price.expire("tea"))
    assert (shop("tea"), len(shop.queued)) == (7, 1)
    ends_value(how, shop)
    assert (shop("tea"), len(shop.queued)) == (1, 1)


def test_a_function_that_refuses_stale_values(caches: Any) -> None:
    """Another function of the key, with `stale=0`, gets a new value, and no error, before the worker has come."""
    cache = caches()
    shop = Shop(cache, "sync", key="price of {item}", lease=BRIEF)
    strict = cache.cached(key="price of {item}", stale=0)(lambda item: 7)
    shop.price.set(1, "tea")
    shop.price.expire("tea")
    assert (shop("tea"), len(shop.queued)) == (1, 1)
    assert strict("tea") == 7


def test_all_values_are_expired(caches: Any, colour: str) -> None:
    """After `expire_all`, each value is served until a worker has refreshed it."""
    shop = Shop(caches(), colour)
    shop("tea")
    run(shop.price.expire_all())
    assert [shop("tea") for _ in range(3)] == [1] * 3
    shop.work()
    assert (shop("tea"), shop.computed, shop.queued) == (2, 2, [])


def test_a_queue_that_is_down(caches: Any, colour: str, caplog: pytest.LogCaptureFixture) -> None:
    """If the task can't be enqueued, that is logged, and the value is computed here."""

    def broken(item: str, *, shop: int) -> None:
        raise ConnectionError("no broker")

    shop = Shop(caches(), colour, refresh_by=broken)
    shop("tea")
    run(shop.price.expire("tea"))
    with caplog.at_level(logging.WARNING, "stampede"):
        assert shop("tea") == 2
    assert "no broker" in caplog.text


def test_an_interrupted_enqueue(caches: Any) -> None:
    """An interruption is the caller's own. The next caller enqueues."""

    def interrupted(item: str, *, shop: int) -> None:
        queue.enqueue(item)
        if len(queue.queued) == 1:
            raise KeyboardInterrupt

    queue = shop = Shop(caches(), "sync", refresh_by=interrupted)
    shop("tea")
    shop.price.expire("tea")
    with pytest.raises(KeyboardInterrupt):
        shop("tea")
    assert (shop("tea"), len(shop.queued)) == (1, 2)


def test_in_the_background(caches: Any, colour: str) -> None:
    """With `background=True`, the caller does not even wait for the queue."""
    shop = Shop(caches(), "sync", background=True)
    shop("tea")
    shop.price.expire("tea")
    assert shop("tea") == 1
    until(lambda: len(shop.queued) == 1)
    shop.work()
    assert shop("tea") == 2


def test_an_async_queue(caches: Any) -> None:
    """For an async function, `refresh_by` may be async, too."""

    async def enqueue(*args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        shop.enqueue(*args, **kwargs)

    shop = Shop(caches(), "async", refresh_by=enqueue)
    shop("tea")
    run(shop.price.expire("tea"))
    shop("tea")
    assert shop.queued == [(("tea",), {"shop": 1})]  # with all defaults


def test_a_task_that_runs_at_once(caches: Any, colour: str) -> None:
    """A queue that runs its tasks at once, as in tests of applications, is no recursion."""
    shop = Shop(caches(), "sync", refresh_by=lambda item, shop: this.price.refresh(item))
    this = shop
    shop("tea")
    shop.price.expire("tea")
    shop("tea")
    assert (shop("tea"), shop.computed) == (2, 2)


def test_a_method(caches: Any) -> None:
    """A method passes its object on."""
    asked: list[Any] = []

    class Till:
        def __stampede_key__(self) -> str:
            return "till"

        @caches().cached(refresh_by=lambda self, item: asked.append((self, item)))
        def price(self, item: str) -> int:
            return len(item)

    till = Till()
    till.price("tea")
    till.price.expire("tea")
    till.price("tea")
    assert asked == [(till, "tea")]


def test_a_refreshing_block_computes_here(caches: Any) -> None:
    """`refresh` and `refreshing` are asked for by the caller, and compute here."""
    shop = Shop(caches(), "sync")
    shop("tea")
    with refreshing():
        assert shop("tea") == 2
    assert (shop.price.refresh("tea"), shop.queued) == (3, [])


def test_the_local_tier_has_the_worker_s_value(caches: Any) -> None:
    """A process with a local tier serves the old value only until the worker's is stored."""
    shop = Shop(caches(local={"ttl": BRIEF}), "sync")
    shop("tea")
    shop.price.expire("tea")
    assert (shop("tea"), len(shop.queued)) == (1, 1)
    other = Shop(caches(), "sync")
    other.computed = 10
    other.price.refresh("tea")
    until(lambda: shop("tea") == 11)


@pytest.mark.parametrize("decorator", [cached, cached.many], ids=["cached", "many"])
def test_what_is_refused(decorator: Any) -> None:
    """Anything that can't be called is refused, and so is a function of many keys."""
    with pytest.raises(OptionError, match="refresh_by"):
        decorator(refresh_by="tasks.refresh" if decorator is cached else print)
