"""Functions of the same name: none may be served a value that another one computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stampede.errors import OptionError
from stampede.keys import Identity

__all__ = ["DuplicateNames", "disambiguated"]


_codes: dict[str, str] = {}
"""The fingerprint of the first function that this process decorated under each name."""


def disambiguated(identity: Identity) -> Identity:
    """Return the identity, told by its code if this process had another function of this name, as after a reload."""
    named = identity.named and _codes.setdefault(identity.name, identity.code) == identity.code
    return replace(identity, named=named)


class DuplicateNames:
    """The functions of one cache. Two of one name must have captured the same objects, unless their keys differ."""

    def __init__(self) -> None:
        self._captured: dict[str, list[Callable[[], Any]]] = {}

    def add(self, name: str, identity: Identity) -> None:
        """Add a function. OptionError: one of this name captured other objects, and their keys would be equal."""
        if identity.named or not identity.captured:
            return
        known = self._captured.setdefault(name, [_ref(value) for _, value in identity.captured])
        others = [name for (name, value), ref in zip(identity.captured, known, strict=True) if ref() is not value]
        if others:
            raise OptionError(
                f"{identity.qualname} is decorated again, and has captured another {', '.join(others)}, which is no "
                "part of its keys: the two functions would share values. Make it a parameter, or decorate one function "
                "at module level; or tell them apart by a version= (other than 'code'), a namespace= or a key="
            )


def _ref(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
