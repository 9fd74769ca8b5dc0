"""A dogpile region with stampede's engines: a migration is one import line, and dogpile's faults are gone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dogpile.cache")
pytest.importorskip("redis")
pytest.importorskip("pymemcache")

import redis
from dogpile.cache import register_backend
from dogpile.cache.api import NO_VALUE
from dogpile.cache.exception import DogpileCacheException
from dogpile.cache.proxy import ProxyBackend
from dogpile.testing import fixtures
from herd import Herd, Origin, logged_here, until
from memcached_server import shared_memcached
from servers import RedisServer, shared_cluster, shared_redis
from test_dogpile_backend import _hurry, _Redis

from stampede import OptionError, RecursiveComputation
from stampede.contrib.dogpile import CacheRegion, StampedeBackend, make_region
from stampede.contrib.dogpile.translate import translated

hurry = _hurry


class TestSuite(_Redis, fixtures._GenericBackendTestSuite, fixtures._GenericMutexTestSuite):
    """dogpile's published suites again, with our regions."""

    @pytest.fixture(autouse=True)
    def _ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fixtures, "CacheRegion", CacheRegion)


@pytest.fixture(params=["memory", "disk", "redis", "memcached"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., CacheRegion]:
    """Makes regions on one store, which dogpile's own arguments describe."""
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "memory": lambda: {"backend": "dogpile.cache.memory"},
        "disk": lambda: {"backend": "dogpile.cache.dbm", "arguments": {"filename": str(tmp_path / "a.dbm")}},
        "redis": lambda: {"backend": "dogpile.cache.redis", "arguments": {"port": shared_redis().port}},
        "memcached": lambda: {"backend": "dogpile.cache.memcached", "arguments": {"url": [shared_memcached().address]}},
    }
    kind = kinds[request.param]()

    def made(expiration_time: float | None = None, wrap: Any = (), **options: Any) -> CacheRegion:
        return make_region(**options).configure(**kind, expiration_time=expiration_time, wrap=wrap)

    return made


Made = Callable[..., CacheRegion]


def test_a_migration_is_one_import_line(made: Made) -> None:
    """After the import line is changed, the rest of an application's caching works as before."""
    region = made(expiration_time=3600)

    @region.cache_on_arguments(namespace="shop")
    def price(item: int, currency: str) -> str:
        calls.append(item)
        return f"{item} {currency}"

    calls: list[int] = []
    assert [price(1, "EUR") for _ in range(3)] == ["1 EUR"] * 3
    assert price.get(1, "EUR") == "1 EUR"
    price.set("2 EUR", 1, "EUR")
    assert price(1, "EUR") == "2 EUR"
    assert price.refresh(1, "EUR") == "1 EUR"
    price.invalidate(1, "EUR")
    assert price.get(1, "EUR") is NO_VALUE
    assert price.original(5, "EUR") == "5 EUR"
    assert calls == [1, 1, 5]

    @region.cache_multi_on_arguments(asdict=True)
    def names(*ids: int) -> dict[int, str]:
        return {id: f"name {id}" for id in ids if id != 3}

    assert names(1, 2, 3) == {1: "name 1", 2: "name 2"}
    assert names.get(1, 3) == ["name 1", NO_VALUE]
    region.set("k", 1)
    metadata = region.get_value_metadata("k")
    assert metadata is not None and metadata.age < 60
    assert isinstance(region.backend, StampedeBackend)


def test_hard_and_soft_invalidation(made: Made) -> None:
    """A hard invalidation ends a value. After a soft one, it is still served while another caller computes."""
    region, numbers = made(expiration_time=3600), iter(range(10))
    assert region.get_or_create("k", lambda: next(numbers)) == 0
    region.invalidate()
    assert region.get("k") is NO_VALUE
    assert region.get_or_create("k", lambda: next(numbers)) == 1
    region.invalidate(hard=False)
    mutex = region.backend.get_mutex("k")
    assert mutex.acquire()  # another caller computes
    assert region.get_or_create("k", lambda: next(numbers)) == 1
    assert region.get_or_create_multi(["k"], lambda *keys: [next(numbers)]) == [1]
    mutex.release()
    assert region.get_or_create_multi(["k"], lambda *keys: [next(numbers)]) == [2]
    eternal = made()
    eternal.invalidate(hard=False)
    with pytest.raises(DogpileCacheException, match="soft invalidation"):
        eternal.get_or_create("k", lambda: 1)
    with pytest.raises(DogpileCacheException, match="soft invalidation"):
        eternal.get_or_create_multi(["k"], lambda *keys: [1])


