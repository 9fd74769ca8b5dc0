"""Rows of a database as objects: SQLAlchemy's mapped classes and Django's models.

What has been loaded of them travels, and is detached when it comes back. Their packages are imported once such a class
is met.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stampede.codec.values import Shape

__all__ = ["advice", "is_row", "related", "row_shape"]

SHAPES = {"sqlalchemy": "stampede.codec.mapped", "django": "stampede.codec.django"}


def is_row(kind: type) -> bool:
    """Whether it is a class whose objects are rows."""
    return _package(kind) is not None


def _package(kind: type) -> str | None:
    mapper = getattr(sys.modules.get("sqlalchemy.orm"), "Mapper", None)
    if mapper is not None and isinstance(vars(kind).get("__mapper__"), mapper):
        return "sqlalchemy"
    model = getattr(sys.modules.get("django.db.models"), "Model", None)
    if model is not None and issubclass(kind, model) and hasattr(kind, "_meta") and not kind._meta.abstract:
        return "django"
    return None


def row_shape(kind: type, tag: str) -> Shape | None:
    """How its objects travel; None if they are no rows."""
    package = _package(kind)
    if package is None:
        return None
    made: Shape = import_module(SHAPES[package]).row_shape(kind, tag)
    return made


def related(kind: type) -> Iterator[Any]:
    """The classes that its objects may hold: of its columns, and of the rows that they lead to."""
    package = _package(kind)
    if package is not None:
        yield from import_module(SHAPES[package]).related(kind)


def advice(kind: type) -> str | None:
    """What to return instead of something of theirs that is no row."""
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__}
    return next((told for name, told in ADVICE.items() if name in names), None)


ADVICE = {
    "django.QuerySet": "it has not asked the database yet, or would ask it again: return list(it)",
    "django.SimpleLazyObject": "it stands for another object: return that one",
    "django.Promise": "it is translated anew wherever it is shown: return str(it)",
    "django.BaseManager": "return list(it.all())",
    "sqlalchemy.Result": "its first reader would use it up: return it.all()",
    "sqlalchemy.ScalarResult": "its first reader would use it up: return it.all()",
    "sqlalchemy.MappingResult": "its first reader would use it up: return it.all()",
    "sqlalchemy.Row": "return tuple(it), or it._asdict()",
    "sqlalchemy.RowMapping": "return dict(it)",
    "sqlalchemy.Query": "it has not asked the database yet: return it.all()",
    "sqlalchemy.Select": "it has not asked the database yet: return what it finds",
    "sqlalchemy.InstrumentedList": "return list(it)",
    "sqlalchemy.InstrumentedSet": "return set(it)",
    "sqlalchemy.InstrumentedDict": "return dict(it)",
}
