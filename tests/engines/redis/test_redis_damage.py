"""A damaged key affects only that key, never the server or other keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("redis")

from both_colours import Face, never
from herd import until
from servers import RedisServer

from stampede import events

both = pytest.mark.parametrize("colour", ["sync", "async"])
Faces = Callable[..., Face]


@both
def test_a_list_where_a_string_belongs(server: RedisServer, face: Faces, colour: str) -> None:
    """A key of the wrong type affects no other key, and a new value can be stored over it."""
    asked = face(server.url, colour)
    keys = [f"k{n}" for n in range(20)]
    asked.many(keys, lambda missing: dict.fromkeys(missing, 1))
    (name,) = (name for name in server.cli("KEYS", "*k7").split())
    for damaged in (name, name[: name.index("}") + 1] + "l"):
        server.cli("DEL", name)
        server.cli("LPUSH", damaged, "x")
        if damaged == name:
            assert asked.many(keys, lambda missing: dict.fromkeys(missing, 2)) == {**dict.fromkeys(keys, 1), "k7": 2}
            assert asked("k7", never) == 2
        else:
            assert [asked("k7", lambda: 3), asked("k8", never)] == [3, 1]
        assert asked.count(events.EngineDown) == (damaged != name)  # only for this key


@both
@pytest.mark.parametrize("garbage", ["", "x", "x" * 100, "\x01" + "\xff" * 60, "[" * 5000, '{"a": 1}', "[[], 1, {}]"])
def test_garbage_where_a_string_of_ours_belongs(server: RedisServer, face: Faces, garbage: str, colour: str) -> None:
    """Whatever bytes a key holds, each verb replies, and a value that is stored afterwards is found."""
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
