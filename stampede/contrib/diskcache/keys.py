"""Keys as exact texts, and texts as the keys that they were made of. No pickle is involved."""

from __future__ import annotations

import ast
from typing import Any

from stampede.keys.canonical import canonical

__all__ = ["OpaqueKey", "key_of", "text_of"]


class OpaqueKey(str):
    """A stored key that can't be read back, for example one with a date in it. It finds the entry, as the key does.

    A key of numbers, strings, bytes, None, and tuples, lists, dicts and sets of them is read back as it was.

    >>> from datetime import date
    >>> from stampede.contrib.diskcache import Cache
    >>> with Cache() as cache:
    ...     cache[date(2026, 1, 31)] = "closed"
    ...     (key,) = cache
    ...     cache[key], type(key).__name__
    ('closed', 'OpaqueKey')
    """

    __slots__ = ()


def text_of(key: Any) -> str:
    """Return the exact text of a key: `1`, `1.0`, `True` and `'1'` are four keys. KeyingError: it has none."""
    return str(key) if type(key) is OpaqueKey else canonical(key)


def key_of(text: str) -> Any:
    """Return the key that a text was made of, or an OpaqueKey if the text is not that of plain values."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last three: from hostile texts
        return OpaqueKey(text)
