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
from stampede.model.policy import nearest, seconds
from stampede.model.ports import Engine
from stampede.model.result import LeftOut

__all__ = ["StampedeBackend"]

_log = logging.getLogger("stampede")

_CACHE = ("locks", "local", "namespace", "trust", "signing_key", "compress", "max_bytes", "on_engine_error")
ARGUMENTS = ("url", "cache", "ttl", "lease", "max_hold", "codec", "strict", *_CACHE)

MEANWHILE = 5.0
"""Seconds for which this process keeps what it has computed while the engine could not be asked."""

MOST_TOLD = 20
"""Of so many kinds of keys people are told that they can't be kept: each once, and keys may be mangled."""

_REFUSED = b"\x00stampede can't keep this: "
"""What the serializer gives for a value that it refuses, before the reason."""


class StampedeBackend(BytesBackend):
    """Values and mutexes on one of our engines. `arguments` are:

    - `url` (`memory://` if it isn't given) and `locks`, as of `Cache`; or `cache`, a Cache that is there already;
    - `ttl`: how long an engine keeps a value, whatever the region's `expiration_time` says (for ever): some times that;
    - `lease` (10 s): how long a mutex outlives its process; `max_hold` (10 minutes): and how long a creator that hangs;
    - `namespace` ("dogpile"): regions of one namespace on one engine share their keys, as on any of dogpile's backends;
    - `codec`: "sealed", or "pickle" with a `signing_key`, or on `memory://` "objects", which are kept as they are.
      The region's own `serializer` goes before it;
    - `strict`: a value that can't be kept is an error. Otherwise its caller has it, and the log says so, once;
    - `trust`, `signing_key`, `compress`, `max_bytes`, `local`, `on_engine_error`: as of `Cache`.

    >>> from dogpile.cache import make_region
    >>> region = make_region().configure("stampede", arguments={"url": "memory://"})
    >>> region.get_or_create("answer", lambda: 42)
    42
    """

    def __init__(self, arguments: BackendArguments) -> None:
        given = dict(arguments)
        for name in given.keys() - set(ARGUMENTS):  # dogpile's own backends overlook them, and so have to others
            _log.warning("there is no argument %r for the backend 'stampede': %s", name, nearest(str(name), ARGUMENTS))
        self._ttl = seconds("ttl", given.get("ttl"))
        lease, hold = seconds("lease", given.get("lease", 10.0)), seconds("max_hold", given.get("max_hold", 600.0))
        self.max_hold = hold
        self._strict = bool(given.get("strict", False))
        self._told_of: set[str] = set()  # what the keys begin with that were told to be refused
        if isinstance(given.get("trust"), str):  # out of an ini file
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
        self._as_kept: dict[str, Any] = {} if settings.policy.early == 0 else {"early": 0.0}  # ends are the region's
        self._meanwhile: Cache | None = None  # what was computed while the engine could not be asked
        self.serializer, self.deserializer = _serialization(given.get("codec", "sealed"), self.cache)

    # -- values: bytes, as the region has serialized them, but with `codec="objects"` ---------------------------------

    def get(self, key: str) -> BackendFormatted:
        if not self._local:
            return _told(self.cache.get(key, self._kept_meanwhile(key)))
        if self._mutexes.held_here(key):
            return self.get_multi([key])[0]
        try:
            return _told(self.cache.get_or_compute(key, _nobody, **self._as_kept))
        except LeftOut:
            return _told(self._kept_meanwhile(key))

    def get_multi(self, keys: Iterable[str]) -> Sequence[BackendFormatted]:
        """All of them in one round trip."""
        wanted = list(keys)
        if not wanted:
            found: dict[str, Any] = {}
        elif self._local and not any(map(self._mutexes.held_here, wanted)):
            # What is read is to stay in this process, of which `get_many` takes no care. But not where it is read once
            # more under the mutex: another process may have stored a newer one, and the news be on their way.
            found = self.cache.get_or_compute_many(wanted, _nothing, **self._as_kept)
        else:
            found = self.cache.get_many(wanted)
        return [_told(found[key] if key in found else self._kept_meanwhile(key)) for key in wanted]

    def set(self, key: str, value: BackendSetType) -> None:
        self.set_multi({key: value})

    def set_multi(self, mapping: Mapping[str, BackendSetType]) -> None:
        """All of them in one round trip, where the engine can.

        A computed value that can't be kept fails nobody's request: its creator has given it. One that is just to be set
        is an error then.
        """
        computed = all(self._mutexes.held_here(key) for key in mapping)
        kept = {key: _plain(value) for key, value in mapping.items() if self._may_keep(key, value, computed)}
        if not kept:
            return
        if computed and not self._strict_engine and self.cache.down:
            self._keep_meanwhile(kept)
            return
        try:
            self.cache.set_many(kept, ttl=self._ttl)
            self._meanwhile = None
        except EngineClosed:
            raise
        except EngineError as trouble:
            if not computed or self._strict_engine:
                raise
            _log.warning("what was computed for %r is kept here only, for %g s: %s", [*kept], MEANWHILE, trouble)
            self._keep_meanwhile(kept)
        except CodecError as refusal:  # too large
            self._refuse([*kept], str(refusal), strict=self._strict or not computed)

    # BytesBackend has them apart.
    get_serialized: Any = get
    get_serialized_multi: Any = get_multi
    set_serialized: Any = set
    set_serialized_multi: Any = set_multi

    def delete(self, key: str) -> None:
        self.delete_multi([key])

    def delete_multi(self, keys: Iterable[str]) -> None:
        """All of them in one round trip, where the engine can."""
        self._meanwhile = None  # before, so that it is gone here even if the engine can't be asked
        self.cache.invalidate_many(keys)

    def get_mutex(self, key: str) -> Mutex:
        """A lease on this key, in every process: held while its creator runs, and given up by a process that dies."""
        return self._mutexes.of(key)

    # -- how ----------------------------------------------------------------------------------------------------------

    def _may_keep(self, key: str, value: BackendSetType, computed: bool) -> bool:
        mutex = self._mutexes.held_here(key)
        refused = value.partition(b"|")[2] if isinstance(value, bytes) and _REFUSED in value else b""
        if refused.startswith(_REFUSED):
            why = refused.removeprefix(_REFUSED).decode("utf-8", "replace")
            self._refuse([key], why, strict=self._strict or not computed)
            return False
        if mutex is not None and mutex.lost:
            _log.warning("%r took longer than its mutex stood: its value isn't kept, as there may be a newer one", key)
            return False
        return True

    def _keep_meanwhile(self, kept: dict[str, Any]) -> None:
        meanwhile = self._meanwhile = self._meanwhile or Cache("memory://", ttl=MEANWHILE)
        meanwhile.set_many(kept)

    def _kept_meanwhile(self, key: str) -> Any:
        meanwhile = self._meanwhile
        return NO_VALUE if meanwhile is None else meanwhile.get(key, NO_VALUE)

    def _refuse(self, keys: Sequence[str], why: str, *, strict: bool) -> None:
        named = ", ".join(map(repr, keys))
        if strict:
            raise CodecError(f"{named}: {why}")
        kinds = {_function_of(key) for key in keys} - self._told_of
        if kinds and len(self._told_of) < MOST_TOLD:
            self._told_of |= kinds
            where = f"the region on {self.cache.name}"
            _log.error("%s of %s can't be kept, and is computed each time: %s", named, where, why)


