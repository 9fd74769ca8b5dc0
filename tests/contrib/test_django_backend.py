"""The backend for Django's `CACHES`. Django's own tests of backends run over it in `make suites`."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

pytest.importorskip("django")
pytest.importorskip("redis")

import django_project  # noqa: F401
from django.core.cache import InvalidCacheBackendError, cache, caches
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError
from django.test import override_settings
from django.utils.functional import lazystr
from django.utils.safestring import SafeString, mark_safe
from herd import Herd
from servers import shared_redis

from stampede import OptionError
from stampede.contrib.django import StampedeCache
from stampede.contrib.django.checks import check_caches

BACKEND = "stampede.contrib.django.StampedeCache"


def settings_of(location: str, **params: Any) -> dict[str, Any]:
    return {"default": {"BACKEND": BACKEND, "LOCATION": location, **params}}


LOCATIONS: dict[str, Callable[[Path], str]] = {
    "memory": lambda path: f"memory://?entries={hash(path) % 10_000 + 10_000}",
    "redis": lambda path: shared_redis().url,
}


@pytest.fixture(params=LOCATIONS)
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a cache that is empty, and configured."""
    found = LOCATIONS[request.param](tmp_path)
    with override_settings(CACHES=settings_of(found)):
        cache.clear()
        yield found


@pytest.fixture
def memory() -> Iterator[None]:
    with override_settings(CACHES=settings_of("memory://")):
        cache.clear()
        yield


def test_a_herd_computes_once(location: str) -> None:
    """`get_or_set` is one computation for all threads, although Django makes a backend for each of them."""
    calls, everyone = [], Barrier(20)

    def ask() -> Any:
        everyone.wait()
        return cache.get_or_set("k", compute, 60)

    def compute() -> str:
        calls.append(1)
        return "value"

    assert Herd(*[ask] * 20).join() == ["value"] * 20
    assert len(calls) == 1


def test_a_herd_of_tasks_computes_once(location: str) -> None:
    """`aget_or_set` takes async functions and plain ones, and does not block the loop."""
    calls = []

    async def compute() -> str:
        calls.append(1)
        await asyncio.sleep(0)
        return "value"

    async def main() -> list[Any]:
        found = await asyncio.gather(*[cache.aget_or_set("k", compute) for _ in range(20)])
        assert await cache.aget_or_set("k", lambda: "other") == "value"
        assert await cache.aget_or_set("m", lambda: "plain") == "plain"
        assert await cache.aget_or_set("n", 5) == 5
        return found

    assert asyncio.run(main()) == ["value"] * 20
    assert len(calls) == 1


def test_async_verbs(location: str) -> None:
    """Each async verb does what the plain one does."""

    async def main() -> None:
        await cache.aset("a", 1, 60)
        assert await cache.aadd("a", 2) is False
        assert await cache.aadd("b", 2) is True
        assert await cache.aget("a") == 1
        assert await cache.aget("c", "none") == "none"
        assert await cache.ahas_key("a") and not await cache.ahas_key("c")
        assert await cache.aincr("a", 5) == 6
        assert await cache.adecr("a", 2) == 4
        with pytest.raises(ValueError, match="not found"):
            await cache.aincr("c")
        assert await cache.atouch("a", 600) is True
        assert await cache.aset_many({"x": 1, "y": 2}) == []
        assert await cache.aget_many(["x", "y", "z"]) == {"x": 1, "y": 2}
        await cache.adelete_many(["x"])
        assert await cache.adelete("y") is True
        assert sorted([key async for key in caches["default"].aiter_keys()]) == ["a", "b"]
        await cache.aset("t", 1, tags=["all"])
        await cache.ainvalidate_tags("all")
        assert await cache.aget("t") is None
        await cache.aclear()
        assert await cache.aget("a") is None

    asyncio.run(main())


