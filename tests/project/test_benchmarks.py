"""Benchmarks are not tests, but they have to run. These tests find a broken benchmark before its figures are needed."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("locks")


def test_what_they_use_of_ours_is_there() -> None:
    """Each name that a benchmark imports from stampede exists."""
    gone = []
    for path in sorted(BENCHMARKS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stampede":
                module = importlib.import_module(str(node.module))
                names = [each.name for each in node.names]
                gone += [f"{path.name}: {node.module}.{name}" for name in names if not _has(module, name)]
    assert not gone


def _has(module: ModuleType, name: str) -> bool:
    if hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="it pins itself to a core")
def test_locks_are_measured(locks: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark of locks runs to its end, and prints figures for each engine."""
    urls = {"memory": "memory://", "file": f"file://{tmp_path}"}
    locks.uncontended(urls, rounds=1, pairs=2)
    locks.handed_over(urls, samples=2, seed=7)
    told = capsys.readouterr().out
    assert told.count("memory: stampede") == 1
    assert told.count("file: stampede") == 2
