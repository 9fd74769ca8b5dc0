"""Arrays, frames and tables go through each codec without pickle, and come back as they were, or are refused."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pandas.testing as pdt
import pyarrow as pa
import pytest
from pandas.tseries.offsets import CustomBusinessDay

from stampede import CodecError, KeyingError, cached
from stampede.codecs import make_codec
from stampede.codecs.arrow import read
from stampede.codecs.sealed import Sealed
from stampede.keys import canonical
from stampede.model.entry import Entry
from stampede.testing import isolated

try:
    import polars as pl
except ImportError:  # it takes a hundred MB: it is tested only where it is installed
    pl = None  # type: ignore[assignment]

KEY, ID = "k", b"12345678"
BERLIN = "Europe/Berlin"
DAYS = pd.date_range("2020-10-24", periods=6, freq="D", tz=BERLIN)  # the clocks are set back in between


def there_and_back(value: Any, codec: str = "sealed", returns: Any = None) -> Any:
    """The value as another process reads it."""
    made = make_codec(codec, returns=type(value) if returns is None else returns)
    return made.decode(KEY, made.encode(KEY, Entry(value, ID))).value


def frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


SCALARS = [
    np.float64(1.5), np.float32(0.1), np.float16(2), np.float64("-0.0"), np.int64(-3), np.uint8(3), np.longlong(3),
    np.bool_(True), np.str_("a\0"), np.bytes_(b"x\0"), np.complex64(1j), np.longdouble("1.1"),
    np.datetime64("2020-01-01T01", "ns"), np.datetime64("2020-01"), np.timedelta64(3, "25s"),
]  # fmt: skip
ARRAYS = [
    np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(10)[::2], np.array(5),
    np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2), np.broadcast_to(np.arange(3), (4, 3)), frozen(np.arange(3)),
    np.zeros((0, 3)), np.zeros((2, 0, 3), order="F"), np.array([], dtype=str),
    np.array(["ab", "ü"]), np.array([b"x", b"yz"]), np.array([True, False]), np.arange(4, dtype=">i4"),
    np.array(["2020", "NaT"], "M8[D]"), np.array([3], "m8[25s]"), np.arange(3, dtype="q"), np.zeros(2, "g"),
    np.array([(1, 2.0, "x")], [("a", "i4"), ("b", "f8"), ("c", "U3")]),
    np.zeros(3, np.dtype([("a", "i1"), ("b", "f8", (2, 2))], align=True)),
]  # fmt: skip
DTYPES = [
    np.dtype("f8"), np.dtype(">M8[3s]"), np.dtype("U0"), np.dtype([("a", "i4"), ("b", "U3", (2,))]),
    np.dtype({"names": ["x"], "formats": ["i4"], "offsets": [4], "titles": ["T"], "itemsize": 12}),
]  # fmt: skip


def test_numpys_scalars_come_back_as_they_are() -> None:
    """numpy scalars come back with the same type and value, so a function that returns a mean can be cached."""
    for value in SCALARS:
        back = there_and_back(value)
        assert type(back) is type(value) and back.dtype == value.dtype and back == value, value
        assert str(back) == str(value)
    assert np.isnan(there_and_back(np.float64("nan")))


def test_numpys_arrays_come_back_as_they_are() -> None:
    """numpy arrays come back with the same dtype, shape, memory order and writeable flag."""
    for value in ARRAYS:
        back = there_and_back(value)
        assert type(back) is np.ndarray and (back.dtype, back.dtype.char) == (value.dtype, value.dtype.char), value
        assert back.shape == value.shape and back.tobytes() == value.tobytes(), value
        assert back.flags.writeable == value.flags.writeable
        assert back.flags.f_contiguous == value.flags.f_contiguous or not value.flags.forc
    for dtype in DTYPES:
        assert (there_and_back(dtype), type(there_and_back(dtype))) == (dtype, type(dtype))


MOMENTS = [
    pd.Timestamp("2020-01-01"), pd.Timestamp("2020-01-01 01:02:03.123456789", tz=BERLIN), pd.Timestamp(5, unit="s"),
    pd.Timestamp("2024-10-27 01:30", tz=BERLIN) + pd.Timedelta(hours=2), pd.Timestamp("2020-01-01", tz="UTC"),
    pd.Timestamp("2020-01-01", tz=timezone(timedelta(hours=2))), pd.Timedelta("3 days 4ns"), pd.Timedelta(3, unit="s"),
    pd.Period("2020-03", "M"), pd.Interval(1, 2, "left"), pd.Interval(pd.Timestamp(0), pd.Timestamp(3)),
]  # fmt: skip
INDEXES = [
    pd.RangeIndex(2, 9, 3, name="x"), pd.Index([1, 2], name=("a", 1)), pd.Index(["a", None]), pd.Index(["a", "b"]),
    pd.Index([1, "b"], dtype=object), pd.Index([1.5]), pd.Index([True, False]), pd.Index([], dtype="i4"), pd.Index([]),
    pd.Index([1, None], dtype="Int64"), DAYS, pd.date_range("2020", periods=3, freq="MS"),
    pd.date_range("2020", periods=3, freq="B"), pd.DatetimeIndex(["2020", "2021"]),
    pd.timedelta_range("1h", periods=3), pd.period_range("2020", periods=3, freq="Q"), pd.interval_range(0, 3),
    pd.CategoricalIndex(["a", "b", "a"], ordered=True),
    pd.MultiIndex.from_product([["a", "b"], DAYS], names=["l", None]),
]  # fmt: skip
COLUMNS = {
    "ints": np.arange(6), "floats": [1, np.nan, 3, 4, 5, 6.0], "bools": [True] * 6, "texts": ["a", None, *"cdef"],
    "nullable": pd.array([1, None, 3, 4, 5, 6], dtype="Int64"), "small": pd.array([1, None] * 3, dtype="Float32"),
    "maybe": pd.array([True, None] * 3, dtype="boolean"), "categories": pd.Categorical([*"abcabc"]),
    "zoned": DAYS, "naive": DAYS.tz_localize(None), "spans": pd.timedelta_range("1h", periods=6),
    "months": pd.period_range("2020", periods=6, freq="M"), "intervals": pd.interval_range(0, 6),
    "python": pd.array([*"abcde", None], dtype="string[python]"),
    "arrow texts": pd.array([*"abcde", None], dtype="string[pyarrow]"),
    "arrow": pd.array([1, 2, None] * 2, dtype="int64[pyarrow]"),
    "lists": pd.array([[1], [], None] * 2, dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
}  # fmt: skip
FRAME = pd.DataFrame(COLUMNS, index=DAYS)
FRAME.attrs["source"] = "shop"
FRAMES = [
    FRAME, FRAME.iloc[::2], FRAME.iloc[:0], FRAME[[]], pd.DataFrame(), pd.DataFrame(np.arange(6.0).reshape(2, 3)),
    pd.DataFrame([[1, 2], [3, 4]], columns=["a", "a"]), pd.DataFrame({("a", 1): [1]}),
    pd.DataFrame({"a": [1.5]}).set_flags(allows_duplicate_labels=False),
]  # fmt: skip


def test_pandas_comes_back_as_it_is() -> None:
    """pandas objects come back with the same type, index, frequency, zone, names, dtypes and attrs."""
    for value in (*MOMENTS, pd.NaT, pd.NA):
        back = there_and_back(value)
        assert type(back) is type(value) and (back is value or back == value), value
        assert all(getattr(back, name, 0) == getattr(value, name, 0) for name in ("unit", "tz", "fold")), value
    for index in INDEXES:
        back = there_and_back(index)
        pdt.assert_index_equal(back, index, exact=True)
        assert type(back) is type(index) and (back.names, back.dtype) == (index.names, index.dtype)
        assert getattr(back, "freq", 0) == getattr(index, "freq", 0)
    for frame in FRAMES:
        back = there_and_back(frame)
        pdt.assert_frame_equal(back, frame, check_exact=True, check_freq=True, check_flags=True)
        assert back.attrs == frame.attrs and type(back.index) is type(frame.index)
    for name in FRAME:
        pdt.assert_series_equal(there_and_back(FRAME[name]), FRAME[name], check_exact=True, check_freq=True)


def test_a_frame_that_was_read_can_be_written_to() -> None:
    """A frame that was read from a cache can be changed, like a computed one."""
    frame = there_and_back(FRAME)
    frame.loc[frame.index[0], "ints"] = 5
    frame["new"] = 1
    assert there_and_back(FRAME)["ints"].iloc[0] == 0


def test_a_column_of_objects_comes_back_if_its_objects_do() -> None:
    """A frame with a column of objects is stored if each object can be stored, such as dates, dicts and Decimals."""
    frame = pd.DataFrame({"o": [1, "x", None, {"a": [1]}, Decimal(1), date(2020, 1, 1)]}, dtype=object)
    back = there_and_back(frame)
    assert [*map(type, back["o"])] == [*map(type, frame["o"])] and back.equals(frame)
    with pytest.raises(CodecError, match="object"):
        there_and_back(pd.DataFrame({"o": [object()]}))


def tables() -> list[Any]:
    table = pa.table(
        {"a": [1, 2, None], "s": ["x", None, "z"], "l": [[1], [], None], "n": pa.nulls(3),
         "d": pa.array(["a", "b", "a"]).dictionary_encode()}
    ).replace_schema_metadata({"k": "v"})  # fmt: skip
    made = [table, table.slice(1), pa.table({}), pa.chunked_array([[1], [2, 3]])]
    if pl is not None:
        frame = pl.DataFrame(
            {"a": [1, 2, None], "s": ["x", None, "z" * 30], "l": [[1], [], None], "n": [None] * 3,
             "c": pl.Series(["a", "b", "a"], dtype=pl.Categorical), "st": [{"x": 1}] * 3,
             "e": pl.Series(["a", "b", "a"], dtype=pl.Enum(["a", "b"])), "f": [1.0, float("nan"), None],
             "m": pl.Series([1, 2, 3]).cast(pl.Decimal(10, 2))}
        )  # fmt: skip
        made += [frame, frame[:0], pl.DataFrame(), frame["s"], frame.slice(1, 1)]
    return made


def test_tables_come_back_as_they_are() -> None:
    """Tables of Arrow and frames of polars come back equal and with the same schema."""
    for value in tables():
        back = there_and_back(value)
        assert type(back) is type(value) and back.equals(value)
        assert getattr(back, "schema", 0) == getattr(value, "schema", 0)


def test_a_slice_of_a_table_takes_no_more_than_itself() -> None:
    """A slice of a table is stored without the rest of the table."""
    assert len(Sealed().dump(pa.table({"a": pa.array(range(100_000))}).slice(50, 3), False)) < 1000


@dataclass
class Report:
    mean: float
    best: np.float64


@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_a_number_of_numpys_is_kept_where_it_is_annotated_as_such(codec: str) -> None:
    """msgpack and json store a numpy number only if the annotation names its type."""
    back = there_and_back(Report(1.5, np.float64(2)), codec)
    assert (type(back.mean), type(back.best)) == (float, np.float64)
    assert isinstance(there_and_back(np.float64(1.5), "sealed", float), np.float64)
    for returns in (Any, dict[str, Any], dict[str, float]):
        with pytest.raises(CodecError, match=r"return its \.item\(\), or name numpy\.float64"):
            there_and_back({"n": np.float64(1.5)}, codec, returns)


class Sub(pd.DataFrame):
    @property
    def _constructor(self) -> type[Sub]:
        return Sub


class Quantity(np.ndarray):  # type: ignore[type-arg]
    """A subclass of an array, as astropy and pint have."""


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "objects": (lambda: np.array([1, None]), "tolist"),
    "masked": (lambda: np.ma.array([1]), "filled"),
    "recarray": (lambda: np.array([(1,)], [("a", "i4")]).view(np.recarray), "np.array"),
    "string dtype": (lambda: np.array(["a"], dtype=np.dtypes.StringDType()), "tolist"),
    "dtype of objects": (lambda: np.dtype("O"), "dtype"),
    "sparse": (lambda: pd.Series(pd.arrays.SparseArray([0, 1])), "to_dense"),
    "group": (lambda: pd.DataFrame({"a": [1]}).groupby("a"), "compute"),
    "odd frequency": (
        lambda: pd.date_range("2020-01-01", periods=1, freq=CustomBusinessDay(holidays=["2020-05-05"])),
        "freq = None",
    ),
    "batch": (lambda: pa.table({"a": [1]}).to_batches()[0], "Table.from_batches"),
    "array of Arrow's": (lambda: pa.array([1]), "chunked_array"),
    "array of Arrow's, of texts": (lambda: pa.array(["a"], pa.large_string()), "chunked_array"),
    "array of Arrow's, of nulls": (lambda: pa.nulls(3), "chunked_array"),
    "number of Arrow's": (lambda: pa.scalar(1), "as_py"),
    "categories without a series": (lambda: pd.Categorical(["a"]), "pd.Series(it)"),
    "moments without a series": (lambda: DAYS.array, "pd.Series(it)"),
    "a class on a frame": (lambda: Sub({"a": [1]}), "pandas.DataFrame(it)"),
    "a class on an array": (lambda: np.arange(3).view(Quantity), "np.array(it)"),
    "lazy": (lambda: pl.DataFrame({"a": [1]}).lazy(), "collect"),
    "polars objects": (lambda: pl.DataFrame({"o": [object()]}), "to_dicts"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_travel_is_told_what_does(what: str) -> None:
    """A type that can't be stored is refused, and the message names what to return instead."""
    make, advised = REFUSED[what]
    if pl is None and what in ("lazy", "polars objects"):
        pytest.skip("polars is not installed")
    with pytest.raises(CodecError, match=re.escape(advised)):
        there_and_back(make(), returns=object)


