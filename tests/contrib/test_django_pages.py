"""Django's pages and template fragments in the cache: one rendering for a herd, and nobody gets another user's page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from threading import Barrier, get_ident, local
from typing import Any

import pytest

pytest.importorskip("django")
pytest.importorskip("redis")

import django_project
from django.core.cache import cache, caches
from django.core.cache.utils import make_template_fragment_key
from django.core.exceptions import ImproperlyConfigured
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.middleware.csrf import get_token
from django.template import Context, Template, TemplateSyntaxError, engines
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import path
from django.utils.cache import patch_cache_control
from django.utils.translation import get_language, override
from django.views.decorators.clickjacking import xframe_options_exempt
from herd import Herd
from servers import shared_redis
from test_django_backend import settings_of

from stampede import OptionError, current
from stampede.contrib.django import cache_page

get = RequestFactory().get


@pytest.fixture(params=["memory", "redis"])
def caches_are_empty(request: pytest.FixtureRequest) -> Iterator[None]:
    url = "memory://" if request.param == "memory" else shared_redis().url
    with override_settings(CACHES=settings_of(url)):
        cache.clear()
        yield


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with override_settings(CACHES=settings_of("memory://")):
        cache.clear()
        yield


class View:
    """A view that counts its calls and says in its response how many there were."""

    def __init__(self, respond: Callable[[HttpRequest], Any] | None = None) -> None:
        self.calls = 0
        self._respond = respond or (lambda request: HttpResponse(f"page {self.calls}"))

    def __call__(self, request: HttpRequest, **kwargs: Any) -> Any:
        self.calls += 1
        return self._respond(request)


def body(response: Any) -> str:
    return str(response.content.decode())


@pytest.mark.usefixtures("caches_are_empty")
def test_a_herd_renders_a_page_once() -> None:
    """Concurrent requests of one page run its view once, and each gets a response of its own."""
    view, everyone = View(), Barrier(10)
    page = cache_page(600)(view)

    def ask() -> Any:
        everyone.wait()
        return page(get("/"))

    found = Herd(*[ask] * 10).join()
    assert {body(each) for each in found} == {"page 1"} and view.calls == 1
    assert len({id(each) for each in found}) == 10


@pytest.mark.usefixtures("caches_are_empty")
def test_a_herd_of_async_requests_renders_a_page_once() -> None:
    """An async view stays async, and is run once."""
    calls = []

    @cache_page(600)
    async def page(request: HttpRequest) -> HttpResponse:
        calls.append(1)
        await asyncio.sleep(0)
        return HttpResponse("page")

    async def main() -> list[Any]:
        found = await asyncio.gather(*[page(get("/")) for _ in range(10)])
        head = RequestFactory().head("/")
        assert body(await page(head)) == "page"
        assert (await page(RequestFactory().post("/"))).status_code == 200
        return found

    assert {body(each) for each in asyncio.run(main())} == {"page"}
    assert len(calls) == 2  # the second one by POST


def test_headers_say_how_old_a_page_is() -> None:
    """A page has the headers of Django's `cache_page`, and its Age when it comes from the cache."""
    page = cache_page(600)(View())
    first, second = page(get("/")), page(get("/"))
    assert first["Cache-Control"] == second["Cache-Control"] == "max-age=600"
    assert "Age" not in first and 0 <= int(second["Age"]) < 60


def test_a_page_comes_back_as_it_was() -> None:
    """Status, headers, cookies and bytes are those of the view's response."""

    def respond(request: HttpRequest) -> HttpResponse:
        response = HttpResponse(b"\x00\xff", content_type="image/png", headers={"X-Shop": "one"})
        response.set_cookie("seen", "a b", max_age=60, httponly=True, samesite="Lax")
        return response

    page = cache_page(600)(View(respond))
    first, second = page(get("/")), page(get("/"))
    assert second.content == b"\x00\xff" and second["Content-Type"] == "image/png" and second["X-Shop"] == "one"
    assert second.cookies.output() == first.cookies.output() != ""


def test_pages_are_kept_apart() -> None:
    """Each URL, query, host and prefix has its own page."""
    view = View()
    page, other = cache_page(600)(view), cache_page(600, key_prefix="other")(view)
    requests = [get("/"), get("/?a=1"), get("/?a=2"), get("/b")]
    with override_settings(ALLOWED_HOSTS=["*"]):
        requests.append(get("/", headers={"host": "other.example"}))
        seen = [body(page(each)) for each in requests] + [body(other(get("/")))]
        assert len(set(seen)) == 6
        assert [body(page(each)) for each in requests] == seen[:5]


