"""`@cached` in class bodies: methods, class methods, static methods, and what `self` must be."""

from __future__ import annotations

import asyncio
import enum
import gc
import inspect
import pickle
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from herd import had

from stampede import Cache, KeyingError, cached
from stampede.testing import disabled, isolated


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated():
        yield


class Shop:
    """Every kind of method, each answering with who it was and how often it was computed."""

    calls = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def __stampede_key__(self) -> str:
        return self.name

    @cached
    def price(self, item: Any, *, tax: bool = True) -> Any:
        """Its docstring."""
        Shop.calls += 1
        return self.name, item, tax

    @cached(ttl=60)
    async def stock(self, item: Any) -> Any:
        Shop.calls += 1
        return self.name, item

    @classmethod
    @cached
    def made(cls, n: int) -> Any:
        Shop.calls += 1
        return cls.__name__, n

    @cached
    @classmethod
    def made_too(cls, n: int) -> Any:
        Shop.calls += 1
        return cls.__name__, n

    @staticmethod
    @cached
    def rate(n: int) -> Any:
        Shop.calls += 1
        return n

    @cached
    @staticmethod
    def rate_too(n: int) -> Any:
        Shop.calls += 1
        return n

    @classmethod
    @cached
    async def amade(cls, n: int) -> Any:
        Shop.calls += 1
        return cls.__name__, n

    @cached
    @staticmethod
    async def arate(n: int) -> Any:
        Shop.calls += 1
        return n


class Corner(Shop):
    """Inherits all of it."""


class Discount(Shop):
    """Overrides one, and calls what it overrides."""

    @cached
    def price(self, item: Any, *, tax: bool = True) -> Any:
        return "half", super().price(item, tax=tax)


@pytest.fixture(autouse=True)
def _from_0() -> None:
    Shop.calls = 0


def test_methods_are_kept_per_object_key() -> None:
    """Two shops with one price, or one shop computed twice because it was loaded twice."""
    first, again, other = Shop("a"), Shop("a"), Shop("b")
    for _ in range(3):
        assert first.price(1) == again.price(1) == ("a", 1, True)
        assert other.price(1) == ("b", 1, True)
        assert first.price(1, tax=False) == ("a", 1, False)
    assert Shop.calls == 3


def test_exactness_of_method_hits() -> None:
    """The fast table of a method is as exact as that of a function."""
    shop = Shop("a")
    for _ in range(3):
        for item in (1, True, 1.0, "1", b"1", None, (1,), (True,)):
            name, got, _tax = shop.price(item)
            assert (name, type(got), got) == ("a", type(item), item)


def test_async_methods() -> None:
    """The same, awaited."""

    async def main() -> None:
        first, other = Shop("a"), Shop("b")
        for _ in range(3):
            assert await first.stock(1) == ("a", 1)
            assert await other.stock(1) == ("b", 1)
        assert await first.stock.invalidate(1) is True
        assert await first.stock.peek(1) is None
        assert (await other.stock.peek(1)).value == ("b", 1)
        assert await first.stock.refresh(1) == ("a", 1)
        await first.stock.set("new", 1)
        assert await first.stock(1) == "new"
        assert await first.stock.many([(1,), (2,)]) == ["new", ("a", 2)]
        assert await first.stock.expire(1) is True
        await first.stock.invalidate_all()
        assert await other.stock.peek(1) is None

    asyncio.run(main())


@pytest.mark.parametrize("name", ["made", "made_too", "amade"])
def test_class_methods(name: str) -> None:
    """Above and below `@classmethod`; a subclass is another class, and has values of its own."""
    for _ in range(3):
        assert had(getattr(Shop, name)(1)) == ("Shop", 1)
        assert had(getattr(Shop("a"), name)(1)) == ("Shop", 1)
        assert had(getattr(Corner, name)(1)) == ("Corner", 1)
    assert Shop.calls == 2
    method = getattr(Shop, name)
    if name != "made_too" and sys.version_info >= (3, 13):  # there a class method binds no descriptor any more
        with pytest.raises(KeyingError, match="above it, or give the class first"):
            method.key(1)
        assert had(method.invalidate(Shop, 1)) is True
        assert had(method.peek(Shop, 1)) is None
        return
    assert method.key(1) != getattr(Corner, name).key(1)
    assert had(method.invalidate(1)) is True
    assert had(method.peek(1)) is None
    assert had(getattr(Corner, name).peek(1)).value == ("Corner", 1)


@pytest.mark.parametrize("name", ["rate", "rate_too", "arate"])
def test_static_methods(name: str) -> None:
    """Above and below `@staticmethod`; from the class, an object and a subclass it is one function."""
    for _ in range(3):
        for owner in (Shop, Shop("a"), Corner, Corner("b")):
            assert had(getattr(owner, name)(1)) == 1
    assert Shop.calls == 1
    assert had(getattr(Shop, name).invalidate(1)) is True
    assert had(getattr(Shop("a"), name).peek(1)) is None


