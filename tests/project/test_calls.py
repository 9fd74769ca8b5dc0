"""The path of a call: how many functions of stampede, in how many files, a hit, a miss and a lock go through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from postgres_server import prepared_postgres
from servers import shared_redis

ROOT = Path(__file__).parents[2]

MOST = {
    "memory, hit": (0, 0),
    "memory, miss": (71, 19),
    "memory, lock": (35, 8),
    "redis, hit": (37, 18),
    "redis, miss": (93, 27),
    "redis, lock": (45, 12),
    "postgres, hit": (47, 21),
    "postgres, miss": (107, 29),
    "postgres, lock": (61, 13),
}
"""The most calls and files. Lower these numbers when a path gets shorter. `benchmarks/calls.py` prints them."""


PROGRAM = """
import json, sys
from calls import measured
print(json.dumps([*measured(*sys.argv[1:])]))
"""
"""The program runs in its own process. In a process that has loaded greenlet, each wait makes more calls."""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python count other calls")
@pytest.mark.parametrize("engine", ["memory", "redis", "postgres"])
def test_no_way_gets_longer(engine: str) -> None:
    """No path gets longer. Each call costs time, and each file is one more to read."""
    if engine == "redis":
        pytest.importorskip("redis")
    if engine == "postgres":
        pytest.importorskip("psycopg")
    url = {
        "memory": lambda: "memory://",
        "redis": lambda: shared_redis().url,
        "postgres": lambda: prepared_postgres().postgres_url,
    }
    words = [sys.executable, "-c", PROGRAM, engine, url[engine]()]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    said = subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True, timeout=60)
    found = {way: (count, files) for way, count, files in json.loads(said.stdout)}
    assert {way: each for way, each in found.items() if each > MOST[way] or each[1] > MOST[way][1]} == {}