def test_what_is_advised_is_kept() -> None:
    """A value that is converted as a refusal advises can be stored."""
    frame = there_and_back(pd.DataFrame(Sub({"a": [1]})))
    assert (type(frame), frame["a"].tolist()) == (pd.DataFrame, [1])
    assert there_and_back(np.array(np.arange(3).view(Quantity))).tolist() == [0, 1, 2]
    for array in (pd.Categorical(["a"]), DAYS.array, pd.array([1, None]), pd.array(["a"])):
        pdt.assert_series_equal(there_and_back(pd.Series(array)), pd.Series(array))
    kinds = [pa.string_view(), pa.large_string(), pa.null(), pa.dictionary(pa.int8(), pa.string())]
    for array in [pa.nulls(2, kind) for kind in kinds]:
        assert there_and_back(pa.chunked_array([array])).equals(pa.chunked_array([array]))
    assert there_and_back(np.array(np.array(["a"], dtype=np.dtypes.StringDType()).tolist())).tolist() == ["a"]


def node(tag: Any, *args: Any) -> bytes:
    """The sealed body of a value with this tag and these arguments."""

    class Tagged:
        pass

    body = Sealed()
    body._lower[Tagged] = lambda value: (tag, *args)
    return body.dump(Tagged(), False)


def stream(table: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


INTS = ("numpy", "<i8", (2,), "C", bytes(16))
HOSTILE = {
    "larger than its bytes": ("numpy.array", "<f8", (1 << 50,), "C", bytes(8)),
    "large, and of no bytes": ("numpy.array", "<f8", (1 << 45,), "C", b""),
    "negative": ("numpy.array", "<f8", (-1, -1), "C", bytes(8)),
    "of nothing, and large": ("numpy.array", "V0", (1 << 60,), "C", b""),
    "empty, and large": ("numpy.array", "<f8", (0, 1 << 61, 1 << 61), "C", b""),
    "objects": ("numpy.array", "|O", (1,), "C", bytes(8)),
    "a structure of objects": ("numpy.array", ("fields", 8, False, (("a", 0, "|O"),)), (1,), "C", bytes(8)),
    "a dtype's other spelling": ("numpy.dtype", "f8,f8"),
    "a dtype's long spelling": ("numpy.dtype", "=f8"),
    "a dtype that overlaps its end": ("numpy.dtype", ("fields", 4, False, (("a", 0, "<f8"),))),
    "a dtype in a dtype in a ...": ("numpy.dtype", ("sub", ("sub", "<f8", (1 << 40, 1 << 40)), (2,))),
    "another order": ("numpy.array", "<f8", (1,), "K", bytes(8)),
    "a text for bytes": ("numpy.array", "<f8", (1,), "C", "12345678"),
    "a scalar that is none": ("numpy.scalar", "<f8", b"1"),
    "too many arguments": ("numpy.str", "a", "b"),
    "a frame with a long column": ("pandas.DataFrame", (INTS,), range(1), range(1), None, True),
    "a column that is no tuple": ("pandas.Series", "numpy", range(2), None, None, True),
    "a column of no kind": ("pandas.Series", ("bad",), range(2), None, None, True),
    "codes of no category": (
        "pandas.Series", ("categorical", INTS, "abc", False), range(2), None, None, True),
    "a text for a zone": ("pandas.Timestamp", 1, "ns", "Europe/Berlin"),
    "a unit that pandas has not": ("pandas.Timestamp", 1, "no", None),
    "a frequency that is none": ("pandas.Period", 1, "no such"),
    "a range of texts": ("pandas.RangeIndex", "a", "b", 1, None),
    "no tag of pandas'": ("pandas.eval", "1"),
    "no tag of a package": ("os.system", "true"),
    "a stream of nothing": ("pyarrow.Table", b""),
    "no stream": ("pyarrow.Table", b"\xff" * 64),
    "a stream that is cut": ("pyarrow.Table", stream(pa.table({"a": [*range(100)]}))[:-50]),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_bytes_are_a_miss(what: str) -> None:
    """Hostile bytes raise an ordinary error, which the cache treats as a miss."""
    with pytest.raises(Exception) as caught:  # the envelope makes it a CodecError
        Sealed().load(node(*HOSTILE[what]), False)
    assert isinstance(
        caught.value, (CodecError, ValueError, TypeError, KeyError, OSError, OverflowError, pa.ArrowException)
    )


def test_a_damaged_stream_harms_nobody() -> None:
    """A damaged Arrow stream is read or raises an ordinary error. It must not make the C++ reader crash."""
    honest = stream(pa.table({"a": [1, 2, 3], "s": ["x", "yy", None]}))
    for place in range(len(honest)):
        for bit in (1, 128):
            damaged = bytearray(honest)
            damaged[place] ^= bit
            try:
                read(bytes(damaged)).to_pylist()
            except (CodecError, ValueError, OSError, TypeError, KeyError, NotImplementedError, UnicodeDecodeError):
                pass


def test_a_function_of_numbers_and_frames_is_cached() -> None:
    """A function that takes numpy numbers and returns a number or a frame is computed once."""
    with isolated(url="memory://?codec=sealed"):

        @cached
        def mean(column: np.int64) -> float:
            return FRAME.iloc[:, column].mean()  # type: ignore[no-any-return]

        @cached
        def rows(least: np.float64) -> pd.DataFrame:
            return FRAME[FRAME["floats"] > least]

        assert mean(np.int64(0)) == mean(np.int64(0)) == 2.5 and type(mean(np.int64(0))) is np.float64
        assert rows(np.float64(3)).equals(rows(np.float64(3)))
        assert mean.stats().computed == rows.stats().computed == {"missing": 1}


def test_nobody_else_pays_for_them() -> None:
    """stampede imports numpy and pandas only for values that need them: they cost a second and 100 MB."""
    code = """if True:
        import sys
        from stampede import Cache, CodecError
        from stampede.codecs import make_codec
        from stampede.model.entry import Entry
        for name in ("sealed", "msgpack", "json"):
            codec = make_codec(name, returns=list[int])
            codec.decode("k", codec.encode("k", Entry([1], b"12345678")))
        try:
            codec.encode("k", Entry(object(), b"12345678"))
        except CodecError:
            pass
        print(sorted({"numpy", "pandas", "polars", "pyarrow"} & {*sys.modules}))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_numpys_scalars_are_keys() -> None:
    """numpy scalars can be arguments of a cached function, and different scalars give different keys."""
    keys = [canonical(each) for each in (*SCALARS, np.longdouble(1), np.float64(1), 3, -3, 1.5, True, "a\0")]
    assert len({*keys}) == len(keys)
    assert canonical(np.int64(1)) == "numpy:int64(1)" and canonical(np.bool_(True)) == "numpy:bool(True)"
    assert canonical(np.datetime64("2020", "ns")) == canonical(np.datetime64("2020", "ns"))
    assert canonical(np.longdouble("1.1")) == canonical(np.longdouble("1.1")) != canonical(np.longdouble(1.1))


def test_what_pandas_and_numpy_name_things_by_is_a_key() -> None:
    """pandas periods and intervals and numpy dtypes can be keys. Arrays and series are refused with advice."""
    things: list[Any] = [
        pd.NA, pd.NaT, pd.Period("2020-01", "M"), pd.Period("2020-01", "D"), pd.Period("2020-02", "M"),
        pd.Interval(1, 2), pd.Interval(1.0, 2.0), pd.Interval(1, 2, closed="both"), *map(np.dtype, "fdlqb?"),
        np.dtype(">f8"), np.dtype("U3"), np.dtype("U4"), np.dtype("M8[s]"), np.dtype("M8[ns]"),
        pd.Interval(pd.Timestamp("2020"), pd.Timestamp("2021")),
    ]  # fmt: skip
    keys = [canonical(thing) for thing in things]
    assert len({*keys}) == len(keys)
    assert keys[2] == "pandas:Period(600,'M')" and canonical(np.dtype("float64")) == canonical(np.dtype("f8"))
    for other in (np.dtype("O"), np.dtype("f8,f8"), np.dtype("f8", metadata={"a": 1}), np.arange(3), pd.Series([1])):
        with pytest.raises(KeyingError, match=r"pass what it is made from.*ignore=.*key="):
            canonical(other)


def test_zones_of_pytz_come_back() -> None:
    """Zones of pytz come back. pandas 2 uses pytz for each named zone."""
    pytz = pytest.importorskip("pytz")
    zone = pytz.timezone(BERLIN)
    moment = pd.Timestamp("2024-10-27 01:30", tz=zone) + pd.Timedelta(hours=2)
    back = there_and_back(moment)
    assert (back, back.utcoffset(), back.tz.zone) == (moment, moment.utcoffset(), BERLIN)
    index = pd.date_range("2020-10-24", periods=3, tz=zone)
    assert there_and_back(index).equals(index) and there_and_back(index).dtype == index.dtype
    with pytest.raises(CodecError, match="timezone"):
        there_and_back(pd.Timestamp("2020", tz=pytz.FixedOffset(90)))
