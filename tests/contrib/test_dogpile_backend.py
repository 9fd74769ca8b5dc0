"""dogpile.cache's published suites over our backend, on real engines, and what our backend adds to its regions."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("dogpile.cache")
pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from disk_world import Script
from dogpile.cache import CacheRegion
from dogpile.cache.api import NO_VALUE
from dogpile.testing import fixtures
from dogpile.testing.fixtures import (
    _GenericBackendFixture,
    _GenericBackendTestSuite,
    _GenericMutexTestSuite,
    _GenericSerializerTestSuite,
)
from far_engine import Far
from herd import PATIENCE, Herd, Origin, logged_here, until
from memcached_server import shared_memcached
from servers import RedisServer, shared_redis

from stampede import Cache, CodecError, EngineError, LockLost, OptionError, RecursiveComputation

HASTE = 10.0
"""The suites sleep for half a minute on each engine. Here all their times are divided by this number."""


@pytest.fixture(autouse=True)
def _hurry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.name == "test_region_expire":  # it needs a value that is fresh for a while
        _go_by_minutes(monkeypatch)
    else:
        hurried = SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(seconds / HASTE))
        monkeypatch.setattr(fixtures, "time", hurried)


def _go_by_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test take minutes in place of seconds, on a clock that is set forward where the test sleeps."""
    ahead = [0.0]
    clock = SimpleNamespace(time=lambda: time.time() + sum(ahead), sleep=lambda seconds: ahead.append(60 * seconds))
    for module in (
        "dogpile.testing.fixtures",
        "dogpile.lock",
        "dogpile.cache.region",
        "stampede.contrib.dogpile.region",
    ):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr(f"{__name__}.HASTE", 1 / 60)


class _Memory:
    backend = "stampede"

    @classmethod
    def url(cls) -> str:
        return "memory://"

    @classmethod
    def setup_class(cls) -> None:
        cls.config_args = {"arguments": {"url": cls.url()}}  # type: ignore[attr-defined]
        super().setup_class()  # type: ignore[misc]

    def _region(self, *args: Any, config_args: Any = None, **options: Any) -> Any:
        config = dict(config_args or {})
        if "expiration_time" in config:
            config["expiration_time"] /= HASTE
        return super()._region(*args, config_args=config, **options)  # type: ignore[misc]


class _Disk(_Memory):
    _place: ClassVar[Any]

    @classmethod
    def url(cls) -> str:
        cls._place = tempfile.TemporaryDirectory(prefix="stampede-")
        return f"disk://{cls._place.name}"

    @classmethod
    def teardown_class(cls) -> None:
        cls._place.cleanup()


class _Redis(_Memory):
    @classmethod
    def url(cls) -> str:
        return shared_redis().url


class TestMemory(_Memory, _GenericBackendTestSuite, _GenericMutexTestSuite):
    pass


class TestMemorySerializer(_Memory, _GenericSerializerTestSuite, _GenericBackendFixture):
    pass


class TestDisk(_Disk, _GenericBackendTestSuite, _GenericMutexTestSuite):
    pass


class TestRedis(_Redis, _GenericBackendTestSuite, _GenericMutexTestSuite):
    pass


class TestRedisSerializer(_Redis, _GenericSerializerTestSuite, _GenericBackendFixture):
    pass


# -- what our backend adds to regions -----------------------------------------------------------------------------

URLS = ["memory", "disk", "redis", "memcached"]


