"""Values of arrays, frames and tables as what msgpack and JSON have words for: `{"numpy.array": ["<f8", [2, 3], ...]}`.

Their tags and arguments are those of the sealed body; other languages can read them.
"""

from __future__ import annotations

import sys
from base64 import b64decode, b64encode
from copy import copy
from dataclasses import fields, is_dataclass
from itertools import chain
from math import isfinite
from pickle import PickleBuffer
from typing import Any

from stampede.codec.packages import rebuilder, shape_for
from stampede.codec.values import LOWER, REBUILD
from stampede.errors import CodecError

__all__ = ["tree_of", "value_of", "without_scalars"]


def tree_of(value: Any, *, json: bool = False) -> Any:
    """A value as scalars, lists and dicts with one key, its tag. CodecError: it holds what can't be written so."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and (not json or isfinite(value))):
        return value
    if kind is float:
        return {"float": repr(value)}
    if kind is bytes:
        return {"bytes": b64encode(value).decode()} if json else value
    if kind is PickleBuffer:
        value = bytes(value) if value.raw().readonly else bytearray(value)
        return tree_of(value, json=json)
    if kind is bytearray:
        return {"bytearray": b64encode(value).decode() if json else bytes(value)}
    if kind is tuple:
        return [tree_of(each, json=json) for each in value]
    if kind is list:
        return {"list": [tree_of(each, json=json) for each in value]}
    if kind is dict:
        return {"dict": [tree_of(each, json=json) for each in chain.from_iterable(value.items())]}
    shape = shape_for(kind)
    lower = LOWER.get(kind) if shape is None else shape.lower
    if lower is None:
        raise CodecError(f"a {kind.__qualname__} in it can't be stored by this codec: use codec='sealed'")
    tag, *args = lower(value)
    return {tag: [tree_of(arg, json=json) for arg in args]}


def value_of(tree: Any) -> Any:
    """The value of such a tree; CodecError, or any other, if it is none."""
    if type(tree) is list:
        return tuple(map(value_of, tree))
    if type(tree) is not dict:
        return tree
    ((tag, args),) = tree.items()
    if tag == "float":
        return float(args)
    if tag in ("bytes", "bytearray"):
        raw = b64decode(args, validate=True) if type(args) is str else args
        if type(raw) is not bytes:
            raise CodecError("no bytes")
        return raw if tag == "bytes" else bytearray(raw)
    inside = value_of(args)
    if type(inside) is not tuple:
        raise CodecError("a value without arguments")
    if tag == "list":
        return list(inside)
    if tag == "dict":
        return dict(zip(inside[::2], inside[1::2], strict=True))
    rebuild = REBUILD.get(tag) or rebuilder(tag)
    return rebuild(*inside)


def without_scalars(value: Any) -> Any:
    """The value with Python's own numbers and texts in place of numpy's, where these say as much."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([without_scalars(each) for each in value])
    if kind is dict:
        return {without_scalars(key): without_scalars(each) for key, each in value.items()}
    if is_dataclass(kind):
        twin = copy(value)
        for field in fields(value):
            object.__setattr__(twin, field.name, without_scalars(getattr(value, field.name)))
        return twin
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic):
        plain = value.item()
        if (
            type(plain) in (bool, int, float, str, bytes)
            and (plain == value or plain != plain)
            and value.dtype.char != "g"
        ):
            return plain
    return value
