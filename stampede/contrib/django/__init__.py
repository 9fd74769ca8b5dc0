"""Django on stampede: a backend for `CACHES`, pages and template fragments without herds, and models that invalidate.

Put `"stampede.contrib.django"` into `INSTALLED_APPS` for the template tag, the checks and `manage.py stampede`. The
backend works without that.
"""

from stampede.contrib.django.address import url_of
from stampede.contrib.django.backend import StampedeCache
from stampede.contrib.django.pages import CacheMiddleware, cache_page
from stampede.contrib.django.tags import TaggedManager, TaggedQuerySet, invalidate_tags, tagged

__all__ = [
    "CacheMiddleware",
    "StampedeCache",
    "TaggedManager",
    "TaggedQuerySet",
    "cache_page",
    "invalidate_tags",
    "tagged",
    "url_of",
]