def test_a_static_method_with_a_first_argument_of_any_name() -> None:
    """Inside a class body nobody tells a decorator that `@staticmethod` stands above it: `key` must not be `self`."""

    class Tools:
        @staticmethod
        @cached
        def double(x: Any) -> Any:
            return x * 2

    for _ in range(3):
        assert Tools.double(1) == 2
        assert Tools.double(1.5) == 3.0
        assert Tools.double([1]) == [1, 1]
        assert type(Tools.double(True)) is int
        assert Tools().double("a") == "aa"


def test_verbs_bind() -> None:
    """`obj.m.invalidate(1)` is about this object, and no other."""
    first, other = Shop("a"), Shop("b")
    first.price(1)
    other.price(1)
    assert first.price.key(1) != other.price.key(1)
    assert first.price.invalidate(1) is True
    assert first.price.peek(1) is None
    assert other.price.peek(1).value == ("b", 1, True)
    assert first.price.refresh(1) == ("a", 1, True)
    first.price.set("new", 1)
    assert first.price(1) == "new"
    assert first.price.expire(1) is True
    assert first.price.many([(1,), (2,)]) == [("a", 1, True), ("a", 2, True)]
    hooks: list[Any] = []
    first.price.invalidate(1, via=hooks.append)
    assert first.price.peek(1) is not None
    hooks.pop()()
    assert first.price.peek(1) is None
    assert first.price.stats().computations == Shop.calls
    assert isinstance(first.price.cache, Cache)
    first.price.invalidate_all()
    assert other.price.peek(1) is None


def test_verbs_of_the_class() -> None:
    """`Shop.price(shop, 1)` and `Shop.price.invalidate(shop, 1)`, as with plain functions."""
    shop = Shop("a")
    assert Shop.price(shop, 1) == ("a", 1, True)
    assert Shop.price.key(shop, 1) == shop.price.key(1)
    assert Shop.price.peek(shop, 1).value == ("a", 1, True)
    assert Shop.price.invalidate(shop, 1) is True
    assert shop.price.peek(1) is None
    assert isinstance(Shop.price.cache, Cache)


def test_inheritance() -> None:
    """A subclass shares what it inherits where its objects have the same key, and keeps what it overrides apart."""
    shop, half = Shop("a"), Discount("a")
    for _ in range(3):
        assert shop.price(1) == ("a", 1, True)
        assert half.price(1) == ("half", ("a", 1, True))
    assert half.price.invalidate(1) is True
    assert shop.price.peek(1) is not None


@dataclass(frozen=True)
class Point:
    x: int
    y: int

    @cached
    def norm(self) -> tuple[int, int]:
        return self.x, self.y


@dataclass(frozen=True, slots=True)
class SlotPoint:
    x: int

    @cached
    def norm(self) -> int:
        return self.x


class Slots:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __stampede_key__(self) -> str:
        return self.name

    @cached
    def shout(self) -> str:
        return self.name.upper()


class Pair(NamedTuple):
    x: int

    @cached
    def twice(self) -> int:
        return self.x * 2


class Size(enum.Enum):
    S = 1
    L = 2

    @cached
    def label(self) -> str:
        return self.name


def test_kinds_of_self() -> None:
    """What has an identity of its own needs nothing more: frozen dataclasses, slots, enums."""
    for _ in range(3):
        assert Point(1, 2).norm() == (1, 2)
        assert Point(2, 1).norm() == (2, 1)
        assert SlotPoint(1).norm() == 1
        assert SlotPoint(True).norm() is True
        assert Slots("a").shout() == "A"
        assert Slots("b").shout() == "B"
        assert Size.S.label() == "S"
        assert Size.L.label() == "L"


class Plain:
    def __init__(self) -> None:
        self.calls = 0

    @cached
    def value(self) -> int:
        self.calls += 1
        return self.calls

    @cached(ignore="self")
    def shared(self) -> int:
        self.calls += 1
        return self.calls


def test_a_self_without_identity_is_an_error_that_tells_the_remedies() -> None:
    """Keyed by id() it would give a later object at the same address somebody else's value."""
    plain = Plain()
    for call in (plain.value, lambda: Plain.value(plain), plain.value.peek, plain.value.key):
        with pytest.raises(KeyingError, match=r"'self'.*__stampede_key__"):
            call()
    assert plain.calls == 0


def test_ignored_self() -> None:
    """`ignore="self"`: one value for all objects."""
    first, other = Plain(), Plain()
    assert [first.shared(), other.shared(), other.shared()] == [1, 1, 1]


def test_a_key_that_changes() -> None:
    """The key is asked for at each call: an object that becomes another has other values."""
    shop = Shop("a")
    assert [shop.price(1) for _ in range(3)][-1][0] == "a"
    shop.name = "b"
    assert [shop.price(1) for _ in range(3)][-1][0] == "b"


def test_a_key_method_that_fails() -> None:
    """Its error reaches the caller; the call is no hit of somebody else's."""

    class Broken(Shop):
        def __stampede_key__(self) -> str:
            raise ZeroDivisionError

    Shop("a").price(1)
    with pytest.raises(ZeroDivisionError):
        Broken("a").price(1)


