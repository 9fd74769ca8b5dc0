"""Actors of dramatiq for the tests: `dramatiq dramatiq_tasks`. $TASKS_REDIS is their server."""

from __future__ import annotations

import os

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import SkipMessage
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from stampede import Cache
from stampede.contrib.dramatiq import Once, OnceActor

URL = os.environ["TASKS_REDIS"].removesuffix("/0")

cache = Cache(URL + "/0", ttl=60)
board = redis.Redis.from_url(URL + "/3", decode_responses=True, socket_timeout=None)
"""Where messages tell that they began, and wait until they may go on."""

SILENCE = int(os.environ.get("TASKS_SILENCE", 60_000))
"""Milliseconds after which a worker of which nothing is heard is dead, so that its messages are delivered again."""

broker = RedisBroker(url=URL + "/1", heartbeat_timeout=SILENCE, maintenance_chance=1000000)
results = RedisBackend(client=redis.Redis.from_url(URL + "/2", socket_timeout=None))
broker.add_middleware(Results(backend=results, store_results=True))
broker.add_middleware(Once(cache, lease=os.environ.get("TASKS_LEASE", "3s")))
dramatiq.set_broker(broker)


def began(word: str) -> None:
    """Tell the test that the message is processed, and wait until it may go on."""
    board.rpush(f"began {word}", os.getpid())
    assert board.blpop([f"go {word}"], timeout=20), "the test has not let the message go on"


@dramatiq.actor(once=True, max_retries=0)
def work(word: str, times: int = 1, *, how: str = "") -> str:
    began(word)
    if how == "fail":
        raise ValueError(word)
    if how == "skip":
        raise SkipMessage(word)
    return word * times


@dramatiq.actor(once="word", max_retries=1, min_backoff=100, max_backoff=100)
def again(word: str, other: int = 1) -> str:
    began(word)
    raise ValueError(word)


@dramatiq.actor(actor_class=OnceActor, once=True, max_retries=0)
def quiet(word: str) -> str:
    began(word)
    return word


@dramatiq.actor(once=True, max_retries=0, queue_name="fragile")
def fragile(word: str) -> str:
    began(word)
    return word


@dramatiq.actor(once=[])
def single(word: str) -> None: ...


@dramatiq.actor
def usual(word: str) -> None: ...
