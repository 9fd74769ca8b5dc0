"""Options of the Postgres engine from URLs, pools and the settings of other libraries. No message shows a password."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("psycopg")

import psycopg
from postgres_server import PostgresServer, shared_postgres
from psycopg import sql

from stampede import Cache
from stampede.contrib.django import url_of
from stampede.engines import check_url, open_engine
from stampede.engines.postgres import address
from stampede.engines.postgres.connect import PostgresConnector, of_pool, of_url
from stampede.errors import EngineError, OptionError, StampedeError


@pytest.fixture
def server() -> PostgresServer:
    """The session's server, with the tables."""
    shared_postgres().prepare()
    return shared_postgres()


# -- URLs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, options",
    [
        ("postgres://", {}),
        ("postgresql://u:p@h:1/d", {"user": "u", "password": "p", "host": "h", "port": "1", "dbname": "d"}),
        ("postgres://h1,h2:2/d?target_session_attrs=read-write",
         {"host": "h1,h2", "port": ",2", "dbname": "d", "target_session_attrs": "read-write"}),
        ("postgres://%2Frun%2Fpg/d", {"host": "/run/pg", "dbname": "d"}),
        ("postgres:///d?host=/run/pg", {"host": "/run/pg", "dbname": "d"}),
        ("postgres://u@[::1]:2/d", {"user": "u", "host": "::1", "port": "2", "dbname": "d"}),
        ("postgres:///?host=::1", {"host": "::1"}),
        ("postgres://u:s%40%2F%25%3A%20%C3%BC@h", {"user": "u", "password": "s@/%: ü", "host": "h"}),
        ("postgres://u:s?c#r [℀@h/d?ssl=true",
         {"user": "u", "password": "s?c#r [℀", "host": "h", "dbname": "d", "sslmode": "require"}),
        ("postgres://h?options=-c%20a%3Db+c", {"host": "h", "options": "-c a=b+c"}),
        ("postgresql+psycopg://h?options=-c+a%3Db%2Bc", {"host": "h", "options": "-c a=b+c"}),
        ("postgresql+psycopg2:///d?host=a,b&port=1,", {"host": "a,b", "port": "1,", "dbname": "d"}),
        ("host=h port=1 password='a b'", {"host": "h", "port": "1", "password": "a b"}),
    ],
)  # fmt: skip
def test_a_url_is_read_as_libpq_and_sqlalchemy_read_it(url: str, options: dict[str, str]) -> None:
    """A URL means the same here as for libpq and SQLAlchemy, and can be written and read again."""
    read = address.checked(address.read(url), url)
    assert read == options
    assert address.read(address.written(read)) == options
    assert psycopg.conninfo.conninfo_to_dict(address.written(read).replace("postgres", "postgresql", 1)) == options


def test_sqlalchemys_url_of_odd_names_is_read() -> None:
    """A URL that SQLAlchemy renders is read with the same password and options, whatever their characters."""
    sa = pytest.importorskip("sqlalchemy")
    odd = "p@s s/+%:?#&=ü"
    url = sa.URL.create("postgresql+psycopg", f"u{odd}", odd, "h", 5, "d", {"options": f"-c a={odd}"})
    want = {"user": f"u{odd}", "password": odd, "host": "h", "port": "5", "dbname": "d", "options": f"-c a={odd}"}
    assert address.read(url.render_as_string(hide_password=False)) == want


@pytest.mark.parametrize(
    "url, told",
    [
        ("postgres://h/d?timout=3", "did you mean 'timeout'"),
        ("postgres://h/d?sslmod=require", "did you mean 'sslmode'"),
        ("postgres://h/d?max_conections=3", "did you mean 'max_connections'"),
        ("postgres://h/d?xyzzy=1", "there are .*application_name.*target_session_attrs"),
        ("postgres://h/d?timeout=soon", "timeout is 'soon'"),
        ("postgres://h/d?timeout=0", "greater than 0"),
        ("postgres://h/d?bound=perhaps", "true or false"),
        ("postgres://h:99999/d", "can't be read"),
        ("postgres://h/d?user=%00", "NUL"),
        ("postgres://h/d?listen=postgres%3A%2F%2Fh%2Fd%3Fsslmod%3D1", "listen.*sslmode"),
    ],
)
def test_a_wrong_option_is_told_the_right_one(url: str, told: str) -> None:
    """A misspelled or wrong option is an error that names the right one. Otherwise it would fail in production."""
    with pytest.raises(OptionError, match=told):
        check_url(url)


