"""The README, tried: its code is run as it stands, and what it says of options, engines and files is compared."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import stampede.engines
from stampede import Cache, cached
from stampede.faces import Options, PolicyOptions
from stampede.policy import DEFAULT
from stampede.settings import load

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LINES = README.splitlines()


def blocks(language: str) -> list[tuple[int, str]]:
    """Every block of one language: the number of its first line, and its text."""
    found = []
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        found.append((README.count("\n", 0, match.start(1)) + 1, match[1]))
    return found


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = README.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[1:]]


def named(text: str) -> list[str]:
    """What stands in `code`."""
    return re.findall(r"`([^`]+)`", text)


def alone(home: Path) -> dict[str, str]:
    """An environment in which nothing is found, and nothing left behind, outside of `home`."""
    return os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home), "COLUMNS": "120"}


def run(home: Path, *command: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=home, env=alone(home), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_every_block_is_of_a_language_that_is_tested_here() -> None:
    """A block in another language would be shown to everybody and tried by nobody."""
    opened = [line for line in LINES if line.startswith("```")]
    assert set(opened[::2]) == {"```python", "```sh", "```toml"}
    assert set(opened[1::2]) == {"```"}


# What the comments beside the code say, where the code itself doesn't assert it.
CLAIMS = """
assert exchange_rate.stats().computations == 1
assert price.many([("tea",), ("salt",)]) == [9.5, 9.5]
assert "price" in price.key("tea") and isinstance(price.key("tea"), str)
kept = price.peek("tea")
assert kept.value == 9.5 and kept.cost >= 0 and 0 < kept.fresh <= 600 < kept.keep <= 600 + 3600
price.set(8.0, "tea")
assert price("tea") == 8.0
assert price.refresh("tea") == 9.5
price.expire("tea")
assert price.peek("tea").fresh <= 0 < price.peek("tea").keep
postponed = []
price.invalidate("tea", via=postponed.append)
assert price.peek("tea") is not None
postponed[0]()
assert price.peek("tea") is None
assert "Shop.turnover" in shop.turnover.key("2026-11-21")
assert shop.turnover.peek("2026-11-21") is None
assert not lock.held
"""


def test_the_python_runs(tmp_path: Path) -> None:
    """Who copies the README's code, from top to bottom, would meet an error."""
    program: list[str] = []
    for first, block in blocks("python"):
        program += [""] * (first - 1 - len(program))  # tracebacks then tell the README's own lines
        program += block.splitlines()
    (tmp_path / "README.py").write_text("\n".join(program) + CLAIMS)
    run(tmp_path, "-W", "error", "README.py")


def test_the_settings_can_be_read(tmp_path: Path) -> None:
    """Who copies the README's settings would meet an error."""
    for _, block in blocks("toml"):
        file = tmp_path / "stampede.toml"
        file.write_text(block)
        settings = load(file, {"HOME": str(tmp_path)})
        assert settings.caches
        for each in settings.caches.values():
            stampede.engines.url.scheme_of(each.url)


def test_the_shell_lines_can_be_typed(tmp_path: Path) -> None:
    """Who types what the README says would hear of a missing target, extra or command."""
    (tmp_path / "stampede.toml").write_text(f'[caches.default]\nurl = "disk://{tmp_path}/cache"\n')
    with Cache(f"disk://{tmp_path}/cache") as cache:
        cache.set("KEY", "value")
    for _, block in blocks("sh"):
        for line in block.splitlines():
            for command in line.partition("#")[0].split("&&"):
                _type(command.split(), tmp_path)


def _type(words: list[str], home: Path) -> None:
    match words:
        case ["pip", "install", what]:
            _is_ours(what.strip("'\""))
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["stampede", "demo"]:
            size = ("--processes", "2", "--callers", "2", "--seconds", "0.05")
            assert "demo.html" in run(home, "-m", "stampede", "demo", *size)
            assert "<svg" in (home / "demo.html").read_text()
        case ["stampede", *arguments]:
            assert run(home, "-m", "stampede", *arguments)
        case ["git", "clone", _] | ["cd", "stampede"] | []:
            pass
        case _:
            pytest.fail(f"nobody tries {words}")


def _is_ours(requirement: str) -> None:
    """The distribution and its extras, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, _, extras = requirement.rstrip("]").partition("[")
    assert name == project["name"]
    assert {extra for extra in extras.split(",") if extra} <= project["optional-dependencies"].keys()


def test_pip_lines_in_the_text() -> None:
    """The pip line of an extra that isn't there installs nothing, with a warning nobody reads."""
    lines = re.findall(r"pip\s+install\s+'([^']+)'", README)
    assert lines
    for each in lines:
        _is_ours(each)


