"""cachelib: a cache on any of our engines, for Flask-Caching, Flask-Session and other users of `cachelib.BaseCache`.

cache = StampedeCache("redis://localhost:6379/0", signing_key=SECRET)
cache.set("user:5", user, timeout=60)"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, Unpack

from cachelib import BaseCache

from stampede.api.cache import Cache
from stampede.api.typing import CacheOptions
from stampede.codecs.choose import body_of
from stampede.codecs.envelope import Body
from stampede.errors import CodecError
from stampede.settings.options import LONGEST

__all__ = ["Serializer", "StampedeCache"]

_log = logging.getLogger("stampede")
_MISSING = object()


class Serializer(Protocol):
    """Turns values into bytes, and bytes into values, as the serializers of cachelib do: `cache.serializer = ...`.

    >>> from cachelib.serializers import JSONSerializer
    >>> from stampede.contrib.cachelib import StampedeCache
    >>> cache = StampedeCache("memory://")
    >>> cache.serializer = JSONSerializer()
    >>> cache.set("pair", (1, 2)), cache.get("pair")
    (True, [1, 2])
    """

    def dumps(self, value: Any, /) -> bytes | None: ...

    def loads(self, data: bytes, /) -> Any: ...


class StampedeCache(BaseCache):
    """A `cachelib.BaseCache` on one of our engines. It takes the arguments of `stampede.Cache`, and cachelib's.

    Each reader gets a copy of its own of what was stored, on `memory://`, too. Any object that pickle can store is
    stored, if nobody else can write the bytes: on `memory://`, or with a `signing_key`, which signs them. Otherwise,
    only values that `codec="sealed"` knows are stored, and others raise `CodecError`. `serializer`, an attribute, may
    be replaced by a serializer of cachelib.

    `cache` is the `stampede.Cache` below. Its values are bytes, and integers.

    >>> from stampede.contrib.cachelib import StampedeCache
    >>> cache = StampedeCache("memory://", default_timeout=60)
    >>> cache.set("tea", {"price": 3}), cache.get("tea"), cache.inc("visits"), cache.inc("visits")
    (True, {'price': 3}, 1, 2)
    """

    serializer: Serializer

    def __init__(
        self,
        url: str | object = "memory://",
        default_timeout: int | timedelta = 300,
        ignore_delete_many_errors: bool = True,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(default_timeout, ignore_delete_many_errors)
        codec = options.pop("codec", None)
        options.setdefault("namespace", "cachelib")
        self.cache = Cache(url, **options)
        if not hasattr(self, "serializer"):  # a subclass may have one, as in cachelib
            signed = bool(self.cache.settings.signing_key) or not self.cache.engine.shared  # memory:// is not shared
            trusted = self.cache.trusted
            codec = codec or ("pickle" if signed and not trusted else "sealed")
            self.serializer = _OurSerializer(body_of(codec, None, trusted, signed))

    def seconds(self, timeout: float | timedelta | None) -> float | None:
        """Return a timeout of cachelib as a `ttl`: None, which means the default there, and 0, which means for ever.

        >>> from stampede.contrib.cachelib import StampedeCache
        >>> cache = StampedeCache(default_timeout=60)
        >>> cache.seconds(None), cache.seconds(5), cache.seconds(0)
        (60, 5, None)
        """
        given = self.default_timeout if timeout is None else timeout
        wanted = given.total_seconds() if isinstance(given, timedelta) else given
        return None if wanted == 0 or wanted > LONGEST else max(wanted, 0)

    def dumps(self, value: Any) -> bytes | int:
        """Return what is stored for a value. CodecError: it can't be stored."""
        if type(value) is int:
            return value
        data = self.serializer.dumps(value)
        if data is None:
            raise CodecError(f"{type(self.serializer).__name__} can't store a {type(value).__name__}")
        return data

    def loads(self, stored: Any, default: Any = None) -> Any:
        """Return the value of what is stored, or the default if it can't be read, which the log says."""
        if type(stored) is int:
            return stored
        try:
            return self.serializer.loads(stored)
        except Exception as error:  # of pickle, or of a class that has changed
            _log.warning("%s: a stored value can't be read, and counts as missing: %r", self.cache.name, error)
            return default

    # -- cachelib's verbs ---------------------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, or the default if there is none."""
        stored = self.cache.get(key, _MISSING)
        return default if stored is _MISSING else self.loads(stored, default)

    def get_many(self, *keys: str) -> list[Any]:
        """Return the values in the order of the keys, and None for each that is missing, in one round trip."""
        found = self.cache.get_many(keys)
        return [self.loads(found[key]) if key in found else None for key in keys]

    def has(self, key: str) -> bool:
        """Return whether there is a value. None is one, too."""
        return self.cache.get(key, _MISSING) is not _MISSING

    def set(self, key: str, value: Any, timeout: float | timedelta | None = None) -> bool:
        """Store a value. CodecError: it can't be stored. EngineError: the engine can't be reached."""
        self.cache.set(key, self.dumps(value), ttl=self.seconds(timeout))
        return True

    def add(self, key: str, value: Any, timeout: float | timedelta | None = None) -> bool:
        """Store a value unless there is one, and return whether it was stored. Of concurrent callers, one succeeds."""
        return self.cache.add(key, self.dumps(value), ttl=self.seconds(timeout))

    def set_many(self, mapping: dict[str, Any], timeout: float | timedelta | None = None) -> list[Any]:
        """Store many values, in one round trip if the engine can, and return their keys."""
        self.cache.set_many({key: self.dumps(value) for key, value in mapping.items()}, ttl=self.seconds(timeout))
        return list(mapping)

    def delete(self, key: str) -> bool:
        """Remove a value, and return whether there was one. What is being computed for the key is not stored."""
        return self.cache.invalidate(key)

    def delete_many(self, *keys: str) -> list[Any]:
        """Remove many values, in one round trip if the engine can, and return the keys."""
        self.cache.invalidate_many(keys)
        return list(keys)

    def clear(self) -> bool:
        """Remove everything in this namespace, in every process."""
        self.cache.clear()
        return True

    def inc(self, key: str, delta: int = 1) -> int | None:
        """Add to a number, which begins at 0, and return the sum. No concurrent change is lost."""
        return self._change(key, lambda number: number + delta)

    def dec(self, key: str, delta: int = 1) -> int | None:
        """Subtract from a number, which begins at 0, and return the difference. No concurrent change is lost."""
        return self._change(key, lambda number: number - delta)

    def _change(self, key: str, change: Callable[[Any], int]) -> int:
        def changed(stored: Any) -> bytes | int:
            return self.dumps(change(self.loads(stored) or 0))

        stored = self.cache.update(key, changed, 0, in_place=True, ttl=self.seconds(None))
        number: int = self.loads(stored)
        return number


class _OurSerializer:
    """The body of one of our codecs, as a serializer."""

    def __init__(self, body: Body) -> None:
        self._body = body

    def dumps(self, value: Any) -> bytes:
        return bytes(self._body.dump(value, False))

    def loads(self, data: bytes) -> Any:
        return self._body.load(data, False)
