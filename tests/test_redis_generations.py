"""What a herd asks the server beside its claims."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from servers import RedisServer

from stampede.errors import EngineError

pytest.importorskip("redis")

from stampede.engines.redis import RedisEngine, verbs


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


async def asked(engine: RedisEngine) -> list[str | BaseException]:
    return await asyncio.gather(*(engine.astore.generation("shop") for _ in range(100)), return_exceptions=True)


def test_a_herd_asks_for_its_generation_once(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a quiet second each of a thousand tasks would send a question of its own, all the same one."""
    monkeypatch.setattr(verbs, "KNOWN", 0.0)
    engine = RedisEngine(server.url, tracking=False)
    asyncio.run(asked(engine))
    server.cli("CONFIG", "RESETSTAT")
    names = asyncio.run(asked(engine))
    calls = [line for line in server.cli("INFO", "commandstats").splitlines() if line.startswith("cmdstat_evalsha:")]
    engine.close()
    assert len(set(names)) == 1
    assert [line.partition("calls=")[2].partition(",")[0] for line in calls] == ["1"]


def test_a_herd_that_asked_in_vain_hears_why(server: RedisServer) -> None:
    """Those who shared the question would hang, or ask a dead server one after the other."""
    engine = RedisEngine(server.url, tracking=False)
    asyncio.run(asked(engine))
    server.stop()
    engine.store._generations.forget()  # type: ignore[attr-defined]
    answers = asyncio.run(asked(engine))
    engine.close()
    assert all(isinstance(answer, EngineError) for answer in answers)
