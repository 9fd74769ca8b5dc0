"""A web application with its cache on Redis: of all concurrent requests for a report, only one computes it.

    pip install 'stampede-guard[redis]' starlette uvicorn
    redis-server --port 6379 &
    uvicorn --app-dir examples/web --workers 4 app:app

    curl localhost:8000/reports/north                           # computed once for all workers, then read from Redis
    curl localhost:8000/prices/tea                              # a plain def works, too, in a thread
    curl -X POST -d 14.5 localhost:8000/prices/tea              # changed, and removed from every worker's local tier
    curl -X DELETE localhost:8000/reports/north                 # invalidated everywhere
    curl localhost:8000/health                                  # the counters of the cache, and whether Redis answers

To use another Redis, set SHOP_REDIS=redis://user:password@host:6379/0 in the environment.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import stampede

os.environ.setdefault("SHOP_REDIS", "redis://127.0.0.1:6379/0")
stampede.configure(Path(__file__).with_name("stampede.toml"))

PRICES = {"tea": 12.0, "coffee": 9.5}  # stands for a slow database


@stampede.cached(ttl=600, stale=3600)  # while Redis has an old report, no request waits for the new one
async def report(region: str) -> dict[str, Any]:
    await asyncio.sleep(0.5)
    return {"region": region, "total": 42.0, "by": os.getpid(), "at": time.time()}


@stampede.cached(ttl=60, raises=(KeyError,))  # "there is no such product" is an answer, which is cached, too
def price(product: str) -> float:
    time.sleep(0.1)
    return PRICES[product]


async def get_report(request: Request) -> Response:
    return JSONResponse(await report(request.path_params["region"]))


async def drop_report(request: Request) -> Response:
    await report.invalidate(request.path_params["region"])
    return Response(status_code=204)


async def get_price(request: Request) -> Response:
    try:
        return JSONResponse(await run_in_threadpool(price, request.path_params["product"]))
    except KeyError:
        return Response("there is no such product", status_code=404)


async def set_price(request: Request) -> Response:
    product = request.path_params["product"]
    PRICES[product] = float(await request.body())  # first the database, then the cache
    await run_in_threadpool(price.invalidate, product)
    return Response(status_code=204)


def health(request: Request) -> Response:
    cache = stampede.get_cache()
    try:
        answers_in = cache.engine.ping()
    except stampede.EngineError as error:  # calls still work: each process computes for itself
        return JSONResponse({"redis": str(error)}, status_code=503)
    found = cache.stats()
    return JSONResponse(
        {"redis": f"{answers_in * 1e3:.1f} ms", "hits": found.hits + found.found, "computed": found.computations}
    )


app = Starlette(
    routes=[
        Route("/reports/{region}", get_report),
        Route("/reports/{region}", drop_report, methods=["DELETE"]),
        Route("/prices/{product}", get_price),
        Route("/prices/{product}", set_price, methods=["POST"]),
        Route("/health", health),
    ]
)
