"""Applications and clients for the tests of `stampede.contrib.asgi`, in plain ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from herd import PATIENCE

from stampede import Cache

__all__ = ["Client", "Reply", "Shop", "outdate", "run"]

Scope = MutableMapping[str, Any]


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work(), PATIENCE)

    return asyncio.run(bounded())


@dataclass
class Reply:
    """What a client got of a response, so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def how(self) -> str:
        """How the cache has answered, without its own name. "": it has not."""
        return self.headers.get("cache-status", "").removeprefix("stampede; ")


class Client:
    """A client of an application, without a server between them."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.gone = asyncio.Event()  # the client has closed its connection

    async def ask(self, target: str = "/", method: str = "GET", reply: Reply | None = None, **headers: str) -> Reply:
        """Send a request, and return what came when the application has returned."""
        reply = Reply() if reply is None else reply
        path, _, query = target.partition("?")
        given = {"host": "shop.example", **{name.replace("_", "-"): value for name, value in headers.items()}}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "https",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "extensions": {"http.response.pathsend": {}},
        }
        asked, over = False, asyncio.Event()

        async def receive() -> Any:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": b"", "more_body": False}
            ends = [asyncio.create_task(event.wait()) for event in (self.gone, over)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
                reply.begun.set()
            else:
                assert reply.status, "a body before the status"
                assert not reply.complete, "a body after the end"
                reply.body += message.get("body", b"")
                reply.complete = not message.get("more_body", False)
                if reply.complete:
                    over.set()  # as servers tell an application that goes on

        await self.app(scope, receive, send)
        return reply


class Shop:
    """An application that counts its runs. Tests change its response, and hold it back."""

    def __init__(self, body: bytes = b"hello", status: int = 200, **headers: str) -> None:
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.body = body
        self.runs = 0
        self.seen: list[Scope] = []
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None  # before the response
        self.arrived = asyncio.Event()
        self.after: Callable[[], Awaitable[None]] | None = None  # a background task

    def header(self, name: str) -> str | None:
        """The request header of the last run."""
        return {k.decode(): v.decode() for k, v in self.seen[-1]["headers"]}.get(name)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            self.seen.append(scope)
            return
        self.runs += 1
        self.seen.append(scope)
        self.arrived.set()
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        known = self.headers.get("etag")
        status, body = self.status, self.body
        if known is not None and self.header("if-none-match") == known:
            status, body = 304, b""
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        if self.after is not None:
            await self.after()


async def outdate(cache: Cache, seconds: float = 100.0) -> None:
    """Make all stored responses `seconds` older than they are."""
    async for key in cache.akeys():
        entry = await cache.apeek(key)
        assert entry is not None
        answer = list(entry.value)
        answer[3] -= seconds
        await cache.aset(key, answer, ttl=60, stale=600)
        await cache.aexpire(key)
