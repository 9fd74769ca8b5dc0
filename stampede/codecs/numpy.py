"""numpy on the wire: scalars, arrays and dtypes, as their bytes and a description of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from pickle import PickleBuffer
from typing import Any

import numpy as np

from stampede.codecs.packages import ADVICE
from stampede.codecs.stdlib import Shape, expect, plain, tagged
from stampede.errors import CodecError

__all__ = ["array_of", "dtype_of", "dtype_parts", "of", "parts_of"]


def of(package: str) -> Iterable[Shape]:
    return _SHAPES


_DTYPES = [np.dtype(code) for code in "?bhilqBHILQefdgFDGMmVSUO"]
_SCALARS = {dtype.type for dtype in _DTYPES if dtype.char not in "SUO"}


# -- dtypes: their own short text, checked to mean the same when it is read; structures field by field ----------------

_TEXT = re.compile(r"[<>|=]?[?bhilqBHILQefdgFDGiufcmMSUV]\d{0,9}(\[\d{0,9}[a-zA-Z]{1,7}\])?", re.ASCII)


def dtype_parts(dtype: Any) -> Any:
    """Return a dtype as text, or as tuples of texts. CodecError: it holds objects, or more than its text says."""
    if dtype.char == "T":
        raise CodecError("an array of numpy's StringDType can't be stored: return np.array(it.tolist())")
    if dtype.hasobject:
        raise CodecError(
            "an array of objects can't be stored: give it a dtype, or return its .tolist(), or a pandas Series"
        )
    if dtype.metadata:
        raise CodecError("a dtype's metadata would be lost: return it.astype() with a dtype that has none")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ("sub", dtype_parts(base), tuple(map(int, shape)))
    if dtype.names is not None:
        if dtype.type is not np.void:
            raise CodecError(f"an array of {dtype.type.__name__} can't be stored: {ADVICE['numpy.recarray']}")
        fields = [
            (name, dtype.fields[name][1], dtype_parts(dtype.fields[name][0]), *dtype.fields[name][2:])
            for name in dtype.names
        ]
        return ("fields", dtype.itemsize, dtype.isalignedstruct, tuple(fields))
    text = dtype.str if np.dtype(dtype.str).char == dtype.char else dtype.newbyteorder("=").char
    if not _TEXT.fullmatch(text) or np.dtype(text) != dtype or np.dtype(text).char != dtype.char:
        raise CodecError(
            f"an array of {dtype!r} can't be stored: return it.astype() with a dtype of fixed size, or a list"
        )
    return str(text)


def dtype_of(parts: Any) -> Any:
    """Return the dtype that `dtype_parts` made these parts of. CodecError for any other parts."""
    if type(parts) is str and _TEXT.fullmatch(parts):
        dtype = np.dtype(parts)
    elif type(parts) is not tuple or not parts or type(parts[0]) is not str:
        raise CodecError("the entry holds an invalid dtype")
    elif parts[0] == "sub":
        expect(parts, str, (str, tuple), tuple)
        dtype = np.dtype((dtype_of(parts[1]), parts[2]))
    else:
        expect(parts, str, int, bool, tuple)
        kind, itemsize, aligned, fields = parts
        if kind != "fields":
            raise CodecError("the entry holds an invalid dtype")
        for field in fields:
            expect((field,), tuple)
            expect(field, str, int, (str, tuple), *[str] * (len(field) - 3))
        dtype = np.dtype(
            {
                "names": [field[0] for field in fields],
                "offsets": [field[1] for field in fields],
                "formats": [dtype_of(field[2]) for field in fields],
                "titles": [field[3] if len(field) > 3 else None for field in fields],
                "itemsize": itemsize,
            },
            align=aligned,
        )
    if dtype.hasobject or dtype_parts(dtype) != parts:
        raise CodecError("the entry holds a dtype that stampede does not write")
    return dtype


# -- arrays: their buffer, in its order in memory ---------------------------------------------------------------------


def parts_of(array: Any) -> tuple[Any, ...]:
    """Return an array's dtype, shape, order and buffer. The array is copied only if it is not contiguous."""
    dtype = dtype_parts(array.dtype)
    if array.dtype.itemsize == 0 and array.size:
        raise CodecError("an array whose elements have no size can't be stored: return it.astype('U1'), or a list")
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    if array.size == 0:
        return dtype, array.shape, order, b""
    if order == "C" and not array.flags.c_contiguous:
        frozen = not array.flags.writeable
        array = np.array(array, order="C", copy=True)
        array.flags.writeable = not frozen
    flat = array.ravel(order=order).view(np.uint8)
    return dtype, array.shape, order, PickleBuffer(flat)


def array_of(dtype: Any, shape: Any, order: Any, buffer: Any) -> Any:
    """Return the array over these bytes, without a copy. Nothing is allocated before the sizes are checked."""
    dtype = dtype_of(dtype)
    expect((shape, order, buffer), tuple, str, (bytes, bytearray))
    expect(shape, *[int] * len(shape))
    if order not in ("C", "F"):
        raise CodecError("the entry holds an array in an unknown order")
    if prod(shape) * dtype.itemsize != len(buffer) or (dtype.itemsize == 0 and prod(shape)):
        raise CodecError("the entry holds an array that has another size than its bytes")
    if not buffer:
        return np.empty(shape, dtype, order=order)
    return np.frombuffer(buffer, np.uint8).view(dtype).reshape(shape, order=order)


# -- scalars ----------------------------------------------------------------------------------------------------------


def _scalar(value: Any) -> tuple[Any, ...]:
    return dtype_parts(value.dtype), value.tobytes()


def _make_scalar(dtype: Any, raw: Any) -> Any:
    made = array_of(dtype, (), "C", bytearray(raw) if type(raw) is bytes else raw)[()]
    if type(made) not in _SCALARS:
        raise CodecError("the entry holds an invalid numpy scalar")
    return made


_SHAPES = (
    tagged("numpy.array", np.ndarray, parts_of, array_of),
    *(tagged("numpy.scalar", kind, _scalar, _make_scalar) for kind in _SCALARS),
    plain("numpy.str", np.str_, lambda value: (str.__str__(value),), str),
    plain("numpy.bytes", np.bytes_, lambda value: (bytes(value),), bytes),
    *(tagged("numpy.dtype", type(kind), lambda value: (dtype_parts(value),), dtype_of) for kind in _DTYPES),
)
