"""The pages agree with the code about options, engines, figures and names."""

from __future__ import annotations

import inspect
import re
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from typing import Any

import pytest
from pages import DOCS, PAGES, named

import stampede.engines
import stampede.errors
from stampede import Cache, SettingsError, cached
from stampede.api.typing import FunctionOptions, PolicyOptions
from stampede.settings.checks import CACHE
from stampede.settings.options import DEFAULT
from stampede.settings.read import from_mapping

OPTIONS = PAGES["guides/options.md"]
ENGINES = PAGES["guides/which-engine.md"]


def options_table() -> dict[str, str]:
    """Return each option and its default, as the page shows them."""
    return {name: cells[1] for table in (1, 2) for cells in OPTIONS.rows(table) for name in named(cells[0])}


def test_all_options_are_in_the_table() -> None:
    """The tables have every option, and nothing else."""
    assert set(options_table()) == {*FunctionOptions.__annotations__, *PolicyOptions.__annotations__, "cache"}


def test_defaults_are_as_the_table_says() -> None:
    """The page shows the same default as the code."""
    table = {name: said.strip("`") for name, said in options_table().items() if name in PolicyOptions.__annotations__}
    assert table.pop("max_hold") == "60, or 10 x cost"
    assert (DEFAULT.hold_of(0.0), DEFAULT.hold_of(10.0)) == (60.0, 100.0)
    for name, said in table.items():
        default = getattr(DEFAULT, name)
        assert {"None": None, "False": False, "()": ()}.get(said, said) == default or float(said) == default, name


def test_options_are_taken_by_whom_the_table_names() -> None:
    """`cached` and `get_or_compute` take every option, and `Cache` takes all except `cache_if` and `raises`."""
    taken: dict[str, Any] = {name: getattr(DEFAULT, name) for name in PolicyOptions.__annotations__}
    cached(**taken)(lambda: 1)
    with Cache(**{name: value for name, value in taken.items() if name not in ("cache_if", "raises")}) as cache:
        assert cache.get_or_compute("k", lambda: 1, **taken) == 1


def test_engines_of_this_release_are_in_the_table() -> None:
    """The table has every engine of this release, and no other."""
    schemes = {scheme for cells in ENGINES.rows(2) for scheme in re.findall(r"`([\w+]+)://", cells[0])}
    modules = {module for module, _ in stampede.engines._KNOWN.values() if _is_here(module)}
    assert {stampede.engines._KNOWN[stampede.engines._scheme(f"{scheme}://")][0] for scheme in schemes} == modules


OWN = {
    "sql": ("sql+sqlite:///f", "stampede.engines.sql", "OURS"),
    "postgres": ("postgres://a@h/d", "stampede.engines.postgres.address", "OURS"),
    "broker": ("zmq://h", "stampede.engines.zmq", "OPTIONS"),
    "etcd": ("etcd://h", "stampede.engines.etcd", "OPTIONS"),
    "zookeeper": ("zookeeper://h", "stampede.engines.zookeeper", "OPTIONS"),
    "dynamodb": ("dynamodb://r/t", "stampede.engines.dynamodb", "OPTIONS"),
}
"""For each engine's page: a URL, and the module and the name of its options."""


@pytest.mark.parametrize("name", OWN)
def test_an_engines_options_are_on_its_page(name: str) -> None:
    """The page names every option of the engine's URL, and a table of options has no others."""
    url, module, known = OWN[name]
    options = getattr(pytest.importorskip(module), known)
    page = PAGES[f"engines/{name}.md"]
    for option in options:
        assert re.search(rf"`{option}\b", page.text), option
    if "| option | default |" in page.text:
        table = {named: default for cells in page.rows() for named, default in _defaults(cells)}
        assert set(table) == set(options)
        for option, default in table.items():
            stampede.engines.check_url(f"{url}?{option}={default}" if default else url)


def _defaults(cells: list[str]) -> list[tuple[str, str]]:
    """Return the options of a row, each with its default."""
    names = named(cells[0])
    return list(zip(names, cells[1].split(", ") if cells[1] else [""] * len(names), strict=True))


