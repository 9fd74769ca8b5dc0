"""The types that checkers must infer for the public API. mypy --strict and pyright read this file; it never runs."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, assert_type

from stampede import Cache, Entry, Holding, Lock, ValueCodec, cache_without_dogpiling, cached, once, try_lock
from stampede.api.status import Status
from stampede.api.typing import Decorate
from stampede.metrics import Stats


class Report:
    pass


class Mine:
    """A user-defined codec."""

    name = "mine"

    def encode(self, value: Any) -> bytes:
        return b""

    def decode(self, data: bytes) -> Any:
        return None


def codecs() -> None:
    """An object with `name`, `encode` and `decode` is a codec. `trust` accepts types and modules."""
    mine: ValueCodec = Mine()

    @cached(codec=mine, ttl=60)
    def own(n: int) -> Report:
        return Report()

    @cached(trust=[Report, datetime])
    def trusting(n: int) -> Report:
        return Report()

    assert_type(own(1), Report)
    assert_type(trusting(1), Report)
    cached(codec=Mine)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def functions() -> None:
    """A cached function keeps its parameters and result, and stays blocking."""

    @cached
    def bare(customer: int, *, year: int = 2026) -> Report:
        return Report()

    @cached(ttl=600, stale=60)
    def report(customer: int, *, year: int = 2026) -> Report:
        return Report()

    for each in (bare, report):
        assert_type(each(42), Report)
        assert_type(each(42, year=2025), Report)
        assert_type(each.key(42), str)
        assert_type(each.peek(42), Entry[Report] | None)
        assert_type(each.status(42), Status[Report])
        assert_type(each.refresh(42, year=1), Report)
        each.set(Report(), 42)
        each.set(Report(), 42, ttl="10m", stale=60)
        each.set(Report(), 42, stale=timedelta(minutes=1))
        assert_type(each.expire(42), bool)
        each.invalidate(42, via=print)
        each.invalidate_all()
        assert_type(each.many([(1,), (2,)]), list[Report])
        assert_type(each.many([{"customer": 1, "year": 2}, (1,)], workers=2), list[Report])
        assert_type(each.stats(), Stats)
        assert_type(each.__name__, str)

    plain: Callable[[int], Report] = report
    plain(1)

    report("42")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    report(42, yaer=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    report.key("42")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    report.set("no report", 42)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    report.set(Report(), 42, tll=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    report.set(Report(), 42, ttl=[])  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


async def coroutine_functions() -> None:
    """A cached `async def` stays a coroutine function, and its verbs are awaited."""

    @cached
    async def bare(customer: int) -> Report:
        return Report()

    @cached(ttl=600)
    async def report(customer: int) -> Report:
        return Report()

    for each in (bare, report):
        call: Coroutine[Any, Any, Report] = each(42)
        assert_type(await call, Report)
        assert_type(each.key(42), str)
        assert_type(await each.peek(42), Entry[Report] | None)
        assert_type(await each.status(42), Status[Report])
        assert_type(await each.refresh(42), Report)
        await each.set(Report(), 42)
        assert_type(await each.expire(42), bool)
        await each.invalidate(42)
        await each.invalidate_all()
        assert_type(await each.many([(1,)]), list[Report])

    await report("42")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def methods() -> None:
    """Neither the call of a cached method nor its verbs take `self`."""

    class Shop:
        @cached(ttl=5)
        def price(self, item: str) -> float:
            return 1.0

        @cached
        async def stock(self, item: str) -> int:
            return 1

        @staticmethod
        @cached
        def tax(country: str) -> float:
            return 0.2

    shop = Shop()
    assert_type(shop.price("a"), float)
    assert_type(shop.price.key("a"), str)
    assert_type(shop.price.peek("a"), Entry[float] | None)
    assert_type(await shop.stock("a"), int)
    assert_type(await shop.stock.refresh("a"), int)
    assert_type(Shop.tax("de"), float)

    shop.price(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def of_many_ids(cache: Cache) -> None:
    """A function of many ids always maps `list[K]` to `dict[K, V]`. `one` takes a K and returns a V."""

    @cached.many
    def bare(ids: list[int], *, region: str = "eu") -> dict[int, Report]:
        return {}

    @cached.many(ttl=60, chunk=100, absent="1m", cache="reports")
    def reports(ids: Sequence[int], *, region: str = "eu") -> dict[int, Report]:
        return {}

    @cache.cached.many(chunk=100)
    def here(ids: Iterable[int], *, region: str = "eu") -> Mapping[int, Report]:
        return {}

    for each in (bare, reports, here):
        assert_type(each([1, 2]), dict[int, Report])
        assert_type(each({1, 2}, region="us"), dict[int, Report])
        assert_type(each.one(1), Report)
        assert_type(each.one(1, region="us"), Report)
        assert_type(each.one.peek(1), Entry[Report] | None)
        assert_type(each.key(1, region="us"), str)
        assert_type(each.peek(1), Entry[Report] | None)
        assert_type(each.refresh(1), Report)
        assert_type(each.invalidate(1), bool)
        assert_type(each.invalidate_many([1, 2], region="us"), int)
        assert_type(each.expire_many([1, 2], region="us"), int)
        assert_type(each.stats(), Stats)
        each.set(Report(), 1, ttl="1h")
        each.set_many({1: Report()}, region="us")
        each.set_many({1: Report()}, ttl=5)
        each.invalidate_all()

    @cached.many(ttl=60)
    async def later(ids: list[str]) -> dict[str, Report]:
        return {}

    assert_type(await later(["a"]), dict[str, Report])
    assert_type(await later.one("a"), Report)
    assert_type(await later.peek("a"), Entry[Report] | None)
    assert_type(await later.invalidate_many(["a"]), int)
    await later.set_many({"a": Report()}, ttl=5)

    class Shop:
        @cached.many(ttl=60)
        def prices(self, ids: list[int], *, country: str = "de") -> dict[int, float]:
            return {}

        @cached.many
        async def stock(self, ids: list[int]) -> dict[int, int]:
            return {}

        @staticmethod
        @cached.many
        def taxes(countries: list[str]) -> dict[str, float]:
            return {}

    shop = Shop()
    assert_type(shop.prices([1], country="at"), dict[int, float])
    assert_type(shop.prices.one(1), float)
    assert_type(shop.prices.invalidate_many([1]), int)
    assert_type(Shop.prices(shop, [1]), dict[int, float])
    assert_type(await shop.stock([1]), dict[int, int])
    assert_type(await shop.stock.one(1), int)
    assert_type(Shop.taxes(["de"]), dict[str, float])


def of_region(value: object, *, region: str) -> str:
    return region


def of_tenant(*, tenant: str, year: int = 2026) -> str:
    return tenant


def options(cache: Cache) -> None:
    """Checkers know the names and types of options, for functions and for calls."""

    @cached(ttl=timedelta(minutes=5), cache="reports", raises=(KeyError, ValueError), key="{customer}", ignore=["day"])
    def report(customer: int, day: str) -> Report:
        return Report()

    assert_type(report(1, "monday"), Report)
    cached(cache=cache, ttl=lambda value: 5)
    cached(namespace=lambda: "here", patience=0.2, deadline="2s")
    cached(namespace=lambda tenant: [tenant])  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    cached(ttl=of_region, namespace=of_tenant, cache="reports")
    cached(cache=lambda: cache, ttl=None)
    cache.get_or_compute("k", slow, patience=0.2, deadline=2)
    cached(tll=5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    cached(ttl=b"5")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    cache.get_or_compute("k", slow, stale=5)
    cache.get_or_compute("k", slow, stael=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def of_a_cache(cache: Cache) -> None:
    """The decorator of a cache has the same types as `cached`."""
    decorate: Decorate = cache.cached

    @cache.cached
    def bare(customer: int) -> Report:
        return Report()

    @cache.cached(ttl=5)
    async def report(customer: int) -> Report:
        return Report()

    @decorate(ttl=5)
    def again(customer: int) -> Report:
        return Report()

    assert_type(bare(1), Report)
    assert_type(again(1), Report)
    call: Coroutine[Any, Any, Report] = report(1)
    call.close()


def slow() -> Report:
    return Report()


async def slow_too() -> Report:
    return Report()


async def caches(cache: Cache) -> None:
    """The value has the type that the function returns, also with `cache_without_dogpiling`, sync and async."""
    assert_type(cache_without_dogpiling("k", slow), Report)
    assert_type(cache_without_dogpiling("k", slow, 60 * 10), Report)
    assert_type(await cache_without_dogpiling("k", slow_too), Report)
    assert_type(cache.get_or_compute("k", slow, ttl=60), Report)
    assert_type(await cache.aget_or_compute("k", slow_too, ttl=60), Report)
    assert_type(await cache.aget_or_compute("k", slow), Report)
    assert_type(cache.stats(), Stats)
    with cache as same:
        assert_type(same, Cache)


async def locks() -> None:
    """The `with` block of a lock gives a `Holding`, sync and async."""
    with Lock("nightly", on="file://", lease=30, wait=10) as lock:
        assert_type(lock, Holding)
        assert_type(Lock("nightly").acquire(), Holding)
    async with Lock("nightly") as lock:
        assert_type(lock, Holding)
    with try_lock("nightly") as attempt:
        assert_type(attempt, Holding)
        assert_type(bool(attempt), bool)


# -- once ---------------------------------------------------------------------------------------------------------


@once("nightly", every="1d")
def nightly(day: str) -> int:
    return len(day)


@once("nightly", every="1d", on="reports", retry_after=60)
async def async_nightly(day: str) -> int:
    return len(day)


@cached(stale="1h", refresh_by=nightly)
def refreshed(day: str) -> int:
    return len(day)


async def once_per_period() -> None:
    assert_type(nightly("monday"), int | None)
    assert_type(await async_nightly(day="monday"), int | None)
    assert_type(refreshed("monday"), int)
    with once("nightly", every="1d") as mine:
        assert_type(mine, Holding)
    async with once("nightly", every="1d") as mine:
        assert_type(mine, Holding)
