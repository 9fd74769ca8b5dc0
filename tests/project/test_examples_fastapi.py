"""The example of a FastAPI application, on a real server with two workers and a real Redis, under fifty clients; and
what curl and a browser make of its headers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import PATIENCE, ServerProcess
from servers import RedisServer, missing, need

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("redis")
pytest.importorskip("uvicorn")

import httpx

ROOT = Path(__file__).parents[2]
CLIENTS = 50


class Application(ServerProcess):
    """The application as its first lines say that it is started, with two workers."""

    kind = "redis"

    def __init__(self, redis: RedisServer) -> None:
        self.environment = {**os.environ, "SHOP_REDIS": redis.url, "PYTHONPATH": str(ROOT)}
        super().__init__()

    def command(self, port: int) -> list[str]:
        options = ["--app-dir", str(ROOT / "examples" / "fastapi"), "--workers", "2", "--port", str(port)]
        return [sys.executable, "-m", "uvicorn", *options, "app:app"]

    def _answers(self, port: int) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/basket").status_code == 200
        except httpx.TransportError:
            raise OSError from None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """End the workers, too: the parent process does so if it is asked to end."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE)
            self._process = None


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    redis = RedisServer()
    application = Application(redis)
    yield application
    application.close()
    redis.close()


def asked(application: Application, *requests: tuple[str, str], **options: Any) -> list[httpx.Response]:
    """Send requests at the same time, each as a client of its own. Return the answers."""

    async def one(method: str, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=application.url, timeout=PATIENCE, verify=False) as client:
            return await client.request(method, path, **options)

    async def ask() -> list[httpx.Response]:
        return await asyncio.gather(*(one(*request) for request in requests))

    return asyncio.run(ask())