def test_should_cache_fn(made: Made) -> None:
    """A value that should_cache_fn rejects is returned and not stored."""
    region = made()
    assert region.get_or_create("k", lambda: None, should_cache_fn=lambda value: value is not None) is None
    assert region.get("k") is NO_VALUE
    assert region.get_or_create_multi(["k", "l"], lambda *keys: [1, None], should_cache_fn=bool) == [1, None]
    assert region.get_multi(["k", "l"]) == [1, NO_VALUE]


def test_a_stale_value_is_renewed_beside_its_caller(made: Made) -> None:
    """The caller gets a stale value at once, and one `async_creation_runner` renews it and releases the mutex."""
    threads: list[threading.Thread] = []

    def runner(cache: CacheRegion, key: str, creator: Callable[[], Any], mutex: Any) -> None:
        def work() -> None:
            try:
                cache.set(key, creator())
            finally:
                mutex.release()

        threads.append(threading.Thread(target=work))

    region, numbers = made(expiration_time=3600, async_creation_runner=runner), iter(range(10))
    function = region.cache_on_arguments()(lambda x: (x, next(numbers)))
    assert function("a") == ("a", 0)
    region.invalidate(hard=False)
    assert function("a") == ("a", 0)
    assert function("a") == ("a", 0)  # and no second runner: the first has the mutex
    assert len(threads) == 1
    threads[0].start()
    threads[0].join()
    assert function("a") == ("a", 1)


def test_a_runner_that_raises_gives_the_mutex_back() -> None:
    """If a runner raises, its mutex is released. Otherwise the key would never be renewed."""

    def runner(*args: Any) -> None:
        raise LookupError("no thread to be had")

    region = make_region(async_creation_runner=runner).configure("stampede", expiration_time=3600)
    region.set("k", 1)
    region.invalidate(hard=False)
    for _ in range(2):
        with pytest.raises(LookupError):
            region.get_or_create("k", lambda: 2)


class Counting(ProxyBackend):
    """A proxy that counts how often a value was read and how often a mutex was taken."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.looks = 0

    def get(self, key: str) -> Any:
        self.looks += 1
        return self.proxied.get(key)

    def get_serialized(self, key: str) -> Any:
        self.looks += 1
        return self.proxied.get_serialized(key)

    def get_mutex(self, key: str) -> Any:
        mutex, taken = self.proxied.get_mutex(key), self.taken
        acquire = mutex.acquire  # type: ignore[union-attr]

        def counted(wait: bool = True) -> bool:
            taken.append(key)
            return bool(acquire(wait))

        mutex.acquire = counted  # type: ignore[union-attr, method-assign]
        return mutex


def test_who_waited_takes_no_mutex(made: Made) -> None:
    """Waiters take no mutex. dogpile's own waiters take it one after the other, only to find the stored value."""
    proxy, origin = Counting(), Origin()
    region = made(wrap=[proxy])
    herd = Herd(*[lambda: region.get_or_create("k", origin)] * 8)
    origin.has_begun()
    until(lambda: proxy.looks == 9)  # two by the leader
    origin.let_on()
    assert herd.join() == [1] * 8
    assert len(proxy.taken) < 4  # a caller that joins too late takes the mutex, too


def test_a_failing_creator_is_the_next_ones_turn(made: Made) -> None:
    """If a creator fails, only its own caller gets the error, and the next caller computes."""
    region, attempts = made(), iter([LookupError("down"), LookupError("down")])

    def creator() -> str:
        for error in attempts:
            raise error
        return "up"

    herd = Herd(*[lambda: region.get_or_create("k", creator)] * 4)
    ends = herd.join()
    assert sorted(map(type, ends), key=str) == sorted([LookupError, LookupError, str, str], key=str)


def test_a_creator_that_asks_for_its_own_key_is_told(made: Made) -> None:
    """A creator that asks for its own key is refused: it would wait for itself."""
    region = made()
    with pytest.raises(RecursiveComputation, match="'k'"):
        region.get_or_create("k", lambda: region.get_or_create("k", lambda: 1))


