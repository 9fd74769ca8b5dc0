"""Flask-Caching's decorators over our backend: one computation for concurrent callers, and what is shared with nobody.
Flask-Caching's own tests run over it in tests/suites/flask-caching."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flask_caching")

import flask
from flask_caching import CachedResponse
from herd import Herd, Origin, until
from servers import RedisServer

from stampede.contrib.flask_caching import Cache, StampedeCache

BACKEND = "stampede.contrib.flask_caching.StampedeCache"


class World:
    """An application, or several with one cache between them, as the workers of a server have it."""

    def __init__(self, url: str, namespace: str) -> None:
        self.settings = {"CACHE_TYPE": BACKEND, "CACHE_STAMPEDE_URL": url, "CACHE_KEY_PREFIX": namespace}

    def app(self, **config: Any) -> tuple[Any, Cache]:
        app = flask.Flask("shop")
        app.config.update(SECRET_KEY="secret", **self.settings, **config)
        return app, Cache(app)


@pytest.fixture(params=["memory", "disk"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """An application on an engine of this process, or on a shared one."""
    return World("memory://" if request.param == "memory" else f"disk://{tmp_path}/engine", tmp_path.name)


@pytest.fixture
def shared(tmp_path: Path) -> World:
    """Applications that share an engine."""
    return World(f"disk://{tmp_path}/engine", tmp_path.name)


def asked(app: Any, path: str) -> Callable[[], Any]:
    return lambda: app.test_client().get(path)


def test_fifty_requests_for_a_view_share_one_computation(world: World) -> None:
    """Without us, each of them would compute. Each gets a response of its own, which `after_request` may change."""
    app, cache = world.app()
    origin, visitors = Origin(), itertools.count()

    @app.get("/report")
    @cache.cached(timeout=60)
    def report() -> Any:
        response = flask.make_response(f"report {origin()}")
        response.headers["X-Made"] = "here"
        return response

    @app.after_request
    def greet(response: Any) -> Any:
        response.headers.add("X-Visitor", str(next(visitors)))
        return response

    herd = Herd(*[asked(app, "/report")] * 50)
    origin.has_begun()
    origin.let_on()
    answers = herd.join()
    assert origin.calls == 1
    assert {(each.text, each.headers["X-Made"]) for each in answers} == {("report 1", "here")}
    visited = [each.headers.getlist("X-Visitor") for each in answers]
    assert sorted(visited, key=lambda each: int(each[0])) == [[str(n)] for n in range(50)]


def test_so_do_requests_in_several_processes(shared: World) -> None:
    """Two applications with one engine behave as two worker processes do."""
    origin = Origin()

    def made() -> Any:
        app, cache = shared.app()

        @app.get("/report")
        @cache.cached(timeout=60)
        def report() -> str:
            return f"report {origin()}"

        return app

    herd = Herd(*[asked(made(), "/report") for _ in range(2)] * 5)
    origin.has_begun()
    origin.let_on()
    assert {each.text for each in herd.join()} == {"report 1"}
    assert origin.calls == 1


def test_memoized_functions_share_one_computation(world: World) -> None:
    """Also at the very first call, when each caller would otherwise make a version of its own for the function, and so
    a key of its own. Each caller has a copy of the value."""
    app, cache = world.app()
    origin = Origin()

    @cache.memoize(timeout=60)
    def prices(shop: int) -> list[int]:
        return [shop, origin()]

    def call() -> list[int]:
        with app.app_context():
            return prices(7)

    herd = Herd(*[call] * 20)
    origin.has_begun()
    origin.let_on()
    found = herd.join()
    found[0].append(5)
    assert found[1:] == [[7, 1]] * 19
    with app.app_context():
        assert prices(7) == [7, 1]
        cache.delete_memoized(prices)
        assert prices(7) == [7, 2]
        assert prices.uncached(7) == [7, 3] and prices(7) == [7, 2]


def test_delete_memoized_wins_over_a_computation_under_way(world: World) -> None:
    """A value whose computation began before the deletion is not served after it. In Flask-Caching, the end of the
    computation may bring the deleted version back."""
    app, cache = world.app()
    origin = Origin()

    @cache.memoize(timeout=60)
    def price() -> int:
        return origin()

    def call() -> int:
        with app.app_context():
            return price()

    herd = Herd(call)
    origin.has_begun()
    with app.app_context():
        cache.delete_memoized(price)
    origin.let_on()
    assert herd.join() == [1]
    assert call() == 2


def test_delete_memoized_wins_at_the_last_moment(world: World) -> None:
    """When Flask-Caching has stored a value, it reads the versions of the function and writes them back. A deletion
    between the two must stay."""
    app, _ = world.app()
    origin = Origin(open=True)

    class Slow(Cache):
        def get_many(self, *keys: str) -> list[Any]:
            found = super().get_many(*keys)
            if origin.calls == 1 and threading.current_thread() is threading.main_thread():
                Herd(delete).join()
            return found

    def delete() -> None:
        with app.app_context():
            cache.delete_memoized(price)

    cache = Slow(app)
    price = cache.memoize(timeout=60)(lambda: origin())
    with app.app_context():
        assert [price(), price()] == [1, 2]


@pytest.mark.parametrize("option", ["forced_update", "is_stale"])
def test_a_deletion_wins_over_a_value_that_replaces_another(world: World, option: str) -> None:
    """Also a value that is computed though there is one is not stored if it is deleted meanwhile."""
    app, cache = world.app()
    origin, seen = Origin(open=True), {"replace": False}

    @cache.memoize(timeout=60, **{option: lambda *value: seen["replace"]})
    def price(product: str) -> int:
        return origin()

    def call() -> int:
        with app.app_context():
            return price("tea")

    assert call() == 1
    origin.has_begun()
    origin.hold()
    seen["replace"] = True
    herd = Herd(call)
    origin.has_begun()
    with app.app_context():
        cache.delete_memoized(price, "tea")
    seen["replace"] = False
    origin.let_on()
    assert herd.join() == [2]
    assert call() == 3


def test_forced_updates_do_not_bring_a_deleted_version_back(world: World) -> None:
    """When Flask-Caching has stored a value, it reads the versions of the function and writes them back. A deletion
    between the two must stay, also after `forced_update`."""
    app, _ = world.app()
    origin, forced = Origin(open=True), {"now": True}

    class Slow(Cache):
        def set_many(self, *args: Any, **kwargs: Any) -> list[Any]:
            if origin.calls == 1 and forced["now"]:
                forced["now"] = False
                Herd(delete).join()
            return super().set_many(*args, **kwargs)

    def delete() -> None:
        with app.app_context():
            cache.delete_memoized(price)

    cache = Slow(app)
    price = cache.memoize(timeout=60, forced_update=lambda: forced["now"])(lambda: origin())
    with app.app_context():
        assert [price(), price()] == [1, 2]


def test_delete_wins_over_a_view_under_way(world: World) -> None:
    """`cache.delete` and `delete_cached` also end what is being computed."""
    app, cache = world.app()
    origin = Origin()

    @app.get("/report")
    @cache.cached(timeout=60)
    def report() -> str:
        cache.get("other")  # whatever else the view looks up
        return str(origin())

    herd = Herd(asked(app, "/report"))
    origin.has_begun()
    with app.app_context():
        cache.delete_cached(report, path="/report")
    origin.let_on()
    assert [each.text for each in herd.join()] == ["1"]
    assert asked(app, "/report")().text == "2"


def test_a_refused_response_is_shared_with_nobody(world: World) -> None:
    """What `response_filter` refuses may be personal, so no concurrent request gets it: each computes for itself."""
    app, cache = world.app()
    arrived, names = list[int](), itertools.count()

    @app.before_request
    def count() -> None:
        arrived.append(1)

    @app.get("/me")
    @cache.cached(timeout=60, response_filter=lambda response: "private" not in response)
    def me() -> str:
        until(lambda: len(arrived) == 5)
        return f"private {next(names)}"

    texts = [each.text for each in Herd(*[asked(app, "/me")] * 5).join()]
    assert sorted(texts) == [f"private {n}" for n in range(5)]


def test_http_errors_are_one_computation_too(world: World) -> None:
    """`abort(404)` is an answer: it is stored, and every request gets a 404 with its own response."""
    app, cache = world.app()
    origin = Origin()

    @app.get("/product")
    @cache.cached(timeout=60)
    def product() -> str:
        flask.abort(404, f"gone {origin()}")

    herd = Herd(*[asked(app, "/product")] * 5)
    origin.has_begun()
    origin.let_on()
    assert {(each.status_code, "gone 1" in each.text) for each in herd.join()} == {(404, True)}
    assert asked(app, "/product")().status_code == 404 and origin.calls == 1


def test_a_failure_is_each_waiters_own_error(world: World) -> None:
    """An exception that is no answer is not stored. The callers of the process get it, and error handlers see it."""
    app, cache = world.app()
    origin = Origin()
    app.register_error_handler(ZeroDivisionError, lambda error: (str(error), 418))

    @app.get("/report")
    @cache.cached(timeout=60)
    def report() -> str:
        raise ZeroDivisionError(f"try {origin()}")

    herd = Herd(*[asked(app, "/report")] * 3)
    origin.has_begun()
    origin.let_on()
    assert {each.status_code for each in herd.join()} == {418}
    assert asked(app, "/report")().status_code == 418


def test_stale_values_are_replaced_once(world: World) -> None:
    """Callers whose value `is_stale` refuses share a computation, and no caller gets what it refuses."""
    app, cache = world.app()
    origin, refused = Origin(open=True), list[int]()

    def is_stale(value: int) -> bool:
        if value < 2:
            refused.append(value)
        return value < 2

    @cache.memoize(timeout=60, is_stale=is_stale)
    def number() -> int:
        return origin()

    def call() -> int:
        with app.app_context():
            return number()

    assert call() == 1
    origin.hold()
    herd = Herd(*[call] * 10)
    until(lambda: len(refused) == 10)
    origin.let_on()
    assert min(herd.join()) == 2
    assert origin.calls <= 5  # the first, the second, and those of callers that came later than they were counted


def test_a_stale_memoized_value_is_served(shared: World) -> None:
    """With `stale`, the version of a memoized function must live longer than its values. Otherwise the old value would
    not be found, and all callers would wait."""
    app, cache = shared.app(CACHE_OPTIONS={"stale": "1h"})
    origin = Origin(open=True)
    number = cache.memoize(timeout=1)(lambda: origin())

    def call() -> int:
        with app.app_context():
            return number()

    def is_fresh() -> bool:
        with app.app_context():
            return cache.cache.has(key)

    with app.app_context():
        assert number() == 1
        key = number.make_cache_key(number.uncached)
    origin.has_begun()
    origin.hold()
    until(lambda: not is_fresh())
    time.sleep(0.1)  # the version was stored a little later than the value
    leader = Herd(call)
    origin.has_begun()
    assert Herd(*[call] * 5).join() == [1] * 5
    origin.let_on()
    assert leader.join() == [2] and origin.calls == 2


def test_a_deletion_parts_callers_that_refuse_values(world: World) -> None:
    """A caller that refuses a value that was stored after a deletion does not join those that refuse an older one: the
    value that they compute began before the deletion."""
    app, cache = world.app()
    origin, stale = Origin(open=True), {"now": False}
    number = cache.memoize(timeout=60, is_stale=lambda value: stale["now"])(lambda: origin())

    def call() -> int:
        with app.app_context():
            return number()

    assert call() == 1
    origin.has_begun()
    origin.hold()
    stale["now"] = True
    old = Herd(call)
    origin.has_begun()
    with app.app_context():
        key = number.make_cache_key(number.uncached)
        cache.delete(key)
        cache.set(key, 10)
    new = Herd(call)
    origin.has_begun()
    origin.let_on()
    assert old.join() == [2] and new.join() == [3]
    stale["now"] = False
    assert call() == 3


def test_conditions_may_use_the_cache(world: World) -> None:
    """What `unless`, `forced_update` and `is_stale` look up does not become the key of the call."""
    app, cache = world.app()
    origin, seen = Origin(open=True), {"unless": False, "forced_update": False, "is_stale": False}

    def condition(name: str) -> Callable[..., bool]:
        def ask(*args: Any) -> bool:
            cache.get("other")
            return seen[name]

        return ask

    @cache.memoize(timeout=60, **{name: condition(name) for name in seen})
    def number() -> int:
        return origin()

    with app.app_context():
        cache.set("other", "untouched")
        assert [number(), number()] == [1, 1]
        for name, found in (("is_stale", [2, 2]), ("forced_update", [3, 3]), ("unless", [4, 3])):
            seen[name] = True
            first = number()
            seen[name] = False
            assert [first, number()] == found, name
        assert cache.get("other") == "untouched"


def test_a_function_that_makes_the_key_and_fails(world: World) -> None:
    """What it looked up before it failed is not the key of the view. So the view neither returns that value nor stores
    its own one there. As in Flask-Caching, the view is computed, and is not stored."""
    app, cache = world.app()
    origin = Origin(open=True)

    def key() -> str:
        return f"{cache.get('release')}/{flask.request.args['q']}"

    @app.get("/found")
    @cache.cached(make_cache_key=key)
    def found() -> str:
        return f"found {origin()}"

    with app.app_context():
        cache.set("release", "7")
    assert [asked(app, "/found")().text for _ in range(2)] == ["found 1", "found 2"]
    with app.app_context():
        assert cache.get("release") == "7"


def test_a_condition_that_fails(world: World) -> None:
    """If `is_stale` raises, the caller does not get the value that it could not check."""
    app, cache = world.app()
    number = cache.memoize(is_stale=lambda value: value / 0)(Origin(open=True).__call__)
    with app.app_context():
        assert [number(), number()] == [1, 2]


@pytest.mark.parametrize("option", ["unless", "forced_update"])
def test_a_function_that_computes_for_itself_uses_the_cache(world: World, option: str) -> None:
    """Inside a call that `unless` or `forced_update` singles out, the cache answers as it does elsewhere."""
    app, cache = world.app()

    @cache.memoize(**{option: lambda: True})
    def stored() -> bool:
        assert cache.get("other") is None
        cache.set("other", 1)
        return bool(cache.has("other"))

    with app.app_context():
        assert stored()


def test_a_function_inside_a_view_has_its_own_call(world: World) -> None:
    """Decorated functions call each other, and each value is stored under its own key. If both have one key, the outer
    value is stored, as Flask-Caching does it."""
    app, cache = world.app()
    origin = Origin(open=True)

    @cache.memoize(timeout=60)
    def inner(n: int) -> int:
        cache.set("seen", n)
        return n * 10 + origin()

    @cache.cached(timeout=60)
    def same_key() -> str:
        return f"inner {origin()}"

    @app.get("/outer")
    @cache.cached(timeout=60)
    def outer() -> str:
        return f"{inner(1)} {inner(2)} {same_key()}"

    assert [asked(app, "/outer")().text for _ in range(2)] == ["11 22 inner 3"] * 2
    with app.app_context():
        assert inner(1) == 11 and cache.get("seen") == 2


def test_a_response_that_sets_its_own_timeout(world: World) -> None:
    """`CachedResponse` and the attribute `cache_timeout` decide how long a value lives."""
    app, cache = world.app()

    @app.get("/own")
    @cache.cached(timeout=60)
    def own() -> Any:
        return CachedResponse(flask.make_response("own"), 500)

    @app.get("/later")
    @cache.cached(timeout=60)
    def later() -> str:
        return "later"

    later.cache_timeout = 300
    asked(app, "/own")(), asked(app, "/later")()
    with app.app_context():
        lives = [cache.cache.cache.peek(f"view//{name}").fresh for name in ("own", "later")]
    assert [round(each, -1) for each in lives] == [500, 300]


@pytest.mark.parametrize("timeout, left", [(-1, None), (2**40, float("inf"))])
def test_odd_timeouts(world: World, timeout: int, left: float | None) -> None:
    """A view must not fail because its own timeout is negative, which means that it is not stored, or endless."""
    app, cache = world.app()

    @app.get("/own")
    @cache.cached()
    def own() -> Any:
        return CachedResponse(flask.make_response("own"), timeout)

    @app.get("/plain")
    @cache.cached(timeout=timeout)
    def plain() -> str:
        return "plain"

    for name in ("own", "plain"):
        assert asked(app, f"/{name}")().text == name
        with app.app_context():
            entry = cache.cache.cache.peek(f"view//{name}")
        assert (entry and entry.fresh) == left


def test_what_cannot_be_stored_is_served(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A value that pickle refuses is computed by each caller, and the log says so."""
    app, cache = world.app()
    origin = Origin(open=True)

    @cache.memoize()
    def lock() -> Any:
        origin()
        return threading.Lock()

    with app.app_context():
        assert lock() is not lock()
    assert origin.calls == 2 and "can't be stored" in caplog.text


