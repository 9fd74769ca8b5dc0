"""pandas on the wire, by columns: each as an array's buffer, or as Arrow where Arrow holds it already.

Not through Arrow as a whole: that forgets an index's frequency, and takes objects, numpy's and nullable dtypes for
one another.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timezone
from importlib import import_module
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
from pandas.tseries.frequencies import to_offset

from stampede.codec.arrays import array_of, dtype_of, dtype_parts, parts_of
from stampede.codec.values import Shapes, expect, tagged
from stampede.errors import CodecError

__all__ = ["of"]


def of(package: str) -> Shapes:
    return Shapes(_SHAPES, _ADVICE)


_ADVICE = {
    "SparseArray": "return its .to_dense()",
    "DataFrameGroupBy": "return what you compute of it",
    "SeriesGroupBy": "return what you compute of it",
    "ExtensionArray": "return pd.Series(it)",
    "BaseOffset": "return its .freqstr",
}


def _zone(zone: Any) -> Any:
    """A zone as it is, or pytz's, which pandas 2 has for every name, by its name."""
    if type(zone).__module__.partition(".")[0] != "pytz":
        return zone
    if getattr(zone, "zone", None) is None:
        raise CodecError("pytz's offsets without a name can't be stored: use .tz_convert(datetime.timezone(...))")
    return ("pytz", zone.zone)


def _make_zone(zone: Any) -> Any:
    if type(zone) is not tuple:
        expect((zone,), (type(None), timezone, ZoneInfo))
        return zone
    expect(zone, str, str)
    return import_module("pytz").timezone(zone[1])


# -- columns: each kind of array under a word of its own --------------------------------------------------------------


def _column(values: Any) -> tuple[Any, ...]:
    """The parts of an array of pandas' or of numpy's."""
    dtype = values.dtype
    if isinstance(dtype, np.dtype):
        array = np.asarray(values)
        if dtype.kind == "O":
            return ("objects", *array)
        text, shape, order, buffer = parts_of(array)
        return "numpy", text, shape, order, bytearray(buffer)  # to be written to, whoever could write to this one
    found = next((word for word, (kind, _, _) in _COLUMNS.items() if isinstance(dtype, kind)), None)
    if found is None:
        raise CodecError(f"a column of dtype {dtype} can't be stored: return it.astype() of another, or .to_dense()")
    return (found, *_COLUMNS[found][1](values))


def _array(parts: Any) -> Any:
    """The array of these parts; CodecError for what is none."""
    expect((parts,), tuple)
    word, *args = parts
    expect((word,), str)
    if word == "objects":
        return np.fromiter(args, object, count=len(args))
    if word == "numpy":
        array = array_of(*args)
        if array.ndim != 1:
            raise CodecError("a column of more than one dimension")
        return array
    return _COLUMNS[word][2](*args)


def _numbers(values: Any) -> tuple[Any, ...]:
    numbers = values.to_numpy(values.dtype.numpy_dtype, na_value=values.dtype.numpy_dtype.type(0))
    return _column(numbers), _column(np.asarray(values.isna()))


def _masked(of_booleans: bool) -> Callable[[Any, Any], Any]:
    def rebuild(numbers: Any, mask: Any) -> Any:
        data, missing = _array(numbers), _array(mask)
        if missing.dtype != bool or data.shape != missing.shape or (data.dtype == bool) != of_booleans:
            raise CodecError("a mask that is none")
        if of_booleans:
            return pd.arrays.BooleanArray(data, missing)
        return (pd.arrays.FloatingArray if data.dtype.kind == "f" else pd.arrays.IntegerArray)(data, missing)

    return rebuild


def _categorical(values: Any) -> tuple[Any, ...]:
    return _column(np.asarray(values.codes)), values.categories, bool(values.ordered)


def _make_categorical(codes: Any, categories: Any, ordered: Any) -> Any:
    _are_indexes(categories)
    expect((ordered,), bool)
    dtype = pd.CategoricalDtype(categories, ordered=ordered)
    return pd.Categorical.from_codes(_array(codes), dtype=dtype)  # looks whether there are such categories


def _moments(values: Any) -> tuple[Any, ...]:
    return _column(values.to_numpy(f"M8[{values.dtype.unit}]")), _zone(values.dtype.tz)


def _make_moments(moments: Any, zone: Any) -> Any:
    return pd.DatetimeIndex(_array(moments)).tz_localize("UTC").tz_convert(_make_zone(zone)).array


def _periods(values: Any) -> tuple[Any, ...]:
    return _column(values.asi8), _frequency(values.dtype.freq)


def _make_periods(ordinals: Any, freq: Any) -> Any:
    return pd.PeriodIndex.from_ordinals(_array(ordinals), freq=_offset(freq)).array


def _intervals(values: Any) -> tuple[Any, ...]:
    return values.left, values.right, values.dtype.closed


