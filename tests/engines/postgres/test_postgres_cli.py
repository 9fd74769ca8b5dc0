"""`stampede postgres init` creates the tables of the Postgres engine; other commands show its locks and keys."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg")

import psycopg
from postgres_server import PgBouncer, PostgresServer, shared_postgres
from servers import wait_until

from stampede import Cache
from stampede.__main__ import main
from stampede.engines.postgres import PostgresEngine
from stampede.engines.postgres.schema import VERSION, grants, make
from stampede.errors import EngineError
from stampede.runtime.colour import run_blocking

Run = Callable[..., str]


@pytest.fixture
def server() -> PostgresServer:
    """The session's server, with the tables."""
    shared_postgres().prepare()
    return shared_postgres()


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.postgres_url


@pytest.fixture
def bare() -> Iterator[str]:
    """The URL of a database without any tables."""
    with shared_postgres().database() as name:
        yield shared_postgres().url_of(database=name)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command, check that it ends with the exit code `code`, and return its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STAMPEDE_SETTINGS", raising=False)

    def run(*arguments: str, code: int = 0) -> str:
        ended = main(arguments)
        out, err = capsys.readouterr()
        assert ended == code, out + err
        return err if code == 2 else out

    return run


def line(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(url, autocommit=True)


def database_of(url: str) -> str:
    return url.rpartition("/")[2].partition("?")[0]


async def aget(cache: Cache) -> Any:
    return await cache.aget("key")


def works(url: str) -> bool:
    with Cache(url, on_engine_error="raise") as cache:
        cache.set("key", 1)
        with cache.lock("job"):
            return cache.get_or_compute("key", lambda: 2) == 1


# -- the tables -----------------------------------------------------------------------------------------------------


def test_init_makes_the_tables_once(run: Run, bare: str) -> None:
    """A second `init` changes nothing. Otherwise a second deployment would fail, or begin with an empty cache."""
    assert f"made version {VERSION}" in run("postgres", "init", bare)
    assert works(bare)
    assert f"version {VERSION} was there already" in run("postgres", "init", bare)
    with Cache(bare) as cache:
        assert cache.get("key") == 1


def test_init_takes_a_cache_of_the_settings(run: Run, bare: str, tmp_path: Path) -> None:
    """`init` accepts the name of a cache in the settings, so that no password has to be typed into a shell."""
    (tmp_path / "stampede.toml").write_text(
        f'[caches.shop]\nurl = "{bare}"\n[caches.jobs]\nurl = "disk://{tmp_path}/d"\nlocks = "{bare}"\n'
        '[caches.here]\nurl = "memory://"\n'
    )
    assert "made" in run("postgres", "init", "shop")
    assert "already" in run("postgres", "init", "jobs")
    assert "is not on Postgres" in run("postgres", "init", "here", code=2)
    assert "shop" in run("postgres", "init", "shopp", code=2)
    assert run("locks", "jobs") == "no lock is held\n"


def test_what_sql_prints_makes_the_same(run: Run, bare: str) -> None:
    """`init --sql` prints SQL that creates the same tables as `init` does."""
    text = run("postgres", "init", "--sql", "--grant", "root")
    with line(bare) as own:
        own.execute(text.encode())
        assert catalog(own) == fresh_catalog()
    assert "already" in run("postgres", "init", bare)


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_two_at_once_make_them_once(isolation: str) -> None:
    """If two machines run `init` at the same time, both succeed, even if each works on an old snapshot."""
    server, said = shared_postgres(), []

    def init() -> None:
        with line(server.url_of(database=name)) as own:
            said.append(make(own))

    with server.database(default_transaction_isolation=isolation) as name:
        both = [threading.Thread(target=init) for _ in range(2)]
        with line(server.url_of(database=name)) as first, first.transaction():
            first.execute("SELECT pg_advisory_xact_lock(8319104481669375078)")
            for each in both:
                each.start()
            waiting = (
                "SELECT FROM pg_locks JOIN pg_database AS d ON d.oid = database WHERE NOT granted AND datname = %s"
            )
            wait_until(lambda: len(server.ask(waiting, name)) == 2)
        for each in both:
            each.join()
    assert sorted(said) == [f"made version {VERSION}", f"version {VERSION} was there already"]


def test_a_database_whose_transactions_begin_otherwise(run: Run) -> None:
    """`init` works where SERIALIZABLE is the default isolation of transactions."""
    server = shared_postgres()
    with server.database(default_transaction_isolation="serializable") as name:
        assert "made" in run("postgres", "init", server.url_of(database=name))
        assert works(server.url_of(database=name))


def test_durable_tables_are_logged(run: Run, bare: str) -> None:
    """Durable tables are logged: values survive a crash of the server."""
    logged = """SELECT relname FROM pg_class
        WHERE relnamespace = 'stampede'::regnamespace AND relkind = 'r' AND relpersistence = 'u'"""
    run("postgres", "init", bare)
    name = database_of(bare)
    assert ("entries",) in shared_postgres().ask(logged, database=name)
    assert "durable from now on" in run("postgres", "init", bare, "--durable")
    assert shared_postgres().ask(logged, database=name) == [("runs",)]  # these must be lost in a crash
    assert "durable" not in run("postgres", "init", bare, "--durable")
    assert works(bare)
    with shared_postgres().database() as other:
        other_url = shared_postgres().url_of(database=other)
        assert "durable" in run("postgres", "init", other_url, "--durable")
        assert shared_postgres().ask(logged, database=other) == [("runs",)]


def test_init_goes_through_a_pooler(run: Run, bare: str) -> None:
    """`init` works through a pooler, for users that have no direct connection."""
    with closing(PgBouncer(shared_postgres(), "default_pool_size=1")) as bouncer:
        assert "made" in run("postgres", "init", bouncer.url_of(database=database_of(bare)))


def catalog(own: psycopg.Connection[Any]) -> list[Any]:
    """The definition of everything in the schema."""
    questions = (
        """SELECT c.relname, c.relkind, c.relpersistence, c.reloptions, a.attname, format_type(a.atttypid, a.atttypmod),
            a.attnotnull, a.attstorage, a.attidentity, pg_get_expr(d.adbin, d.adrelid)
            FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
            LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
            WHERE c.relnamespace = 'stampede'::regnamespace AND c.relkind <> 'c' ORDER BY 1, 5""",
        "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'stampede'::regnamespace ORDER BY 1",
        "SELECT indexdef FROM pg_indexes WHERE schemaname = 'stampede' ORDER BY 1",
        """SELECT pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid
            WHERE relnamespace = 'stampede'::regnamespace AND NOT tgisinternal ORDER BY 1""",
    )
    return [own.execute(each.encode()).fetchall() for each in questions]


def fresh_catalog() -> list[Any]:
    with shared_postgres().database() as name, line(shared_postgres().url_of(database=name)) as own:
        make(own)
        return catalog(own)


OTHER = "CREATE OR REPLACE FUNCTION stampede.version() RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT {}'"


def test_tables_of_another_version_are_left_as_they_are(bare: str) -> None:
    """Tables of another release are refused and not changed. A change could drop locks that are held."""
    with line(bare) as own:
        make(own)
        for version, told in ((VERSION - 1, "DROP SCHEMA stampede CASCADE"), (VERSION + 1, "newer release")):
            own.execute(OTHER.format(version).encode())
            before = catalog(own)
            with pytest.raises(EngineError, match=told):
                make(own)
            assert catalog(own) == before


@pytest.mark.parametrize(
    "version, told",
    [
        (None, r"has no tables of stampede's: run `stampede postgres init '?(postgres://\S+?)'?` "),
        (
            VERSION - 1,
            rf"older release \(version {VERSION - 1}\) of stampede's: "
            r"run `stampede postgres init '?(postgres://\S+?)'?` ",
        ),
        (VERSION + 1, rf"newer release \(version {VERSION + 1}; this one's is {VERSION}\): install that release here"),
    ],
)
def test_tables_that_are_not_this_releases_are_told_with_the_command(
    run: Run, bare: str, version: int | None, told: str
) -> None:
    """If the tables are missing or of another release, the error names the remedy, and calls still return values."""
    if version is not None:
        with line(bare) as own:
            make(own)
            own.execute(OTHER.format(version).encode())
    with Cache(bare, on_engine_error="raise") as cache, pytest.raises(EngineError, match=told) as error:
        cache.get("key")
    with Cache(bare, on_engine_error="raise") as cache, pytest.raises(EngineError, match=told):
        asyncio.run(aget(cache))
    with Cache(bare) as cache:
        assert cache.get_or_compute("key", lambda: 7) == 7  # calls still work
    if version is None:
        assert "made" in run("postgres", "init", re.search(told, str(error.value))[1])  # type: ignore[index]
    elif version > VERSION:
        assert "newer release" in run("postgres", "init", bare, code=2)


def test_tables_that_go_away_are_told_with_the_command(bare: str) -> None:
    """If the tables are dropped while a program runs, the error names the command to run."""
    with line(bare) as own:
        make(own)
        with Cache(bare, on_engine_error="raise") as cache:
            assert cache.get_or_compute("key", lambda: 1) == 1
            own.execute("DROP SCHEMA stampede CASCADE")
            with pytest.raises(EngineError, match="run `stampede postgres init"):
                cache.get_or_compute("key", lambda: 1)


# -- roles ----------------------------------------------------------------------------------------------------------


def test_a_role_with_these_rights_can_do_all_and_no_more(run: Run, server: PostgresServer) -> None:
    """`--grant` gives a role all rights that a cache needs, but not those of the owner."""
    with server.role() as role:
        mine = server.url_of(user=role)
        assert "has the rights" in run("postgres", "init", server.postgres_url, "--grant", role)
        assert works(mine)
        with Cache(mine, on_engine_error="raise", local=True) as cache:
            cache.clear()
            assert cache.get_or_compute("key", lambda: 3) == 3
        assert json.loads(run("locks", mine, "--history", "--json"))[0]["name"] == "job"
        with line(mine) as own, pytest.raises(psycopg.errors.InsufficientPrivilege):
            own.execute("DROP TABLE stampede.entries")


def test_a_role_without_rights_is_told_what_is_lacking(run: Run, server: PostgresServer) -> None:
    """If a role lacks rights, the error names the command that grants them. Calls still return values."""
    with server.role() as role, server.role("USAGE ON SCHEMA stampede") as other:
        for each in (role, other):
            mine = server.url_of(user=each)
            with Cache(mine, on_engine_error="raise") as cache, pytest.raises(EngineError) as error:
                cache.get("key")
            with Cache(mine, on_engine_error="raise") as cache, pytest.raises(EngineError, match="--grant ROLE"):
                asyncio.run(aget(cache))
            assert "permission denied" in str(error.value)
            assert "`stampede postgres init" in str(error.value) and "--grant ROLE" in str(error.value)
            with Cache(mine) as cache:
                assert cache.get_or_compute("key", lambda: 7) == 7  # calls still work


def test_who_may_not_make_schemas_is_told_what_to_do(run: Run, bare: str) -> None:
    """If a role may not create schemas, the error names `--sql`. In a schema that the role owns, `init` works."""
    server, name = shared_postgres(), database_of(bare)
    with server.role() as role:
        mine = server.url_of(user=role, database=name)
        assert "--sql" in run("postgres", "init", mine, code=2)
        server.say(f"CREATE SCHEMA stampede AUTHORIZATION {role}", database=name)
        assert "made" in run("postgres", "init", mine)
        assert works(mine)
        server.say("DROP SCHEMA stampede CASCADE", database=name)


def test_a_role_that_is_not_there(run: Run, url: str) -> None:
    """If the role of `--grant` does not exist, the error names `CREATE ROLE`. The SQL quotes a role's name."""
    assert "CREATE ROLE" in run("postgres", "init", url, "--grant", "no such role", code=2)
    assert grants('a"; DROP') == grants("x").replace('"x"', '"a""; DROP"')


# -- locks ----------------------------------------------------------------------------------------------------------


ODD = "nightly\x1b[31m\0\ud800 ü"


def test_locks_shows_who_holds_what(run: Run, url: str) -> None:
    """`stampede locks` shows each held lock and its holder, and escapes control characters in names."""
    assert run("locks", url) == "no lock is held\n"
    assert json.loads(run("locks", url, "--json")) == []
    with Cache(url, namespace="shop") as cache, cache.lock("first"), cache.lock(ODD) as lock:
        shown, fence = run("locks", url), lock.fence
        told = json.loads(run("locks", url, "--json"))
    assert told[0]["name"].endswith("first")
    assert set(told[0]) == {
        "name",
        "host",
        "pid",
        "program",
        "fence",
        "since",
        "seconds",
        "lease",
        "bound",
        "waiting",
        "on",
    }
    assert told[1]["fence"] == fence
    assert "first" in shown and f":{told[0]['pid']}" in shown
    assert "\x1b" not in shown and "\\x1b[31m\\x00" in shown
    assert run("locks", url) == "no lock is held\n"


def test_history_shows_what_failed(run: Run, url: str) -> None:
    """`stampede locks --history` shows the locks whose jobs failed, with their errors."""
    assert "no lock is in the record" in run("locks", url, "--history")
    with Cache(url) as cache:
        with cache.lock("good"):
            pass
        with pytest.raises(ValueError), cache.lock("bad"):
            raise ValueError("\x1b[31mwith details\nand more")
    both = json.loads(run("locks", url, "--history", "--json"))
    assert [each["problem"] for each in both] == ["failed", ""]  # the newest first
    (bad,) = json.loads(run("locks", url, "--history", "--failed", "--since", "1h", "--json"))
    assert bad["exception"].endswith("ValueError") and "with details\nand more" in bad["message"]
    assert "raise ValueError" in bad["traceback"]
    assert set(bad) == {
        "number", "name", "host", "pid", "program", "fence", "taken", "released", "problem", "exception",
        "message", "traceback", "on",
    }  # fmt: skip
    shown = run("locks", url, "--history", "--failed")
    assert "bad" in shown and "failed" in shown and "with details" in shown
    assert "good" not in shown and "\x1b" not in shown and "and more" not in shown
    assert "good" in run("locks", url, "--history") and "only the last 1:" in run(
        "locks", url, "--history", "--most", "1"
    )
    assert "no lock in the record had a problem" in run("locks", url, "--history", "--failed", "--since", "0s")


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["locks", "memory://"], "lives inside each process"),
        (["locks", "--break", "l", "null://"], "lives inside each process"),
        (["locks", "--break", "l", "--json", "file://"], "leave --history and --json out"),
        (["locks", "--history", "file://"], "keeps no record of its locks: postgres:// does"),
        (["locks", "--failed", "memory://"], "give --history, too"),
        (["postgres", "init", "memory://"], "is not on Postgres"),
        (["postgres", "init", "postgres://u:hunter2@127.0.0.1:1/d"], "refused"),
        (["postgres", "init", "postgres://u:hunter2@h/d?sslmod=1"], "did you mean 'sslmode'"),
        (["locks", "postgres://u:hunter2@127.0.0.1:1/d"], "refused"),
    ],
)
def test_what_cannot_be_done_is_told(run: Run, arguments: list[str], told: str) -> None:
    """An impossible command ends with an explanation. It shows neither a traceback nor a password."""
    said = run(*arguments, code=2)
    assert told in said and "hunter2" not in said


