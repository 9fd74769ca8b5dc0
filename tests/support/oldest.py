"""Prints the oldest releases of optional packages that pyproject.toml allows, as pip constraints: `redis==5.3`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def oldest(extra: str = "all") -> Iterator[str]:
    """The constraints of an extra, and of the extras that it names."""
    extras: dict[str, list[str]] = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    for requirement in extras[extra]:
        named = re.match(r"stampede-guard\[(.*)\]", requirement)
        for other in named[1].split(",") if named else ():
            yield from oldest(other)
        bound = re.match(r"([\w.-]+)(?:\[[\w,]*\])?>=([\d.]+)", requirement)
        if bound:
            yield f"{bound[1]}=={bound[2]}"


if __name__ == "__main__":
    print("\n".join(sorted({*oldest()})))