def test_a_wrong_option_beside_the_url_is_told_the_right_one() -> None:
    """Options that are given in code are checked in the same way as those of a URL."""
    with pytest.raises(OptionError, match="did you mean 'sslmode'"):
        open_engine("postgres://h/d", sslmod="require")
    with pytest.raises(OptionError, match="did you mean 'max_connections'"):
        open_engine("postgres://h/d", max_connection=3)


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u:hunter2%zz@h/d",
        "postgres://u:hun ter2@h:abc/d",
        "postgres://u:1@hunter2@h/d",
        "postgres://u:hunter2/1@h/d",
        "postgres://u:12/hunter2@h/d",
        "postgres://u:hunter2℀@h:x/d",
        "postgres://u:hunter2@[::1/d",
        "postgres://u:hunter2#@h/d?sslmod=1",
        "postgres://h/d?password=hunter2&timout=1",
        "postgres://h/d?password=1#hunter2&timout=1",
        "postgres://h/d?listen=postgres%3A%2F%2Fu%3Ahunter2%40h%3Ax",
        "postgres://h/d?listen=host%3Dh+password%3Dhunter2+oops",
        "postgres://h/d?listen=host%3Dh+password%3Dhunter2&timeout=x",
        "postgres://u:hunter2@127.0.0.1:1/d?connect_timeout=1",
        "postgres://u:hunter2@127.0.0.1:1,127.0.0.1:2/d",
        "postgres://u:hunter2@127.0.0.1:1/d?sslmode=hardly",
        "postgresql+psycopg://u:hunter2@127.0.0.1:1/d?sslpassword=hunter2",
    ],
)
def test_no_error_shows_a_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """No error and no log shows a password, although libpq and urllib quote what they can't read."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(StampedeError) as told, Cache(url, on_engine_error="raise") as cache:
        cache.get("key")
    said = "".join(traceback.format_exception(told.value)) + caplog.text
    assert "hunter2" not in said and "hun ter2" not in said


def test_an_engine_shows_no_password() -> None:
    """The engine's name and the command in its errors show no password: events, metrics and `check` contain them."""
    url = "postgres://u:hunter2@h/d?listen=postgres%3A%2F%2Fu%3Ahunter2%40direct%2Fd&sslpassword=hunter2"
    with closing(open_engine(url)) as engine:
        assert "hunter2" not in engine.url + engine.called + repr(engine)
    server = of_url(url, {"password": "hunter2"})
    assert "hunter2" not in server.name + server.init
    assert server.init == "`stampede postgres init postgres://u@direct/d`"


def test_what_is_shown_of_a_command_can_be_copied() -> None:
    """The command in an error can be copied into a shell: `&` and `$(...)` are quoted."""
    assert PostgresConnector("x", {"host": "a,b", "dbname": "$(oops)", "sslmode": "disable"}).init == (
        "`stampede postgres init 'postgres:///%24%28oops%29?host=a,b&sslmode=disable'`"
    )


def test_the_first_host_that_takes_writes_is_asked(server: PostgresServer) -> None:
    """If a URL has several hosts, the first one that accepts writes is used, even if others are down."""
    port, options = server.port, "target_session_attrs=read-write&sslmode=disable"
    with Cache(f"postgres://root@127.0.0.1:1,127.0.0.1:{port}/postgres?{options}", on_engine_error="raise") as cache:
        cache.set("key", 1)
        assert cache.get("key") == 1
        assert asyncio.run(_aget(cache)) == 1


async def _aget(cache: Cache) -> Any:
    return await cache.aget("key")


def test_a_socket_of_the_machine_is_asked() -> None:
    """A server can be reached through its Unix socket."""
    with closing(PostgresServer("unix_socket_directories=/tmp")) as server:
        server.prepare()
        with Cache(f"postgres://root@/postgres?host=/tmp&port={server.port}", on_engine_error="raise") as cache:
            cache.set("key", 1)
            assert cache.get("key") == 1


ODD = "p@s s/+%:?#&=ü'\"\\"


