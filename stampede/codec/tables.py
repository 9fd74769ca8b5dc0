"""Arrow's streams: pyarrow's tables and polars' frames. They are written uncompressed, and looked through before any
of their readers is let near: what they claim to hold must be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from io import BytesIO
from struct import error as StructError
from struct import unpack_from
from typing import Any

from stampede.codec.values import Shapes, tagged
from stampede.errors import CodecError

__all__ = ["of", "pack", "unpack"]


def of(package: str) -> Shapes:
    return _polars() if package == "polars" else _pyarrow()


# -- a stream that is what it says ------------------------------------------------------------------------------------


def checked(blob: Any) -> Any:
    """The bytes of a stream, none of whose parts claims to be longer than it is. CodecError else.

    It may be damaged in other ways: those its readers find without harm.
    """
    if type(blob) not in (bytes, bytearray):
        raise CodecError("no stream of Arrow's")
    try:
        for batch, body in _batches(blob):
            _look_through(batch, body)
    except (StructError, IndexError) as error:
        raise CodecError("a stream that is cut") from error
    return blob


def _batches(blob: Any) -> Iterator[tuple[_Table, int]]:
    """Its batches, each with the size of the body in which its buffers lie."""
    at = 0
    while at < len(blob):
        mark, size = unpack_from("<II", blob, at)
        if mark != 0xFFFFFFFF:
            raise CodecError("no stream of Arrow's")
        if size == 0:
            if at + 8 != len(blob):
                raise CodecError("bytes behind a stream")
            return
        message = _Table(blob[at + 8 : at + 8 + size])
        body = message.number(3, "<q")
        at += 8 + size + body
        if body < 0 or at > len(blob):
            raise CodecError("a stream that is cut")
        kind, header = message.number(1, "<B"), message.table(2)
        if kind == 2 and header is not None:  # a dictionary: its batch is inside
            header = header.table(1)
        if kind in (2, 3) and header is not None:
            yield header, body


def _look_through(batch: _Table, body: int) -> None:
    if batch.offset(3):
        raise CodecError("a compressed stream")
    columns, start = batch.vector(1)
    if not columns and batch.number(0, "<q"):
        raise CodecError("rows without a column")
    for place in range(columns):
        length, nulls = unpack_from("<qq", batch.raw, start + 16 * place)
        if not 0 <= nulls <= length <= 8 * (len(batch.raw) + body):
            raise CodecError("a column with more rows than it can hold")
    count, start = batch.vector(2)
    for place in range(count):
        offset, length = unpack_from("<qq", batch.raw, start + 16 * place)
        if offset < 0 or length < 0 or offset + length > body:
            raise CodecError("a buffer outside its stream")


class _Table:
    """A table of a flatbuffer."""

    def __init__(self, raw: Any, at: int | None = None) -> None:
        self.raw = raw
        self.at: int = unpack_from("<I", raw)[0] if at is None else at
        self.fields = self.at - unpack_from("<i", raw, self.at)[0]
        self.size: int = unpack_from("<H", raw, self.fields)[0]

    def offset(self, field: int) -> int:
        """Where a field is in the table; 0: it is left out."""
        place = 4 + 2 * field
        return int(unpack_from("<H", self.raw, self.fields + place)[0]) if place + 2 <= self.size else 0

    def number(self, field: int, form: str) -> int:
        offset = self.offset(field)
        return int(unpack_from(form, self.raw, self.at + offset)[0]) if offset else 0

    def table(self, field: int) -> _Table | None:
        offset = self.offset(field)
        return _Table(self.raw, self._follow(offset)) if offset else None

    def vector(self, field: int) -> tuple[int, int]:
        """How many elements, and where the first is."""
        offset = self.offset(field)
        if not offset:
            return 0, 0
        start = self._follow(offset)
        return int(unpack_from("<I", self.raw, start)[0]), start + 4

    def _follow(self, offset: int) -> int:
        return self.at + offset + int(unpack_from("<I", self.raw, self.at + offset)[0])


# -- pyarrow ----------------------------------------------------------------------------------------------------------


def _arrow() -> Any:
    import pyarrow

    if int(pyarrow.__version__.partition(".")[0]) < 15:
        raise CodecError(f"pyarrow {pyarrow.__version__} runs what is in hostile bytes: use one from 15 on")
    import pyarrow.ipc

    return pyarrow


def write(table: Any) -> bytes:
    """Return a pyarrow table as a stream."""
    pa = _arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=None)) as writer:
        writer.write_table(table)
    try:
        return bytes(checked(sink.getvalue().to_pybytes()))
    except CodecError as error:
        raise CodecError("a table with no other columns than nulls can't be stored: return its .to_pylist()") from error


def read(blob: Any) -> Any:
    """Return the table of a stream; it lies in these bytes."""
    table = _arrow().ipc.open_stream(checked(blob)).read_all()
    table.validate(full=True)
    return table


def pack(array: Any) -> bytes:
    """Return a pyarrow array, or some in a row, as a stream."""
    return write(_arrow().table({"": array}))


def unpack(blob: Any) -> Any:
    (column,) = read(blob).columns  # ValueError: there are none, or several
    return column


def _batch(value: Any) -> tuple[Any, ...]:
    if not value.num_rows:
        raise CodecError("a RecordBatch without rows can't be stored: return a Table")
    return (write(_arrow().Table.from_batches([value])),)


def _make_batch(blob: Any) -> Any:
    (batch,) = read(blob).combine_chunks().to_batches()
    return batch


def _pyarrow() -> Shapes:
    pa = _arrow()
    return Shapes(
        [
            tagged("pyarrow.Table", pa.Table, lambda value: (write(value),), read),
            tagged("pyarrow.RecordBatch", pa.RecordBatch, _batch, _make_batch),
            tagged("pyarrow.ChunkedArray", pa.ChunkedArray, lambda value: (pack(value),), unpack),
        ]
    )


# -- polars -----------------------------------------------------------------------------------------------------------


def _polars() -> Shapes:
    pl = import_module("polars")

    def lower(frame: Any) -> tuple[bytes]:
        if any("Object" in repr(kind) for kind in frame.dtypes):
            raise CodecError("a polars frame with a column of objects can't be stored: cast it, or return .to_dicts()")
        sink = BytesIO()
        try:
            frame.write_ipc_stream(sink, compression="uncompressed")
        except pl.exceptions.PanicException as error:  # which is no Exception
            raise CodecError(f"a polars frame that can't be written: {error}") from None
        blob = sink.getvalue()
        if not make(blob).equals(frame, null_equal=True):
            raise CodecError("a polars frame that would not come back: return .to_dicts(), or .to_arrow()")
        return (blob,)

    def make(blob: Any) -> Any:
        try:
            return pl.read_ipc_stream(BytesIO(checked(blob)))
        except pl.exceptions.PanicException:
            raise CodecError("a stream that polars can't read") from None

    def make_series(blob: Any) -> Any:
        (series,) = make(blob).get_columns()
        return series

    return Shapes(
        [
            tagged("polars.DataFrame", pl.DataFrame, lower, make),
            tagged("polars.Series", pl.Series, lambda value: lower(value.to_frame()), make_series),
        ]
    )
