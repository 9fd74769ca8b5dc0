"""What is said over a connection, in libpq's own words: statements that are prepared once, and binary rows.

psycopg connects, encrypts and logs in. Its cursors take as long as the server does to find a row: a statement is looked
at anew, values are adapted by their types, and results by theirs, each time. Here all that is known beforehand. Nothing
waits: who drives the talk is told for what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import count
from struct import Struct, pack, unpack_from
from typing import Any, TypeAlias

from psycopg import errors
from psycopg.pq import ExecStatus

__all__ = ["READ", "WRITE", "Command", "Row", "Talk", "Talking", "rows_of"]

Command: TypeAlias = tuple[str, Sequence[Any]]
"""A statement with $1, $2 ..., and their values: bytes, floats, ints, bools, texts, None; lists of texts or bytes."""

Row: TypeAlias = tuple[Any, ...]

READ, WRITE = 1, 2

Talking: TypeAlias = Generator[int, None, list[list[Row]]]
"""Yields what it waits for, until it has the rows of all commands. Who leaves it has to hang up."""

_FLOAT, _INT = Struct(">d"), Struct(">i")
_TEXT, _BYTES = 25, 17


class Talk:
    """Over one connection. With `named`, statements are prepared there; a pooler's is another one each time."""

    def __init__(self, connection: Any, *, named: bool) -> None:
        self._pg = connection.pgconn
        self._named = named
        self._names: dict[str, bytes] = {}
        self._numbers = count()
        self._told: deque[tuple[str, tuple[Any] | None]] = deque()  # whose answers are to come; None: a preparation's
        self._syncs = 0
        self._refused: Exception | None = None
        self._loads: dict[str, tuple[Callable[[bytes], Any], ...]] = {}

    def ask(self, command: Command) -> Talking:
        """The rows of one."""
        pg, (statement, values) = self._pg, command
        if self._named and statement not in self._names:
            return self.ask_all([command])
        self._send(statement, values)
        return self._answer(statement, pg)

    def _answer(self, statement: str, pg: Any) -> Talking:
        while pg.flush():
            yield READ | WRITE
            pg.consume_input()
        result = None
        while True:
            # Before each: libpq would wait with the interpreter's lock held, in which nobody's time ends. The end of an
            # answer often comes in a packet of its own, as after a refusal.
            while pg.is_busy():
                yield READ
                pg.consume_input()
            part = pg.get_result()
            if part is None:
                return [self._rows(statement, result)]
            result = part  # of several the last tells

    def ask_all(self, commands: Sequence[Command]) -> Talking:
        """The rows of each, in order; each is a transaction of its own. The first that is refused is raised, once all
        have been answered."""
        pg = self._pg
        pg.enter_pipeline_mode()
        for number, command in enumerate(commands):
            self.put(command, number)
        answers: dict[Any, list[Row] | Exception] = {}
        while self._syncs:
            while (unsent := pg.flush()) or pg.is_busy():
                yield READ | WRITE if unsent else READ
                pg.consume_input()
            answers.update(self.heard())
        pg.exit_pipeline_mode()
        return rows_of([answers[number] for number in range(len(commands))])

    def apart(self, command: Command) -> Talking:
        """The rows of one, in a transaction that is not as the database's others are."""
        yield from self.ask(("BEGIN ISOLATION LEVEL READ COMMITTED", ()))
        try:
            rows = yield from self.ask(command)
        except errors.Error:
            yield from self.ask(("ROLLBACK", ()))
            raise
        yield from self.ask(("COMMIT", ()))
        return rows

    # -- many under way, over a connection in pipeline mode -------------------------------------------------------

    def put(self, command: Command, asked: Any) -> None:
        """Send this behind the others."""
        pg, (statement, values) = self._pg, command
        if self._named and statement not in self._names:
            self._names[statement] = b"stampede_%d" % next(self._numbers)
            pg.send_prepare(self._names[statement], statement.encode())
            self._told.append((statement, None))
        self._send(statement, values)
        self._told.append((statement, (asked,)))
        pg.pipeline_sync()
        self._syncs += 1

    def heard(self) -> list[tuple[Any, list[Row] | Exception]]:
        """What has been answered by now: as it was put, and its rows, or why it is refused."""
        pg, answers, silent = self._pg, [], 0
        while self._syncs and not pg.is_busy():
            result = pg.get_result()
            if result is None:  # one stands behind each answer
                silent += 1
                if silent > 2:
                    raise errors.OperationalError("the server has stopped in the middle of its answers")
                continue
            silent = 0
            if result.status == ExecStatus.PIPELINE_SYNC:
                self._syncs -= 1
                self._refused = None
                continue
            statement, asked = self._told.popleft()
            answer: list[Row] | Exception = []
            try:
                answer = self._refused or self._rows(statement, result)
            except errors.Error as error:
                answer = error
                if asked is None:
                    self._refused = error  # of what was to be prepared; what was to be done with it is, too
                    del self._names[statement]
            if asked is not None:
                answers.append((asked[0], answer))
        return answers

    def _send(self, statement: str, values: Sequence[Any]) -> None:
        params: list[bytes | None] = []
        formats: list[int] = []
        for value in values:
            kind = type(value)
            if kind is bytes:
                params.append(value)
                formats.append(1)
            elif kind is float:
                params.append(_FLOAT.pack(value))
                formats.append(1)
            else:
                param, binary = _DUMPS[kind](value)
                params.append(param)
                formats.append(binary)
        if self._named:
            self._pg.send_query_prepared(self._names[statement], params, formats, 1)
        else:
            self._pg.send_query_params(statement.encode(), params, None, formats, 1)

    def _rows(self, statement: str, result: Any) -> list[Row]:
        if result is None:
            raise errors.OperationalError("the server closed the connection")
        if result.status != ExecStatus.TUPLES_OK:
            if result.status == ExecStatus.COMMAND_OK:
                return []
            raise errors.error_from_result(result, "utf-8")
        loads = self._loads.get(statement)
        if loads is None:
            loads = tuple(_LOADS[result.ftype(number)] for number in range(result.nfields))
            self._loads[statement] = loads
        get = result.get_value
        return [
            tuple([None if (it := get(row, number)) is None else load(it) for number, load in enumerate(loads)])
            for row in range(result.ntuples)
        ]


