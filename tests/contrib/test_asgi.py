"""`ResponseCache` over plain ASGI applications: what is stored, for which requests, and what the clients get."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from email.utils import formatdate
from typing import Any

import pytest
from asgi_client import Client, Shop, outdate, run
from herd import PATIENCE

import stampede
import stampede.testing
from stampede import Cache
from stampede.contrib.asgi import ResponseCache, cached_response
from stampede.errors import OptionError


@pytest.fixture
def cache() -> Iterator[Cache]:
    with Cache("memory://", early=0) as made:
        yield made


def asked(cache: Cache, shop: Any, work: Callable[[Client], Awaitable[None]], **options: Any) -> ResponseCache:
    """Run work with a client of the shop, which is behind the cache."""
    app = ResponseCache(shop, cache=cache, **options)
    run(lambda: work(Client(app)))
    return app


# -- what is stored -----------------------------------------------------------------------------------------------


def test_a_response_is_stored_for_its_max_age(cache: Cache) -> None:
    """The second request gets the bytes of the first one, with their age."""
    shop = Shop(cache_control="max-age=60", content_type="text/plain")

    async def work(client: Client) -> None:
        first, second = await client.ask(), await client.ask()
        assert (first.status, first.body, first.how) == (200, b"hello", "fwd=miss")
        assert (second.status, second.body, second.how) == (200, b"hello", "hit")
        assert 0 <= int(second.headers["age"]) <= PATIENCE and "age" not in first.headers
        same = {"cache-control", "content-type", "etag", "content-length"}
        assert {name: first.headers[name] for name in same} == {name: second.headers[name] for name in same}
        assert shop.runs == 1

    asked(cache, shop, work)


UNSTORABLE: list[dict[str, str]] = [
    {},
    {"cache_control": "no-store, max-age=60"},
    {"cache_control": "private, max-age=60"},
    {"cache_control": 'private="x-user", max-age=60'},
    {"cache_control": "no-cache, max-age=60"},
    {"cache_control": "max-age=0"},
    {"cache_control": "max-age=60, s-maxage=0"},
    {"cache_control": "max-age=nonsense"},
    {"cache_control": "max-age=60", "age": "60"},
    {"cache_control": "max-age=60", "set_cookie": "session=1"},
    {"cache_control": "max-age=60", "vary": "*"},
    {"expires": "0"},
    {"expires": formatdate(0, usegmt=True)},
]


def test_what_is_not_stored(cache: Cache) -> None:
    """A response that may not be stored goes to its client as it is, and each request runs the application."""
    for headers in UNSTORABLE:
        shop = Shop(**headers)

        async def work(client: Client) -> None:
            for count in (1, 2, 3):
                reply = await client.ask()
                assert (reply.status, reply.body, reply.how, shop.runs) == (200, b"hello", "", count), headers
                assert "etag" not in reply.headers, headers

        asked(cache, shop, work)
        assert list(cache.keys()) == [], headers


STORABLE: list[tuple[dict[str, str], bool]] = [
    ({"cache_control": "s-maxage=60, max-age=0"}, False),
    ({"expires": formatdate(2e9, usegmt=True)}, False),
    ({"cache_control": "max-age=600", "age": "50"}, False),
    ({"cache_control": "public, max-age=60"}, True),
    ({"cache_control": "s-maxage=60"}, True),
    ({"cache_control": "must-revalidate, max-age=60"}, True),
]


def test_what_is_stored(cache: Cache) -> None:
    for headers, authorized in STORABLE:
        shop, request = Shop(**headers), {"authorization": "Bearer 1"} if authorized else {}

        async def work(client: Client) -> None:
            for _ in range(3):
                assert (await client.ask(**request)).body == b"hello"
            assert shop.runs == 1, shop.headers

        asked(cache, shop, work)
        cache.clear()


def test_a_response_to_authorization_is_stored_only_if_it_is_public(cache: Cache) -> None:
    """What was stored for a request without `Authorization` is not served to one with it, either."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        await client.ask()
        for _ in range(2):
            reply = await client.ask(authorization="Bearer 1")
            assert reply.how == ""
        assert shop.runs == 3 and (await client.ask()).how == "hit"

    asked(cache, shop, work)


