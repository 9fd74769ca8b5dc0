"""All decorated functions, and the switches that make their calls refresh or bypass the cache."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from stampede.runtime import forks, process_lock

__all__ = ["Block", "all_bindings", "bypassed", "current_block", "disabled", "overrides", "refreshing", "unbind_all"]


class Unbindable(Protocol):
    """A decorated function, which has found its cache and can forget it."""

    def unbind(self) -> None: ...
    def forget_fast(self) -> None: ...


all_bindings: weakref.WeakSet[Unbindable] = weakref.WeakSet()


class Block:
    """A `with` block inside which calls refresh or bypass the cache: one cache, or all."""

    def __init__(self, cache: Any = None, *, bypass: bool = False) -> None:
        self.cache = cache
        self.bypass = bypass  # calls go straight to the functions; else each key is computed anew, once
        self._begun: dict[tuple[Any, str], bool] = {}  # the keys computed in this block, and whether each is stored

    def has(self, owner: object, key: str) -> bool:
        """Return whether the key's value was computed in this block, and stored."""
        return self._begun.get((owner, key), False)

    def takes(self, owner: object, key: str) -> bool:
        """Return whether the caller is the one to compute the key anew. Called under the process lock."""
        if (owner, key) in self._begun:
            return False
        self._begun[owner, key] = False
        return True

    def settle(self, owner: object, key: str, *, stored: bool) -> None:
        """Note how the computation ended. If its value was not stored, the next caller computes the key again."""
        if stored:
            self._begun[owner, key] = True
        else:
            self._begun.pop((owner, key), None)


class Overrides:
    """The switches of this process: `off`, for all calls, and the open blocks."""

    off = False
    active = False
    """Whether any switch is on. A hit checks only this; a generated hit not even that, as its table is empty then."""

    def __init__(self) -> None:
        self.blocks: set[Block] = set()
        forks.in_child(self._in_child)

    def _in_child(self) -> None:
        """Drop the blocks of other threads, which do not exist in the child and would never leave them."""
        self.blocks.intersection_update(_blocks.get())
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
        self.active = self.off or bool(self.blocks)


_blocks: ContextVar[tuple[Block, ...]] = ContextVar("stampede_blocks", default=())
_off = Block(bypass=True)

overrides = Overrides()
overrides.turn(off=os.environ.get("STAMPEDE_DISABLED", "") not in ("", "0"))


def current_block(cache: Callable[[], Any]) -> Block | None:
    """Return the innermost open block around the caller that concerns this cache, or None."""
    if not overrides.active:
        return None
    if overrides.off:
        return _off
    for block in reversed(_blocks.get()):
        if block in overrides.blocks and (block.cache is None or block.cache is cache()):
            return block
    return None


def unbind_all() -> None:
    """Make every function find its cache again at its next call."""
    for cached in list(all_bindings):
        cached.unbind()


@contextmanager
def disabled() -> Iterator[None]:
    """Disable all caches in a block: calls go straight to the functions, in all threads.

    >>> from stampede.testing import disabled
    >>> numbers = iter([1, 2])
    >>> with disabled():
    ...     [cache.get_or_compute("k", lambda: next(numbers)) for _ in range(2)]
    [1, 2]
    """
    before = overrides.off
    try:
        overrides.turn(off=True)
        unbind_all()  # or generated hits would go on
        yield
    finally:
        overrides.turn(off=before)
        unbind_all()


@contextmanager
def refreshing(cache: Any = None) -> Iterator[None]:
    """Compute every cached call in a block anew, once for each key, and store the value: an admin's "reload".

    This concerns the calls of this thread or task, and of tasks begun in the block, while the block is open.
    `Cache.refreshing` is for the functions and keys of one cache.

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
    """Make cached calls in a block go straight to the functions: nothing is looked up, and nothing is stored.

    This concerns the same calls as `refreshing` does. Other verbs (`get`, `set`, `invalidate`) work as usual.

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
    with _inside(Block(cache, bypass=True)):
        yield


@contextmanager
def _inside(block: Block) -> Iterator[None]:
    try:
        overrides.open(block)
        _blocks.set((*_blocks.get(), block))
        for cached in list(all_bindings):
            cached.forget_fast()  # its hits would not see the block; nothing is adopted while it is open
        yield
    finally:
        # Remove only this block: generators share their callers' context, and leave their blocks in any order.
        _blocks.set(tuple(each for each in _blocks.get() if each is not block))
        overrides.close(block)
