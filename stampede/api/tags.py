"""`stampede.invalidate_tags` and its like: on all caches of the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from stampede.api.registry import all_caches
from stampede.api.typing import Hook, OnError
from stampede.errors import EngineError
from stampede.runtime.colour import settled

__all__ = ["aexpire_tags", "ainvalidate_tags", "expire_tags", "invalidate_tags"]


def invalidate_tags(*tags: str, via: Hook | None = None, on_error: OnError | None = None) -> None:
    """Remove all values that carry one of these tags, from all caches of the settings: `Cache.invalidate_tags` on each.

    If an engine cannot be reached, the others are invalidated nevertheless, and EngineError is raised.

    >>> @cached(ttl=60, tags=["prices"])
    ... def price(item: str) -> int:
    ...     return len(item)
    >>> price("tea")
    3
    >>> stampede.invalidate_tags("prices")
    >>> price.peek("tea")
    """
    _on_each([partial(cache.invalidate_tags, *tags, via=via, on_error=on_error) for cache in all_caches()])


def expire_tags(*tags: str, via: Hook | None = None, on_error: OnError | None = None) -> None:
    """Mark all values that carry one of these tags as stale, in all caches of the settings: `Cache.expire_tags` on
    each. They are served while one caller computes.

    If an engine cannot be reached, the others are changed nevertheless, and EngineError is raised.

    >>> @cached(ttl=60, stale=60, tags=["prices"])
    ... def price(item: str) -> int:
    ...     return len(item)
    >>> price("tea")
    3
    >>> stampede.expire_tags("prices")
    >>> price.peek("tea").fresh > 0, price.peek("tea").value
    (False, 3)
    """
    _on_each([partial(cache.expire_tags, *tags, via=via, on_error=on_error) for cache in all_caches()])


async def ainvalidate_tags(*tags: str, via: Hook | None = None, on_error: OnError | None = None) -> None:
    """Remove all values that carry one of these tags, from all caches of the settings. This is `invalidate_tags`,
    awaited.

    >>> @cached(ttl=60, tags=["prices"])
    ... async def price(item: str) -> int:
    ...     return len(item)
    >>> async def main():
    ...     await price("tea")
    ...     await stampede.ainvalidate_tags("prices")
    ...     return await price.peek("tea")
    >>> print(asyncio.run(main()))
    None
    """
    work = [cache.ainvalidate_tags(*tags, via=via, on_error=on_error) for cache in all_caches()]
    _on_each([partial(_raised, error) for error in await settled(work)])


async def aexpire_tags(*tags: str, via: Hook | None = None, on_error: OnError | None = None) -> None:
    """Mark all values that carry one of these tags as stale, in all caches of the settings. This is `expire_tags`,
    awaited.

    >>> @cached(ttl=60, stale=60, tags=["prices"])
    ... async def price(item: str) -> int:
    ...     return len(item)
    >>> async def main():
    ...     await price("tea")
    ...     await stampede.aexpire_tags("prices")
    ...     return await price.peek("tea")
    >>> asyncio.run(main()).fresh > 0
    False
    """
    work = [cache.aexpire_tags(*tags, via=via, on_error=on_error) for cache in all_caches()]
    _on_each([partial(_raised, error) for error in await settled(work)])


def _on_each(acts: Sequence[Callable[[], object]]) -> None:
    """Do all, and raise the first EngineError afterwards."""
    failed: EngineError | None = None
    for act in acts:
        try:
            act()
        except EngineError as error:
            failed = failed or error
    try:
        if failed is not None:
            raise failed
    finally:
        del failed  # it refers to this frame


def _raised(error: BaseException | None) -> None:
    if error is not None:
        raise error
