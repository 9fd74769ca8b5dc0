"""dogpile.cache: a backend for its regions, and a region class that uses our engines.

`region.configure("stampede", arguments={"url": ...})` needs no import: dogpile finds the backend by its entry point."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stampede.errors import MissingExtra

if TYPE_CHECKING:
    from stampede.contrib.dogpile.backend import StampedeBackend
    from stampede.contrib.dogpile.region import CacheRegion, make_region

__all__ = ["CacheRegion", "StampedeBackend", "make_region"]

_WHERE = {"CacheRegion": "region", "StampedeBackend": "backend", "make_region": "region"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "dogpile":
            raise
        line = "pip install 'stampede-guard[dogpile]'"
        raise MissingExtra(f"stampede.contrib.dogpile needs the package 'dogpile.cache': {line}") from missing
