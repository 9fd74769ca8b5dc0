"""The cells of a SQL database: which statements are sent, which rows remain, and the messages for users."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("psycopg")
pytest.importorskip("pymysql")
pytest.importorskip("sqlalchemy")

import pymysql
import sqlalchemy as sa
from herd import Herd, until
from mariadb_server import shared_mariadb
from postgres_server import shared_postgres

from stampede import Cache, EngineError, events
from stampede.engines import open_engine, sql
from stampede.engines.cells import Cell, Faster, Seen
from stampede.engines.sql import SqlCell, SqlDatabase, schema
from stampede.errors import MissingExtra, OptionError


@pytest.fixture(params=["mariadb", "postgres", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sql+sqlite:///{tmp_path}/cache.db"
    server = shared_mariadb() if request.param == "mariadb" else shared_postgres()
    server.empty()
    return server.url


@pytest.fixture
def cell(url: str) -> Iterator[SqlCell]:
    made = sql.from_url(url)
    yield made
    made.close()


def rows(cell: SqlCell) -> int:
    with cell._engine.connect() as line:
        return line.execute(sa.select(sa.func.count()).select_from(cell._table)).scalar_one()


def test_versions_grow_over_removals_and_sweeps(cell: SqlCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions grow even if rows were removed and swept. Otherwise, a late swap could succeed against a newer row."""
    monkeypatch.setattr(sql, "TOMBSTONE", 0.0)
    seen: list[Any] = []
    for _ in range(5):
        version = cell.swap("l", None, b"held", 60)
        seen += [version, cell.swap("l", version, b"renewed", 60)]
        cell.swap("l", seen[-1], None, 60)
        (buried,) = cell.read(["l"])
        assert buried.data is None
        assert isinstance(cell.swap("l", None, b"late", 60), Faster)
        time.sleep(0.002)
        cell._sweep()
        assert rows(cell) == 0
        assert isinstance(cell.swap("l", buried.version, b"late", 60), Faster)
    assert seen == sorted(set(seen))


