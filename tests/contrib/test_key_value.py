"""`StampedeStore` as a store of py-key-value: what its own tests ask of all stores, in our words, as its source
distribution does not contain them; and what our store adds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("key_value.aio")

from key_value.aio.errors import DeserializationError, InvalidTTLError, SerializationError
from key_value.aio.protocols.key_value import AsyncEnumerateKeysProtocol, AsyncKeyValue
from key_value.aio.wrappers.passthrough_cache import PassthroughCacheWrapper
from key_value.aio.wrappers.prefix_keys import PrefixKeysWrapper
from servers import RedisServer, shared_redis

from stampede import EngineError
from stampede.contrib.key_value import StampedeStore


@pytest.fixture(params=["memory", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Opens a store on this engine, in the namespace of this test."""
    url = "memory://?entries=500" if request.param == "memory" else shared_redis().url

    @asynccontextmanager
    async def open_store() -> AsyncIterator[StampedeStore]:
        async with StampedeStore(url, namespace=tmp_path.name) as store:
            yield store

    return open_store


def test_it_follows_the_protocol() -> None:
    """FastMCP and the wrappers accept any object with these methods."""
    store = StampedeStore()
    assert isinstance(store, AsyncKeyValue) and isinstance(store, AsyncEnumerateKeysProtocol)


def test_values_come_and_go(opened: Callable[[], Any]) -> None:
    """The verbs for one key: a value is stored, replaced and deleted, in its collection only."""

    async def main() -> None:
        async with opened() as store:
            assert await store.get("k", collection="c") is None
            assert await store.ttl("k", collection="c") == (None, None)
            assert await store.delete("k", collection="c") is False
            await store.put("k", {"n": 1}, collection="c")
            await store.put("k", {"n": 2}, collection="c")
            assert await store.get("k", collection="c") == {"n": 2}
            assert await store.ttl("k", collection="c") == ({"n": 2}, None)
            assert await store.get("k") is None
            assert await store.delete("k", collection="c") is True
            assert await store.get("k", collection="c") is None

    asyncio.run(main())


def test_so_do_many(opened: Callable[[], Any]) -> None:
    """The verbs for many keys keep their order, and count what there was."""

    async def main() -> None:
        async with opened() as store:
            assert await store.delete_many(["a", "b"]) == 0
            await store.put_many(["a", "b"], ({"n": 1}, {"n": 2}), ttl=100)
            assert await store.get_many(["b", "c", "a"]) == [{"n": 2}, None, {"n": 1}]
            (value, left), missing = await store.ttl_many(["a", "c"])
            assert value == {"n": 1} and 90 < left <= 100 and missing == (None, None)
            assert await store.delete_many(["a", "b", "c"]) == 2
            assert await store.get_many(["a", "b"]) == [None, None]
            assert await store.get_many([]) == []
            with pytest.raises(ValueError):
                await store.put_many(["a", "b"], [{"n": 1}])

    asyncio.run(main())


def test_a_wrong_ttl_is_refused() -> None:
    """A ttl is a positive number. `True` would mean one second."""
    wrong: list[Any] = [0, -1, float("nan"), True, "5"]
    for ttl in wrong:
        with pytest.raises(InvalidTTLError):
            asyncio.run(StampedeStore().put("k", {"n": 1}, ttl=ttl))


def test_a_value_expires(opened: Callable[[], Any]) -> None:
    """After its ttl, a value is gone."""

    async def main() -> None:
        async with opened() as store:
            await store.put("k", {"n": 1}, ttl=0.05)
            async with asyncio.timeout(20):
                while await store.get("k") is not None:
                    await asyncio.sleep(0.01)
            assert await store.ttl("k") == (None, None)
            await store.put("k", {"n": 1}, ttl=1e12)  # as the other stores, which take any positive number
            assert await store.ttl("k") == ({"n": 1}, None)

    asyncio.run(main())


