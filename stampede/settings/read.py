"""Read settings from a TOML file, or from a mapping of the same shape. No cache is opened here."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stampede.errors import OptionError, SettingsError
from stampede.settings.checks import CACHE, ORIGIN, POLICY, Check, checked, observers
from stampede.settings.model import CacheSettings, OriginSettings, Settings
from stampede.settings.options import DEFAULT, nearest

__all__ = ["TABLES", "cache_settings", "discover", "from_mapping", "load", "origin_settings"]

VARIABLE = "STAMPEDE_SETTINGS"
FILE = "stampede.toml"
TABLES = ("caches", "origins", "observers")


def discover(environ: Mapping[str, str], cwd: str | os.PathLike[str]) -> Settings | None:
    """Load the file that `$STAMPEDE_SETTINGS` names, or else `stampede.toml` in `cwd`. None: there is neither."""
    if named := environ.get(VARIABLE):
        try:
            return load(Path(cwd, named), environ)
        except SettingsError as exc:
            raise SettingsError(f"${VARIABLE}: {exc}") from exc.__cause__
    try:
        return load(Path(cwd, FILE), environ)
    except SettingsError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):
            return None
        raise


def load(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings of one file. SettingsError says what is wrong, and where."""
    return from_mapping(_toml(Path(path)), str(path), environ)


def from_mapping(
    mapping: Mapping[str, Any], source: str = "configure()", environ: Mapping[str, str] = os.environ
) -> Settings:
    """Read settings from a mapping of a file's shape: `{"caches": {"default": {"url": ...}}}`."""
    for name in mapping:
        if name not in TABLES:
            raise SettingsError(f"{source}: {name}: there is no such table: {_home_of(str(name))}")
    return Settings(
        caches={name: cache_settings(table, at) for name, at, table in _tables(mapping, "caches", source, environ)},
        origins={name: origin_settings(table, at) for name, at, table in _tables(mapping, "origins", source, environ)},
        **_checked(f"{source}:", {"observers": mapping.get("observers", ())}, {"observers": observers}),
        source=source,
    )


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))  # some editors write a BOM
    except FileNotFoundError as exc:
        raise SettingsError(f"{path}: there is no such file") from exc
    except IsADirectoryError as exc:
        raise SettingsError(f"{path}: it is a directory: name the file in it") from exc
    except OSError as exc:
        raise SettingsError(f"{path}: it can't be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{path}: it isn't UTF-8 (byte {exc.start} is {exc.object[exc.start]:#04x})") from exc
    except (ValueError, RecursionError) as exc:
        raise SettingsError(f"{path}: it isn't TOML: {exc}") from exc


def _tables(
    mapping: Mapping[str, Any], kind: str, source: str, environ: Mapping[str, str]
) -> list[tuple[str, str, dict[str, Any]]]:
    """Return each table of one kind: its name, its place for errors, and its content with each `${NAME}` replaced."""
    tables = mapping.get(kind, {})
    if not isinstance(tables, Mapping):
        raise SettingsError(f"{source}: {kind}: it is a table of tables: write [{kind}.default]")
    found = []
    for name, table in tables.items():
        at = f"{source}: [{kind}.{name}]"
        if not isinstance(table, Mapping):
            raise SettingsError(f"{source}: [{kind}] {name}: {_home_of(str(name))}")
        found.append((name, at, {key: _filled_in(value, f"{at} {key}", environ) for key, value in table.items()}))
    return found


def _home_of(name: str) -> str:
    if name in CACHE:
        return "it is a setting of one cache: write it under [caches.default]"
    return nearest(name, TABLES)


_PLACEHOLDER = re.compile(r"(\$?)\$\{([^}]*)\}")


def _filled_in(value: Any, at: str, environ: Mapping[str, str]) -> Any:
    """Return the value with each `${NAME}` in its strings replaced; `$${` stands for a literal `${`."""
    if isinstance(value, str):

        def variable(match: re.Match[str]) -> str:
            escaped, name = match.groups()
            if escaped:
                return match[0][1:]
            if name not in environ:
                raise SettingsError(
                    f"{at}: the environment has no {name!r} for ${{{name}}}: set it, or write $${{ for a literal ${{"
                )
            return environ[name]

        return _PLACEHOLDER.sub(variable, value)
    if isinstance(value, Mapping):
        return {key: _filled_in(inner, at, environ) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled_in(inner, at, environ) for inner in value]
    return value


def cache_settings(table: Mapping[str, Any], at: str) -> CacheSettings:
    """Return one cache's settings; `at` is put before each error. From code, values may be functions and classes."""
    values = _checked(at, table, CACHE)
    policy = DEFAULT.with_options(**{name: values.pop(name) for name in POLICY if name in values})
    if values.get("codec") == "pickle" and not values.get("signing_key"):
        raise SettingsError(f"{at} codec is 'pickle', which executes what it reads: give a signing_key")
    return CacheSettings(**values, policy=policy)


def origin_settings(table: Mapping[str, Any], at: str) -> OriginSettings:
    """Return one origin's caps; `at` is put before each error."""
    values = _checked(at, table, ORIGIN)
    try:
        return OriginSettings(**values)
    except OptionError as exc:
        raise SettingsError(f"{at} {exc}") from exc


def _checked(at: str, table: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    try:
        return checked(table, checks)
    except OptionError as exc:
        raise SettingsError(f"{at} {exc}") from exc