def _make_intervals(left: Any, right: Any, closed: Any) -> Any:
    _are_indexes(left, right)
    expect((closed,), str)
    return pd.arrays.IntervalArray.from_arrays(left, right, closed)


def _texts(values: Any) -> tuple[Any, ...]:
    dtype = values.dtype
    nullable = dtype.na_value is pd.NA
    if dtype.storage == "pyarrow":
        return "pyarrow", nullable, _arrow().pack(values.__arrow_array__())
    texts = [None if missing else text for text, missing in zip(values, values.isna(), strict=True)]
    return dtype.storage, nullable, tuple(texts)


def _make_texts(storage: Any, nullable: Any, texts: Any) -> Any:
    expect((storage, nullable, texts), str, bool, (tuple, bytes))
    if storage not in ("python", "pyarrow"):
        raise CodecError("no texts")
    dtype = pd.StringDtype(storage, na_value=pd.NA if nullable else np.nan)
    if storage == "pyarrow":
        return dtype.__from_arrow__(_arrow().unpack(texts))
    expect(texts, *[(str, type(None))] * len(texts))
    return pd.array(np.fromiter(texts, object, count=len(texts)), dtype=dtype)


def _of_arrow(values: Any) -> tuple[Any, ...]:
    return (_arrow().pack(values.__arrow_array__()),)


def _make_of_arrow(blob: Any) -> Any:
    chunks = _arrow().unpack(blob)
    return pd.arrays.ArrowExtensionArray(chunks)


def _arrow() -> Any:
    from stampede.codec import tables

    return tables


