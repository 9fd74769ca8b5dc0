"""`ttl=` and `namespace=` as functions of a call: each gets the arguments that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from bare_cache import never

from stampede import Cache, KeyingError, OptionError
from stampede.cli import command

tenant_here: ContextVar[str] = ContextVar("tenant_here", default="nobody")


@pytest.fixture(params=["memory", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    with Cache("memory://" if request.param == "memory" else f"disk://{tmp_path}", early=0) as cache:
        yield cache


class Asked:
    """A decorated function of one colour. It returns its arguments and counts its calls."""

    def __init__(self, cache: Cache, colour: str, **options: Any) -> None:
        self.calls = 0

        def report(region: str, number: int = 1, *, tenant: str = "acme") -> Any:
            self.calls += 1
            return region, number, tenant

        async def suspending(region: str, number: int = 1, *, tenant: str = "acme") -> Any:
            return report(region, number, tenant=tenant)

        self.of: Any = cache.cached(**{"version": "1", **options})(report if colour == "sync" else suspending)
        self._suspends = colour == "async"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.of, *args, **kwargs)

    def run(self, verb: Any, *args: Any, **kwargs: Any) -> Any:
        async def awaited() -> Any:
            return await verb(*args, **kwargs)

        return asyncio.run(awaited()) if self._suspends else verb(*args, **kwargs)

    def ttl(self, *args: Any, **kwargs: Any) -> float:
        return float(round(self.run(self.of.peek, *args, **kwargs).ttl))


def test_a_ttl_of_the_value_and_of_what_the_call_names(cache: Cache, colour: str) -> None:
    """A `ttl` function gets the value and named arguments. It applies to calls, batches, `refresh` and `set`."""
    asked = Asked(
        cache, colour, ttl=lambda value, region, number: (60 if region == "eu" else 600) * number + len(value)
    )
    assert asked("eu") == ("eu", 1, "acme")
    assert asked("us", number=2) == ("us", 2, "acme")
    assert (asked.ttl("eu"), asked.ttl("us", 2)) == (63, 1203)
    assert asked.run(asked.of.many, [("eu", 3), {"region": "us"}]) == [("eu", 3, "acme"), ("us", 1, "acme")]
    assert (asked.ttl("eu", 3), asked.ttl("us")) == (183, 603)
    asked.run(asked.of.set, "value", "eu")
    assert asked.ttl("eu") == 65
    asked.run(asked.of.set, "value", "eu", ttl=5)
    assert asked.ttl("eu") == 5
    asked.run(asked.of.refresh, "eu")
    assert asked.ttl("eu") == 63


def test_a_ttl_of_the_value_alone_is_as_it_was(cache: Cache, colour: str) -> None:
    """A `ttl` function of the value may have other parameters with defaults, or be a builtin function."""
    ttls = (lambda value: 60, lambda value, factor=60: factor, lambda *all: 60, lambda value, **rest: 60)
    for number, ttl in enumerate(ttls):
        asked = Asked(cache, colour, ttl=ttl, version=number)
        asked("eu")
        assert asked.ttl("eu") == 60
    assert cache.cached(ttl=len, version="2")(lambda: "abc")() == "abc"


def test_what_a_ttl_function_raises_is_the_callers(cache: Cache, colour: str) -> None:
    """An error of a `ttl` function reaches the caller. The value is not stored."""
    asked = Asked(cache, colour, ttl=lambda value, region: {"eu": 60}[region])
    assert asked("eu")
    with pytest.raises(KeyError, match="us"):
        asked("us")
    assert asked.run(asked.of.peek, "us") is None


def test_a_namespace_of_what_the_call_names(cache: Cache, colour: str) -> None:
    """A namespace function gives each tenant its own values. Verbs look in the same namespace as calls."""
    asked = Asked(cache, colour, namespace=lambda tenant: f"tenant {tenant}/eu", ignore=["tenant"])
    assert asked("eu") == ("eu", 1, "acme")
    assert asked("eu", tenant="globex") == ("eu", 1, "globex")
    assert asked("eu") == ("eu", 1, "acme")
    assert asked.calls == 2
    key = asked.of.key("eu", tenant="globex")
    assert "tenant globex%2Feu/(" in key
    assert key != asked.of.key("eu")
    assert asked.run(asked.of.peek, "eu", tenant="globex").value == ("eu", 1, "globex")
    assert asked.run(asked.of.invalidate, "eu", tenant="globex")
    assert asked("eu", tenant="globex") == ("eu", 1, "globex")
    assert asked.calls == 3
    assert asked.run(asked.of.many, [("eu",), {"region": "eu", "tenant": "globex"}]) == [
        ("eu", 1, "acme"),
        ("eu", 1, "globex"),
    ]
    assert asked.calls == 3


def test_invalidate_all_ends_it_in_every_namespace(cache: Cache, colour: str) -> None:
    """`invalidate_all` ends the function's values in each namespace. Values of other functions remain."""
    asked, other = (Asked(cache, colour, namespace=lambda tenant: tenant, version=version) for version in (1, 2))
    for tenant in ("acme", "globex"):
        asked("eu", tenant=tenant)
        other("eu", tenant=tenant)
    asked.run(asked.of.invalidate_all)
    for tenant in ("acme", "globex"):
        asked("eu", tenant=tenant)
        other("eu", tenant=tenant)
    assert (asked.calls, other.calls) == (4, 2)