def rows_of(answers: Sequence[list[Row] | Exception]) -> list[list[Row]]:
    """All of them, or the first refusal."""
    rows: list[list[Row]] = []
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        rows.append(answer)
    return rows


# -- values -------------------------------------------------------------------------------------------------------


def _array(values: Sequence[Any]) -> tuple[bytes, int]:
    if not values:
        return b"{}", 0  # whatever of
    raw = [each if isinstance(each, bytes) else each.encode() for each in values]
    kind = _BYTES if isinstance(values[0], bytes) else _TEXT
    head = pack(">iiIii", 1, 0, kind, len(raw), 1)
    return head + b"".join([_INT.pack(len(each)) + each for each in raw]), 1


_DUMPS: dict[type, Callable[[Any], tuple[bytes | None, int]]] = {
    type(None): lambda value: (None, 0),
    bool: lambda value: (b"\1" if value else b"\0", 1),
    int: lambda value: (b"%d" % value, 0),  # of any width
    str: lambda value: (value.encode(), 1),
    list: _array,
    tuple: _array,
    bytearray: lambda value: (bytes(value), 1),
    memoryview: lambda value: (bytes(value), 1),
}


def _array_of(data: bytes, load: Callable[[bytes], Any]) -> list[Any]:
    dimensions, _, _ = unpack_from(">iiI", data)
    if not dimensions:
        return []
    (count, _), at, found = unpack_from(">ii", data, 12), 20, []
    for _ in range(count):
        (length,) = _INT.unpack_from(data, at)
        at += 4
        found.append(None if length < 0 else load(data[at : at + max(length, 0)]))
        at += max(length, 0)
    return found


def _same(data: bytes) -> bytes:
    return data


def _float(data: bytes) -> float:
    value: float = _FLOAT.unpack(data)[0]
    return value


def _integer(data: bytes) -> int:
    return int.from_bytes(data, signed=True)


_LOADS: dict[int, Callable[[bytes], Any]] = {
    16: b"\1".__eq__,
    17: _same,
    18: bytes.decode,
    19: bytes.decode,
    20: _integer,
    21: _integer,
    23: _integer,
    25: bytes.decode,
    701: _float,
    1001: lambda data: _array_of(data, _same),
    1009: lambda data: _array_of(data, bytes.decode),
    1022: lambda data: _array_of(data, _float),
    2278: lambda data: None,  # void
}
"""By the types' numbers, in which servers never differ: bool, bytea, char, name, int8, int2, int4, text, float8, and
lists of bytea, text and float8."""
