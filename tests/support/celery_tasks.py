"""An application of Celery for the tests: `celery -A celery_tasks worker`. $TASKS_REDIS is its server."""

from __future__ import annotations

import os
from typing import Any

import redis
from celery import Celery

from stampede import Cache
from stampede.contrib.celery import Once

URL = os.environ["TASKS_REDIS"].removesuffix("/0")

cache = Cache(URL + "/0", ttl=60)
board = redis.Redis.from_url(URL + "/3", decode_responses=True, socket_timeout=None)
"""Where tasks tell that they began, and wait until they may go on."""

app = Celery("celery_tasks", broker=URL + "/1", backend=URL + "/2", broker_connection_retry_on_startup=True)
app.conf.update(worker_prefetch_multiplier=1)


class Base(Once):
    abstract = True
    once_cache = cache
    once_lease = 3.0


def began(word: str) -> None:
    """Tell the test that the task has begun, and wait until it may go on."""
    board.rpush(f"began {word}", os.getpid())
    assert board.blpop([f"go {word}"], timeout=20), "the test has not let the task go on"


@app.task(base=Base)
def work(word: str, times: int = 1, *, fail: bool = False) -> str:
    began(word)
    if fail:
        raise ValueError(word)
    return word * times


@app.task(base=Base, bind=True, max_retries=2)
def again(self: Any, word: str) -> int:
    began(word)
    if self.request.retries == 0:
        raise self.retry(countdown=0.3)
    return int(self.request.retries)


@app.task(base=Base, autoretry_for=(ValueError,), retry_backoff=False, default_retry_delay=0, max_retries=1)
def hopeless(word: str) -> None:
    began(word)
    raise ValueError(word)


@app.task(base=Base, acks_late=True, reject_on_worker_lost=True)
def late(word: str) -> str:
    began(word)
    return word


@app.task(base=Base, once_lease=0.1)
def brief(word: str) -> str:
    began(word)
    return word


@app.task(base=Base, raise_on_duplicate=True)
def strict(word: str) -> str:
    began(word)
    return word


@cache.cached(stale="1h", refresh_by=lambda word: refresh.delay(word))
def computed_by(word: str) -> int:
    return os.getpid()


@app.task(base=Base)
def refresh(word: str) -> None:
    began(word)
    computed_by.refresh(word)


@app.task(base=Base, unique_on=["a", "c"])
def some(a: int, b: object, c: int = 3) -> None: ...


@app.task(base=Base, unique_on="c")
def one(a: int, b: int, c: int = 3) -> None: ...


@app.task(base=Base, unique_on=[])
def single(a: object) -> None: ...


@app.task(base=Base, unique_on="nothing")
def wrong(a: int) -> None: ...