def test_a_value_that_a_new_release_cannot_read_is_replaced(world: World) -> None:
    """Otherwise each call would compute until the value expires."""
    app, cache = world.app()
    origin = Origin(open=True)

    @cache.memoize(timeout=60)
    def number() -> int:
        return origin()

    with app.app_context():
        assert number() == 1
        cache.cache.cache.set(number.make_cache_key(number.uncached), b"no pickle at all", ttl=60)
        assert [number(), number()] == [2, 2]


def test_none_is_stored_only_if_asked_for(world: World) -> None:
    """`cache_none` decides, as in Flask-Caching."""
    app, cache = world.app()
    origin = Origin(open=True)

    def nothing() -> None:
        origin()

    with app.app_context():
        for kept, calls in ((False, 2), (True, 3)):
            function = cache.memoize(cache_none=kept, make_name=lambda name, kept=kept: f"{name} {kept}")(nothing)
            assert [function(), function()] == [None, None]
            assert origin.calls == calls


def test_async_views(world: World) -> None:
    """An async view is computed once, too."""
    pytest.importorskip("asgiref")
    app, cache = world.app()
    origin = Origin()

    @app.get("/report")
    @cache.cached(timeout=60)
    async def report() -> str:
        return f"report {await origin.suspending()}"

    herd = Herd(*[asked(app, "/report")] * 5)
    origin.has_begun()
    origin.let_on()
    assert {each.text for each in herd.join()} == {"report 1"}


