"""Whole responses in the cache: `cache_page` for a view, `CacheMiddleware` for a site. Concurrent requests of one page
render it once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from hashlib import blake2b
from http.cookies import Morsel
from math import inf
from typing import Any, TypeAlias

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.core.cache import caches
from django.core.exceptions import BadRequest, ImproperlyConfigured, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse
from django.utils import timezone, translation
from django.utils.cache import (
    get_conditional_response,
    get_max_age,
    has_vary_header,
    patch_response_headers,
    patch_vary_headers,
)
from django.utils.http import parse_http_date_safe

from stampede.api.cache import Cache
from stampede.api.current import current
from stampede.contrib.django.backend import StampedeCache

__all__ = ["CacheMiddleware", "cache_page"]

PASS = 10.0
"""Seconds for which it is remembered that a page can't be stored. Its requests do not wait for each other then."""

Stored: TypeAlias = tuple[Any, ...]
"""What is stored of a response: the headers that it varies on, a digest of the request's values of these, and the parts
of the response, or nothing if it can't be stored."""

ANSWERS = (Http404, PermissionDenied, BadRequest, SuspiciousOperation)
"""Exceptions of a view that Django answers with a response."""


def cache_page(
    timeout: float | None,
    *,
    cache: str | None = None,
    key_prefix: str | None = None,
    tags: Iterable[str] | Callable[..., Iterable[str]] = (),
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Cache the responses of a view, `def` or `async def`, for `timeout` seconds, as Django's `cache_page` does.
    Concurrent requests of one page run the view once.

    `tags` name the page for `invalidate_tags`: format strings over the view's arguments, or a function of the request
    and these. Other options are those of a computation, such as `stale="1h"`.

        @cache_page(600, tags=["shop:{shop_id}"])
        def show_shop(request, shop_id): ...
    """

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        pages = _Pages(view, timeout, cache or "default", key_prefix or "", tags, options, outermost=False)
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
        self._pages = _Pages(get_response, None, alias, prefix, (), {}, outermost=True)
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
        tags: Iterable[str] | Callable[..., Iterable[str]],
        options: Mapping[str, Any],
        *,
        outermost: bool,
    ) -> None:
        """`outermost`: no other middleware has seen the request."""
        self.view, self.timeout, self.prefix = view, timeout, prefix
        self.outermost, self.options = outermost, options
        self._alias = alias
        self._tags = tags if callable(tags) else list(tags)

    @property
    def cache(self) -> Cache:
        backend = caches[self._alias]
        if not isinstance(backend, StampedeCache):
            raise ImproperlyConfigured(f"CACHES[{self._alias!r}] is no StampedeCache: pages need one")
        return backend.stampede

    def tags(self, request: HttpRequest, kwargs: Mapping[str, Any]) -> list[str]:
        if callable(self._tags):
            return list(self._tags(request, **kwargs))
        return [tag.format_map(kwargs) for tag in self._tags]

    def serve(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        view, visit = partial(self.view, request, *args, **kwargs), _Visit(self, request)

        def render() -> Stored:
            try:
                response = view()
                return visit.keep(response.render() if _is_unrendered(response) else response)
            except ANSWERS as error:
                return visit.fail(error)

        if visit.method == "HEAD":
            visit.take(self.cache.get(next(visit.places())))
        elif visit.method == "GET":
            for key in visit.places():
                visit.take(self.cache.get_or_compute(key, render, tags=self.tags(request, kwargs), **self.options))
        return visit.answer() if visit.is_over else view()

    async def aserve(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        view, visit = partial(self.view, request, *args, **kwargs), _Visit(self, request)

        async def render() -> Stored:
            try:
                response = await view()
                return visit.keep(response.render() if _is_unrendered(response) else response)
            except ANSWERS as error:
                return visit.fail(error)

        if visit.method == "HEAD":
            visit.take(await self.cache.aget(next(visit.places())))
        elif visit.method == "GET":
            for key in visit.places():
                tags = self.tags(request, kwargs)
                visit.take(await self.cache.aget_or_compute(key, render, tags=tags, **self.options))
        return visit.answer() if visit.is_over else await view()


class _Visit:
    """One request for a page, and what is known about its response so far."""

    def __init__(self, pages: _Pages, request: HttpRequest) -> None:
        self._pages, self._request = pages, request
        self._own: HttpResponse | Exception | None = None  # what this request's own run of the view gave
        self._stored: Stored | None = None  # the page that answers the request
        self._other: Sequence[str] | None = None  # the headers on which another request's page varies

    @property
    def method(self) -> str:
        """The request's method, or "" if the request is to go straight to the view."""
        return "" if "authorization" in self._request.headers else str(self._request.method)

    @property
    def is_over(self) -> bool:
        """Whether the response is known. Otherwise the view has to be run, for this request alone."""
        return self._own is not None or (self._stored is not None and len(self._stored) > 2)

    def places(self) -> Iterator[str]:
        """Yield the keys under which the page may be stored: that of the URL, and that of a variant, if the page under
        the first one is for other values of headers."""
        digest = blake2b(digest_size=16)
        for part in (self._request.build_absolute_uri(), *self._locale()):
            digest.update(part.encode() + b"\0")
        url = f"page:{self._pages.prefix}:{digest.hexdigest()}"
        yield url
        if self._own is None and self._stored is None and self._other is not None:
            yield f"{url}:{self._variant(self._other).hex()}"

    def _locale(self) -> list[str]:
        """Return the language, and the time zone, if it is known."""
        if self._pages.outermost:  # no middleware has chosen them yet; one that chooses a time zone uses a cookie
            return [translation.get_language_from_request(self._request, check_path=True)] if settings.USE_I18N else []
        language = translation.get_language() or "" if settings.USE_I18N else ""
        return [language, timezone.get_current_timezone_name() if settings.USE_TZ else ""]

    def _variant(self, headers: Sequence[str]) -> bytes:
        given = repr([self._request.headers.get(header) for header in headers])
        return blake2b(given.encode(), digest_size=16).digest()

    def take(self, stored: Stored | None) -> None:
        """Use a stored page, if it is for this request's values of the headers on which it varies."""
        if self._own is None and stored is not None:
            if stored[1] == self._variant(stored[0]):
                self._stored = stored
            else:
                self._other = stored[0]

    def fail(self, error: Exception) -> Stored:
        """Return what is stored if the view raises an exception that Django answers."""
        self._own = error
        return self._passed([])

    def keep(self, response: HttpResponse) -> Stored:
        """Return what is stored of the view's response."""
        self._own = response
        if getattr(getattr(self._request, "session", None), "accessed", False):
            patch_vary_headers(response, ("Cookie",))  # as Django's SessionMiddleware does, but later
        vary = sorted({each.strip().lower() for each in response.get("Vary", "").split(",") if each.strip()})
        ttl = self._ttl(response)
        if not ttl or "*" in vary:
            return self._passed(vary, keep=response.status_code != 304)
        current().ttl = None if ttl == inf else ttl
        cookies = [(each.key, each.value, each.coded_value, dict(each)) for each in response.cookies.values()]
        head = response.status_code, response.reason_phrase, list(response.items())
        return vary, self._variant(vary), *head, cookies, response.content

    def _passed(self, vary: Sequence[str], *, keep: bool = True) -> Stored:
        if keep:
            current().ttl = PASS
        else:
            current().dont_keep()
        return list(vary), self._variant(vary)

    def _ttl(self, response: HttpResponse) -> float:
        """Return for how long the response may be stored, by Django's rules; 0 for not at all. Give it the headers that
        say so."""
        if response.streaming or response.status_code not in (200, 304):
            return 0
        if "private" in response.get("Cache-Control", ""):
            return 0
        if not self._request.COOKIES and response.cookies and has_vary_header(response, "Cookie"):
            return 0  # a cookie of a new visitor
        ttl = self._pages.timeout
        if ttl is None:
            ttl = get_max_age(response)
        if ttl is None:
            ttl = settings.CACHE_MIDDLEWARE_SECONDS
        if ttl:
            patch_response_headers(response, ttl)
        return ttl if response.status_code == 200 else 0

    def answer(self) -> HttpResponse:
        """Return the response, or raise what the view has raised."""
        if isinstance(self._own, Exception):
            raise self._own
        if self._own is not None:
            return self._own
        assert self._stored is not None
        _, _, status, reason, headers, cookies, content = self._stored
        response = HttpResponse(content, status=status, reason=reason, headers=dict(headers))
        for key, value, coded, attributes in cookies:
            morsel: Morsel[str] = Morsel()
            morsel.set(key, value, coded)
            morsel.update(attributes)
            response.cookies[key] = morsel
        max_age, expires = get_max_age(response), parse_http_date_safe(response.get("Expires", ""))
        if max_age is not None and expires is not None:
            response["Age"] = str(max(0, max_age - (expires - int(time.time()))))
        modified = parse_http_date_safe(response.get("Last-Modified", ""))
        return get_conditional_response(self._request, response.get("ETag"), modified, response)


def _is_unrendered(response: Any) -> bool:
    return callable(getattr(response, "render", None)) and not response.is_rendered