def test_an_error_is_stored_only_if_it_says_so(cache: Cache) -> None:
    """The default ttl is not for errors."""
    shop = Shop(status=404)

    async def work(client: Client) -> None:
        await client.ask()
        await client.ask()
        assert shop.runs == 2
        shop.headers["cache-control"] = "max-age=60"
        replies = [await client.ask("/other") for _ in range(2)]
        assert shop.runs == 3 and [reply.status for reply in replies] == [404, 404]

    asked(cache, shop, work, ttl=60)


def test_a_default_ttl(cache: Cache) -> None:
    """A response without times is stored for `ttl`. Its client is told to ask again each time."""
    shop = Shop()

    async def work(client: Client) -> None:
        replies = [await client.ask() for _ in range(2)]
        assert shop.runs == 1
        assert {reply.headers["cache-control"] for reply in replies} == {"no-cache"}
        shop.headers = {"cache-control": "private"}
        await client.ask("/other")
        await client.ask("/other")
        assert shop.runs == 3

    asked(cache, shop, work, ttl="1m")
    (key,) = cache.keys()
    entry = cache.peek(key)
    assert entry is not None and entry.ttl == 60


def test_a_url_that_becomes_cacheable_is_stored_from_then_on(cache: Cache) -> None:
    """A response that could have been stored, seen as it passes, is a sign that the next one can be."""
    shop = Shop(cache_control="private")

    async def work(client: Client) -> None:
        await client.ask()
        shop.headers["cache-control"] = "max-age=60"
        assert [(await client.ask()).how for _ in range(3)] == ["", "fwd=miss", "hit"]

    asked(cache, shop, work)


def test_urls_that_are_not_stored_take_little_memory(cache: Cache) -> None:
    """Clients choose the URLs, and how long they are."""
    shop = Shop(status=404)

    async def work(client: Client) -> None:
        for number in range(10):
            await client.ask(f"/{number}?{'x' * 50_000}")

    app = asked(cache, shop, work)
    assert len(app._passing) == 10 and sum(map(sys.getsizeof, app._passing)) < 1000


