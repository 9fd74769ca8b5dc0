"""numpy's and pandas' scalars in keys, told from Python's own: what is called with them may look at their type."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["numpys", "pandas_own"]


def numpys(value: Any) -> str | None:
    """The text of a scalar that is exact in a few digits; None: it is another thing of numpy's, or a subclass of
    a builtin, which is written like all these."""
    numpy = sys.modules.get("numpy")
    cls = type(value)
    if numpy is not None and issubclass(cls, numpy.dtype):
        return None if _is_more(value) else f"numpy:dtype({value.str!r},{value.char!r})"
    if numpy is None or not issubclass(cls, numpy.generic):
        return None
    kind = value.dtype.kind
    if kind == "b":
        return f"numpy:bool({bool(value)})"  # numpy 1 calls it bool_
    if kind in "iu":
        return f"numpy:{cls.__name__}({int(value)})"
    if kind in "fc" and value.dtype.itemsize <= 8 * (1 + (kind == "c")) and cls is value.dtype.type:
        return f"numpy:{cls.__name__}({(float if kind == 'f' else complex).__repr__(value.item())})"
    if kind == "f" and cls is numpy.longdouble:
        return f"numpy:longdouble({value!s})"
    if kind in "Mm":
        unit, count = numpy.datetime_data(value.dtype)
        return f"numpy:{cls.__name__}({int(value.view('i8'))},{unit!r},{count})"
    return None


def _is_more(dtype: Any) -> bool:
    structured = dtype.names is not None or dtype.subdtype is not None
    return structured or bool(dtype.metadata) or dtype.isbuiltin == 2 or dtype.kind not in "biufcSUVMm"


def pandas_own(value: Any) -> tuple[str, tuple[Any, ...]] | None:
    """What a scalar of pandas' is made of, which has no base class that tells; None: it is another thing."""
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return None
    if value is pandas.NA:
        return "pandas:NA", ()
    if type(value) is pandas.Period:
        return "pandas:Period", (value.ordinal, value.freqstr)
    if type(value) is pandas.Interval:
        return "pandas:Interval", (value.left, value.right, value.closed)
    return None
