"""A key of ours that somebody has damaged is the trouble of that key: never of the server, or of other keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("redis")

from faces import Face, never
from herd import Herd, Origin, until
from servers import RedisServer, shared_cluster

from stampede import Cache, Lock, cached, events
from stampede.testing import isolated

both = pytest.mark.parametrize("colour", ["sync", "async"])
Faces = Callable[..., Face]


@contextlib.contextmanager
def all_of_ours(server: RedisServer, url: str) -> Iterator[list[str]]:
    """Every kind of key that we ever have on a server: values, leases, verdicts, rests, generations, locks, queues."""
    cache, origin = Cache(url, retry_after=60, observers=[lambda event: None]), Origin()
    cache.get_or_compute("value", lambda: 1)
    computing = Herd(lambda: cache.get_or_compute("computing", origin))
    origin.has_begun()
    with contextlib.suppress(ZeroDivisionError):
        cache.get_or_compute("failed", lambda: 1 // 0)
    with Lock("lock", on=url):
        waiter = Lock("lock", on=url, wait=60)
        waiting = Herd(waiter.acquire)
        until(lambda: "Q" in {name[-1] for name in server.cli("KEYS", "*").split()})
        yield server.cli("KEYS", "*").split()
    origin.let_on()
    computing.join()
    assert [bool(holding) for holding in waiting.join()] == [True]
    waiter.release()
    cache.close()


def use(face: Face) -> None:
    """Every verb, on the keys that are damaged."""
    for key in ("value", "computing", "failed"):
        face.run("get", key)
        face.run("peek", key)
        assert face(key, lambda: 1, wait=5) == 1
        with contextlib.suppress(ZeroDivisionError):
            face(key + "!", lambda: 1 // 0)
        face.run("set", key, 2)
        face.run("expire", key)
        face.run("invalidate", key)
        assert face(key, lambda: 3, stale=5) == 3
        assert face(key, never) == 3


@both
def test_a_list_where_a_string_belongs(server: RedisServer, face: Faces, colour: str) -> None:
    """One damaged key would take the whole engine for down as long as somebody asks for it, and all others with it."""
    with all_of_ours(server, server.url) as names:
        assert {name[-1] for name in names} >= set("lvrgQH")
    server.cli("FLUSHALL")
    asked = face(server.url, colour, retry_after=60)
    asked("value", lambda: 1)
    generations = set(server.cli("KEYS", "*g*").split())
    for name in {*names, *server.cli("KEYS", "*").split()}:
        server.cli("EVAL", "redis.call('DEL', KEYS[1]) redis.call('LPUSH', KEYS[1], 'x')", "1", name)
    assert generations
    use(asked)
    with Lock("lock", on=server.url, wait=0) as lock:
        assert lock.held
    assert not any(isinstance(event, events.EngineDown) for event in asked.told)
    assert any(isinstance(event, events.BadBytes) for event in asked.told)


@both
@pytest.mark.parametrize("part", ["l", "v", "r"])
def test_each_damaged_part_of_a_key(server: RedisServer, face: Faces, part: str, colour: str) -> None:
    """Each is mended by who meets it, and told; the next caller finds nothing wrong."""
    asked = face(server.url, colour, retry_after=60)
    asked("value", lambda: 1)
    (name,) = (name for name in server.cli("KEYS", "*value").split())
    damaged = name[: name.index("}") + 1] + part
    server.cli("DEL", name)
    server.cli("LPUSH", damaged, "x")
    with contextlib.suppress(ZeroDivisionError):
        asked("value", lambda: 1 // 0)
    assert server.cli("TYPE", damaged) in ("none", {"l": "none", "v": "hash", "r": "string"}[part])
    asked.invalidate("value")
    assert asked("value", lambda: 2, wait=1) == 2
    assert asked.count(events.EngineDown) == 0


@both
def test_a_damaged_key_in_a_batch(server: RedisServer, face: Faces, colour: str) -> None:
    """The others of the batch would fail with it."""
    asked = face(server.url, colour)
    keys = [f"k{n}" for n in range(20)]
    asked.many(keys, lambda missing: dict.fromkeys(missing, 1))
    (name,) = (name for name in server.cli("KEYS", "*k7").split())
    server.cli("DEL", name)
    server.cli("LPUSH", name[: name.index("}") + 1] + "l", "x")
    assert asked.many(keys, lambda missing: dict.fromkeys(missing, len(missing))) == {**dict.fromkeys(keys, 1), "k7": 1}
    assert [event.key[-2:] for event in asked.told if isinstance(event, events.BadBytes)] == ["k7"]
    assert asked.count(events.EngineDown) == 0


def test_a_refresh_over_a_damaged_lease(server: RedisServer) -> None:
    """What refuses the lease it takes by force would be taken for a server that refuses all."""
    told: list[Any] = []
    with isolated():
        f = cached(cache=Cache(server.url, observers=[told.append]))(lambda: 1)
        f()
        (name,) = (name for name in server.cli("KEYS", "*").split() if "{stampede}" not in name)
        server.cli("LPUSH", name[: name.index("}") + 1] + "l", "x")
        assert f.refresh() == 1
    assert not any(isinstance(event, events.EngineDown) for event in told)


def test_what_is_sound_is_not_mended(server: RedisServer, face: Faces) -> None:
    """A damaged queue would cost its lock, and a damaged verdict the lease: only what is damaged goes."""
    asked = face(server.url)
    with all_of_ours(server, server.url) as names:
        mend = asked.cache.engine._servers.scripts.mend.source  # type: ignore[attr-defined]
        assert server.cli("EVAL", mend, str(len(names)), *names) == "0"
        assert set(names) <= set(server.cli("KEYS", "*").split())
    lock = Lock("held", on=server.url)
    assert lock.acquire()
    (tag,) = {name[: name.index("}") + 1] for name in server.cli("KEYS", "*").split() if name.endswith(":held")}
    server.cli("LPUSH", tag + "Q", "x")
    assert not Lock("held", on=server.url, wait=0.05).acquire()
    lock.release()
    assert server.cli("TYPE", tag + "Q") in ("none", "zset")


@both
def test_in_a_cluster(face: Faces, colour: str) -> None:
    """The same for the shard of that key."""
    cluster = shared_cluster()
    cluster.flush()
    asked = face(cluster.url, colour)
    asked("value", lambda: 1)
    node, name = next((n, name) for n in cluster.nodes for name in n.cli("KEYS", "*value").split())
    node.cli("DEL", name)
    node.cli("LPUSH", name[: name.index("}") + 1] + "l", "x")
    assert asked("value", lambda: 2) == 2
    assert asked("value", never) == 2
    assert asked.count(events.EngineDown) == 0


@both
@pytest.mark.parametrize("garbage", ["", "x", "x" * 100, "\x01" + "\xff" * 60, "[" * 5000, '{"a": 1}', "[[], 1, {}]"])
def test_garbage_where_a_string_of_ours_belongs(server: RedisServer, face: Faces, garbage: str, colour: str) -> None:
    """Whatever the bytes are, each verb answers, and what is stored afterwards is found."""
    asked = face(server.url, colour)
    asked("value", lambda: 1)
    names = server.cli("KEYS", "*").split()
    (name,) = (name for name in names if name.endswith("value"))
    tag = name[: name.index("}") + 1]
    text = garbage.encode("latin-1")
    for damaged in (name, tag + "r", *(name for name in names if "}g" in name)):
        server.cli("SET", damaged, text, "PX", "100000")
    server.cli("HSET", tag + "v", "x", text)
    asked.run("set", "value", 1)
    assert asked("value", never) == 1
    server.cli("SET", tag + "r", text, "PX", "50")
    server.cli("SET", tag + "l", text, "PX", "50")
    for key in (name, *(name for name in server.cli("KEYS", "*value").split())):
        server.cli("SET", key, text)
    assert asked.run("get", "value") is None
    assert asked.run("peek", "value") is None
    until(lambda: server.cli("EXISTS", tag + "l") != "1")
    assert asked("value", lambda: 2) == 2
    assert asked("value", never) == 2
    assert asked.count(events.EngineDown) == 0
