"""Servers that differ from the machine's own; `make matrix` runs all tests of the engine on some of them."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from faces import Face
from herd import until
from proxy import Proxy
from servers import RedisCluster, RedisServer, is_redis_6, missing, valkey

from stampede import Cache, events
from stampede.cli.command import main
from stampede.colour import run_blocking as run
from stampede.engines.redis import RedisEngine
from stampede.engines.redis.news import REDIRECTED
from stampede.entry import Entry, new_id
from stampede.ports import Ask

__all__ = ["Face"]  # for the fixture of this name

Faces = Callable[..., Face]
Before = Callable[[Any], Proxy]

both = pytest.mark.parametrize("colour", ["sync", "async"])


def kept(cache: Cache) -> int:
    """How many values are kept in this process."""
    return len(cache._core.front.tier or ())


@pytest.fixture
def valkey_server() -> Iterator[RedisServer]:
    with closing(RedisServer(program=valkey())) as server:
        yield server


def test_valkey(valkey_server: RedisServer) -> None:
    """All of it would have to be run on a Valkey to know whether any of it works there."""
    with Cache(valkey_server.url, local=True) as here, Cache(valkey_server.url) as there:
        assert here.get_or_compute("k", lambda: 1) == there.get_or_compute("k", lambda: 2) == 1
        until(lambda: here.get_or_compute("k", lambda: 2) and kept(here))
        there.set("k", 3)
        until(lambda: here.get_or_compute("k", lambda: 2) == 3)
        with here.lock("l"):
            assert not there.lock("l", wait=0).acquire()
        there.clear()
        until(lambda: here.get("k") is None)


# -- servers that tell of changes in another way ----------------------------------------------------------------------

OTHER = {"broadcast": (b"REDIRECT",), "published": (b"REDIRECT", b"BCAST")}
"""What a server refuses, and how a local tier hears of changes then."""


def without(*words: bytes) -> Callable[[bytes], bytes]:
    """What makes of these words such that the server doesn't know: it is the server itself that refuses them."""

    def forged(data: bytes) -> bytes:
        for word in words:
            data = data.replace(b"\r\n%b\r\n" % word, b"\r\n%b\r\n" % word.translate(UNKNOWN))
        return data

    return forged


UNKNOWN = bytes.maketrans(b"RB", b"XX")


@pytest.fixture
def for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is believed: only news can tell of a change."""
    monkeypatch.setattr("stampede.engines.redis.news.BELIEVED", 60.0)
    monkeypatch.setattr("stampede.engines.generations.KNOWN", 60.0)


def warm(face: Any, server: RedisServer, value: int = 1) -> None:
    """Until it is kept in the process, and all news are heard, also those of what this process has stored itself."""
    news = face.cache.engine._servers.news
    until(lambda: face("another", lambda: 0) == 0 and news.told)
    until(lambda: face("k", lambda: value) == value)
    before = news.stamps[0xFFFF]
    server.cli("SET", LAST, "")
    server.cli("PUBLISH", "{stampede}n", LAST)
    until(lambda: news.stamps[0xFFFF] != before)
    until(lambda: not asks(face, "k"))


LAST = "{ffff00000000000000000000}:"
"""A key that nobody asks for: who has heard of it has heard all that was said before."""


def asks(face: Any, key: str) -> bool:
    """Whether a hit asks the server."""
    before = face.count(events.Found)
    face(key, lambda: 0)
    return bool(face.count(events.Found) > before)


@pytest.mark.usefixtures("for_long")
@both
@pytest.mark.parametrize("how", list(OTHER))
def test_a_server_that_refuses_to_redirect(
    server: RedisServer, before: Before, face: Faces, how: str, colour: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing would be kept in the process, for ever, and nobody be told why; or it would be old."""
    proxy = before(server)
    proxy.forge = without(*OTHER[how])
    here, there = face(proxy.url, colour, local=True), face(server.url)
    with caplog.at_level("WARNING", "stampede"):
        warm(here, server)
    for value, change in enumerate((("set", "k", 2), ("expire", "k"), ("invalidate", "k")), start=2):
        there.run(*change)
        until(lambda: here("k", lambda: value) == value)
        warm(here, server, value)
    assert here.count(events.Untold) == 1
    assert len([record for record in caplog.records if "does not tell" in record.getMessage()]) == 1


@pytest.mark.parametrize("how", list(OTHER))
def test_a_fill_has_no_ticket_where_two_changes_may_be_told_as_one(
    server: RedisServer, before: Before, face: Faces, how: str
) -> None:
    """News of the fill and of a later change come together: the tier would believe that there was no later one."""
    proxy = before(server)
    proxy.forge = without(*OTHER[how])
    here = face(proxy.url, local=True)
    warm(here, server)
    claims, token, entry = here.cache.engine.blocking.claims, new_id(), Entry(b"", new_id(), ttl=60, fresh=60, keep=60)
    run(claims.claim("filled", token, Ask(60)))
    assert run(claims.fill("filled", token, entry)) is True


