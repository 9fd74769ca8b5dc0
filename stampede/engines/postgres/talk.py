"""What is said over a connection, in libpq's own words: statements that are prepared once, and binary rows.

psycopg connects, encrypts and logs in. Its cursors take as long as the server does to find a row: a statement is looked
at anew, values are adapted by their types, and results by theirs, each time. Here all that is known beforehand. Nothing
waits here: `blocking.py` and `suspending.py` say when there is something to read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from struct import Struct, pack, unpack_from
from typing import Any, TypeAlias

from psycopg import errors
from psycopg.pq import ExecStatus

from stampede.engines.kit.replies import MORE

__all__ = ["Answer", "Command", "Encoded", "Row", "Talk", "encoded"]

Command: TypeAlias = tuple[str, Sequence[Any]]
"""A statement with $1, $2 ..., and their values: bytes, floats, ints, bools, texts, None; lists of texts or bytes."""

Row: TypeAlias = tuple[Any, ...]

Answer: TypeAlias = list[Row] | Exception
"""Rows, or why the server has refused."""

Encoded: TypeAlias = tuple[str, list[bytes | None], list[int]]
"""A statement, its values as they are sent, and whether each is binary."""

_FLOAT, _INT = Struct(">d"), Struct(">i")
_TEXT, _BYTES = 25, 17
_ROWS, _DONE, _SYNC = int(ExecStatus.TUPLES_OK), int(ExecStatus.COMMAND_OK), int(ExecStatus.PIPELINE_SYNC)


class Talk:
    """Over one connection, in libpq's pipeline mode: what is asked is sent behind all that was asked before.

    Statements are prepared there, but not with `pooled`: a pooler gives each transaction to another connection. It may
    also lose its place in a pipeline, so that its questions are sent one by one.
    """

    def __init__(self, connection: Any, *, pooled: bool) -> None:
        self.connection = connection
        self.pooled = pooled
        self._pg = connection.pgconn
        self._pg.enter_pipeline_mode()
        self._names: dict[str, bytes] = {}
        self._numbers = count()
        self._loads: dict[str, tuple[Callable[[bytes], Any] | None, ...]] = {}
        self._unsent: deque[Encoded] = deque()
        self._told: deque[tuple[str, bool]] = deque()  # whose results are to come, and which are a caller's
        self._owed = 0  # answers that are to come
        self._answer: Answer = []  # as far as it has come

    def put(self, command: Encoded) -> None:
        """Send this behind the others. What the socket does not take at once is left to `flush`."""
        if self.pooled:
            self._unsent.append(command)
            self._send_next()
            return
        statement, params, formats = command
        pg, name = self._pg, self._names.get(statement)
        if name is None:
            name = self._names[statement] = b"stampede_%d" % next(self._numbers)
            pg.send_prepare(name, statement.encode())
            self._told.append((statement, False))
        pg.send_query_prepared(name, params, formats, 1)
        self._told.append((statement, True))
        self._owed += 1
        pg.pipeline_sync()

    def _send_next(self) -> None:
        """Over a pooler's: if nothing is under way."""
        if self._unsent and not self._owed:
            statement, params, formats = self._unsent.popleft()
            self._pg.send_query_params(statement.encode(), params, None, formats, 1)
            self._told.append((statement, True))
            self._owed += 1
            self._pg.pipeline_sync()

    def flush(self) -> bool:
        """Whether something is yet to be sent, when the socket takes more."""
        return bool(self._pg.flush())

    def feed(self, data: object = None) -> None:
        """Read what has come."""
        try:
            self._pg.consume_input()
        except errors.Error:
            if isinstance(self._answer, errors.Error):  # why the server has closed the connection
                raise self._answer from None
            raise

    def gets(self) -> Any:
        """The next answer: rows, or why it was refused. MORE: there is none yet."""
        pg = self._pg
        while self._owed and not pg.is_busy():  # or libpq would wait, with the interpreter's lock held
            result = pg.get_result()
            if result is None:
                raise errors.OperationalError("the server has stopped in the middle of its answers")
            if result.status == _SYNC:
                answer, self._answer = self._answer, []
                self._owed -= 1
                if self._unsent:
                    self._send_next()
                return answer
            pg.get_result()  # None: the end of this one. It is there
            statement, ours = self._told.popleft()
            if isinstance(self._answer, Exception):  # what stands behind a refused one is refused, too
                continue
            try:
                rows = self._rows(statement, result)
                if ours:
                    self._answer = rows
            except errors.Error as error:
                self._answer = error
                if not ours:
                    self._names.pop(statement, None)
        return MORE

    def _rows(self, statement: str, result: Any) -> list[Row]:
        if result.status != _ROWS:
            if result.status == _DONE:
                return []
            raise errors.error_from_result(result, "utf-8")
        loads = self._loads.get(statement)
        if loads is None:
            loads = self._loads[statement] = tuple(_LOADS[result.ftype(place)] for place in range(result.nfields))
        get, rows = result.get_value, []
        for number in range(result.ntuples):
            row = []
            for place, load in enumerate(loads):
                value = get(number, place)
                if value is not None and load is not None:
                    value = _FLOAT.unpack(value)[0] if load is _float else load(value)
                row.append(value)
            rows.append(tuple(row))
        return rows