def test_incr_is_atomic_and_keeps_the_timeout(location: str) -> None:
    """Increments by many threads all count, and the value ends when it would have ended without them."""
    cache.set("visits", 0, 60)
    assert sorted(Herd(*[lambda: cache.incr("visits")] * 20).join()) == [*range(1, 21)]
    assert cache.get("visits") == 20
    assert 0 < cache.ttl("visits") <= 60


def test_times_that_are_left(location: str) -> None:
    """`ttl`, `pttl`, `expire` and `persist`, as users of django-redis know them."""
    cache.set("k", 1, 60)
    assert 50 < cache.ttl("k") <= 60 and 50_000 < cache.pttl("k") <= 60_000
    assert cache.expire("k", 600) and 590 < cache.ttl("k") <= 600
    assert cache.persist("k") and cache.ttl("k") is None and cache.pttl("k") is None
    assert cache.ttl("none") == 0 and not cache.expire("none", 5) and not cache.persist("none")


def test_a_stale_value_stays_stale(tmp_path: Path) -> None:
    """`touch` and its like do not bring back a value that has ended, or whose tag was expired."""
    with override_settings(CACHES=settings_of(f"disk://{tmp_path}", OPTIONS={"stale": 600})):
        cache.set("k", 1, 60, tags=["t"])
        cache.stampede.expire_tags("t")
        assert cache.get("k") is None
        assert not cache.touch("k", 60) and not cache.expire("k", 60) and not cache.persist("k")
        assert cache.get("k") is None and cache.ttl("k") == 0


def test_timeouts_of_other_types(location: str) -> None:
    """A timeout may be a timedelta, or a text."""
    cache.set("k", 1, timedelta(minutes=2))
    assert 100 < cache.ttl("k") <= 120
    cache.set("k", 1, "3m")
    assert 160 < cache.ttl("k") <= 180


def test_a_secret_key_may_be_lazy(tmp_path: Path) -> None:
    """SECRET_KEY may be bytes, or a lazy text, as Django allows."""
    for secret in (b"secret", lazystr("secret")):
        with override_settings(SECRET_KEY=secret, CACHES=settings_of(f"disk://{tmp_path}")):
            assert cache.get_or_set("k", 5) == 5


def test_keys_by_their_beginning(location: str) -> None:
    """Keys are listed and deleted by a prefix; other patterns are refused, with advice."""
    cache.set_many({"user:1": 1, "user:2": 2, "shop:1": 3})
    cache.set("user:3", 3, version=2)
    assert sorted(cache.iter_keys("user:*")) == sorted(cache.keys("user:*")) == ["user:1", "user:2"]
    assert sorted(cache.keys()) == ["shop:1", "user:1", "user:2"]
    assert cache.delete_pattern("user:*") == 2
    assert cache.keys() == ["shop:1"] and cache.keys(version=2) == ["user:3"]
    for pattern in ("*:1", "user:?*", "user", "user:*:name", "u[a]*"):
        with pytest.raises(OptionError, match="tag"):
            cache.delete_pattern(pattern)


def test_a_prefix_with_an_asterisk() -> None:
    """KEY_PREFIX may have any characters."""
    with override_settings(CACHES=settings_of("memory://", KEY_PREFIX="a*b")):
        cache.set("k", 1)
        assert cache.keys() == ["k"]


def test_keys_of_a_key_function() -> None:
    """Keys can't be listed if a function of the user makes them in another way, which an error says."""
    with override_settings(CACHES=settings_of("memory://", KEY_FUNCTION=lambda key, prefix, version: f"{key}!")):
        cache.set("k", 1)
        assert cache.get("k") == 1
        with pytest.raises(OptionError, match="KEY_FUNCTION"):
            cache.keys()


def test_clear_leaves_what_is_not_ours() -> None:
    """`clear` removes the values of this cache, and nothing else that the server has. Django's own empties it."""
    server = shared_redis()
    caches_of_both = settings_of(server.url) | {
        "other": {"BACKEND": BACKEND, "LOCATION": server.url, "OPTIONS": {"namespace": "other"}}
    }
    with override_settings(CACHES=caches_of_both):
        server.cli("SET", "theirs", "1")
        caches["other"].set("k", 1)
        cache.set("k", 1)
        cache.clear()
        assert cache.get("k") is None and caches["other"].get("k") == 1
        assert server.cli("GET", "theirs") == "1"


