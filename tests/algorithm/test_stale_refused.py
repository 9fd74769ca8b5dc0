"""`stale=0` in a call: the caller gets no stale value, even if the cache may serve one to others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from both_colours import Face
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import shared_redis


@pytest.fixture(params=["memory", "disk", "redis", "memcached", "postgres"])
def ask(request: pytest.FixtureRequest, colour: str, face: Callable[..., Face], tmp_path: Path) -> Face:
    urls = {"memory": lambda: "memory://", "disk": lambda: f"disk://{tmp_path}"}
    urls |= {"redis": lambda: shared_redis().url, "memcached": lambda: shared_memcached().url}
    urls |= {"postgres": lambda: prepared_postgres().postgres_url}
    made = face(urls[request.param](), colour, namespace=tmp_path.name, stale=600, ttl=600)
    made.run("set", "k", "old")
    made.run("expire", "k")
    return made


def fails() -> Any:
    raise ValueError("no")


def test_a_failure_is_not_covered(ask: Face) -> None:
    """With `stale=0`, a caller gets the error of a failed computation, and no stale value."""
    with pytest.raises(ValueError, match="no"):
        ask("k", fails, stale=0)
    assert ask("k", fails) == "old"


def test_it_waits_for_who_computes(ask: Face) -> None:
    """With `stale=0`, a caller waits for a running computation, although other callers get the stale value."""
    begun, go = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert go.wait(10)
        return "new"

    given: list[Any] = []
    leader = threading.Thread(target=lambda: given.append(ask.cache.get_or_compute("k", slow)))
    leader.start()
    assert begun.wait(10)
    assert ask("k", fails) == "old"
    waits = threading.Thread(target=lambda: given.append(ask.cache.get_or_compute("k", slow, stale=0)))
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    go.set()
    leader.join()
    waits.join()
    assert given == ["new", "new"]


def test_nobody_is_served_beside_a_refresh(ask: Face) -> None:
    """With `stale=0`, a caller gets the new value, even with `background=True`."""
    assert ask("k", lambda: "new", background=True, stale=0) == "new"


def test_batches_do_as_single_calls(ask: Face) -> None:
    """With `stale=0`, a batch raises the error of its loader, as a single call does."""
    with pytest.raises(ValueError, match="no"):
        ask.run("get_or_compute_many", ["k"], lambda keys: fails(), stale=0)
    assert ask.run("get_or_compute_many", ["k"], lambda keys: fails()) == {"k": "old"}