def encoded(command: Command) -> Encoded:
    """As it is sent. It raises if there is a value that can't be."""
    statement, values = command
    params: list[bytes | None] = []
    formats: list[int] = []
    for value in values:
        kind = type(value)
        binary = kind is not int and value is not None
        if kind is float:
            value = _FLOAT.pack(value)
        elif kind is int:
            value = b"%d" % value  # of any width, and so as text
        elif kind is str:
            value = value.encode()
        elif kind is bool:
            value = b"\1" if value else b"\0"
        elif kind is list or kind is tuple:
            value, binary = _array(value)
        elif value is not None and kind is not bytes:
            value = bytes(value)
        params.append(value)
        formats.append(int(binary))
    return statement, params, formats


# -- values -------------------------------------------------------------------------------------------------------


def _array(values: Sequence[Any]) -> tuple[bytes, bool]:
    if not values:
        return b"{}", False  # whatever of
    raw = [each if isinstance(each, bytes) else each.encode() for each in values]
    kind = _BYTES if isinstance(values[0], bytes) else _TEXT
    head = pack(">iiIii", 1, 0, kind, len(raw), 1)
    return head + b"".join([_INT.pack(len(each)) + each for each in raw]), True


def _array_of(data: bytes, load: Callable[[bytes], Any] | None) -> list[Any]:
    dimensions, _, _ = unpack_from(">iiI", data)
    if not dimensions:
        return []
    (count, _), at, found = unpack_from(">ii", data, 12), 20, []
    for _ in range(count):
        (length,) = _INT.unpack_from(data, at)
        at += 4
        raw = data[at : at + max(length, 0)]
        found.append(None if length < 0 else raw if load is None else load(raw))
        at += len(raw)
    return found


def _float(data: bytes) -> float:
    value: float = _FLOAT.unpack(data)[0]
    return value


_integer = partial(int.from_bytes, signed=True)

_LOADS: dict[int, Callable[[bytes], Any] | None] = {
    16: b"\1".__eq__,
    17: None,
    18: bytes.decode,
    19: bytes.decode,
    20: _integer,
    21: _integer,
    23: _integer,
    25: bytes.decode,
    701: _float,
    1001: lambda data: _array_of(data, None),
    1009: lambda data: _array_of(data, bytes.decode),
    1022: lambda data: _array_of(data, _float),
    2278: lambda data: None,  # void
}
"""By the types' numbers, in which servers never differ: bool, bytea, char, name, int8, int2, int4, text, float8, and
lists of bytea, text and float8. None: as it is."""
