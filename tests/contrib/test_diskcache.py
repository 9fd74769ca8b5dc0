"""diskcache's interface over our disk engine. Its own tests are run by `make suites`."""

from __future__ import annotations

import asyncio
import doctest
import inspect
import logging
import multiprocessing
import pickle
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

import stampede
from stampede.contrib import diskcache as dc
from stampede.contrib.diskcache.keys import key_of, text_of
from stampede.errors import CodecError, KeyingError, LockLost, OptionError


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[dc.Cache]:
    with dc.Cache(tmp_path / "cache") as cache:
        yield cache


def together(work: Callable[[], Any], times: int = 8) -> list[Any]:
    """Return the results of calls that begin together, each in a thread."""
    start = threading.Barrier(times)

    def begin(_: int) -> Any:
        start.wait(30)
        return work()

    with ThreadPoolExecutor(times) as threads:
        return list(threads.map(begin, range(times)))


def test_examples() -> None:
    """Every public name has a docstring, and its examples run."""
    for name in dc.__all__:
        what = getattr(dc, name)
        members = [value for word, value in vars(what).items() if word[0] != "_"] if isinstance(what, type) else []
        own = [what] if getattr(what, "__module__", "").startswith("stampede.contrib") and callable(what) else []
        for each in own + [each for each in members if own and callable(each)]:
            text = inspect.getdoc(each)
            assert text, f"{name}: {each} has no docstring"
            test = doctest.DocTestParser().get_doctest(text, {"__name__": "shop"}, name, None, None)
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
            assert not doctest.DocTestRunner(optionflags=flags).run(test).failed


# -- keys and values --------------------------------------------------------------------------------------------------

KEYS = [
    "a", "1", 1, 1.0, True, None, b"a", -5, 2**70, 1e300, "é\n'\\\ud800", (), (1,), (1, ("a", b"b", None)), [1, "x"],
    {"k": [1, 2]}, {1, 2}, set(),
]  # fmt: skip


def test_keys_are_exact_and_come_back(cache: dc.Cache) -> None:
    """Keys of different types differ, and iteration returns the keys themselves."""
    for number, key in enumerate(KEYS):
        cache[key] = number
    assert [cache[key] for key in KEYS] == list(range(len(KEYS)))
    assert sorted(map(repr, cache)) == sorted(map(repr, KEYS))
    assert list(cache.iterkeys()) == list(cache), "llama-cpp-python and others look for keys with a prefix by it"
    assert len(cache) == len(KEYS) and cache


def test_keys_that_can_not_be_read_back(cache: dc.Cache) -> None:
    """A key of another type comes back as an OpaqueKey, which finds the entry. One without an identity is refused."""
    cache[date(2026, 1, 31)] = 1
    cache[float("inf"), "x"] = 2
    for key in cache:
        assert type(key) is dc.OpaqueKey
        assert cache[key] in (1, 2)
        del cache[key]
    assert len(cache) == 0
    with pytest.raises(KeyingError, match="no stable identity"):
        cache[object()] = 1


def test_texts_that_no_key_has() -> None:
    """A text that is not of ours does no harm."""
    deep = "-" * 5000 + "1", "[" * 150, "(" * 100_000, "9" * 10_000
    for text in (*deep, "{[]: 1}", "__import__('os')", "1\0", "", "f()"):
        assert key_of(text) == text
        assert text_of(key_of(text)) == text


@dataclass(frozen=True)
class Point:
    x: int
    y: int


def test_values_of_foreign_types(tmp_path: Path, cache: dc.Cache) -> None:
    """A value of a type that nobody named is refused with the remedy. Named in trust=, it is stored."""
    with pytest.raises(CodecError, match="trust"):
        cache["p"] = Point(1, 2)
    with dc.Cache(tmp_path / "trusting", trust=[Point]) as trusting:
        trusting["p"] = Point(1, 2)
        assert trusting["p"] == Point(1, 2)


def test_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    """A pickle in place of a stored value is a miss."""
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    with dc.Cache(tmp_path / "cache") as cache:
        cache["k"] = 1
        (file,) = (tmp_path / "cache").glob("cache-*.sqlite")
        with closing(sqlite3.connect(file, isolation_level=None)) as connection:
            connection.execute("UPDATE entries SET value = ?", (pickle.dumps(Evil()),))
        assert cache.get("k", "miss") == "miss"
    assert not marker.exists()


