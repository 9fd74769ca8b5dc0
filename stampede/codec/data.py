"""Arrays, frames and tables: their shapes are made once a value, or bytes, hold one, and their packages imported then.

Nobody else pays for them. A tag never changes its meaning.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from stampede.errors import CodecError

if TYPE_CHECKING:
    from stampede.codec.values import Raise, Shape, Shapes

__all__ = ["advice", "known_tag", "package_of", "rebuilder", "shape_for"]

PACKAGES = {"numpy": "arrays", "pandas": "frames", "polars": "tables", "pyarrow": "tables"}
"""Whose types they are, and the module here that knows how they travel."""


TEXTS = ("django.utils.safestring:SafeString", "markupsafe:Markup")
"""Texts that are marked as safe HTML, which templates give. They travel without being named."""


def package_of(kind: type) -> str | None:
    """The package of ours to know that a type comes from."""
    package = getattr(kind, "__module__", None)
    package = package.partition(".")[0] if isinstance(package, str) else None
    return package if package in PACKAGES and package in sys.modules else None


def shape_for(kind: type) -> Shape | None:
    """How values of exactly this type travel; None: it is none of theirs, or none that travels."""
    tag = f"{kind.__module__}:{kind.__qualname__}"
    if tag in TEXTS:
        return _text(tag, kind)
    package = package_of(kind)
    return None if package is None else _shapes(package).of(kind)


def advice(kind: type) -> str | None:
    """What to return instead of a value of theirs that doesn't travel, or of a class that stands on theirs."""
    for base in kind.__mro__:
        package = package_of(base)
        if package is None:
            continue
        shapes = _shapes(package)
        told = shapes.advice.get(base.__name__)
        if told is not None:
            return told
        if base is not kind and shapes.of(base) is not None:
            return f"return {_made(package, base)}, which is without what its class adds"
    return None


def _made(package: str, base: type) -> str:
    if base.__name__ == "ndarray":
        return "np.array(it)"
    return f"{_SHORT.get(package, package)}.{base.__name__}(it)"


_SHORT = {"numpy": "np", "pandas": "pd", "polars": "pl", "pyarrow": "pa"}


def known_tag(tag: Any) -> bool:
    return isinstance(tag, str) and tag.partition(".")[0] in PACKAGES


def rebuilder(tag: Any) -> Raise:
    """Values from what their shape has made of them. CodecError: there is no such tag, or its package is not here."""
    if tag in TEXTS:
        module, _, name = tag.partition(":")
        return _text(tag, getattr(importlib.import_module(module), name)).rebuild
    if not known_tag(tag):
        raise CodecError("bytes with a value of a type that is not known here")
    package = tag.partition(".")[0]
    try:
        make = _shapes(package).rebuild.get(tag)
    except ImportError as error:
        raise CodecError(f"the entry holds a value of {package}, which is not installed here") from error
    if make is None:
        raise CodecError("bytes with a value of a type that is not known here")
    return make


def _text(tag: str, kind: type) -> Shape:
    from stampede.codec.values import text_shape  # which needs what is here

    return text_shape(kind, tag)


@cache
def _shapes(package: str) -> Shapes:
    """As the module says that knows them; it imports what it needs."""
    shapes: Shapes = importlib.import_module(f"stampede.codec.{PACKAGES[package]}").of(package)
    return shapes
