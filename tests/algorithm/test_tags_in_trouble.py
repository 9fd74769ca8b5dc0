"""Tags in rare cases: values that are not stored, engines that fail or evict, and options that change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from herd import Herd, until

from stampede import Cache, EngineError, OptionError, current
from stampede.engines.disk.rows import _number_of_scope
from stampede.engines.disk.stamps import MARK
from stampede.engines.memory import MemoryEngine
from stampede.model.breaker import Breaker
from stampede.model.tags import key_of_tag, name_of_tag
from stampede.runtime.colour import run_blocking


@pytest.fixture(params=["memory", "disk"])
def cache(request: pytest.FixtureRequest, memory_path: Path) -> Any:
    url = "memory://" if request.param == "memory" else f"disk://{memory_path}/d"
    with Cache(url, ttl=600, early=0) as cache:
        yield cache


def is_followed(cache: Cache) -> bool:
    return any(flight.callers > 1 for flight in list(cache._core.flights._flights.values()))


@pytest.mark.parametrize("how", ["dont_keep", "cache_if", "left out"])
def test_what_is_not_stored_is_only_for_earlier_callers(cache: Cache, how: str) -> None:
    """A caller that comes after an invalidation gets no value that was computed before, also if it is not stored."""
    began, goes_on, source = threading.Event(), threading.Event(), ["old"]

    def compute() -> str:
        value = source[0]
        if how == "dont_keep":
            current().dont_keep()
        if not began.is_set():
            began.set()
            assert goes_on.wait(10)
        return value

    options: dict[str, Any] = {"tags": ["x"], **({"cache_if": lambda value: False} if how == "cache_if" else {})}

    def ask() -> Any:
        if how == "left out":
            return cache.get_or_compute_many(["k"], lambda keys: {} if compute() == "old" else {"k": "new"}, **options)
        return cache.get_or_compute("k", compute, **options)

    first = Herd(ask)
    assert began.wait(10)
    source[0] = "new"
    cache.invalidate_tags("x")
    later = Herd(ask)
    until(lambda: is_followed(cache) or not later.waiting)
    goes_on.set()
    assert first.join() == [{} if how == "left out" else "old"]
    assert later.join() == [{"k": "new"} if how == "left out" else "new"]


def test_a_tag_that_was_invalidated_and_then_evicted() -> None:
    """If this process invalidates a tag while a value is computed, the value is not stored, even if the tag is evicted
    before the computation names it."""
    with Cache("memory://?entries=20", ttl=600, early=0) as cache:

        def compute() -> str:
            cache.invalidate_tags("x")
            run_blocking(cache.engine.blocking.store.invalidate(key_of_tag(name_of_tag("", "x"))))
            current().tag("x")
            return "old"

        assert cache.get_or_compute("k", compute) == "old"
        assert cache.get("k") is None


def test_an_update_has_its_own_tags(cache: Cache) -> None:
    """`update` stores the tags that it is given, also if its function returns the object that it was given."""
    cache.set("flag", True, tags=["a"])
    cache.update("flag", lambda value: value, tags=["b"])
    cache.invalidate_tags("a")
    assert cache.get("flag") is True
    cache.invalidate_tags("b")
    assert cache.get("flag") is None


def test_tags_last_as_long_as_a_ttl_that_is_computed(cache: Cache) -> None:
    """Also if `ttl` is a function of the value, tags are stored as long as what carries them."""
    week = 7 * 86_400.0
    cache.add("k", 1, ttl=lambda value: week, tags=["t"])
    (entry,) = run_blocking(cache.engine.blocking.store.get([key_of_tag(name_of_tag("", "t"))]))
    assert entry is not None
    assert entry.keep > week


@pytest.mark.parametrize("tags", ["x", b"x", iter(["x"]), [""], ["x" * 257], [1], [["x"]], map(str, range(129)), None])
def test_what_is_no_list_of_tags(cache: Cache, tags: Any) -> None:
    """Tags that are no list of strings are an error that says so. A generator would be empty when it is read again."""
    with pytest.raises(OptionError, match="tags"):
        cache.set("k", 1, tags=tags)
    with pytest.raises(OptionError, match="tags"):
        cache.cached(tags=tags)(lambda: 1)


def test_at_most_128_tags(cache: Cache) -> None:
    """An entry has at most 128 tags, those of its arguments and of its computation together."""
    many = [f"tag {number}" for number in range(128)]
    cache.set("k", 1, tags=many)
    assert cache.get("k") == 1
    with pytest.raises(OptionError, match="129"):
        cache.set("k", 1, tags=[*many, "one more"])
    cache.invalidate_tags(*map(str, range(500)))  # any number can be invalidated at once
    with pytest.raises(OptionError, match="129"):
        cache.get_or_compute("other", lambda: current().tag("one more"), tags=many)


class _Fails(MemoryEngine):
    """A shared engine whose store fails on demand."""

    def __init__(self) -> None:
        super().__init__(sealed=True)
        self.fails = self.failed = False
        for side in (self.blocking, self.suspending):
            for verb in ("get", "look_too", "set", "replace"):
                setattr(side.store, verb, self._failing(getattr(side.store, verb)))

    def _failing(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        async def failing(*args: Any) -> Any:
            if self.fails:
                self.failed = True
                raise EngineError("it fails")
            return await verb(*args)

        return failing


def test_tags_that_cannot_be_read_after_the_fill_prove_nothing() -> None:
    """If the last look at a value's tags fails, callers that came after the claim compute it again."""
    engine, began, goes_on, source = _Fails(), threading.Event(), threading.Event(), ["old"]
    claims: Any = engine.blocking.claims
    fill = claims.fill

    async def fill_then_fail(*args: Any) -> Any:
        stored = await fill(*args)
        engine.fails = source[0] == "new" and not engine.failed
        return stored

    def compute() -> str:
        value = source[0]
        if not began.is_set():
            began.set()
            assert goes_on.wait(10)
        engine.fails = False
        return value

    claims.fill = fill_then_fail
    with Cache(engine=engine, ttl=600, early=0) as cache:
        first = Herd(lambda: cache.get_or_compute("k", compute, tags=["x"]))
        assert began.wait(10)
        source[0] = "new"
        cache.invalidate_tags("x")
        later = Herd(lambda: cache.get_or_compute("k", compute, tags=["x"]))
        until(lambda: is_followed(cache) or not later.waiting)
        goes_on.set()
        assert first.join() == ["old"]
        assert later.join() == ["new"]
    assert engine.failed


