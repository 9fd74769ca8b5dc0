"""The example of a Flask application: two processes with one cache, and clients that send requests to both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from subprocess import DEVNULL

import pytest
from herd import Herd, until
from server_process import free_port

pytest.importorskip("flask_caching")

APP = Path(__file__).parents[2] / "examples" / "flask" / "app.py"


def ask(port: int, method: str, path: str, body: str = "", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Send a request, and return the status, the headers and the body of the answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """The ports of two processes of the application, started as its docstring says."""
    found = [free_port(), free_port()]
    place = f"disk://{tmp_path_factory.mktemp('shop')}/cache"
    environment = {**os.environ, "SHOP_CACHE": place, "PYTHONPATH": str(APP.parents[2])}
    started = [
        subprocess.Popen([sys.executable, APP, str(port)], env=environment, stdout=DEVNULL, stderr=DEVNULL)
        for port in found
    ]
    try:
        for port in found:
            until(lambda port=port: answers(port))
        yield found
    finally:
        for process in started:
            process.kill()
            process.wait()


def answers(port: int) -> bool:
    try:
        return ask(port, "GET", "/health")[0] == 200
    except OSError:
        return False


def test_fifty_clients_of_two_workers_have_one_report(ports: list[int]) -> None:
    """Each client gets the headers of the one response, and no cookie. A client that has the response is told that it
    has not changed, by either worker."""

    def herd(path: str) -> list[tuple[int, dict[str, str], bytes]]:
        return Herd(*[lambda port=ports[n % 2]: ask(port, "GET", path) for n in range(50)]).join()

    def computed() -> int:
        return sum(json.loads(ask(port, "GET", "/health")[2])["computed"] for port in ports)

    before = computed()
    north = herd("/reports/north")
    assert {status for status, _, _ in north} == {200} and computed() == before + 1
    assert len({body for _, _, body in north}) == 1
    for name in ("X-Computed-By", "ETag", "Content-Length", "Content-Type"):
        assert len({headers[name] for _, headers, _ in north}) == 1, name
    assert {headers["Cache-Control"] for _, headers, _ in north} == {"public, max-age=10"}
    assert not any("Set-Cookie" in headers for _, headers, _ in north)
    for port in ports:
        status, headers, body = ask(port, "GET", "/reports/north", **{"If-None-Match": north[0][1]["ETag"]})
        assert (status, body, headers["hit_cache"]) == (304, b"", "True")


def test_fifty_clients_are_told_that_there_is_no_such_product(ports: list[int]) -> None:
    """A 404 is an answer like others. A price that has changed is the price, for clients of both workers."""

    def herd(path: str) -> set[tuple[int, bytes]]:
        jobs = [lambda port=ports[n % 2]: ask(port, "GET", path) for n in range(50)]
        return {(status, body) for status, _, body in Herd(*jobs).join()}

    ((status, _),) = herd("/prices/gold")
    assert status == 404
    assert herd("/prices/tea") == {(200, b'{"price":12.0}\n')}
    assert ask(ports[0], "POST", "/prices/tea", "14.5")[0] == 204
    assert ask(ports[0], "GET", "/prices/tea")[2] == b'{"price":14.5}\n'
    assert ask(ports[1], "GET", "/prices/tea")[2] == b'{"price":14.5}\n'
