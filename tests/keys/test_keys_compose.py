"""Namespace, name, version, generation and arguments make up a key. No two combinations make the same key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from herd import Herd, Origin, until
from hypothesis import given
from hypothesis import strategies as st

from stampede import Cache
from stampede.keys import Identity, function_in, generation, in_namespace, quoted, scope_name

texts = st.text("ab%3A/:@,|#", max_size=5)
names = texts.filter(bool)
codes = st.text("0123456789abcdef", max_size=2)


class Plain(NamedTuple):
    """A key that is used with a cache's own verbs."""

    namespace: str
    own: str
    key: str

    @property
    def physical(self) -> str:
        return generation(quoted(self.namespace), self.own, "") + in_namespace(self.namespace, self.key)


class Called(NamedTuple):
    """A key of a function's call."""

    namespace: str
    module: str
    qualname: str
    code: str  # '': the name identifies the function
    version: str | None
    own: str
    whole: str
    arguments: str

    @property
    def scope(self) -> str:
        identity = Identity(self.module, self.qualname, not self.code, self.code, (), True)
        return scope_name(self.namespace, identity, self.version)

    @property
    def physical(self) -> str:
        return f"{generation(self.scope, self.own, self.whole)}{self.scope}:{self.arguments}"


def taken_apart(physical: str) -> Plain | Called:
    """Return the only combination that can have made a key."""
    before, _, rest = physical.partition("|")
    generations, namespace = before.removesuffix("/"), ""
    if before.endswith("/"):
        namespace, _, rest = rest.partition("/")
    if "," not in generations:
        return Plain(unquote(namespace), unquote(generations), rest)
    whole, _, own = generations.partition(",")
    module, name, arguments = rest.split(":", 2)
    name, versioned, version = name.partition("@")
    qualname, _, code = name.partition("#")
    parts = map(unquote, (namespace, module, qualname))
    return Called(*parts, code, unquote(version) if versioned else None, unquote(own), unquote(whole), arguments)


@given(st.builds(Plain, texts, texts, texts))
def test_a_plain_key_is_of_one_composition(composed: Plain) -> None:
    """Key `eu/price` of namespace `shop` differs from key `price` of namespace `shop/eu`."""
    assert taken_apart(composed.physical) == composed


@given(st.builds(Called, texts, names, names, codes, st.none() | texts, texts, texts, texts))
def test_a_functions_key_is_of_one_composition(composed: Called) -> None:
    """Each function key comes from one combination of its parts: version `1@2` cannot be taken for version `2`."""
    assert taken_apart(composed.physical) == composed
    assert function_in(f"{composed.scope}:{composed.arguments}") == composed.scope


@given(texts, st.builds(Called, texts, names, names, codes, st.none() | texts, texts, texts, texts))
def test_no_namespace_is_a_functions_scope(namespace: str, composed: Called) -> None:
    """A namespace never equals a function's scope. Otherwise `clear` would invalidate all values of that function."""
    assert quoted(namespace) != composed.scope


def test_readable_parts_stay_as_they_are() -> None:
    """Keys are readable for people: in logs, in redis-cli and in `stampede get`."""
    called = Called("shop", "shop.reports", "Report.of.<locals>.total", "1f", "2", "7", "5", "(42)")
    assert called.physical == "5,7/|shop/shop.reports:Report.of.<locals>.total#1f@2:(42)"
    assert Called("", "m", "f", "", None, "7", "", "(42)").physical == ",7|m:f:(42)"
    assert Plain("", "7", "user:5").physical == "7|user:5"
    assert Plain("shop", "7", "user:5").physical == "7/|shop/user:5"


def test_namespaces_of_one_engine_are_apart(tmp_path: Path) -> None:
    """A value of one namespace is never served to another."""
    url = f"disk://{tmp_path}"
    with Cache(url, namespace="shop") as shop, Cache(url, namespace="shop:eu") as eu, Cache(url) as none:
        shop.set("eu:price", 1)
        shop.set("eu/price", 2)
        assert eu.get("price") is None
        assert none.get("shop:eu:price") is none.get("shop/eu/price") is None
        with Cache(url, namespace="shop/eu") as other:
            assert other.get("price") is None
        eu.set("price", 3)
        shop.clear()
        assert eu.get("price") == 3
        assert shop.get("eu:price") is None


def test_a_plain_key_is_no_functions(tmp_path: Path) -> None:
    """A plain key never equals a function's key. Otherwise its author could decide what the function returns."""
    with Cache(f"disk://{tmp_path}") as cache:
        f = cache.cached(seven)
        cache.set(f.key(1), "not computed")
        assert f(1) == 7
        assert cache.get(f.key(1)) == "not computed"


def seven(x: int) -> int:
    return 7


def test_a_namespace_or_version_may_be_any(tmp_path: Path) -> None:
    """A namespace or version of 0 counts: it is not taken for a missing one."""
    with Cache(f"disk://{tmp_path}", namespace="shop") as cache:
        keys = [cache.cached(namespace=each)(seven).key(1) for each in ("", 0, "0:1", "shop")]
        assert len({*keys}) == 4
        versions: list[Any] = [{}, {"version": ""}, {"version": 0}, {"version": 1}, {"version": "1@2"}]
        assert len({cache.cached(**each)(seven).key(1) for each in versions}) == 5


def test_invalidate_all_is_of_one_function() -> None:
    """`price.invalidate_all()` does not disturb calls of `prices`. Otherwise their value would be computed twice."""
    with Cache() as cache:
        origin = Origin()
        price: Any = cache.cached(named("price", lambda: 1))
        prices: Any = cache.cached(named("prices", origin))
        first = Herd(prices)
        origin.has_begun()
        price.invalidate_all()
        second = Herd(prices)
        until(lambda: sum(flight.callers for flight in list(cache._core.flights._flights.values())) == 2)
        origin.let_on()
        assert first.join() + second.join() == [1, 1]


def named(name: str, function: Any) -> Any:
    def call() -> int:
        return int(function())

    call.__qualname__ = name
    return call