@pytest.mark.parametrize("how", list(OTHER))
def test_a_change_by_a_stranger(server: RedisServer, before: Before, face: Faces, how: str) -> None:
    """Of which only the server tells: it would never be seen where it doesn't."""
    proxy = before(server)
    proxy.forge = without(*OTHER[how])
    here = face(proxy.url, local=True)
    warm(here, server)
    server.cli("FLUSHALL")
    until(lambda: here("k", lambda: 2) == 2, 1.5)
    there = face(server.url)
    there.run("set", "k", 3)  # in the generation that is: the flush has ended the one before
    until(lambda: here("k", lambda: 0) == 3, 2.5)


def test_a_question_under_way_when_the_news_begin(server: RedisServer, before: Before) -> None:
    """What it has read may have been changed since: of that there were no news yet."""
    proxy, told, answered = before(server), threading.Event(), threading.Event()
    proxy.forge = without(b"REDIRECT")
    proxy.at(b"BCAST", before=told.wait)
    with closing(RedisEngine(proxy.url)) as engine, closing(RedisEngine(server.url)) as other:
        engine.follow()
        news, keys = engine._servers.news, engine.suspending.claims
        run(other.blocking.claims.set("k", entry()))

        async def scenario() -> None:
            while news.way == REDIRECTED:
                await keys.claim("k", new_id(), Ask(60.0))
            question = asyncio.create_task(keys.claim("k", new_id(), Ask(60.0)))
            proxy.at(b"EVALSHA", after=answered.wait)
            await asyncio.to_thread(until, lambda: proxy.met == 2)
            run(other.blocking.claims.set("k", entry()))
            told.set()
            await asyncio.to_thread(until, lambda: news.told)
            later = asyncio.create_task(keys.claim("k", new_id(), Ask(60.0)))
            await asyncio.sleep(0)
            answered.set()
            ticket = (await question).ticket
            assert ticket is None or ticket.stamps[ticket.slot] != ticket.stamp
            assert (await later).ticket is not None

        asyncio.run(scenario())


def entry() -> Entry[Any]:
    return Entry(b"value", new_id(), ttl=60.0, fresh=60.0, keep=60.0)


@pytest.mark.usefixtures("for_long")
@pytest.mark.parametrize("how", list(OTHER))
def test_a_clear_by_another(server: RedisServer, before: Before, face: Faces, how: str) -> None:
    """What is kept in the process is of an older generation, which nobody would know."""
    proxy = before(server)
    proxy.forge = without(*OTHER[how])
    here, there = face(proxy.url, local=True), face(server.url)
    warm(here, server)
    there.run("clear")
    until(lambda: here("k", lambda: 2) == 2)


@pytest.mark.usefixtures("for_long")
@both
def test_a_user_without_the_right(own: RedisServer, face: Faces, colour: str) -> None:
    """As a managed service gives them: without any of CLIENT's subcommands."""
    own.cli("ACL", "SETUSER", "shop", "on", ">secret", "~*", "&*", "+@all", "-client")
    here, there = face(f"redis://shop:secret@127.0.0.1:{own.port}/0", colour, local=True), face(own.url)
    warm(here, own)
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
    """Nobody would learn it before it costs something."""
    proxy = before(server)
    monkeypatch.chdir(tmp_path)
    Path("stampede.toml").write_text(f'[caches.default]\nurl = "{proxy.url}"\nlocal = true\n')
    for words, said in (((), None), ((b"REDIRECT",), "(BCAST)"), ((b"REDIRECT", b"BCAST"), "for a second")):
        proxy.forge = without(*words)
        assert main(["check"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert said in shown if said else "BCAST" not in shown and "for a second" not in shown


# -- servers that are many --------------------------------------------------------------------------------------------


def forgetful(data: bytes) -> bytes:
    """No script is ever called by a hash that the server knows."""
    return re.sub(rb"(EVALSHA\r\n\$40\r\n).", rb"\1z", data)


@both
def test_a_server_that_knows_no_script(server: RedisServer, before: Before, face: Faces, colour: str) -> None:
    """Behind one address there may be many, each of which knows what it was sent itself: calls would fail."""
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
    """A cluster of one server with all slots, as a service shows itself that is many behind it."""
    with closing(RedisCluster(masters=1)) as cluster:
        yield cluster


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
@both
def test_a_cluster_of_one(lonely: RedisCluster, face: Faces, scheme: str, colour: str) -> None:
    """Who takes it for one server, or for a cluster, would find no way to it, or be told of nothing."""
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
    lonely: RedisCluster, before: Before, face: Faces, scheme: str, colour: str
) -> None:
    """So a service speaks while it grows: the engine would be taken for down. (No server says so that is one: scripts
    are called whose words these are.)"""
    if is_redis_6() and scheme == "redis+cluster":
        missing("a Redis 6 that runs announces no other port than its own")
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
        asked.run("set", "k", 0)  # the server knows the scripts
        proxy.forge, left = forged, 2 if scheme == "redis" else 5
        asked.run("set", "k", 2)
        assert left == 0
        assert asked.run("get", "k") == 2
        assert asked.count(events.EngineDown) == 0
    finally:
        lonely.nodes[0].cli("CONFIG", "SET", "cluster-announce-port", "0")
