"""Whole responses in the cache: `cache_page` for a view, `CacheMiddleware` for a site. Concurrent requests of one page
render it once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from hashlib import blake2b
from http.cookies import Morsel
from inspect import signature
from math import inf
from typing import Any, NamedTuple

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.conf import settings
from django.contrib.messages import get_messages
from django.core.cache import caches
from django.core.exceptions import BadRequest, ImproperlyConfigured, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils import timezone, translation
from django.utils.cache import (
    get_conditional_response,
    get_max_age,
    has_vary_header,
    patch_response_headers,
    patch_vary_headers,
)
from django.utils.http import parse_http_date_safe

from stampede.algorithm.context import Context, Inside, running
from stampede.api.cache import Cache
from stampede.api.current import current
from stampede.contrib.django.backend import StampedeCache
from stampede.keys.maker import tags_of_call
from stampede.keys.parameters import Parameters
from stampede.settings.options import DEFAULT, LONGEST_TAG, Seconds, checked_tags, seconds

__all__ = ["CacheMiddleware", "cache_page"]

PASS = 10.0
"""Seconds for which it is remembered that a page can't be stored. Its requests do not wait for each other then."""


class _Page(NamedTuple):
    """What is stored of a response: the headers that it varies on, a digest of the request's values of these, and the
    parts of the response. Without a status, it stands for a response that can't be stored."""

    vary: list[str]
    variant: bytes
    status: int = 0
    reason: str = ""
    headers: Sequence[tuple[str, str]] = ()
    cookies: Sequence[tuple[str, str, str, dict[str, Any]]] = ()
    content: bytes = b""
    flags: Sequence[str] = ()


YEAR = 365 * 86_400
"""The most seconds for which a response tells browsers to keep it."""

ANSWERS = (Http404, PermissionDenied, BadRequest, SuspiciousOperation)
"""Exceptions of a view that Django answers with a response."""


def cache_page(
    timeout: Seconds,
    *,
    cache: str | None = None,
    key_prefix: str | None = None,
    tags: str | Iterable[str] | Callable[..., Iterable[str]] = (),
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Cache the responses of a view, `def` or `async def`, for `timeout` seconds, as Django's `cache_page` does.
    Concurrent requests of one page run the view once. None is for what the response's `max-age` says.

    `tags` name the page for `invalidate_tags`: format strings over the view's arguments, or a function of the request
    and these. Other options are those of a computation, such as `stale="1h"`.

        @cache_page(600, tags=["shop:{shop_id}"])
        def show_shop(request, shop_id): ...
    """

    DEFAULT.with_options(**options)  # raises for a wrong one
    ttl = None if timeout is None else seconds("timeout", timeout)
    given = [tags] if isinstance(tags, str) else tags if callable(tags) else list(tags)

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        make = given if callable(given) else _tags_of(view, given)
        pages = _Pages(view, ttl, cache or "default", key_prefix or "", make, options, outermost=False)
        if iscoroutinefunction(view):

            @wraps(view)
            async def aserve(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                return await pages.aserve(request, *args, **kwargs)

            return aserve

        @wraps(view)
        def serve(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            return pages.serve(request, *args, **kwargs)

        return serve

    return decorate


class CacheMiddleware:
    """Cache all pages of a site that may be cached, in place of Django's `UpdateCacheMiddleware` and
    `FetchFromCacheMiddleware`. Concurrent requests of one page run the rest of the site once.

    Put it first in `MIDDLEWARE`. It reads Django's settings `CACHE_MIDDLEWARE_ALIAS`, `CACHE_MIDDLEWARE_SECONDS` and
    `CACHE_MIDDLEWARE_KEY_PREFIX`. A response's `max-age` beats the second of these.

        MIDDLEWARE = ["stampede.contrib.django.CacheMiddleware", ...]
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[..., Any]) -> None:
        alias, prefix = settings.CACHE_MIDDLEWARE_ALIAS, settings.CACHE_MIDDLEWARE_KEY_PREFIX
        self._pages = _Pages(get_response, None, alias, prefix, lambda request: (), {}, outermost=True)
        self._suspending = iscoroutinefunction(get_response)
        if self._suspending:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        return self._pages.aserve(request) if self._suspending else self._pages.serve(request)