def test_other_codecs(tmp_path: Path) -> None:
    """Values may be JSON, where they are such, or pickles that are signed."""
    pytest.importorskip("msgspec")
    with dc.Cache(tmp_path / "json", codec="json") as cache:
        cache.set("k", {"a": [1, 2]}, tag="t")
        assert cache.incr("n") == 1 and cache.memoize(name="f")(lambda: [1])() == [1]
        assert cache.pop("k", tag=True) == ({"a": [1, 2]}, "t") and len(cache) == 2
    with dc.Cache(tmp_path / "pickle", codec="pickle", signing_key="k" * 32) as cache:
        cache["p"] = Point
        assert cache["p"] is Point


# -- one key ----------------------------------------------------------------------------------------------------------


def test_files(cache: dc.Cache) -> None:
    """A file is read when it is stored, and its bytes come back as a file."""
    assert cache.set("f", BytesIO(b"abc"), read=True)
    assert cache["f"] == b"abc"
    with cache.get("f", read=True) as file, cache.read("f") as other:
        assert file.read() == other.read() == b"abc"
    cache["text"] = "abc"
    assert cache.get("text", read=True) == "abc"
    assert cache.get("missing", read=True) is None


def test_expiry_and_tag_come_with_the_value(cache: dc.Cache) -> None:
    """get and pop return the time and the tag if they are asked for them."""
    cache.set("k", 1, expire=1000, tag=("a", 5))
    value, expires, tag = cache.get("k", expire_time=True, tag=True)
    assert (value, tag) == (1, ("a", 5))
    _, again = cache.get("k", expire_time=True)
    assert abs(again - expires) < 60
    assert cache.touch("k") and cache.get("k", expire_time=True) == (1, None)
    assert cache.pop("k", tag=True) == (1, ("a", 5))
    assert cache.pop("k", "none", expire_time=True, tag=True) == ("none", None, None)


def test_expire_zero(cache: dc.Cache) -> None:
    """What expires at once is not there."""
    assert cache.set("k", 1, expire=0)
    assert "k" not in cache and len(cache) == 0 and not cache
    assert cache.add("k", 2, expire=-1) and cache.add("k", 3)
    assert cache.set("long", 1, expire=1e12) and cache.get("long", expire_time=True) == (1, None)
    assert cache.delete("long") and cache.touch("k", expire=0) and not cache.touch("k") and not cache.delete("k")


def test_incr_keeps_the_expiry_and_the_tag(cache: dc.Cache) -> None:
    cache.set("n", 1, expire=1000, tag="numbers")
    _, before = cache.get("n", expire_time=True)
    assert cache.incr("n", 5) == 6 and cache.decr("n") == 5
    value, after, tag = cache.get("n", expire_time=True, tag=True)
    assert (value, tag) == (5, "numbers") and abs(after - before) < 60
    assert cache.evict("numbers") == 1 and "n" not in cache
    with pytest.raises(KeyError):
        cache.incr("n", default=None)


def test_concurrent_changes(cache: dc.Cache) -> None:
    """No increment is lost, one of several adds succeeds, and one of several pops gets the value."""
    together(lambda: [cache.incr("n") for _ in range(10)])
    assert cache["n"] == 80
    assert sum(together(lambda: cache.add("once", 1))) == 1
    assert sorted(map(str, together(lambda: cache.pop("once")))) == ["1", *["None"] * 7]


def test_update(cache: dc.Cache) -> None:
    """update has the place of transact: it changes one entry in one step."""
    assert cache.update("k", lambda seen: [*seen, 1], [], expire=100, tag="t") == [1]
    together(lambda: cache.update("k", lambda seen: [*seen, 1], []))
    assert cache["k"] == [1] * 9


# -- all keys ---------------------------------------------------------------------------------------------------------


def test_evict(cache: dc.Cache) -> None:
    """evict counts what has the tag; a tag of another type is another tag."""
    for number in range(9):
        cache.set(number, number, tag=["1", 1, None][number % 3])
    assert cache.evict("1") == 3 and len(cache) == 6
    assert cache.evict(1) == 3 and len(cache) == 3
    assert cache.evict(None) == cache.evict("other") == 0
    assert cache.clear() == 3 and list(cache) == []


def test_evict_during_a_computation(cache: dc.Cache) -> None:
    """What is being computed for a tag when it is evicted is not stored."""
    begun, evicted = threading.Event(), threading.Event()

    @cache.memoize(tag="t")
    def slow() -> int:
        begun.set()
        assert evicted.wait(30)
        return 1

    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(slow)
        assert begun.wait(30)
        cache.evict("t")
        evicted.set()
        assert result.result(30) == 1
    assert slow.__cache_key__() not in cache  # type: ignore[attr-defined]


