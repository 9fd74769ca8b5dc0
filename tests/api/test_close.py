"""A closed cache stays closed, and no caller waits for it: on each engine, for sync and async calls."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from both_colours import Face
from herd import PATIENCE, Herd, until
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from proxy import Proxy
from servers import RedisServer, shared_redis

from stampede import Cache, EngineError, Lock, LockLost, cached, configure, events
from stampede.errors import EngineClosed
from stampede.metrics import Stats
from stampede.model.entry import new_id
from stampede.testing import isolated

KINDS = ["memory", "sealed", "disk", "redis", "local", "memcached", "postgres", "paired"]


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    made: dict[str, Callable[[], Cache]] = {
        "memory": lambda: Cache("memory://"),
        "sealed": lambda: Cache("memory://?codec=sealed"),
        "disk": lambda: Cache(f"disk://{tmp_path}/d"),
        "redis": lambda: Cache(shared_redis().url),
        "local": lambda: Cache(shared_redis().url, local=True),
        "memcached": lambda: Cache(shared_memcached().url),
        "postgres": lambda: Cache(prepared_postgres().postgres_url),
        "paired": lambda: Cache(f"disk://{tmp_path}/d", locks=f"file://{tmp_path}/f"),
    }
    cache = made[request.param]()
    cache.clear()
    yield cache
    cache.close()


def test_every_verb_of_a_closed_cache_says_so(cache: Cache) -> None:
    """Each verb of a closed cache raises an error. It serves no old value and opens no new connection."""
    f = cache.cached(lambda n=1: n)
    assert (f(), cache.get_or_compute("k", lambda: 1), cache.get("k")) == (1, 1, 1)
    lock = cache.lock("l")
    cache.close()
    cache.close()
    gc.collect()
    verbs: list[Callable[[], Any]] = [
        f, f.refresh, f.peek, f.invalidate, f.invalidate_all, lambda: f.many([(1,), (2,)]), lambda: f.set(1),
        lambda: cache.get_or_compute("k", lambda: 2), lambda: cache.get_or_compute("other", lambda: 2),
        lambda: cache.get_or_compute_many(["k", "l"], lambda keys: dict.fromkeys(keys, 2)),
        lambda: cache.get("k"), lambda: cache.get_many(["k"]), lambda: cache.set("k", 2), lambda: cache.expire("k"),
        lambda: cache.invalidate("k"), cache.clear, lambda: lock.acquire(0), lambda: lock.acquire(5),
    ]  # fmt: skip
    for number, verb in enumerate(verbs):
        with pytest.raises(EngineError, match="closed"):
            pytest.fail(f"verb {number} answered {verb()!r}")
    assert isinstance(cache.stats(), Stats)


def test_who_waits_is_told_at_once(cache: Cache, colour: str) -> None:
    """Waiters for a lease or a lock get an error as soon as the cache is closed."""
    begun, done = threading.Event(), threading.Event()
    name = new_id().hex()  # a new name, because it stays locked
    held, waits = cache.lock(name, lease=60), []
    assert held.acquire()

    def compute() -> int:
        begun.set()
        done.wait(PATIENCE)
        return 1

    async def suspending(work: Callable[[], Any]) -> Any:
        return await work()

    def waiting(verb: Callable[[], Any], averb: Callable[[], Any]) -> Callable[[], Any]:
        def wait() -> Any:
            waits.append(1)
            return verb() if colour == "sync" else asyncio.run(suspending(averb))

        return wait

    # As in other processes: one waits for the other's lease, and not for its flight.
    holder, other = Cache(engine=cache.engine), Cache(engine=cache.engine)
    leader = Herd(lambda: holder.get_or_compute("k", compute, lease=60))
    assert begun.wait(PATIENCE)
    acquire = Lock(name, on=cache, wait=60)
    waiters = Herd(
        waiting(acquire.acquire, acquire.aacquire),
        waiting(
            lambda: other.get_or_compute("k", lambda: 2), lambda: other.aget_or_compute("k", lambda: 2)
        ),
    )  # fmt: skip
    until(lambda: len(waits) == 2)
    threading.Event().wait(0.1)  # by then, they most likely sleep; if not, they must get the error, too
    cache.close()
    for error in waiters.join():
        assert isinstance(error, EngineError)
        assert "closed" in str(error)
    done.set()
    assert leader.join() == [1]
    with pytest.raises((EngineError, LockLost)):
        held.release()


SHARED = pytest.mark.parametrize("kind", ["disk", "redis", "memcached", "postgres", "paired"])


@pytest.fixture
def process(kind: str, tmp_path: Path) -> Iterator[Callable[..., Cache]]:
    """Return caches on one engine, as in several processes."""
    urls: dict[str, Callable[[], str]] = {
        "redis": lambda: shared_redis().url,
        "memcached": lambda: shared_memcached().url,
        "postgres": lambda: prepared_postgres().postgres_url,
    }
    locks = f"file://{tmp_path}/f" if kind == "paired" else None
    url = urls.get(kind, lambda: f"disk://{tmp_path}/d")()
    caches: list[Cache] = []

    def cache(**options: Any) -> Cache:
        caches.append(Cache(url, locks=locks, **options))
        return caches[-1]

    yield cache
    for each in caches:
        each.close()


@SHARED
@pytest.mark.parametrize("verb", ["close", "aclose"])
@pytest.mark.parametrize("way", ["call", "batch"])
def test_what_is_computed_while_it_is_closed_holds_nobody_up(
    kind: str, process: Callable[..., Cache], way: str, verb: str
) -> None:
    """If a cache is closed during a computation, it gives back the lease, so that no other process waits for it."""
    begun, done = threading.Event(), threading.Event()
    heard: list[events.Event] = []
    cache, other = process(observers=[heard.append]), process()

    def compute(_: object = None) -> dict[str, int]:
        begun.set()
        done.wait(PATIENCE)
        return {"k": 1}

    if way == "call":
        leader = Herd(lambda: {"k": cache.get_or_compute("k", lambda: compute()["k"], lease=60)})
    else:
        leader = Herd(lambda: cache.get_or_compute_many(["k"], compute, lease=60))
    assert begun.wait(PATIENCE)
    cache.close() if verb == "close" else asyncio.run(cache.aclose())
    assert other.get_or_compute("k", lambda: 2, wait=PATIENCE) == 2
    done.set()
    assert leader.join() == [{"k": 1}]
    assert other.get("k") == 2
    assert not [each for each in heard if isinstance(each, events.LeaseLost)]


@pytest.mark.parametrize("kind", ["disk"])
@pytest.mark.parametrize("way", ["configure", "isolated"])
def test_nor_does_what_is_replaced(kind: str, process: Callable[..., Cache], way: str) -> None:
    """A cache that is replaced by `configure` or at the end of `isolated` gives back its leases."""
    begun, done, other = threading.Event(), threading.Event(), process()

    @cached(key="k", lease=60)
    def compute() -> int:
        begun.set()
        done.wait(PATIENCE)
        return 1

    with isolated():
        with isolated(url=other.engine.url):
            leader = Herd(compute)
            assert begun.wait(PATIENCE)
            if way == "configure":
                configure(url="memory://")
                assert other.get_or_compute("k", lambda: 2, wait=PATIENCE) == 2
        assert other.get_or_compute("k", lambda: 2, wait=PATIENCE) == 2
        done.set()
        assert leader.join() == [1]


def test_a_server_that_hangs_holds_up_nobody_who_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` does not wait for a server that hangs."""
    monkeypatch.setattr("stampede.api.cache.CLOSING", 0.05)
    begun, done = threading.Event(), threading.Event()

    def compute() -> int:
        begun.set()
        done.wait(PATIENCE)
        return 1

    with closing(RedisServer()) as server:
        cache = Cache(f"{server.url}?socket_timeout=20")
        leader = Herd(lambda: cache.get_or_compute("k", compute))
        assert begun.wait(PATIENCE)
        server.freeze()
        start = time.monotonic()
        cache.close()
        assert time.monotonic() - start < 5
        server.thaw()
        done.set()
        assert leader.join() == [1]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_descriptor_of_a_closed_cache_is_left(tmp_path: Path) -> None:
    """A closed cache leaves no descriptor open. The keeper of its leases does not keep the engine."""
    cache = Cache(f"disk://{tmp_path}/d", lease=600)
    assert cache.get_or_compute("k", lambda: 1) == 1
    with cache.lock("l", lease=600):
        pass
    cache.close()
    del cache
    gc.collect()
    until(lambda: not [each for each in Path("/proc/self/fd").iterdir() if str(tmp_path) in _target(each)])


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # it belonged to this listing of the directory


