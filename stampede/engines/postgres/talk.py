"""The conversation over one connection, through libpq's functions: statements prepared once, and binary rows.

psycopg connects, encrypts and logs in. Its cursors take as long as the server takes to find a row: they parse each
statement anew, and look up converters for arguments and results by their types. Here all that is known in advance.
Nothing waits here: `blocking.py` and `suspending.py` wait for the socket."""

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
"""A statement with $1, $2 ..., and their values: bytes, float, int, bool, str, None, or a list of str or bytes."""

Row: TypeAlias = tuple[Any, ...]

Answer: TypeAlias = list[Row] | Exception
"""Rows, or the server's refusal."""

Encoded: TypeAlias = tuple[str, list[bytes | None], list[int]]
"""A statement, its values as they are sent, and their formats: 1 if binary, 0 if text."""

_FLOAT, _INT = Struct(">d"), Struct(">i")
_TEXT, _BYTES = 25, 17
_ROWS, _DONE, _SYNC = int(ExecStatus.TUPLES_OK), int(ExecStatus.COMMAND_OK), int(ExecStatus.PIPELINE_SYNC)


class Talk:
    """The conversation over one connection, in libpq's pipeline mode: commands are sent without waiting for answers.
    Statements are prepared on the connection, but not with `pooled`: a pooler gives each transaction to another
    connection. It may also lose its place in a pipeline, so that commands are sent one by one."""

    def __init__(self, connection: Any, *, pooled: bool) -> None:
        self.connection = connection
        self.pooled = pooled
        self._pg = connection.pgconn
        self._pg.enter_pipeline_mode()
        self._names: dict[str, bytes] = {}
        self._numbers = count()
        self._loads: dict[str, tuple[Callable[[bytes], Any] | None, ...]] = {}
        self._unsent: deque[Encoded] = deque()
        self._sent: deque[tuple[str, bool]] = deque()  # statements without a result yet; False: only prepared
        self._owed = 0  # answers that have not come yet
        self._answer: Answer = []  # the next answer, as far as it has come

    def put(self, command: Encoded) -> None:
        """Send this command behind the others. `flush` sends what the socket does not take at once."""
        if self.pooled:
            self._unsent.append(command)
            self._send_next()
            return
        statement, params, formats = command
        pg, name = self._pg, self._names.get(statement)
        if name is None:
            name = self._names[statement] = b"stampede_%d" % next(self._numbers)
            pg.send_prepare(name, statement.encode())
            self._sent.append((statement, False))
        pg.send_query_prepared(name, params, formats, 1)
        self._sent.append((statement, True))
        self._owed += 1
        pg.pipeline_sync()

    def _send_next(self) -> None:
        """Send the next command through a pooler, if no other is under way."""
        if self._unsent and not self._owed:
            statement, params, formats = self._unsent.popleft()
            self._pg.send_query_params(statement.encode(), params, None, formats, 1)
            self._sent.append((statement, True))
            self._owed += 1
            self._pg.pipeline_sync()

    def flush(self) -> bool:
        """Send what the socket takes. Return whether something is left."""
        return bool(self._pg.flush())

    def feed(self, data: object = None) -> None:
        """Read what has arrived, without waiting."""
        try:
            self._pg.consume_input()
        except errors.Error:
            if isinstance(self._answer, errors.Error):  # the reason why the server has closed the connection
                raise self._answer from None
            raise

    def gets(self) -> Any:
        """Return the next answer: rows, or the refusal. MORE: it has not arrived yet."""
        pg = self._pg
        while self._owed and not pg.is_busy():  # if it is busy, `get_result` would wait, and hold the GIL
            result = pg.get_result()
            if result is None:
                raise errors.OperationalError("the server has stopped in the middle of an answer")
            if result.status == _SYNC:
                answer, self._answer = self._answer, []
                self._owed -= 1
                if self._unsent:
                    self._send_next()
                return answer
            pg.get_result()  # None, which ends this result, and is already there
            statement, ours = self._sent.popleft()
            if isinstance(self._answer, Exception):  # the server skips what follows a refusal
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
    """Return the command as it is sent. Raise TypeError, or UnicodeError, if a value cannot be sent."""
    statement, values = command
    params: list[bytes | None] = []
    formats: list[int] = []
    for value in values:
        kind = type(value)
        binary = kind is not int and value is not None
        if kind is float:
            value = _FLOAT.pack(value)
        elif kind is int:
            value = b"%d" % value  # as text, since the parameter may be int4 or int8
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
        return b"{}", False  # as text, which has no type of elements
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
"""Decoders by the OIDs of types, which are the same on all servers: bool, bytea, char, name, int8, int2, int4, text,
float8, arrays of bytea, text and float8, and void. None: the bytes are the value."""
