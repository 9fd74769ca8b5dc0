"""Servers that differ from the machine's own; `make matrix` runs all tests of the engine on some of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from herd import until
from servers import RedisServer, valkey

from stampede import Cache


def kept(cache: Cache) -> int:
    """How many values are kept in this process."""
    return len(cache._core.front.tier or ())


@pytest.fixture
def valkey_server() -> Iterator[RedisServer]:
    with closing(RedisServer(program=valkey())) as server:
        yield server


def test_valkey(valkey_server: RedisServer) -> None:
    """All of it would have to be run on a Valkey to know whether any of it works there."""
    with Cache(valkey_server.url, local=True) as here, Cache(valkey_server.url) as there:
        assert here.get_or_compute("k", lambda: 1) == there.get_or_compute("k", lambda: 2) == 1
        until(lambda: here.get_or_compute("k", lambda: 2) and kept(here))
        there.set("k", 3)
        until(lambda: here.get_or_compute("k", lambda: 2) == 3)
        with here.lock("l"):
            assert not there.lock("l", wait=0).acquire()
        there.clear()
        until(lambda: here.get("k") is None)
