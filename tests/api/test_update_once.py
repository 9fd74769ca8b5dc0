"""A compare-and-set whose reply was lost is not repeated, because another client may have changed the value since."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("psycopg")

from herd import until
from postgres_server import PostgresServer, prepared_postgres
from proxy import Proxy
from servers import RedisServer, shared_cluster, shared_redis

from stampede import Cache, EngineError
from stampede.engines.redis.routed import slot_of


def of_redis(server: RedisServer, port: int) -> str:
    return f"redis://127.0.0.1:{port}"


def of_postgres(server: PostgresServer, port: int) -> str:
    return server.postgres_url.replace(f":{server.port}/", f":{port}/")


engines = pytest.mark.parametrize(
    "server, url, needle",
    [
        pytest.param(shared_redis, of_redis, b"}l\r\n", id="redis", marks=pytest.mark.redis),
        pytest.param(prepared_postgres, of_postgres, b"visits", id="postgres", marks=pytest.mark.postgres),
    ],
)
both = pytest.mark.parametrize("prefix", ["", "a"], ids=["sync", "async"])


def more(number: int) -> int:
    return number + 1


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@engines
@both
def test_update_is_not_applied_twice(
    server: Callable[[], Any], url: Callable[[Any, int], str], needle: bytes, prefix: str, runner: asyncio.Runner
) -> None:
    """An update whose reply is lost raises and is not sent again. Otherwise it would apply the function twice."""
    with (
        closing(Proxy(server().port)) as proxy,
        closing(Cache(url(server(), proxy.port), ttl=600)) as cache,
        closing(Cache(url(server(), server().port), ttl=600)) as other,
    ):

        def update() -> Any:
            answer = getattr(cache, f"{prefix}update")("visits", more, 0)
            return runner.run(answer) if inspect.isawaitable(answer) else answer

        other.set("visits", 0)
        assert (update(), update()) == (1, 2)
        proxy.at(needle, answered=0, after=lambda: other.update("visits", more, 0))
        with pytest.raises(EngineError):
            update()
        assert proxy.met == 1
        until(lambda: other.get("visits") == 4)
        assert update() == 5


@engines
def test_a_connection_that_broke_while_idle_is_no_error(
    server: Callable[[], Any], url: Callable[[Any, int], str], needle: bytes
) -> None:
    """If an idle connection broke, update() connects again. This is safe, because nothing was sent."""
    with (
        closing(Proxy(server().port)) as proxy,
        closing(Cache(url(server(), proxy.port), ttl=600, namespace="idle")) as cache,
    ):
        cache.set("visits", 0)
        assert cache.update("visits", lambda number: cut(proxy, number), 0) == 1


def cut(proxy: Proxy, number: int) -> int:
    proxy.cut()
    return number + 1


@pytest.mark.redis
def test_update_is_not_applied_twice_in_a_cluster() -> None:
    """After a failover, an update whose reply was lost is not sent again to the new master."""
    cluster = shared_cluster()
    cluster.flush()
    with closing(Cache(cluster.url, ttl=600)) as cache, closing(Cache(cluster.url, ttl=600)) as other:
        ways: Any = cache.engine._servers  # type: ignore[attr-defined]
        cache.update("visits", more, 0)
        slot = slot_of(cache._root.prefix + "visits")
        owner = ways._owners[slot]

        async def fail_over(*_: object, **__: object) -> None:
            del ways._refresh
            ways._shards[owner].breaker.succeeded(time.monotonic())
            ways._owners[slot] = next(address for address in ways._shards if address != owner)

        def meanwhile() -> None:
            other.update("visits", more, 0)
            ways._refresh = fail_over

        lose_the_next_reply(ways._shards[owner].line, meanwhile)
        with pytest.raises(EngineError):
            cache.update("visits", more, 0)
        assert other.get("visits") == 3


def lose_the_next_reply(line: Any, then: Callable[[], object]) -> None:
    ask = line._wires.ask

    def lost(commands: Any, *, once: bool) -> Any:
        replies = ask(commands, once=once)
        if once:
            line._wires.ask = ask
            then()
            raise ConnectionError("the connection broke")
        return replies

    line._wires.ask = lost