def test_a_hung_creator_is_waited_for_no_longer_than_it_may_hold() -> None:
    """If a creator hangs for longer than max_hold, another caller computes, and the late value is not stored."""
    region = make_region().configure("stampede", arguments={"max_hold": 0.05, "lease": 0.05})
    origin = Origin()
    hung = Herd(lambda: region.get_or_create("k", origin))
    origin.has_begun()
    assert region.get_or_create("k", lambda: "anew") == "anew"
    origin.let_on()
    assert hung.join() == [1]
    assert region.get("k") != 1


def test_batches_in_opposite_order_wait_for_nobody(made: Made) -> None:
    """A batch stores its own keys before it waits for others. Otherwise two batches could wait for each other."""
    regions, gate = (made(), made()), threading.Barrier(2, timeout=20)
    if isinstance(regions[0].backend, StampedeBackend) and not regions[0].backend.cache.engine.shared:
        regions = regions[:1] * 2

    def creator(*keys: str) -> list[str]:
        if len(keys) > 1:
            gate.wait()  # both hold something by now
        return [key.upper() for key in keys]

    first, second = regions
    herd = Herd(
        lambda: first.get_or_create_multi(["a", "b"], creator),
        lambda: second.get_or_create_multi(["d", "c"], creator),
    )
    assert herd.join() == [["A", "B"], ["D", "C"]]
    held = Origin()
    single = Herd(lambda: first.get_or_create("e", held))
    held.has_begun()
    batch = Herd(lambda: second.get_or_create_multi(["e", "f"], lambda *keys: [key.upper() for key in keys]))
    until(lambda: second.get("f") == "F")  # its own key is stored and released before it waits for the other
    assert batch.waiting == 1
    held.let_on()
    assert single.join() + batch.join() == [1, [1, "F"]]


def test_a_failing_batch_gives_everything_back(made: Made) -> None:
    """If the creator of a batch fails, all mutexes of the batch are released."""
    region = made()

    def fails(*keys: str) -> list[str]:
        raise LookupError(keys)

    with pytest.raises(LookupError):
        region.get_or_create_multi(["b", "a"], fails)
    assert [region.key_is_locked(key) for key in ("a", "b")] == [False, False]
    assert region.get_or_create_multi(["b", "a", "b"], lambda *keys: list(keys)) == ["b", "a", "b"]


def test_what_a_batch_leaves_out_is_no_value() -> None:
    """A key that the creator of a batch leaves out is NO_VALUE, as in dogpile."""
    region = make_region().configure("stampede")
    assert region.get_or_create_multi(["a", "b"], lambda *keys: [1]) == [1, NO_VALUE]
    assert region.get_multi(["a", "b"]) == [1, NO_VALUE]


# -- the names of dogpile's backends --------------------------------------------------------------------------------


@pytest.fixture
def arguments(server: RedisServer) -> Iterator[dict[str, dict[str, Any]]]:
    with closing(redis.ConnectionPool(port=server.port)) as pool:
        yield {
            "url": {"url": server.url, "distributed_lock": True, "thread_local_lock": False},
            "host": {"host": "127.0.0.1", "port": server.port, "db": 1, "redis_expiration_time": 60, "lock_sleep": 1},
            "url and more": {
                "url": server.url,
                "socket_timeout": 3.0,
                "connection_kwargs": {"health_check_interval": 9},
            },
            "pool": {"connection_pool": pool, "lock_timeout": 30},
        }


@pytest.mark.parametrize("how", ["url", "host", "url and more", "pool"])
@pytest.mark.parametrize("name", ["dogpile.cache.redis", "dogpile.cache.valkey"])
def test_redis_as_dogpile_is_told_of_it(name: str, how: str, arguments: dict[str, dict[str, Any]], caplog: Any) -> None:
    """The arguments of dogpile's Redis and Valkey backends work without a change."""
    region, given = make_region(), arguments[how].copy()
    region.configure_from_config(
        {"cache.backend": name, "cache.expiration_time": "60", **{f"cache.arguments.{k}": v for k, v in given.items()}},
        "cache.",
    )
    region.set("k", [1])
    assert region.get("k") == [1]
    assert region.expiration_time == 60
    assert region.backend.cache.engine.scheme == "redis"
    assert not logged_here(caplog)
    assert region.backend.max_hold == given.get("lock_timeout", 600)


