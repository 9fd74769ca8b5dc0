"""All decorated functions, and what makes calls go another way than usual: for all, or in one block's context."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from stampede.runtime import forks, process_lock

__all__ = ["Block", "around", "bypassed", "disabled", "enrolled", "overrides", "refreshing", "unbind_all"]


class Unbindable(Protocol):
    """What has found its cache."""

    def unbind(self) -> None: ...
    def forget_fast(self) -> None: ...


enrolled: weakref.WeakSet[Unbindable] = weakref.WeakSet()


class Block:
    """A `with` block, inside which calls go another way: of one cache's functions, or of all."""

    def __init__(self, cache: Any = None, *, straight: bool = False) -> None:
        self.cache = cache
        self.straight = straight  # to the functions; else each key is computed anew, once
        self._kept: dict[tuple[Any, str], bool] = {}  # what has been begun, and whether it is stored by now

    def has(self, owner: object, key: str) -> bool:
        """Is the key's value one that was computed in this block?"""
        return self._kept.get((owner, key), False)

    def takes(self, owner: object, key: str) -> bool:
        """Whether the caller is the one to compute it anew; asked under the process lock."""
        if (owner, key) in self._kept:
            return False
        self._kept[owner, key] = False
        return True

    def settle(self, owner: object, key: str, *, stored: bool) -> None:
        """What has come of it. What wasn't stored is computed again by the next."""
        if stored:
            self._kept[owner, key] = True
        else:
            self._kept.pop((owner, key), None)


class Overrides:
    off = False
    thrown = False
    """Whether any call may have to go another way. Hits look at no more than this, and the fastest not even at it."""

    def __init__(self) -> None:
        self.blocks: set[Block] = set()
        forks.in_child(self._in_child)

    def _in_child(self) -> None:
        """Blocks of other threads are never left here."""
        self.blocks.intersection_update(_around.get())
        self._set()

    def turn(self, *, off: bool) -> None:
        with process_lock.lock:
            self.off = off
            self._set()

    def open(self, block: Block) -> None:
        with process_lock.lock:
            self.blocks.add(block)
            self._set()

    def close(self, block: Block) -> None:
        with process_lock.lock:
            self.blocks.discard(block)
            self._set()

    def _set(self) -> None:
        self.thrown = self.off or bool(self.blocks)


_around: ContextVar[tuple[Block, ...]] = ContextVar("stampede_blocks", default=())
_off = Block(straight=True)

overrides = Overrides()
overrides.turn(off=os.environ.get("STAMPEDE_DISABLED", "") not in ("", "0"))


def around(cache: Callable[[], Any]) -> Block | None:
    """The innermost open block around the caller that is about this cache."""
    if not overrides.thrown:
        return None
    if overrides.off:
        return _off
    for block in reversed(_around.get()):
        if block in overrides.blocks and (block.cache is None or block.cache is cache()):
            return block
    return None


def unbind_all() -> None:
    """Every function finds its cache again at its next call."""
    for cached in list(enrolled):
        cached.unbind()


@contextmanager
def disabled() -> Iterator[None]:
    """Calls go straight to the functions.

    >>> from stampede.testing import disabled
    >>> numbers = iter([1, 2])
    >>> with disabled():
    ...     [cache.get_or_compute("k", lambda: next(numbers)) for _ in range(2)]
    [1, 2]
    """
    before = overrides.off
    try:
        overrides.turn(off=True)
        unbind_all()  # or hits would go on
        yield
    finally:
        overrides.turn(off=before)
        unbind_all()


@contextmanager
def refreshing(cache: Any = None) -> Iterator[None]:
    """Inside the block every cached call computes anew and stores, once for each key: an admin's "reload".

    It is about the calls of this thread or task, and of the tasks that are begun inside, for as long as the block is
    open; `Cache.refreshing` is about the functions and keys of one cache.

    >>> words = iter(["first", "again", "more"])
    >>> @cached(version=1)
    ... def page() -> str:
    ...     return next(words)
    >>> page(), page()
    ('first', 'first')
    >>> with stampede.refreshing():
    ...     page()
    'again'
    """
    with _inside(Block(cache)):
        yield


@contextmanager
def bypassed(cache: Any = None) -> Iterator[None]:
    """Inside the block cached calls go straight to the functions: nothing is looked up, and nothing stored.

    Whose calls these are is as in `refreshing`. What other verbs (`get`, `set`, `invalidate`) are asked for, they do.

    >>> words = iter(["first", "again", "more"])
    >>> @cached(version=1)
    ... def page() -> str:
    ...     return next(words)
    >>> page(), page()
    ('first', 'first')
    >>> with stampede.bypassed():
    ...     page()
    'again'
    """
    with _inside(Block(cache, straight=True)):
        yield


@contextmanager
def _inside(block: Block) -> Iterator[None]:
    try:
        overrides.open(block)
        _around.set((*_around.get(), block))
        for cached in list(enrolled):
            cached.forget_fast()  # they find their values without asking; and learn nothing while the switch is thrown
        yield
    finally:
        # And no more than this one: generators, whose context is their callers', leave their blocks in any order.
        _around.set(tuple(each for each in _around.get() if each is not block))
        overrides.close(block)
