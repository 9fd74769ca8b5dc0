"""The example of a web application, on a real Redis server. The tests send requests as its clients do."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from servers import RedisServer

import stampede

httpx = pytest.importorskip("httpx")
pytest.importorskip("redis")
pytest.importorskip("starlette")

APP = Path(__file__).parents[2] / "examples" / "web" / "app.py"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
def app(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's module, imported as a worker imports it."""
    monkeypatch.setenv("SHOP_REDIS", server.url)
    spec = importlib.util.spec_from_file_location("web_app", APP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "web_app", module)
    spec.loader.exec_module(module)
    yield module
    stampede.get_cache().close()
    stampede.configure(caches={})


def asked(app: ModuleType, *requests: tuple[str, str], **options: Any) -> list[Any]:
    """Send requests at the same time. Return the answers."""

    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(app.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await asyncio.gather(*(client.request(*request, **options) for request in requests))

    return asyncio.run(ask())


def test_a_herd_of_requests_has_one_report(app: ModuleType) -> None:
    """Fifty requests at once compute one report. This is what the library is for."""
    answers = asked(app, *[("GET", "/reports/north")] * 50)
    assert all(answer.status_code == 200 for answer in answers)
    assert len({answer.text for answer in answers}) == 1
    (health,) = asked(app, ("GET", "/health"))
    assert health.json()["computed"] == 1


def test_an_invalidated_report_is_computed_anew(app: ModuleType) -> None:
    """After a report is deleted, the next request gets a new one."""
    (first,) = asked(app, ("GET", "/reports/north"))
    (again,) = asked(app, ("GET", "/reports/north"))
    (gone,) = asked(app, ("DELETE", "/reports/north"))
    (fresh,) = asked(app, ("GET", "/reports/north"))
    assert gone.status_code == 204
    assert first.json() == again.json()
    assert fresh.json()["at"] > first.json()["at"]


def test_a_price_that_is_set_is_the_price(app: ModuleType) -> None:
    """After a price is set, requests get the new price. The worker's local tier does not keep the old one."""
    (before,) = asked(app, ("GET", "/prices/tea"))
    (written,) = asked(app, ("POST", "/prices/tea"), content="14.5")
    (after,) = asked(app, ("GET", "/prices/tea"))
    assert (before.json(), written.status_code, after.json()) == (12.0, 204, 14.5)


def test_what_there_is_not_is_not_found_twice(app: ModuleType) -> None:
    """An exception that is an answer is stored, and is not an error of the server."""
    answers = [asked(app, ("GET", "/prices/gold"))[0] for _ in range(2)]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert stampede.get_cache().stats().computations == 1


def test_without_redis_the_shop_is_open(app: ModuleType, server: RedisServer) -> None:
    """If Redis is down, the application still answers, and computes a report once."""
    server.stop()
    answers = asked(app, *[("GET", "/reports/south")] * 20)
    assert all(answer.status_code == 200 for answer in answers)
    assert stampede.get_cache().stats().computations == 1
    (health,) = asked(app, ("GET", "/health"))
    assert health.status_code == 503
