"""The way of a call: how many of our functions, in how many files, a hit, a miss and a lock go through."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from postgres_server import prepared_postgres
from servers import shared_redis

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

MOST = {
    "memory, hit": (0, 0),
    "memory, miss": (70, 18),
    "memory, lock": (35, 8),
    "redis, hit": (37, 18),
    "redis, miss": (93, 27),
    "redis, lock": (45, 12),
    "postgres, hit": (47, 21),
    "postgres, miss": (109, 28),
    "postgres, lock": (61, 13),
}
"""Calls and files at most. Lower these numbers when a way gets shorter; `benchmarks/calls.py` prints them."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("calls")


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python count other calls")
@pytest.mark.parametrize("engine", ["memory", "redis", "postgres"])
def test_no_way_gets_longer(calls: ModuleType, engine: str) -> None:
    """Each call and each file is one more that a reader has to follow, and that each caller waits for."""
    if engine == "redis":
        pytest.importorskip("redis")
    if engine == "postgres":
        pytest.importorskip("psycopg")
    url = {
        "memory": lambda: "memory://",
        "redis": lambda: shared_redis().url,
        "postgres": lambda: prepared_postgres().postgres_url,
    }
    found = {way: (count, files) for way, count, files in calls.measured(engine, url[engine]())}
    assert {way: each for way, each in found.items() if each > MOST[way] or each[1] > MOST[way][1]} == {}