def test_variants_by_vary() -> None:
    """A page that varies on a header is stored once for each value of it."""

    def respond(request: HttpRequest) -> HttpResponse:
        return HttpResponse(f"{request.headers.get('Accept')} {view.calls}", headers={"Vary": "Accept"})

    view = View(respond)
    page = cache_page(600)(view)
    kinds = ["text/html", "application/json", None]
    requests = [get("/", headers={"accept": kind} if kind else {}) for kind in kinds]
    seen = [body(page(each)) for each in requests]
    assert seen == ["text/html 1", "application/json 2", "None 3"]
    assert [body(page(each)) for each in requests * 2] == seen * 2 and view.calls == 3


def test_a_page_that_varies_on_everything_is_not_stored() -> None:
    """`Vary: *` says that no two requests get the same."""
    view = View(lambda request: HttpResponse("x", headers={"Vary": "*"}))
    page = cache_page(600)(view)
    page(get("/")), page(get("/"))
    assert view.calls == 2


def test_private_pages_are_given_to_their_user_alone() -> None:
    """While one user's private page is rendered, others wait, and then get pages of their own."""
    everyone, user = Barrier(5), local()

    def respond(request: HttpRequest) -> HttpResponse:
        response = HttpResponse(user.name)
        patch_cache_control(response, private=True)
        return response

    view = View(respond)
    page = cache_page(600)(view)

    def ask(name: str) -> Any:
        user.name = name
        everyone.wait()
        return body(page(get("/")))

    names = ["ann", "bob", "eve", "dan", "kim"]
    assert Herd(*[lambda name=name: ask(name) for name in names]).join() == names
    assert view.calls == 5


@pytest.mark.parametrize(
    "respond",
    [
        lambda request: HttpResponse("x", status=500),
        lambda request: HttpResponse("x", status=404),
        lambda request: StreamingHttpResponse([b"x"]),
        lambda request: HttpResponse("x", headers={"Cache-Control": "max-age=0"}),
    ],
    ids=["error", "missing", "stream", "max-age=0"],
)
def test_what_is_not_stored(respond: Callable[[HttpRequest], Any]) -> None:
    """Errors, streams, and pages that say so go to each request anew. The time-out of Django's settings is used where
    the decorator has none."""
    view = View(respond)
    page = cache_page(None)(view)
    for number in range(3):
        assert page(get("/")).status_code in (200, 404, 500)
        assert view.calls == number + 1


@pytest.mark.parametrize("cookie", [{}, {"cookie": "consent=1"}])
def test_a_cookie_of_a_visitor_is_not_stored(cookie: dict[str, str]) -> None:
    """A response that varies on cookies, and sets one, is that visitor's, even if others send the same cookies."""

    def respond(request: HttpRequest) -> HttpResponse:
        response = HttpResponse("x", headers={"Vary": "Cookie"})
        response.set_cookie("user", str(view.calls))
        return response

    view = View(respond)
    page = cache_page(600)(view)
    assert [page(get("/", headers=cookie)).cookies["user"].value for _ in range(2)] == ["1", "2"]


def test_tokens_and_messages_of_a_visitor_are_not_stored() -> None:
    """A page with a CSRF token, or with messages for its user, is not stored."""

    class Messages(list[str]):
        used = True

    def with_messages(request: HttpRequest) -> HttpResponse:
        request._messages = Messages(["saved"])  # type: ignore[attr-defined]
        return HttpResponse("saved")

    for view in (View(lambda request: HttpResponse(get_token(request))), View(with_messages)):
        page = cache_page(600)(view)
        page(get("/")), page(get("/"))
        assert view.calls == 2
        cache.clear()


def test_pages_are_rendered_in_the_thread_of_a_request() -> None:
    """With `background`, a stale page would be rendered in another thread, which has not the request's language."""

    def respond(request: HttpRequest) -> HttpResponse:
        threads.append(get_ident())
        return HttpResponse(get_language())

    threads: list[int] = []
    options = {"OPTIONS": {"background": True, "stale": 600, "patience": 0.0, "deadline": 10}}
    with override_settings(CACHES=settings_of("memory://", **options)), override("de"):
        page = cache_page(600, tags=["t"])(View(respond))
        assert body(page(get("/"))) == "de"
        cache.stampede.expire_tags("t")
        assert body(page(get("/"))) == "de"
        fragment = "{% cached 600 menu tags='t' %}{{ thread }}{% endcached %}"
        for _ in range(2):
            assert render(fragment, thread=get_ident) == str(get_ident())
            cache.stampede.expire_tags("t")
    assert set(threads) == {get_ident()} and len(threads) == 2