def _function_of(key: str) -> str:
    """What stands in a key before the arguments, as dogpile's own key generators make it; or its first word."""
    return key.rpartition("|")[0] or key.partition(":")[0]


def _nobody() -> Any:
    """Whoever computes is the region."""
    raise LeftOut


def _nothing(keys: list[str]) -> dict[str, Any]:
    return {}


def _plain(value: BackendSetType) -> Any:
    """What the memory engine finds nothing strange in, but for what the user has put there."""
    return value if isinstance(value, bytes) else (value.payload, value.metadata)


def _told(value: Any) -> BackendFormatted:
    if type(value) is bytes:
        return value
    return CachedValue(*value) if type(value) is tuple else NO_VALUE


def _serialization(codec: str, cache: Cache) -> tuple[Serializer | None, Deserializer | None]:
    """What turns a region's values into bytes, if it has nothing of its own for that."""
    here = not cache.engine.shared
    if codec == "objects" and here:
        return None, None
    if codec == "pickle" and (here or cache.settings.signing_key):
        return _refusing(pickle.dumps), _believing(pickle.loads)
    if codec == "pickle":
        raise OptionError("codec='pickle' runs what is in the bytes: give a signing_key, or use codec='sealed'")
    if codec == "objects":
        raise OptionError(f"codec='objects' keeps values as they are, and {cache.name} has to have bytes: leave it out")
    if codec != "sealed":
        raise OptionError(f"codec is {codec!r}: give 'sealed' or 'pickle' here, or the region a serializer of its own")
    sealed = body_of("sealed", None, cache.trusted, signed=False)
    return _refusing(lambda value: sealed.dump(value, False)), _believing(lambda body: sealed.load(body, False))


def _refusing(dump: Serializer) -> Serializer:
    """A region serializes in the middle of a request: what is refused is told to `set`, which knows what to do."""

    def serialize(value: Any) -> bytes:
        try:
            return dump(value)
        except Exception as error:  # also of the value's own code
            # A region reads no annotations.
            why = str(error).replace(f", or in {ANNOTATION}", " of the region's arguments")
            return _REFUSED + why.encode("utf-8", "replace")

    return serialize


def _believing(load: Deserializer) -> Deserializer:
    def deserialize(body: bytes) -> Any:
        try:
            return load(body)
        except Exception as error:  # pickle raises whatever the bytes, or a class, make of it
            raise CantDeserializeException(str(error)) from error

    return deserialize


# -- one engine for all regions of a URL -----------------------------------------------------------------------------

_engines: WeakValueDictionary[str, Engine] = WeakValueDictionary()


def _opened(given: Mapping[str, Any]) -> Cache:
    """A cache of its own, on an engine that regions of the same URL share: and so one pool of connections."""
    url = given.get("url", "memory://")
    options = {name: given[name] for name in _CACHE if name in given}
    options.setdefault("namespace", "dogpile")
    options["early"] = 0.0
    if not isinstance(url, str) or url.startswith("memory:"):
        return Cache(url, **options)
    engine = _engines.get(url) or _engines.setdefault(url, open_engine(url))
    return Cache(url, engine=engine, **options)
