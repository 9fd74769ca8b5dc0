"""What the chapters on Redis, memcached and Postgres say about the servers is tested on real servers."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import pytest
from herd import until
from known_generation import generation_of
from memcached_server import MemcachedServer
from pages import PAGES, named
from servers import PATIENCE, RedisCluster, RedisServer, Sentinels, wait_until

from stampede import Cache

REDIS = PAGES["engines/redis.md"]
MEMCACHED = PAGES["engines/memcached.md"]
POSTGRES = PAGES["engines/postgres.md"]


def rights() -> list[str]:
    """Return the arguments of the page's redis-cli line, which makes a user."""
    (block,) = REDIS.blocks("sh")
    program, *command = shlex.split(block.text.replace("\\\n", ""))
    assert program == "redis-cli"
    return command


def all_verbs(url: str) -> None:
    """Use all verbs of an application, on two caches. A missing right raises an error."""
    options: dict[str, Any] = {"local": True, "early": 0, "on_engine_error": "raise"}
    with Cache(url, **options) as near, Cache(url, **options) as far:
        keys = [f"k{number}" for number in range(9)]  # some on each shard
        assert near.get_or_compute_many(keys, lambda missing: dict.fromkeys(missing, 1)) == dict.fromkeys(keys, 1)
        for key in keys:

            def from_memory(key: str = key) -> bool:
                before = far.stats().hits
                assert asyncio.run(far.aget_or_compute(key, never)) == 1
                return far.get_or_compute(key, never) == 1 and far.stats().hits > before

            wait_until(from_memory)
            near.set(key, 2)
            wait_until(lambda key=key: far.get_or_compute(key, never) == 2)
        assert near.expire("k0") and near.invalidate("k1")
        assert near.get("k2") == near.peek("k3").value == 2  # type: ignore[union-attr]
        with pytest.raises(ZeroDivisionError):
            near.get_or_compute("failing", lambda: 1 // 0, retry_after=1)
        near.clear()
        assert near.get_or_compute("k0", lambda: 3) == 3
        with near.lock("l") as lock:
            assert not far.lock("l").acquire(0.5)
            lock.extend(60)  # as a renewal does


def never() -> Any:
    raise AssertionError("it is there")


@pytest.mark.parametrize("kind", ["one server", "cluster", "sentinels"])
def test_the_rights_are_enough(kind: str) -> None:
    """The rights on the page are enough. Otherwise a user would find out in production that one is missing."""
    pytest.importorskip("redis")
    made: Any = {"one server": RedisServer, "cluster": RedisCluster, "sentinels": lambda: Sentinels(1, 1)}[kind]()
    servers = {"cluster": "nodes", "sentinels": "replicas"}
    masters = [made.master] if kind == "sentinels" else getattr(made, servers.get(kind, ""), [made])
    try:
        for server in masters:
            assert server.cli(*rights()) == "OK"
        all_verbs(made.url.replace("://", "://shop:secret@"))
        for server in masters:
            assert server.cli("ACL", "LOG") == ""
    finally:
        made.close()


def test_keys_are_called_so() -> None:
    """The keys in Redis have the names that the page shows."""
    pytest.importorskip("redis")
    from stampede.engines.redis.locks import _names as lock_names
    from stampede.engines.redis.news import ALL, key_of_scope
    from stampede.engines.redis.verbs import _RUN, _note
    from stampede.engines.redis.wire import names
    from stampede.model.tags import key_of_tag, name_of_tag

    table = next(rows for rows in map(REDIS.rows, count()) if rows[0][0].startswith("`{"))
    entry, _, generations, tag, run, ended, lock = (named(cells[0]) for cells in table)
    (entry_key,) = (key.replace("\\|", "|") for key in entry)
    _, _, key = entry_key.partition(":")
    assert names(key).entry.decode() == entry_key
    assert table[1][0].startswith(f"`{names(key).lease.decode()}`")
    assert tag == [names(key_of_tag(name_of_tag("", "prices"))).entry.decode()]
    assert lock == [lock_names("nightly-report").lock.decode()]
    assert generations == [ALL.decode(), key_of_scope("shop:price").decode()]
    assert (run, ended) == ([_RUN.decode()], [_note(key.encode()).decode() for key in generations])


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-ttl"])
def test_what_is_evicted_first(policy: str) -> None:
    """`volatile-lru` keeps the lease of a computation under way, and `volatile-ttl` evicts it first."""
    pytest.importorskip("redis")
    server = RedisServer("--maxmemory-policy", policy, "--maxmemory-samples", "64")

    def keys(pattern: str) -> list[str]:
        return server.redis_cli("--scan", "--pattern", pattern).splitlines()

    def idle(key: str) -> int:
        return int(server.cli("OBJECT", "IDLETIME", key))

    with Cache(server.url) as cache:
        for number in range(20):
            cache.set(f"old {number}", b"x" * 10_000, ttl=600)
        begun, go_on = threading.Event(), threading.Event()

        def compute() -> str:
            begun.set()
            assert go_on.wait(PATIENCE)
            return "new"

        caller = threading.Thread(target=lambda: cache.get_or_compute("new", compute, lease=3))
        caller.start()
        assert begun.wait(PATIENCE)
        (lease,) = keys("{*}l")
        wait_until(lambda: min(map(idle, keys("{*}:*|old *"))) > idle(lease))  # the lease has been renewed
        used = int(server.cli("INFO", "memory").split("used_memory:")[1].split()[0])
        server.cli("CONFIG", "SET", "maxmemory", str(used - 50_000))
        wait_until(lambda: len(keys("{*}:*|old *")) < 20)
        server.cli("CONFIG", "SET", "maxmemory", "0")
        assert set(keys("{stampede}*")) == {"{stampede}g", "{stampede}g:", "{stampede}r"}
        go_on.set()
        caller.join(PATIENCE)
        assert (cache.get("new") == "new") == (policy == "volatile-lru")
    server.close()


def test_what_a_foreign_reader_gets() -> None:
    """Another client of memcached gets the flags of the page, for a lease and for a value."""
    pytest.importorskip("pymemcache")
    server = MemcachedServer()
    with Cache(server.url) as cache:
        lease, value = (each.encode() for each in re.findall(r"flags\s(\d{5,})", MEMCACHED.text))

        name = f"s:{generation_of(cache.engine, '')}|k"  # type: ignore[union-attr]

        def seen() -> list[bytes]:
            """Return the item's flags and size."""
            return server.say(f"get {name}\r\n".encode(), b"END\r\n").split(b"\r\n")[0].split()[2:]

        def compute() -> int:
            assert seen()[0] == lease
            return 1

        cache.get_or_compute("k", compute)
        assert seen()[0] == value
    server.close()


def test_a_tier_before_memcached_follows_within_a_second() -> None:
    """A local tier in front of memcached gets no news of changes, but follows them within about a second."""
    pytest.importorskip("pymemcache")
    server = MemcachedServer()
    with Cache(server.url) as far, Cache(server.url, local=True) as near:

        def lag(new: int) -> float:
            """Return how long after now the last call began that did not get the new value."""
            start = last = time.monotonic()

            def is_new() -> bool:
                nonlocal last
                began = time.monotonic()
                if near.get_or_compute("k", lambda: 3) == new:
                    return True
                last = began
                return False

            wait_until(is_new)
            return last - start

        far.set("k", 1)
        until(lambda: near.get_or_compute("k", never) == 1 and near.stats().hits)
        far.set("k", 2)
        assert lag(2) < 1.1
        far.clear()
        assert lag(3) < 2.1
    server.close()


_CLOCKS = """
import sys, time
off = float(sys.argv[2])
real, monotonic = time.time, time.monotonic
time.time, time.monotonic = lambda: real() + off, lambda: monotonic() + abs(off)
from stampede import Cache
with Cache(sys.argv[1], early=0) as cache:
    if off > 0:
        cache.set("k", 1, ttl=30)
    assert cache.get_or_compute("k", lambda: 0) == 1
    assert 20 < cache.peek("k").fresh <= 30
"""


def test_memcached_counts_the_time_left(tmp_path: Path) -> None:
    """Promise 14: values expire correctly even if a machine's clock is years off."""
    pytest.importorskip("pymemcache")
    server = MemcachedServer()
    for off in ("1e8", "-1e8"):
        subprocess.run([sys.executable, "-c", _CLOCKS, server.url, off], cwd=tmp_path, check=True, timeout=60)
    server.close()


def test_the_bytes_of_an_entry() -> None:
    """The pages say how many bytes are added to each value. Users plan a server's memory by this."""
    assert all("118 bytes of ours, or 154 with a" in page.flat() for page in (REDIS, MEMCACHED))
    value = "x" * 100
    redis, memcached = RedisServer(), MemcachedServer()
    try:
        for signing_key, ours in ((None, 118), ("k" * 32, 154)):
            size = ours + len(json.dumps(value))
            with Cache(redis.url, codec="json", signing_key=signing_key) as cache:
                cache.set("k", value)
            assert max(int(redis.cli("STRLEN", key)) for key in redis.cli("KEYS", "*").split()) == size
            with Cache(memcached.url, codec="json", signing_key=signing_key) as cache:
                cache.set("k", value)
                item = f"s:{generation_of(cache.engine, '')}|k"  # type: ignore[union-attr]
            assert memcached.say(f"mg {item} s\r\n".encode()).split()[1] == b"s%d" % size
    finally:
        redis.close()
        memcached.close()


# -- Postgres ---------------------------------------------------------------------------------------------------------


def test_options_of_postgres() -> None:
    """The page has every option of a Postgres URL and no other, with the defaults of the code."""
    pytest.importorskip("psycopg")
    from stampede.engines.postgres.address import OURS
    from stampede.engines.postgres.connect import PostgresConnector
    from stampede.settings.options import seconds

    said = {
        name: default.strip() or None
        for names, defaults, _ in POSTGRES.rows()
        for name, default in zip_longest(named(names), defaults.split(","), fillvalue="")
    }
    assert said.keys() == OURS.keys()
    for name, each in inspect.signature(PostgresConnector).parameters.items():
        if name not in OURS:
            continue
        if each.default in (None, float("inf")):
            assert said[name] is None
        elif isinstance(each.default, bool):
            assert said[name] == str(each.default).lower()
        else:
            assert seconds(name, said[name]) == each.default


@pytest.mark.postgres
def test_what_is_asked_by_sql() -> None:
    """The page's SQL queries run, and show what the page says."""
    pytest.importorskip("psycopg")
    from postgres_server import prepared_postgres

    server = prepared_postgres()
    assert all(page is POSTGRES for page in PAGES.values() if page.blocks("sql"))
    (block,) = POSTGRES.blocks("sql")
    held, failed, computing, largest, tables = block.text.replace("%", "%%").split(";\n")[:-1]

    def compute() -> int:
        ((key, holder, _, waiting),) = server.ask(computing)
        assert "report" in key and holder and waiting == 0
        return 1

    with Cache(server.postgres_url) as cache, cache.lock("job"):
        with pytest.raises(ZeroDivisionError), cache.lock("nightly"):
            1 // 0  # noqa: B018
        cache.get_or_compute("report", compute)
        cache.set("large", b"x" * 10_000)
        assert [row[0] for row in server.ask(held)] == ["job"]
        assert [row[:2] for row in server.ask(failed)] == [("nightly", "failed")]
        assert [key[-6:] for key, *_ in server.ask(largest)] == ["|large", "report"]
        assert {"entries", "leases", "locks", "released"} <= {name for name, *_ in server.ask(tables)}