def test_size_limit(tmp_path: Path) -> None:
    """The directory stays within its limit. Without eviction, everything is kept."""
    with (
        dc.Cache(tmp_path / "small", size_limit=1 << 20) as small,
        dc.Cache(tmp_path / "all", size_limit=1 << 20, eviction_policy="none") as all_of_it,
    ):
        for number in range(40):
            small[number] = all_of_it[number] = bytes(100_000)
        assert small.volume() <= 1 << 20 and 0 < len(small) < 40 and 39 in small
        assert len(all_of_it) == 40 and all_of_it.volume() > 4_000_000
        assert small.cull() == small.expire() == 0 and small.check() == []
        del all_of_it[5]
        assert all_of_it.volume() < 40 * 100_000


# -- functions --------------------------------------------------------------------------------------------------------


def test_memoize(cache: dc.Cache) -> None:
    calls = []

    @cache.memoize(name="price", tag="t", ignore={0, "log"})
    def price(connection: Any, *items: Any, **options: Any) -> int:
        calls.append(items)
        return len(items)

    assert price(object(), 1, "a", b=2, a=1, log=3) == price(None, 1, "a", a=1, b=2, log=4) == 2
    assert price(None, 1.0, "a", a=1, b=2) == 2 and len(calls) == 2
    key = price.__cache_key__(None, 1, "a", b=2, a=1)  # type: ignore[attr-defined]
    assert key == ("price", 1, "a", None, "a", 1, "b", 2), "as diskcache makes it, for directories that are moved"
    assert cache[key] == 2 and key in list(cache)
    assert price.__wrapped__(None, 1) == 1  # type: ignore[attr-defined]
    assert cache.evict("t") == 2
    with pytest.raises(TypeError, match="parentheses"):
        cache.memoize(price)  # type: ignore[arg-type]


def test_none_as_an_argument(cache: dc.Cache) -> None:
    """diskcache separates positional from named arguments by None, so these calls have one key there."""
    f = cache.memoize()(lambda x, a=None, z=None: [x, a, z])
    assert [f(1, None, "z"), f(1, z=None)] == [[1, None, "z"], [1, None, None]]
    assert [f(1, a=None), f(1, None, "a")] == [[1, None, None], [1, None, "a"]]
    key = f.__cache_key__  # type: ignore[attr-defined]
    calls = [key(*args, **{"b": 5} if named else {}) for args in ARGUMENTS for named in (False, True)]
    assert len(set(calls)) == len(calls)


ARGUMENTS: list[tuple[Any, ...]] = [
    (), (1,), ("b",), ("b", 5), (None,), (None, None), (None, "b"), (None, "b", 5), (None, "b", None), (1, None),
    (1, None, "b", 5), (1, None, "b", 5, None), (None, 1), (1, None, None, "b", 5), (1, None, "b", 5, 3), (None, 0),
]  # fmt: skip


def test_memoize_zero(cache: dc.Cache) -> None:
    """With expire=0, results are looked up and not stored."""
    calls = iter(range(10))

    @cache.memoize(name="f", expire=0)
    def f() -> int:
        return next(calls)

    assert (f(), f()) == (0, 1)
    cache["f", None] = 50
    assert f() == 50


def test_concurrent_calls_compute_once(cache: dc.Cache) -> None:
    calls, entered = [], threading.Event()

    @cache.memoize()
    def slow() -> int:
        calls.append(1)
        entered.wait(0.2)
        return 7

    assert together(slow) == [7] * 8 and len(calls) == 1


def test_async_functions(cache: dc.Cache) -> None:
    calls = []

    @cache.memoize()
    async def price(item: str) -> int:
        calls.append(item)
        await asyncio.sleep(0)
        return len(item)

    async def main() -> list[int]:
        return await asyncio.gather(*[price("tea") for _ in range(5)])

    assert asyncio.run(main()) == [3] * 5 and calls == ["tea"]
    assert cache[price.__cache_key__("tea")] == 3  # type: ignore[attr-defined]


def test_memoize_stampede_has_keys_of_its_own(cache: dc.Cache) -> None:
    """Pairs that diskcache's memoize_stampede has stored under its keys are not taken for results."""

    @dc.memoize_stampede(cache, expire=100, name="f")
    def f(number: int) -> int:
        return number

    cache["f", 1, None] = (1, 0.5)
    assert f(1) == 1 and cache.get(f.__cache_key__(1)) == 1  # type: ignore[attr-defined]


# -- the cache as a whole ---------------------------------------------------------------------------------------------


