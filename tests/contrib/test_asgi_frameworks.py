"""`ResponseCache` and `cached_response` in Starlette and FastAPI: what their users expect, and what hurt users of
fastapi-cache."""

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, Self

import pytest
from asgi_client import Client, run
from herd import PATIENCE

from stampede import Cache, current
from stampede.contrib.asgi import ResponseCache, cached_response

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles


@pytest.fixture
def cache() -> Iterator[Cache]:
    with Cache("memory://", early=0) as made:
        yield made


@pytest.fixture
def app(cache: Cache) -> FastAPI:
    app = FastAPI()
    app.add_middleware(ResponseCache, cache=cache)
    return app


def asked(app: Any, work: Callable[[Client], Awaitable[None]]) -> None:
    run(lambda: work(Client(app)))


class TestClient:
    """A client of the application, for one test after another's requests."""

    __test__ = False

    def __init__(self, app: Any, *, raise_server_exceptions: bool = True) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=raise_server_exceptions)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://shop")

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        return self

    def __exit__(self, *exc: object) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def get(self, path: str, **options: Any) -> Any:
        return self._runner.run(self._client.get(path, **options))

    def put(self, path: str) -> Any:
        return self._runner.run(self._client.put(path))


class Counter:
    """A number that tells one run from another."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self) -> int:
        self.value += 1
        return self.value


class Item(BaseModel):
    name: str
    price: float
    description: str | None = None


# -- what fastapi-cache's decorator does --------------------------------------------------------------------------


def test_a_route_is_computed_once(app: FastAPI) -> None:
    count = Counter()

    @app.get("/")
    @cached_response(60)
    async def index() -> dict[str, int]:
        return {"run": count()}

    with TestClient(app) as client:
        first, second = client.get("/"), client.get("/")
        assert first.json() == second.json() == {"run": 1}
        assert (first.headers["cache-status"], second.headers["cache-status"]) == (
            "stampede; fwd=miss",
            "stampede; hit",
        )
        etag = first.headers["etag"]
        again = client.get("/", headers={"If-None-Match": etag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        assert client.get("/", headers={"Cache-Control": "no-cache"}).json() == {"run": 2}
        assert client.get("/", headers={"Cache-Control": "no-store"}).json() == {"run": 3}
        assert client.get("/").json() == {"run": 2}


def test_a_plain_def_works_in_its_thread(app: FastAPI) -> None:
    count = Counter()

    @app.get("/sync-me")
    @cached_response(60)
    def sync_me() -> int:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return count()

    with TestClient(app) as client:
        assert [client.get("/sync-me").json() for _ in range(2)] == [1, 1]


def test_a_response_object_keeps_its_headers(app: FastAPI) -> None:
    @app.get("/")
    @cached_response(60)
    async def index() -> JSONResponse:
        return JSONResponse({"a": 1}, status_code=203, headers={"X-Shop": "tea", "ETag": '"own"'})

    with TestClient(app) as client:
        for _ in range(2):
            answer = client.get("/")
            assert (answer.json(), answer.status_code) == ({"a": 1}, 203)
            assert (answer.headers["x-shop"], answer.headers["etag"]) == ("tea", '"own"')


def test_a_pydantic_model_is_the_same_from_the_cache(app: FastAPI) -> None:
    @app.get("/item", response_model=Item, response_model_exclude_unset=True)
    @cached_response(60)
    async def item() -> Any:
        return Item(name="tea", price=9.5)

    with TestClient(app) as client:
        assert [client.get("/item").json() for _ in range(2)] == [{"name": "tea", "price": 9.5}] * 2


def test_other_methods_are_not_cached(app: FastAPI) -> None:
    count = Counter()

    @app.put("/")
    @cached_response(60)
    async def put() -> int:
        return count()

    with TestClient(app) as client:
        assert [client.put("/").json() for _ in range(2)] == [1, 2]


def test_arguments_keep_their_names(app: FastAPI) -> None:
    """A decorated function keeps its signature: parameters, their defaults, and names with underscores."""

    @app.get("/items/{number}")
    @cached_response(60, tags=["item:{number}"])
    def item(number: int, __request: int = 42, name: str = "Jon") -> dict[str, Any]:
        return {"number": number, "name": name, "other": __request}

    with TestClient(app) as client:
        for name in ("Jon", "Ann"):
            found = [client.get("/items/7", params={"name": name}).json() for _ in range(2)]
            assert found == [{"number": 7, "name": name, "other": 42}] * 2
        assert client.get("/items/x").status_code == 422
        parameters = client.get("/openapi.json").json()["paths"]["/items/{number}"]["get"]["parameters"]
        assert {each["name"] for each in parameters} == {"number", "__request", "name"}


def test_a_method_of_an_object(app: FastAPI) -> None:
    class Shop:
        def __init__(self, value: int) -> None:
            self.value = value

        async def handler(self) -> int:
            return self.value

    app.get("/method")(cached_response(60)(Shop(17).handler))
    with TestClient(app) as client:
        assert [client.get("/method").json() for _ in range(2)] == [17, 17]


# -- dependencies, background tasks, errors -----------------------------------------------------------------------


def test_dependencies_run_once(app: FastAPI, cache: Cache) -> None:
    """A dependency runs with the route, inside the computation; a cached function can be one. A dependency with
    `yield` is left once."""
    count, left = Counter(), []

    @cache.cached(ttl=60)
    async def price(product: str) -> int:
        return count()

    async def session() -> Any:
        yield "session"
        left.append(True)

    router = APIRouter()

    @router.get("/prices/{product}")
    @cached_response(60)
    async def get_price(
        product: str, price: Annotated[int, Depends(price)], session: Annotated[str, Depends(session)]
    ) -> dict[str, Any]:
        current().tag(f"price:{product}")
        return {"product": product, "price": price, "session": session}

    app.include_router(router, prefix="/shop")
    with TestClient(app) as client:
        found = [client.get("/shop/prices/tea").json() for _ in range(3)]
        assert found == [{"product": "tea", "price": 1, "session": "session"}] * 3
        assert (count.value, left) == (1, [True])
        cache.invalidate_tags("price:tea")
        assert client.get("/shop/prices/tea").headers["cache-status"] == "stampede; fwd=miss"
        assert (count.value, left) == (1, [True, True])


def test_a_background_task_runs_once(app: FastAPI) -> None:
    done: list[int] = []

    @app.get("/")
    @cached_response(60)
    async def index(tasks: BackgroundTasks) -> str:
        tasks.add_task(done.append, 1)
        return "hello"

    with TestClient(app) as client:
        assert [client.get("/").json() for _ in range(3)] == ["hello"] * 3
    assert done == [1]


def test_an_http_exception_is_not_stored(app: FastAPI) -> None:
    count = Counter()

    @app.get("/")
    @cached_response(60)
    async def index() -> str:
        raise HTTPException(404, f"run {count()}")

    with TestClient(app) as client:
        found = [client.get("/") for _ in range(2)]
        assert [(each.status_code, each.json()["detail"]) for each in found] == [(404, "run 1"), (404, "run 2")]


def test_an_exception_becomes_the_frameworks_500(app: FastAPI) -> None:
    @app.get("/")
    @cached_response(60)
    async def index() -> str:
        raise ZeroDivisionError

    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.get("/").status_code == 500


def test_a_cookie_of_a_response_is_for_one_client(app: FastAPI) -> None:
    count = Counter()

    @app.get("/")
    @cached_response(60)
    async def index(response: Response) -> str:
        response.set_cookie("session", str(count()))
        return "hello"

    with TestClient(app) as client:
        found = [client.get("/") for _ in range(2)]
    assert [each.cookies["session"] for each in found] == ["1", "2"]


@pytest.mark.parametrize("inside", [True, False])
def test_a_page_that_reads_the_session_is_for_its_user(cache: Cache, inside: bool) -> None:
    """Also if the session's middleware is outside of the cache, where it adds its `Vary: Cookie` too late."""
    sessions = pytest.importorskip("starlette.middleware.sessions")
    if not hasattr(sessions, "Session"):
        pytest.skip("this Starlette does not know whether a session was read")
    app, count = FastAPI(), Counter()
    layers: list[Any] = [(sessions.SessionMiddleware, {"secret_key": "x"}), (ResponseCache, {"cache": cache})]
    for layer, options in layers if inside else reversed(layers):
        app.add_middleware(layer, **options)

    @app.get("/login/{user}")
    async def login(user: str, request: Request) -> None:
        request.session["user"] = user

    @app.get("/me")
    @cached_response(60)
    async def me(request: Request) -> str:
        return str(request.session.get("user"))

    @app.get("/news")
    @cached_response(60)
    async def news() -> int:
        return count()

    async def work(client: Client) -> None:
        users = {name: (await client.ask(f"/login/{name}")).headers["set-cookie"] for name in ("ann", "bob")}
        for name in ("ann", "bob", "ann", "bob"):
            cookie = users[name].partition(";")[0]
            assert (await client.ask("/me", cookie=cookie)).body == f'"{name}"'.encode()
            assert (await client.ask("/news", cookie=cookie)).body == b"1"

    asked(app, work)