def test_a_wrong_time_is_told(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """`--since yesterday` is refused with an explanation. It must not end in a traceback or mean an hour."""
    with pytest.raises(SystemExit):
        main(["locks", "--history", "--since", "yesterday"])
    assert "give a time such as" in capsys.readouterr().err


# -- check and stats ------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> Callable[[str], None]:
    return lambda url: (tmp_path / "stampede.toml").write_text(f'[caches.default]\nurl = "{url}"\n') and None


def test_check_and_stats_of_a_database(run: Run, url: str, settings: Callable[[str], None]) -> None:
    """`stampede check` and `stampede stats` work with a database, and show what it holds."""
    settings(url)
    assert "median ping" in run("check")
    shown = run("stats")
    assert "entries, about" in shown and "connections" in shown
    (facts,) = json.loads(run("stats", "--json")).values()
    assert facts["bytes_of_entries"] > 0 and 0 < facts["connections"] <= facts["at_most"]


def test_check_tells_of_missing_tables(run: Run, bare: str, settings: Callable[[str], None]) -> None:
    """`stampede check` reports missing tables. Otherwise programs would be the first to find out."""
    settings(bare)
    assert "run `stampede postgres init" in run("check", code=1)
    assert "run `stampede postgres init" in run("stats", code=2)


def test_check_tells_that_nobody_is_told_behind_a_pooler(
    run: Run, server: PostgresServer, settings: Callable[[str], None]
) -> None:
    """`stampede check` reports that no notifications arrive through a pooler, unless `listen=` is given."""
    with closing(PgBouncer(server)) as bouncer:
        settings(bouncer.postgres_url)
        assert "listen=" in run("check")
        settings(f"{bouncer.postgres_url}&listen={server.postgres_url.replace('?', '%3F').replace('&', '%26')}")
        assert "listen=" not in run("check").replace("&listen=", "")


def test_reports_are_declared(url: str) -> None:
    """The engine declares that it can report its locks, so that `stampede locks` need not try."""
    with closing(PostgresEngine(url)) as engine:
        assert engine.reports is not None
        assert run_blocking(engine.reports.released(failed=False, since=60.0, most=1)) == []


def test_keys_are_shown_and_invalidated(run: Run, url: str, settings: Callable[[str], None]) -> None:
    """The commands that show and invalidate keys work with a database."""
    settings(url)
    with Cache(url) as cache:
        cache.set("greeting", "hello")
    assert "'hello'" in run("get", "greeting")
    assert run("keys", "greet") == "greeting\n"
    assert "was removed" in run("invalidate", "greeting")
    assert "no value is stored" in run("get", "greeting", code=1)


def test_locks_of_a_pair_are_those_of_its_locks(run: Run, url: str, tmp_path: Path) -> None:
    """`stampede locks` asks the engine of the locks if it differs from the engine of the values."""
    pair = f'[caches.default]\nurl = "disk://{tmp_path}/values"\nlocks = "{url}"\n'
    (tmp_path / "stampede.toml").write_text(pair)
    with Cache(f"disk://{tmp_path}/values", locks=url) as cache, cache.lock("job"):
        (told,) = json.loads(run("locks", "--json"))
    assert told["name"] == "job"
