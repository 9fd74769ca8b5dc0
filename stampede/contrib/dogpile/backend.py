"""A backend for dogpile's regions: `region.configure("stampede", arguments={"url": "redis://..."})`."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from dogpile.cache.api import (
    NO_VALUE,
    BackendArguments,
    BackendFormatted,
    BackendSetType,
    BytesBackend,
    CachedValue,
    CantDeserializeException,
    Deserializer,
    Serializer,
)

from stampede.api.cache import Cache
from stampede.codecs.choose import body_of
from stampede.codecs.remedies import ANNOTATION
from stampede.contrib.dogpile.mutex import Mutex, Mutexes
from stampede.engines import open_engine
from stampede.errors import CodecError, EngineClosed, EngineError, OptionError
from stampede.locks.lock import Lock
from stampede.model.ports import Engine
from stampede.settings.options import nearest, seconds

__all__ = ["StampedeBackend"]

_log = logging.getLogger("stampede")

_CACHE = ("locks", "local", "namespace", "trust", "signing_key", "compress", "max_bytes", "on_engine_error")
ARGUMENTS = ("url", "cache", "ttl", "lease", "max_hold", "codec", "strict", *_CACHE)

MEANWHILE = 5.0
"""Seconds for which this process stores what it computes while the engine can't be reached."""

MOST_LOGGED = 20
"""The most kinds of keys of which the log says, once each, that they can't be stored. Mangled keys all differ."""

_REFUSED = b"\x00stampede can't keep this: "
"""What the serializer returns for a value that it refuses, followed by the reason."""