def test_a_herd_of_a_route(app: FastAPI) -> None:
    count = Counter()

    @app.get("/")
    @cached_response(60)
    def index() -> int:
        return count()

    async def work(client: Client) -> None:
        replies = await asyncio.gather(*(client.ask() for _ in range(50)))
        assert {reply.body for reply in replies} == {b"1"}

    asked(app, work)


def test_a_streaming_response(app: FastAPI) -> None:
    """A short one is stored, and a long one passes. Both are complete."""

    @app.get("/{chunks}")
    @cached_response(60)
    async def index(chunks: int) -> StreamingResponse:
        async def stream() -> Any:
            for _ in range(chunks):
                yield b"x" * 1000

        return StreamingResponse(stream())

    with TestClient(app) as client:
        for chunks in (3, 2000):
            found = [client.get(f"/{chunks}") for _ in range(2)]
            assert [each.content for each in found] == [b"x" * 1000 * chunks] * 2
            assert ("age" in found[1].headers) == (chunks == 3)


# -- Starlette ----------------------------------------------------------------------------------------------------


def test_starlette_with_gzip(cache: Cache) -> None:
    """With ResponseCache outside of GZipMiddleware, the compressed bytes are stored, by their encoding."""
    count = Counter()

    async def page(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"{count()} " * 1000, headers={"Cache-Control": "max-age=60"})

    app = Starlette(routes=[Route("/", page)])
    app.add_middleware(GZipMiddleware)
    app.add_middleware(ResponseCache, cache=cache)  # the last one is the outermost
    with TestClient(app) as client:
        for encoding in ("gzip", "identity", "gzip", "identity"):
            answer = client.get("/", headers={"Accept-Encoding": encoding})
            assert answer.headers.get("content-encoding", "identity") == encoding
            assert answer.text == f"{1 if encoding == 'gzip' else 2} " * 1000
    assert count.value == 2