def test_rows_of_no_use_are_swept_and_no_others(cell: SqlCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are no longer needed are deleted, and no others. Otherwise, the table would grow for ever."""
    monkeypatch.setattr(sql, "SWEEP", 4)
    kept = {"for ever": cell.swap("for ever", None, b"1", inf), "long": cell.swap("long", None, b"1", 60)}
    for number in range(6):
        cell.swap(f"short {number}".replace(" ", "-"), None, b"1", 0.001)
    time.sleep(0.005)
    for number in range(8):
        kept[str(number)] = cell.swap(str(number), None, b"1", 60)
    assert rows(cell) == len(kept)
    assert {name: seen.version for name, seen in zip(kept, cell.read(list(kept)), strict=True)} == kept


def test_names_are_exact_and_ages_the_databases(cell: SqlCell) -> None:
    """Names are compared exactly, and the age of a value is measured by the database's clock."""
    for name in ("a", "A", "a.", "a_"):
        assert not isinstance(cell.swap(name, None, name.encode() * 9, 60), Faster)
    time.sleep(0.02)
    found = cell.read(["a.", "A", "none", "a", "a_"])
    assert [seen.data for seen in found] == [b"a." * 9, b"A" * 9, None, b"a" * 9, b"a_" * 9]
    assert all(seen.age is not None and 0.015 < seen.age < 5 for seen in found if seen.data)
    assert found[2] == Seen(None)


def test_a_question_is_one_statement(cell: SqlCell, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit is one statement. A miss is three, without BEGIN or ROLLBACK."""
    monkeypatch.setattr("stampede.engines.kit.generations.KNOWN", 600.0)  # the generation is read once
    asked: list[str] = []
    with Cache(cell, early=0) as cache:
        cache.get_or_compute("warm", lambda: 1)  # makes the table, and reads the generation
        cache.get_or_compute("k", lambda: 1)
        sa.event.listen(cell._engine, "before_cursor_execute", lambda *args: asked.append(args[2].split()[0]))
        assert cache.get_or_compute("k", lambda: 2) == 1
        assert asked == ["SELECT"]
        asked.clear()
        cache.get_or_compute("l", lambda: 1)
        assert asked == ["SELECT", "INSERT", "UPDATE"]
    if url.startswith("sql+mysql"):
        with sa.create_engine(url[4:]).connect() as line:

            def questions() -> int:
                return int(line.exec_driver_sql("SHOW GLOBAL STATUS LIKE 'Questions'").one()[1])

            def questions_of_ten_reads() -> int:
                before = questions()
                for _ in range(10):
                    cell.read(["k"])
                return questions() - before - 1

            cell.read(["k"])  # closing the cache closed the connections
            until(lambda: questions_of_ten_reads() == 10)  # other clients of the server may ask something, too


def test_an_engine_of_the_users_is_asked_by_its_own_connections(url: str) -> None:
    """An engine of SQLAlchemy that the user made is used with its own connections and settings, and is not closed."""
    theirs, made = sa.create_engine(url[4:]), []
    sa.event.listen(theirs, "connect", lambda *_: made.append(1))
    with Cache(theirs) as cache, Cache(url) as other:
        assert cache.get_or_compute("k", lambda: 1) == 1 == other.get("k")
        assert made
        assert cache.engine.scheme == "sql"
    with theirs.connect() as line:  # the user's engine still works
        assert line.execute(sa.text("SELECT 1")).scalar_one() == 1
    theirs.dispose()


def test_a_table_is_made_by_hand(url: str) -> None:
    """A user who may not create tables gets an error with the statements that an administrator can run."""
    cell = sql.from_url(url, create=False, table="by_hand")
    with pytest.raises(EngineError, match=r"no table 'by_hand'; create it by: CREATE TABLE by_hand") as told:
        cell.read(["k"])
    with cell._engine.connect() as line:
        for statement in str(told.value).partition("create it by: ")[2].strip().rstrip(";").split(";\n"):
            line.exec_driver_sql(statement)
        try:
            assert cell.swap("k", None, b"1", 60) == cell.read(["k"])[0].version
        finally:
            line.exec_driver_sql("DROP TABLE by_hand")
    cell.close()


def test_the_statements_are_those_of_the_dialect() -> None:
    """The schema suits the dialect. Otherwise, MySQL would not tell `a` from `A`, and would refuse more than 64 KB."""
    assert "COLLATE ascii_bin" in schema("mysql+pymysql")
    assert "LONGBLOB" in schema("mysql")
    assert "BYTEA" in schema("postgresql")
    assert "CREATE TABLE mine" in schema("sqlite", "mine")


def test_a_value_that_the_server_takes_not_is_not_kept() -> None:
    """A value that is too large for MariaDB is not stored. The server disconnects then, but does not count as down."""
    server, told = shared_mariadb(), list[Any]()
    server.empty()
    with Cache(f"{server.url}&timeout=20", observers=[told.append]) as cache:
        large = b"'" * 9_000_000  # 16 MiB may be sent, and each byte takes two
        assert cache.get_or_compute("k", lambda: large) == large
        assert cache.get_or_compute("k", lambda: b"small") == b"small"
        assert cache.stats().engine_downs == 0
    assert [each.key for each in told if isinstance(each, events.Unkept)] == ["k"]


def test_connections_that_the_server_has_ended_cost_nobody_anything(cell: SqlCell, url: str) -> None:
    """A connection that the server has closed is replaced, for example after a quiet night. That is no outage."""
    ways = {
        "mysql": ("SELECT CONNECTION_ID()", "KILL {}"),
        "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend({})"),
    }
    dialect = cell._engine.dialect.name
    if dialect not in ways:
        pytest.skip("a file ends no connections")
    (own, end), _ = ways[dialect], cell.swap("k", None, b"1", 60)
    with cell._engine.connect() as line, sa.create_engine(url[4:], poolclass=sa.NullPool).connect() as other:
        number = line.exec_driver_sql(own).scalar_one()
        line.close()
        other.exec_driver_sql(end.format(number))
    assert cell.read(["k"])[0].data == b"1"


HOSTILE = [
    *("data = 'text of another program, and a long one'", "data = 12", "data = NULL", "data = x'00'"),
    *("version = 'abc'", "version = 1.5", "version = -5", "version = 9223372036854775807"),
    *("written = 'abc'", "written = -1e300", "written = 9000000000000000000", "ends = 'abc'", "ends = -1"),
]


@pytest.mark.parametrize("wrong", HOSTILE)
def test_what_others_write_concerns_its_key_alone(tmp_path: Path, wrong: str) -> None:
    """A row with wrong types, which SQLite allows, affects only its own key. The key can be overwritten."""
    with Cache(f"sql+sqlite:///{tmp_path}/cache.db", early=0) as cache, sqlite3.connect(tmp_path / "cache.db") as other:
        assert cache.get_or_compute("k", lambda: "mine") == "mine"
        other.execute(f"UPDATE stampede SET {wrong} WHERE name LIKE 's:%k'")
        other.commit()
        assert cache.get_or_compute("k", lambda: "mine") == "mine"
        assert cache.get_or_compute("l", lambda: 1) == 1
        cache.set("k", "new")
        assert cache.get("k") == "new"
        assert cache.stats().engine_downs == 0
    other.close()


@pytest.mark.parametrize("level", ["serializable", "repeatable\\ read"])
def test_a_server_that_wants_a_serial_order_is_asked_again(level: str) -> None:
    """If PostgreSQL uses a stricter isolation level, a conflict between two writers is tried again. It is no outage."""
    server = shared_postgres()
    server.empty()
    url = f"{server.url}&options={quote(f'-c default_transaction_isolation={level}')}"
    with Cache(url, early=0) as one, Cache(url, early=0) as other:

        def write(cache: Cache) -> int:
            for number in range(20):
                cache.set("k", number)
            return cache.stats().engine_downs

        assert Herd(*[lambda cache=cache: write(cache) for cache in (one, other)] * 2).join() == [0] * 4
        assert one.get("k") == 19


class Limit(Exception):
    """Raised by a worker's time limit, at any line of its thread."""


def test_an_answer_that_nobody_has_read_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a call is interrupted before it reads its reply, the next call does not get this reply."""
    server = shared_mariadb()
    server.empty()
    cell = sql.from_url(server.url)
    version = cell.swap("k", None, b"1", 60)
    asks = pymysql.connections.Connection._execute_command

    def interrupted(*args: Any) -> None:
        asks(*args)
        raise Limit

    with monkeypatch.context() as patch:
        patch.setattr(pymysql.connections.Connection, "_execute_command", interrupted)
        with pytest.raises(Limit):
            cell.swap("k", version, b"2", 60)
    assert isinstance(cell.swap("l", 123, b"2", 60), Faster)
    assert cell.read(["l"]) == [Seen(None)]
    cell.close()


def test_who_was_overtaken_while_the_table_was_made_looks_again(tmp_path: Path) -> None:
    """If another process makes the table at the same moment, the preparation fails, and the next call repeats it."""
    prepared: list[str] = []

    def prepare(line: sa.Connection) -> None:
        prepared.append("once more")
        if len(prepared) == 1:
            raise sa.exc.IntegrityError("CREATE TABLE", None, sqlite3.IntegrityError())

    database = SqlDatabase(f"sqlite:///{tmp_path}/cache.db", 3.0, {}, prepare)
    for expected in (pytest.raises(sa.exc.IntegrityError), nullcontext()):
        with expected:
            database.ask(lambda found: found.all(), sa.text("SELECT 1"), {})
    assert len(prepared) == 2
    database.close()


def test_values_are_not_shown(cell: SqlCell) -> None:
    """An error of the database does not show the value, which could be private."""
    version = cell.swap("k", None, b"hunter2", 60)
    with cell._engine.connect() as line:
        line.exec_driver_sql("DROP TABLE stampede")
    with pytest.raises(sa.exc.DBAPIError) as told:
        cell.swap("k", version, b"hunter2", 60)
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    "url, told",
    [
        ("sql://localhost/db", "give `sql\\+` and a URL"),
        ("sql+nonsense://localhost/db", "give `sql\\+` and a URL"),
        ("sql+mysql", "give one such as"),
        ("sql+sqlite://", "belongs to one connection"),
        ("sql+sqlite:///:memory:", "belongs to one connection"),
        ("sql+sqlite+aiosqlite:///x.db", "of a driver that blocks"),
        ("sql+sqlite:///x.db?create=perhaps", "create"),
        ("sql+sqlite:///x.db?timeout=soon", "timeout"),
    ],
)
def test_a_wrong_url_is_told_the_right_one(url: str, told: str) -> None:
    """A mistake in a URL is refused when the engine is opened. The error says what would be right."""
    with pytest.raises(OptionError, match=told):
        open_engine(url)


def test_a_driver_that_is_missing_is_named() -> None:
    """If the URL's driver is not installed, the error names it, since no extra of ours would install it."""
    with pytest.raises(MissingExtra, match=r"needs the driver 'pg8000', which is not installed"):
        open_engine("sql+postgresql+pg8000://localhost/db")


def test_passwords_are_not_shown() -> None:
    """Passwords in URLs appear neither in names nor in errors."""
    engine = open_engine("sql+mysql+pymysql://user:hunter2@localhost/db")
    assert engine.called == "sql+mysql+pymysql://user:***@localhost/db"
    with pytest.raises(OptionError) as told:
        open_engine("sql+nonsense://user:hunter2@localhost/db")
    assert "hunter2" not in str(told.value)


def test_it_declares_what_it_can() -> None:
    """The cell declares that it knows ends, versions that grow, and ages. Otherwise, the engine would not use them."""
    assert (SqlCell.ends, SqlCell.grows, SqlCell.ages) == (True, True, True)
    assert issubclass(SqlCell, Cell)


def test_who_comes_while_others_use_the_file_comes_in(tmp_path: Path) -> None:
    """A process can open the file while others use it, although SQLite then refuses to change the journal's mode."""
    file = tmp_path / "cache.sqlite"
    with Cache(f"sql+sqlite:///{file}") as cache:
        cache.set("k", "value")
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode=DELETE")
        other.execute("BEGIN")
        other.execute("SELECT * FROM stampede").fetchone()
        with Cache(f"sql+sqlite:///{file}?timeout=1", on_engine_error="raise") as cache:
            assert cache.get("k") == "value"
