"""The classes of Django's tests, with our backend in their settings."""

import os
import tempfile

from cache import tests as of_caches
from django.test import TestCase, override_settings
from sessions_tests import tests as of_sessions

BACKEND = "stampede.contrib.django.StampedeCache"
ENGINES = {
    "Memory": {"BACKEND": BACKEND, "LOCATION": "memory://"},
    "Disk": {"BACKEND": BACKEND, "LOCATION": f"disk://{tempfile.mkdtemp()}"},
    "Redis": {"BACKEND": BACKEND, "LOCATION": os.environ["REDIS_URL"]},
}
PAGES = (
    "CacheUtils",
    "PrefixedCacheUtils",
    "CacheHEADTest",
    "CacheI18nTest",
    "PrefixedCacheI18nTest",
    "CacheMiddlewareTest",
    "TestWithTemplateResponse",
    "TestMakeTemplateFragmentKey",
)
SESSIONS = ("CacheDBSessionTests", "CacheDBSessionWithTimeZoneTests", "CacheSessionTests", "SessionMiddlewareTests")


def over(engine, kinds, **caches):
    """Define classes of this module: the published ones, with these caches on this engine."""
    for kind in kinds:
        made = type(f"{engine}{kind.__name__}", kind if isinstance(kind, tuple) else (kind,), {"__module__": __name__})
        globals()[made.__name__] = override_settings(CACHES=caches)(made)


for name, settings in ENGINES.items():
    no_bounds = None if name == "Memory" else {"cull", "zero_cull"}
    backend = type(f"{name}Backend", (of_caches.BaseCacheTests, TestCase), {"__module__": __name__})
    given = of_caches.caches_setting_for_tests(base=settings, exclude=no_bounds)
    globals()[backend.__name__] = override_settings(CACHES=given)(backend)
    other = {**settings, "TIMEOUT": "1", "OPTIONS": {"namespace": "other"}}
    over(name, [getattr(of_caches, each) for each in PAGES], default=settings, other=other)
    over(name, [getattr(of_sessions, each) for each in SESSIONS], default=settings)
del backend
