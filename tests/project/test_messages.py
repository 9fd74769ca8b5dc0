"""Messages say what they are about, what happens now, and what to do about it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

from herd import logged_here
from proxy import Proxy
from servers import RedisServer, shared_redis

import stampede
from stampede import (
    Cache,
    ComputationFailed,
    EngineError,
    SettingsError,
    StampedeError,
    events,
    get_cache,
)
from stampede.metrics import log_events
from stampede.settings import Settings
from stampede.testing import isolated

ENGINES = ["memory", "disk", "redis"]


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    engine = request.param
    if engine == "redis":
        return shared_redis().url
    return f"disk://{tmp_path}" if engine == "disk" else "memory://"


engines = pytest.mark.parametrize("url", ENGINES, indirect=True)


class NotFound(Exception):
    pass


def test_an_unknown_cache_offers_each_name_once() -> None:
    """The error for an unknown cache lists each existing name once."""
    for caches in ({"default": {}}, {"default": {}, "reports": {}}, {}):
        with isolated(caches=caches), pytest.raises(SettingsError) as told:
            get_cache("xyz")
        names = str(told.value).partition("there are ")[2].split(", ")
        assert sorted(names) == sorted({"default", *caches})


def test_a_miss_that_is_not_believed_is_told_once(colour: str, server: RedisServer, caplog: Any) -> None:
    """An entry that is refused is reported once, in the log and in the count. Otherwise it would look like several."""
    one, other = Cache(server.url, signing_key="a"), Cache(server.url, signing_key="b")
    one.set("k", 1)
    with caplog.at_level(logging.WARNING, "stampede"):
        if colour == "sync":
            assert other.get_or_compute("k", lambda: 2) == 2
        else:
            assert asyncio.run(other.aget_or_compute("k", lambda: 2)) == 2
    assert [record.getMessage() for record in caplog.records if "was refused" in record.getMessage()] == [
        "the stored entry of 'k' was refused, and its value is computed again: "
        "the seal is broken: the bytes were changed, or are of another key or signing_key "
        "(more like this in the next 10 s are not written)"
    ]
    assert other.stats().bad_bytes == 1
    one.set("k", 3)  # another entry
    assert other.get("k") is None
    assert other.stats().bad_bytes == 2


def test_who_is_told_of_anothers_failure_is_led_to_raises() -> None:
    """A caller that gets the failure of another process is told to name the exception in `raises`."""
    told = str(ComputationFailed("row(5)", "shop.models.DoesNotExist", "no row 5"))
    assert "shop.models.DoesNotExist: no row 5" in told and "raises=shop.models.DoesNotExist" in told
    assert "raises=KeyError" in str(ComputationFailed("row(5)", "builtins.KeyError", "5"))
    for kind in ("", "stampede.errors.CodecError"):  # no class is known, or its exceptions cannot be kept
        assert "raises" not in str(ComputationFailed("row(5)", kind, "bytes"))


@engines
def test_an_exception_of_raises_is_no_warning(url: str, caplog: Any) -> None:
    """An exception named in `raises` is an answer, so it is not logged."""
    cache = Cache(url, raises=NotFound)

    def missing() -> int:
        raise NotFound("5")

    with caplog.at_level(logging.INFO, "stampede"):
        for _ in range(2):
            with pytest.raises(NotFound):
                cache.get_or_compute("row 5", missing)
    assert logged_here(caplog) == []


def test_a_function_tells_of_its_engines_outages(before: Callable[[Any], Proxy], server: RedisServer) -> None:
    """The stats of a function count the outages of its engine."""
    proxy = before(server)
    cache = Cache(f"redis://127.0.0.1:{proxy.port}")

    @cache.cached
    def f() -> int:
        return 1

    proxy.close()
    assert f() == 1
    assert f.stats().engine_downs == cache.stats().engine_downs == 1


def test_the_end_of_an_outage_is_told_as_loudly_as_its_beginning(caplog: Any) -> None:
    """The end of an outage is logged at the same level as its start. Otherwise readers of warnings would miss it."""
    with caplog.at_level(logging.WARNING, "stampede"):
        log_events(events.EngineDown("", "", "redis://x", EngineError("refused")))
        log_events(events.EngineUp("", "", "redis://x", 3.0))
    assert [record.getMessage().split()[2] for record in logged_here(caplog)] == ["down,", "back"]


@pytest.mark.parametrize(
    "url, here",
    [("memory", True), ("disk", True), ("redis", True), ("disk", False), ("redis", False)],
    indirect=["url"],
)
def test_a_value_that_was_invalidated_meanwhile_is_told_as_that(url: str, here: bool, caplog: Any) -> None:
    """If a key is invalidated during its computation, the log says so at debug level, and not as a warning."""
    cache = Cache(url)
    begun, changed = threading.Event(), threading.Event()

    def compute() -> int:
        begun.set()
        assert changed.wait(10)
        return 1

    with caplog.at_level(logging.DEBUG, "stampede"):
        caller = threading.Thread(target=cache.get_or_compute, args=("k", compute))
        caller.start()
        assert begun.wait(10)
        (cache if here else Cache(url)).invalidate("k")
        changed.set()
        caller.join()
    (told,) = [record for record in caplog.records if "only returned, not stored" in record.getMessage()]
    assert told.levelno == logging.DEBUG
    assert told.getMessage().endswith("the key was invalidated or set meanwhile")


def test_what_is_down_and_what_becomes_of_calls(caplog: Any) -> None:
    """The log says whether an engine is full, down in part or down, and whether calls go on or raise."""
    full, part, down = EngineError("OOM"), EngineError("slot 5"), EngineError("refused")
    full.partial = full.refused = part.partial = True
    with caplog.at_level(logging.WARNING, "stampede"):
        for error in (full, part, down):
            log_events(events.EngineDown("", "", "redis://x", error))
        log_events(events.EngineDown("", "", "redis://x", down, strict=True))
    assert [record.getMessage() for record in logged_here(caplog)] == [
        "redis://x refuses new values, calls go on without it: EngineError: OOM",
        "redis://x is down in part, calls go on without it: EngineError: slot 5",
        "redis://x is down, calls go on without it: EngineError: refused",
        "redis://x is down, and calls raise it: EngineError: refused",
    ]


def test_a_lock_that_is_not_had_tells_whose_it_is() -> None:
    """The error for a lock that is already held names the lock, and the wait that ran out."""
    with isolated():
        lock, other = get_cache().lock("nightly"), get_cache().lock("nightly", wait=0.01)
        with lock:
            told: list[BaseException] = []

            def enter() -> None:
                try:
                    with other:
                        pass
                except StampedeError as error:
                    told.append(error)

            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
            assert str(told[0]) == "the lock 'nightly' is already held, and wait ran out: 0.01 s"


def test_an_engine_that_is_down_tells_of_which_lock() -> None:
    """If the engine of a lock is down, the error names the lock."""
    with Cache("memory://", locks="redis://127.0.0.1:1") as cache:
        for held in (cache.lock("nightly"), cache.bulkhead("nightly"), cache.lock("nightly", wait=0)):
            with pytest.raises(EngineError, match=r"^the lock 'nightly' can't be taken: redis://127.0.0.1:1.*refused"):
                held.acquire()


def test_who_asks_for_its_own_key_is_told_what_to_do() -> None:
    """The error for a function that calls itself says what to do."""

    @stampede.cached
    def f(n: int) -> int:
        return f(n)

    with isolated(), pytest.raises(stampede.RecursiveComputation, match="__wrapped__"):
        f(1)


def test_an_exception_that_cannot_be_kept_tells_how_it_could_be(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning about an exception that cannot be kept says how to change its class."""
    monkeypatch.setattr("stampede.metrics.log._due", {})

    class Gone(Exception):
        __slots__ = ("code",)

        def __init__(self, code: int = 5) -> None:
            super().__init__(f"it is gone: {code}")
            self.code = code

    cache = Cache(raises=Gone)

    def gone() -> int:
        raise Gone

    with pytest.raises(Gone):
        cache.get_or_compute("k", gone)
    assert "super().__init__" in caplog.text


