"""A claim that memcached grants, and whose caller is cancelled or interrupted meanwhile, in an event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("pymemcache")

from memcached_server import MemcachedServer, shared_memcached

from stampede.colour import run_blocking
from stampede.engines.memcached import MemcachedEngine, verbs
from stampede.entry import Entry, new_id
from stampede.ports import Ask, Granted

LONG = 60.0


@pytest.fixture
def server() -> MemcachedServer:
    server = shared_memcached()
    server.empty()
    return server


class _Stop(Exception):
    """A time limit's."""


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_who_is_interrupted_before_the_value_is_sent(
    server: MemcachedServer, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease would stand without a name on it, and nobody know its number any more: the key stood still for 3 s."""
    engine, token = MemcachedEngine(server.address, sign=LONG), new_id()
    entry = Entry(b"value", new_id(), ttl=LONG, fresh=LONG, keep=LONG)

    def interrupt(*_: object) -> None:
        raise _Stop

    async def scenario(claims: Any) -> None:
        assert isinstance(await claims.claim("k0", token, Ask(LONG)), Granted)
        monkeypatch.setattr(verbs, "_fits", interrupt)
        with pytest.raises(_Stop):
            await claims.fill("k0", token, entry)
        await claims.abandon("k0", token)
        assert isinstance(await claims.claim("k0", new_id(), Ask(LONG)), Granted)

    if colour == "sync":
        run_blocking(scenario(engine.blocking.claims))
    else:
        asyncio.run(scenario(engine.suspending.claims))
    engine.close()
