"""`stampede.current()`: the context of the computation that the caller is inside."""

from __future__ import annotations

from stampede.algorithm.context import Context, running
from stampede.errors import NoComputation

__all__ = ["current"]


def current() -> Context:
    """Return the context of the computation that the caller is inside: what is stored, and what to do with the value.

    Inside a function of many keys (`@cached.many`, `get_or_compute_many`), `current()[key]` is the context of one key.
    A function that goes straight through (`disabled`, `bypassed`) has a context without effect.

    >>> @cached(ttl=60)
    ... def page() -> str:
    ...     if stampede.current().reason == "missing":
    ...         stampede.current().dont_keep()
    ...     return "draft"
    >>> page(), page.peek()
    ('draft', None)
    """
    context = running()
    if context is None:
        raise NoComputation(
            "current() was called outside a cached function: call it inside one, and in the thread that runs it"
        )
    return context  # type: ignore[return-value]  # EachContext has what a function of many keys may use
