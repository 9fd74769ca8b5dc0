"""Type checkers must not take a result for a coroutine if its base class comes from a package without types."""

from __future__ import annotations

from typing import Any, NoReturn, assert_type

from stampede import Cache, cached

cache = Cache("memory://")
Base: Any = object


class Book(Base):  # type: ignore[misc]
    title: str


@cached
def bare(x: int) -> Book:
    return Book()


@cached(ttl=60)
def given(x: int) -> Book:
    return Book()


@cached(ttl=60, ignore=["y"])
def loosely(x: int, y: int) -> Book:
    return Book()


@cache.cached(ttl=60)
def in_a_cache(x: int) -> Book:
    return Book()


@cache.cached
def bare_in_a_cache(x: int) -> Book:
    return Book()


@cached
async def suspending(x: int) -> Book:
    return Book()


@cached
def unknown(x: int) -> Any: ...


@cached
def never(x: int) -> NoReturn:
    raise KeyError(x)


class Shop:
    @cached
    def book(self, x: int) -> Book:
        return Book()


assert_type(bare(1), Book)
assert_type(given(1), Book)
assert_type(loosely(1, 2), Book)
assert_type(in_a_cache(1), Book)
assert_type(bare_in_a_cache(1), Book)
assert_type(bare.invalidate(1), bool)
assert_type(given.invalidate(1), bool)
assert_type(loosely.invalidate(1), bool)
assert_type(in_a_cache.invalidate(1), bool)
assert_type(Shop().book(1), Book)
assert_type(Shop().book.invalidate(1), bool)
assert_type(unknown(1), Any)
assert_type(never.invalidate(1), bool)


async def main() -> None:
    assert_type(await suspending(1), Book)
    assert_type(await suspending.invalidate(1), bool)