def test_the_command_s_other_verbs(tmp_path: Path) -> None:
    """The README would name verbs of the command that are not there."""
    block = next(text for _, text in blocks("sh") if "stampede get" in text)
    for verb in ("demo", "check", "get", "invalidate", "stats"):
        assert verb in block
        run(tmp_path, "-m", "stampede", verb, "--help")


# -- tables ---------------------------------------------------------------------------------------------------------


def options_table() -> dict[str, str]:
    """Each option and its default, as the README has them."""
    return {name: cells[1] for cells in rows("## Options") for name in named(cells[0])}


def test_all_options_are_in_the_table() -> None:
    """An option that nobody can find, or one that is none."""
    assert set(options_table()) == {*Options.__annotations__, *PolicyOptions.__annotations__, "cache"}


@pytest.mark.parametrize("name", list(PolicyOptions.__annotations__))
def test_defaults_are_as_the_table_says(name: str) -> None:
    """The README would promise another default than the code has."""
    said, default = options_table()[name].strip("`"), getattr(DEFAULT, name)
    if name == "max_hold":
        assert said == "60, or 10 x cost"
        assert (DEFAULT.hold_of(0.0), DEFAULT.hold_of(10.0)) == (60.0, 100.0)
    else:
        assert {"None": None, "False": False, "()": ()}.get(said, said) == default or float(said) == default


def test_options_are_taken_by_whom_the_table_names() -> None:
    """An option would be refused where the README says that it works."""
    taken: dict[str, Any] = {name: getattr(DEFAULT, name) for name in PolicyOptions.__annotations__}
    cached(**taken)(lambda: 1)
    with Cache(**{name: value for name, value in taken.items() if name not in ("cache_if", "raises")}) as cache:
        assert cache.get_or_compute("k", lambda: 1, **taken) == 1


def test_engines_of_this_release_are_in_the_table() -> None:
    """An engine that nobody can find, or one that this release does not have."""
    schemes = {scheme for cells in rows("## Choosing an engine") for scheme in re.findall(r"`([\w+]+)://", cells[0])}
    modules = {module for module, _ in stampede.engines._KNOWN.values() if _is_here(module)}
    assert {stampede.engines._KNOWN[scheme][0] for scheme in schemes} == modules


def _is_here(module: str) -> bool:
    return find_spec(module) is not None


def test_figures() -> None:
    """The README tells sizes and seconds that are the code's."""
    from stampede.breaker import Breaker
    from stampede.engines.disk import DiskEngine
    from stampede.engines.memory import MemoryEngine
    from stampede.outage import REFUGE_TTL

    def default(function: Any, name: str) -> Any:
        return inspect.signature(function).parameters[name].default

    assert "kept in memory for 5 seconds at most" in README and REFUGE_TTL == 5
    assert "asked again once a second" in README and default(Breaker, "pause") == 1
    assert "`?max_bytes=` (1 GiB)" in README and default(DiskEngine, "max_bytes") == 2**30
    assert "`?entries=10000`" in README and default(MemoryEngine, "entries") == 10_000


def test_twins() -> None:
    """The README says that each verb that does I/O has one."""
    verbs = {name for name in vars(Cache) if not name.startswith("_") and f"a{name}" in vars(Cache)}
    io = {"get_or_compute", "get_or_compute_many", "get", "get_many", "set", "set_many", "peek", "expire"}
    assert verbs == io | {"invalidate", "clear"}


# -- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)", README))))
def test_links_lead_somewhere(link: str) -> None:
    """A reader would be sent to a file that is not there."""
    assert link.startswith("https://") or (ROOT / link).exists()


def test_what_the_text_names_of_the_package_is_there() -> None:
    """A name in the text that can't be imported, or an event or error that is called otherwise."""
    for name in re.findall(r"`stampede((?:\.\w+)+)`", README):
        assert _leads_somewhere("stampede" + name), name
    for name in re.findall(r"`([A-Z]\w+(?:Error|Failed|Timeout|Lost|Computation))`", README):
        assert hasattr(stampede, name), name


def _leads_somewhere(dotted: str) -> bool:
    found: Any = stampede
    for part in dotted.split(".")[1:]:
        path = f"{found.__name__}.{part}"
        if not hasattr(found, part) and find_spec(path) is not None:
            __import__(path)
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
