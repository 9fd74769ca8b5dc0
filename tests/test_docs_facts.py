"""What the pages say of options, engines, figures and names is what the code has."""

from __future__ import annotations

import inspect
import re
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from typing import Any

import pytest
from pages import DOCS, PAGES, named

import stampede.engines
import stampede.errors
from stampede import Cache, cached
from stampede.faces import Options, PolicyOptions
from stampede.policy import DEFAULT

OPTIONS = PAGES["guides/options.md"]
ENGINES = PAGES["guides/which-engine.md"]


def options_table() -> dict[str, str]:
    """Each option and its default, as the page has them."""
    return {name: cells[1] for cells in OPTIONS.rows() for name in named(cells[0])}


def test_all_options_are_in_the_table() -> None:
    """An option that nobody can find, or one that is none."""
    assert set(options_table()) == {*Options.__annotations__, *PolicyOptions.__annotations__, "cache"}


@pytest.mark.parametrize("name", list(PolicyOptions.__annotations__))
def test_defaults_are_as_the_table_says(name: str) -> None:
    """The page would promise another default than the code has."""
    said, default = options_table()[name].strip("`"), getattr(DEFAULT, name)
    if name == "max_hold":
        assert said == "60, or 10 x cost"
        assert (DEFAULT.hold_of(0.0), DEFAULT.hold_of(10.0)) == (60.0, 100.0)
    else:
        assert {"None": None, "False": False, "()": ()}.get(said, said) == default or float(said) == default


def test_options_are_taken_by_whom_the_table_names() -> None:
    """An option would be refused where the page says that it works."""
    taken: dict[str, Any] = {name: getattr(DEFAULT, name) for name in PolicyOptions.__annotations__}
    cached(**taken)(lambda: 1)
    with Cache(**{name: value for name, value in taken.items() if name not in ("cache_if", "raises")}) as cache:
        assert cache.get_or_compute("k", lambda: 1, **taken) == 1


def test_engines_of_this_release_are_in_the_table() -> None:
    """An engine that nobody can find, or one that this release does not have."""
    schemes = {scheme for cells in ENGINES.rows(2) for scheme in re.findall(r"`([\w+]+)://", cells[0])}
    modules = {module for module, _ in stampede.engines._KNOWN.values() if _is_here(module)}
    assert {stampede.engines._KNOWN[stampede.engines._scheme(f"{scheme}://")][0] for scheme in schemes} == modules


def _is_here(module: str) -> bool:
    return find_spec(module) is not None


def test_figures() -> None:
    """The page tells sizes and seconds that are the code's."""
    from stampede.breaker import Breaker
    from stampede.engines.disk import DiskEngine
    from stampede.engines.memory import MemoryEngine
    from stampede.outage import REFUGE_TTL

    def default(function: Any, name: str) -> Any:
        return inspect.signature(function).parameters[name].default

    happens, engines = PAGES["what-happens-when.md"].text, ENGINES.text
    assert "kept in memory for 5 seconds at most" in happens and REFUGE_TTL == 5
    assert "asked again once a second" in happens and default(Breaker, "pause") == 1
    assert "`?max_bytes=` (1 GiB)" in engines and default(DiskEngine, "max_bytes") == 2**30
    assert "`?entries=10000`" in engines and default(MemoryEngine, "entries") == 10_000


INSIDE = {"down", "of", "scope", "shared", "stats_of", "trusted"}
"""What a cache has for the library's other parts."""


def test_twins() -> None:
    """The pages say that each verb of a cache that does I/O has one, and name it."""
    public = {name for name in vars(Cache) if not name.startswith("_")}
    without = {name for name in public if f"a{name}" not in public and not (name[0] == "a" and name[1:] in public)}
    assert without == {"bulkhead", "cached", "limiter", "lock", "refreshing", "bypassed", "stats", *INSIDE}
    pages = PAGES["guides/verbs.md"].text + PAGES["guides/caches.md"].text
    for name in public - without:
        assert name[1:] in public or f"{name}(" in pages, name


@pytest.mark.parametrize(
    "module",
    [
        "stampede", "stampede.testing", "stampede.contrib.sqlalchemy", "stampede.contrib.postgres",
        "stampede.contrib.django",
    ],
)  # fmt: skip
def test_the_reference_has_all(module: str) -> None:
    """A public name would be in no reference."""
    pages = [page.text for name, page in PAGES.items() if name.startswith("reference/")]
    shown = {name.rpartition(".")[2] for page in pages for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)}
    assert set(pytest.importorskip(module).__all__) - set(stampede.errors.__all__) <= shown


# -- the pictures of design.md ----------------------------------------------------------------------------------------


def _pictures() -> Any:
    spec = spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["pictures"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_module_has_its_room() -> None:
    """A newcomer would look for it in vain; or find two rooms that import each other."""
    pictures = _pictures()
    names = [room.name for room in pictures.ROOMS]
    inside = [module for room in pictures.ROOMS for module in room.modules.split()]
    assert sorted(inside) == pictures.modules(), "put it into a room of docs/pictures.py"
    for name, others in pictures.uses().items():
        assert all(names.index(other) > names.index(name) for other in others), (name, others)


@pytest.mark.parametrize("name", ["rooms.svg", "way.svg"])
def test_the_pictures_are_of_today(name: str) -> None:
    """They would show a house that has been rebuilt since."""
    assert (DOCS / name).read_text() == _pictures().PICTURES[name](), "run: python docs/pictures.py"


def test_the_servers_of_the_front_page_are_those_of_the_table() -> None:
    """It would name one that nobody has tried."""
    ran = re.findall(r"^\| (Redis|Valkey) (\d+\.\d+)", PAGES["engines/redis.md"].text, re.MULTILINE)
    said = re.search(r"\[Redis (\S+) and (\S+) and Valkey (\S+)\]\[servers\]", PAGES["README.md"].flat())
    assert said is not None
    assert ran == [("Redis", said[1]), ("Redis", said[2]), ("Valkey", said[3])]
