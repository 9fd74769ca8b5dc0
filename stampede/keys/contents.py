"""What an object holds, as a text that is the same in every process: of data, and of objects that are made of data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copyreg import dispatch_table
from hashlib import blake2b
from typing import Any

from stampede.errors import KeyingError
from stampede.keys.canonical import canonical
from stampede.keys.names import DATA, name_of, root_of

__all__ = ["Contents"]

MOST = 100_000
"""Parts of one object. What has more of them is not told."""

_LONG = 200


class Contents:
    """Tells one object. `named` gives the texts of functions, classes and modules: what has a name, or code."""

    def __init__(self, named: Callable[[Any], str | None], around: Contents | None = None) -> None:
        """`around`: what this is a part of. It counts there, or a web application would be walked through for hours."""
        self._named = named
        self._above: list[Any] = []
        self._parts: Iterator[int] = itertools.count() if around is None else around._parts
        self.is_data = True  # nothing in it can change its state where nobody sees it

    def text(self, value: Any) -> str:
        """KeyingError if it can't be told."""
        for distance, each in enumerate(reversed(self._above)):
            if each is value:
                return f"<{distance} above>"
        if next(self._parts) >= MOST:
            raise KeyingError(f"it has more than {MOST} parts")
        self._above.append(value)
        try:
            return self._told(value)
        except RecursionError:
            raise KeyingError("its parts go too deep") from None
        finally:
            self._above.pop()

    def _told(self, value: Any) -> str:
        named = self._named(value)
        if named is not None:
            return named
        kind = type(value)
        if kind in (bytes, bytearray) and len(value) > _LONG:
            return f"{kind.__name__} {blake2b(value).hexdigest()}"
        try:
            return canonical(value)
        except KeyingError:
            pass
        if kind in (list, tuple):
            return f"{kind.__name__}({','.join(map(self.text, value))})"
        if kind in (set, frozenset):
            return f"{kind.__name__}({','.join(sorted(map(self.text, value)))})"
        if kind is dict:
            return f"dict({','.join(f'{self.text(key)}:{self.text(each)}' for key, each in value.items())})"
        return self._made(value)

    def _made(self, value: Any) -> str:
        """As what makes it anew, which a class tells to `copy` and to pickle."""
        if not any(_is_data(each) for each in self._above):
            self.is_data = False
        try:
            registered = dispatch_table.get(type(value))
            made = value.__reduce_ex__(4) if registered is None else registered(value)
        except Exception as error:  # locks, sockets, and what holds them
            raise KeyingError(f"a {name_of(type(value))} can't be told") from error
        if isinstance(made, str):
            return f"<{type(value).__module__}:{made}>"
        parts = ([*part] if isinstance(part, Iterator) else part for part in made)
        return f"made({','.join(map(self.text, parts))})"


def _is_data(value: Any) -> bool:
    kind = type(value)
    return kind is slice or root_of(kind) in DATA or root_of(kind) == "re"
