"""A reverse proxy, for the tests of http-tests/cache-tests: behind `ResponseCache`, or with hishel as its cache.

python proxy.py stampede|hishel ORIGIN PORT"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from stampede import Cache
from stampede.contrib.asgi import ResponseCache
from stampede.contrib.asgi.run import App

NOT_SENT = {b"connection", b"host", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}


def proxy_of(origin: str, transport: httpx.AsyncBaseTransport) -> App:
    """Return an application that sends each request to the origin."""

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        query = scope["query_string"].decode()
        url = httpx.URL(origin + scope["raw_path"].decode() + ("?" + query if query else ""))
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_SENT]
        headers += [(b"host", url.netloc), (b"connection", b"close")]
        request = httpx.Request(scope["method"], url, headers=headers, content=body or None)
        try:
            response = await transport.handle_async_request(request)
            content = b"".join([chunk async for chunk in response.stream])  # type: ignore[union-attr]
            await response.aclose()
        except (httpx.TransportError, httpx.ProtocolError):
            await send({"type": "http.response.start", "status": 502, "headers": []})
            return await send({"type": "http.response.body", "body": b""})
        sent = [(name.lower(), value) for name, value in response.headers.raw if name.lower() != b"transfer-encoding"]
        status = min(response.status_code, 599)  # 999 is the origin's way to say that it expected a condition
        await send({"type": "http.response.start", "status": status, "headers": sent})
        return await send({"type": "http.response.body", "body": content})

    return proxy


def main(name: str, origin: str, port: str) -> None:
    straight = httpx.AsyncHTTPTransport()
    if name == "hishel":
        import hishel
        from hishel.httpx import AsyncCacheTransport

        path = Path(tempfile.mkdtemp()) / "hishel.db"
        storage = hishel.AsyncSqliteStorage(database_path=path)
        app = proxy_of(origin, AsyncCacheTransport(straight, storage, rfc=hishel.CacheOptions(shared=True)))
    else:
        app = ResponseCache(proxy_of(origin, straight), cache=Cache("memory://"))
    uvicorn.run(app, port=int(port), log_level="error", date_header=False, server_header=False, lifespan="off")


if __name__ == "__main__":
    main(*sys.argv[1:])
