"""Signatures, annotations and slots of functions and classes, also while names in annotations are not defined yet.

Since Python 3.14 a name that is missing when annotations are read raises NameError: that of a class whose method is
being decorated, or one that is imported under TYPE_CHECKING. Here it becomes a ForwardRef."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any

__all__ = ["annotations_of", "signature_of", "slots_of"]

if sys.version_info >= (3, 14):
    from annotationlib import Format

    def signature_of(function: Callable[..., Any]) -> inspect.Signature:
        """Return the signature of a function."""
        return inspect.signature(function, annotation_format=Format.FORWARDREF)

    def annotations_of(definition: Any) -> dict[str, Any]:
        """Return the own annotations of a function or class."""
        return inspect.get_annotations(definition, format=Format.FORWARDREF)

else:

    def signature_of(function: Callable[..., Any]) -> inspect.Signature:
        """Return the signature of a function."""
        return inspect.signature(function)

    def annotations_of(definition: Any) -> dict[str, Any]:
        """Return the own annotations of a function or class."""
        return inspect.get_annotations(definition)


@lru_cache(1024)
def slots_of(kind: type) -> frozenset[str]:
    """Return the names of the attributes that are defined in `__slots__`, by the class or its bases."""
    return frozenset(
        name for base in kind.__mro__ for name, each in vars(base).items() if isinstance(each, MemberDescriptorType)
    )