def test_what_the_pages_give_to_caches_is_taken() -> None:
    """`Cache` takes each option that a page of an engine gives to it."""
    given = {
        name
        for path, page in PAGES.items()
        if path.startswith("engines")
        for call in re.findall(r"Cache\((?:\"[^\"]*\"|\w+), ([^()]*)", page.text)
        for name in re.findall(r"(\w+)=", call)
    }
    assert "ttl" in given
    assert given <= {*CACHE, *inspect.signature(Cache).parameters}


IN_A_FILE = pytest.param(lambda **table: from_mapping({"caches": {"default": table}}), id="file")


@pytest.mark.parametrize("given_to", [Cache, stampede.configure, IN_A_FILE])
def test_an_engines_option_that_is_none_of_the_caches_says_where_it_belongs(given_to: Any) -> None:
    """If an option of an engine is given to a cache, the error says that it belongs in the URL."""
    with pytest.raises(SettingsError, match=r"listen: .*options of the engine go into its URL"):
        given_to(url="postgres://a@h/d", listen="postgres://a@i/d")


def _is_here(module: str) -> bool:
    return find_spec(module) is not None


def test_figures() -> None:
    """The sizes and seconds on the pages are those of the code."""
    from stampede.engines.disk import DiskEngine
    from stampede.engines.memory import MemoryEngine
    from stampede.model.breaker import Breaker
    from stampede.outages.outage import REFUGE_TTL

    def default(function: Any, name: str) -> Any:
        return inspect.signature(function).parameters[name].default

    happens, engines = PAGES["what-happens-when.md"].text, ENGINES.text
    assert "stored in this process's memory for 5 seconds at most" in happens and REFUGE_TTL == 5
    assert "asks the engine again once a second" in happens and default(Breaker, "pause") == 1
    assert "`?max_bytes=` (1 GiB)" in engines and default(DiskEngine, "max_bytes") == 2**30
    assert "`?entries=10000`" in engines and default(MemoryEngine, "entries") == 10_000


INSIDE = {"down", "of", "scope", "shared", "stats_of"}
"""The names of a cache that are for other parts of the library."""

STATS = {"postponed", "stats", "stats_by_function"}


def test_twins() -> None:
    """Each verb of a cache that does I/O has an async twin, and the pages name it."""
    public = {name for name in vars(Cache) if not name.startswith("_")}
    without = {name for name in public if f"a{name}" not in public and not (name[0] == "a" and name[1:] in public)}
    assert without == {"bulkhead", "cached", "limiter", "lock", "refreshing", "bypassed", *STATS, *INSIDE}
    pages = PAGES["guides/verbs.md"].text + PAGES["guides/caches.md"].text
    for name in public - without:
        assert name[1:] in public or f"{name}(" in pages, name


FRAMEWORKS = ("sqlalchemy", "postgres", "django", "diskcache", "cachelib", "flask_caching", "key_value")
FRAMEWORKS += ("celery", "rq", "dramatiq")


def test_the_reference_has_all() -> None:
    """The reference shows every public name."""
    pages = [page.text for name, page in PAGES.items() if name.startswith("reference/")]
    shown = {name.rpartition(".")[2] for page in pages for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)}
    for module in ("stampede", "stampede.testing", *(f"stampede.contrib.{each}" for each in FRAMEWORKS)):
        with suppress(ImportError):  # a framework that is not installed
            assert set(import_module(module).__all__) - set(stampede.errors.__all__) - shown == set(), module


# -- the pictures of design.md ----------------------------------------------------------------------------------------


def _pictures() -> Any:
    spec = spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["pictures"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["rooms.svg", "way.svg"])
def test_the_pictures_are_of_today(name: str) -> None:
    """The pictures in docs/ are those that docs/pictures.py draws from the present code."""
    assert (DOCS / name).read_text() == _pictures().PICTURES[name](), "run: python docs/pictures.py"


def test_the_servers_of_the_front_page_are_those_of_the_table() -> None:
    """The front page names the same servers as the table of tested servers."""
    ran = re.findall(r"^\| (Redis|Valkey) (\d+\.\d+)", PAGES["engines/redis.md"].text, re.MULTILINE)
    said = re.search(r"\[Redis (\S+) and (\S+) and Valkey (\S+)\]\[servers\]", PAGES["README.md"].flat())
    assert said is not None
    assert ran == [("Redis", said[1]), ("Redis", said[2]), ("Valkey", said[3])]