@pytest.mark.parametrize("verb", ["get_or_compute", "get", "lock"])
@pytest.mark.parametrize("engine", ["redis", "memcached", "postgres"])
def test_a_question_under_way_then_tells_of_no_outage(
    engine: str, verb: str, colour: str, before: Callable[[Any], Proxy], face: Callable[..., Face]
) -> None:
    """If an engine is closed during a request, the error of its connection is not reported as an outage."""
    servers = {"redis": shared_redis, "memcached": shared_memcached, "postgres": prepared_postgres}
    server: Any = servers[engine]()
    proxy = before(server)
    asked = face(
        f"{engine}://127.0.0.1:{proxy.port}{'/postgres?user=root&sslmode=disable' if engine == 'postgres' else ''}",
        colour,
    )
    other = Cache(engine=asked.cache.engine, observers=[asked.told.append])  # it does not know that it is closed
    other.set("k", 1)
    with other.lock("warm"):
        pass
    proxy.at(b"", before=asked.cache.close)
    with suppress(EngineClosed):  # no error if it got a reply
        asked.cache, closed = other, asked.cache
        asked.lock("l") if verb == "lock" else asked.run(verb, "k", *[lambda: 2] * (verb == "get_or_compute"))
    asked.cache = closed
    assert proxy.met == 1
    assert not asked.count(events.EngineDown)
