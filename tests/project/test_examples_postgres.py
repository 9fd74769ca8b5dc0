"""The examples of locks in a Postgres database, on a real server."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("psycopg")

from postgres_server import PostgresServer, prepared_postgres

from stampede import try_lock

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "postgres"


@pytest.fixture
def server() -> PostgresServer:
    """The shared server, with the tables."""
    return prepared_postgres()


def test_a_night_that_failed_is_in_the_record(server: PostgresServer, tmp_path: Path) -> None:
    """The example shows what it promises: which job has failed, and how."""
    there = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "SHOP_POSTGRES": server.postgres_url}

    def run(*command: str | Path) -> str:
        python = [sys.executable, "-W", "error", *command]
        done = subprocess.run(python, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
        return done.stdout

    said = run(EXAMPLES / "nightly.py")
    assert "turnover: 21.50\n" in said and "failed: [<class 'decimal.ConversionSyntax'>]\n" in said
    assert "example:nightly-turnover" in said.partition("failed: ")[2]
    history = run("-m", "stampede", "locks", server.postgres_url, "--history", "--failed", "--since", "1h", "--json")
    (night,) = json.loads(history)
    assert night["name"] == "example:nightly-turnover" and night["problem"] == "failed"
    assert "nightly.py" in night["traceback"] and night["exception"].endswith("InvalidOperation")


@pytest.fixture
def names(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's module, imported as a worker imports it. The database has no users yet."""
    pytest.importorskip("starlette")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("SHOP_POSTGRES", server.postgres_url)
    spec = importlib.util.spec_from_file_location("names", EXAMPLES / "names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "names", module)
    spec.loader.exec_module(module)
    yield module
    module.engine.dispose()
    server.say("DROP TABLE example_users")


def test_a_name_is_taken_once(names: ModuleType, server: PostgresServer) -> None:
    """If several callers ask for one name at once, only one of them gets it."""
    httpx = pytest.importorskip("httpx")

    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(names.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await asyncio.gather(*(client.put(f"/names/{name}") for name in ["bob", "Bob", "BOB", "bOb"]))

    assert sorted(answer.status_code for answer in asyncio.run(ask())) == [201, 409, 409, 409]
    assert server.ask("SELECT lower(name) FROM example_users") == [("bob",)]


def test_the_lock_ends_with_the_commit(names: ModuleType, server: PostgresServer) -> None:
    """The lock is held until the commit. Otherwise another caller would enter, and not see the row yet."""
    from sqlalchemy import event

    free = []

    def is_free() -> None:
        with try_lock("name:bob", on=server.postgres_url) as lock:
            free.append(bool(lock))

    event.listen(names.engine, "commit", lambda connection: is_free())  # called before the commit
    assert names.take("Bob")
    is_free()
    assert free == [False, True]
