"""Engines: what stores entries and grants leases, by the scheme of their URL, each imported when it is first used.

A file or a folder for each engine; `kit` has what several of them are made of. What a claim or a lock decides is said
in `model`, and done here. Begin with `cells/protocol.py`, the shortest way to an engine, then `memory/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from sys import modules
from typing import TYPE_CHECKING, Any

from stampede.engines.kit.url import safe_url, scheme_of
from stampede.errors import MissingExtra, OptionError
from stampede.model.policy import nearest
from stampede.model.ports import Engine

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["check_url", "engine_of", "open_engine", "safe_url", "schemes"]

# scheme: (module, extra of the package); the module has `from_url(url, **options) -> Engine | Cell`
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

# package of a client object's class, or of one above it: scheme, whose module has `of_client(client) -> Engine | Cell`
_CLIENTS = {"redis": "redis", "sqlalchemy": "sql", "psycopg_pool": "postgres"}

Opener = Callable[..., object]


def open_engine(url: str, **options: Any) -> Engine:
    """The engine of a URL. Options may stand in its query or be given here, where they win.

    Packages may bring engines of their own: an entry point of the group `stampede.engines`, named as the scheme,
    that leads to a function `from_url(url, **options)`, which gives an Engine, or the Cell of which one is made.
    It is asked for `scheme+anything://`, too.
    """
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
    """OptionError for a URL that no engine can be opened by. Nothing is connected, or made; what is not to be known
    yet, such as a package that is missing, is told by `open_engine`."""
    scheme = _scheme(url)
    if scheme in _KNOWN:
        with suppress(ModuleNotFoundError):
            import_module(_KNOWN[scheme][0]).check_url(url)


def engine_of(client: object) -> Engine:
    """The engine to which a client object of some library leads: connections are made as its own are."""
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
    """Every scheme that can be asked for, installed or not."""
    return sorted({*_KNOWN, *_foreign()})


def _scheme(url: str) -> str:
    """The one that has an engine: all of it, or what stands before its first `+`."""
    scheme = scheme_of(url)
    family, _, _ = scheme.partition("+")
    if scheme in _KNOWN:
        return scheme
    if family == "sql":  # SQLAlchemy knows what follows the `+`
        return family
    for name in (scheme, family):
        if name in _foreign():
            return name
    raise OptionError(f"there is no engine {scheme + '://'!r}: {nearest(scheme, schemes())}")


def _opener(scheme: str) -> Opener:
    opener: Opener = import_module(_KNOWN[scheme][0]).from_url if scheme in _KNOWN else _foreign()[scheme].load()
    return opener


def _engine_of(given: object, scheme: str) -> Engine | None:
    """An engine, or what is made of a cell. None: it is neither."""
    cells = modules.get("stampede.engines.cells")  # who has one has imported them
    if cells is not None and isinstance(given, cells.Cell):
        given = cells.CellEngine(given, scheme)
    return given if isinstance(given, Engine) else None


def _foreign() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # a tenth of what it takes to import us, and few have another's engine

    return {point.name: point for point in entry_points(group="stampede.engines")}
