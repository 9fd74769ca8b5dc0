"""The answer to one GET or HEAD request: a stored response, the response to another request that is under way, or a
response that the application makes for this request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from stampede.algorithm.context import Context, Inside
from stampede.api.cache import Cache
from stampede.api.current import current
from stampede.contrib.asgi.policy import (
    Answer,
    Headers,
    Terms,
    answer_of,
    is_not_modified,
    merged,
    one,
    seconds_of,
    terms_of,
    variant_of,
    without,
)
from stampede.contrib.asgi.route import ROUTE_TERMS, RouteTerms, route_terms
from stampede.contrib.asgi.run import App, Message, Receive, Run, Scope, Send
from stampede.errors import OptionError, WaitTimeout

__all__ = ["Exchange"]

_log = logging.getLogger("stampede")

MOST_VARIANTS = 4
"""How often an answer may be found to depend on further headers of the request."""

OF_CLIENT = frozenset({b"if-none-match", b"if-modified-since"})
"""Request headers that concern the client's own copy. The application does not see them: its response is for all."""

UNCHANGED = (b"content-encoding", b"content-language", b"content-length", b"content-range", b"content-type")
"""Headers that are not sent with a 304."""


class ServerError(Exception):
    """The application has answered with 5xx. All requests that wait for it get the stored response."""


class Owner(Protocol):
    """The middleware, which outlives its requests."""

    app: App
    max_bytes: int

    @property
    def tag_headers(self) -> Set[bytes]: ...
    def tags_in(self, headers: Headers) -> list[str]: ...
    def tag_of(self, key: str) -> str: ...
    def passes(self, key: str) -> bool: ...
    def note_passing(self, key: str) -> None: ...
    def forget_passing(self, key: str) -> None: ...
    def route_terms(self) -> RouteTerms: ...
    def run(self, scope: Scope, may_buffer: Callable[[Message], bool]) -> Run: ...


@dataclass
class _Own:
    """The run of the application for this request, and what is to be stored of its response."""

    route: RouteTerms
    known: Answer | None  # the stored answer that the application may confirm
    context: Context  # of the computation that began it: its tags count, and what was invalidated since
    run: Run = field(init=False)
    terms: Terms | None = None
    answer: Answer | None = None


