"""The examples are run as their readers run them. Each runs in a copy, so that it leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from forked import python
from pages import PAGES

from stampede import Cache

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# What each example must print to show its idea.
SAID = {
    "hello": ["reports computed: 1, hits: 1", "1000 tasks got {1.07}, computed 1 time"],
    "herd": ["without stampede:  50 computations", "with stampede:      1 computations"],
    "processes": ["and computed it", "computations: 1\n"],
    "stale_and_background": [
        "stale, refreshed in background: [9.5, 12.0]",
        "is down          : [9.5, 12.0]",
        "served: {",
    ],
    "rate_limited_api": ["4 processes, 40 answers in", "told to go away: "],
    "locks": ["we hold it: True, so others find it free: False", "after the commit: True"],
    "settings/application": [
        "product 7 in <Cache disk://",
        "session of bob in <Cache memory://>",
        "did you mean 'url'?",
    ],
    "methods": ["7000.0 7000.0 8000.0", "Shop(7),'monday')", "None 8000.0", "7 7 3", "__stampede_key__"],
    "invalidate_on_commit": ["committed: tea costs 12.0", "rolled back: the cache still has 12.0"],
    "observe": [
        "hits 2, computed {'missing': 2, 'refresh': 1}, failed 1",
        "there is no customer 0",
        "because: refresh",
    ],
    "testing_your_code": ["passed: test_without_any_cache", "passed: test_values_survive_production_s_encoding"],
}


def run(home: Path, name: str) -> str:
    """Run an example in a directory without settings. Return what it prints."""
    there, empty = home / "examples", home / "empty"
    shutil.copytree(EXAMPLES, there, ignore=shutil.ignore_patterns("__pycache__"))
    settings = there / "settings" / "stampede.toml"
    settings.write_text(settings.read_text().replace("/var/tmp", str(home)))
    empty.mkdir()
    env = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(empty)}
    done = python("-W", "error", there / f"{name}.py", cwd=empty, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SAID)
def test_an_example_shows_its_idea(tmp_path: Path, name: str) -> None:
    """An example runs without an error, and shows its idea."""
    said = run(tmp_path, name)
    for each in SAID[name]:
        assert each in said, said


def test_every_example_is_run() -> None:
    """Every example is in the table above, so that it is run. An example that is not run is soon wrong."""
    there = {str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.rglob("*.py")}
    servers = {"fastapi/app", "web/app", "flask/app", "django/shop", "postgres/nightly", "postgres/names"}
    # Each of these has a test file of its own.
    assert {each for each in there if not each.startswith("demo/")} - {*servers, *ENGINE} == SAID.keys()


def test_examples_are_one_screen() -> None:
    """An example shows one idea and fits on one screen. Only a few larger ones may be longer."""
    roomy = {"django", "fastapi", "web", "flask", "engine", "demo", "rate_limited_api.py"}
    paths = [path for path in EXAMPLES.rglob("*.py") if not {path.parent.name, path.name} & roomy]
    assert all(path.read_text().count("\n") < 60 for path in paths)


# -- the engine: its suites are run from the page, by test_docs.py ----------------------------------------------------

ENGINE = ["engine/folder", "engine/test_folder"]


@pytest.mark.parametrize("name", ENGINE)
def test_the_engine_is_the_one_of_the_page(name: str) -> None:
    """The engine on the page is the one in the examples, and stays short."""
    file = EXAMPLES / f"{name}.py"
    (shown,) = [block.text for block in PAGES["engines.md"].blocks("python") if block.title == file.name]
    assert file.read_text() == shown
    assert shown.count("\n") <= 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_keeps_the_engine_from_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was forked in the middle of a write does not keep the folder's lock."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "engine"))
    cell: Any = import_module("folder").FolderCell(str(tmp_path))
    ours, theirs = os.pipe()
    with cell._alone():
        child = os.fork()
        if not child:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
    try:
        with open(tmp_path / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(theirs)
        os.waitpid(child, 0)
        os.close(ours)


def test_the_engine_has_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed example opens `folder://`, and removes what has expired."""
    project = tomllib.loads((EXAMPLES / "engine" / "pyproject.toml").read_text())["project"]
    about = tmp_path / "stampede_folder-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stampede-folder\nVersion: 1.0\n")
    points = project["entry-points"]["stampede.engines"]
    (about / "entry_points.txt").write_text(
        "[stampede.engines]\n" + "\n".join(f"{name} = {there}" for name, there in points.items())
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES / "engine"))
    with Cache(f"folder://{tmp_path}/shared") as cache, Cache(f"folder+x://{tmp_path}/shared") as other:
        assert cache.get_or_compute("k", lambda: "value") == "value"
        assert other.get("k") == "value"
        cell: Any = import_module("folder").FolderCell(f"{tmp_path}/shared")
        cell.swap("old", None, b"old", 0.001)
        time.sleep(0.01)
        cell.sweep()
        assert cell.read(["old"])[0].data is None
        assert other.get("k") == "value"
