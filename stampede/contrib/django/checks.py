"""A check of `CACHES`, of models with tags and of the middleware, for `manage.py check`."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.utils.module_loading import import_string

from stampede.contrib.django.backend import StampedeCache
from stampede.contrib.django.tags import TaggedQuerySet, tagged_models
from stampede.errors import StampedeError

__all__ = ["check_caches"]

_OURS = "stampede.contrib.django.CacheMiddleware"


def check_caches(**_: Any) -> list[CheckMessage]:
    """Return what is wrong with the settings of our caches, without connecting to a server."""
    found: list[CheckMessage] = []
    for alias, params in settings.CACHES.items():
        try:
            kind = import_string(params.get("BACKEND", ""))
        except ImportError:
            continue  # Django says so
        if not (isinstance(kind, type) and issubclass(kind, StampedeCache)):
            continue
        try:
            url = kind(params.get("LOCATION", ""), params).stampede.settings.url
        except StampedeError as error:
            found.append(Error(f"CACHES[{alias!r}]: {error}", id="stampede.E001"))
            continue
        if url.startswith("memory://") and not settings.DEBUG:
            hint = "Give LOCATION the URL of an engine that processes share, such as disk:///var/cache/shop."
            what = f"CACHES[{alias!r}] is memory://, of which each process has its own."
            found.append(Warning(what, hint, id="stampede.W001"))
    for model in tagged_models():
        if isinstance(model._default_manager.all(), TaggedQuerySet) and not isinstance(
            model._base_manager.all(), TaggedQuerySet
        ):
            what = f"{model._meta.label} has a TaggedManager, but its related managers do not use it."
            found.append(Warning(what, 'Set base_manager_name = "objects" in its Meta.', id="stampede.W002"))
    middleware = list(settings.MIDDLEWARE)
    if _OURS in middleware and middleware[0] != _OURS:
        hint = "Otherwise it does not see the Vary header that others add, and stores pages of one user for all."
        found.append(Error(f"{_OURS} is not the first in MIDDLEWARE.", hint, id="stampede.E002"))
    return found
