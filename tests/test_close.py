"""What is closed stays closed, and nobody waits for it; over every engine, in both colours."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from faces import Face
from herd import PATIENCE, Herd, until
from memcached_server import shared_memcached
from proxy import Proxy
from servers import shared_redis

from stampede import Cache, EngineError, Lock, LockLost, events
from stampede.entry import new_id
from stampede.errors import EngineClosed
from stampede.metrics import Stats

KINDS = ["memory", "sealed", "disk", "redis", "local", "memcached", "paired"]


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    made: dict[str, Callable[[], Cache]] = {
        "memory": lambda: Cache("memory://"),
        "sealed": lambda: Cache("memory://?codec=sealed"),
        "disk": lambda: Cache(f"disk://{tmp_path}/d"),
        "redis": lambda: Cache(shared_redis().url),
        "local": lambda: Cache(shared_redis().url, local=True),
        "memcached": lambda: Cache(shared_memcached().url),
        "paired": lambda: Cache(f"disk://{tmp_path}/d", locks=f"file://{tmp_path}/f"),
    }
    cache = made[request.param]()
    cache.clear()
    yield cache
    cache.close()


def test_every_verb_of_a_closed_cache_says_so(cache: Cache) -> None:
    """A value that nobody invalidates any more would be served, or the engine's connections be opened again."""
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


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_who_waits_is_told_at_once(cache: Cache, colour: str) -> None:
    """They would wait to the end of a lease, or get an error of some library's own."""
    begun, done = threading.Event(), threading.Event()
    name = new_id().hex()  # it stays locked
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

    leader = Herd(lambda: cache.get_or_compute("k", compute, lease=60))
    assert begun.wait(PATIENCE)
    other = Cache(engine=cache.engine)  # as another process: it waits for the lease, not for the flight
    acquire = Lock(name, on=cache, wait=60)
    waiters = Herd(
        waiting(acquire.acquire, acquire.aacquire),
        waiting(
            lambda: other.get_or_compute("k", lambda: 2), lambda: other.aget_or_compute("k", lambda: 2)
        ),
    )  # fmt: skip
    until(lambda: len(waits) == 2)
    threading.Event().wait(0.1)  # most likely they sleep by then; if not, they must not miss it either
    cache.close()
    for error in waiters.join():
        assert isinstance(error, EngineError)
        assert "closed" in str(error)
    done.set()
    assert leader.join() == [1]
    with pytest.raises((EngineError, LockLost)):
        held.release()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_descriptor_of_a_closed_cache_is_left(tmp_path: Path) -> None:
    """The keeper would have the engine until its last lease was due: two descriptors for each cache."""
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
        return ""  # it was that of the directory's own listing


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("verb", ["get_or_compute", "get", "lock"])
@pytest.mark.parametrize("engine", ["redis", "memcached"])
def test_a_question_under_way_then_tells_of_no_outage(
    engine: str, verb: str, colour: str, before: Callable[[Any], Proxy], face: Callable[..., Face]
) -> None:
    """What a connection says that was closed under it would pass for an outage: calls would go on without the engine
    that is closed, and report that a server is down which is not."""
    server: Any = shared_redis() if engine == "redis" else shared_memcached()
    proxy = before(server)
    asked = face(f"{engine}://127.0.0.1:{proxy.port}", colour)
    other = Cache(engine=asked.cache.engine, observers=[asked.told.append])  # which nobody tells that it is closed
    other.set("k", 1)
    with other.lock("warm"):
        pass
    proxy.at(b"", before=asked.cache.close)
    with suppress(EngineClosed):  # else it was answered
        asked.cache, closed = other, asked.cache
        asked.lock("l") if verb == "lock" else asked.run(verb, "k", *[lambda: 2] * (verb == "get_or_compute"))
    asked.cache = closed
    assert proxy.met == 1
    assert not asked.count(events.EngineDown)
