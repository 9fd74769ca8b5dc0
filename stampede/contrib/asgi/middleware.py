"""`ResponseCache`: an ASGI middleware that stores whole responses."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from urllib.parse import quote, unquote_to_bytes

from stampede.api.cache import Cache
from stampede.api.registry import get_cache
from stampede.contrib.asgi.exchange import Exchange
from stampede.contrib.asgi.policy import Headers, directives, one, values
from stampede.contrib.asgi.route import ROUTE_TERMS, RouteTerms
from stampede.contrib.asgi.run import App, Message, Receive, Run, Scope, Send
from stampede.settings.options import Seconds, seconds

__all__ = ["ResponseCache"]

_log = logging.getLogger("stampede")

PRECISE = frozenset({b"range", b"if-match", b"if-unmodified-since", b"if-range"})
"""Headers of requests that want a part of the response, or a certain version. These requests go to the application."""

MOST_PASSING = 10_000
"""The number of URLs whose responses are known not to be stored."""


class ResponseCache:
    """An ASGI middleware that stores whole responses in a cache, and computes each once for a herd of requests.

    It stores what the responses allow by `Cache-Control` or `Expires`, as a shared cache does (RFC 9111), and answers
    conditional requests with 304. The options:

    - `cache`: a `Cache`, or the name of one in the settings.
    - `ttl`, `stale`: for responses that have no times of their own. `ttl=None`: these are not stored.
      `@cached_response` sets both for one route.
    - `query`: the parameters of the query that are part of the key. The application sees only these. None: all.
    - `max_bytes`: longer responses are passed to their clients as they stream, and not stored.
    - `tag_header`: a response header that lists tags, separated by commas or spaces. Clients do not see it.
    - `obey_requests`: whether a client's `Cache-Control` counts, as in a browser's reload.

    >>> from stampede.contrib.asgi import ResponseCache
    >>> async def app(scope, receive, send):
    ...     headers = [(b"cache-control", b"max-age=60")]
    ...     await send({"type": "http.response.start", "status": 200, "headers": headers})
    ...     await send({"type": "http.response.body", "body": b"hello"})
    >>> app = ResponseCache(app)  # in FastAPI and Starlette: app.add_middleware(ResponseCache)
    """

    def __init__(
        self,
        app: App,
        *,
        cache: Cache | str = "default",
        ttl: Seconds = None,
        stale: Seconds = 0,
        query: Collection[str] | None = None,
        max_bytes: int = 2**20,
        tag_header: str | None = None,
        obey_requests: bool = True,
    ) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.tag_headers = frozenset[bytes]() if tag_header is None else frozenset({tag_header.lower().encode()})
        self._cache = cache
        self._ttl = None if ttl is None else seconds("ttl", ttl)
        self._stale = seconds("stale", stale)
        self._query = None if query is None else frozenset(name.encode() for name in query)
        self._obeys = obey_requests
        self._passing: OrderedDict[int, None] = OrderedDict()  # hashes, because clients could send long URLs
        self._runs: set[Run] = set()  # a task needs a reference until it ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("OPTIONS", "TRACE"):
            return await self.app(scope, receive, send)
        headers: Headers = scope["headers"]
        shared = {**scope, "query_string": self._query_of(scope)}
        if scope["method"] not in ("GET", "HEAD"):
            return await self._change(scope, receive, send, shared)
        outer: RouteTerms | None = scope.get(ROUTE_TERMS)
        if outer is not None:  # another ResponseCache is outside of this one, and stores the response
            if self._ttl is not None:
                outer.ttl, outer.stale = self._ttl, self._stale
            return await self.app(scope, receive, send)
        key = self.key_of(shared, authorized=one(headers, b"authorization") is not None)
        control = directives(headers) if self._obeys else {}
        exchange = Exchange(self, self._find_cache(), shared, receive, send, key, control)
        if "no-store" in control or _has_body(headers) or any(name.lower() in PRECISE for name, _ in headers):
            return await exchange.run_alone()
        return await exchange.respond()

    def _find_cache(self) -> Cache:
        return get_cache(self._cache) if isinstance(self._cache, str) else self._cache

    # -- keys -----------------------------------------------------------------------------------------------------

    def key_of(self, scope: Scope, *, authorized: bool) -> str:
        """Return the key of a URL, whose query is in order. Requests with `Authorization` have keys of their own, since
        they share less."""
        path = scope.get("raw_path") or b""
        if unquote_to_bytes(path) != scope["path"].encode():  # a middleware outside of this one has changed the path
            path = b"%s %s" % (quote(scope["path"]).encode(), path)
        host = quote((one(scope["headers"], b"host") or b"").lower(), safe=":[]")  # clients could write a path in it
        url = b"%s://%s%s?%s" % (scope.get("scheme", "http").encode(), host.encode(), path, scope["query_string"])
        return f"response{' authorized' * authorized} {url.decode('latin-1')}"

    def _query_of(self, scope: Scope) -> bytes:
        """Return the query with its parameters in order, and only those of the allow-list."""
        pieces = [piece for piece in bytes(scope.get("query_string", b"")).split(b"&") if piece]
        names = [unquote_to_bytes(piece.partition(b"=")[0].replace(b"+", b" ")) for piece in pieces]
        named = sorted(zip(names, pieces, strict=True), key=lambda pair: pair[0])  # the order of equal names stays
        return b"&".join(piece for name, piece in named if self._query is None or name in self._query)

    def tag_of(self, key: str) -> str:
        """Return the tag of all variants of a URL."""
        return f"response {hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"

    def tags_in(self, headers: Headers) -> list[str]:
        """Return the tags that a response names in the tag header."""
        named = [value for name in self.tag_headers for value in values(headers, name)]
        return [tag for value in named for tag in value.decode("latin-1").replace(",", " ").split()]

    # -- runs of the application ----------------------------------------------------------------------------------

    def route_terms(self) -> RouteTerms:
        """Return what counts for a response whose route has no decorator."""
        return RouteTerms(self._ttl, self._stale)

    def run(self, scope: Scope, may_buffer: Callable[[Message], bool]) -> Run:
        """Begin a run of the application, which may outlive the request."""
        run = Run(self.app, scope, may_buffer, self.max_bytes)
        self._runs.add(run)
        run.task.add_done_callback(lambda task: self._ended(run))
        return run

    def _ended(self, run: Run) -> None:
        self._runs.discard(run)
        error = None if run.task.cancelled() else run.task.exception()
        if error is not None and run.complete and not run.awaited:
            _log.error("an ASGI application failed after its response was complete", exc_info=error)

    # -- URLs whose responses are not stored: their requests don't wait for each other ----------------------------

    def passes(self, key: str) -> bool:
        """Return whether the last response to this key could not be stored."""
        return hash(key) in self._passing

    def note_passing(self, key: str) -> None:
        self._passing[hash(key)] = None
        while len(self._passing) > MOST_PASSING:
            self._passing.popitem(last=False)

    def forget_passing(self, key: str) -> None:
        self._passing.pop(hash(key), None)

    # -- unsafe methods -------------------------------------------------------------------------------------------

    async def _change(self, scope: Scope, receive: Receive, send: Send, shared: Scope) -> None:
        """Run a request such as POST. Unless it fails, invalidate its URL (RFC 9111, 4.4) before its response begins,
        since its client may ask at once, and when the application has ended: it may commit after its response."""
        keys = [self.key_of(shared, authorized=authorized) for authorized in (False, True)]
        succeeded = False

        async def invalidate() -> None:
            cache = self._find_cache()
            await cache.ainvalidate_many(keys, on_error="later")
            await cache.ainvalidate_tags(*map(self.tag_of, keys), on_error="later")

        async def sending(message: Message) -> None:
            nonlocal succeeded
            if message["type"] == "http.response.start" and message["status"] < 400:
                succeeded = True
                await invalidate()
            await send(message)

        try:
            await self.app(scope, receive, sending)
        finally:
            if succeeded:
                await invalidate()


def _has_body(headers: Headers) -> bool:
    return bool(values(headers, b"transfer-encoding")) or one(headers, b"content-length") not in (None, b"0")