@pytest.fixture(scope="module")
def asking() -> Iterator[PostgresServer]:
    """A server that asks every role but `root` for a password."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as rules:
        rules.write("host all root 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
        rules.flush()
        os.chmod(rules.name, 0o644)
        with closing(PostgresServer(f"hba_file={rules.name}")) as server:
            server.prepare()
            with psycopg.connect(server.postgres_url, autocommit=True) as own:
                own.execute(sql.SQL("CREATE ROLE odd LOGIN SUPERUSER PASSWORD {}").format(ODD))
            yield server


@pytest.mark.postgres
def test_a_password_of_odd_characters_is_told_the_server(asking: PostgresServer) -> None:
    """A password of any characters reaches the server, from each kind of URL, and is not shown."""
    sa = pytest.importorskip("sqlalchemy")
    where = {"host": "127.0.0.1", "port": asking.port}
    django = {"NAME": "postgres", "USER": "odd", "PASSWORD": ODD, "HOST": "127.0.0.1", "PORT": asking.port}
    urls = [
        address.written({"user": "odd", "password": ODD, "dbname": "postgres", **where}),
        f"postgres://127.0.0.1:{asking.port}/postgres?user=odd&password={quote(ODD)}",
        sa.URL.create("postgresql+psycopg", "odd", ODD, database="postgres", **where).render_as_string(False),
        url_of({"ENGINE": "django.db.backends.postgresql", **django}),
    ]
    for url in urls:
        with Cache(url, on_engine_error="raise") as cache:
            cache.set("key", 1)
            assert cache.get("key") == 1
            assert ODD not in cache.engine.url and quote(ODD) not in cache.engine.url


@pytest.mark.postgres
def test_a_wrong_password_is_told_and_not_shown(asking: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong password is reported as such, and is not shown in errors or logs."""
    caplog.set_level(logging.DEBUG)
    with Cache(asking.url_of(user="odd:hunter2"), on_engine_error="raise") as cache:
        with pytest.raises(EngineError, match='password authentication failed for user "odd"') as error:
            cache.get("key")
        with pytest.raises(EngineError) as suspending:
            asyncio.run(_aget(cache))
    said = [*traceback.format_exception(error.value), *traceback.format_exception(suspending.value), caplog.text]
    assert "hunter2" not in "".join(said)