def test_pages_of_versions_are_kept_apart() -> None:
    """KEY_PREFIX and VERSION of CACHES are for pages, too."""
    page = cache_page(600)(View())
    seen = []
    for given in ({}, {"VERSION": 2}, {"KEY_PREFIX": "staging"}):
        with override_settings(CACHES=settings_of("memory://", **given)):
            seen.append(body(page(get("/"))))
    assert len(set(seen)) == 3


def test_marks_of_a_response_come_back() -> None:
    """Decorators mark responses for middlewares. A stored page has these marks, too."""
    page = cache_page(600)(xframe_options_exempt(View()))
    page(get("/"))
    assert page(get("/")).xframe_options_exempt is True


def test_current_works_for_each_request() -> None:
    """A view may call `current()`, also when its page is not stored."""

    def respond(request: HttpRequest) -> HttpResponse:
        current().tag("articles")
        return HttpResponse("x", status=404)

    page = cache_page(600)(View(respond))
    secret = get("/", headers={"authorization": "x"})
    for request in (get("/"), get("/"), secret, RequestFactory().head("/"), RequestFactory().post("/")):
        assert page(request).status_code == 404


def test_a_page_inside_a_page() -> None:
    """A view that is decorated twice, or calls another decorated one, is not a recursion. Tags of the inner one are
    those of the outer one, too."""

    def respond(request: HttpRequest) -> HttpResponse:
        current().tag("inner")
        return HttpResponse(str(view.calls))

    view = View(respond)
    page = cache_page(600)(cache_page(600)(view))
    assert [body(page(get("/"))) for _ in range(2)] == ["1", "1"]
    cache.invalidate_tags("inner")
    assert body(page(get("/"))) == "2"


def test_an_error_of_one_user_is_not_that_of_others() -> None:
    """If a view has read the session, its exception concerns its request alone."""

    class Session(dict[str, Any]):
        accessed = True

    def broken(request: HttpRequest) -> HttpResponse:
        request.session = Session()  # type: ignore[assignment]
        everyone.wait()
        raise ZeroDivisionError(len(seen))

    seen: list[int] = []
    everyone = Barrier(1)
    page = cache_page(600)(broken)
    errors = Herd(*[lambda: page(get("/"))] * 5).join()
    assert all(type(each) is ZeroDivisionError for each in errors) and len({id(each) for each in errors}) == 5


def test_wrong_options_are_named_at_once() -> None:
    """A wrong option is an error where the view is decorated, and so is what a view returns in place of a response."""
    with pytest.raises(OptionError, match="'nonsense'"):
        cache_page(600, nonsense=1)
    with pytest.raises(TypeError, match="returned None"):
        cache_page(600)(View(lambda request: None))(get("/"))


def test_times_may_be_texts() -> None:
    """A timeout may be a text, as elsewhere in the library, and may be for ever."""
    assert cache_page("10m")(View())(get("/"))["Cache-Control"] == "max-age=600"
    assert cache_page("forever", key_prefix="f")(View())(get("/"))["Cache-Control"] == f"max-age={365 * 86_400}"
    assert render("{% cached '10m' menu %}x{% endcached %}") == "x"


def test_tags_are_checked_where_the_view_is_decorated() -> None:
    """Wrong tags are an error there. Arguments of the view may come by position, and one tag may be a text."""

    def show(request: HttpRequest, shop: int, page: int = 1) -> HttpResponse:
        calls.append(shop)
        return HttpResponse("x")

    calls: list[int] = []
    for wrong in (["shop:{shopp}"], "shop:{", [5]):
        with pytest.raises(OptionError, match="tags"):
            cache_page(600, tags=wrong)(show)  # type: ignore[arg-type]
    page = cache_page(600, tags="shop:{shop}")(show)
    for _ in range(2):
        page(get("/"), 5)
        page(get("/"), 5)
        cache.invalidate_tags("shop:5")
    assert calls == [5, 5]


def test_a_tag_in_a_variable_may_have_blanks() -> None:
    """Only a text in the template is split. A name from a variable is one tag, whatever it has in it."""
    fragment = "{% cached 600 cook tags=tag %}{{ n }}{% endcached %}"
    assert render(fragment, tag="cook:bob jr", n=1) == "1"
    cache.invalidate_tags("cook:bob jr")
    assert render(fragment, tag="cook:bob jr", n=2) == "2"


def test_a_tag_that_a_visitor_makes_too_long() -> None:
    """A part of a URL may be longer than a tag may be. The page is answered, without this tag."""
    page = cache_page(600, tags=["shop:{shop}"])(View())
    assert body(page(get("/"), shop="x" * 300)) == "page 1"


