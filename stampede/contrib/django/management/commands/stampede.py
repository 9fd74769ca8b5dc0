"""`manage.py stampede`: the caches of `CACHES` from the command line."""

from __future__ import annotations

from argparse import ArgumentParser
from importlib import import_module
from typing import Any

from django.conf import settings
from django.core.cache import caches
from django.core.management.base import BaseCommand, CommandError

from stampede.contrib.django.backend import StampedeCache
from stampede.errors import StampedeError


class Command(BaseCommand):  # type: ignore[misc]
    """`check`: whether each engine answers, and what it can't promise. `stats`: what it holds. `top`: the same every
    two seconds, with the changes. `clear`: remove all values."""

    help = "Check the caches of CACHES that are StampedeCaches, show what they hold, or clear them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("what", choices=["check", "stats", "top", "clear"])
        parser.add_argument("cache", nargs="?", help="a name in CACHES; by default check is about all, others: default")
        parser.add_argument("--every", type=float, default=2.0, help="seconds between two views of top")
        parser.add_argument("--times", type=int, help="end top after so many views")

    def handle(self, *args: Any, what: str, cache: str | None, every: float, times: int | None, **options: Any) -> None:
        names = [cache or "default"] if cache or what != "check" else list(settings.CACHES)
        found = {name: each for name in names if isinstance(each := caches[name], StampedeCache)}
        if not found:
            raise CommandError(f"{', '.join(names)}: no StampedeCache in CACHES")
        cli = import_module("stampede.cli.check"), import_module("stampede.cli.stats")  # a room above this one
        try:
            if what == "check":
                if not cli[0].check_caches({name: each.stampede.settings for name, each in found.items()}):
                    raise CommandError("an engine can't be used")
                return
            for each in found.values():
                if what == "clear":
                    each.clear()
                else:
                    cli[1].print_facts(each.stampede, every if what == "top" else None, times)
        except StampedeError as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt:
            return
