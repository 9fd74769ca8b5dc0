"""pandas on the wire, by columns: each as an array's buffer, or as Arrow if Arrow holds it already. A whole frame is
not stored as Arrow: that would lose an index's frequency, and mix up objects, numpy's dtypes and nullable dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timezone
from importlib import import_module
from types import NoneType
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
from pandas.tseries.frequencies import to_offset

from stampede.codecs.numpy import array_of, parts_of
from stampede.codecs.stdlib import Shape, expect, plain
from stampede.errors import CodecError

__all__ = ["of"]

_TEXT = (str, NoneType)


def of(package: str) -> Iterable[Shape]:
    return _SHAPES


def _zone(zone: Any) -> Any:
    """Return a zone unchanged; one of pytz's, which pandas 2 uses for every named zone, by its name."""
    if type(zone).__module__.partition(".")[0] != "pytz":
        return zone
    if getattr(zone, "zone", None) is None:
        raise CodecError("pytz's offsets without a name can't be stored: use .tz_convert(datetime.timezone(...))")
    return ("pytz", zone.zone)


def _make_zone(zone: Any) -> Any:
    if type(zone) is not tuple:
        expect((zone,), (NoneType, timezone, ZoneInfo))
        return zone
    expect(zone, str, str)
    return import_module("pytz").timezone(zone[1])


def _in_zone(moments: Any, zone: Any) -> Any:
    return moments.tz_localize("UTC").tz_convert(_make_zone(zone))


def _frequency(offset: Any) -> str | None:
    """Return a frequency's name. CodecError: the name alone does not make the same frequency."""
    if offset is None:
        return None
    try:
        same = to_offset(offset.freqstr) == offset
    except ValueError:
        same = False
    if not same:
        raise CodecError(f"the frequency {offset!r} can't be stored: set .freq = None")
    return str(offset.freqstr)


def _offset(freq: Any) -> Any:
    if freq is not None and len(freq) > 100:
        raise CodecError("the entry holds an invalid frequency")
    return None if freq is None else to_offset(freq)


# -- columns: each kind of array under its own name -------------------------------------------------------------------


def _column(values: Any) -> tuple[Any, ...]:
    dtype = values.dtype
    if isinstance(dtype, np.dtype):
        array = np.asarray(values)
        if dtype.kind == "O":
            return ("objects", *array)
        text, shape, order, buffer = parts_of(array)
        return "numpy", text, shape, order, bytearray(buffer)  # writable when it is read, even if this one is not
    found = next((column for column in _COLUMNS.values() if isinstance(dtype, column.type)), None)
    if found is None:
        raise CodecError(
            f"a column of dtype {dtype} can't be stored: return it.astype() with another dtype, or .to_dense()"
        )
    return found.lower(values)


def _array(parts: Any) -> Any:
    expect((parts,), tuple)
    word, *args = parts
    expect((word,), str)
    if word == "objects":
        return np.fromiter(args, object, count=len(args))
    if word == "numpy":
        array = array_of(*args)
        if array.ndim != 1:
            raise CodecError("the entry holds a column of more than one dimension")
        return array
    return _COLUMNS[word].rebuild(*args)


def _numbers(values: Any) -> tuple[Any, ...]:
    numbers = values.to_numpy(values.dtype.numpy_dtype, na_value=values.dtype.numpy_dtype.type(0))
    return _column(numbers), _column(np.asarray(values.isna()))


def _masked(numbers: Any, mask: Any) -> Any:
    data, missing = _array(numbers), _array(mask)
    if missing.dtype != bool or data.shape != missing.shape:
        raise CodecError("the entry holds an invalid mask")
    kinds = {"b": pd.arrays.BooleanArray, "f": pd.arrays.FloatingArray}
    return kinds.get(data.dtype.kind, pd.arrays.IntegerArray)(data, missing)


def _make_categorical(codes: Any, categories: Any, ordered: Any) -> Any:
    _are_indexes(categories)
    dtype = pd.CategoricalDtype(categories, ordered=ordered)
    return pd.Categorical.from_codes(_array(codes), dtype=dtype)  # it checks that the categories exist