class StampedeBackend(BytesBackend):
    """Values and mutexes on one of our engines. `arguments` are:

    - `url` (default: `memory://`) and `locks`, as of `Cache`; or `cache`, an existing Cache;
    - `ttl`: how long the engine stores a value (default: for ever), whatever the region's `expiration_time` says. Give
      it several times that;
    - `lease` (10 s): how long a mutex outlives its process; `max_hold` (10 minutes): how long a hung creator holds it;
    - `namespace` ("dogpile"): regions of one namespace on one engine share their keys, as on any of dogpile's backends;
    - `codec`: "sealed", or "pickle" with a `signing_key`, or on `memory://` "objects", which stores values unchanged.
      The region's own `serializer` takes precedence;
    - `strict`: a value that can't be stored is an error. Otherwise its caller gets it, and the log says so, once;
    - `trust`, `signing_key`, `compress`, `max_bytes`, `local`, `on_engine_error`: as of `Cache`.

    >>> from dogpile.cache import make_region
    >>> region = make_region().configure("stampede", arguments={"url": "memory://"})
    >>> region.get_or_create("answer", lambda: 42)
    42
    """

    def __init__(self, arguments: BackendArguments) -> None:
        given = dict(arguments)
        for name in given.keys() - set(ARGUMENTS):  # as dogpile's own backends do, accept unknown names
            _log.warning("the backend 'stampede' has no argument %r: %s", name, nearest(str(name), ARGUMENTS))
        self._ttl = seconds("ttl", given.get("ttl"))
        lease, hold = seconds("lease", given.get("lease", 10.0)), seconds("max_hold", given.get("max_hold", 600.0))
        self.max_hold = hold
        self._strict = bool(given.get("strict", False))
        self._logged_kinds: set[str] = set()  # the kinds of keys whose refusal was logged
        if isinstance(given.get("trust"), str):  # from an ini file
            given["trust"] = [each.strip() for each in given["trust"].split(",")]
        self.cache = given.get("cache") or _opened(given)
        if not isinstance(self.cache, Cache):
            raise OptionError(f"cache is {self.cache!r}: give a Cache, or its url")
        settings, engine = self.cache.settings, self.cache.engine
        self._strict_engine = settings.on_engine_error == "raise"
        self._mutexes = Mutexes(
            lambda key: Lock(f"dogpile {settings.namespace}:{key}", engine, lease=lease, max_hold=hold),
            lambda: self.cache.down,
            strict=self._strict_engine,
        )
        self._local = bool(settings.local) and engine.shared
        self._meanwhile: Cache | None = None  # what was computed while the engine could not be reached
        self.serializer, self.deserializer = _serialization(given.get("codec", "sealed"), self.cache)

    # -- values: bytes, as the region has serialized them, except with `codec="objects"` ------------------------------

    def get(self, key: str) -> BackendFormatted:
        if self._is_doubted(key):
            return self.get_multi([key])[0]
        return _as_dogpile(self.cache.get(key, self._stored_meanwhile(key)))

    def get_multi(self, keys: Iterable[str]) -> Sequence[BackendFormatted]:
        """Return the values of many keys, in one round trip."""
        wanted = list(keys)
        doubted = [key for key in wanted if self._is_doubted(key)]
        there = {key: entry.value for key in doubted if (entry := self.cache.peek(key)) is not None and entry.fresh > 0}
        found = self.cache.get_many(key for key in wanted if key not in doubted) | there
        return [_as_dogpile(found[key] if key in found else self._stored_meanwhile(key)) for key in wanted]

    def _is_doubted(self, key: str) -> bool:
        """Whether the local tier is not to be believed. This is the second read, under the mutex: another process may
        have stored a newer value, and its notification may still be on the way."""
        return self._local and self._mutexes.held_here(key) is not None

    def set(self, key: str, value: BackendSetType) -> None:
        self.set_multi({key: value})

    def set_multi(self, mapping: Mapping[str, BackendSetType]) -> None:
        """Store many values, in one round trip if the engine can. If a computed value can't be stored, no request
        fails, because its creator has returned it. A value that was not computed here raises the error."""
        computed = all(self._mutexes.held_here(key) for key in mapping)
        storable = {key: _plain(value) for key, value in mapping.items() if self._may_store(key, value, computed)}
        if not storable:
            return
        if computed and not self._strict_engine and self.cache.down:
            self._store_meanwhile(storable)
            return
        try:
            self.cache.set_many(storable, ttl=self._ttl)
            self._meanwhile = None
        except EngineClosed:
            raise
        except EngineError as trouble:
            if not computed or self._strict_engine:
                raise
            _log.warning("what was computed for %r is stored here only, for %g s: %s", [*storable], MEANWHILE, trouble)
            self._store_meanwhile(storable)
        except CodecError as refusal:  # too large
            self._refuse([*storable], str(refusal), strict=self._strict or not computed)

    # BytesBackend has separate methods for them.
    get_serialized: Any = get
    get_serialized_multi: Any = get_multi
    set_serialized: Any = set
    set_serialized_multi: Any = set_multi

    def delete(self, key: str) -> None:
        self.delete_multi([key])

    def delete_multi(self, keys: Iterable[str]) -> None:
        """Delete many keys, in one round trip if the engine can."""
        self._meanwhile = None  # first, so that they are deleted here even if the engine can't be reached
        self.cache.invalidate_many(keys)

    def get_mutex(self, key: str) -> Mutex:
        """Return a mutex for this key in all processes: a lease, which ends soon after its process has died."""
        return self._mutexes.of(key)

    # -- values that are stored here, or refused ----------------------------------------------------------------------

    def _may_store(self, key: str, value: BackendSetType, computed: bool) -> bool:
        mutex = self._mutexes.held_here(key)
        refused = value.partition(b"|")[2] if isinstance(value, bytes) and _REFUSED in value else b""
        if refused.startswith(_REFUSED):
            why = refused.removeprefix(_REFUSED).decode("utf-8", "replace")
            self._refuse([key], why, strict=self._strict or not computed)
            return False
        if mutex is not None and mutex.lost:
            _log.warning(
                "%r took longer than its mutex was held: its value isn't stored, as there may be a newer one", key
            )
            return False
        return True

    def _store_meanwhile(self, storable: dict[str, Any]) -> None:
        meanwhile = self._meanwhile = self._meanwhile or Cache("memory://", ttl=MEANWHILE)
        meanwhile.set_many(storable)

    def _stored_meanwhile(self, key: str) -> Any:
        meanwhile = self._meanwhile
        return NO_VALUE if meanwhile is None else meanwhile.get(key, NO_VALUE)

    def _refuse(self, keys: Sequence[str], why: str, *, strict: bool) -> None:
        named = ", ".join(map(repr, keys))
        if strict:
            raise CodecError(f"{named}: {why}")
        kinds = {_function_of(key) for key in keys} - self._logged_kinds
        if kinds and len(self._logged_kinds) < MOST_LOGGED:
            self._logged_kinds |= kinds
            where = f"the region on {self.cache.name}"
            _log.error("%s of %s can't be stored, and is computed each time: %s", named, where, why)


