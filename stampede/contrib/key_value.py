"""py-key-value: a store on any of our engines, for FastMCP and other users of `AsyncKeyValue`.

async with StampedeStore("redis://localhost:6379/0") as store:
    await store.put("user:5", {"name": "bob"}, collection="users", ttl=60)"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, SupportsFloat, Unpack

from key_value.aio.errors import DeserializationError, InvalidTTLError, SerializationError
from key_value.aio.protocols.key_value import AsyncKeyValue

from stampede.api.cache import Cache
from stampede.api.typing import CacheOptions
from stampede.model.entry import Entry
from stampede.settings.options import LONGEST

__all__ = ["StampedeStore"]

Value = dict[str, Any]


class StampedeStore(AsyncKeyValue):
    """An `AsyncKeyValue` of py-key-value on one of our engines. It takes the arguments of `stampede.Cache`.

    Values are mappings that JSON can represent, as in the other stores: what is read is a copy, whose tuples are lists.
    Close the store with `await store.close()`, or use it in `async with`. If the engine can't be reached, all verbs
    raise EngineError, unless you give `on_engine_error="local"`: then nothing is found.

    `cache` is the `stampede.Cache` below. A key there is `collection::key`, and a value is a JSON text.

    >>> from stampede.contrib.key_value import StampedeStore
    >>> async def main():
    ...     async with StampedeStore("memory://") as store:
    ...         await store.put("tea", {"price": 3}, collection="shop", ttl=60)
    ...         return await store.get("tea", collection="shop"), await store.get("tea")
    >>> asyncio.run(main())
    ({'price': 3}, None)
    """

    def __init__(
        self,
        url: str | object = "memory://",
        *,
        default_collection: str = "default_collection",
        **options: Unpack[CacheOptions],
    ) -> None:
        options.setdefault("namespace", "key-value")
        options.setdefault("on_engine_error", "raise")  # "there is no such token" would be a wrong answer
        self.cache = Cache(url, **options)
        self.default_collection = default_collection

    async def get(self, key: str, *, collection: str | None = None) -> Value | None:
        """Return the value, or None if there is none."""
        (value,) = await self.get_many([key], collection=collection)
        return value

    async def get_many(self, keys: Sequence[str], *, collection: str | None = None) -> list[Value | None]:
        """Return the values in the order of the keys, and None for each that is missing, in one round trip."""
        wanted = self._keys(keys, collection)
        found = await self.cache.aget_many(wanted)
        return [_loaded(found[key]) if key in found else None for key in wanted]

    async def ttl(self, key: str, *, collection: str | None = None) -> tuple[Value | None, float | None]:
        """Return the value and the seconds until it expires, None for never. `(None, None)`: there is no value."""
        (pair,) = await self.ttl_many([key], collection=collection)
        return pair

    async def ttl_many(
        self, keys: Sequence[str], *, collection: str | None = None
    ) -> list[tuple[Value | None, float | None]]:
        """Return the values, and the seconds until each expires, in the order of the keys."""
        return [_pair(each) for each in await asyncio.gather(*map(self.cache.apeek, self._keys(keys, collection)))]

    async def put(
        self, key: str, value: Mapping[str, Any], *, collection: str | None = None, ttl: SupportsFloat | None = None
    ) -> None:
        """Store a value, for `ttl` seconds or for ever. SerializationError: it is not JSON."""
        await self.put_many([key], [value], collection=collection, ttl=ttl)

    async def put_many(
        self,
        keys: Sequence[str],
        values: Sequence[Mapping[str, Any]],
        *,
        collection: str | None = None,
        ttl: SupportsFloat | None = None,
    ) -> None:
        """Store many values, in one round trip if the engine can. If one of them is refused, none is stored."""
        pairs = zip(self._keys(keys, collection), map(_dumped, values), strict=True)
        await self.cache.aset_many(dict(pairs), ttl=_seconds(ttl))

    async def delete(self, key: str, *, collection: str | None = None) -> bool:
        """Remove a value, and return whether there was one."""
        return await self.delete_many([key], collection=collection) == 1

    async def delete_many(self, keys: Sequence[str], *, collection: str | None = None) -> int:
        """Remove many values, in one round trip if the engine can, and return how many there were."""
        return await self.cache.ainvalidate_many(self._keys(keys, collection))

    async def keys(self, collection: str | None = None, *, limit: int | None = None) -> list[str]:
        """Return the keys of a collection, at most 10,000 or `limit`. OptionError: the engine can't list its keys."""
        (prefix,) = self._keys([""], collection)
        found: list[str] = []
        async for key in self.cache.akeys(prefix):
            if len(found) >= (10_000 if limit is None else limit):
                break
            found.append(key.removeprefix(prefix))
        return found

    async def destroy_collection(self, collection: str) -> bool:
        """Remove all values of a collection, and return whether there were any."""
        (prefix,) = self._keys([""], collection)
        return await self.cache.ainvalidate_many([key async for key in self.cache.akeys(prefix)]) > 0

    async def destroy(self) -> bool:
        """Remove all values of all collections, in every process."""
        await self.cache.aclear()
        return True

    async def close(self) -> None:
        """Close the connections to the engine."""
        await self.cache.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _keys(self, keys: Sequence[str], collection: str | None) -> list[str]:
        name = collection or self.default_collection
        prefix = name.replace("%", "%25").replace(":", "%3A")  # so that no two pairs have one key
        return [f"{prefix}::{key}" for key in keys]


def _dumped(value: Mapping[str, Any]) -> str:
    try:
        if not all(isinstance(name, str) for name in value):
            raise TypeError("the mapping has a key that is no string")
        return json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise SerializationError(f"the value can't be written as JSON: {error}") from error


def _loaded(text: Any) -> Value:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise DeserializationError(f"the value is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise DeserializationError(f"the value is no JSON object, but a {type(value).__name__}")
    return value


def _pair(entry: Entry[str] | None) -> tuple[Value | None, float | None]:
    if entry is None or entry.fresh <= 0:
        return None, None
    return _loaded(entry.value), None if entry.fresh == float("inf") else entry.fresh


def _seconds(ttl: SupportsFloat | None) -> float | None:
    if ttl is None:
        return None
    if isinstance(ttl, (bool, str)) or not hasattr(ttl, "__float__") or not float(ttl) > 0:
        raise InvalidTTLError(ttl=ttl)
    return None if float(ttl) > LONGEST else float(ttl)