def test_tags(location: str) -> None:
    """Values have tags, by which they are removed together."""
    cache.set("a", 1, tags=["prices"])
    assert cache.get_or_set("b", lambda: 2, 60, tags=["prices", "shop"]) == 2
    cache.set("c", 3)
    cache.invalidate_tags("prices")
    assert cache.get_many(["a", "b", "c"]) == {"c": 3}


def test_a_value_that_is_too_large(caplog: pytest.LogCaptureFixture) -> None:
    """It is not stored, and an older value of its key does not stay. `set_many` returns its key. A warning tells it."""
    with override_settings(CACHES=settings_of("memory://", OPTIONS={"max_bytes": 1000})):
        cache.set("k", 1)
        cache.set("k", "x" * 2000)
        assert cache.get("k") is None
        assert cache.set_many({"k": 1, "big": "x" * 2000}) == ["big"]
        assert asyncio.run(cache.aset_many({"m": 1, "big": "x" * 2000})) == ["big"]
        assert cache.get_many(["k", "m", "big"]) == {"k": 1, "m": 1}
        assert cache.get_or_set("big", lambda: "x" * 2000) == "x" * 2000
    assert [each for each in caplog.records if each.levelno == logging.WARNING and "'big'" in each.getMessage()]


def test_what_is_signed_with_another_key_is_a_miss(tmp_path: Path) -> None:
    """Pickles count only with a signature made from SECRET_KEY. A former key is accepted as Django does it."""
    url = f"disk://{tmp_path}"
    with override_settings(SECRET_KEY="first", CACHES=settings_of(url)):
        cache.set("k", {1, 2})
        assert cache.get("k") == {1, 2}
    with override_settings(SECRET_KEY="second", SECRET_KEY_FALLBACKS=["first"], CACHES=settings_of(url)):
        assert cache.get("k") == {1, 2}
    with override_settings(SECRET_KEY="second", CACHES=settings_of(url)):
        assert cache.get("k") is None


def test_another_codec(tmp_path: Path) -> None:
    """OPTIONS may name another codec, such as the sealed one, which refuses what only pickle can store."""
    with override_settings(CACHES=settings_of(f"disk://{tmp_path}", OPTIONS={"codec": "sealed"})):
        cache.set("k", [1, {"a": SafeString("<b>")}])
        assert type(cache.get("k")[1]["a"]) is SafeString
        with pytest.raises(TypeError):
            cache.set("k", logging.getLogger())


@pytest.mark.usefixtures("memory")
def test_callers_have_values_of_their_own() -> None:
    """A caller that changes a value does not change what others get, in memory too. Safe strings stay safe."""
    cache.set("k", [1])
    cache.get("k").append(2)
    assert cache.get("k") == [1]
    cache.set("html", mark_safe("<b>"))
    assert type(cache.get("html")) is SafeString


@pytest.mark.usefixtures("memory")
def test_all_threads_share_a_cache() -> None:
    """Django makes a backend for each thread and each alias; those with the same settings have one cache."""
    found = Herd(*[lambda: caches["default"].stampede] * 3).join()
    assert {id(each) for each in found} == {id(caches["default"].stampede)}


@pytest.mark.usefixtures("memory")
def test_locks() -> None:
    """`lock` is a `stampede.Lock` on the cache's engine."""
    with cache.lock("nightly", lease=60):
        assert not cache.lock("nightly", wait=0).acquire()
    with cache.lock("nightly", wait=0) as lock:
        assert lock


def test_wrong_settings_are_named() -> None:
    """What is wrong in CACHES is an error that names it, at `manage.py check` and at the first use."""
    wrong = [
        (settings_of("redis://h?entris=5"), "entris"),
        (settings_of("memory://", OPTIONS={"staale": 5}), "staale"),
        (settings_of(["redis://a", "redis://b"]), "LOCATION"),  # type: ignore[arg-type]
        (settings_of("redis://localhost", OPTIONS={"MAX_ENTRIES": 5}), "entries"),
    ]
    for given, named in wrong:
        with override_settings(CACHES=given):
            (found,) = check_caches()
            assert found.id == "stampede.E001" and named in found.msg
            with pytest.raises(ValueError, match=named):
                cache.get("k")