@pytest.fixture(params=URLS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return shared_redis().url
    if request.param == "memcached":
        return shared_memcached().url
    return {"memory": "memory://", "disk": f"disk://{tmp_path}/cache"}[request.param]


def made(url: str, *, expiration_time: float | None = None, region: Any = None, **arguments: Any) -> CacheRegion:
    made = region or CacheRegion()
    return made.configure("stampede", expiration_time=expiration_time, arguments={"url": url, **arguments})


def test_values_come_back_without_pickle(url: str) -> None:
    """Common values come back without pickle, and pickled bytes from the engine are a miss."""
    region = made(url)
    value = {"day": date(2026, 1, 2), "price": Decimal("1.10"), "rows": [(1, "a"), (2, None)], "n": None}
    region.set("k", value)
    assert region.get("k") == value
    region.backend.set_serialized("k", b'{"ct": 1, "v": 2}|' + pickle.dumps(print))
    assert region.get("k") is NO_VALUE


def test_a_refused_value_fails_no_request(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A value that can't be stored is returned, and logged once for each function. `set` and strict=True raise."""
    region, thing = made(url), threading.Lock()
    with caplog.at_level("ERROR", "stampede"):
        assert region.get_or_create("k", lambda: thing) is thing
        assert region.get_or_create("k", lambda: thing) is thing
        assert region.get_or_create_multi(["a", "b"], lambda *keys: [thing, 1]) == [thing, 1]
        for key in ("shop:price|tea", "shop:price|salt", "shop:stock|tea"):  # each function is logged once
            assert region.get_or_create(key, lambda: thing) is thing
    told = [record.getMessage().partition(" of the region on ")[0] for record in logged_here(caplog)]
    assert told == ["'k'", "'a'", "'shop:price|tea'", "'shop:stock|tea'"]
    assert region.get("k") is NO_VALUE
    assert region.get_multi(["a", "b"]) == [NO_VALUE, 1]
    with pytest.raises(CodecError, match=r"'k': .*can't be stored"):
        region.set("k", thing)
    with pytest.raises(CodecError, match="can't be stored"):
        made(url, strict=True).get_or_create("k", lambda: thing)


@dataclass
class Price:
    amount: int


def test_trusted_types_and_pickles() -> None:
    """A region stores an application's classes with trust=, or with codec='pickle' and a signing key."""
    for trust in ([Price], f"{__name__}.Price"):
        region = made("memory://", trust=trust)
        region.set("k", Price(3))
        assert region.get("k") == Price(3)
    region = made("memory://", codec="pickle", signing_key="secret")
    region.set("k", Price(3))
    assert region.get("k") == Price(3)
    region = made("memory://", codec="objects")
    region.set("k", thing := Price(3))
    assert region.get("k") is thing
    with pytest.raises(OptionError):
        made(shared_redis().url, codec="pickle")
    with pytest.raises(OptionError):
        made(shared_redis().url, codec="objects")
    for wrong in ({"codec": "json"}, {"cache": "redis://"}, {"ttl": "soon"}, {"lease": -1}):
        with pytest.raises(OptionError):
            made("memory://", **wrong)


def test_the_advice_for_a_refused_value_works() -> None:
    """The advice for a region is trust=, and not a return annotation, which has no effect there."""
    with pytest.raises(CodecError, match=r"name it in trust=.Price. of the region's arguments$") as refused:
        made("memory://", codec="sealed").set("k", Price(3))
    assert "annotation" not in str(refused.value)
    region = made("memory://", codec="sealed", trust=[Price])
    region.set("k", Price(3))
    assert region.get("k") == Price(3)


def test_a_region_on_a_cache_that_is_there() -> None:
    """A region can use an existing cache, and does not open its engine again."""
    with Cache("memory://", namespace="shop") as cache:
        region = made("", cache=cache)
        region.set("k", 1)
        assert region.backend.cache is cache
        assert cache.get("k") is not None


def test_regions_of_one_url_share_their_engine() -> None:
    """Regions with the same URL share one engine, and so one pool of connections."""
    first, second = made(shared_redis().url), made(shared_redis().url, namespace="other")
    assert first.backend.cache.engine is second.backend.cache.engine
    first.set("k", 1)
    assert made(shared_redis().url).get("k") == 1
    assert second.get("k") is NO_VALUE
    assert made("memory://").backend.cache.engine is not made("memory://").backend.cache.engine


def test_a_local_tier(server: RedisServer) -> None:
    """With `local`, a repeated read needs no round trip, and a change by another process is noticed."""
    region, other = made(server.url, local=True), made(server.url, namespace="dogpile")
    assert region.get("k") is NO_VALUE
    assert region.get_or_create_multi(["k", "l"], lambda *keys: list(keys)) == ["k", "l"]
    assert region.get("k") == "k" == other.get("k")
    stats = region.backend.cache.stats

    def hits(read: Callable[[], Any], value: Any) -> bool:
        before = stats().hits
        assert read() == value
        return stats().hits == before + 1

    until(lambda: hits(lambda: region.get("k"), "k"))  # the message about its own change may come later
    until(lambda: hits(lambda: region.get_multi(["k", "new"]), ["k", NO_VALUE]))
    other.set("k", "new")
    until(lambda: region.get("k") == "new")
    other.delete("k")
    until(lambda: region.get("k") is NO_VALUE)


def test_a_local_tier_is_not_asked_under_the_mutex(server: RedisServer) -> None:
    """The holder of a mutex reads from the server. A local value may be old, and its creator would run again."""
    region, other = made(f"{server.url}?tracking=false", local=True), made(server.url)
    other.set("k", "old")
    assert region.get("k") == "old"
    other.set("k", "new")  # without tracking, the local value is served for another second
    mutex = region.backend.get_mutex("k")
    assert mutex.acquire()
    assert (region.get("k"), region.get_multi(["k"])) == ("new", ["new"])
    mutex.release()


def test_local_tiers_of_one_process_agree_at_once(server: RedisServer) -> None:
    """If a region changes or deletes a value, the other local tiers of the process notice it at once."""
    first, second = made(server.url, local=True), made(server.url, local=True)
    for number in range(50):
        first.set_multi({"k": number, "l": number})
        assert (second.get("k"), second.get("l")) == (number, number)
    first.delete_multi(["k", "l"])
    assert second.get("k") is NO_VALUE


def test_an_unknown_argument_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """An unknown argument is logged with a suggestion. It is no error, because dogpile's own backends ignore it."""
    made("memory://", leese=3)
    assert "did you mean 'lease'" in caplog.text


def test_one_creator_among_regions(url: str) -> None:
    """If several regions, as in several processes, need the same key, only one creator runs."""
    origin = Origin()
    regions = [made(url), made(url)] if url != "memory://" else [made(url)] * 2
    herd = Herd(*[lambda region=each: region.get_or_create("k", origin) for each in regions * 3])
    origin.has_begun()
    origin.let_on()
    assert herd.join() == [1] * 6
    assert origin.calls == 1


def test_who_waits_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter for a mutex is woken by the release, and does not wait for a poll or for the end of the lease."""
    for pause in ("engines.redis.locks.SAFETY", "locks.crowd.LOOK"):
        monkeypatch.setattr(f"stampede.{pause}", 10 * PATIENCE)
    region, other = (made(shared_redis().url, lease=20 * PATIENCE) for _ in range(2))
    mutex, waiting = region.backend.get_mutex("k"), other.backend.get_mutex("k")
    assert mutex.acquire()
    herd = Herd(waiting.acquire)
    until(lambda: shared_redis().cli("PUBSUB", "CHANNELS"))
    mutex.release()
    assert herd.join() == [True]
    waiting.release()


HOLDER = """
import sys, threading
from dogpile.cache import make_region
region = make_region().configure("stampede", arguments={"url": sys.argv[1], "lease": float(sys.argv[2])})

def creator():
    print("began", flush=True)
    threading.Event().wait()

region.get_or_create("k", creator)
"""


@pytest.mark.parametrize("lease", [0.5, 60.0])
def test_a_killed_process_holds_nobody_up(lease: float, tmp_path: Path) -> None:
    """The mutex of a killed process ends. dogpile's own mutex on Redis remains for ever without a `lock_timeout`."""
    url = shared_redis().url if lease < 1 else f"disk://{tmp_path}/cache"  # there the kernel reports a death at once
    with Script(HOLDER, url, str(lease)) as holder:
        assert holder.stdout.readline() == "began\n"
        region = made(url)
        herd = Herd(lambda: region.get_or_create("k", lambda: "anew"))
        began = time.monotonic()
        holder.kill()
    assert herd.join() == ["anew"]
    assert time.monotonic() - began < 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_mutexes_of_its_own(url: str) -> None:
    """A forked child does not hold the mutexes that threads of its parent hold."""
    region, origin = made(url), Origin()
    herd = Herd(lambda: region.get_or_create("k", origin))
    origin.has_begun()
    mine: Any = region.backend.get_mutex("mine")
    assert mine.acquire(False)  # by the thread that forks
    child = os.fork()
    if not child:
        try:
            mutex = region._mutex("k")
            good = (
                mine._mutexes.held_here(mine.key) is None
                and not mutex.takers
                and region.get_or_create("other", lambda: 2) == 2
            )
            if "memory" not in url:
                good = good and mutex.locked() and not mutex.acquire(False)
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    mine.release()
    origin.let_on()
    assert herd.join() == [1]
    assert region.get("k") == 1


@pytest.mark.usefixtures("default_timeouts")
def test_a_hung_engine_costs_one_of_all_a_second(own: RedisServer) -> None:
    """If the engine hangs, only one call in a second waits for it."""
    region = made(own.url)
    assert region.get_or_create("k", lambda: 1) == 1
    own.freeze()
    try:
        assert region.get_or_create("a", lambda: 1) == 1
        began = time.monotonic()
        assert [region.get_or_create(f"b{number}", lambda: 1) for number in range(20)] == [1] * 20
        assert time.monotonic() - began < 10  # if each of them asked, it would be twice that
    finally:
        own.thaw()
    until(lambda: region.get("k") == 1)


def test_a_creator_that_asks_for_its_own_key_is_told(url: str) -> None:
    """A creator that asks for its own key is refused: it would wait for itself."""
    region = made(url)
    with pytest.raises(RecursiveComputation, match="'k'"):
        region.get_or_create("k", lambda: region.get_or_create("k", lambda: 1))
    assert region.get_or_create("k", lambda: 2) == 2


def test_a_mutex_may_be_released_by_another_thread(url: str) -> None:
    """A mutex can be released by another thread, as an `async_creation_runner` does it."""
    mutex = made(url).backend.get_mutex("k")
    assert mutex.acquire()
    assert Herd(mutex.release).join() == [None]
    assert not mutex.locked()
    with pytest.raises(LockLost):
        mutex.release()


def test_a_lost_mutex_is_nobodys_error(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """If a creator outlasts its mutex, its value is returned but not stored, because a newer one may be stored."""
    region = made(url, lease=0.1, max_hold=0.01)

    def creator() -> str:
        mutex = region._mutex("k")
        until(lambda: mutex.lost)
        return "late"

    assert region.get_or_create("k", creator) == "late"
    assert "longer than its mutex was held" in caplog.text
    assert region.get("k") is NO_VALUE


def test_an_engine_that_is_down_fails_no_request(own: RedisServer) -> None:
    """If the engine is down, reads and creators still work. Changes raise, and so does on_engine_error='raise'."""
    region, strict = made(own.url), made(own.url, on_engine_error="raise")
    assert region.get_or_create("k", lambda: "before") == "before"
    own.stop()
    origin = Origin()
    herd = Herd(*[lambda: region.get_or_create("other", origin)] * 3)
    origin.has_begun()
    origin.let_on()
    assert herd.join() == [1] * 3
    assert origin.calls == 1
    assert region.get_or_create_multi(["a", "b"], lambda *keys: list(keys)) == ["a", "b"]
    assert region.get_multi(["a", "b", "k"]) == ["a", "b", NO_VALUE]
    assert region.backend.get_mutex("k").locked() is False
    for change in (lambda: region.set("k", "after"), lambda: region.delete("other")):
        with pytest.raises(EngineError):
            change()
    with pytest.raises(EngineError):
        strict.get_or_create("k", lambda: "after")
    assert region.get("other") is NO_VALUE


def test_bulk_verbs_take_one_round_trip() -> None:
    """A bulk operation of a region takes one round trip for all its keys."""
    engine, names = Far(), [f"k{number}" for number in range(20)]
    region = made("", cache=Cache(engine=engine))
    region.set_multi(dict.fromkeys(names, 1))
    assert region.get_multi([*names, "new"]) == [1] * 20 + [NO_VALUE]
    region.delete_multi(names)
    assert region.get_multi(names) == [NO_VALUE] * 20
    assert [(len(trip), set(trip)) for trip in engine.trips] == [(20, {"set"}), (20, {"invalidate"})]