def test_fifty_clients_have_one_report_for_each_key(application: Application) -> None:
    """The report names its process and its time: in both workers, there is one for each region."""
    regions = ("north", "south")
    answers = asked(application, *[("GET", f"/reports/{region}") for region in regions] * (CLIENTS // 2))
    assert {answer.status_code for answer in answers} == {200}
    for region in regions:
        found = [answer for answer in answers if answer.url.path.endswith(region)]
        assert len(found) == CLIENTS // 2 and len({answer.content for answer in found}) == 1
        assert len({answer.headers["etag"] for answer in found}) == 1
        assert {answer.headers["content-type"] for answer in found} == {"application/json"}
        assert {answer.headers["cache-control"] for answer in found} == {"no-cache"}
        told = [answer.headers["cache-status"] for answer in found]
        assert told.count("stampede; fwd=miss") == 1
    etag = asked(application, ("GET", "/reports/north"))[0].headers["etag"]
    again = asked(application, *[("GET", "/reports/north")] * CLIENTS, headers={"If-None-Match": etag})
    assert {(each.status_code, each.content, each.headers["etag"]) for each in again} == {(304, b"", etag)}
    assert all(int(each.headers["age"]) >= 0 for each in again)


def test_what_is_removed_is_computed_once_more(application: Application) -> None:
    """A worker that has not seen the report's tag does not store what it computes within 50 ms after the tag was
    invalidated. Then the other worker computes it, too."""
    (before,) = asked(application, ("GET", "/reports/east"))
    assert asked(application, ("DELETE", "/reports/east"))[0].status_code == 204
    answers = asked(application, *[("GET", "/reports/east")] * 10)
    assert len({answer.content for answer in answers}) <= 2
    assert all(answer.json()["at"] > before.json()["at"] for answer in answers)


def test_a_price_is_cached_as_it_says(application: Application) -> None:
    """The parameters that a newsletter adds do not matter. A new price is the price."""
    answers = asked(application, *[("GET", f"/prices?product=coffee&utm_source={i}") for i in range(CLIENTS)])
    assert {answer.json()["amount"] for answer in answers} == {9.5}
    assert {answer.headers["cache-control"] for answer in answers} == {"max-age=60, stale-while-revalidate=600"}
    assert [answer.headers["cache-status"] for answer in answers].count("stampede; fwd=miss") == 1
    (missing,) = asked(application, ("GET", "/prices?product=gold"))
    assert missing.status_code == 404 and "cache-status" not in missing.headers
    assert asked(application, ("PUT", "/prices?product=coffee&amount=9.5"))[0].status_code == 204
    (after,) = asked(application, ("GET", "/prices?product=coffee"))
    assert after.headers["cache-status"] == "stampede; fwd=miss"


def test_a_private_page_passes(application: Application) -> None:
    answers = asked(application, *[("GET", "/basket")] * 5)
    assert {answer.text for answer in answers} == {'["tea"]'}
    assert not any("cache-status" in answer.headers for answer in answers)


# -- other clients ------------------------------------------------------------------------------------------------


def test_curl_gets_304(application: Application, tmp_path: Path) -> None:
    """curl's own conditional requests, by the ETag that it saved."""
    curl, url = need("curl"), f"{application.url}/reports/west"
    body, etag = tmp_path / "body", tmp_path / "etag"

    def run(*options: str) -> str:
        command = [curl, "-sS", "--max-time", "20", "-w", "%{http_code}", *options, url]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert run("-o", str(body), "--etag-save", str(etag)) == "200"
    assert json.loads(body.read_text())["region"] == "west"
    assert run("--etag-compare", str(etag)) == "304"
    assert run("-o", os.devnull, "-I") == "200"
    assert run("-o", os.devnull, "-H", 'If-None-Match: "other"') == "200"


async def reloaded(connect: Any, address: str, url: str) -> list[int]:
    """Open the page in the browser, and reload it. Return the statuses that came over the network."""
    statuses, loads = list[int](), 0
    async with connect(address, max_size=None) as socket:
        number = 0

        async def call(method: str, session: str | None = None, **params: Any) -> Any:
            """Call a method of the DevTools protocol, and return its result. Note the responses that come meanwhile."""
            nonlocal number
            number += 1
            where = {} if session is None else {"sessionId": session}
            await socket.send(json.dumps({"id": number, "method": method, "params": params, **where}))
            while (message := await note()).get("id") != number:
                pass
            assert "error" not in message, message
            return message["result"]

        async def note() -> Any:
            nonlocal loads
            message = json.loads(await socket.recv())
            headers = message.get("params", {}).get("headers", {})
            loads += message.get("method") == "Page.loadEventFired"
            if message.get("method") == "Network.responseReceivedExtraInfo" and "cache-status" in headers:
                statuses.append(message["params"]["statusCode"])
            return message

        target = await call("Target.createTarget", url="about:blank")
        session = (await call("Target.attachToTarget", targetId=target["targetId"], flatten=True))["sessionId"]
        await call("Network.enable", session)
        await call("Page.enable", session)
        for step in ("navigate", "reload"):
            loads, answered = 0, len(statuses)
            await call(f"Page.{step}", session, **({"url": url} if step == "navigate" else {}))
            while not loads or len(statuses) == answered:
                await note()
        shown = await call("Runtime.evaluate", session, expression="document.body.innerText")
        assert "tea" in shown["result"]["value"]
    return statuses


def test_a_browser_that_reloads_gets_304(application: Application, tmp_path: Path) -> None:
    """At a reload, Chromium asks with the ETag and with `max-age=0`. So the application runs, its bytes are the same,
    and the browser shows what it has."""
    websockets = pytest.importorskip("websockets.asyncio.client")
    browser = need("chromium")
    url = f"{application.url}/prices?product=tea"
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={tmp_path}", "--no-first-run", "about:blank"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        address = ""
        for line in process.stderr:
            if "DevTools listening on " in line:
                address = line.partition("DevTools listening on ")[2].strip()
                break
        if not address:
            missing("chromium does not start")
        statuses = asyncio.run(asyncio.wait_for(reloaded(websockets.connect, address, url), 60))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert statuses == [200, 304]