def test_it_opens_again(tmp_path: Path) -> None:
    """A closed cache opens with the next call. The last block of several closes it."""
    cache = dc.Cache(str(tmp_path / "$NAME" / "cache").replace("$NAME", "n"))
    cache["k"] = 1
    cache.close()
    cache.close()
    assert cache["k"] == 1
    with cache as one, cache as two:
        below = one.stampede
        two["k"] = 2
        with cache:
            pass
        assert one["k"] == 2 and one.stampede is below
    with pytest.raises(stampede.StampedeError):
        below.set("k", 1)
    assert cache["k"] == 2
    cache.close()


def test_pickled(cache: dc.Cache) -> None:
    cache["k"] = 1
    other = pickle.loads(pickle.dumps(cache))
    assert other["k"] == 1 and other.directory == cache.directory
    other.close()


def test_processes(cache: dc.Cache) -> None:
    """Another process that was given the cache sees the same values."""
    cache["k"] = 1
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_add_one, args=(cache,))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and cache["k"] == 2


def _add_one(cache: dc.Cache) -> None:
    with cache:
        cache.incr("k")


def test_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """diskcache's settings are accepted, a Disk is refused, and a wrong name is an error."""
    made = dc.Cache(tmp_path / "a", 10, sqlite_mmap_size=1, tag_index=True, disk_min_file_size=5, statistics=1)
    assert (made.timeout, made.size_limit, repr(made)) == (10, 1 << 30, f"<Cache {tmp_path / 'a'}>")
    made.close()
    with pytest.raises(OptionError, match="codec="):
        dc.Cache(tmp_path / "b", disk=dict)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="eviction"):
        dc.Cache(tmp_path / "b", eviction="none")
    (tmp_path / "a" / "cache.db").touch()
    with caplog.at_level(logging.WARNING, "stampede"):
        dc.Cache(tmp_path / "a").close()
    assert "stampede diskcache import" in caplog.text


def test_left_out(cache: dc.Cache) -> None:
    """What is left out says what to use instead."""
    with pytest.raises(NotImplementedError, match=r"update\(key, function\)"), cache.transact():
        pass
    for call in (cache.push, cache.pull, cache.peekitem, lambda: cache.iterkeys(True), lambda: reversed(cache)):
        with pytest.raises(dc.Unsupported):
            call()


def test_fanout(tmp_path: Path) -> None:
    with dc.FanoutCache(tmp_path / "f", 4, 0.01, size_limit=1 << 21) as fanout, fanout.cache("a/b") as other:
        assert other.directory == str(tmp_path / "f" / "cache" / "a" / "b")
        fanout["k"] = 1
        assert "k" not in other and fanout.incr("k", retry=True) == 2
        again = pickle.loads(pickle.dumps(fanout))
        assert type(again) is dc.FanoutCache and again["k"] == 2 and again.size_limit == 1 << 21
        again.close()
        with pytest.raises(dc.Unsupported):
            fanout.deque("jobs")


# -- recipes ----------------------------------------------------------------------------------------------------------


def test_averager(cache: dc.Cache) -> None:
    """Numbers of several threads are all counted."""
    numbers = dc.Averager(cache, "latency", expire=100, tag="t")
    together(lambda: [*map(numbers.add, range(10))])
    assert numbers.get() == 4.5
    assert cache.evict("t") == 1 and numbers.get() is None


def test_lock(cache: dc.Cache) -> None:
    lock, other = dc.Lock(cache, ("report", 1)), dc.Lock(cache, ("report", 1), expire=60)
    with lock:
        assert other.locked() and not other.acquire(wait=0)
        with pytest.raises(LockLost):
            other.release()
    assert not lock.locked()
    cache.close()
    with other:  # its cache opens again
        assert lock.locked()


def test_rlock(cache: dc.Cache) -> None:
    """One thread takes it twice, also through two objects; another thread waits until both are released."""
    one, two, entered = dc.RLock(cache, "r"), dc.RLock(cache, "r"), threading.Event()

    def enter() -> None:
        with one:
            entered.set()

    thread = threading.Thread(target=enter)
    with one:
        with two, one:
            thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(30)
    thread.join(30)
    with pytest.raises(LockLost):
        two.release()


def test_semaphore(cache: dc.Cache) -> None:
    places = dc.BoundedSemaphore(cache, "s", value=2)
    with places:
        second = places.acquire()
        assert second and not places.acquire(wait=0)
        places.release()
    with pytest.raises(LockLost):
        places.release()


def test_barrier_and_throttle(cache: dc.Cache) -> None:
    inside, most = [], []

    @dc.barrier(cache, dc.Lock, name="alone")
    def alone() -> None:
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    together(alone)
    assert max(most) == 1

    @dc.throttle(cache, 2, 600, name="few")
    def few() -> int:
        return 1

    assert few() + few() == 2
    assert cache.stampede.limiter("few", max=2, per=600).ready_in() > 100
