"""The URL of a database in Django's `DATABASES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stampede.errors import OptionError

__all__ = ["url_of"]


def url_of(database: Mapping[str, Any]) -> str:
    """Return the URL of `DATABASES["default"]`, or of `connections["default"].settings_dict`: `postgres://...`. It
    includes those OPTIONS that libpq knows, and `assume_role`."""
    engine = str(database.get("ENGINE") or "")
    if not engine.endswith(("postgresql", "postgis", "postgresql_psycopg2")):
        raise OptionError(
            f"ENGINE is {engine!r}, not Postgres: give another engine's URL, such as disk:///var/cache/shop"
        )
    from stampede.engines.postgres import address

    options = dict(database.get("OPTIONS") or {})
    if role := options.pop("assume_role", None):
        escaped = "".join("\\" + each if each in " \\" else each for each in str(role))
        options["options"] = f"{options.get('options', '')} -c role={escaped}".strip()
    known = address.libpqs()
    given = {name: value for name, value in options.items() if name in known}
    own = {name: database.get(setting) for name, setting in _NAMES.items()}
    return address.written({name: value for name, value in {**given, **own}.items() if value not in (None, "")})


_NAMES = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
