"""Calls for type checkers: both must report an error at each marked line, and at no other. This file is never run."""

from __future__ import annotations

import threading
from typing import Any

from stampede import Cache, Lock, cached, configure, try_lock
from stampede.testing import isolated


@cached(ttl=60)
def report(customer: int, *, year: int = 2026) -> str:
    return ""


@cached
async def stock(item: str) -> int:
    return 1


@cached(ignore=["session"])
def user(id: int, session: object) -> str:
    return ""


@cached(key="user:{id}")
async def account(id: int, session: object) -> str:
    return ""


def verbs() -> None:
    report.invalidate(42)
    report.invalidate(42, year=2025, via=print)
    report.invalidate("42")  # wrong
    report.invalidate(42, yaer=2025)  # wrong
    report.invalidate(42, via=5)  # wrong
    report.expire("42")  # wrong
    report.peek("42")  # wrong
    report.peek()  # wrong
    report.key("42")  # wrong
    report.refresh("42")  # wrong
    report.set("", 42, year=2025)
    report.set("", 42, ttl=5)
    report.set(b"", 42)  # wrong
    report.set("", "42")  # wrong
    report.set("", 42, tll=5)  # wrong
    report.set("", 42, ttl=b"")  # wrong
    report.invalidate_all(1)  # wrong
    report.invaldiate(42)  # wrong


async def suspending_verbs() -> None:
    await stock.invalidate("tea")
    await stock.invalidate("tea", via=print)
    await stock.invalidate(5)  # wrong
    await stock.expire(5)  # wrong
    await stock.peek(5)  # wrong
    await stock.set(5, "tea", stale=5)
    await stock.set(5, "tea", stael=5)  # wrong


async def verbs_of_the_key() -> None:
    """These methods take only the parameters that are part of the key. A call takes all parameters."""
    user.invalidate(1)
    user.peek(1)
    user.set("", 1, ttl=5)
    user(1, object())
    user.refresh(1, object())
    user(1)  # wrong
    user("1", object())  # wrong
    user.set(5, 1)  # wrong
    await account.invalidate(1)
    await account(1, object())
    await account(1)  # wrong


@cached.many(ttl=60, ignore="session")
def users(ids: list[int], session: object) -> dict[int, str]:
    return {}


@cached.many(ttl=60)
async def rates(names: list[str], country: str) -> dict[str, float]:
    return {}


async def many() -> None:
    users([1], object())
    users.invalidate(1)
    users.one.invalidate(1)
    users.one("1", object())  # wrong
    users(["1"], object())  # wrong
    await rates(["EUR"], "de")
    await rates(["EUR"])  # wrong
    await rates.invalidate("EUR", "de")
    await rates.invalidate("EUR")  # wrong
    await rates.one.peek(1, "de")  # wrong
    cached.many(chnk=5)  # wrong
    Cache().cached.many(chnk=5)  # wrong


class Shop:
    @cached
    def price(self, item: str) -> float:
        return 1.0

    @cached
    async def stock(self, item: str) -> int:
        return 1

    @cached(ignore=["session"])
    def offer(self, item: str, session: object) -> float:
        return 1.0

    @cached
    @classmethod
    def count(cls, country: str) -> int:
        return 1

    @cached(ttl=5)
    @classmethod
    async def acount(cls, country: str) -> int:
        return 1

    @classmethod
    @cached
    def below(cls, country: str) -> int:
        return 1

    @cached
    @staticmethod
    def tax(country: str) -> float:
        return 0.2

    @staticmethod
    @cached(ttl=5)
    async def duty(country: str) -> float:
        return 0.2

    @cached
    @staticmethod
    def shown(what: object) -> str:
        return ""

    @cached
    @staticmethod
    def anything(what: Any) -> str:
        return ""

    @cached
    @staticmethod
    def kind(what: type[int]) -> str:
        return ""

    @cached
    @staticmethod
    def nothing() -> str:
        return ""


class Corner(Shop):
    pass


