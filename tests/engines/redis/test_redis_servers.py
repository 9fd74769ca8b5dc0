"""Redis servers that differ from the one installed here. `make matrix` runs all tests of the engine on some of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from both_colours import Face
from herd import until
from proxy import Proxy
from servers import RedisCluster, RedisServer, is_redis_6, missing, valkey

from stampede import Cache, events
from stampede.cli.command import main

__all__ = ["Face"]  # for the fixture of this name

Faces = Callable[..., Face]
Before = Callable[[Any], Proxy]

both = pytest.mark.parametrize("colour", ["sync", "async"])


def kept(cache: Cache) -> int:
    """How many values are kept in this process."""
    return len(cache._core.local_tier.residents or ())


@pytest.fixture
def valkey_server() -> Iterator[RedisServer]:
    with closing(RedisServer(program=valkey())) as server:
        yield server


def test_valkey(valkey_server: RedisServer) -> None:
    """On a Valkey server, values, news of changes, locks and clear work."""
    with Cache(valkey_server.url, local=True) as here, Cache(valkey_server.url) as there:
        assert here.get_or_compute("k", lambda: 1) == there.get_or_compute("k", lambda: 2) == 1
        until(lambda: here.get_or_compute("k", lambda: 2) and kept(here))
        there.set("k", 3)
        until(lambda: here.get_or_compute("k", lambda: 2) == 3)
        with here.lock("l"):
            assert not there.lock("l", wait=0).acquire()
        there.clear()
        until(lambda: here.get("k") is None)


# -- servers that report changes in another way -----------------------------------------------------------------------


def refusing(data: bytes) -> bytes:
    """Make the server refuse to redirect: one word of the command is changed to a word that it does not know."""
    return data.replace(b"\r\nREDIRECT\r\n", b"\r\nXEDIXECT\r\n")


def asks(face: Any, key: str) -> bool:
    """Whether a hit asks the server."""
    before = face.count(events.Found)
    face(key, lambda: 0)
    return bool(face.count(events.Found) > before)


@both
def test_a_server_that_refuses_to_redirect(
    server: RedisServer, before: Before, face: Faces, colour: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken if a value were served from the process for longer than a second after another process has changed it."""
    proxy = before(server)
    proxy.forge = refusing
    here, there = face(proxy.url, colour, local=True), face(server.url)
    with caplog.at_level("WARNING", "stampede"):
        until(lambda: here("k", lambda: 1) == 1 and here.count(events.Untold))
    until(lambda: not asks(here, "k"))
    there.run("set", "k", 2)
    until(lambda: here("k", lambda: 0) == 2)
    assert here.count(events.Untold) == 1
    assert len([record for record in caplog.records if "does not announce" in record.getMessage()]) == 1


@both
def test_a_user_without_the_right(own: RedisServer, face: Faces, colour: str) -> None:
    """Broken if a managed service that allows none of CLIENT's subcommands made every call fail."""
    own.cli("ACL", "SETUSER", "shop", "on", ">secret", "~*", "&*", "+@all", "-client")
    here, there = face(f"redis://shop:secret@127.0.0.1:{own.port}/0", colour, local=True), face(own.url)
    until(lambda: here("k", lambda: 1) == 1 and here.count(events.Untold))
    there.run("set", "k", 2)
    until(lambda: here("k", lambda: 0) == 2)
    assert here.count(events.Untold) == 1


def test_check_says_so(
    server: RedisServer,
    before: Before,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`stampede check` says if the server does not announce changes. Otherwise, users would only see its load."""
    proxy = before(server)
    monkeypatch.chdir(tmp_path)
    Path("stampede.toml").write_text(f'[caches.default]\nurl = "{proxy.url}"\nlocal = true\n')
    for forge in (lambda data: data, refusing):
        proxy.forge = forge
        assert main(["check"]) == 0
        assert ("serves what it keeps for a second" in " ".join(capsys.readouterr().out.split())) == (forge is refusing)


# -- several servers behind one address -------------------------------------------------------------------------------


def forgetful(data: bytes) -> bytes:
    """Change the hash in each EVALSHA, so that the server never knows the script."""
    return re.sub(rb"(EVALSHA\r\n\$40\r\n).", rb"\1z", data)


@both
def test_a_server_that_knows_no_script(server: RedisServer, before: Before, face: Faces, colour: str) -> None:
    """Calls work if the server does not know a script. Behind one address there may be several servers, and each knows
    only the scripts that it received itself."""
    proxy = before(server)
    proxy.forge = forgetful
    asked = face(proxy.url, colour)
    keys = [f"k{number}" for number in range(20)]
    for _ in range(2):
        assert asked.many(keys, lambda missing: {key: key.upper() for key in missing})["k7"] == "K7"
    asked.run("set_many", dict.fromkeys(keys, 1))
    asked.invalidate("k3")
    assert asked.run("get_many", keys) == {key: 1 for key in keys if key != "k3"}
    assert asked.lock("l")
    assert asked.count(events.EngineDown) == 0


@pytest.fixture(scope="module")
def lonely() -> Iterator[RedisCluster]:
    """A cluster of one server that has all slots. A service with several servers behind one address looks like this."""
    with closing(RedisCluster(masters=1)) as cluster:
        yield cluster


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
@both
def test_a_cluster_of_one(lonely: RedisCluster, face: Faces, scheme: str, colour: str) -> None:
    """On a cluster of one server, both schemes work: values, news of changes, locks and clear."""
    lonely.flush()
    url = lonely.url if scheme == "redis+cluster" else lonely.nodes[0].url
    here, there = face(url, colour, local=True), face(url)
    until(lambda: here("k", lambda: 1) == 1 and not asks(here, "k"))
    there.run("set", "k", 2)
    until(lambda: here("k", lambda: 0) == 2)
    assert here.lock("l")
    assert not there.lock("l")
    there.run("clear")
    until(lambda: here("k", lambda: 3) == 3)


NOT_HERE = "return redis.error_reply('ERR Script attempted to access a non local key in a cluster node script: 0')"


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
@both
def test_a_key_that_is_not_here_yet(
    lonely: RedisCluster, before: Before, face: Faces, scheme: str, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a service replies that a key is not here yet, as it does while it grows, that is no outage. (No server of the
    tests replies so by itself. The test calls a script that does.)"""
    if is_redis_6() and scheme == "redis+cluster":
        missing("a Redis 6 that runs announces no other port than its own")
    monkeypatch.setattr("stampede.engines.redis.cluster.PATIENCE", 20.0)
    lonely.flush()
    proxy, left = before(lonely.nodes[0]), 0
    lonely.nodes[0].cli("CONFIG", "SET", "cluster-announce-port", str(proxy.port))
    script = lonely.nodes[0].cli("SCRIPT", "LOAD", NOT_HERE).encode()

    def forged(data: bytes) -> bytes:
        nonlocal left
        data, count = (
            re.subn(rb"(EVALSHA\r\n\$40\r\n).{40}", rb"\g<1>" + script, data, count=left) if left else (data, 0)
        )
        left -= count
        return data

    try:
        asked = face(f"{scheme}://127.0.0.1:{proxy.port}", colour)
        assert asked("k", lambda: 1) == 1
        asked.run("set", "k", 0)  # the server knows the scripts now
        proxy.forge, left = forged, 2 if scheme == "redis" else 5
        asked.run("set", "k", 2)
        assert left == 0
        assert asked.run("get", "k") == 2
        assert asked.count(events.EngineDown) == 0
    finally:
        lonely.nodes[0].cli("CONFIG", "SET", "cluster-announce-port", "0")
