"""`stampede.current()`: what a computation can learn about its own entry, and decide about it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from herd import until

import stampede
from stampede import Cache, NoComputation, OptionError, cached, current
from stampede.algorithm.context import Context
from stampede.testing import disabled, isolated

MADE = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)


@pytest.fixture(params=["memory", "sealed", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    """A cache that stores objects, one that stores bytes, and one on disk."""
    urls = {"memory": "memory://", "sealed": "memory://?codec=sealed", "disk": f"disk://{tmp_path}"}
    codec: Any = {"codec": "sealed"} if request.param == "sealed" else {}
    with Cache(urls[request.param].partition("?")[0], ttl=60, stale="1d", early=0, **codec) as made:
        yield made


def anew(cache: Cache, key: str, function: Callable[[], Any]) -> Any:
    """Compute the key anew, whatever is stored."""
    with cache.refreshing():
        return cache.get_or_compute(key, function)


class Origin:
    """An origin with a version: it answers with its body, or says that the caller's version is still right."""

    def __init__(self) -> None:
        self.version = "v1"
        self.sent = 0
        self.seen: list[tuple[str, str | None]] = []
        self.raises = False

    def ask(self) -> str:
        context = current()
        self.seen.append((context.reason, context.etag))
        if context.stale is not None and context.etag == self.version:
            if self.raises:
                raise context.not_modified()
            return context.not_modified()  # type: ignore[no-any-return]
        self.sent += 1
        context.etag, context.modified = self.version, MADE
        return f"body of {self.version}"


def test_outside_a_computation() -> None:
    with pytest.raises(NoComputation, match="outside a cached function"):
        current()


def test_the_key_and_the_reason(cache: Cache) -> None:
    """Each reason to compute is named, also if the value is refreshed or has been made stale."""
    seen: list[tuple[str, str, Any]] = []

    def note() -> int:
        context = current()
        seen.append((context.key, context.reason, context.stale and context.stale.value))
        return len(seen)

    cache.get_or_compute("k", note)
    cache.expire("k")
    cache.get_or_compute("k", note)
    anew(cache, "k", note)
    assert seen == [("k", "missing", None), ("k", "stale", 1), ("k", "refresh", 2)]


@pytest.mark.parametrize("raises", [False, True])
def test_a_value_that_is_not_modified_starts_a_new_ttl(cache: Cache, raises: bool) -> None:
    """The stored value stays, with its etag, its date and the cost of the computation that made it."""
    origin = Origin()
    origin.raises = raises
    assert cache.get_or_compute("k", origin.ask) == "body of v1"
    first = cache.peek("k")
    cache.expire("k")
    assert cache.get_or_compute("k", origin.ask) == "body of v1"
    again = cache.peek("k")
    assert first is not None and again is not None
    assert (again.value, again.etag, again.modified, again.cost) == ("body of v1", "v1", MADE, first.cost)
    assert again.id != first.id and again.fresh > 30
    assert origin.sent == 1 and origin.seen == [("missing", None), ("stale", "v1")]
    origin.version = "v2"
    assert anew(cache, "k", origin.ask) == "body of v2"
    changed = cache.peek("k")
    assert changed is not None and changed.etag == "v2"


def test_async_functions_have_it_too(cache: Cache) -> None:
    origin = Origin()

    async def ask() -> str:
        await asyncio.sleep(0)
        return origin.ask()

    async def main() -> None:
        assert await cache.aget_or_compute("k", ask) == "body of v1"
        await cache.aexpire("k")
        assert await cache.aget_or_compute("k", ask) == "body of v1"
        with pytest.raises(NoComputation):
            current()

    asyncio.run(main())
    assert origin.sent == 1


def test_an_etag_of_the_old_value_does_not_pass_to_a_new_one(cache: Cache) -> None:
    """A function that sets no etag stores none, although it sees the one that is stored."""
    cache.get_or_compute("k", Origin().ask)
    anew(cache, "k", lambda: current().etag)
    entry = cache.peek("k")
    assert entry is not None and (entry.value, entry.etag, entry.modified) == ("v1", None, None)