_MASKED = tuple(
    getattr(pd, f"{sign}{kind}{bits}Dtype")
    for sign, kind, sizes in (("", "Int", (8, 16, 32, 64)), ("U", "Int", (8, 16, 32, 64)), ("", "Float", (32, 64)))
    for bits in sizes
)
_COLUMNS: dict[str, tuple[Any, Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    "masked": (_MASKED, _numbers, _masked(False)),
    "booleans": (pd.BooleanDtype, _numbers, _masked(True)),
    "categorical": (pd.CategoricalDtype, _categorical, _make_categorical),
    "moments": (pd.DatetimeTZDtype, _moments, _make_moments),
    "periods": (pd.PeriodDtype, _periods, _make_periods),
    "intervals": (pd.IntervalDtype, _intervals, _make_intervals),
    "texts": (pd.StringDtype, _texts, _make_texts),
    "arrow": (pd.ArrowDtype, _of_arrow, _make_of_arrow),
}


def _frequency(offset: Any) -> str | None:
    """The name of a frequency, where that is all of it."""
    if offset is None:
        return None
    try:
        same = to_offset(offset.freqstr) == offset
    except ValueError:
        same = False
    if not same:
        raise CodecError(f"a frequency of {offset!r} can't be stored: set .freq = None")
    return str(offset.freqstr)


def _offset(freq: Any) -> Any:
    if freq is None:
        return None
    expect((freq,), str)
    if len(freq) > 100:
        raise CodecError("no frequency")
    return to_offset(freq)


# -- indexes ----------------------------------------------------------------------------------------------------------


def _index(value: Any) -> tuple[Any, ...]:
    freq = _frequency(value.freq) if isinstance(value, (pd.DatetimeIndex, pd.TimedeltaIndex)) else None
    return type(value).__name__, _column(_values(value)), value.name, freq


def _make_index(kind: Any, parts: Any, name: Any, freq: Any) -> Any:
    expect((kind,), str)
    array = _array(parts)
    made = pd.Index(array, name=name, dtype=array.dtype)
    if type(made).__name__ != kind:
        raise CodecError("another index")
    if freq is not None:
        made.freq = _offset(freq)  # refused if it is another
    return made


def _make_range(start: Any, stop: Any, step: Any, name: Any) -> Any:
    expect((start, stop, step), int, int, int)
    return pd.RangeIndex(start, stop, step, name=name)


def _multi(value: Any) -> tuple[Any, ...]:
    codes = tuple(_column(np.asarray(codes)) for codes in value.codes)
    return tuple(value.levels), codes, tuple(value.names), value.sortorder


def _make_multi(levels: Any, codes: Any, names: Any, order: Any) -> Any:
    expect((levels, codes, names, order), tuple, tuple, tuple, (int, type(None)))
    _are_indexes(*levels)
    return pd.MultiIndex(list(levels), [*map(_array, codes)], order, names=list(names))


# -- series and frames ------------------------------------------------------------------------------------------------


def _beside(value: Any) -> tuple[Any, ...]:
    """What of them is neither rows nor columns."""
    return value.attrs or None, bool(value.flags.allows_duplicate_labels)


def _with(value: Any, attrs: Any, duplicates: Any) -> Any:
    expect((attrs, duplicates), (dict, type(None)), bool)
    if attrs:
        value.attrs = attrs
    if not duplicates:
        value.flags.allows_duplicate_labels = False
    return value


def _values(series: Any) -> Any:
    return series.to_numpy() if isinstance(series.dtype, np.dtype) else series.array


def _series(value: Any) -> tuple[Any, ...]:
    return _column(_values(value)), value.index, value.name, *_beside(value)


def _make_series(parts: Any, index: Any, name: Any, attrs: Any, duplicates: Any) -> Any:
    array = _array(parts)
    _one_per_row([array], index)
    return _with(pd.Series(array, index, name=name, dtype=array.dtype, copy=False), attrs, duplicates)


def _frame(value: Any) -> tuple[Any, ...]:
    columns = tuple(_column(_values(value.iloc[:, place])) for place in range(value.shape[1]))
    return columns, value.columns, value.index, *_beside(value)


def _make_frame(columns: Any, names: Any, index: Any, attrs: Any, duplicates: Any) -> Any:
    expect((columns,), tuple)
    arrays = [*map(_array, columns)]
    _one_per_row(arrays, index)
    _are_indexes(names)
    if len(names) != len(arrays):
        raise CodecError("a frame with a column too many or too few")
    series = {place: pd.Series(array, index, dtype=array.dtype, copy=False) for place, array in enumerate(arrays)}
    made = pd.DataFrame(series, index, copy=False)
    made.columns = names
    return _with(made, attrs, duplicates)


def _are_indexes(*values: Any) -> None:
    if not all(issubclass(type(value), pd.Index) for value in values):
        raise CodecError("no index")


def _one_per_row(arrays: list[Any], index: Any) -> None:
    _are_indexes(index)
    if any(len(array) != len(index) for array in arrays):
        raise CodecError("an index of another length than its columns")


# -- scalars ----------------------------------------------------------------------------------------------------------


def _timestamp(value: Any) -> tuple[Any, ...]:
    moment = value.asm8
    return dtype_parts(moment.dtype), moment.tobytes(), _zone(value.tzinfo)


def _make_timestamp(dtype: Any, raw: Any, zone: Any) -> Any:
    made = pd.Timestamp(_ticks(dtype, raw, "M"))
    return made if zone is None else made.tz_localize("UTC").tz_convert(_make_zone(zone))


def _timedelta(value: Any) -> tuple[Any, ...]:
    return dtype_parts(value.asm8.dtype), value.asm8.tobytes()


def _ticks(dtype: Any, raw: Any, kind: str) -> Any:
    made = dtype_of(dtype)
    expect((raw,), bytes)
    if made.kind != kind or np.datetime_data(made) not in _UNITS:
        raise CodecError("no moment")
    return array_of(dtype, (), "C", raw)[()]


_UNITS = [(unit, 1) for unit in ("s", "ms", "us", "ns")]


def _make_period(ordinal: Any, freq: Any) -> Any:
    expect((ordinal, freq), int, str)
    return pd.Period(ordinal=ordinal, freq=_offset(freq))


def _make_interval(left: Any, right: Any, closed: Any) -> Any:
    expect((left, right, closed), _BOUNDS, _BOUNDS, str)
    return pd.Interval(left, right, closed)


_BOUNDS = (int, float, np.int64, np.float64, pd.Timestamp, pd.Timedelta)


_PLAIN_INDEXES = (
    pd.Index, pd.DatetimeIndex, pd.TimedeltaIndex, pd.PeriodIndex, pd.IntervalIndex, pd.CategoricalIndex,
)  # fmt: skip
_SHAPES = (
    *(tagged("pandas.Index", kind, _index, _make_index) for kind in _PLAIN_INDEXES),
    tagged("pandas.RangeIndex", pd.RangeIndex, lambda v: (v.start, v.stop, v.step, v.name), _make_range),
    tagged("pandas.MultiIndex", pd.MultiIndex, _multi, _make_multi),
    tagged("pandas.Series", pd.Series, _series, _make_series),
    tagged("pandas.DataFrame", pd.DataFrame, _frame, _make_frame),
    tagged("pandas.Timestamp", pd.Timestamp, _timestamp, _make_timestamp),
    tagged("pandas.Timedelta", pd.Timedelta, _timedelta, lambda dtype, raw: pd.Timedelta(_ticks(dtype, raw, "m"))),
    tagged("pandas.Period", pd.Period, lambda v: (int(v.ordinal), _frequency(v.freq)), _make_period),
    tagged("pandas.Interval", pd.Interval, lambda v: (v.left, v.right, v.closed), _make_interval),
    tagged("pandas.NaT", type(pd.NaT), lambda v: (), lambda: pd.NaT),
    tagged("pandas.NA", type(pd.NA), lambda v: (), lambda: pd.NA),
)