def test_a_variant_that_becomes_cacheable(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60", vary="accept-language")

    async def work(client: Client) -> None:
        await client.ask(accept_language="de")
        shop.headers["cache-control"] = "private"
        assert [(await client.ask(accept_language="fr")).how for _ in range(2)] == ["", ""]
        shop.headers["cache-control"] = "max-age=60"
        assert [(await client.ask(accept_language="fr")).how for _ in range(3)] == ["", "fwd=miss", "hit"]

    asked(cache, shop, work)


def test_headers_of_the_connection_are_not_stored(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60", connection="x-hop", x_hop="1", keep_alive="timeout=5", x_end="2")

    async def work(client: Client) -> None:
        for _ in range(2):
            reply = await client.ask()
            assert reply.headers.keys() & {"connection", "x-hop", "keep-alive", "x-end"} == {"x-end"}

    asked(cache, shop, work)


# -- keys ---------------------------------------------------------------------------------------------------------


def test_the_query_is_in_order(cache: Cache) -> None:
    """The order of parameters does not matter, but that of equal names does. An empty value is a value."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        for target in ("/?b=2&a=1", "/?a=1&b=2", "/?&a=1&&b=2"):
            await client.ask(target)
        assert shop.runs == 1 and shop.seen[0]["query_string"] == b"a=1&b=2"
        for target in ("/?a=1&b=3", "/?a=1", "/?a=2&a=1", "/?a=1&a=2", "/?a=", "/", "/x?a=1", "/?a=1%26b=2"):
            before = shop.runs
            await client.ask(target)
            assert shop.runs == before + 1, target

    asked(cache, shop, work)


def test_an_allow_list_of_parameters(cache: Cache) -> None:
    """Other parameters are not part of the key, and the application does not see them."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        for target in ("/?utm_source=mail&page=2", "/?page=2", "/?p%61ge=2&utm_source=x"):
            await client.ask(target)
        assert [each["query_string"] for each in shop.seen] == [b"page=2", b"p%61ge=2"]
        shop.headers = {"cache-control": "no-store"}
        await client.ask("/?page=3&utm_source=mail")
        await client.ask("/?page=3&utm_source=mail")
        assert [each["query_string"] for each in shop.seen[2:]] == [b"page=3", b"page=3"]

    asked(cache, shop, work, query=["page"])


def test_hosts_have_their_own_responses(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        for host in ("a.example", "A.Example", "b.example"):
            await client.ask(host=host)
        assert shop.runs == 2

    asked(cache, shop, work)


def test_a_host_with_a_path_is_another_host(cache: Cache) -> None:
    """A client may send any `Host`. Its response must not be served for the URL that host and path together spell."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        for host, target in [
            ("a.example/b", "/c"),
            ("a.example", "/b/c"),
            ("a.example%2fb", "/c"),
            ("a.example", "/c"),
        ]:
            assert (await client.ask(target, host=host)).how == "fwd=miss"

    asked(cache, shop, work)


def test_a_path_that_a_middleware_has_changed(cache: Cache) -> None:
    """The application answers by `path`. A middleware outside that changes it seldom changes `raw_path`, too."""
    shop = Shop(cache_control="max-age=60")
    inner = ResponseCache(shop, cache=cache)

    async def by_tenant(scope: Any, receive: Any, send: Any) -> None:
        tenant = dict(scope["headers"])[b"x-tenant"].decode()
        shop.body = tenant.encode()
        await inner({**scope, "path": f"/{tenant}{scope['path']}"}, receive, send)

    async def work() -> None:
        client = Client(by_tenant)
        for how in ("fwd=miss", "hit"):
            for tenant in ("one", "two"):
                reply = await client.ask("/page", x_tenant=tenant)
                assert (reply.body, reply.how) == (tenant.encode(), how)

    run(work)


def test_a_server_that_sends_no_raw_path(cache: Cache) -> None:
    """A question mark in the path is not the beginning of the query."""
    shop = Shop(cache_control="max-age=60")
    inner = ResponseCache(shop, cache=cache)

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        del scope["raw_path"]
        await inner({**scope, "path": scope["path"].replace("%3F", "?")}, receive, send)

    async def work() -> None:
        client = Client(plain)
        for target in ("/a%3Fb?c", "/a?b?c", "/\xe4"):
            assert [(await client.ask(target)).how for _ in range(2)] == ["fwd=miss", "hit"]

    run(work)


def test_a_query_is_no_variant(cache: Cache) -> None:
    """The key of a variant is not that of another URL: over HTTP/2, a query may contain a space."""
    shop = Shop(cache_control="max-age=60", vary="accept-language")

    async def work(client: Client) -> None:
        await client.ask("/?a", accept_language="de")
        await client.ask("/?a", accept_language="fr")
        base, variant = sorted(cache.keys(), key=len)
        assert not variant.startswith(base)

    asked(cache, shop, work)


def test_a_very_long_url(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        for _ in range(2):
            await client.ask("/?" + "a" * 8000)
        assert shop.runs == 1

    asked(cache, shop, work)


def test_vary(cache: Cache) -> None:
    """Each variant is stored. A herd of two languages gets two responses."""

    class Speaks(Shop):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            self.body = dict(scope["headers"]).get(b"accept-language", b"none")
            await super().__call__(scope, receive, send)

    shop = Speaks(cache_control="max-age=60", vary="Accept-Language")

    async def work(client: Client) -> None:
        asks = [client.ask(accept_language=language) for language in ("de", "fr", "de", "fr", "en")]
        replies = await asyncio.gather(*asks)
        assert [reply.body for reply in replies] == [b"de", b"fr", b"de", b"fr", b"en"]
        assert shop.runs == 3
        for language in ("de", "fr", "en", "DE", " fr"):
            reply = await client.ask(accept_language=language)
            assert (reply.body, reply.how) == (language.strip().lower().encode(), "hit")
        assert (await client.ask()).body == b"none"
        assert (await client.ask()).how == "hit"
        assert shop.runs == 4

    asked(cache, shop, work)


def test_a_stale_variant_is_renewed_by_one_run(cache: Cache) -> None:
    """The variant that is stored first is found by all requests, also by those that want another one."""
    shop = Shop(cache_control="max-age=60", vary="accept-language")

    async def work(client: Client) -> None:
        await client.ask(accept_language="de")
        await client.ask(accept_language="fr")
        await outdate(cache)
        assert (await client.ask(accept_language="fr")).how == "fwd=miss"
        assert shop.runs == 3

    asked(cache, shop, work)


def test_a_tag_removes_a_variant_that_was_renewed_beside_another(cache: Cache) -> None:
    """A request that finds another variant, which is stale, renews that in the background with its own run."""

    class Tagging(Shop):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            stampede.current().tag("prices")
            self.body = dict(scope["headers"])[b"accept-language"] + b"%d" % self.runs
            await super().__call__(scope, receive, send)

    shop = Tagging(cache_control="max-age=60, stale-while-revalidate=600", vary="accept-language")

    async def work(client: Client) -> None:
        await client.ask(accept_language="de")
        await outdate(cache)
        assert (await client.ask(accept_language="fr")).body == b"fr1"
        while (await client.ask(accept_language="fr")).how != "hit":
            await asyncio.sleep(0)
        await cache.ainvalidate_tags("prices")
        runs = shop.runs
        for language in ("de", "fr"):
            reply = await client.ask(accept_language=language)
            assert int(reply.body[2:]) >= runs

    asked(cache, shop, work)


def test_vary_of_several_headers_that_differ_by_variant(cache: Cache) -> None:
    """A response may depend on other headers than another one of the same URL."""

    class Picky(Shop):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            headers = dict(scope["headers"])
            german = headers.get(b"accept-language") == b"de"
            self.headers["vary"] = "accept-language, x-dialect" if german else "accept-language"
            self.body = headers.get(b"accept-language", b"") + (headers.get(b"x-dialect", b"") if german else b"")
            await super().__call__(scope, receive, send)

    shop = Picky(cache_control="max-age=60")

    async def work(client: Client) -> None:
        for _ in range(2):
            for language, dialect in [("fr", "x"), ("de", "a"), ("de", "b"), ("fr", "y")]:
                reply = await client.ask(accept_language=language, x_dialect=dialect)
                assert reply.body == (language + dialect if language == "de" else language).encode()
        assert shop.runs == 3

    asked(cache, shop, work)


# -- conditional requests -----------------------------------------------------------------------------------------


def test_a_304_for_who_has_the_bytes(cache: Cache) -> None:
    """The ETag is strong and comes from the bytes, so that it is the same in all processes."""
    modified = formatdate(1e9, usegmt=True)
    shop = Shop(cache_control="max-age=60", content_type="text/plain", last_modified=modified)

    async def work(client: Client) -> None:
        first = await client.ask()
        etag = first.headers["etag"]
        assert re.fullmatch(r'"[0-9a-f]{32}"', etag)
        for headers in (
            {"if_none_match": etag},
            {"if_none_match": f'"other", W/{etag}'},
            {"if_none_match": "*"},
            {"if_modified_since": modified},
        ):
            reply = await client.ask(**headers)
            assert (reply.status, reply.body, reply.headers["etag"]) == (304, b"", etag), headers
            assert not reply.headers.keys() & {"content-length", "content-type"}
        for headers in (
            {"if_none_match": '"other"'},
            {"if_none_match": '"other"', "if_modified_since": modified},
            {"if_modified_since": formatdate(0, usegmt=True)},
            {"if_modified_since": "nonsense"},
        ):
            assert (await client.ask(**headers)).status == 200, headers
        assert shop.runs == 1

    asked(cache, shop, work)


def test_the_etag_of_the_application_counts(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60", etag='"v1"', last_modified=formatdate(1e9, usegmt=True))

    async def work(client: Client) -> None:
        reply = await client.ask(if_none_match='"v1"')
        assert reply.status == 304 and shop.header("if-none-match") is None  # the response is for all
        assert reply.headers["last-modified"] == formatdate(1e9, usegmt=True)
        assert (await client.ask()).body == b"hello" and shop.runs == 1

    asked(cache, shop, work)


def test_the_application_confirms_a_stale_response(cache: Cache) -> None:
    """A stale response with the application's own ETag is asked for again by that ETag, and a 304 gives it a new
    time and new headers."""
    shop = Shop(cache_control="max-age=60", etag='"v1"', x_price="1", content_type="text/plain")

    async def work(client: Client) -> None:
        await client.ask()
        await outdate(cache)
        shop.headers["x-price"] = "2"
        reply = await client.ask()
        assert shop.runs == 2 and shop.header("if-none-match") == '"v1"'
        assert (reply.status, reply.body, reply.headers["x-price"]) == (200, b"hello", "2")
        assert reply.headers["content-type"] == "text/plain"
        assert (await client.ask()).how == "hit"
        await outdate(cache)
        shop.headers["etag"], shop.body = '"v2"', b"new"
        assert (await client.ask()).body == b"new"

    asked(cache, shop, work)


def test_a_date_is_no_version(cache: Cache) -> None:
    """A client that knows only the date of a response gets the new one, also within the same second, and if the
    machine that computed it has a clock that is slow."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        first = await client.ask()
        assert "last-modified" not in first.headers
        shop.body = b"new"
        await client.ask(method="POST")
        assert (await client.ask(if_modified_since=formatdate(2e9, usegmt=True))).body == b"new"

    asked(cache, shop, work)


def test_the_application_confirms_a_response_without_times(cache: Cache) -> None:
    """What clients are told about a default ttl is no directive of the application."""
    shop = Shop(etag='"v1"')

    async def work(client: Client) -> None:
        for _ in range(2):
            for how in ("fwd=miss", "hit"):
                reply = await client.ask()
                assert (reply.body, reply.how, reply.headers["cache-control"]) == (b"hello", how, "no-cache")
            await outdate(cache)
        assert shop.runs == 2

    asked(cache, shop, work, ttl=60)


# -- HEAD, and other methods --------------------------------------------------------------------------------------


def test_head_is_answered_from_get(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        head = await client.ask(method="HEAD")
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "5")
        assert shop.seen[0]["method"] == "GET"
        assert (await client.ask()).body == b"hello" and shop.runs == 1
        assert (await client.ask(method="HEAD", if_none_match=head.headers["etag"])).status == 304

    asked(cache, shop, work)


def test_head_of_what_is_not_stored_has_no_body(cache: Cache) -> None:
    shop = Shop(cache_control="no-store")

    async def work(client: Client) -> None:
        head = await client.ask(method="HEAD")
        assert (head.status, head.body, head.complete) == (200, b"", True)

    asked(cache, shop, work)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_an_unsafe_method_invalidates_its_url(cache: Cache, method: str) -> None:
    """All variants of the URL are removed, before the client has the response. A failure leaves them."""
    shop = Shop(cache_control="public, max-age=60", vary="accept-language")

    async def work(client: Client) -> None:
        async def all_of_them() -> list[str]:
            for_all = [await client.ask(accept_language=each) for each in ("de", "fr")]
            return [reply.how for reply in [*for_all, await client.ask(authorization="Bearer 1")]]

        await all_of_them()
        assert await all_of_them() == ["hit"] * 3
        shop.status = 500
        await client.ask(method=method)
        assert await all_of_them() == ["hit"] * 3
        shop.status = 200
        await client.ask("/other", method=method)
        assert await all_of_them() == ["hit"] * 3
        await client.ask(method=method)
        assert await all_of_them() == ["fwd=miss"] * 3

    asked(cache, shop, work)


@pytest.mark.parametrize("failure", [False, True])
def test_a_change_that_is_committed_after_the_response(cache: Cache, failure: bool) -> None:
    """FastAPI leaves a dependency with `yield` after the response is sent, and background tasks run then, too."""
    shop = Shop(b"old", cache_control="max-age=60")

    async def work(client: Client) -> None:
        async def commit() -> None:
            shop.after = None
            assert (await client.ask()).body == b"old"  # another client, before the commit
            shop.body = b"new"
            if failure:
                raise ZeroDivisionError

        shop.after = commit
        try:
            await client.ask(method="POST")
        except ZeroDivisionError:
            assert failure
        assert (await client.ask()).body == b"new"

    asked(cache, shop, work)


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE"])
def test_other_safe_methods_pass(cache: Cache, method: str) -> None:
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        await client.ask()
        await client.ask(method=method)
        assert shop.seen[-1]["method"] == method
        assert (await client.ask()).how == "hit"

    asked(cache, shop, work)


def test_lifespan_and_websockets_pass(cache: Cache) -> None:
    shop = Shop()
    app = ResponseCache(shop, cache=cache)

    async def work() -> None:
        for kind in ("lifespan", "websocket"):
            scope = {"type": kind}
            await app(scope, None, None)  # type: ignore[arg-type]
            assert shop.seen[-1] is scope

    run(work)


@pytest.mark.parametrize(
    "headers",
    [{"range": "bytes=0-1"}, {"if_match": '"x"'}, {"content_length": "5"}, {"transfer_encoding": "chunked"}],
)
def test_special_requests_go_to_the_application(cache: Cache, headers: dict[str, str]) -> None:
    """A request for a part, or one with a body, is not answered from the cache, and its response is not stored."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        await client.ask(**headers)
        (name,) = headers
        assert shop.header(name.replace("_", "-")) == headers[name]
        await client.ask()
        await client.ask(**headers)
        assert shop.runs == 3

    asked(cache, shop, work)


# -- what clients say ---------------------------------------------------------------------------------------------


def test_a_client_may_ask_for_something_newer(cache: Cache) -> None:
    """A reload runs the application, and its response is stored for all."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        assert (await client.ask(cache_control="no-cache")).how == "fwd=miss"
        for control in ("no-cache", "max-age=0", "min-fresh=100"):
            before = shop.runs
            shop.body = control.encode()
            assert (await client.ask(cache_control=control)).body == shop.body
            assert shop.runs == before + 1
            reply = await client.ask()
            assert (reply.how, reply.body) == ("hit", shop.body)
        assert (await client.ask(cache_control="max-age=50, min-fresh=5")).how == "hit"

    asked(cache, shop, work)


def test_no_store_of_a_client(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        await client.ask(cache_control="no-store")
        assert list(cache.keys()) == []
        await client.ask()
        assert (await client.ask(cache_control="no-store")).how == "" and shop.runs == 3

    asked(cache, shop, work)


def test_only_if_cached(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        assert (await client.ask(cache_control="only-if-cached")).status == 504 and shop.runs == 0
        await client.ask()
        assert (await client.ask(cache_control="only-if-cached")).body == b"hello"
        shop.headers = {}
        for _ in range(2):
            await client.ask("/private")
            assert (await client.ask("/private", cache_control="only-if-cached")).status == 504

    asked(cache, shop, work)


def test_clients_need_not_be_obeyed(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        for control in ("no-store", "no-cache", "max-age=0", "only-if-cached"):
            await client.ask(cache_control=control)
        assert shop.runs == 1

    asked(cache, shop, work, obey_requests=False)


# -- stale responses ----------------------------------------------------------------------------------------------


def test_stale_while_revalidate(cache: Cache) -> None:
    """Within its time, a stale response is served at once, and renewed in the background."""
    shop = Shop(cache_control="max-age=60, stale-while-revalidate=60")

    async def work(client: Client) -> None:
        await client.ask()
        await outdate(cache)
        shop.body, shop.hold = b"new", asyncio.Event()
        shop.arrived.clear()
        reply = await client.ask()
        assert (reply.body, reply.how) == (b"hello", "hit")
        assert 100 <= int(reply.headers["age"]) <= 100 + PATIENCE
        await shop.arrived.wait()
        shop.hold.set()
        while (await client.ask()).body != b"new":
            await asyncio.sleep(0)
        assert shop.runs == 2

    asked(cache, shop, work)


@pytest.mark.parametrize("control", ["", ", stale-while-revalidate=20", ", stale-if-error=900"])
def test_a_response_that_is_too_old_is_not_served(cache: Cache, control: str) -> None:
    shop = Shop(cache_control=f"max-age=60{control}")

    async def work(client: Client) -> None:
        await client.ask()
        await outdate(cache)
        shop.body = b"new"
        assert (await client.ask()).body == b"new" and shop.runs == 2

    asked(cache, shop, work)


@pytest.mark.parametrize("failure", ["500", "503", "error"])
def test_stale_if_error(cache: Cache, failure: str) -> None:
    shop = Shop(cache_control="max-age=60, stale-if-error=90")

    async def work(client: Client) -> None:
        await client.ask()
        await outdate(cache)
        if failure.isdigit():
            shop.status, shop.headers = int(failure), {}
        else:
            shop.error = ZeroDivisionError()
        assert [(await client.ask()).body for _ in range(2)] == [b"hello"] * 2
        assert shop.runs >= 2
        shop.status, shop.headers, shop.error, shop.body = 200, {"cache-control": "max-age=60"}, None, b"new"
        while (await client.ask()).body != b"new":  # after a failure, the key rests for a moment
            await asyncio.sleep(0.001)

    asked(cache, shop, work)


@pytest.mark.parametrize("control", ["", ", must-revalidate, stale-if-error=900", ", stale-if-error=20"])
def test_an_error_is_not_hidden_for_longer(cache: Cache, control: str) -> None:
    shop = Shop(cache_control=f"max-age=60{control}")

    async def work(client: Client) -> None:
        await client.ask()
        await outdate(cache)
        shop.status, shop.headers, shop.body = 500, {}, b"broken"
        reply = await client.ask()
        assert (reply.status, reply.body) == (500, b"broken")
        await outdate(cache)
        shop.error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            await client.ask()

    asked(cache, shop, work)


def test_the_default_stale(cache: Cache) -> None:
    """It is for a response without directives of its own, also if that has a max-age."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        await client.ask()
        await outdate(cache)
        shop.error = ZeroDivisionError()
        assert (await client.ask()).body == b"hello"

    asked(cache, shop, work, stale="10m")


# -- tags ---------------------------------------------------------------------------------------------------------


def test_tags_of_a_header(cache: Cache) -> None:
    """A tag removes the responses that name it. Clients do not see the header."""
    shop = Shop(cache_control="max-age=60", cache_tags="prices, user:5 ä")

    async def work(client: Client) -> None:
        for tag in ("prices", "user:5"):
            await client.ask()
            reply = await client.ask()
            assert reply.how == "hit" and "cache-tags" not in reply.headers
            await cache.ainvalidate_tags(tag)
            reply = await client.ask()
            assert reply.how == "fwd=miss" and "cache-tags" not in reply.headers
        shop.headers["cache-control"] = "no-store"
        for _ in range(2):
            assert "cache-tags" not in (await client.ask("/other")).headers

    asked(cache, shop, work, tag_header="Cache-Tags")


def test_a_tag_that_is_too_long_is_reported(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """The response could not be invalidated by this tag, so it is not stored."""
    shop = Shop(cache_control="max-age=60", cache_tags="t" * 300)

    async def work(client: Client) -> None:
        assert [(await client.ask()).body for _ in range(2)] == [b"hello"] * 2
        assert shop.runs == 2

    asked(cache, shop, work, tag_header="cache-tags")
    assert "is not stored" in caplog.text


def test_tags_of_the_computation(cache: Cache) -> None:
    """The application runs inside a computation, so that `stampede.current()` works."""

    class Tagging(Shop):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            stampede.current().tag("prices")
            await super().__call__(scope, receive, send)

    shop = Tagging(cache_control="max-age=60")

    async def work(client: Client) -> None:
        await client.ask()
        await cache.ainvalidate_tags("prices")
        assert (await client.ask()).how == "fwd=miss"
        shop.headers = {}
        assert [(await client.ask("/other")).how for _ in range(2)] == ["", ""]

    asked(cache, shop, work)


# -- one route ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "def"])
def test_the_decorator_of_a_route(cache: Cache, kind: str) -> None:
    """It gives one route a ttl, a stale time, and tags by its arguments."""

    @cached_response("1m", stale="1h", tags=["report:{region}", "reports"])
    async def report(region: str, year: int = 2026) -> bytes:
        return region.encode()

    @cached_response("1m", stale="1h", tags=["report:{region}", "reports"])
    def blocking(region: str, year: int = 2026) -> bytes:
        return region.encode()

    runs: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(scope["path"])
        region = scope["path"].strip("/")
        if region == "plain":
            body = b"plain"
        else:
            body = await report(region) if kind == "async" else await asyncio.to_thread(blocking, region)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def work(client: Client) -> None:
        for path in ("/north", "/south", "/plain") * 2:
            assert (await client.ask(path)).body == path.strip("/").encode()
        assert runs == ["/north", "/south", "/plain", "/plain"]
        await cache.ainvalidate_tags("report:north")
        for path in ("/north", "/south"):
            await client.ask(path)
        assert runs[4:] == ["/north"]
        await cache.ainvalidate_tags("reports")
        await client.ask("/south")
        assert runs[5:] == ["/south"]

    asked(cache, app, work)
    assert asyncio.run(report("west")) == blocking("west") == b"west"  # outside of a ResponseCache


def test_a_tag_of_no_parameter_is_an_error_at_once() -> None:
    """Otherwise each request would fail."""
    with pytest.raises(OptionError, match="did you mean 'region'"):

        @cached_response(60, tags=["report:{regoin}"])
        def report(region: str) -> None: ...


def test_a_route_may_overrule_its_decorator(cache: Cache) -> None:
    @cached_response(60)
    async def page() -> dict[bytes, bytes]:
        return {b"cache-control": b"private"}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list((await page()).items())})
        await send({"type": "http.response.body", "body": b""})

    async def work(client: Client) -> None:
        assert [(await client.ask()).how for _ in range(2)] == ["", ""]

    asked(cache, app, work)


@pytest.mark.parametrize("ttl", [None, "1m"])
def test_one_middleware_inside_another(cache: Cache, ttl: str | None) -> None:
    """The outer one stores the response, by the times of the response or of the inner one."""
    shop = Shop(**({"cache_control": "max-age=60"} if ttl is None else {}))
    inner = ResponseCache(shop, cache=cache, ttl=ttl)

    async def work(client: Client) -> None:
        assert [(await client.ask()).how for _ in range(2)] == ["fwd=miss", "hit"]
        await client.ask(method="POST")
        assert (await client.ask()).how == "fwd=miss"
        assert (await client.ask(range="bytes=0-")).how == ""

    asked(cache, inner, work)


# -- switched off -------------------------------------------------------------------------------------------------


def test_a_disabled_cache_runs_the_application(cache: Cache) -> None:
    from stampede.testing import disabled

    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        with disabled():
            assert [(await client.ask()).body for _ in range(2)] == [b"hello"] * 2
        assert shop.runs == 2 and list(cache.keys()) == []

    asked(cache, shop, work)


def test_the_default_cache_is_found_late() -> None:
    """The middleware may be made before the settings are."""
    shop = Shop(cache_control="max-age=60")
    app = ResponseCache(shop)

    async def work() -> None:
        with stampede.testing.isolated():
            client = Client(app)
            assert [(await client.ask()).how for _ in range(2)] == ["fwd=miss", "hit"]

    run(work)


def test_a_busy_cache_is_a_503(cache: Cache) -> None:
    """A request that waits for too long for another one gets an answer that says so."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        shop.hold = asyncio.Event()
        first = asyncio.create_task(client.ask())
        await shop.arrived.wait()
        reply = await client.ask()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        shop.hold.set()
        assert (await first).status == 200

    with Cache("memory://", wait=0.01) as impatient:
        asked(impatient, shop, work)