@dataclass
class Exchange:
    """One GET or HEAD request and its answer."""

    owner: Owner
    cache: Cache
    scope: Scope
    receive: Receive
    send: Send
    key: str
    control: dict[str, str | None]
    began: float = field(default_factory=time.time)
    own: _Own | None = None
    over: bool = False
    passing_key: str = ""  # the key that was looked for last: that of the URL, or of one variant
    known: Answer | None = None  # the stored answer that is not good enough, to be confirmed or replaced

    @property
    def headers(self) -> Headers:
        headers: Headers = self.scope["headers"]
        return headers

    # -- find an answer -------------------------------------------------------------------------------------------

    async def respond(self) -> None:
        """Answer the request. A response that may not be stored is passed as it streams."""
        try:
            try:
                answer = await self._find()
            except WaitTimeout:
                return await _send_text(self.send, 503, b"please try again", (b"retry-after", b"1"))
            if not isinstance(answer, Answer) and self.own is not None:
                answer = self.own.answer  # it may not be shared: it is for this request only
            if isinstance(answer, Answer):
                return await self._give(answer)
            if self.own is not None and self.own.run.passing:
                return await self.own.run.pass_to(self.receive, self.send, head=self.scope["method"] == "HEAD")
        finally:
            self.over = True
            if self.own is not None:
                self.own.run.abandon()
        if "only-if-cached" in self.control:
            return await _send_text(self.send, 504, b"this response is not stored")
        return await self.run_alone()

    async def _find(self) -> Answer | int | None:
        """Return the answer for this request, or the status of a response that is not shared. None: it is unknown."""
        names: set[bytes] = set()
        key, tags = self.key, list[str]()
        for _ in range(MOST_VARIANTS):
            self.passing_key = key
            if self.owner.passes(key):
                return None
            found = await self._look(key, tags)
            if isinstance(found, int) or self._is_for_us(found):
                return found
            # The answer is for another request: those to this URL depend on these headers, too.
            names.update(found.vary)
            variant = variant_of(self.headers, sorted(names))
            key, tags = f"variant {variant} of {self.key}", [self.owner.tag_of(self.key)]
        return None

    async def _look(self, key: str, tags: list[str]) -> Answer | int:
        """Return what is stored for the key if it may be served now. Otherwise run the application, or wait for
        another request that does."""
        if "only-if-cached" in self.control:
            stored = await self.cache.aget(key)
            return 504 if stored is None else Answer(*stored)

        async def compute() -> Any:
            return await self._compute(key)

        # A stale answer comes at once, and its refresh begins in the background.
        found = _loaded(await self.cache.aget_or_compute(key, compute, background=True, tags=tags))
        if isinstance(found, int) or found.made >= self.began or not self._is_for_us(found):
            return found
        terms, age = Terms(*found.terms), time.time() - found.made
        beyond = age - terms.fresh
        if self._refuses(found, age):
            renew: Any = self.cache.arefresh(key, compute, tags=tags)
        elif beyond < 0 or beyond < terms.revalidate:
            return found
        else:
            renew = self.cache.aget_or_compute(key, compute, stale=0, tags=tags)
        may_serve = 0 < terms.on_error > beyond
        self.known = found
        try:
            renewed = _loaded(await renew)
        except Exception:
            if may_serve:
                return found
            if self.own is not None:  # the refresh in the background was ours: this is its response, or its error
                if self.own.run.passing:
                    return self.own.run.status
                self.own.run.raise_error()
            raise
        return found if isinstance(renewed, int) and renewed >= 500 and may_serve else renewed

    def _is_for_us(self, answer: Answer) -> bool:
        return answer.variant == variant_of(self.headers, answer.vary)

    def _refuses(self, answer: Answer, age: float) -> bool:
        """Return whether the client's `Cache-Control` asks for a newer answer than this one, which is fresh."""
        oldest, rest = seconds_of(self.control.get("max-age")), seconds_of(self.control.get("min-fresh"))
        return (
            "no-cache" in self.control
            or (oldest is not None and age + answer.age > oldest)
            or (rest is not None and answer.terms[0] - age < rest)
        )

    # -- run the application --------------------------------------------------------------------------------------

    async def _compute(self, key: str) -> Any:
        """Run the application, inside the computation of the key. Return the answer to store, or a status if the
        response may not be stored; then each request runs the application itself."""
        context = current()
        if self.own is None:  # otherwise this request has found another variant, and renews that already
            before = self.known if context.stale is None else Answer(*context.stale.value)
            self.own = self._start(before if before is not None and self._is_for_us(before) else None, context)
        own = self.own
        await own.run.decided()
        if own.run.passing:
            context.dont_keep()
            if own.run.status < 500:
                self.owner.note_passing(key)
            if self.over:
                own.run.abandon()
            if own.run.status >= 500 and own.known is not None and _has_a_substitute(own.known):
                raise ServerError(f"the application answered {own.run.status}")  # then the key rests for a moment
            return own.run.status
        answer = own.answer = own.answer or self._answer_of(own)
        if own.terms is None:  # the application has confirmed the stored response by a 304 that forbids to store it
            context.dont_keep()
            return answer.status
        if own.context is not context:
            context.dont_keep()  # the run began before this computation: an invalidation may lie between them
            return answer.stored()
        context.ttl, context.stale_for = own.terms.fresh, max(own.terms[1:])
        try:
            context.tag(*own.route.tags)
        except OptionError as error:
            _log.warning("the response to %r is not stored: %s", key, error)
            context.dont_keep()
        return answer.stored()

    def _answer_of(self, own: _Own) -> Answer:
        """Return what is stored of the complete response: it is new, or a 304 that confirms what is known."""
        start, body = own.run.messages[0], own.run.body
        status, headers = start["status"], start["headers"]
        if status == 304 and own.known is not None:
            status, headers, body = own.known.status, merged(own.known, headers), own.known.body
            own.terms = self._terms(status, headers, own.route)
        return answer_of(status, headers, body, self.headers, own.terms or Terms(0), time.time())

    def _start(self, known: Answer | None, context: Context) -> _Own:
        """Begin a run of the application. Its request is for all: GET, and with the validators of the stored answer."""
        own = _Own(self.owner.route_terms(), known, context)

        def may_buffer(start: Message) -> bool:
            headers = list(start.get("headers", ()))
            own.route.tags += self.owner.tags_in(headers)
            start["headers"] = headers = without(headers, self.owner.tag_headers)
            length = seconds_of((one(headers, b"content-length") or b"").decode("latin-1"))
            if length is not None and length > self.owner.max_bytes:
                return False
            own.terms = self._terms(start["status"], headers, own.route)
            return own.terms is not None or (start["status"] == 304 and known is not None)

        headers = without(self.headers, OF_CLIENT)
        if known is not None:
            etag, modified = one(known.headers, b"etag"), one(known.headers, b"last-modified")
            headers += [(b"if-none-match", etag)] if etag else []
            headers += [(b"if-modified-since", modified)] if modified else []
        extensions = self.scope.get("extensions") or {}
        scope = {
            **self.scope,
            ROUTE_TERMS: own.route,
            "method": "GET",
            "headers": headers,
            "extensions": {k: v for k, v in extensions.items() if not k.startswith("http.response.")},
        }
        token = route_terms.set(own.route)  # the task of the run copies the context
        try:
            own.run = self.owner.run(scope, may_buffer)
        finally:
            route_terms.reset(token)
        return own

    def _terms(self, status: int, headers: Headers, route: RouteTerms) -> Terms | None:
        if getattr(self.scope.get("session"), "accessed", False):
            return None  # Starlette's middleware is outside, so that its `Vary: Cookie` and `Set-Cookie` come later
        authorized = one(self.headers, b"authorization") is not None
        return terms_of(status, headers, time.time(), authorized=authorized, ttl=route.ttl, stale=route.stale)

    async def run_alone(self) -> None:
        """Run the application for this request only, and store nothing. If the response could have been stored, the
        next request for this URL tries to store its own."""
        route = self.owner.route_terms()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = headers = without(message.get("headers", ()), self.owner.tag_headers)
                if self._terms(message["status"], headers, route) is not None:
                    self.owner.forget_passing(self.passing_key)
            await self.send(message)

        token = route_terms.set(route)
        try:
            with Inside(Context(self.key)):  # so that `stampede.current()` works, without effect
                await self.owner.app({**self.scope, ROUTE_TERMS: route}, self.receive, sending)
        finally:
            route_terms.reset(token)

    # -- send the answer ------------------------------------------------------------------------------------------

    async def _give(self, answer: Answer) -> None:
        """Send an answer to the client, or 304 if the client has it. Then wait for the end of the own run, if the
        answer is its response: it may have background tasks."""
        run = self._run_of(answer)
        headers, body, status = [(name, value) for name, value in answer.headers], answer.body, answer.status
        age = answer.age + max(0, int(time.time() - answer.made))
        if run is None or age:
            headers.append((b"age", b"%d" % age))
        if one(headers, b"cache-control") is None and one(headers, b"expires") is None:
            # It is stored for the default ttl. Other caches would guess another one, and would not see an invalidation.
            headers.append((b"cache-control", b"no-cache"))
        how = b"fwd=miss" if run is not None else b"hit" if answer.made < self.began else b"fwd=miss; collapsed"
        headers.append((b"cache-status", b"stampede; " + how))
        if status == 200 and is_not_modified(self.headers, answer):
            status, headers, body = 304, without(headers, UNCHANGED), b""
        elif self.scope["method"] == "HEAD":
            body = b""
        if run is not None:
            run.awaited = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
        if run is not None:
            await run.task

    def _run_of(self, answer: Answer) -> Run | None:
        """Return this request's run of the application, if the answer is its response."""
        own = self.own
        return own.run if own is not None and own.answer is not None and own.answer.made == answer.made else None


def _has_a_substitute(answer: Answer) -> bool:
    """Return whether this stale answer is served if the application fails now."""
    terms = Terms(*answer.terms)
    beyond = time.time() - answer.made - terms.fresh
    return 0 < terms.on_error > beyond or 0 <= beyond < terms.revalidate


def _loaded(value: Any) -> Answer | int:
    return value if isinstance(value, int) else Answer(*value)


async def _send_text(send: Send, status: int, text: bytes, *headers: tuple[bytes, bytes]) -> None:
    kind = (b"content-type", b"text/plain; charset=utf-8")
    length = (b"content-length", b"%d" % len(text))
    await send({"type": "http.response.start", "status": status, "headers": [kind, length, *headers]})
    await send({"type": "http.response.body", "body": text})
