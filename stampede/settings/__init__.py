"""What users can choose: options of functions and caches, with their checks and defaults, and the settings file.

This room finds, reads and checks settings. `api/registry.py` decides which caches are made from them.
Begin with `options.py`, then `model.py`. A file looks like this:

[caches.default]
url = "redis://:${REDIS_PASSWORD}@localhost/0"
ttl = "10m"
local = { entries = 10_000 }

[origins.orders-db]
concurrency = 8
rate = "100/1s"

[observers]
prometheus = true
mine = "shop.metrics:on_event"
"""

from stampede.settings.model import CacheSettings, LocalSettings, OriginSettings, RateSetting, Settings, safe_url
from stampede.settings.read import TABLES, cache_settings, discover, from_mapping, load, origin_settings

__all__ = [
    "TABLES", "CacheSettings", "LocalSettings", "OriginSettings", "RateSetting", "Settings",
    "cache_settings", "discover", "from_mapping", "load", "origin_settings", "safe_url",
]  # fmt: skip
