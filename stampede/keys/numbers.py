"""numpy's scalars in keys, told from Python's own: what is called with them may look at their type."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["numpys"]


def numpys(value: Any) -> str | None:
    """The text of a scalar that is exact in a few digits; None: it is another thing of numpy's, or a subclass of
    a builtin, which is written like all these."""
    numpy = sys.modules.get("numpy")
    cls = type(value)
    if numpy is None or not issubclass(cls, numpy.generic):
        return None
    kind = value.dtype.kind
    if kind == "b":
        return f"numpy:bool({bool(value)})"  # numpy 1 calls it bool_
    if kind in "iu":
        return f"numpy:{cls.__name__}({int(value)})"
    if kind in "fc" and value.dtype.itemsize <= 8 * (1 + (kind == "c")) and cls is value.dtype.type:
        return f"numpy:{cls.__name__}({(float if kind == 'f' else complex).__repr__(value.item())})"
    if kind in "Mm":
        unit, count = numpy.datetime_data(value.dtype)
        return f"numpy:{cls.__name__}({int(value.view('i8'))},{unit!r},{count})"
    return None