def test_checks_of_the_settings() -> None:
    """`manage.py check` warns of memory in production, and of a middleware that is not the first one."""
    with override_settings(CACHES=settings_of("memory://"), DEBUG=False):
        assert [each.id for each in check_caches()] == ["stampede.W001"]
    with override_settings(CACHES=settings_of("memory://"), DEBUG=True):
        assert check_caches() == []
    with (
        override_settings(
            MIDDLEWARE=["django.middleware.gzip.GZipMiddleware", "stampede.contrib.django.CacheMiddleware"]
        ),
        pytest.raises(SystemCheckError, match=r"stampede\.E002"),
    ):
        call_command("check", fail_level="ERROR", databases=[])


def test_the_command(location: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`manage.py stampede` checks, shows and clears the caches of CACHES."""
    cache.set("k", 1)
    call_command("stampede", "check")
    assert "default: engine" in capsys.readouterr().out
    if not location.startswith("memory"):
        call_command("stampede", "stats")
        assert "now" in capsys.readouterr().out
        call_command("stampede", "top", every=0.01, times=2)
        assert "per second" in capsys.readouterr().out
    call_command("stampede", "clear")
    assert cache.get("k") is None
    with pytest.raises(InvalidCacheBackendError):
        call_command("stampede", "stats", "other")


def test_the_command_names_what_is_wrong() -> None:
    """It fails if CACHES has no cache of ours, and if a server can't be reached."""
    with (
        override_settings(CACHES={"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}),
        pytest.raises(CommandError, match="StampedeCache"),
    ):
        call_command("stampede", "clear")
    with override_settings(CACHES=settings_of("redis://localhost:1")), pytest.raises(CommandError):
        call_command("stampede", "check")


@pytest.mark.usefixtures("memory")
def test_the_debug_toolbar_shows_our_calls() -> None:
    """The cache panel of django-debug-toolbar counts the calls of our backend as those of any other."""
    pytest.importorskip("debug_toolbar")
    code = """
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.staticfiles", "debug_toolbar"],
    CACHES={"default": {"BACKEND": "stampede.contrib.django.StampedeCache"}},
    SECRET_KEY="k", STATIC_URL="static/",
)
django.setup()
from django.core.cache import cache
from django.http import HttpResponse
from django.test import RequestFactory
from debug_toolbar.panels.cache import CachePanel
from debug_toolbar.toolbar import DebugToolbar
toolbar = DebugToolbar(RequestFactory().get("/"), lambda request: HttpResponse())
panel = CachePanel(toolbar, lambda request: HttpResponse())
panel.enable_instrumentation()
cache.get("k"), cache.set("k", 1), cache.get("k"), cache.get_or_set("n", 5)
panel.disable_instrumentation()
print(panel.hits, panel.misses, [call["name"] for call in panel.calls])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert done.stdout.startswith("2 1 ['get', 'set', 'get', 'get_or_set']"), done.stdout + done.stderr


def test_settings_may_import_it() -> None:
    """A settings module may import from the package, although Django is not set up then. `import stampede` imports
    nothing of Django."""
    code = """
import sys, stampede
assert not [each for each in sys.modules if each.partition(".")[0] == "django"]
from stampede.contrib.django import url_of, StampedeCache
from django.conf import settings
assert not settings.configured
print(url_of({"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert done.stdout == "postgres:///shop\n", done.stdout + done.stderr


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{root}:{root / 'tests' / 'support'}", "PATH": "/usr/bin:/bin"}


def test_what_the_backend_is() -> None:
    """It is a `BaseCache`, so that code that asks for one accepts it."""
    assert isinstance(caches["default"], StampedeCache)
