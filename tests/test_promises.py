"""PROMISES.md names tests and functions: each must be there, and have that name."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
TEXT = (TESTS / "PROMISES.md").read_text()
LINES = [line for line in TEXT.splitlines() if line.startswith("| `")]


@cache
def names(path: Path) -> set[str]:
    """What a file defines: functions and classes, methods also as `Class.method`, and names at its top."""
    if path.suffix == ".lua":
        return set(re.findall(r"^local function (\w+)", path.read_text(), flags=re.MULTILINE))
    tree = ast.parse(path.read_text())
    found = {target.id for node in tree.body for target in _targets(node) if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")}
    return found


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign) else []


def test_there_are_fifteen_and_each_has_its_lines() -> None:
    """A promise would stand there with nothing that keeps it."""
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    assert [int(section.partition(".")[0]) for section in sections] == list(range(1, 16))
    for section in sections:
        assert "::test_" in section


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+\.py::\w+)`", TEXT))))
def test_a_test_that_is_named_exists(name: str) -> None:
    """A promise would be kept by a test that was renamed, and then forgotten."""
    file, _, test = name.partition("::")
    assert test in names((ROOT if "/" in file else TESTS) / file)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[2:70])
def test_a_line_that_is_named_exists(line: str) -> None:
    """A reader would be sent to a function that is not there."""
    cell = line.split("|")[1].partition(":")[0]
    path = None
    for name in re.findall(r"`([^`]+)`", cell):
        if name.endswith((".py", ".lua")):
            path = ROOT / name
            assert path.is_file()
        elif path is not None and re.fullmatch(r"[\w.]+", name):
            assert name in names(path), f"{name} is not in {path.name}"
    for test in re.findall(r"`([^`]+)`", line.split("|")[2]):
        assert "::" in test
