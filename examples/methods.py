"""Cached methods: the object identifies itself, and is part of the key. Class and static methods work, too."""

from dataclasses import dataclass

from stampede import KeyingError, cached


class Shop:
    def __init__(self, number: int) -> None:
        self.number = number

    def __stampede_key__(self) -> int:
        return self.number

    @cached(ttl=60)
    def turnover(self, day: str) -> float:
        print(f"  computing the turnover of shop {self.number}")
        return 1000.0 * self.number

    @cached(ttl=60)  # above @classmethod, so that Shop.best.invalidate() and the like exist
    @classmethod
    def best(cls) -> int:
        return 7


@dataclass(frozen=True)
class Point:  # a frozen dataclass is its own key
    x: int
    y: int

    @cached(ttl=60)
    def height(self) -> int:
        return self.x + self.y


class Anonymous:
    @cached(ttl=60)
    def answer(self) -> int:
        return 42


if __name__ == "__main__":
    shop, same, another = Shop(7), Shop(7), Shop(8)
    print(shop.turnover("monday"), same.turnover("monday"), another.turnover("monday"))
    print(shop.turnover.key("monday"))
    shop.turnover.invalidate("monday")  # only the one of shop 7
    print(shop.turnover.peek("monday"), another.turnover.peek("monday").value)
    print(Shop.best(), Shop.best.peek().value, Point(1, 2).height())
    try:
        Anonymous().answer()
    except KeyingError as error:
        print(error)
