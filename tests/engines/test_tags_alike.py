"""Tags give the same answers on each engine as in a plain model, for random histories of changes and calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")
pytest.importorskip("psycopg")
pytest.importorskip("sqlalchemy")
pytest.importorskip("moto")

from addresses import EMPTY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stampede import Cache, current
from stampede.engines.memory import MemoryEngine

STORES = ["memory", "disk", "redis", "memcached", "postgres", "sql", "dynamodb", "etcd", "zookeeper"]
FAR = {"memcached", "sql", "dynamodb", "etcd", "zookeeper"}
KEYS, TAGS = ["k", "l"], ["a", "b", "c"]


@dataclass
class Model:
    """Values with the moments at which they began, and the moments of the last changes of tags."""

    now: int = 0
    values: dict[str, tuple[int, int, frozenset[str]]] = field(default_factory=dict)
    hard: dict[str, int] = field(default_factory=dict)
    soft: dict[str, int] = field(default_factory=dict)

    def put(self, key: str, value: int, tags: frozenset[str]) -> None:
        self.values[key] = value, self.now, tags

    def kept(self, key: str) -> int | None:
        """Return the value, fresh or stale."""
        value, began, tags = self.values.get(key, (None, 0, frozenset[str]()))
        return None if any(self.hard.get(tag, 0) > began for tag in tags) else value

    def fresh(self, key: str) -> int | None:
        _, began, tags = self.values.get(key, (None, 0, frozenset[str]()))
        return None if any(self.soft.get(tag, 0) > began for tag in tags) else self.kept(key)


some_tags = st.frozensets(st.sampled_from(TAGS))
acts = st.one_of(
    st.tuples(st.just("set"), st.sampled_from(KEYS), some_tags),
    st.tuples(st.just("compute"), st.sampled_from(KEYS), some_tags, some_tags),
    st.tuples(st.just("update"), st.sampled_from(KEYS), some_tags),
    st.tuples(st.just("touch"), st.sampled_from(KEYS)),
    st.tuples(st.just("invalidate"), st.sampled_from(KEYS)),
    st.tuples(st.just("hard"), some_tags),
    st.tuples(st.just("soft"), some_tags),
)
histories = st.lists(st.tuples(st.booleans(), acts), min_size=1, max_size=12)


class History:
    """One history, played on two caches of one engine, as two processes have them, and on the model."""

    def __init__(self, caches: list[Cache], run: Callable[..., Any]) -> None:
        self.caches = caches
        self.run = run
        self.model = Model()
        self.values = count(1)

    def act(self, cache: Cache, verb: str, *args: Any) -> None:
        model = self.model
        model.now += 1
        match verb, *args:
            case "set", key, tags:
                value = next(self.values)
                self.run(cache.aset, key, value, tags=sorted(tags))
                model.put(key, value, tags)
            case "compute", key, tags, late:
                self.compute(cache, key, tags, late)
            case "update", key, tags:
                value = next(self.values)
                before = model.fresh(key)
                seen: list[Any] = []
                self.run(cache.aupdate, key, lambda old: seen.append(old) or value, None, tags=sorted(tags))
                assert seen[-1] == before
                model.put(key, value, tags)
            case "touch", key:
                kept = model.kept(key)
                assert self.run(cache.atouch, key, ttl=600, stale=600) is (kept is not None)
                if kept is not None:
                    model.put(key, kept, model.values[key][2])
            case "invalidate", key:
                self.run(cache.ainvalidate, key)
                model.values.pop(key, None)
            case "hard", tags:
                self.run(cache.ainvalidate_tags, *tags)
                model.hard |= dict.fromkeys(tags, model.now)
            case "soft", tags:
                self.run(cache.aexpire_tags, *tags)
                model.soft |= dict.fromkeys(tags, model.now)

    def compute(self, cache: Cache, key: str, tags: frozenset[str], late: frozenset[str]) -> None:
        model, value = self.model, next(self.values)

        def compute() -> int:
            current().tag(*late)
            return value

        got = self.run(cache.aget_or_compute, key, compute, tags=sorted(tags))
        there = model.fresh(key)
        assert got == (value if there is None else there)
        if there is None:
            if self.run(cache.apeek, key) is None:
                model.values.pop(key, None)  # a late tag that was invalidated a moment ago: not stored, and never wrong
            else:
                model.put(key, value, tags | late)

    def check(self) -> None:
        for cache in self.caches:
            for key in KEYS:
                assert self.run(cache.aget, key) == self.model.fresh(key)
                entry = self.run(cache.apeek, key)
                assert (entry and entry.value) == self.model.kept(key)


@pytest.fixture(params=STORES)
def engine(request: pytest.FixtureRequest, memory_path: Path) -> Iterator[tuple[str, Callable[[str], Cache]]]:
    url, shared = EMPTY[request.param](memory_path), MemoryEngine()
    with ExitStack() as opened:

        def cache(namespace: str) -> Cache:
            engine = shared if request.param == "memory" else None
            made = Cache(url, engine=engine, namespace=namespace, ttl=600, stale=600, early=0)
            return opened.enter_context(made)

        yield request.param, cache


def test_tags_are_as_in_a_plain_model(engine: tuple[str, Callable[[str], Cache]], colour: str) -> None:
    """After each change, each process finds what the model has: a value is fresh while none of its tags has changed
    since it began, gone after a hard change, and stale after a soft one."""
    name, cache = engine
    with asyncio.Runner() as runner:

        def run(verb: Callable[..., Any], *args: Any, **terms: Any) -> Any:
            if colour == "async":
                return runner.run(verb(*args, **terms))
            blocking = getattr(verb.__self__, verb.__name__[1:])  # type: ignore[attr-defined]
            return blocking(*args, **terms)

        caches: list[Cache] = []

        @settings(max_examples=10 if name in FAR else 60, suppress_health_check=[HealthCheck.too_slow])
        @given(histories)
        def play(history: list[Any]) -> None:
            if not caches:
                caches.extend(cache("alike") for _ in range(2))
            played = History(caches, run)
            played.act(caches[0], "hard", frozenset(TAGS))
            for key in KEYS:
                played.act(caches[0], "invalidate", key)
            for first, act in history:
                played.act(caches[0 if first else 1], *act)
                played.check()

        play()