def test_a_set_that_fails_ends_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a `set` with tags fails, this process does not go on with the value that was to be replaced."""
    monkeypatch.setattr("stampede.outages.outage.Breaker", lambda: Breaker(0.1))
    engine = _Fails()
    with Cache(engine=engine, ttl=600, early=0, local={"ttl": 60}) as cache:
        for tags in ([], ["t"]):
            cache.get_or_compute("k", lambda: "old")
            engine.fails = True
            with pytest.raises(EngineError):
                cache.set("k", "new", tags=tags)
            assert cache.get("k") is None
            engine.fails = False
            until(lambda: not cache.down or cache.get("k") is not None)


def test_postponed_invalidations_of_tags_are_told_apart() -> None:
    """With `on_error="later"`, each invalidation is repeated, also if two look alike when they are written down."""
    engine = _Fails()
    with Cache(engine=engine, ttl=600, on_error="later") as cache:
        cache.set("one", 1, tags=["a, b"])
        cache.set("two", 2, tags=["a"])
        engine.fails = True
        cache.invalidate_tags("a, b")
        cache.invalidate_tags("a", "b")
        assert cache.postponed == 2
        engine.fails = False
        until(lambda: cache.postponed == 0)
        assert cache.get_many(["one", "two"]) == {}


def test_a_mark_of_a_killed_writer_is_replaced(memory_path: Path) -> None:
    """If a process is killed inside `invalidate_all`, the next writer repairs what it has left on the disk."""
    with Cache(f"disk://{memory_path}/d", ttl=600) as cache:
        function = cache.cached(version=1)(lambda: 1)
        assert function() == 1
        rows: Any = cache.engine._rows  # type: ignore[attr-defined]
        scope = function.key().rpartition(":")[0]

        class Killed(BaseException):
            pass

        with suppress(Killed), rows.database.writing() as write:
            rows._change_scope(write, scope)
            write.settle = lambda: None  # as if the process had ended here
            raise Killed
        stamps = rows.database.opened().stamps
        slot = stamps.slot(_number_of_scope(scope))
        assert stamps.words[slot] == MARK
        cache.set("other", 1)
        assert stamps.words[slot] != MARK
        assert function() == 1