def _function_of(key: str) -> str:
    """Return the part of a key before the arguments, as dogpile's own key generators make it; or its first word."""
    return key.rpartition("|")[0] or key.partition(":")[0]


def _plain(value: BackendSetType) -> Any:
    """Return a value as bytes or a plain tuple, so that only the user's own payload may be of an unusual type."""
    return value if isinstance(value, bytes) else (value.payload, value.metadata)


def _as_dogpile(value: Any) -> BackendFormatted:
    if type(value) is bytes:
        return value
    return CachedValue(*value) if type(value) is tuple else NO_VALUE


def _serialization(codec: str, cache: Cache) -> tuple[Serializer | None, Deserializer | None]:
    """Return the serializer and the deserializer of a region that has none of its own."""
    here = not cache.engine.shared
    if codec == "objects" and here:
        return None, None
    if codec == "pickle" and (here or cache.settings.signing_key):
        return _refusing(pickle.dumps), _believing(pickle.loads)
    if codec == "pickle":
        raise OptionError("codec='pickle' can run code from the bytes: give a signing_key, or use codec='sealed'")
    if codec == "objects":
        raise OptionError(f"codec='objects' stores values unchanged, but {cache.name} needs bytes: leave codec out")
    if codec != "sealed":
        raise OptionError(f"codec is {codec!r}: give 'sealed' or 'pickle' here, or the region a serializer of its own")
    sealed = body_of("sealed", None, cache.trusted, signed=False)
    return _refusing(lambda value: sealed.dump(value, False)), _believing(lambda body: sealed.load(body, False))


def _refusing(dump: Serializer) -> Serializer:
    """Return a serializer that does not raise, because regions call it inside a request: `set` handles refusals."""

    def serialize(value: Any) -> bytes:
        try:
            return dump(value)
        except Exception as error:  # also from the value's own code
            # A region reads no annotations.
            why = str(error).replace(f", or in {ANNOTATION}", " of the region's arguments")
            return _REFUSED + why.encode("utf-8", "replace")

    return serialize


def _believing(load: Deserializer) -> Deserializer:
    def deserialize(body: bytes) -> Any:
        try:
            return load(body)
        except Exception as error:  # pickle may raise any exception: the bytes or a class decide
            raise CantDeserializeException(str(error)) from error

    return deserialize


# -- one engine for all regions of a URL -----------------------------------------------------------------------------

_engines: WeakValueDictionary[str, Engine] = WeakValueDictionary()


def _opened(given: Mapping[str, Any]) -> Cache:
    """Return a new cache on an engine that regions of the same URL share, and with it one pool of connections."""
    url = given.get("url", "memory://")
    options = {name: given[name] for name in _CACHE if name in given}
    options.setdefault("namespace", "dogpile")
    options["early"] = 0.0
    if not isinstance(url, str) or url.startswith("memory:"):
        return Cache(url, **options)
    engine = _engines.get(url) or _engines.setdefault(url, open_engine(url))
    return Cache(url, engine=engine, **options)
