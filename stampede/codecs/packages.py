"""Types of other packages: arrays, frames, tables, rows of an ORM, and strings that are marked as safe HTML. The module
that stores them, and their package, are imported only when a value or an entry holds one: other programs do not pay for
it. A tag never changes its meaning."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from stampede.codecs.stdlib import text_shape
from stampede.errors import CodecError
from stampede.keys.names import root_of

if TYPE_CHECKING:
    from stampede.codecs.stdlib import Rebuild, Shape

__all__ = ["advice", "is_row", "package_of", "rebuilder", "related", "row_shape", "shape_for"]

DATA = {"numpy": "numpy", "pandas": "pandas", "polars": "arrow", "pyarrow": "arrow"}
ROWS = {"sqlalchemy": "sqlalchemy", "django": "django"}
"""The packages, each with the module here that stores their values."""

TEXTS = ("django.utils.safestring:SafeString", "markupsafe:Markup")
"""String types that mark safe HTML, as templates return it. They are stored without being named in `trust`."""


def _module(package: str) -> Any:
    return importlib.import_module(f"stampede.codecs.{(DATA | ROWS)[package]}")


def package_of(kind: type) -> str | None:
    """Return the package of `DATA` that a type comes from; None if it comes from another one."""
    package = root_of(kind)
    return package if package in DATA and package in sys.modules else None


@cache
def _shapes(package: str) -> dict[type, Shape]:
    return {shape.type: shape for shape in _module(package).of(package)}


@cache
def _rebuilders(package: str) -> dict[str, Rebuild]:
    return {shape.tag: shape.rebuild for shape in _shapes(package).values()}


def _text(tag: str, kind: type) -> Shape:
    return text_shape(kind, tag)


def shape_for(kind: type) -> Shape | None:
    """Return how values of exactly this type are stored; None if it is unknown here, or can't be stored."""
    tag = f"{kind.__module__}:{kind.__qualname__}"
    if tag in TEXTS:
        return _text(tag, kind)
    package = package_of(kind)
    return None if package is None else _shapes(package).get(kind)


def rebuilder(tag: Any) -> Rebuild:
    """Return what makes values of the arguments behind a tag. CodecError: the tag is unknown, or not installed."""
    if tag in TEXTS:
        module, _, name = tag.partition(":")
        return _text(tag, getattr(importlib.import_module(module), name)).rebuild
    package = tag.partition(".")[0] if isinstance(tag, str) else None
    try:
        make = _rebuilders(package).get(tag) if package in DATA else None
    except ImportError as error:
        raise CodecError(f"the entry holds a value of {package}, which is not installed here") from error
    if make is None:
        raise CodecError("the entry holds a value of a type that is unknown here")
    return make


# -- rows: objects of SQLAlchemy's mapped classes and of Django's models ----------------------------------------------


def _orm(kind: type) -> str | None:
    mapper = getattr(sys.modules.get("sqlalchemy.orm"), "Mapper", None)
    if mapper is not None and isinstance(vars(kind).get("__mapper__"), mapper):
        return "sqlalchemy"
    model = getattr(sys.modules.get("django.db.models"), "Model", None)
    if model is not None and issubclass(kind, model) and hasattr(kind, "_meta") and not kind._meta.abstract:
        return "django"
    return None


def is_row(kind: type) -> bool:
    """Return whether objects of this class are rows of a database."""
    return _orm(kind) is not None


def row_shape(kind: type, tag: str) -> Shape | None:
    """Return how rows of this class are stored; None if its objects are not rows."""
    package = _orm(kind)
    if package is None:
        return None
    made: Shape = _module(package).row_shape(kind, tag)
    return made


def related(kind: type) -> Iterator[Any]:
    """Yield the classes of what rows of this class may hold: values of columns, and related rows."""
    package = _orm(kind)
    if package is not None:
        yield from _module(package).related(kind)


# -- values that can't be stored --------------------------------------------------------------------------------------


def advice(kind: type) -> str | None:
    """Return what to do instead of storing a value of this type, which is refused; None if there is no advice."""
    for base in kind.__mro__:
        known = ADVICE.get(f"{root_of(base)}.{base.__name__}")
        if known is not None:
            return known
        if base is not kind and package_of(base) is not None and shape_for(base) is not None:
            made = "np.array" if base.__name__ == "ndarray" else f"{root_of(base)}.{base.__name__}"
            return f"return {made}(it), without what its class adds"
    return None


_USED_UP = "its first reader would use it up: return it.all()"
_NOT_ASKED = "it has not queried the database yet"
ADVICE = {
    "builtins.memoryview": "return bytes(it)",
    "datetime.tzinfo": "use a zoneinfo.ZoneInfo, or a datetime.timezone",
    "numpy.MaskedArray": "return its .data and its .mask, or .filled()",
    "numpy.recarray": "return np.array(it.tolist(), it.dtype.descr), a plain structured array",
    "numpy.record": "return it.item(), a tuple",
    "pandas.GroupBy": "return what you compute from it",
    "pandas.ExtensionArray": "return pd.Series(it)",
    "pandas.BaseOffset": "return its .freqstr",
    "polars.LazyFrame": "return its .collect()",
    "pyarrow.RecordBatch": "return pa.Table.from_batches([it])",
    "pyarrow.Array": "return pa.chunked_array([it]), or its .to_pylist()",
    "pyarrow.Scalar": "return its .as_py()",
    "django.QuerySet": f"{_NOT_ASKED}, or would query it again: return list(it)",
    "django.SimpleLazyObject": "it stands for another object: return that one",
    "django.Promise": "it is translated each time it is shown: return str(it)",
    "django.BaseManager": "return list(it.all())",
    **{f"sqlalchemy.{name}": _USED_UP for name in ("Result", "ScalarResult", "MappingResult")},
    "sqlalchemy.Row": "return tuple(it), or it._asdict()",
    "sqlalchemy.RowMapping": "return dict(it)",
    "sqlalchemy.Query": f"{_NOT_ASKED}: return it.all()",
    "sqlalchemy.Select": f"{_NOT_ASKED}: execute it, and return its rows",
}
