"""`on_error="later"`: an invalidation that the engine could not make is repeated until the engine has made it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("redis")

from herd import until
from proxy import Proxy
from servers import RedisServer, free_port

from stampede import Cache, EngineError, OptionError, events
from stampede.outages import postponed
from stampede.outages.postponed import Postponed


@pytest.fixture
def link(server: RedisServer) -> Iterator[Proxy]:
    """A connection to Redis that can be cut."""
    proxy = Proxy(server.port)
    try:
        yield proxy
    finally:
        proxy.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postponed, "PAUSE", 0.05)


def down(link: Proxy) -> None:
    """End all connections, and let no new one reach the server."""
    link.target = free_port()
    link.cut()


def up(link: Proxy, server: RedisServer) -> None:
    link.target = server.port


Change = Callable[..., Any]

CHANGES: dict[str, Change] = {
    "invalidate": lambda cache, **how: cache.invalidate("k", **how),
    "ainvalidate": lambda cache, **how: asyncio.run(cache.ainvalidate("k", **how)),
    "invalidate_many": lambda cache, **how: cache.invalidate_many(["k", "other"], **how),
    "expire": lambda cache, **how: cache.expire("k", **how),
    "expire_many": lambda cache, **how: cache.expire_many(["k", "other"], **how),
    "clear": lambda cache, **how: cache.clear(**how),
    "expire_all": lambda cache, **how: cache.expire_all(**how),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_is_made_when_the_engine_is_back(
    server: RedisServer, link: Proxy, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    """No error is raised while the engine is down. The value is gone everywhere when the engine is back."""
    told: list[events.Event] = []
    with Cache(link.url, ttl=60, observers=[told.append]) as cache, Cache(server.url, ttl=60) as far:
        cache.set("k", "old", ttl=60)
        down(link)
        with pytest.raises(EngineError):
            change(cache)
        assert not change(cache, on_error="later")
        assert cache.postponed > 0 and far.get("k") == "old"
        up(link, server)
        with caplog.at_level(logging.WARNING, "stampede"):
            until(lambda: far.get("k") is None)
            until(lambda: cache.postponed == 0)
            until(lambda: "postponed invalidations" in caplog.text)
    (event, *_) = [each for each in told if isinstance(each, events.Postponed)]
    assert isinstance(event.error, EngineError) and event.verb in ("invalidate", "expire", "clear", "expire_all")
    assert cache.stats().postponed >= 1


def test_a_cache_can_have_it_for_all(server: RedisServer, link: Proxy) -> None:
    """The option of the cache holds for every invalidation, unless a call says otherwise."""
    with Cache(link.url, ttl=60, on_error="later") as cache, Cache(server.url, ttl=60) as far:

        @cache.cached(ttl=60)
        def price(item: str) -> int:
            return len(item)

        price("tea")
        cache.set("k", 1)
        down(link)
        assert not price.invalidate("tea")
        price.invalidate_all()
        assert not cache.invalidate("k")
        with pytest.raises(EngineError):
            cache.invalidate("k", on_error="raise")
        with pytest.raises(EngineError):
            cache.set("k", 2)  # a value is never stored later
        up(link, server)
        until(lambda: cache.postponed == 0)
        assert far.get("k") is None and price.peek("tea") is None


def test_after_a_commit_it_is_repeated_instead_of_logged(
    server: RedisServer, link: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    hooks: list[Callable[[], object]] = []
    with Cache(link.url, ttl=60) as cache:

        @cache.cached(ttl=60)
        def price(item: str) -> int:
            return len(item)

        price("tea")
        price.invalidate("tea", via=hooks.append, on_error="later")
        down(link)
        hooks[0]()
        assert "was not invalidated" not in caplog.text
        up(link, server)
        until(lambda: cache.postponed == 0)
        assert price.peek("tea") is None


def test_an_argument_of_the_function_is_not_taken_for_the_option() -> None:
    with Cache() as cache:

        @cache.cached(ttl=60)
        def handler(on_error: str) -> str:
            return on_error

        handler(on_error="later")
        assert handler.invalidate(on_error="later") is True


def test_a_wrong_option_is_refused() -> None:
    with Cache() as cache:
        for change in CHANGES.values():
            with pytest.raises(OptionError, match="on_error is 'latr': give 'raise' or 'later'"):
                change(cache, on_error="latr")


def test_what_waits_is_lost_when_the_cache_is_closed(
    server: RedisServer, link: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    with Cache(link.url, ttl=60) as cache:
        down(link)
        cache.invalidate("k", on_error="later")
    assert "closed with 1 postponed invalidations" in caplog.text


def test_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is invalidated again counts once. Beyond the limit, nothing is remembered."""
    monkeypatch.setattr(postponed, "MOST", 2)
    waiting = Postponed("engine")
    fails = threading.Event()

    def again() -> None:
        if not fails.is_set():
            raise EngineError("down")

    assert [waiting.add(name, again) for name in ("a", "b", "a", "c")] == [True, True, True, False]
    assert len(waiting) == 2
    fails.set()
    until(lambda: len(waiting) == 0)
    waiting.close()


def test_a_value_that_is_set_meanwhile_stays(server: RedisServer, link: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A postponed invalidation is older than a value that is stored after it."""
    monkeypatch.setattr(postponed, "PAUSE", 60.0)
    with Cache(link.url, ttl=60) as cache:
        cache.set("k", "old")
        down(link)
        cache.invalidate("k", on_error="later")
        assert cache.postponed == 1
        up(link, server)
        until(lambda: stored(cache, "new"))
        assert cache.postponed == 0 and cache.get("k") == "new"


def stored(cache: Cache, value: str) -> bool:
    try:
        cache.set("k", value)
    except EngineError:
        return False
    return True


def test_one_that_fails_keeps_no_other_waiting() -> None:
    """If a part of an engine is down, invalidations in the other parts are made."""
    waiting, made = Postponed("engine"), threading.Event()

    def fails() -> None:
        error = EngineError("one of the servers is down")
        error.partial = True
        raise error

    try:
        assert waiting.add("first", fails) and waiting.add("second", made.set)
        assert made.wait(20)
        until(lambda: len(waiting) == 1)
    finally:
        waiting.close()


def test_what_this_process_computes_meanwhile_stays_until_it_is_made(link: Proxy) -> None:
    """While the engine is down, attempts that fail must not drop what this process has computed since."""
    with Cache(link.url, ttl=60) as cache:
        cache.set("k", "old")
        down(link)
        cache.clear(on_error="later")
        computed: list[int] = []
        until(lambda: cache.get_or_compute("k", lambda: computed.append(1) or "new") == "new")  # type: ignore[func-returns-value]
        attempts = threading.Event()
        before = cache.stats().invalidated
        attempts.wait(0.5)  # ten attempts
        assert cache.get_or_compute("k", lambda: computed.append(1) or "newer") == "new"  # type: ignore[func-returns-value]
        assert cache.stats().invalidated == before


def test_ids_of_a_function_of_many(server: RedisServer, link: Proxy) -> None:
    with Cache(link.url, ttl=60) as cache:

        @cache.cached.many(ttl=60)
        def lengths(words: list[str]) -> dict[str, int]:
            return {word: len(word) for word in words}

        lengths(["tea", "milk"])
        down(link)
        assert lengths.invalidate_many(["tea", "milk"], on_error="later") == 0
        assert cache.postponed == 2
        up(link, server)
        until(lambda: cache.postponed == 0)
        assert lengths.peek("tea") is None
