"""The application `stampede.contrib.django`, for `INSTALLED_APPS`."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import Tags, register

from stampede.contrib.django.checks import check_caches


class StampedeConfig(AppConfig):  # type: ignore[misc]
    name = "stampede.contrib.django"
    label = "stampede"

    def ready(self) -> None:
        register(check_caches, Tags.caches)
