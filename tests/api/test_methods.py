"""`@cached` in class bodies: methods, class methods, static methods, and which objects can be `self`."""

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
    """Each kind of method. The methods return who they are, and the class counts the computations."""

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
    """Inherits all methods."""


class Discount(Shop):
    """Overrides a method and calls the overridden one."""

    @cached
    def price(self, item: Any, *, tax: bool = True) -> Any:
        return "half", super().price(item, tax=tax)


@pytest.fixture(autouse=True)
def _from_0() -> None:
    Shop.calls = 0


def test_methods_are_kept_per_object_key() -> None:
    """Values are stored by the object's key: objects with the same key share them, and other objects do not."""
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
    """Async methods and their verbs work as those of sync methods do."""

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
    """`@cached` works above and below `@classmethod`. Each subclass has its own values."""
    for _ in range(3):
        assert had(getattr(Shop, name)(1)) == ("Shop", 1)
        assert had(getattr(Shop("a"), name)(1)) == ("Shop", 1)
        assert had(getattr(Corner, name)(1)) == ("Corner", 1)
    assert Shop.calls == 2
    method = getattr(Shop, name)
    if name != "made_too" and sys.version_info >= (3, 13):  # there, a class method no longer binds descriptors
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
    """`@cached` works above and below `@staticmethod`. A class, its objects and its subclasses share the values."""
    for _ in range(3):
        for owner in (Shop, Shop("a"), Corner, Corner("b")):
            assert had(getattr(owner, name)(1)) == 1
    assert Shop.calls == 1
    assert had(getattr(Shop, name).invalidate(1)) is True
    assert had(getattr(Shop("a"), name).peek(1)) is None


def test_a_static_method_with_a_first_argument_of_any_name() -> None:
    """The first argument of a static method is not taken for `self`, although `@cached` cannot see `@staticmethod`."""

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
    """The verbs of `obj.m` apply to this object only. `invalidate_all` applies to all objects."""
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
    """A method and its verbs can be called on the class, with the object as first argument."""
    shop = Shop("a")
    assert Shop.price(shop, 1) == ("a", 1, True)
    assert Shop.price.key(shop, 1) == shop.price.key(1)
    assert Shop.price.peek(shop, 1).value == ("a", 1, True)
    assert Shop.price.invalidate(shop, 1) is True
    assert shop.price.peek(1) is None
    assert isinstance(Shop.price.cache, Cache)


def test_inheritance() -> None:
    """An overriding method has its own values. Invalidating one does not end that of the overridden method."""
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
    """Frozen dataclasses and enum members can be `self` as they are. A class with slots can define a key."""
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
    """An object without a stable identity is refused as `self`. The error names the remedy."""
    plain = Plain()
    for call in (plain.value, lambda: Plain.value(plain), plain.value.peek, plain.value.key):
        with pytest.raises(KeyingError, match=r"'self'.*__stampede_key__"):
            call()
    assert plain.calls == 0


def test_ignored_self() -> None:
    """With `ignore="self"`, all objects share one value."""
    first, other = Plain(), Plain()
    assert [first.shared(), other.shared(), other.shared()] == [1, 1, 1]


def test_a_key_that_changes() -> None:
    """The key of an object is read at each call. If it changes, the object has other values."""
    shop = Shop("a")
    assert [shop.price(1) for _ in range(3)][-1][0] == "a"
    shop.name = "b"
    assert [shop.price(1) for _ in range(3)][-1][0] == "b"


def test_a_key_method_that_fails() -> None:
    """If `__stampede_key__` fails, the caller gets its error, and no value of another object."""

    class Broken(Shop):
        def __stampede_key__(self) -> str:
            raise ZeroDivisionError

    Shop("a").price(1)
    with pytest.raises(ZeroDivisionError):
        Broken("a").price(1)


def test_keys_of_self_are_exact() -> None:
    """If `__stampede_key__` returns 1, True or "1", these are different keys."""

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
    """Objects of different subclasses do not share values of an inherited method, even if their keys are equal."""

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
    """A bound method has the name, the signature and the docstring of its method, which frameworks read."""
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
    """A bound async method counts as a coroutine function. Otherwise, frameworks would not await its result."""
    assert asyncio.iscoroutinefunction(method)
    if hasattr(inspect, "markcoroutinefunction"):  # Python 3.12
        assert inspect.iscoroutinefunction(method)


def test_plain_methods_are_no_coroutine_functions() -> None:
    """A bound sync method does not count as a coroutine function."""
    for method in (Shop("a").price, Shop.price, Shop.made, Shop.rate):
        assert not asyncio.iscoroutinefunction(method)
        assert not inspect.iscoroutinefunction(method)


@pytest.mark.parametrize("name", ["price", "made", "made_too", "rate"])
def test_bound_methods_can_be_pickled(name: str) -> None:
    """A bound method can be pickled with its object, for example for a process pool."""
    again = pickle.loads(pickle.dumps(getattr(Shop("a"), name)))
    assert had(again(1)) == had(getattr(Shop("a"), name)(1))


def test_unbound_methods_can_be_pickled() -> None:
    """A method of a class can be pickled by its name, as a function can."""
    for method in (Shop.price, Shop.rate, Shop.stock):
        assert pickle.loads(pickle.dumps(method)) is method


def test_bound_methods_compare_as_methods_do() -> None:
    """Bound methods are compared as ordinary methods are. Lists of handlers remove a handler by equality."""
    shop, other = Shop("a"), Shop("a")
    assert shop.price == shop.price
    assert hash(shop.price) == hash(shop.price)
    assert shop.price != other.price
    assert shop.price != shop.stock


def test_objects_are_not_kept() -> None:
    """The cache stores values. It does not keep the objects whose methods computed them."""
    shop = Shop("a")
    shop.price(1)
    shop.price(1)
    gone = weakref.ref(shop)
    del shop
    gc.collect()
    assert gone() is None


def test_disabled_methods() -> None:
    """`disabled()` applies to methods, too."""
    shop = Shop("a")
    shop.price(1)
    with disabled():
        shop.price(1)
        shop.price(1)
    shop.price(1)
    assert Shop.calls == 3


def test_properties_above() -> None:
    """`@property` works above `@cached`."""

    class Report(Shop):
        @property
        @cached
        def total(self) -> int:
            Shop.calls += 1
            return Shop.calls

    assert [Report("a").total, Report("a").total, Report("b").total] == [1, 1, 2]


def test_a_cache_s_own_decorator() -> None:
    """`@cache.cached` works in a class body and uses its own cache."""
    cache = Cache()

    class Local(Shop):
        @cache.cached(ttl=5)
        def here(self) -> str:
            return self.name

    assert Local("a").here() == "a"
    assert Local("a").here.cache is cache


def test_a_method_put_on_a_class_later() -> None:
    """A decorated function that is assigned to a class later works as a method."""

    def later(self: Shop, item: int) -> Any:
        return self.name, item

    class Late(Shop):
        pass

    Late.later = cached(later)  # type: ignore[attr-defined]
    for _ in range(3):
        assert Late("a").later(1) == ("a", 1)  # type: ignore[attr-defined]
        assert Late("b").later(1) == ("b", 1)  # type: ignore[attr-defined]
