"""Invalidate when the transaction commits, not before: otherwise a caller may compute and store the old data."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from stampede import cached

database = sqlite3.connect(":memory:")


@cached(ttl=600)
def price(article: str) -> float:
    (found,) = database.execute("SELECT price FROM articles WHERE name = ?", [article]).fetchone()
    return found


@contextmanager
def transaction() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Give `on_commit`, like Django's `transaction.on_commit`: hooks run after the commit, and not after a rollback."""
    hooks: list[Callable[[], object]] = []
    with database:  # commits at the end of the block, rolls back on an exception
        yield hooks.append
    for hook in hooks:
        hook()


def change(article: str, new: float, *, fail: bool = False) -> None:
    with transaction() as on_commit:
        database.execute("UPDATE articles SET price = ? WHERE name = ?", [new, article])
        price.invalidate(article, via=on_commit)
        print(f"  inside the transaction the cache still has {price.peek(article).value}")
        if fail:
            raise ValueError("changed our mind")


if __name__ == "__main__":
    with closing(database):
        database.execute("CREATE TABLE articles (name TEXT, price REAL)")
        database.execute("INSERT INTO articles VALUES ('tea', 9.5)")
        print("tea costs", price("tea"))
        change("tea", 12.0)
        print("committed: tea costs", price("tea"))
        try:
            change("tea", 99.0, fail=True)
        except ValueError:
            print("rolled back: the cache still has", price.peek("tea").value)