async def methods(shop: Shop) -> None:
    shop.price("tea")
    shop.price.invalidate("tea")
    shop.price(5)  # wrong
    shop.price.invalidate(5)  # wrong
    Shop.price(shop, "tea")
    Shop.price.invalidate(shop, "tea")
    Shop.price("tea")  # wrong
    await shop.stock("tea")
    await shop.stock.peek(5)  # wrong
    shop.offer("tea", object())
    shop.offer.invalidate("tea")
    shop.offer("tea")  # wrong

    Shop.count("de")
    Corner.count("de")
    shop.count("de")
    Shop.count.invalidate("de")
    Shop.count(5)  # wrong
    shop.count(5)  # wrong
    Shop.count.invalidate(5)  # wrong
    await Shop.acount("de")
    await Shop.acount.peek("de")
    await Shop.acount(5)  # wrong
    await shop.acount.peek(5)  # wrong
    Shop.below("de")
    shop.below("de")
    Shop.below(5)  # wrong

    Shop.tax("de")
    shop.tax("de")
    Shop.tax.invalidate("de")
    Shop.tax(5)  # wrong
    shop.tax.invalidate(5)  # wrong
    await Shop.duty("de")
    await Shop.duty.peek("de")
    await shop.duty(5)  # wrong
    Shop.shown(5)
    shop.shown(5)
    Shop.anything(5)
    shop.anything(5)
    Shop.kind(int)
    shop.kind(int)
    Shop.nothing()
    shop.nothing.invalidate()


def options(cache: Cache) -> None:
    cached(codec="pickel")  # wrong
    cached(codec="msgpack")
    cached(tll=5)  # wrong
    cached(ignore=5)  # wrong
    cache.cached(tll=5)  # wrong
    cached(cache=5)  # wrong
    cache.cached(cache="other")  # wrong
    cache.cached.many(cache="other")  # wrong


async def caches() -> None:
    Cache(ttl=5, local={"entries": 5}, codec="json", locks="file://", trust=["shop.models.Price"])
    Cache("redis://localhost?socket_timeout=1", namespace="shop", compress="64KiB", on_engine_error="raise")
    cache = Cache(tttl=5)  # wrong
    Cache(codec="pickel")  # wrong
    Cache(on_engine_error="rasie")  # wrong
    Cache(namespace=lambda tenant: "t")  # wrong
    Cache(socket_timeout=1)  # wrong
    cache.set("k", 1, ttl=5)
    cache.set("k", 1, tll=5)  # wrong
    await cache.aset("k", 1, tll=5)  # wrong
    cache.set_many({"k": 1}, tll=5)  # wrong
    cache.add("k", 1, tll=5)  # wrong
    cache.update("k", str, tll=5)  # wrong
    cache.touch("k", tll=5)  # wrong
    cache.get_or_compute("k", int, tll=5)  # wrong
    await cache.aget_or_compute("k", int, tll=5)  # wrong
    cache.get_or_compute_many(["k"], lambda keys: dict.fromkeys(keys, 1), tll=5)  # wrong
    cache.lock("nightly", leese=5)  # wrong


async def of_many_ids(cache: Cache) -> None:
    @cached.many(ttl=60, chunk=5)
    def reports(ids: list[int], *, region: str = "eu") -> dict[int, str]:
        return {}

    @cached.many
    async def later(ids: list[int]) -> dict[int, str]:
        return {}

    reports(["1"])  # wrong
    reports(1)  # wrong
    reports([1], reigon="us")  # wrong
    reports.one("1")  # wrong
    reports.one([1])  # wrong
    reports.set(5, 1)  # wrong
    reports.set_many({"1": "a"})  # wrong
    reports.invalidate_many(["1"])  # wrong
    await later(["1"])  # wrong
    await later.one("1")  # wrong
    cached.many(chunk="5")  # wrong
    cached.many(chnk=5)  # wrong
    cache.cached.many(absent=b"5")  # wrong
    cached(chunk=5)  # wrong

    @cached.many  # wrong
    def no_mapping(ids: list[int]) -> list[str]:
        return []


def settings() -> None:
    configure("stampede.toml")
    configure(url="redis://localhost", ttl="10m", locks="file://")
    configure(caches={"default": {"url": "memory://"}}, origins={})
    configure({"caches": {"default": {"url": "memory://"}}})
    configure(urll="redis://localhost")  # wrong
    configure(cachess={})  # wrong
    configure(5)  # wrong
    with isolated(ttl=5, strict=False):
        pass
    with isolated(tll=5):  # wrong
        pass


def locks() -> None:
    Lock("nightly", on="file://", lease="1m", wait=5, release_via=print)
    Lock("nightly", leese=5)  # wrong
    Lock("nightly", on=5)  # wrong
    try_lock("nightly", leese=5)  # wrong
    Lock(threading.Lock())  # wrong


def tables_and_lists() -> None:
    configure(caches={"a": {"url": "memory://", "local": {"entries": 5, "ttl": "1s"}}})
    configure(caches={"a": {"urll": "memory://"}})  # wrong
    Cache(local={"entrys": 5})  # wrong
    Cache(trust=["shop.Price"])
    Cache(trust=(threading, Shop))
    Cache(trust={Shop})
    Cache(trust="shop.Price")  # wrong
    try_lock("a", lease=5)
    try_lock("a", wait=5)  # wrong
    Lock("a", wait=5)
