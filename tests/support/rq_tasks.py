"""Jobs of RQ for the tests: `rq worker`. $TASKS_REDIS is their server."""

from __future__ import annotations

import os

import redis

from stampede import Cache
from stampede.contrib.rq import once_job

URL = os.environ["TASKS_REDIS"].removesuffix("/0")

cache = Cache(URL + "/0", ttl=60)
board = redis.Redis.from_url(URL + "/3", decode_responses=True, socket_timeout=None)
"""Where jobs tell that they began, and wait until they may go on."""


def began(word: str) -> None:
    """Tell the test that the job has begun, and wait until it may go on."""
    board.rpush(f"began {word}", os.getpid())
    assert board.blpop([f"go {word}"], timeout=20), "the test has not let the job go on"


@once_job(cache=cache, lease=3)
def work(word: str, times: int = 1, *, fail: bool = False) -> str:
    began(word)
    if fail:
        raise ValueError(word)
    return word * times


@once_job(cache=cache, lease=0.1)
def brief(word: str) -> str:
    began(word)
    return word


@once_job(cache=cache, lease=3)
async def suspending(word: str) -> str:
    began(word)
    return word


@once_job(cache=cache, lease=3)
def nested(word: str, depth: int = 1) -> str:
    began(word)
    return nested(word, depth - 1) if depth else word


@once_job(cache=cache, lease=3, unique_on="word", raise_on_duplicate=True)
def strict(word: str, other: int = 1) -> str:
    began(word)
    return word