def test_nothing_is_stored_that_could_be_kept(cache: Cache) -> None:
    """`not_modified` without a stored value is an error of the function, and nothing is stored."""
    with pytest.raises(NoComputation, match="nothing is stored"):
        cache.get_or_compute("k", lambda: current().not_modified())
    assert cache.peek("k") is None


def test_what_was_invalidated_meanwhile_is_not_kept(cache: Cache) -> None:
    """`invalidate` wins over a computation that says that the stored value is still right."""
    cache.set("k", "old", ttl=60)

    def ask() -> str:
        context = current()
        cache.invalidate("k")
        return context.not_modified()  # type: ignore[no-any-return]

    assert anew(cache, "k", ask) == "old"  # for this caller, which began before
    assert cache.peek("k") is None


def test_a_function_returns_what_another_computation_returned(cache: Cache) -> None:
    """The object of `not_modified` belongs to one computation: it must not confirm the value of another key."""
    cache.set("inner", 1)
    cache.set("outer", 2)
    given: list[Any] = []

    def inner() -> int:
        given.append(current().not_modified())
        return given[0]  # type: ignore[no-any-return]

    assert anew(cache, "inner", inner) == 1
    with pytest.raises(NoComputation, match="another computation, that of 'inner'"):
        anew(cache, "outer", lambda: given[0])


def test_the_innermost_computation_counts(cache: Cache) -> None:
    keys: list[str] = []

    def outer() -> int:
        cache.get_or_compute("inner", lambda: keys.append(current().key))
        keys.append(current().key)
        return 1

    cache.get_or_compute("outer", outer)
    assert keys == ["inner", "outer"]


def test_a_thread_that_outlives_the_computation_is_outside(cache: Cache) -> None:
    """A task or thread that the computation leaves running has a copy of its context. The computation has ended."""
    contexts: list[Callable[[], Any]] = []

    def ask() -> int:
        from contextvars import copy_context

        contexts.append(copy_context().run)  # type: ignore[arg-type]
        return 1

    cache.get_or_compute("k", ask)
    with pytest.raises(NoComputation):
        contexts[0](current)


def test_other_threads_are_outside(cache: Cache) -> None:
    seen: list[type[BaseException]] = []

    def other() -> None:
        try:
            current()
        except NoComputation as error:
            seen.append(type(error))

    def ask() -> int:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return 1

    cache.get_or_compute("k", ask)
    assert seen == [NoComputation]


@pytest.mark.parametrize("ttl, seconds", [(5, 5.0), ("1m", 60.0), (timedelta(hours=1), 3600.0)])
def test_the_ttl_of_one_value(cache: Cache, ttl: Any, seconds: float) -> None:
    def ask() -> int:
        current().ttl = ttl
        assert current().ttl == seconds
        return 1

    cache.get_or_compute("k", ask, ttl=9)
    entry = cache.peek("k")
    assert entry is not None and entry.ttl == seconds


def test_a_new_ttl_of_a_value_that_is_not_modified(cache: Cache) -> None:
    """The new ttl may be longer than that with which the value was stored."""
    cache.get_or_compute("k", Origin().ask, ttl=1)

    def ask() -> str:
        current().ttl = 500
        return current().not_modified()  # type: ignore[no-any-return]

    anew(cache, "k", ask)
    entry = cache.peek("k")
    assert entry is not None and entry.ttl == 500 and entry.fresh > 400 and entry.etag == "v1"


def test_no_ttl_of_its_own(cache: Cache) -> None:
    """None means the ttl of the options, also after another one was set."""

    def ask() -> int:
        current().ttl = 5
        current().ttl = None
        return 1

    cache.get_or_compute("k", ask, ttl=9)
    entry = cache.peek("k")
    assert entry is not None and entry.ttl == 9


def test_the_stale_time_of_one_value(cache: Cache) -> None:
    """`stale_for` replaces the option `stale`, also of a value that is not modified, and also if this caller refuses
    stale values."""

    def ask() -> Any:
        context = current()
        context.stale_for = "1h" if context.stale is None else 7
        assert context.stale_for == (3600 if context.stale is None else 7)
        return 1 if context.stale is None else context.not_modified()

    cache.get_or_compute("k", ask, ttl=9, stale=0)
    entry = cache.peek("k")
    assert entry is not None and 3600 < entry.keep <= 3609
    anew(cache, "k", ask)
    entry = cache.peek("k")
    assert entry is not None and entry.ttl < entry.keep <= entry.ttl + 7


