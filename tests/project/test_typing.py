"""Type checkers know what the decorator does, and mypy and pyright agree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stampede.api import typing, typing_many
from stampede.api.cached import VERBS
from stampede.api.many import EACH, PLURAL

ROOT = Path(__file__).parents[2]
RIGHT, WRONG = "tests/typing", "tests/mistyped"
FACES: list[tuple[type, set[str]]] = [
    (typing.CachedFunction, {*VERBS}),
    (typing.CachedAsync, {*VERBS}),
    (typing.LooselyCached, {*VERBS}),
    (typing.LooselyCachedAsync, {*VERBS}),
    (typing_many.OneFunction, {*EACH}),
    (typing_many.OneAsync, {*EACH}),
    (typing_many.ManyFunction, {*EACH, *PLURAL, "one"}),
    (typing_many.ManyAsync, {*EACH, *PLURAL, "one"}),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("command", [["mypy"], ["pyright", "--pythonpath", sys.executable]], ids=["mypy", "pyright"])
def test_checkers_agree(command: list[str]) -> None:
    """Both checkers accept the right programs, and find exactly the marked errors in the wrong ones."""
    run = subprocess.run(
        [sys.executable, "-m", *command, RIGHT, WRONG], cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert run.returncode == 1, run.stdout + run.stderr  # with another code the checker itself has failed
    found = {
        f"{Path(at).name}:{line}": f"{at}:{line}: {what}"
        for at, line, what in re.findall(r"(\S+\.py):(\d+)(?::\d+)?(?: -|:) error: (.*)", run.stdout)
    }
    marked = {
        f"{file.name}:{number}": f"{file}:{number}: nothing is found in {line.strip()}"
        for file in (ROOT / WRONG).glob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if line.endswith("# wrong")
    }
    assert [found[at] for at in found if at not in marked] == []
    assert [marked[at] for at in marked if at not in found] == []


def test_the_faces_have_every_verb() -> None:
    """The types declare every verb. A verb that works and is not declared is an error in every user's checker."""
    for face, names in FACES:
        assert {name for name in dir(face) if not name.startswith("_")} == {*names, "cache"}, face
