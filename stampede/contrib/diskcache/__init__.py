"""diskcache's successor: its `Cache`, `FanoutCache` and recipes, over `disk://`, without pickles.

from stampede.contrib.diskcache import Cache          # was: from diskcache import Cache

cache = Cache("/var/cache/shop")"""

from stampede.contrib.diskcache.cache import ENOVAL, Cache, FanoutCache, Unsupported
from stampede.contrib.diskcache.keys import OpaqueKey
from stampede.contrib.diskcache.recipes import (
    Averager,
    BoundedSemaphore,
    Lock,
    RLock,
    barrier,
    memoize_stampede,
    throttle,
)
from stampede.errors import EngineError as Timeout  # a writer that waited for too long, and all that is as bad

__all__ = [
    "ENOVAL", "Averager", "BoundedSemaphore", "Cache", "FanoutCache", "Lock", "OpaqueKey", "RLock", "Timeout",
    "Unsupported", "barrier", "memoize_stampede", "throttle",
]  # fmt: skip
