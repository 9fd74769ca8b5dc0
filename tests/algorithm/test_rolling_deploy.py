"""A rolling deploy: two versions of an application run at once, and return different types from a cached function."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import make_dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from herd import until
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import shared_redis

import stampede.algorithm.encoded
from stampede import Cache
from stampede.algorithm.encoded import EncodedClaims, _Coded
from stampede.codecs import make_codec
from stampede.model.entry import Entry
from stampede.model.ports import Ask, Busy, Found
from stampede.runtime.colour import run_blocking

pydantic = pytest.importorskip("pydantic")
SHARED: dict[str, Callable[[], Any]] = {
    "redis": shared_redis,
    "memcached": shared_memcached,
}
TYPES: dict[str, tuple[Any, Any]] = {
    "dataclass": (
        make_dataclass("User", [("id", int)]),
        make_dataclass("User", [("id", int), ("email", str, "")]),
    ),
    "pydantic": (
        pydantic.create_model("User", id=(int, ...)),
        pydantic.create_model("User", id=(int, ...), email=(str, "")),
    ),
    "plain": (int, str),
}


@pytest.fixture(params=["disk", "postgres", *SHARED])
def url(request: pytest.FixtureRequest, memory_path: Path) -> str:
    if request.param == "disk":
        return f"disk://{memory_path}"
    if request.param == "postgres":
        server = prepared_postgres()
        server.empty()
        return server.postgres_url
    server = SHARED[request.param]()
    server.cli("FLUSHALL") if request.param == "redis" else server.empty()
    return str(server.url)


class Version:
    """One version of the application. It has its own cache on the engine that both versions share."""

    def __init__(self, url: str, returns: Any, **options: Any) -> None:
        self.cache = Cache(url, ttl=600, early=0, **options)
        self.computed = 0
        self.inside, self.go_on = Event(), Event()
        self.go_on.set()

        def user(id: int) -> Any:
            self.computed += 1
            self.inside.set()
            assert self.go_on.wait(10)
            return returns(id=id) if hasattr(returns, "__mro__") and returns not in (int, str) else returns(id)

        user.__annotations__["return"] = returns
        self.user = self.cache.cached(key="user:{id}")(user)
        self.returns = returns

    def get(self) -> bool:
        """Ask for the user. Return whether the value was computed for it."""
        before = self.computed
        assert type(self.user(1)) is self.returns
        return self.computed > before


@pytest.fixture
def versions(url: str) -> Iterator[Callable[..., list[Version]]]:
    with ExitStack() as stack:

        def made(name: str = "dataclass", **options: Any) -> list[Version]:
            both = [Version(url, kind, **options) for kind in TYPES[name]]
            for each in both:
                stack.callback(each.cache.close)
            return both

        yield made


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("local", [False, True])
def test_each_version_computes_once(
    versions: Callable[..., list[Version]], name: str, local: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two versions that run at once do not overwrite each other's entries. Each version computes once."""
    both = versions(name, local=local)
    for _ in range(3):
        for version in (*both, *reversed(both)):
            version.get()
    assert [version.computed for version in both] == [1, 1]
    assert "user:1" not in caplog.text, "nothing is wrong with the other's entry"


@pytest.mark.parametrize("change", ["invalidate", "set", "expire"])
def test_a_change_by_either_version_concerns_both(versions: Callable[..., list[Version]], change: str) -> None:
    """After one version has changed a key, the other version does not serve its own older entry."""
    both = versions()
    for by in (*both, *both):
        other = both[by is both[0]]
        by.get(), other.get()
        if change == "set":
            by.user.set(by.returns(id=2), 1)
            assert by.user(1).id == 2
        else:
            getattr(by.user, change)(1)
        assert other.get(), "computed before the change"


def test_local_tiers_hear_of_the_other_versions_changes(versions: Callable[..., list[Version]]) -> None:
    """An invalidation by one version removes the value from the local tier of the other version."""
    first, second = versions(local=True)
    first.get()
    for _ in range(2):
        second.get()
        first.user.invalidate(1)
        until(second.get)  # before, its local tier serves the value
        first.get()


