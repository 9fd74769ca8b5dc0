"""Servers that differ from the machine's own; `make matrix` runs all tests of the engine on some of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from faces import Face
from herd import until
from proxy import Proxy
from servers import RedisServer, valkey

from stampede import Cache, events

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


def warm(face: Any, key: str = "k", value: int = 1) -> None:
    """Until it is kept in the process, and news of it are heard."""
    news = face.cache.engine._servers.news
    until(lambda: face("another", lambda: 0) == 0 and news.told)
    until(lambda: face(key, lambda: value) == value and kept(face.cache) and not asks(face, key))


def asks(face: Any, key: str) -> bool:
    """Whether a hit asks the server."""
    before = face.count(events.Found)
    face(key, lambda: 0)
    return bool(face.count(events.Found) > before)


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
        warm(here)
    for value in (2, 3):
        there.run("set", "k", value)
        start = time.monotonic()
        until(lambda: here("k", lambda: 0) == value)
        assert time.monotonic() - start < 0.5  # by news: what was kept would have been believed for longer
        warm(here, value=value)
    there.invalidate("k")
    until(lambda: here("k", lambda: 4) == 4)
    assert here.count(events.Untold) == 1
    assert len([record for record in caplog.records if "does not tell" in record.getMessage()]) == 1


@pytest.mark.parametrize("how", list(OTHER))
def test_a_change_by_a_stranger(server: RedisServer, before: Before, face: Faces, how: str) -> None:
    """Of which only the server tells: it would never be seen where it doesn't."""
    proxy = before(server)
    proxy.forge = without(*OTHER[how])
    here = face(proxy.url, local=True)
    warm(here)
    server.cli("FLUSHALL")
    until(lambda: here("k", lambda: 2) == 2, 1.5)


@pytest.mark.parametrize("how", list(OTHER))
def test_a_clear_by_another(server: RedisServer, before: Before, face: Faces, how: str) -> None:
    """What is kept in the process is of an older generation, which nobody would know."""
    proxy = before(server)
    proxy.forge = without(*OTHER[how])
    here, there = face(proxy.url, local=True), face(server.url)
    warm(here)
    there.run("clear")
    start = time.monotonic()
    until(lambda: here("k", lambda: 2) == 2)
    assert time.monotonic() - start < 0.5


@both
def test_a_user_without_the_right(own: RedisServer, face: Faces, colour: str) -> None:
    """As a managed service gives them: without any of CLIENT's subcommands."""
    own.cli("ACL", "SETUSER", "shop", "on", ">secret", "~*", "&*", "+@all", "-client")
    here, there = face(f"redis://shop:secret@127.0.0.1:{own.port}/0", colour, local=True), face(own.url)
    warm(here)
    there.run("set", "k", 2)
    start = time.monotonic()
    until(lambda: here("k", lambda: 0) == 2)
    assert time.monotonic() - start < 0.5
    assert here.count(events.Untold) == 1
