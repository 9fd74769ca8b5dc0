"""Types: the decorator promises checkers what it does, and both checkers agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stampede import faces
from stampede.verbs import VERBS

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("command", [["mypy", "tests/typing"], ["pyright"]], ids=["mypy", "pyright"])
def test_checkers_agree(command: list[str]) -> None:
    """A user's editor would otherwise forget the parameters, or the colour, of every cached function."""
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=110)
    wrong = [line for line in run.stdout.splitlines() if "tests/typing" in line and "error" in line]
    assert wrong == [], run.stdout
    assert run.returncode in (0, 1), run.stderr  # beyond that the checker itself has failed


@pytest.mark.parametrize("face", [faces.CachedFunction, faces.CachedAsync])
def test_the_faces_have_every_verb(face: type) -> None:
    """A verb that works and is not declared is an error in every user's checker."""
    assert {verb for verb in VERBS if not hasattr(face, verb)} == set()
    assert {name for name in dir(face) if not name.startswith("_")} == {*VERBS, "cache"}
