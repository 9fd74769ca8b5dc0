"""Servers for the tests that speak DynamoDB's protocol: moto and dynalite. Each is ended by its pid."""

from __future__ import annotations

import io
import socket
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import marks
from server_process import PATIENCE, ServerProcess
from servers import missing, need, to_empty

__all__ = ["Dynalite", "MotoServer", "shared_dynalite", "shared_moto"]

TREE = Path(__file__).parents[2]
DYNALITE = TREE / ".venv" / "node" / "node_modules" / "dynalite" / "cli.js"  # `make` installs it there


class _Server(ServerProcess):
    """An empty server on a free port."""

    kind = "dynamodb"

    @property
    def url(self) -> str:
        return f"dynamodb://127.0.0.1:{self.port}/cache?aws_access_key_id=tests&aws_secret_access_key=tests"

    def _answers(self, port: int) -> bool:
        socket.create_connection(("127.0.0.1", port), 1.0).close()  # as soon as it listens
        return True


class MotoServer(_Server):
    def command(self, port: int) -> list[str]:
        return [sys.executable, __file__, str(port)]

    def empty(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as line:
            line.sendall(b"POST /moto-api/reset HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n")
            while line.recv(65536):
                pass


class Dynalite(_Server):
    def command(self, port: int) -> list[str]:
        if not DYNALITE.exists():
            missing("dynalite is not installed: `make .venv/.node` does that, with npm")
        return [need("node"), str(DYNALITE), "--host", "127.0.0.1", "--port", str(port), "--createTableMs", "20"]


def shared_moto() -> MotoServer:
    """The server that the tests of a session share."""
    marks.starts("dynamodb")
    server = _moto()
    to_empty["moto"] = server.empty
    return server


def shared_dynalite() -> Dynalite:
    marks.starts("dynamodb")
    return _dynalite()


_moto, _dynalite = cache(MotoServer), cache(Dynalite)


def _serve(port: int) -> None:
    """Serve moto, one request at a time: moto's conditional write is not atomic without a lock, as DynamoDB's is.

    (moto's own program would also read the machine's credentials and configuration.)
    """
    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, run_simple
    from werkzeug.test import Client

    # moto's own dispatcher is slow: it lists the directory of all its services at each request.
    dynamodb, own, one = create_backend_app("dynamodb"), create_backend_app("moto_api"), threading.Lock()

    def one_by_one(environ: Any, start_response: Any) -> Any:
        said = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # a client may freeze: no lock yet
        environ["wsgi.input"] = io.BytesIO(said)
        with one:
            return (own if environ["PATH_INFO"].startswith("/moto-api/") else dynamodb)(environ, start_response)

    # Its first answers take half a second each, and on a busy machine longer than a client's time-out.
    key = {"KeySchema": [{"AttributeName": "name", "KeyType": "HASH"}], "BillingMode": "PAY_PER_REQUEST"}
    kind = {"AttributeDefinitions": [{"AttributeName": "name", "AttributeType": "S"}]}
    for verb, terms in ("CreateTable", {**key, **kind}), ("GetItem", {"Key": {"name": {"S": "first"}}}):
        target = {"X-Amz-Target": f"DynamoDB_20120810.{verb}", "Content-Type": "application/x-amz-json-1.0"}
        said = Client(dynamodb).post("/", json={"TableName": "first", **terms}, headers=target)
        assert said.status_code == 200, said.text
    assert Client(own).post("/moto-api/reset").status_code == 200
    run_simple("127.0.0.1", port, one_by_one, threaded=True, request_handler=WSGIRequestHandler)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
