"""Functions of one name: none is served what another one computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from operator import is_
from typing import Any

from stampede import decisions
from stampede.errors import OptionError
from stampede.keys import Identity

__all__ = ["Namesakes", "told_apart"]


class _Editions:
    """The classes that functions of one code knew: since a reload there may be others, by the same names."""

    def __init__(self) -> None:
        self._next = count()
        self._known: dict[int, list[Callable[[], Any]]] = {}

    def of(self, classes: tuple[type, ...]) -> int:
        with decisions.lock:
            for edition, refers in [*self._known.items()]:
                known = [refer() for refer in refers]
                if len(known) == len(classes) and all(map(is_, known, classes)):
                    return edition
                if any(each is None for each in known):
                    del self._known[edition]  # there will be none of these any more
            edition = next(self._next)
            self._known[edition] = [*map(_ref, classes)]
            return edition


_codes: dict[str, str] = {}
"""The code of the first function that this process has decorated under a name."""

_editions: dict[tuple[str, str], _Editions] = {}
"""Of the functions of one name and code."""


def told_apart(identity: Identity) -> Identity:
    """The same; where another function had its name in this process, as it was loaded anew, told by its code; and of
    those that have the same code, by the classes that it knows."""
    named = identity.named and _codes.setdefault(identity.name, identity.code) == identity.code
    if not identity.classes:
        return replace(identity, named=named)  # and nothing is noted: each closure may have a code of its own
    editions = _editions.setdefault((identity.name, identity.code), _Editions())
    return replace(identity, named=named, edition=editions.of(identity.classes))


class Namesakes:
    """The functions of one cache: those of one name have captured the very same, where that can't be told by a key."""

    def __init__(self) -> None:
        self._captured: dict[str, list[Callable[[], Any]]] = {}

    def add(self, name: str, identity: Identity) -> None:
        """OptionError if another has captured something else."""
        if identity.named or not identity.captured:
            return
        known = self._captured.setdefault(name, [_ref(it) for _, it in identity.captured])
        others = [what for (what, it), refer in zip(identity.captured, known, strict=True) if refer() is not it]
        if others:
            raise OptionError(
                f"{identity.qualname} is decorated once more, and has captured another {', '.join(others)}: nothing "
                "in its keys would tell whose value is whose. Make that a parameter, or decorate one function in a "
                "module; or tell them apart yourself, by a version= (other than 'code'), a namespace= or a key="
            )


def _ref(it: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(it)
    except TypeError:
        return lambda: it
