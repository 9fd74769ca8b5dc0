"""A plugin for pytest with the fixtures of django-redis' tests, over our backend."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import django
import pytest
from django.conf import settings as ours

BACKEND = {"BACKEND": "stampede.contrib.django.StampedeCache", "LOCATION": os.environ["REDIS_URL"]}

ours.configure(
    SECRET_KEY="of the tests",
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"],
    CACHES={
        "default": BACKEND,
        "doesnotexist": {**BACKEND, "LOCATION": "redis://127.0.0.1:56379"},
        "sample": BACKEND,
        "with_prefix": {**BACKEND, "KEY_PREFIX": "test-prefix"},
    },
    SESSION_ENGINE="django.contrib.sessions.backends.cache",
)
django.setup()


@pytest.fixture
def cache() -> Iterator[Any]:
    from django.core.cache import cache

    yield cache
    cache.clear()


@pytest.fixture
def settings() -> Any:
    return ours


@pytest.fixture
def session(cache: Any) -> Any:
    from django.contrib.sessions.backends.cache import SessionStore

    return SessionStore()


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tests ask whether the backend has a certain kind of client, or of serializer. Ours has none."""
    from stampede.contrib.django import StampedeCache

    monkeypatch.setattr(StampedeCache, "client", SimpleNamespace(_serializer=None), raising=False)