def _make_intervals(left: Any, right: Any, closed: Any) -> Any:
    _are_indexes(left, right)
    return pd.arrays.IntervalArray.from_arrays(left, right, closed)


def _texts(values: Any) -> tuple[Any, ...]:
    dtype = values.dtype
    nullable = dtype.na_value is pd.NA
    if dtype.storage == "pyarrow":
        return "pyarrow", nullable, _arrow().pack(values.__arrow_array__())
    texts = [None if missing else text for text, missing in zip(values, values.isna(), strict=True)]
    return dtype.storage, nullable, tuple(texts)


def _make_texts(storage: Any, nullable: Any, texts: Any) -> Any:
    if storage not in ("python", "pyarrow"):
        raise CodecError("the entry holds strings in an unknown storage")
    dtype = pd.StringDtype(storage, na_value=pd.NA if nullable else np.nan)
    if storage == "pyarrow":
        return dtype.__from_arrow__(_arrow().unpack(texts))
    expect(texts, *[_TEXT] * len(texts))
    return pd.array(np.fromiter(texts, object, count=len(texts)), dtype=dtype)


def _arrow() -> Any:
    from stampede.codecs import arrow

    return arrow


_MASKED: Any = tuple(getattr(pd, name) for name in dir(pd) if re.fullmatch(r"(U?Int|Float)\d+Dtype|BooleanDtype", name))
_COLUMNS = {
    column.tag: column
    for column in (
        plain("masked", _MASKED, _numbers, tuple, tuple, make=_masked),
        plain(
            "categorical", pd.CategoricalDtype, lambda v: (_column(np.asarray(v.codes)), v.categories, bool(v.ordered)),
            tuple, object, bool, make=_make_categorical,
        ),
        plain(
            "moments", pd.DatetimeTZDtype, lambda v: (_column(v.to_numpy(f"M8[{v.dtype.unit}]")), _zone(v.dtype.tz)),
            tuple, object, make=lambda moments, zone: _in_zone(pd.DatetimeIndex(_array(moments)), zone).array,
        ),
        plain(
            "periods", pd.PeriodDtype, lambda v: (_column(v.asi8), _frequency(v.dtype.freq)),
            tuple, _TEXT, make=lambda each, freq: pd.PeriodIndex.from_ordinals(_array(each), freq=_offset(freq)).array,
        ),
        plain(
            "intervals", pd.IntervalDtype, lambda v: (v.left, v.right, v.dtype.closed),
            object, object, str, make=_make_intervals,
        ),
        plain("texts", pd.StringDtype, _texts, str, bool, (tuple, bytes), make=_make_texts),
        plain(
            "arrow", pd.ArrowDtype, lambda v: (_arrow().pack(v.__arrow_array__()),),
            bytes, make=lambda blob: pd.arrays.ArrowExtensionArray(_arrow().unpack(blob)),
        ),
    )
}  # fmt: skip


# -- indexes, series and frames ---------------------------------------------------------------------------------------


def _are_indexes(*values: Any) -> None:
    if not all(issubclass(type(value), pd.Index) for value in values):
        raise CodecError("the entry holds an invalid index")


def _index(value: Any) -> tuple[Any, ...]:
    freq = _frequency(value.freq) if isinstance(value, (pd.DatetimeIndex, pd.TimedeltaIndex)) else None
    return type(value).__name__, _column(_values(value)), value.name, freq


def _make_index(kind: Any, parts: Any, name: Any, freq: Any) -> Any:
    array = _array(parts)
    made = pd.Index(array, name=name, dtype=array.dtype)
    if type(made).__name__ != kind:
        raise CodecError("the entry holds an index of another type than it says")
    if freq is not None:
        made.freq = _offset(freq)  # pandas raises if it does not match
    return made


def _multi(value: Any) -> tuple[Any, ...]:
    codes = tuple(_column(np.asarray(codes)) for codes in value.codes)
    return tuple(value.levels), codes, tuple(value.names), value.sortorder