def test_keys_of_self_are_exact() -> None:
    """`__stampede_key__` may answer 1, True or "1"."""

    class Any_:
        def __init__(self, key: Any) -> None:
            self.key = key

        def __stampede_key__(self) -> Any:
            return self.key

        @cached(strict=False)
        def me(self) -> Any:
            return type(self.key), self.key

    for _ in range(3):
        for key in (1, True, 1.0, "1", (1,), None):
            assert Any_(key).me() == (type(key), key)


def test_classes_of_one_key_are_told_apart() -> None:
    """A method of a base class: `Cat("a")` and `Dog("a")` are not each other."""

    class Animal:
        def __init__(self, name: str) -> None:
            self.name = name

        def __stampede_key__(self) -> str:
            return self.name

        @cached
        def sound(self) -> str:
            return type(self).__name__

    class Cat(Animal): ...

    class Dog(Animal): ...

    for _ in range(3):
        assert (Cat("a").sound(), Dog("a").sound()) == ("Cat", "Dog")


def test_bound_methods_look_like_methods() -> None:
    """Frameworks ask for name, signature, docstring and colour."""
    shop = Shop("a")
    assert shop.price.__name__ == "price"
    assert shop.price.__doc__ == Shop.price.__doc__ == "Its docstring."
    assert str(inspect.signature(shop.price)) == "(item: 'Any', *, tax: 'bool' = True) -> 'Any'"
    assert str(inspect.signature(Shop.price)) == "(self, item: 'Any', *, tax: 'bool' = True) -> 'Any'"
    assert shop.price.__self__ is shop
    assert shop.price.__wrapped__(1) == ("a", 1, True)
    assert shop.price.__module__ == __name__
    assert shop.price.__qualname__ == "Shop.price"
    assert callable(shop.price)


@pytest.mark.parametrize("method", [Shop("a").stock, Shop.stock, Shop.amade, Shop.arate, Shop("a").arate])
def test_bound_methods_keep_their_colour(method: Any) -> None:
    """Starlette and others ask this to decide whether to await: a coroutine would be rendered as the answer."""
    assert asyncio.iscoroutinefunction(method)
    if hasattr(inspect, "markcoroutinefunction"):  # Python 3.12
        assert inspect.iscoroutinefunction(method)


def test_plain_methods_are_no_coroutine_functions() -> None:
    """And the other way round."""
    for method in (Shop("a").price, Shop.price, Shop.made, Shop.rate):
        assert not asyncio.iscoroutinefunction(method)
        assert not inspect.iscoroutinefunction(method)


@pytest.mark.parametrize("name", ["price", "made", "made_too", "rate"])
def test_bound_methods_can_be_pickled(name: str) -> None:
    """A process pool sends `shop.price` with its shop."""
    again = pickle.loads(pickle.dumps(getattr(Shop("a"), name)))
    assert had(again(1)) == had(getattr(Shop("a"), name)(1))


def test_unbound_methods_can_be_pickled() -> None:
    """`pool.map(Shop.price, shops)`: by name, as functions are."""
    for method in (Shop.price, Shop.rate, Shop.stock):
        assert pickle.loads(pickle.dumps(method)) is method


def test_bound_methods_compare_as_methods_do() -> None:
    """Signals and event lists remove a handler by equality."""
    shop, other = Shop("a"), Shop("a")
    assert shop.price == shop.price
    assert hash(shop.price) == hash(shop.price)
    assert shop.price != other.price
    assert shop.price != shop.stock


def test_objects_are_not_kept() -> None:
    """The cache keeps values, not the objects whose methods computed them."""
    shop = Shop("a")
    shop.price(1)
    shop.price(1)
    gone = weakref.ref(shop)
    del shop
    gc.collect()
    assert gone() is None


def test_disabled_methods() -> None:
    """`disabled()` reaches methods too."""
    shop = Shop("a")
    shop.price(1)
    with disabled():
        shop.price(1)
        shop.price(1)
    shop.price(1)
    assert Shop.calls == 3


def test_properties_above() -> None:
    """`@property` above `@cached` is a common pair."""

    class Report(Shop):
        @property
        @cached
        def total(self) -> int:
            Shop.calls += 1
            return Shop.calls

    assert [Report("a").total, Report("a").total, Report("b").total] == [1, 1, 2]


def test_a_cache_s_own_decorator() -> None:
    """`@cache.cached` in a class body."""
    cache = Cache()

    class Local(Shop):
        @cache.cached(ttl=5)
        def here(self) -> str:
            return self.name

    assert Local("a").here() == "a"
    assert Local("a").here.cache is cache


def test_a_method_put_on_a_class_later() -> None:
    """Decorated elsewhere and assigned: a plain function binds as plain functions do."""

    def later(self: Shop, item: int) -> Any:
        return self.name, item

    class Late(Shop):
        pass

    Late.later = cached(later)  # type: ignore[attr-defined]
    for _ in range(3):
        assert Late("a").later(1) == ("a", 1)  # type: ignore[attr-defined]
        assert Late("b").later(1) == ("b", 1)  # type: ignore[attr-defined]