def test_no_stale_time_of_its_own(cache: Cache) -> None:
    """None means the `stale` of the options, also after another one was set."""

    def ask() -> int:
        current().stale_for = 5
        current().stale_for = None
        return 1

    cache.get_or_compute("k", ask, ttl=9, stale=90)
    entry = cache.peek("k")
    assert entry is not None and 90 < entry.keep <= 99
    with pytest.raises(OptionError, match=r"stale_for .* is -1"):
        Context("k").stale_for = -1


def test_touch_keeps_the_etag(cache: Cache) -> None:
    cache.get_or_compute("k", Origin().ask)
    assert cache.touch("k", ttl=90)
    entry = cache.peek("k")
    assert entry is not None and (entry.ttl, entry.etag, entry.modified) == (90, "v1", MADE)


def test_a_jitter_does_not_change_the_stored_ttl(cache: Cache) -> None:
    """A ttl that the jitter could have given stays, so that the stored bytes stay, too."""
    origin = Origin()
    cache.get_or_compute("k", origin.ask, jitter=0.5)
    first = cache.peek("k")
    cache.expire("k")
    cache.get_or_compute("k", origin.ask, jitter=0.5)
    again = cache.peek("k")
    assert first is not None and again is not None and again.ttl == first.ttl and again.id != first.id


def test_dont_keep(cache: Cache) -> None:
    """The value is given to the callers that wait for it, and is not stored."""

    def ask() -> int:
        current().dont_keep()
        return 1

    assert cache.get_or_compute("k", ask) == 1
    assert cache.peek("k") is None


