"""Django's settings for tests: imported before anything that needs them, in each process once."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import django
from django.conf import settings

urlpatterns: list[Any] = []  # of ROOT_URLCONF; tests replace it

if not settings.configured:
    for app in ("shop", "library"):
        sys.modules[app] = ModuleType(app)
        sys.modules[app].__file__ = __file__
    settings.configure(
        SECRET_KEY="of the tests",
        ALLOWED_HOSTS=["testserver"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        INSTALLED_APPS=["shop", "library", "django.contrib.sessions", "stampede.contrib.django"],
        CACHES={"default": {"BACKEND": "stampede.contrib.django.StampedeCache"}},
        SESSION_ENGINE="django.contrib.sessions.backends.cache",
        ROOT_URLCONF="django_project",
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
        LANGUAGES=[("en", "English"), ("de", "German")],
        USE_TZ=True,
    )
    django.setup()