def test_without_the_engine_each_process_computes_once(caplog: pytest.LogCaptureFixture) -> None:
    """If Redis is down, requests are answered, and still share a computation in each process."""
    server = RedisServer()
    app, cache = World(server.url, "outage").app(DEBUG=True)
    origin = Origin()

    @cache.memoize(timeout=60)
    def total(region: str) -> int:
        return origin()

    @app.get("/report")
    @cache.cached(timeout=60)
    def report() -> str:
        return f"report {total('north')}"

    try:
        server.stop()
        herd = Herd(*[asked(app, "/report")] * 20)
        origin.has_begun()
        origin.let_on()
        assert {(each.status_code, each.text) for each in herd.join()} == {(200, "report 1")}
        assert not [each for each in caplog.records if each.name == "flask_caching"]
    finally:
        server.close()


@pytest.mark.parametrize("kind, calls", [("NullCache", 2), ("SimpleCache", 1)])
def test_other_backends_are_flask_cachings_own(kind: str, calls: int) -> None:
    """With `NullCache` or `SimpleCache`, as in many applications' tests, it is Flask-Caching without us."""
    app = flask.Flask("shop")
    cache, origin = Cache(app, config={"CACHE_TYPE": kind, "CACHE_NO_NULL_WARNING": True}), Origin(open=True)
    number = cache.memoize()(lambda: origin())
    with app.app_context():
        assert [number(), number()] == [1, calls]


