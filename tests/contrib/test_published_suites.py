"""Tests that other projects publish pass over our adapters (`make suites` runs them, too, and shows their counts)."""

from __future__ import annotations

import os

import pytest
import suites
from servers import shared_redis

pytest.importorskip("redis")


@pytest.mark.redis
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", suites.names())
def test_a_published_suite(name: str) -> None:
    """No test of the suite fails, and each that is left out exists and would fail."""
    if not suites.is_unpacked(name) and os.environ.get("CI") != "true":
        pytest.skip("its source distribution is not downloaded: run make suites")
    outcome = suites.run(name, {"redis": shared_redis().url})
    assert not outcome.failed, "\n".join([*outcome.failed, outcome.output[-20_000:]])
    assert outcome.passed