@pytest.mark.parametrize(
    "name, value, why",
    [
        ("etag", 3, "etag is 3: give a string"),
        ("etag", "e" * 1025, "at most 1024 characters"),
        ("modified", datetime(2026, 1, 1), "give a datetime with a time zone"),
        ("modified", "today", "give a datetime"),
        ("ttl", -1, "ttl .* must be at least 0"),
    ],
)
def test_wrong_values_are_refused(name: str, value: Any, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        setattr(Context("k"), name, value)


def test_a_date_of_another_time_zone_is_stored_in_utc(cache: Cache) -> None:
    def ask() -> int:
        current().modified = MADE.astimezone(timezone(timedelta(hours=3)))
        return 1

    cache.get_or_compute("k", ask)
    entry = cache.peek("k")
    assert entry is not None and entry.modified == MADE and entry.modified.tzinfo is UTC


def test_many_keys_have_a_context_each(cache: Cache) -> None:
    """Some of the keys may be unmodified, and others new."""

    @cache.cached.many(ttl=60, stale=60)
    def bodies(names: list[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in names:
            context = current()[name]
            if context.etag is not None:
                found[name] = context.not_modified()
            else:
                context.etag, context.ttl, found[name] = name.upper(), 7, f"body of {name}"
        with pytest.raises(AttributeError, match=r"current\(\)\[key\].etag"):
            _ = current().etag
        with pytest.raises(AttributeError):
            current().etag = "for all"
        return found

    assert bodies(["a", "b"]) == {"a": "body of a", "b": "body of b"}
    first = bodies.peek("a")
    bodies.expire("a")
    assert bodies(["a", "c"]) == {"a": "body of a", "c": "body of c"}
    again = bodies.peek("a")
    assert first is not None and again is not None and (again.etag, again.id != first.id) == ("A", True)
    bodies.refresh("b")
    assert [entry.ttl for name in "bc" if (entry := bodies.peek(name))] == [60, 7]


def test_one_key_has_no_others(cache: Cache) -> None:
    with pytest.raises(TypeError, match="has one key"):
        cache.get_or_compute("k", lambda: current()["k"])


def test_without_a_cache_it_does_nothing() -> None:
    """In `disabled` and `bypassed` blocks the function works as it does on its first call."""
    with isolated():

        @cached(ttl=60)
        def page() -> str:
            current().etag, current().ttl = "v1", 5
            current().dont_keep()
            return str(current().stale)

        @cached.many(ttl=60)
        def pages(ids: list[int]) -> dict[int, str]:
            return {id: current()[id].reason for id in ids}

        @cached(ttl=60)
        async def later() -> str:
            return current().reason

        for block in (disabled, stampede.bypassed):
            with block():
                assert (page(), pages([1]), asyncio.run(later())) == ("None", {1: "missing"}, "missing")
                assert stampede.get_cache().get_or_compute("k", lambda: current().key) == "k"


def test_a_bypassed_call_inside_a_computation_has_a_context_of_its_own(cache: Cache) -> None:
    """What the inner function decides must not concern the outer one's value."""

    def outer() -> int:
        with cache.bypassed():
            cache.get_or_compute("inner", lambda: current().dont_keep())
        return 1

    cache.get_or_compute("outer", outer)
    assert cache.peek("outer") is not None


def test_a_stored_exception_is_not_shown() -> None:
    """A stored exception of `raises` is no value that could be kept."""
    with Cache(ttl=60, stale=60, raises=LookupError) as cache:

        def fails() -> int:
            raise LookupError("k")

        with pytest.raises(LookupError):
            cache.get_or_compute("k", fails)
        assert anew(cache, "k", lambda: current().stale) is None


def test_early_refresh_is_told(cache: Cache) -> None:
    """Shortly before the end of a value, the computation sees the value that is still fresh."""
    seen: list[tuple[str, bool]] = []

    @cache.cached(ttl=0.6, early=1.0)
    def slow() -> int:
        context = current()
        seen.append((context.reason, context.stale is not None and context.stale.fresh > 0))
        time.sleep(0.05)  # the refresh begins so much earlier that the new value is ready in time
        return 1

    def is_early() -> bool:
        slow()
        return ("early", True) in seen

    until(is_early)
    assert seen[0] == ("missing", False)


SIZE = 200_000


@pytest.mark.redis
@pytest.mark.parametrize("engine", ["redis", "postgres"])
def test_a_confirmed_value_is_not_sent_again(engine: str, before: Callable[[Any], Any]) -> None:
    """A value that is not modified stays in the engine: only its new times are sent, unless its etag changes."""
    if engine == "redis":
        pytest.importorskip("redis")
        from servers import shared_redis

        server: Any = shared_redis()
        server.cli("FLUSHALL")
        proxy = before(server)
        url = proxy.url
    else:
        pytest.importorskip("psycopg")
        from postgres_server import prepared_postgres

        server = prepared_postgres()
        proxy = before(server)
        url = f"postgres://root@127.0.0.1:{proxy.port}/postgres?sslmode=disable"
    sent: list[int] = []

    def counted(piece: bytes) -> bytes:
        sent.append(len(piece))
        return piece

    proxy.forge = counted
    value = "x" * SIZE
    versions = iter(["v1", "v1", "v2"])

    def ask() -> str:
        context, version = current(), next(versions)
        if context.stale is None:
            context.etag = version
            return value
        if version != context.etag:
            context.etag = version
        return context.not_modified()  # type: ignore[no-any-return]

    def bytes_of(work: Callable[[], object]) -> int:
        sent.clear()
        work()
        return sum(sent)

    with Cache(url, ttl=60, stale=60, early=0) as cache:
        assert bytes_of(lambda: cache.get_or_compute("k", ask)) > SIZE
        first = cache.peek("k")
        cache.expire("k")
        assert bytes_of(lambda: cache.get_or_compute("k", ask)) < 5000
        again = cache.peek("k")
        assert first is not None and again is not None and again.id != first.id
        assert (again.value, again.etag, again.fresh > 30) == (value, "v1", True)
        cache.expire("k")
        assert bytes_of(lambda: cache.get_or_compute("k", ask)) > SIZE
        changed = cache.peek("k")
        assert changed is not None and (changed.value, changed.etag) == (value, "v2")