def _make_multi(levels: Any, codes: Any, names: Any, order: Any) -> Any:
    _are_indexes(*levels)
    return pd.MultiIndex(list(levels), [*map(_array, codes)], order, names=list(names))


def _values(series: Any) -> Any:
    return series.to_numpy() if isinstance(series.dtype, np.dtype) else series.array


def _beside(value: Any) -> tuple[Any, ...]:
    return value.attrs or None, bool(value.flags.allows_duplicate_labels)


def _with(value: Any, attrs: Any, duplicates: Any) -> Any:
    if attrs:
        value.attrs = attrs
    if not duplicates:
        value.flags.allows_duplicate_labels = False
    return value


def _rows(array: Any, index: Any, name: Any = None) -> Any:
    _are_indexes(index)
    return pd.Series(array, index, name=name, dtype=array.dtype, copy=False)


def _series(value: Any) -> tuple[Any, ...]:
    return _column(_values(value)), value.index, value.name, *_beside(value)


def _make_series(parts: Any, index: Any, name: Any, *beside: Any) -> Any:
    return _with(_rows(_array(parts), index, name), *beside)


def _frame(value: Any) -> tuple[Any, ...]:
    columns = tuple(_column(_values(value.iloc[:, place])) for place in range(value.shape[1]))
    return columns, value.columns, value.index, *_beside(value)


def _make_frame(columns: Any, names: Any, index: Any, *beside: Any) -> Any:
    _are_indexes(names, index)
    made = pd.DataFrame({place: _rows(_array(parts), index) for place, parts in enumerate(columns)}, index, copy=False)
    made.columns = names
    return _with(made, *beside)


# -- scalars ----------------------------------------------------------------------------------------------------------


def _make_timestamp(ticks: Any, unit: Any, zone: Any) -> Any:
    made = pd.Timestamp(np.datetime64(ticks, unit))
    return made if zone is None else _in_zone(made, zone)


_BESIDE = (dict, NoneType), bool
_BOUNDS = (int, float, np.int64, np.float64, pd.Timestamp, pd.Timedelta)
_PLAIN_INDEXES = (
    pd.Index, pd.DatetimeIndex, pd.TimedeltaIndex, pd.PeriodIndex, pd.IntervalIndex, pd.CategoricalIndex,
)  # fmt: skip
_SHAPES = (
    *(plain("pandas.Index", kind, _index, str, tuple, object, _TEXT, make=_make_index) for kind in _PLAIN_INDEXES),
    plain(
        "pandas.RangeIndex", pd.RangeIndex, lambda v: (v.start, v.stop, v.step, v.name),
        int, int, int, object, make=lambda start, stop, step, name: pd.RangeIndex(start, stop, step, name=name),
    ),
    plain("pandas.MultiIndex", pd.MultiIndex, _multi, tuple, tuple, tuple, (int, NoneType), make=_make_multi),
    plain("pandas.Series", pd.Series, _series, tuple, object, object, *_BESIDE, make=_make_series),
    plain("pandas.DataFrame", pd.DataFrame, _frame, tuple, object, object, *_BESIDE, make=_make_frame),
    plain(
        "pandas.Timestamp", pd.Timestamp, lambda v: (int(v.asm8.view("i8")), v.unit, _zone(v.tzinfo)),
        int, str, object, make=_make_timestamp,
    ),
    plain(
        "pandas.Timedelta", pd.Timedelta, lambda v: (int(v.asm8.view("i8")), v.unit),
        int, str, make=lambda ticks, unit: pd.Timedelta(np.timedelta64(ticks, unit)),
    ),
    plain(
        "pandas.Period", pd.Period, lambda v: (int(v.ordinal), _frequency(v.freq)),
        int, str, make=lambda ordinal, freq: pd.Period(ordinal=ordinal, freq=_offset(freq)),
    ),
    plain("pandas.Interval", pd.Interval, lambda v: (v.left, v.right, v.closed), _BOUNDS, _BOUNDS, str),
    plain("pandas.NaT", type(pd.NaT), lambda v: (), make=lambda: pd.NaT),
    plain("pandas.NA", type(pd.NA), lambda v: (), make=lambda: pd.NA),
)  # fmt: skip
