"""A read-through cache that prevents cache stampedes: one caller computes a missing value, all others share it."""

from stampede.api.cache import Cache
from stampede.api.current import current
from stampede.api.overrides import bypassed, refreshing
from stampede.api.registry import (
    Bulkhead,
    Limiter,
    Lock,
    cache_without_dogpiling,
    cached,
    configure,
    get_cache,
    limited,
    once,
    try_lock,
)
from stampede.api.tags import aexpire_tags, ainvalidate_tags, expire_tags, invalidate_tags
from stampede.codecs import ValueCodec
from stampede.errors import (
    Absent,
    CodecError,
    ComputationFailed,
    EngineError,
    KeyingError,
    LimitTimeout,
    LockLost,
    LockTimeout,
    MissingExtra,
    NoComputation,
    OptionError,
    OriginFull,
    RecursiveComputation,
    SettingsError,
    StampedeError,
    TooLarge,
    UnsupportedPatch,
    WaitTimeout,
)
from stampede.locks.holding import Holding
from stampede.model.entry import Entry

__version__ = "0.1.0"

__all__ = [
    "Absent",
    "Bulkhead",
    "Cache",
    "CodecError",
    "ComputationFailed",
    "EngineError",
    "Entry",
    "Holding",
    "KeyingError",
    "LimitTimeout",
    "Limiter",
    "Lock",
    "LockLost",
    "LockTimeout",
    "MissingExtra",
    "NoComputation",
    "OptionError",
    "OriginFull",
    "RecursiveComputation",
    "SettingsError",
    "StampedeError",
    "TooLarge",
    "UnsupportedPatch",
    "ValueCodec",
    "WaitTimeout",
    "aexpire_tags",
    "ainvalidate_tags",
    "bypassed",
    "cache_without_dogpiling",
    "cached",
    "configure",
    "current",
    "expire_tags",
    "get_cache",
    "invalidate_tags",
    "limited",
    "once",
    "refreshing",
    "try_lock",
]