@pytest.mark.postgres
def test_init_asks_for_a_password_on_a_terminal(
    asking: PostgresServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command in an error, which has no password, asks for it on a terminal."""
    from stampede.__main__ import main

    monkeypatch.delenv("PGPASSWORD", raising=False)
    command = ["postgres", "init", asking.url_of(user="odd")]
    assert main(command) == 2
    assert "PGPASSWORD" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("stampede.cli.postgres.getpass", lambda prompt: ODD)
    assert main(command) == 0
    assert "already" in capsys.readouterr().out


# -- pools ----------------------------------------------------------------------------------------------------------


def test_a_cache_is_on_a_pool(server: PostgresServer) -> None:
    """A cache takes its address from a pool, but uses no connection of the pool."""
    pools = pytest.importorskip("psycopg_pool")
    for kind in (pools.ConnectionPool, pools.NullConnectionPool):
        pool = kind(server.postgres_url, min_size=0, max_size=1, open=True)
        with pool, Cache(pool) as cache, pool.connection(), cache.lock("job"):  # its only connection
            cache.set("key", 1)
            assert cache.get("key") == 1


def test_a_cache_is_on_a_pool_of_an_event_loop(server: PostgresServer) -> None:
    """A cache takes its address from an async pool, even if the pool is not open yet."""
    pools = pytest.importorskip("psycopg_pool")

    async def with_it() -> Any:
        pool = pools.AsyncConnectionPool(server.postgres_url, min_size=0, max_size=1, open=False)
        cache = Cache(pool)  # at the top of a module
        async with pool, pool.connection():
            await cache.aset("key", 2)
            found = await cache.aget("key")
        cache.close()
        return found

    assert asyncio.run(with_it()) == 2


def test_a_pool_is_a_recipe(server: PostgresServer) -> None:
    """A cache works whether its pool is open or closed: it uses only the pool's address and options."""
    pools = pytest.importorskip("psycopg_pool")
    pool = pools.ConnectionPool(server.postgres_url, min_size=0, max_size=1, open=False)
    with Cache(pool, on_engine_error="raise") as cache:
        cache.set("key", 1)
        pool.open()
        pool.close()
        assert cache.get("key") == 1


def test_a_pools_own_options_are_those_of_the_connections(server: PostgresServer) -> None:
    """The options of a pool also apply to the cache's connections: database, role and the others."""
    pools = pytest.importorskip("psycopg_pool")
    kwargs = {
        "dbname": "postgres", "user": "root", "application_name": "of-a-pool", "sslmode": "disable",
        "autocommit": False, "row_factory": psycopg.rows.dict_row, "prepare_threshold": None,
        "cursor_factory": psycopg.ClientCursor,
    }  # fmt: skip
    pool = pools.ConnectionPool(f"host=127.0.0.1 port={server.port}", kwargs=kwargs, open=False)
    with Cache(pool, on_engine_error="raise") as cache:
        cache.set("key", 1)
        assert server.backends("of-a-pool")
        assert cache.engine.url == f"postgres://root@127.0.0.1:{server.port}/postgres"


@pytest.mark.parametrize(
    "options, told",
    [
        ({"conninfo": lambda: "host=h"}, "calls a function to learn its address.*or a URL"),
        ({"kwargs": lambda: {"host": "h"}}, "calls a function to learn its address.*or a URL"),
        ({"conninfo": "host=h passwor=hunter2"}, "can't be read"),
        ({"conninfo": "postgres://u:hunter2%zz@h"}, "can't be read"),
        ({"kwargs": {"sslmod": "require", "password": "hunter2"}}, "did you mean 'sslmode'"),
    ],
)
def test_a_pool_that_tells_no_address_is_refused(options: dict[str, Any], told: str) -> None:
    """A pool that does not tell its address is refused. Otherwise the cache would use the machine's default server."""
    pools = pytest.importorskip("psycopg_pool")
    for kind in (pools.ConnectionPool, pools.AsyncConnectionPool):
        with pytest.raises(OptionError, match=told) as error:
            of_pool(kind(**options, open=False), {})
        assert "hunter2" not in "".join(traceback.format_exception(error.value))


def test_a_pool_that_connects_in_its_own_way_is_refused() -> None:
    """A pool whose class connects in its own way is refused: the engine could not connect in that way."""
    pools = pytest.importorskip("psycopg_pool")

    class Connects(psycopg.Connection[Any]):
        @classmethod
        def connect(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    class Plain(psycopg.Connection[Any]):
        pass

    with pytest.raises(OptionError, match="connection_class connects in its own way"):
        of_pool(pools.ConnectionPool("host=h", connection_class=Connects, open=False), {})
    of_pool(pools.ConnectionPool("host=h", connection_class=Plain, open=False), {}).close()


# -- Django's settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "database, options",
    [
        ({"NAME": "shop"}, {"dbname": "shop"}),
        ({"NAME": "shop", "USER": "u", "PASSWORD": "p@s s/+%:?#&=ü", "HOST": "db", "PORT": 5433},
         {"dbname": "shop", "user": "u", "password": "p@s s/+%:?#&=ü", "host": "db", "port": "5433"}),
        ({"NAME": "shop", "USER": "", "PASSWORD": "", "HOST": "/run/pg", "PORT": ""},
         {"dbname": "shop", "host": "/run/pg"}),
        ({"NAME": "shop", "HOST": "a,b", "PORT": "1,2", "OPTIONS": {"target_session_attrs": "read-write"}},
         {"dbname": "shop", "host": "a,b", "port": "1,2", "target_session_attrs": "read-write"}),
        ({"NAME": "shop", "HOST": "::1"}, {"dbname": "shop", "host": "::1"}),
        ({"OPTIONS": {"service": "shop", "pool": True, "server_side_binding": True, "isolation_level": 2}},
         {"service": "shop"}),
        ({"NAME": "shop", "OPTIONS": {"options": "-c a=b", "assume_role": "the app", "sslmode": "require"}},
         {"dbname": "shop", "options": r"-c a=b -c role=the\ app", "sslmode": "require"}),
    ],
)  # fmt: skip
def test_djangos_settings_lead_to_its_database(database: dict[str, Any], options: dict[str, str]) -> None:
    """Django's settings lead to the same database, so that its address and password are not written twice."""
    for engine in ("django.db.backends.postgresql", "django.contrib.gis.db.backends.postgis"):
        assert address.read(url_of({"ENGINE": engine, **database})) == options


def test_another_database_of_djangos_is_told() -> None:
    """Django's settings for another kind of database are refused. They must not lead to a default server."""
    with pytest.raises(OptionError, match=r"sqlite3.*not Postgres.*disk://"):
        url_of({"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"})


def test_a_cache_is_on_djangos_database(server: PostgresServer) -> None:
    """A cache works with the settings that Django itself completes."""
    pytest.importorskip("django")
    from django.db.utils import ConnectionHandler

    own = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "root", "HOST": "127.0.0.1"}
    databases = {"default": own | {"PORT": server.port, "OPTIONS": {"sslmode": "disable"}}}
    whole = ConnectionHandler(databases)["default"].settings_dict
    with Cache(url_of(whole), on_engine_error="raise") as cache:
        cache.set("key", 1)
        assert cache.get("key") == 1