def test_who_has_no_settings_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If there are no settings, the error says so, and how to make some."""
    monkeypatch.chdir(tmp_path)
    with isolated():
        stampede.configure(Settings())
        with pytest.raises(SettingsError, match=r"^there are no settings.*configure\(caches="):
            get_cache("reports")


@pytest.mark.parametrize(
    "verb, remedy",
    [("invalidate_all", "cache.invalidate_many(user.cache.keys('user:'))"), ("expire_all", "cache.expire_many(")],
)
def test_who_names_his_keys_is_told_how_to_invalidate_them(verb: str, remedy: str) -> None:
    """If a function names its own keys, the error of `invalidate_all` and `expire_all` says what to use instead."""
    with isolated():

        @stampede.cached(key="user:{id}")
        def user(id: int) -> int:
            return id

        assert [user(1), user(2)] == [1, 2]
        with pytest.raises(stampede.OptionError) as told:
            getattr(user, verb)()
        assert remedy in str(told.value)
        assert user.cache.invalidate_many(user.cache.keys("user:")) == 2


def test_a_key_of_a_dict_is_named_as_one() -> None:
    """The error for a key of a dict calls it a key, and names its type."""
    with isolated(codec="json"), pytest.raises(stampede.CodecError, match=r"^its key, of type int, would .* as str:"):
        get_cache().set("k", {1: 2})


def test_what_a_client_leads_to_is_named(server: RedisServer) -> None:
    """A cache that was made with a client is named after the client's server."""
    redis = pytest.importorskip("redis")
    cache = Cache(redis.Redis(port=server.port, password="secret"))
    assert cache.name == f"redis://localhost:{server.port}/0"
    assert cache.engine.called == cache.name
