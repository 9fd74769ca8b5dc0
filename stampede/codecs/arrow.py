"""Arrow streams: pyarrow's tables and polars' frames, written uncompressed, and read by their own libraries."""

from __future__ import annotations

from importlib import import_module
from io import BytesIO
from typing import Any

from stampede.codecs.stdlib import Shape, expect, tagged
from stampede.errors import CodecError

__all__ = ["of", "pack", "unpack"]


def of(package: str) -> list[Shape]:
    if package == "polars":
        return _polars()
    pa = _arrow()
    return [
        tagged("pyarrow.Table", pa.Table, lambda value: (write(value),), read),
        tagged("pyarrow.ChunkedArray", pa.ChunkedArray, lambda value: (pack(value),), unpack),
    ]


# -- pyarrow ----------------------------------------------------------------------------------------------------------


def _arrow() -> Any:
    import pyarrow

    if int(pyarrow.__version__.partition(".")[0]) < 15:
        raise CodecError(f"pyarrow {pyarrow.__version__} can run code from hostile bytes: install 15 or newer")
    import pyarrow.ipc

    return pyarrow


def write(table: Any) -> bytes:
    pa = _arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=None)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def read(blob: Any) -> Any:
    """Return the table of a stream, without copying its bytes. Raise an error if it claims to hold more than these."""
    expect((blob,), (bytes, bytearray))
    table = _arrow().ipc.open_stream(blob).read_all()
    table.validate(full=True)
    return table


def pack(array: Any) -> bytes:
    return write(_arrow().table({"": array}))


def unpack(blob: Any) -> Any:
    (column,) = read(blob).columns  # ValueError: there are none, or several
    return column


# -- polars -----------------------------------------------------------------------------------------------------------


def _polars() -> list[Shape]:
    pl = import_module("polars")

    def lower(frame: Any) -> tuple[bytes]:
        if any("Object" in repr(kind) for kind in frame.dtypes):
            raise CodecError(
                "a polars frame with a column of objects can't be stored: cast the column, or return .to_dicts()"
            )
        sink = BytesIO()
        try:
            frame.write_ipc_stream(sink, compression="uncompressed")
        except pl.exceptions.PanicException as error:  # it is not a subclass of Exception
            raise CodecError(f"polars can't write this frame: {error}") from None
        blob = sink.getvalue()
        if not make(blob).equals(frame, null_equal=True):
            raise CodecError(
                "a polars frame that would come back changed can't be stored: return .to_dicts(), or .to_arrow()"
            )
        return (blob,)

    def make(blob: Any) -> Any:
        try:
            return pl.read_ipc_stream(BytesIO(blob))
        except pl.exceptions.PanicException:
            raise CodecError("polars can't read this stream") from None

    def make_series(blob: Any) -> Any:
        (series,) = make(blob).get_columns()
        return series

    return [
        tagged("polars.DataFrame", pl.DataFrame, lower, make),
        tagged("polars.Series", pl.Series, lambda value: lower(value.to_frame()), make_series),
    ]