class _Pages:
    """The pages of one view, or of a site."""

    def __init__(
        self,
        view: Callable[..., Any],
        timeout: float | None,
        alias: str,
        prefix: str,
        tags: Callable[..., Iterable[str]],
        options: Mapping[str, Any],
        *,
        outermost: bool,
    ) -> None:
        """`outermost`: this is a middleware that no other one is around, so no language is chosen yet."""
        self.view, self.timeout, self.prefix = view, timeout, prefix
        # In another thread, the view would have neither the request's language nor its database connection.
        self.outermost, self.options = outermost, {**options, "background": False, "patience": None, "deadline": None}
        self._alias = alias
        self._tags = tags

    @property
    def backend(self) -> StampedeCache:
        backend = caches[self._alias]
        if not isinstance(backend, StampedeCache):
            raise ImproperlyConfigured(f"CACHES[{self._alias!r}] is not a StampedeCache: pages need one")
        return backend

    @property
    def cache(self) -> Cache:
        return self.backend.stampede

    def tags(self, request: HttpRequest, *args: Any, **kwargs: Any) -> list[str]:
        """Return the page's tags. One that is too long can't be invalidated, either: a visitor may choose its text."""
        return [tag for tag in self._tags(request, *args, **kwargs) if len(tag) <= LONGEST_TAG]

    def serve(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        view, visit = partial(self.view, request, *args, **kwargs), _Visit(self, request)

        def render() -> tuple[Any, ...]:
            try:
                response = view()
                return visit.to_store(response.render() if _is_unrendered(response) else response)
            except Exception as error:
                if visit.shares(error):
                    raise
                return visit.failed(error)

        if visit.method == "HEAD":
            visit.use(self.cache.get(next(visit.page_keys(), "")))
        elif visit.method == "GET":
            for key in visit.page_keys():
                visit.use(
                    self.cache.get_or_compute(key, render, tags=self.tags(request, *args, **kwargs), **self.options)
                )
        if visit.is_over:
            return visit.answer()
        with _context():
            return view()

    async def aserve(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        view, visit = partial(self.view, request, *args, **kwargs), _Visit(self, request)

        async def render() -> tuple[Any, ...]:
            try:
                response = await view()
                if _is_unrendered(response):
                    response = await sync_to_async(response.render)()  # it may query the database
                return visit.to_store(response)
            except Exception as error:
                if visit.shares(error):
                    raise
                return visit.failed(error)

        if visit.method == "HEAD":
            visit.use(await self.cache.aget(next(visit.page_keys(), "")))
        elif visit.method == "GET":
            for key in visit.page_keys():
                tags = self.tags(request, *args, **kwargs)
                visit.use(await self.cache.aget_or_compute(key, render, tags=tags, **self.options))
        if visit.is_over:
            return visit.answer()
        with _context():
            return await view()


def _tags_of(view: Callable[..., Any], tags: list[str]) -> Callable[..., list[str]]:
    """Return a function that fills the arguments of the view into these tags. OptionError: they name others."""
    shape = signature(view)
    if any(each.kind is each.VAR_KEYWORD for each in shape.parameters.values()):  # such as a class's `as_view()`
        checked_tags("tags", tags)
    else:
        tags_of_call(tags, Parameters(view, ()))

    def fill(*args: Any, **kwargs: Any) -> list[str]:
        arguments = shape.bind(*args, **kwargs).arguments
        return [tag.format_map({**arguments, **kwargs}) for tag in tags]

    return fill


class _Visit:
    """One request for a page, and what is known about its response so far."""

    def __init__(self, pages: _Pages, request: HttpRequest) -> None:
        self._pages, self._request = pages, request
        self._own: HttpResponse | Exception | None = None  # what this request's own run of the view gave
        self._stored: _Page | None = None  # the page that answers the request
        self._other: Sequence[str] | None = None  # the headers on which another request's page varies

    @property
    def method(self) -> str:
        """The request's method, or "" if the request is to go straight to the view."""
        return "" if "authorization" in self._request.headers else str(self._request.method)

    @property
    def is_over(self) -> bool:
        """Whether the response is known. Otherwise the view has to be run, for this request alone."""
        return self._own is not None or (self._stored is not None and self._stored.status > 0)

    def page_keys(self) -> Iterator[str]:
        """Yield the keys under which the page may be stored: that of the URL, and that of a variant, if the page under
        the first one is for other values of headers. Yield none for a view that is run to make this very page."""
        digest = blake2b(digest_size=16)
        for part in (self._request.build_absolute_uri(), *self._locale()):
            digest.update(part.encode() + b"\0")
        url = self._pages.backend.make_key(f"page:{self._pages.prefix}:{digest.hexdigest()}")
        running: set[str] = self._request.__dict__.setdefault("stampede_pages", set())
        if url in running:
            return
        running.add(url)
        try:
            yield url
            if self._own is None and self._stored is None and self._other is not None:
                yield f"{url}:{self._variant(self._other).hex()}"
        finally:
            running.discard(url)

    def _locale(self) -> list[str]:
        """Return the language and the time zone."""
        if self._pages.outermost:  # no middleware has chosen them yet
            chosen = translation.get_language_from_request(self._request, check_path=True) if settings.USE_I18N else ""
            return ["site", chosen]
        language = translation.get_language() or "" if settings.USE_I18N else ""
        return [language, timezone.get_current_timezone_name() if settings.USE_TZ else ""]

    def _variant(self, headers: Sequence[str]) -> bytes:
        given = repr([self._request.headers.get(header) for header in headers])
        return blake2b(given.encode(), digest_size=16).digest()

    def use(self, stored: Sequence[Any] | None) -> None:
        """Use a stored page, if it is for this request's values of the headers on which it varies."""
        if self._own is None and stored is not None:
            page = _Page(*stored)
            if page.variant == self._variant(page.vary):
                self._stored = page
            else:
                self._other = page.vary

    def shares(self, error: Exception) -> bool:
        """Return whether other requests that wait for this page get the view's exception, too."""
        return not isinstance(error, ANSWERS) and not self._reads_session

    def failed(self, error: Exception) -> tuple[Any, ...]:
        """Return what to store if the view raises an exception that concerns this request alone."""
        self._own = error
        return self._not_stored([])

    def to_store(self, response: HttpResponse) -> tuple[Any, ...]:
        """Return what to store of the view's response."""
        if not isinstance(response, HttpResponseBase):
            raise TypeError(f"the view returned {response!r}, which is no response")
        self._own = response
        if self._reads_session:
            patch_vary_headers(response, ("Cookie",))  # as Django's SessionMiddleware does, but later
        vary = sorted({each.strip().lower() for each in response.get("Vary", "").split(",") if each.strip()})
        ttl = self._ttl(response)
        if not ttl or "*" in vary:
            return self._not_stored(vary, note=response.status_code != 304)
        current().ttl = None if ttl == inf else ttl
        cookies = [(each.key, each.value, each.coded_value, dict(each)) for each in response.cookies.values()]
        flags = [name for name, value in vars(response).items() if value is True]  # such as xframe_options_exempt
        head = response.status_code, response.reason_phrase, list(response.items())
        return tuple(_Page(vary, self._variant(vary), *head, cookies, response.content, flags))

    def _not_stored(self, vary: Sequence[str], *, note: bool = True) -> tuple[Any, ...]:
        if note:
            current().ttl, current().stale_for = PASS, 0
        else:
            current().dont_keep()
        return list(vary), self._variant(vary)

    def _ttl(self, response: HttpResponse) -> float:
        """Return for how long the response may be stored, by Django's rules; 0 for not at all. Give it the headers that
        say so."""
        if response.streaming or response.status_code not in (200, 304):
            return 0
        control = response.get("Cache-Control", "").lower()
        if any(word in control for word in ("private", "no-cache", "no-store")) or self._is_personal(response):
            return 0
        ttl = self._pages.timeout
        if ttl is None:
            ttl = get_max_age(response)
        if ttl is None:
            ttl = settings.CACHE_MIDDLEWARE_SECONDS
        if ttl:
            patch_response_headers(response, int(min(ttl, YEAR)))
        return ttl if response.status_code == 200 else 0

    @property
    def _reads_session(self) -> bool:
        return bool(getattr(getattr(self._request, "session", None), "accessed", False))

    def _is_personal(self, response: HttpResponse) -> bool:
        """Return whether the response has a cookie, a CSRF token or messages of its user."""
        if "CSRF_COOKIE_NEEDS_UPDATE" in self._request.META:
            return True
        if response.cookies and has_vary_header(response, "Cookie"):
            return True
        messages = get_messages(self._request)
        return bool(getattr(messages, "used", False) and len(messages))

    def answer(self) -> HttpResponse:
        """Return the response, or raise what the view has raised."""
        if isinstance(self._own, Exception):
            raise self._own
        if self._own is not None:
            return self._own
        page = self._stored
        assert page is not None
        response = HttpResponse(page.content, status=page.status, reason=page.reason, headers=dict(page.headers))
        vars(response).update(dict.fromkeys(page.flags, True))
        for key, value, coded, attributes in page.cookies:
            morsel: Morsel[str] = Morsel()
            morsel.set(key, value, coded)
            morsel.update(attributes)
            response.cookies[key] = morsel
        max_age, expires = get_max_age(response), parse_http_date_safe(response.get("Expires", ""))
        if max_age is not None and expires is not None:
            response["Age"] = str(max(0, max_age - (expires - int(time.time()))))
        modified = parse_http_date_safe(response.get("Last-Modified", ""))
        return get_conditional_response(self._request, response.get("ETag"), modified, response)


def _context() -> AbstractContextManager[Any]:
    """Let `current()` work in a view whose page is not stored, where it has no effect."""
    return Inside(Context("page")) if running() is None else nullcontext()


def _is_unrendered(response: Any) -> bool:
    return callable(getattr(response, "render", None)) and not response.is_rendered
