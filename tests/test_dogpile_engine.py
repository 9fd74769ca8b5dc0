"""dogpile's backends as our store: what every store has to do, and pairs of them with our locks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dogpile.cache")
pytest.importorskip("redis")

from dogpile.cache import make_region
from dogpile.cache.api import NO_VALUE
from dogpile.cache.proxy import ProxyBackend
from herd import Herd, Origin
from servers import RedisServer, shared_redis

from stampede import Cache, ComputationFailed, EngineError, OptionError
from stampede.contrib.dogpile import DogpileEngine
from stampede.ports import Engine
from stampede.testing.conformance import StoreSuite


class TestStore(StoreSuite):
    """The store alone, over dogpile's simplest backend; its peer has another one on the same dict."""

    backing: dict[str, Any]

    def make_engine(self) -> Engine:
        self.backing = {}
        return self.make_peer(None)

    def make_peer(self, engine: Engine | None) -> Engine:
        return DogpileEngine("dogpile.cache.memory", {"cache_dict": self.backing})


class TestRedis(StoreSuite):
    """The same bytes through dogpile's Redis backend."""

    def make_engine(self) -> Engine:
        shared_redis().cli("FLUSHALL")
        return self.make_peer(None)

    def make_peer(self, engine: Engine | None) -> Engine:
        return DogpileEngine("dogpile.cache.redis", {"url": shared_redis().url})


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    """A store that we have no engine for: a dbm file, under locks of this machine's files."""
    engine = DogpileEngine("dogpile.cache.dbm", {"filename": str(tmp_path / "values.dbm")})
    with Cache(engine=engine, locks=f"file://{tmp_path}/locks") as cache:
        yield cache


def test_values(cache: Cache) -> None:
    """Nothing would come back, or not as it was; or an invalidation would leave something."""

    @cache.cached(ttl=60)
    def price(item: int) -> dict[str, int]:
        calls.append(item)
        return {"item": item}

    calls: list[int] = []
    assert [price(1) for _ in range(3)] == [{"item": 1}] * 3
    assert price.many([(1,), (2,)]) == [{"item": 1}, {"item": 2}]
    assert price.invalidate(1) is True
    price(1)
    price.invalidate_all()
    price(1)
    assert calls == [1, 2, 1, 1]
    cache.set_many({"a": 1, "b": None})
    assert cache.get_many(["a", "b", "c"]) == {"a": 1, "b": None}
    assert cache.invalidate_many(["a", "c"]) == 1


def test_one_computation(cache: Cache) -> None:
    """The herd would compute it many times; async callers would not share it."""
    origin = Origin()
    herd = Herd(
        *[lambda: cache.get_or_compute("k", origin)] * 4, lambda: asyncio.run(cache.aget_or_compute("k", origin))
    )
    origin.has_begun()
    origin.let_on()
    assert herd.join() == [1] * 5
    assert origin.calls == 1


def test_stale_while_it_fails(cache: Cache) -> None:
    """What is kept beyond its end would not be served."""
    cache.set("k", "old", ttl=60, stale=60)
    cache.expire("k")

    def fails() -> str:
        raise LookupError

    assert cache.get_or_compute("k", fails, stale=60) == "old"
    with pytest.raises((LookupError, ComputationFailed)):
        cache.get_or_compute("other", fails)


class Doubting(ProxyBackend):
    """A backend behind a proxy, as a region has it."""

    def get_serialized_multi(self, keys: Any) -> Any:
        return [NO_VALUE if value is None else value for value in self.proxied.get_serialized_multi(keys)]


def test_the_backend_of_a_region() -> None:
    """An application's own, with the proxies around it, would have to be made anew."""
    region = make_region().configure("dogpile.cache.memory_pickle", wrap=[Doubting])
    with Cache(engine=DogpileEngine(region.backend), locks="memory://") as cache:
        assert cache.get_or_compute("k", lambda: [1]) == [1]
        assert cache.get("k") == [1]


def test_foreign_bytes_are_a_miss() -> None:
    """Another's bytes under our names would be taken for an entry, or fail the call."""
    kept: dict[str, Any] = {}
    with Cache(engine=DogpileEngine("dogpile.cache.memory", {"cache_dict": kept}), locks="memory://") as cache:
        for foreign in (b"", b"SD", b"x" * 200, "text", 5):
            cache.set("k", 1)
            for name in kept:
                kept[name] = foreign
            assert cache.get_or_compute("k", lambda: 2) == 2


def test_trouble_is_ours(own: RedisServer) -> None:
    """A client's own errors would reach callers, whom an engine that is down is to cost nothing."""
    engine = DogpileEngine("dogpile.cache.redis", {"url": own.url})
    with Cache(engine=engine, locks="memory://") as cache:
        assert cache.get_or_compute("k", lambda: 1) == 1
        own.stop()
        assert cache.get_or_compute("k", lambda: 2) == 2
        with pytest.raises(EngineError, match="dogpile"):
            cache.invalidate("k")
    with pytest.raises(EngineError, match="closed"):
        engine.ping()


def test_what_can_be_no_store() -> None:
    """A typo would be an error deep in dogpile, or a cache without locks would be told that it has no values."""
    for wrong in ("dogpile.cache.rediss", 5):
        with pytest.raises(OptionError):
            DogpileEngine(wrong)  # type: ignore[arg-type]
    backend = make_region().configure("dogpile.cache.memory").backend
    with pytest.raises(OptionError, match="arguments"):
        DogpileEngine(backend, {})
    with pytest.raises(OptionError, match="locks="):
        Cache(engine=DogpileEngine(backend))