def test_a_view_that_reads_the_session_varies_on_cookies() -> None:
    """Otherwise one user's page would be stored for all. Django's middleware says so only after the decorator."""

    class Session(dict[str, Any]):
        accessed = True

    def respond(request: HttpRequest) -> HttpResponse:
        request.session = Session()  # type: ignore[assignment]
        return HttpResponse(request.headers["cookie"])

    page = cache_page(600)(View(respond))
    for name in ("user=ann", "user=bob", "user=ann"):
        assert body(page(get("/", headers={"cookie": name}))) == name


def test_requests_with_authorization_go_to_the_view() -> None:
    """Their pages are neither stored nor taken from the cache."""
    view = View()
    page = cache_page(600)(view)
    secret = {"authorization": "Bearer x"}
    assert [body(page(get("/", headers=secret))) for _ in range(2)] == ["page 1", "page 2"]
    assert [body(page(get("/"))) for _ in range(2)] == ["page 3"] * 2
    assert body(page(get("/", headers=secret))) == "page 4"


def test_exceptions_that_django_answers() -> None:
    """`Http404` and its like reach each request, and are not stored. Other exceptions reach all that wait for them."""

    def missing(request: HttpRequest) -> HttpResponse:
        raise Http404("no such page")

    def broken(request: HttpRequest) -> HttpResponse:
        raise ZeroDivisionError

    view = View(missing)
    page = cache_page(600)(view)
    for _ in range(2):
        with pytest.raises(Http404):
            page(get("/"))
    assert view.calls == 2
    with pytest.raises(ZeroDivisionError):
        cache_page(600)(broken)(get("/b"))


def test_head_is_answered_from_get() -> None:
    """A HEAD request gets the stored page of GET. It stores nothing itself."""
    view, head = View(), RequestFactory().head
    page = cache_page(600)(view)
    assert body(page(head("/"))) == "page 1"
    assert body(page(get("/"))) == "page 2"
    assert body(page(head("/"))) == "page 2"


def test_a_page_that_the_browser_has() -> None:
    """A stored page with an ETag answers `If-None-Match` with 304, without running the view."""
    view = View(lambda request: HttpResponse("x", headers={"ETag": '"1"'}))
    page = cache_page(600)(view)
    assert page(get("/")).status_code == 200
    assert page(get("/", headers={"if-none-match": '"1"'})).status_code == 304
    assert page(get("/", headers={"if-none-match": '"2"'})).status_code == 200
    assert view.calls == 1


def test_tags_of_pages() -> None:
    """Pages have tags from the view's arguments, from a function, and from the view itself."""

    def respond(request: HttpRequest) -> HttpResponse:
        current().tag("articles")
        return HttpResponse(str(view.calls))

    view = View(respond)
    page = cache_page(600, tags=["shop:{shop}", "shops"])(view)
    other = cache_page(600, key_prefix="o", tags=lambda request, shop: [f"{request.path} {shop}"])(view)
    assert (body(page(get("/"), shop=1)), body(other(get("/"), shop=1))) == ("1", "2")
    for number, tag in enumerate(["shop:1", "shops", "articles", "/ 1"]):
        before = body(page(get("/"), shop=1)), body(other(get("/"), shop=1))
        cache.invalidate_tags(tag)
        after = body(page(get("/"), shop=1)), body(other(get("/"), shop=1))
        changed = [one != two for one, two in zip(before, after, strict=True)]
        assert changed == [number < 3, number >= 2], tag


def test_templates_are_rendered_before_they_are_stored() -> None:
    """A TemplateResponse is rendered inside the computation."""
    template = engines["django"].from_string("{{ n }}")
    view = View(lambda request: TemplateResponse(request, template, {"n": view.calls}))
    page = cache_page(600)(view)
    assert [body(page(get("/"))) for _ in range(2)] == ["1", "1"]


def test_languages_are_kept_apart() -> None:
    """A page in another language is another page."""
    view = View(lambda request: HttpResponse(get_language()))
    page = cache_page(600)(view)
    for language in ("en", "de", "en"):
        with override(language):
            assert body(page(get("/"))) == language
    assert view.calls == 2


