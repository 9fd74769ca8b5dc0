"""Tests that other projects publish pass over our adapters (`make suites` runs them, too, and shows their counts)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import suites
from servers import shared_redis

pytest.importorskip("redis")


@pytest.mark.redis
@pytest.mark.timeout(600)
def test_published_suites() -> None:
    """No test of a suite fails, and each that is left out exists and would fail. The suites run side by side, as most
    of their time is spent asleep. Each has a database of its own on the server."""
    names = [name for name in suites.names() if suites.is_unpacked(name) or os.environ.get("CI") == "true"]
    if not names:
        pytest.skip("their source distributions are not downloaded: run make suites")
    server = shared_redis().url.rpartition("/")[0]
    with ThreadPoolExecutor() as pool:
        outcomes = pool.map(suites.run, names, [{"redis": f"{server}/{1 + number}"} for number in range(len(names))])
        for name, outcome in zip(names, outcomes, strict=True):
            assert not outcome.failed, "\n".join([name, *outcome.failed, outcome.output[-20_000:]])
            assert outcome.passed, name
