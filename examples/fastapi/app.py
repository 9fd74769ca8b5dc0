"""A FastAPI application whose whole responses are cached on Redis: of all concurrent requests for a page, in all
workers, one computes it, and clients that have the page already get 304.

    pip install 'stampede-guard[redis]' fastapi uvicorn
    redis-server --port 6379 &
    uvicorn --app-dir examples/fastapi --workers 4 app:app

    curl -i localhost:8000/reports/north                        # computed once for all workers, then read from Redis
    curl -i localhost:8000/reports/north                        # the same bytes, with Age and the same ETag
    curl -i -H 'If-None-Match: "..."' localhost:8000/reports/north          # 304, if that is the ETag
    curl -i 'localhost:8000/prices?product=tea&utm_source=mail' # says itself how long it may be cached
    curl -i -X PUT 'localhost:8000/prices?product=tea&amount=12'            # changes a price, and removes what shows it
    curl -i localhost:8000/basket                               # is for one user: passes through

To use another Redis, set SHOP_REDIS=redis://user:password@host:6379/0 in the environment.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, Response
from pydantic import BaseModel

import stampede
from stampede.contrib.asgi import ResponseCache, cached_response

PRICES = {"tea": 12.0, "coffee": 9.5}  # stands for a slow database


class Report(BaseModel):
    region: str
    total: float
    by: int
    at: float


class Price(BaseModel):
    product: str
    amount: float


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    stampede.configure(url=os.environ.get("SHOP_REDIS", "redis://localhost:6379/0"), namespace="shop-pages")
    yield
    await stampede.get_cache().aclose()


app = FastAPI(lifespan=lifespan)
app.add_middleware(ResponseCache, query=["product", "amount"])  # what a newsletter adds to a link does not matter


async def price_of(product: str) -> Price:  # a dependency runs with the route, so once for a herd
    if product not in PRICES:
        raise HTTPException(404, "there is no such product")
    return Price(product=product, amount=PRICES[product])


@app.get("/reports/{region}")
@cached_response("10m", stale="1h", tags=["report:{region}"])
async def report(region: str, tasks: BackgroundTasks) -> Report:
    await asyncio.sleep(0.5)
    tasks.add_task(print, "computed", region)  # once for a herd, and no client waits for it
    return Report(region=region, total=42.0, by=os.getpid(), at=time.time())


@app.delete("/reports/{region}", status_code=204)
async def drop_report(region: str) -> None:
    await stampede.ainvalidate_tags(f"report:{region}")


@app.get("/prices")
async def get_price(response: Response, price: Price = Depends(price_of)) -> Price:  # noqa: B008  # FastAPI's way
    response.headers["Cache-Control"] = "max-age=60, stale-while-revalidate=600"
    stampede.current().tag(f"price:{price.product}")
    return price


@app.put("/prices", status_code=204)
async def set_price(product: str, amount: float) -> None:
    PRICES[product] = amount  # first the database, then the cache
    await stampede.ainvalidate_tags(f"price:{product}")


@app.get("/basket")
async def basket(response: Response) -> list[str]:
    response.headers["Cache-Control"] = "private"
    return ["tea"]