def test_a_key_in_a_namespace_is_the_caches_own(tmp_path: Path) -> None:
    """With `key=`, the cache finds a value under this key in the namespace that the call gave."""
    for namespace in ("", "shop"):
        with Cache(f"disk://{tmp_path}", namespace=namespace) as cache:
            asked = Asked(cache, "sync", namespace=lambda tenant: tenant, key="report:{region}")
            asked("eu")
            assert asked.of.key("eu") == ("shop/" if namespace else "") + "acme/report:eu"
            assert cache.invalidate("acme/report:eu")


def test_two_caches_of_one_engine_share_no_tenant(tmp_path: Path) -> None:
    """Two caches of one engine, such as staging and production, do not share tenants of the same name."""
    for namespace in ("staging", "production"):
        with Cache(f"disk://{tmp_path}", namespace=namespace) as cache:
            asked = Asked(cache, "sync", namespace=lambda tenant: tenant)
            asked("eu")
            assert asked.calls == 1


def test_a_namespace_of_the_context(cache: Cache) -> None:
    """A namespace function may read the context. A hit must not ignore it and serve another tenant's value."""
    asked = Asked(cache, "sync", namespace=lambda: tenant_here.get())
    for _ in range(3):
        for tenant in ("acme", "globex"):
            tenant_here.set(tenant)
            assert f"{tenant}/" in asked.of.key("eu")
            asked("eu")
    assert asked.calls == 2
    tenant_here.set("nobody")


def test_long_arguments_stay_in_their_namespace(cache: Cache) -> None:
    """If arguments are hashed, the key still contains its namespace. A number can be a namespace."""
    asked = Asked(cache, "sync", namespace=lambda number: number)
    asked("long " * 100, 1)
    asked("long " * 100, 2)
    assert asked.calls == 2
    assert ":2/#" in asked.of.key("long " * 100, 2)


