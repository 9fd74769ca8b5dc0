"""Functions of one name: none is served what another one computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stampede.errors import OptionError
from stampede.keys import Identity

__all__ = ["DuplicateNames", "told_apart"]


_codes: dict[str, str] = {}
"""The code of the first function that this process has decorated under a name."""


def told_apart(identity: Identity) -> Identity:
    """Return the same; told by its code if another function had its name in this process, as after a reload."""
    named = identity.named and _codes.setdefault(identity.name, identity.code) == identity.code
    return replace(identity, named=named)


class DuplicateNames:
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