def test_a_cache_that_is_not_ours() -> None:
    """Pages need our backend; another one is an error that says so."""
    with (
        override_settings(CACHES={"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}),
        pytest.raises(ImproperlyConfigured, match="StampedeCache"),
    ):
        cache_page(600)(View())(get("/"))


def whole(request: HttpRequest) -> HttpResponse:
    whole_view.calls += 1
    visits = request.session.get("visits") if "user" in request.GET else None
    return HttpResponse(f"{get_language()} {visits} {whole_view.calls}")


async def awhole(request: HttpRequest) -> HttpResponse:
    return whole(request)


def enter(request: HttpRequest) -> HttpResponse:
    request.session["visits"] = request.POST["visits"]
    return HttpResponse()


whole_view = View()
django_project.urlpatterns[:] = [path("whole/", whole), path("awhole/", awhole), path("enter/", enter)]
SITE = [
    "stampede.contrib.django.CacheMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
]


@pytest.mark.parametrize("url", ["/whole/", "/awhole/"])
def test_a_whole_site(url: str) -> None:
    """`CacheMiddleware` stores the pages of a site: one for each language, and one for each user where the session is
    read."""
    with override_settings(MIDDLEWARE=SITE, CACHE_MIDDLEWARE_SECONDS=600):
        ann, bob = Client(), Client()
        ann.post("/enter/", {"visits": "ann"}), bob.post("/enter/", {"visits": "bob"})
        german = {"accept-language": "de"}
        for client in (ann, bob):
            assert body(client.get(url)).startswith("en None")
            assert body(client.get(url, headers=german)).startswith("de None")
        common = body(ann.get(url))
        assert {body(each.get(url)) for each in (ann, bob, Client())} == {common}
        pages = [body(each.get(url, {"user": "1"})) for each in (ann, bob)]
        assert [each.split()[1] for each in pages] == ["ann", "bob"]
        assert [body(each.get(url, {"user": "1"})) for each in (ann, bob)] == pages
        calls = whole_view.calls
        ann.get(url), bob.get(url, headers=german), Client().head(url)
        assert whole_view.calls == calls


def render(text: str, /, **names: Any) -> str:
    return str(Template("{% load stampede %}" + text).render(Context(names)))


@pytest.mark.usefixtures("caches_are_empty")
def test_a_herd_renders_a_fragment_once() -> None:
    """`{% cached %}` is rendered by one caller, and stays safe HTML."""
    calls, everyone = [], Barrier(10)

    def text() -> str:
        calls.append(1)
        return "<b>"

    def ask() -> Any:
        everyone.wait()
        return render("{% cached 600 menu %}{{ text }}<i>{% endcached %}", text=text)

    assert set(Herd(*[ask] * 10).join()) == {"&lt;b&gt;<i>"} and len(calls) == 1


def test_fragments_vary_and_have_tags() -> None:
    """A fragment is stored for each value that it names, under the key of Django's tag, and has tags."""
    numbers = iter(range(10))
    fragment = '{% cached time menu user tags=tags using="default" %}{{ n }}{% endcached %}'

    def shown(user: str, **names: Any) -> str:
        return render(fragment, user=user, n=lambda: next(numbers), **{"time": 600, "tags": ["a", "b"], **names})

    assert [shown("ann"), shown("bob"), shown("ann")] == ["0", "1", "0"]
    cache.delete(make_template_fragment_key("menu", ["ann"]))
    assert shown("ann") == "2"
    cache.invalidate_tags("b")
    assert [shown("bob", tags=["c"]), shown("ann", time=None)] == ["3", "4"]
    cache.invalidate_tags("c")
    assert [shown("bob"), shown("ann")] == ["5", "4"]


def test_a_wrong_fragment_is_an_error() -> None:
    """Errors in the tag name what is wrong."""
    theirs = {"theirs": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
    for words, told in (
        ("600", "a timeout and a name"),
        ("'x' menu", "timeout is 'x'"),
        ("600 menu tags=nothing", "tags of 'cached' are ''"),
        ("600 menu tags=5", "tags of 'cached' are 5"),
        ("600 menu using='other'", "'other'"),
        ("600 menu using='theirs'", "not a StampedeCache"),
    ):
        both = settings_of("memory://") | theirs
        with override_settings(CACHES=both), pytest.raises(TemplateSyntaxError, match=told):
            render(f"{{% cached {words} %}}{{% endcached %}}")


def test_fragments_have_a_cache_of_their_own() -> None:
    """If CACHES has `template_fragments`, fragments are there, as with Django's tag."""
    others = {"template_fragments": settings_of("memory://", OPTIONS={"namespace": "fragments"})["default"]}
    with override_settings(CACHES=settings_of("memory://") | others):
        assert render("{% cached 600 menu %}x{% endcached %}") == "x"
        key = make_template_fragment_key("menu")
        assert caches["template_fragments"].has_key(key) and not cache.has_key(key)
