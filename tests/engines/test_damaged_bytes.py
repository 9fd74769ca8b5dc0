"""Damaged bytes are a miss and cause one event, wherever in them the damage is."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote_to_bytes

import pytest

from stampede import Cache, events

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda _: b"garbage" * 30,
    "one byte": lambda _: b"x",
    "empty": lambda _: b"",
    "cut to 50": lambda good: good[:50],
    "first byte": lambda good: bytes([good[0] ^ 1]) + good[1:],
    "last byte": lambda good: good[:-1] + bytes([good[-1] ^ 1]),
    "zeroed": lambda good: bytes(len(good)),
}
damages = pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
locals_ = pytest.mark.parametrize("local", [False, True])


def is_told_once(url: str, local: bool, spoil: Callable[[], object]) -> None:
    told: list[events.Event] = []
    cache = Cache(url, ttl=60, local=local, observers=[told.append])
    for key, ask, expected in (
        ("g", lambda: cache.get("g"), None),
        ("c", lambda: cache.get_or_compute("c", lambda: 2), 2),
        ("u", lambda: cache.update("u", lambda n: n + 1, default=4), 5),
    ):
        with Cache(url, ttl=60) as writer:
            writer.set(key, 1)
        spoil()
        told.clear()
        assert ask() == expected
        assert [event.key for event in told if isinstance(event, events.BadBytes)] == [key]
        cache.invalidate(key)
    cache.close()


@damages
@locals_
def test_on_redis(local: bool, damage: Callable[[bytes], bytes]) -> None:
    """Damage in any bytes of a value is a miss and causes one event. Damage in the first bytes once caused no event."""
    redis = pytest.importorskip("redis")
    from servers import shared_redis

    server = shared_redis()
    server.cli("FLUSHALL")
    client = redis.Redis.from_url(server.url)

    def spoil() -> None:
        (key,) = (name for name in client.keys("*") if b"{stampede}" not in name and client.type(name) == b"string")
        client.set(key, damage(client.get(key)), keepttl=True)

    is_told_once(server.url, local, spoil)


@damages
def test_on_memcached(damage: Callable[[bytes], bytes]) -> None:
    pytest.importorskip("stampede.engines.memcached")
    from memcached_server import shared_memcached

    server = shared_memcached()
    server.say(b"flush_all\r\n")

    def spoil() -> None:
        spoiled = 0
        while not spoiled:  # what was just stored may not be listed yet
            lines = server.say(b"lru_crawler metadump all\r\n", b"END\r\n").split(b"\r\n")
            for name in [unquote_to_bytes(line.split()[0][4:]) for line in lines if line.startswith(b"key=")]:
                head, _, rest = server.say(b"get " + name + b"\r\n", b"END\r\n").partition(b"\r\n")
                flags = head.split()[2:3]
                if flags == [b"1470758913"]:
                    spoiled += 1
                    data = damage(rest[:-7])
                    server.say(b"set %s %s 60 %d\r\n%s\r\n" % (name, flags[0], len(data), data))

    is_told_once(server.url, False, spoil)


@damages
@pytest.mark.parametrize("kind", ["disk", "sql"])
def test_in_a_table(tmp_path: Path, kind: str, damage: Callable[[bytes], bytes]) -> None:
    if kind == "sql":
        pytest.importorskip("sqlalchemy")
    url = f"disk://{tmp_path}" if kind == "disk" else f"sql+sqlite:///{tmp_path}/values.sqlite"
    table, column = ("entries", "value") if kind == "disk" else ("stampede", "data")

    def spoil() -> None:
        (file,) = tmp_path.glob("*.sqlite")
        database = sqlite3.connect(file, isolation_level=None)
        for row, good in database.execute(f"SELECT rowid, {column} FROM {table} WHERE length({column}) > 60"):
            database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (damage(good), row))
        database.close()

    is_told_once(url, False, spoil)


@damages
def test_on_postgres(damage: Callable[[bytes], bytes]) -> None:
    psycopg = pytest.importorskip("psycopg")
    from postgres_server import prepared_postgres

    server = prepared_postgres()

    def spoil() -> None:
        with psycopg.connect(server.postgres_url, autocommit=True) as line:
            found = line.execute("SELECT id, value FROM stampede.entries").fetchall()
            for id, good in found:
                line.execute("UPDATE stampede.entries SET value = %s WHERE id = %s", (damage(good), id))

    is_told_once(server.postgres_url, False, spoil)