def test_one_part_of_an_application(cache: Cache) -> None:
    """Any ASGI application can be wrapped: one route, a mounted one, or all."""
    count = Counter()

    async def number(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(count()))

    inner = Starlette(routes=[Route("/number", number)])
    app = Starlette(routes=[Mount("/cached", ResponseCache(inner, cache=cache, ttl=60)), Mount("/", inner)])
    with TestClient(app) as client:
        assert [client.get("/cached/number").text for _ in range(2)] == ["1", "1"]
        assert [client.get("/number").text for _ in range(2)] == ["2", "3"]


def test_files_confirm_what_is_stored(cache: Cache, tmp_path: Any) -> None:
    """Starlette's static files have an ETag of their own, know conditions, and would send files by their path."""
    (tmp_path / "logo.svg").write_bytes(b"<svg/>")
    app = ResponseCache(StaticFiles(directory=tmp_path), cache=cache, ttl=60)
    with TestClient(app) as client:
        first, second = client.get("/logo.svg"), client.get("/logo.svg")
        assert first.content == second.content == b"<svg/>"
        assert second.headers["etag"] == first.headers["etag"] and int(second.headers["age"]) <= PATIENCE
        assert client.get("/logo.svg", headers={"If-None-Match": first.headers["etag"]}).status_code == 304
        part = client.get("/logo.svg", headers={"Range": "bytes=1-3"})
        assert (part.status_code, part.content) == (206, b"svg")


def test_the_decorator_keeps_the_function() -> None:
    async def page(number: int) -> int:
        """A page."""
        return number

    decorated = cached_response(60)(page)
    assert inspect.signature(decorated) == inspect.signature(page)
    assert (decorated.__name__, decorated.__doc__) == ("page", "A page.")
    assert inspect.iscoroutinefunction(decorated)


# -- Django -------------------------------------------------------------------------------------------------------

DJANGO = """
import asyncio
import django
from django.conf import settings
settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="x")
django.setup()
from django.core.asgi import get_asgi_application
from django.http import HttpResponse
from django.urls import path
from django.views.decorators.cache import cache_control
from asgi_client import Client, run
from stampede import Cache
from stampede.contrib.asgi import ResponseCache, cached_response

@cached_response(60)
def page(request):
    runs.append("page")
    return HttpResponse("page", headers={"X-Shop": "tea"})

@cache_control(max_age=60)
async def news(request):
    runs.append("news")
    return HttpResponse("news")

def basket(request):
    runs.append("basket")
    return HttpResponse("basket")

async def work():
    client = Client(ResponseCache(get_asgi_application(), cache=Cache()))
    for name, count in [("page", 1), ("news", 1), ("basket", 3)]:
        replies = await asyncio.gather(*(client.ask(f"/{name}") for _ in range(3)))
        assert {reply.body for reply in replies} == {name.encode()} and runs.count(name) == count
    reply = await client.ask("/page")
    assert reply.how == "hit" and reply.headers["x-shop"] == "tea"
    assert (await client.ask("/page", if_none_match=reply.headers["etag"])).status == 304

runs = []
urlpatterns = [path("page", page), path("news", news), path("basket", basket)]
run(work)
"""


def test_django() -> None:
    """Django's ASGI application, with views of both colours. It runs in a process of its own, for its settings."""
    pytest.importorskip("django")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", DJANGO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