def test_what_was_begun_before_an_invalidation_is_its_callers_only(versions: Callable[..., list[Version]]) -> None:
    """If one version invalidates a key, the other version does not store a value whose computation began before."""
    first, second = versions()
    first.get()
    second.go_on.clear()
    caller, later = Thread(target=second.get), Thread(target=second.get)
    caller.start()
    assert second.inside.wait(10)
    first.user.invalidate(1)
    later.start()
    time.sleep(0.05)  # it waits for the computation, or computes if it comes too late
    second.go_on.set()
    caller.join(10), later.join(10)
    assert second.computed == 2, "a call that began after the invalidation was served what was computed before it"
    assert [first.get(), second.get(), first.get(), second.get()] == [True, False, False, False]


def test_a_long_computation_beside_many_short_ones_is_stored(
    versions: Callable[..., list[Version]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long computation is stored, even if many leases of other keys have ended meanwhile."""
    monkeypatch.setattr(stampede.algorithm.encoded, "MOST_BESIDE", 4)
    first, second = versions()
    first.user.many([(id,) for id in range(1, 11)])
    second.go_on.clear()
    caller = Thread(target=second.get)
    caller.start()
    assert second.inside.wait(10)
    second.go_on.set()
    for id in range(2, 11):
        second.user(id)
    caller.join(10)
    assert (second.computed, second.get()) == (10, False)


def test_a_token_of_two_keys_leads_to_each_ones_own_entry() -> None:
    """If the leases of two keys have equal tokens (as on two memcached servers), a call waits for its own key."""
    waited: list[str] = []

    class Port:
        """Each key holds another version's entry. The leases beside the keys all have the same token."""

        async def claim(self, key: str, token: bytes, ask: Ask) -> Any:
            return Busy(b"cas 7", 1.0) if "#" in key else Found(other.encoded(key, entry_of(key)))

        async def wait(self, key: str, busy: Busy, timeout: float) -> None:
            waited.append(key)

    other, own = (_Coded(make_codec("sealed", returns=kind), lambda *_: None) for kind in TYPES["dataclass"])
    claims: Any = EncodedClaims(Port(), own._codec, lambda *_: None, Port(), {})  # type: ignore[arg-type]
    busy = [run_blocking(claims.claim(key, b"t", Ask(1.0))) for key in ("user:1", "user:2")]
    for key, each in zip(("user:1", "user:2"), busy, strict=True):
        run_blocking(claims.wait(key, each, 1.0))
    assert [key.partition("#")[0] for key in waited] == ["user:1", "user:2"]


def entry_of(key: str) -> Entry[Any]:
    return Entry(TYPES["dataclass"][0](id=1), key.encode(), 0.0, 0.0, 60.0, 60.0, 60.0, False)


def test_several_keys_and_async_calls(versions: Callable[..., list[Version]]) -> None:
    """Batches and async calls find the second version's entries, as single sync calls do."""
    both = versions()
    for _ in range(2):
        for version in both:
            version.user.many([(1,), (2,)])
    assert [version.computed for version in both] == [2, 2]
    second = both[1]

    async def user(id: int) -> Any:
        second.computed += 1
        return second.returns(id=id)

    user.__annotations__["return"] = second.returns
    asked = second.cache.cached(key="user:{id}")(user)

    async def ask() -> None:
        for id in (1, 3):
            assert type(await asked(id)) is second.returns

    asyncio.run(ask())
    both[0].user(3)
    asyncio.run(ask())
    assert [version.computed for version in both] == [3, 3]


def test_after_the_deploy_the_new_version_takes_the_place(
    versions: Callable[..., list[Version]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some time, the new version replaces an old version's entry. Until then, each hit takes more requests."""
    first, second = versions()
    first.get(), second.get()
    monkeypatch.setattr(stampede.algorithm.encoded, "LEFT_ALONE", 0.0)
    assert second.get()
    monkeypatch.setattr(stampede.algorithm.encoded, "LEFT_ALONE", 3600.0)
    assert first.get(), "the key still has the first version's entry"
    assert [first.get(), second.get()] == [False, False]