def test_values_are_json(opened: Callable[[], Any]) -> None:
    """What JSON can represent comes back, and is the reader's own. Tuples become lists, as in the other stores."""
    value = {"none": None, "text": "Grüße 🌍\n", "big": 10**18, "real": 1.5, "list": [True, {"deep": [{}]}], "1": ""}

    async def main() -> None:
        async with opened() as store:
            await store.put("k", value)
            (read,) = await store.get_many(["k"])
            assert read == value
            read["list"].append("mine")
            assert await store.get("k") == value
            await store.put("pair", {"pair": (1, 2)})
            assert await store.get("pair") == {"pair": [1, 2]}

    asyncio.run(main())


def test_what_is_not_json_is_refused() -> None:
    """The error is py-key-value's, and nothing is stored."""
    values: list[Any] = [datetime.now(UTC), uuid4(), {1, 2}, b"bytes"]

    async def main() -> None:
        store = StampedeStore()
        for wrong in (*({"value": value} for value in values), {5: "a key that is no string"}):
            with pytest.raises(SerializationError):
                await store.put("k", wrong)  # type: ignore[arg-type]
        assert await store.get("k") is None
        for stored in ("{", "[1]", "null", "[" * 100_000, 5, ["{}"], None):
            await store.cache.aset("default_collection::k", stored)
            with pytest.raises(DeserializationError):
                await store.get("k")

    asyncio.run(main())


def test_names_are_any_text(opened: Callable[[], Any]) -> None:
    """Long names, special characters, and separators inside names: no two pairs of collection and key are mixed up."""
    pairs = [
        ("a::b", "c"),
        ("a", "b::c"),
        ("a%3A%3Ab", "c"),
        ("a:", ":c"),
        ("c" * 1500, "k"),
        ("!@#$%^&*()", "k" * 800),
    ]

    async def main() -> None:
        async with opened() as store:
            for number, (collection, key) in enumerate(pairs):
                await store.put(key, {"n": number}, collection=collection)
            found = [await store.get(key, collection=collection) for collection, key in pairs]
            assert found == [{"n": number} for number in range(len(pairs))]
            assert await store.keys("a") == ["b::c"]

    asyncio.run(main())


def test_keys_are_listed_and_destroyed(opened: Callable[[], Any]) -> None:
    """`keys` lists one collection, `destroy_collection` removes it, and `destroy` removes all."""

    async def main() -> None:
        async with opened() as store:
            await store.put_many(["a", "b", "c"], [{}] * 3, collection="one")
            await store.put("a", {}, collection="two")
            assert sorted(await store.keys("one")) == ["a", "b", "c"] and len(await store.keys("one", limit=2)) == 2
            assert await store.destroy_collection("one") is True and await store.destroy_collection("one") is False
            assert await store.keys("one") == [] and await store.keys("two") == ["a"]
            assert await store.destroy() is True
            assert await store.get("a", collection="two") is None

    asyncio.run(main())


def test_wrappers_of_py_key_value(opened: Callable[[], Any]) -> None:
    """Its wrappers work over the store, and the store works as the cache in front of another one."""

    async def main() -> None:
        async with opened() as store:
            wrapped = PrefixKeysWrapper(PassthroughCacheWrapper(store, StampedeStore("memory://")), prefix="mcp")
            await wrapped.put("k", {"n": 1}, ttl=60)
            assert await wrapped.get("k") == await wrapped.get("k") == {"n": 1}
            assert await wrapped.delete("k") is True and await wrapped.get("k") is None

    asyncio.run(main())


def test_an_engine_that_is_down_is_an_error() -> None:
    """ "There is no such token" would log every user out. So all verbs raise."""
    server = RedisServer()

    async def main() -> None:
        async with StampedeStore(server.url) as store:
            await store.put("token", {"user": "bob"})
            server.stop()
            for ask in (store.get("token"), store.ttl("token"), store.put("token", {}), store.delete("token")):
                with pytest.raises(EngineError):
                    await ask

    try:
        asyncio.run(main())
    finally:
        server.close()
