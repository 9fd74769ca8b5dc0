"""`StampedeCache` as a cache of cachelib: its values, its verbs, and whose bytes it reads. cachelib's own mixins run
over it in tests/suites/cachelib."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cachelib")

from cachelib.serializers import JSONSerializer
from herd import Herd
from servers import shared_redis

from stampede import CodecError, OptionError
from stampede.contrib.cachelib import StampedeCache

KEY = "0123456789abcdef0123456789abcdef"


class Basket:
    """An object that only pickle can store."""

    def __init__(self, *articles: str) -> None:
        self.articles = articles


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    return "memory://" if request.param == "memory" else shared_redis().url


@pytest.fixture
def made(url: str, tmp_path: Path) -> Callable[..., StampedeCache]:
    """Makes caches on one engine, in the namespace of this test."""

    def make(**options: Any) -> StampedeCache:
        return StampedeCache(url, **{"namespace": tmp_path.name, "signing_key": KEY, **options})

    return make


def test_each_reader_has_a_copy_of_its_own(made: Callable[..., StampedeCache]) -> None:
    """A reader that changes a value changes it for no other reader, and neither does the writer. Otherwise one request
    would see what another one did to its list."""
    cache, basket = made(), Basket("tea")
    cache.set("basket", [basket])
    basket.articles += ("coffee",)
    read = cache.get("basket")
    read.append("more")
    assert [each.articles for each in cache.get("basket")] == [("tea",)]


def test_none_is_a_value(made: Callable[..., StampedeCache]) -> None:
    """A stored None is there, though cachelib's `get` returns None for a missing key, too."""
    cache = made()
    cache.set("nothing", None)
    assert cache.has("nothing") and not cache.has("other")
    assert cache.get("nothing", "default") is None and cache.get("other", "default") == "default"


def test_concurrent_increments_are_all_counted(made: Callable[..., StampedeCache]) -> None:
    """Two caches of one engine count together, and no increment is lost."""
    caches = made(), made()
    begin = threading.Barrier(4)

    def count(cache: StampedeCache) -> None:
        begin.wait()
        for _ in range(20):
            cache.inc("visits", 2)
            cache.dec("visits")

    counted = caches if caches[0].cache.engine.shared else (caches[0],) * 2
    assert Herd(*[lambda cache=cache: count(cache) for cache in counted * 2]).join() == [None] * 4
    assert counted[0].get("visits") == counted[1].get("visits") == 80


def test_timeouts(made: Callable[..., StampedeCache]) -> None:
    """A timeout is seconds or a timedelta; None means the default, 0 means for ever, and what is past is gone."""
    cache = made(default_timeout=50)

    def left() -> float:
        entry = cache.cache.peek("k")
        assert entry is not None
        return round(entry.fresh, -1)

    for timeout, expected in ((None, 50), (20, 20), (timedelta(minutes=2), 120), (0, float("inf"))):
        cache.set("k", 1, timeout)
        assert left() == expected
    cache.set("k", 1, -5)
    assert cache.get("k") is None


def test_a_value_whose_class_has_gone_is_missing(
    made: Callable[..., StampedeCache], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new release that has removed a class goes on, and the log says why the value is missing."""
    made().set("basket", Basket())
    cache = made()
    if not cache.cache.engine.shared:
        cache.set("basket", Basket())
    monkeypatch.delattr(f"{__name__}.Basket")
    assert cache.get("basket") is None and cache.get_many("basket") == [None]
    assert "can't be read" in caplog.text


@pytest.mark.parametrize("forger", ["another-key-0123456789abcdef0123", None])
def test_what_others_signed_is_not_loaded(tmp_path: Path, forger: str | None) -> None:
    """Bytes that another program has written never reach pickle, which could run code from them."""
    theirs = StampedeCache(f"disk://{tmp_path}", signing_key=forger)
    theirs.set("k", "forged")
    assert StampedeCache(f"disk://{tmp_path}", signing_key=KEY).get("k") is None


def test_a_new_key_still_reads_what_the_old_one_signed(tmp_path: Path) -> None:
    """Keys can be replaced while the cache is in use."""
    StampedeCache(f"disk://{tmp_path}", signing_key=KEY).set("k", Basket("tea"))
    new = StampedeCache(f"disk://{tmp_path}", signing_key=["new" * 12, KEY])
    assert new.get("k").articles == ("tea",)


def test_without_a_key_a_shared_engine_takes_only_plain_values(tmp_path: Path) -> None:
    """Where others may write the bytes, an object that needs pickle is refused, and the error names the remedy."""
    cache = StampedeCache(f"disk://{tmp_path}")
    cache.set("plain", {"at": timedelta(1), "tags": {"a", "b"}, "none": None})
    assert cache.get("plain") == {"at": timedelta(1), "tags": {"a", "b"}, "none": None}
    with pytest.raises(CodecError, match="signing_key"):
        cache.set("basket", Basket())
    assert cache.get("basket") is None
    with pytest.raises(OptionError, match="signing_key"):
        StampedeCache(f"disk://{tmp_path}", codec="pickle")


def test_a_class_can_be_trusted_instead(tmp_path: Path) -> None:
    """`codec` and `trust` mean what they mean elsewhere."""
    from dataclasses import dataclass

    @dataclass
    class Plain:
        n: int

    cache = StampedeCache(f"disk://{tmp_path}", trust=[Plain])
    cache.set("k", Plain(5))
    assert cache.get("k") == Plain(5)
    assert StampedeCache(codec="json").serializer.dumps([1]) == b"[1]"


def test_serializers_of_cachelib(made: Callable[..., StampedeCache]) -> None:
    """A serializer of cachelib may replace ours. If it fails, which it tells by None, nothing is stored."""
    cache = made()
    cache.serializer = JSONSerializer()
    cache.set("pair", (1, 2))
    assert cache.get("pair") == [1, 2]
    with pytest.raises(CodecError, match="JSONSerializer"):
        cache.set("basket", Basket())
    assert not cache.has("basket")


def test_sessions_of_flask_session(made: Callable[..., StampedeCache]) -> None:
    """Flask-Session stores its sessions in the cache, reads them, and deletes one that is emptied."""
    flask, flask_session = pytest.importorskip("flask"), pytest.importorskip("flask_session")
    app = flask.Flask("shop")
    cache = made()
    app.config.update(SESSION_TYPE="cachelib", SESSION_CACHELIB=cache, SESSION_KEY_PREFIX="session:")
    flask_session.Session(app)

    @app.get("/add/<article>")
    def add(article: str) -> str:
        flask.session.setdefault("basket", []).append(article)
        flask.session.modified = True
        return ",".join(flask.session["basket"])

    @app.get("/leave")
    def leave() -> str:
        flask.session.clear()
        return "bye"

    bob, eve = app.test_client(), app.test_client()
    assert [bob.get(f"/add/{each}").text for each in ("tea", "milk")] == ["tea", "tea,milk"]
    assert eve.get("/add/salt").text == "salt"
    sid = bob.get_cookie("session").value
    assert cache.get(f"session:{sid}")["basket"] == ["tea", "milk"]
    bob.get("/leave")
    assert not cache.has(f"session:{sid}")
    assert bob.get("/add/tea").text == "tea"
