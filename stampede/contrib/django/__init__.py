"""Django on stampede: a cache backend, cached pages and fragments, and models that invalidate tags.

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
