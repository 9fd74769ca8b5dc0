"""The examples, run as their readers run them; a copy of each, so that they leave nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

# What each must say for its idea to have been shown.
SAID = {
    "hello": ["reports computed: 1, hits: 1", "1000 tasks got {1.07}, computed 1 time"],
    "herd": ["without stampede:  50 computations", "with stampede:      1 computations"],
    "processes": ["and computed it", "computations: 1\n"],
    "stale_and_background": [
        "stale, refreshed in background: [9.5, 12.0]",
        "is down          : [9.5, 12.0]",
        "served: {",
    ],
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
    """What an example prints, from a directory in which there are no settings."""
    there, empty = home / "examples", home / "empty"
    shutil.copytree(EXAMPLES, there, ignore=shutil.ignore_patterns("__pycache__"))
    settings = there / "settings" / "stampede.toml"
    settings.write_text(settings.read_text().replace("/var/tmp", str(home)))
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", there / f"{name}.py"],
        cwd=empty,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(empty)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SAID)
def test_an_example_shows_its_idea(tmp_path: Path, name: str) -> None:
    """Who runs an example would meet an error, or see something else than it is there to show."""
    said = run(tmp_path, name)
    for each in SAID[name]:
        assert each in said, said


def test_every_example_is_run() -> None:
    """An example that nobody runs is soon wrong."""
    there = {str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.rglob("*.py")}
    assert there - {"web/app"} == SAID.keys()  # that one is asked by test_examples_web.py


def test_examples_are_one_screen() -> None:
    """One idea per file; an application has a few."""
    assert all(path.read_text().count("\n") < 60 for path in EXAMPLES.rglob("*.py") if path.parent.name != "web")
