"""Faults that only memcached has: it refuses connections, is too old, or has no room for a value."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("pymemcache")

import both_colours
from both_colours import LONG, Number, never
from herd import Herd, Origin, until
from memcached_server import MemcachedServer, shared_memcached
from proxy import Proxy
from servers import free_port

from stampede import EngineError, events
from stampede.model.entry import new_id

CROWD = 20


class Face(both_colours.Face):
    """A cache on memcached."""

    def __init__(self, address: str, colour: str = "sync", **options: Any) -> None:
        breakers = "stampede.outages.outage", "stampede.engines.memcached.servers"
        super().__init__(f"memcached://{address}", colour, breakers=breakers, **options)


@pytest.fixture
def own() -> Iterator[MemcachedServer]:
    """A server that the test may do anything to."""
    mine = MemcachedServer("-c", str(CROWD))
    yield mine
    mine.close()


Faces = Callable[..., Face]
Before = Callable[[MemcachedServer], Proxy]


def at(proxy: Proxy) -> str:
    return f"127.0.0.1:{proxy.port}"


# -- troubles that begin and end ------------------------------------------------------------------------------------


@contextmanager
def refusing(server: MemcachedServer, proxy: Proxy) -> Iterator[None]:
    """During the block, the server has its maximum number of connections and refuses others."""
    proxy.cut()
    with ExitStack() as crowd:
        welcome = b"VERSION"
        while welcome.startswith(b"VERSION"):
            line = crowd.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            line.sendall(b"version\r\n")
            welcome = line.recv(100)
        yield


def test_a_server_that_refuses_is_no_outage(own: MemcachedServer, before: Before, face: Faces, colour: str) -> None:
    """If the server refuses connections, a herd computes once, changes raise, and the cache recovers by itself."""
    proxy, warm, origin = before(own), Number(), Number(0.02)
    asked = face(at(proxy), colour, local=True)
    assert [asked("warm", warm) for _ in range(3)] == [1, 1, 1]
    with refusing(own, proxy):
        assert asked.herd(8, "k", origin) == [1] * 8
        assert [asked("k", origin) for _ in range(3)] == [1] * 3
        assert origin.calls == 1
        assert asked.count(events.EngineDown) == 1
        with pytest.raises(EngineError):
            asked.invalidate("k")
        assert asked("k", origin) == 2  # the value is gone in this process
        with pytest.raises(EngineError):
            asked.lock("l")
    until(lambda: asked(new_id().hex(), Number()) and asked.count(events.EngineUp))
    asked.invalidate("k")
    assert asked("k", lambda: "stored") == "stored"
    assert asked.lock("l")


def test_what_was_cleared_meanwhile_is_gone_with_the_first_answer(
    before: Before, face: Faces, monkeypatch: pytest.MonkeyPatch, colour: str
) -> None:
    """After an outage, the generation is read again. Otherwise values that others have cleared would be served."""
    monkeypatch.setattr("stampede.engines.kit.generations.KNOWN", LONG)
    server = shared_memcached()
    server.empty()
    proxy = before(server)
    asked, other = face(at(proxy), colour), face(server.address)
    asked.run("set", "k", "old")
    assert asked("k", never) == "old"
    proxy.target = free_port()
    proxy.cut()
    assert asked("k", lambda: "new") == "new" and asked.down
    other.run("clear")
    proxy.target = server.port
    until(lambda: asked("k", lambda: "new") == "new" and asked.count(events.EngineUp))
    assert asked("k", lambda: "new") == "new"


# -- what it does not keep ------------------------------------------------------------------------------------------


def test_a_value_that_is_too_large_is_told_and_given(face: Faces, colour: str) -> None:
    """The caller gets a value that is too large to store, the failure is reported, and waiters do not wait for it."""
    server = shared_memcached()
    server.empty()
    large, origin = "x" * (1 << 20), Origin()
    holder, waiter = face(server.address, colour), face(server.address)

    def compute() -> str:
        origin()
        return large

    holding = Herd(lambda: holder.herd(2, "k", compute))
    origin.has_begun()
    before = server.commands()
    waiting = Herd(lambda: waiter("k", lambda: "mine"))
    until(lambda: server.commands() > before + 4)  # generation, claim, a look; and the holder's signature
    origin.let_on()
    assert holding.join() == [[large] * 2]
    assert waiting.join() in ([large], ["mine"])
    assert holder.count(events.Unkept) == 1
    assert holder("k", lambda: "small") == "small"
    assert waiter("k", never) == "small"


# -- an older server ------------------------------------------------------------------------------------------------


@pytest.fixture
def old_server() -> Iterator[str]:
    """The address of a server that claims to be memcached 1.6.12, and answers all other commands with ERROR."""
    door = socket.create_server(("127.0.0.1", 0))

    def serve(line: socket.socket) -> None:
        with suppress(OSError), line:
            while told := line.recv(4096):
                line.sendall(b"VERSION 1.6.12\r\n" if told.startswith(b"version") else b"ERROR\r\n")

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(door.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{door.getsockname()[1]}"
    door.close()


def test_an_older_server_is_said_to_be_one(
    old_server: str, face: Faces, colour: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If the server is too old, the log and the errors name its version and the version that is needed."""
    asked = face(old_server, colour)
    with caplog.at_level(logging.WARNING, "stampede"):
        assert asked("k", lambda: "computed") == "computed"
    assert "memcached 1.6.12: stampede needs 1.6.13 or newer" in caplog.text
    with pytest.raises(EngineError, match=r"1\.6\.12.* needs 1\.6\.13 or newer"):
        asked.invalidate("k")
    with pytest.raises(EngineError, match=r"1\.6\.12.* needs 1\.6\.13 or newer"):
        asked.lock("l")


# -- batches --------------------------------------------------------------------------------------------------------


def test_batches(face: Faces, colour: str) -> None:
    """A batch computes only keys that are missing and that no other caller computes. A failure leaves no leases."""
    server = shared_memcached()
    server.empty()
    asked, other = face(server.address, colour), face(server.address)
    keys = [f"k{number}" for number in range(50)]
    other("k7", lambda: "there")
    loaded: list[list[str]] = []

    def fails(missing: list[str]) -> dict[str, str]:
        raise ValueError

    def load(missing: list[str]) -> dict[str, str]:
        loaded.append(sorted(missing))
        return {key: key for key in missing if key != "k9"}

    with pytest.raises(ValueError):
        asked.many(keys, fails)
    origin = Origin()
    holding = Herd(lambda: other("k8", origin))
    origin.has_begun()
    letting_on = threading.Timer(0.1, origin.let_on)
    letting_on.start()
    got = asked.many(keys, load)
    assert got == {key: key for key in keys if key != "k9"} | {"k7": "there", "k8": 1}
    assert loaded == [sorted(set(keys) - {"k7", "k8"})]
    assert holding.join() == [1]
    assert other("k9", lambda: "left out", wait=0) == "left out"
    assert asked.many(keys, lambda _: never()) == got | {"k9": "left out"}