def test_arguments_that_say_how_long_a_store_keeps() -> None:
    """dogpile's arguments for the expiry in a store become ttl. Otherwise the store would fill up."""
    for name, arguments in (
        ("redis", {"url": "redis://h", "redis_expiration_time": 60}),
        ("valkey", {"url": "valkey://h", "valkey_expiration_time": 60}),
        ("bmemcached", {"url": "h:1", "memcached_expire_time": 60, "lock_timeout": 0}),
    ):
        backend, given = translated(f"dogpile.cache.{name}", arguments)
        assert (backend, given["ttl"]) == ("stampede", 60)
        assert given["url"] in ("redis://h", "memcached://h:1")
        assert given.keys() == {"url", "ttl"}
    assert translated("dogpile.cache.memcached", {"url": ["a:1", ("b", 2)]})[1]["url"] == "memcached://a:1,b:2"
    with pytest.raises(OptionError, match="password"):
        translated("dogpile.cache.bmemcached", {"url": "h:1", "password": "secret"})
    for name in ("redis_sentinel", "valkey_cluster"):
        with pytest.raises(OptionError, match="'stampede'"):
            translated(f"dogpile.cache.{name}", {})


def test_a_cluster() -> None:
    """Bulk operations reach all keys of a Redis cluster, which are on several servers."""
    region = make_region().configure("stampede", arguments={"url": shared_cluster().url})
    names = [f"k{number}" for number in range(50)]
    region.set_multi(dict.fromkeys(names, 1))
    assert region.get_multi(names) == [1] * 50
    region.delete_multi(names)
    assert region.get_multi(names) == [NO_VALUE] * 50
    assert region.get_or_create_multi(names, lambda *keys: list(keys)) == names


def test_memory_keeps_objects_as_they_are() -> None:
    """dogpile's memory backend keeps any object itself, such as a lock. memory_pickle keeps copies."""
    thing = threading.Lock()
    region = make_region().configure("dogpile.cache.memory")
    assert region.get_or_create("k", lambda: thing) is thing
    assert region.get("k") is thing
    copies, value = make_region().configure("dogpile.cache.memory_pickle"), [1]
    copies.set("k", value)
    assert copies.get("k") == value and copies.get("k") is not value


class Configured(fixtures.MockBackend):
    """A third-party backend that reads the configuration in its own way."""

    @classmethod
    def from_config_dict(cls, config_dict: Any, prefix: str) -> Configured:
        return cls({"said": config_dict[prefix + "url"]})


def test_others_backends_stay_theirs() -> None:
    """Backends for which stampede has no engine still work with our regions."""
    register_backend("configured", __name__, "Configured")
    said = make_region().configure_from_config({"a.backend": "configured", "a.arguments.url": "somewhere"}, "a.")
    assert said.backend.arguments == {"said": "somewhere"}
    kept: dict[str, Any] = {}
    region = make_region().configure("dogpile.cache.memory", arguments={"cache_dict": kept})
    assert region.get_or_create("k", lambda: 1) == 1
    assert [*kept] == ["k"]
    assert make_region().configure("dogpile.cache.null").get_or_create("k", lambda: 1) == 1
    assert region.get_or_create_multi(["k", "l"], lambda *keys: [2]) == [1, 2]


@pytest.mark.parametrize("name", ["make_region", "CacheRegion", "StampedeBackend"])
def test_without_dogpile_its_pip_line_is_told(name: str) -> None:
    """Without dogpile.cache, the import error names the pip command that installs it."""
    program = f"import sys; sys.modules['dogpile'] = None\nfrom stampede.contrib.dogpile import {name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "MissingExtra" in done.stderr
    assert "pip install 'stampede-guard[dogpile]'" in done.stderr


def test_an_interpreter_with_a_region_ends_quietly() -> None:
    """An interpreter that used a region exits without a traceback."""
    program = """if True:
        from stampede.contrib.dogpile import make_region
        region = make_region().configure("dogpile.cache.memory")
        @region.cache_on_arguments()
        def user(id): return {"id": id}
        user(42)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_its_words_are_dogpiles() -> None:
    """Our regions are instances of dogpile's CacheRegion, so `isinstance` in applications works."""
    from dogpile.cache import CacheRegion as Theirs

    assert isinstance(make_region("name"), Theirs)
    assert make_region("name").name == "name"
