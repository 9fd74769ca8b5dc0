"""The example's programs run unchanged. Each is started twice: the second start finds the cache filled."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from ours import PACKAGE, Environment
from sqlalchemy import select

Start = Callable[[str], Environment]


@pytest.fixture(params=["disk", "redis"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts a program of the example, on the same database and the same cache as before."""
    folder = tmp_path / uuid4().hex
    folder.mkdir()
    url = f"disk://{folder}/cache" if request.param == "disk" else os.environ["REDIS_URL"]

    def started(name: str) -> Environment:
        environment = Environment(folder, url)
        closing.callback(environment.close)
        runpy.run_module(f"{PACKAGE}.{name}", run_name="__main__")
        assert not environment.cache.stats().unkept
        return environment

    with ExitStack() as closing:
        yield started


def test_helloworld(start: Start) -> None:
    """People, two to twelve, and five to fifteen are asked for once each; then their results are removed."""
    first = start("helloworld")
    assert len(first.asked) == 3
    assert len(start("helloworld").asked) == 3  # the first has removed what it had stored


def test_helloworld_invalidates(start: Start) -> None:
    last = start("helloworld")
    model = __import__(f"{PACKAGE}.model", fromlist=["Person"])
    assert last.cache.peek(last.key(select(model.Person))) is None


def test_relationship_caching(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """At the second start, postal codes, cities and countries come from the cache: "only a single SQL statement will
    run"."""
    first = start("relationship_caching")
    told = capsys.readouterr().out
    assert len(first.asked) > 10 and told.count("person ") == 50
    assert len(start("relationship_caching").asked) == 1
    assert capsys.readouterr().out == told


def test_advanced(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranges of people, and their addresses. The program removes one range, and the addresses with it."""
    first = start("advanced")
    told = capsys.readouterr().out
    assert sum("FROM person" in each for each in first.asked) == 3  # two ranges, and one of them again
    assert told.count("person 02") == 4 and told.count("street ") == 22
    again = start("advanced")
    assert sum("FROM person" in each for each in again.asked) == 1
    assert all("FROM person" in each or "FROM address" in each for each in again.asked)
    assert capsys.readouterr().out == told


def test_local_session_caching(start: Start) -> None:
    start("local_session_caching")
