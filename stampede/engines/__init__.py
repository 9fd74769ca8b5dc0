"""Engines store entries and grant leases. A URL's scheme selects the engine; its module is imported on first use.

Each engine is a file or a folder; `kit` has the parts that several of them share. `model` defines what a claim or a
lock decides; the engines carry it out. Begin with `cells/protocol.py`, the shortest way to an engine, then
`memory/__init__.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from sys import modules
from typing import TYPE_CHECKING, Any

from stampede.engines.kit.url import safe_url, scheme_of
from stampede.errors import MissingExtra, OptionError
from stampede.model.ports import Engine
from stampede.settings.options import nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["check_url", "engine_of", "open_engine", "safe_url", "schemes"]

# scheme: (module, extra of the package). The module defines `from_url(url, **options) -> Engine | Cell`.
_KNOWN = {
    "memory": ("stampede.engines.memory", "memory"),
    "disk": ("stampede.engines.disk", "disk"),
    "file": ("stampede.engines.file", "file"),
    "null": ("stampede.engines.null", "null"),
    "redis": ("stampede.engines.redis", "redis"),
    "rediss": ("stampede.engines.redis", "redis"),
    "unix": ("stampede.engines.redis", "redis"),
    "redis+cluster": ("stampede.engines.redis", "redis"),
    "redis+sentinel": ("stampede.engines.redis", "redis"),
    "memcached": ("stampede.engines.memcached", "memcached"),
    "sql": ("stampede.engines.sql", "sql"),
    "dynamodb": ("stampede.engines.dynamodb", "dynamodb"),
    "postgres": ("stampede.engines.postgres", "postgres"),
    "postgresql": ("stampede.engines.postgres", "postgres"),
    "postgresql+psycopg": ("stampede.engines.postgres", "postgres"),
    "postgresql+psycopg_async": ("stampede.engines.postgres", "postgres"),
    "postgresql+psycopg2": ("stampede.engines.postgres", "postgres"),
    "etcd": ("stampede.engines.etcd", "etcd"),
    "zookeeper": ("stampede.engines.zookeeper", "zookeeper"),
    "zmq": ("stampede.engines.zmq", "zmq"),
}

# package of a client's class or of a base class: scheme. Its module defines `of_client(client) -> Engine | Cell`.
_CLIENTS = {"redis": "redis", "sqlalchemy": "sql", "psycopg_pool": "postgres"}

Opener = Callable[..., object]


def open_engine(url: str, **options: Any) -> Engine:
    """Return the engine of a URL. Options may be given in its query or as arguments; arguments take precedence. Other
    packages can add engines. They declare an entry point of the group `stampede.engines`, named as the scheme, which
    refers to a function `from_url(url, **options)`. It returns an Engine, or a Cell from which an engine is made. It is
    also called for `scheme+anything://`."""
    scheme = _scheme(url)
    try:
        opened = _opener(scheme)(url, **options)
    except ModuleNotFoundError as missing:
        if scheme not in _KNOWN:
            raise
        line = f"pip install 'stampede-guard[{_KNOWN[scheme][1]}]'"
        raise MissingExtra(f"{scheme}:// needs the package {missing.name!r}: {line}") from missing
    engine = _engine_of(opened, scheme)
    if engine is None:
        raise OptionError(f"{scheme}:// gives {opened!r}, which is neither an Engine nor a Cell")
    engine.url = safe_url(url)
    return engine


def check_url(url: str) -> None:
    """Raise OptionError if no engine can be opened for this URL. Open no connection, and create nothing. What cannot be
    known yet, such as a missing package, is reported by `open_engine`."""
    scheme = _scheme(url)
    if scheme in _KNOWN:
        with suppress(ModuleNotFoundError):
            import_module(_KNOWN[scheme][0]).check_url(url)


def engine_of(client: object) -> Engine:
    """Return an engine for a client object of another library. It connects in the way in which the client connects."""
    packages = [kind.__module__.partition(".")[0] for kind in type(client).__mro__]
    scheme = next((_CLIENTS[each] for each in packages if each in _CLIENTS), "cell")
    given = client if scheme == "cell" else import_module(_KNOWN[scheme][0]).of_client(client)
    engine = _engine_of(given, scheme)
    if engine is None:
        raise OptionError(
            f"a cache can't be on {client!r}: give a URL, an engine, a cell, or a client of {' or '.join(_CLIENTS)}"
        )
    return engine


def schemes() -> list[str]:
    """Return every scheme that can be used, even if its package is not installed."""
    return sorted({*_KNOWN, *_foreign()})


def _scheme(url: str) -> str:
    """Return the scheme under which the engine is known: the URL's whole scheme, or the part before its first `+`."""
    scheme = scheme_of(url)
    family, _, _ = scheme.partition("+")
    if scheme in _KNOWN:
        return scheme
    if family == "sql":  # the part after the `+` is for SQLAlchemy
        return family
    for name in (scheme, family):
        if name in _foreign():
            return name
    raise OptionError(f"there is no engine {scheme + '://'!r}: {nearest(scheme, schemes())}")


def _opener(scheme: str) -> Opener:
    opener: Opener = import_module(_KNOWN[scheme][0]).from_url if scheme in _KNOWN else _foreign()[scheme].load()
    return opener


def _engine_of(given: object, scheme: str) -> Engine | None:
    """Return `given` if it is an engine, or an engine made from it if it is a cell, or None."""
    cells = modules.get("stampede.engines.cells")  # not imported yet: then `given` cannot be a cell
    if cells is not None and isinstance(given, cells.Cell):
        given = cells.CellEngine(given, scheme)
    return given if isinstance(given, Engine) else None


def _foreign() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # late: a tenth of our import time, and few programs need it

    return {point.name: point for point in entry_points(group="stampede.engines")}