@pytest.mark.parametrize("verb", ["get", "invalidate"])
def test_the_command_line_finds_it(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`stampede get` and `stampede invalidate` find a key in a namespace, even after a new generation."""
    url = f"disk://{tmp_path}/kept"
    with Cache(url) as cache:
        asked = Asked(cache, "sync", namespace=lambda tenant: tenant)
        asked("eu")
        asked.of.invalidate_all()
        asked("eu")
        (tmp_path / "stampede.toml").write_text(f'[caches.default]\nurl = "{url}"\n')
        done = command.main([verb, asked.of.key("eu"), "--settings", str(tmp_path / "stampede.toml")])
        assert done == 0, capsys.readouterr()


def test_methods(cache: Cache) -> None:
    """`ttl` and `namespace` functions of a method can name `self` as any other argument."""

    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name

        def __stampede_key__(self) -> str:
            return "a shop"

        @cache.cached(namespace=lambda self: self.name, ttl=lambda value, self, n: n, version="3")
        def report(self, n: int) -> str:
            return self.name

    one, two = Shop("one"), Shop("two")
    assert (one.report(60), two.report(60), one.report(60)) == ("one", "two", "one")
    assert one.report.peek(60).ttl == 60
    assert one.report.invalidate(60)


def test_functions_of_many_ids(cache: Cache, colour: str) -> None:
    """Each id of a batch has its own ttl, and its own key in the namespace of the call."""
    asked: list[list[int]] = []

    def users(ids: list[int], tenant: str) -> dict[int, str]:
        asked.append(ids)
        return {id: f"{tenant}'s {id}" for id in ids if id < 9}

    async def suspending(ids: list[int], tenant: str) -> dict[int, str]:
        return users(ids, tenant)

    options: dict[str, Any] = {
        "ttl": lambda value, ids: 60 * ids,
        "namespace": lambda tenant: tenant,
        "ignore": ["tenant"],
        "absent": 30,
        "version": "4",
    }
    of: Any = cache.cached.many(**options)(users if colour == "sync" else suspending)

    def run(verb: Callable[..., Any], *args: Any) -> Any:
        async def awaited() -> Any:
            return await verb(*args)

        return asyncio.run(awaited()) if colour == "async" else verb(*args)

    assert run(of, [1, 2, 9], "acme") == {1: "acme's 1", 2: "acme's 2"}
    assert run(of, [2, 1, 9], "acme") == {1: "acme's 1", 2: "acme's 2"}
    assert run(of.one, 3, "acme") == "acme's 3"
    assert run(of, [1], "globex") == {1: "globex's 1"}
    assert asked == [[1, 2, 9], [3], [1]]
    assert [round(run(of.peek, id, "acme").ttl) for id in (1, 2, 3, 9)] == [60, 120, 180, 30]
    run(of.set_many, {4: "set"}, "acme")
    assert round(run(of.peek, 4, "acme").ttl) == 240


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"ttl": lambda value, regoin: 1}, r"ttl asks for 'regoin', .* did you mean 'region'\?"),
    ({"namespace": lambda tenent: "x"}, r"namespace asks for 'tenent', .* did you mean 'tenant'\?"),
    ({"namespace": lambda region, /: "x"}, r"namespace asks for 'region'"),
    ({"namespace": ["x"]}, r"namespace is \['x'\]: give a string or a number, or a function of the arguments"),
    ({"version": lambda region: "x"}, r"version is .*: give a string or a number$"),
]


@pytest.mark.parametrize("options, words", WRONG)
def test_what_can_not_be_asked_for_is_refused_where_it_is_written(options: dict[str, Any], words: str) -> None:
    """A wrong `ttl`, `namespace` or `version` is refused when the function is decorated, before the first call."""
    with Cache("memory://") as cache, pytest.raises(OptionError, match=words):

        @cache.cached(**options)
        def report(region: str, *, tenant: str) -> None: ...


def test_functions_that_are_async_are_refused() -> None:
    """An async function is refused as `ttl` or `namespace`: its result would be a coroutine."""

    async def later(value: Any = None) -> int:
        return 1

    with Cache("memory://") as cache:
        for name in ("ttl", "namespace"):
            with pytest.raises(OptionError, match="plain function"):
                cache.cached(**{name: later})(never)


def test_a_namespace_that_is_none(cache: Cache) -> None:
    """A namespace of None is refused. Otherwise, all callers without a tenant would share one namespace."""
    asked = Asked(cache, "sync", namespace=lambda tenant: None)
    with pytest.raises(
        KeyingError, match="report: the namespace function returned None: it must return a string or a number"
    ):
        asked("eu")


def test_a_ttl_that_nobody_can_know(cache: Cache) -> None:
    """If the `ttl` function needs an argument that is not part of the key, `set` requires a `ttl`."""
    asked = Asked(cache, "sync", ttl=lambda value, tenant: {"acme": 60}[tenant], ignore=["tenant"])
    asked("eu")
    assert asked.ttl("eu") == 60
    with pytest.raises(OptionError, match=r"depends on tenant, which is not part of its key: give set\(\) a ttl="):
        asked.of.set("value", "eu")
    asked.of.set("value", "eu", ttl=5)
    assert asked.ttl("eu") == 5