def test_the_class_of_cachelib_as_cache_type(shared: World) -> None:
    """`CACHE_TYPE` may name `stampede.contrib.cachelib.StampedeCache`, too, with CACHE_ARGS and CACHE_OPTIONS."""
    app = flask.Flask("shop")
    app.config.update(
        CACHE_TYPE="stampede.contrib.cachelib.StampedeCache",
        CACHE_ARGS=[shared.settings["CACHE_STAMPEDE_URL"]],
        CACHE_OPTIONS={"namespace": "shop", "signing_key": "k" * 32},
    )
    cache, origin = Cache(app), Origin()

    @app.get("/report")
    @cache.cached()
    def report() -> str:
        return f"report {origin()}"

    herd = Herd(*[asked(app, "/report")] * 3)
    origin.has_begun()
    origin.let_on()
    assert {each.text for each in herd.join()} == {"report 1"}


def test_the_secret_key_signs(shared: World) -> None:
    """Applications with one SECRET_KEY read each other's values; an old key may be a fallback; others read nothing."""
    backends = []
    for secret, fallbacks in (("old", []), ("new", ["old"]), ("other", [])):
        app = flask.Flask("shop")
        app.config.update(SECRET_KEY=secret, SECRET_KEY_FALLBACKS=fallbacks, **shared.settings)
        Cache(app)
        backends.extend(app.extensions["cache"].values())
    backends[0].set("k", flask.Response("stored"))
    assert isinstance(backends[0], StampedeCache)
    assert backends[1].get("k").get_data() == b"stored"
    assert backends[2].get("k") is None
