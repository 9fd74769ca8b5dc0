"""Who asks memcached and doesn't wait for the answer leaves nothing there: the stub that a claim has won goes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

pytest.importorskip("pymemcache")

from herd import Herd, until, until_async
from memcached_server import MemcachedServer, shared_memcached
from proxy import Proxy

from stampede import Cache
from stampede.colour import run_blocking
from stampede.engines.memcached import MemcachedEngine, meta, verbs
from stampede.engines.memcached import unheard as listening
from stampede.engines.memcached.unheard import unheard
from stampede.entry import Entry, new_id
from stampede.errors import EngineError
from stampede.ports import Ask, Asked, Granted

LONG = 60.0
TIMEOUT = 0.3
KEYS = [f"k{number}" for number in range(20)]

Before = Callable[[Any], Proxy]
Runs = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def server() -> MemcachedServer:
    server = shared_memcached()
    server.empty()
    return server


@pytest.fixture
def proxy(server: MemcachedServer, before: Before) -> Iterator[Proxy]:
    proxy = before(server)
    yield proxy
    proxy.heal()
    until(lambda: not len(unheard))


def at(proxy: Proxy) -> str:
    return f"127.0.0.1:{proxy.port}"


@pytest.fixture
def cache(proxy: Proxy) -> Iterator[Cache]:
    """Asked through the proxy, which it waits for in vain for a moment only."""
    with Cache(f"memcached://{at(proxy)}?timeout={TIMEOUT}&connect_timeout={TIMEOUT}", early=0) as cache:
        yield cache


@pytest.fixture(params=["asyncio", "uvloop"])
def runs(request: pytest.FixtureRequest) -> Runs:
    """A loop that has ended when this returns."""
    make = asyncio.new_event_loop if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=make) as runner:
            runner.run(work)

    return run


def are_free(server: MemcachedServer, *keys: str) -> None:
    """Who asks at once is not told that somebody computes."""
    with Cache(server.url, early=0) as other:
        for key in keys:
            assert other.get_or_compute(key, lambda: "other", wait=0) == "other"


def own(*_: object) -> str:
    return "own"


# -- a server that hangs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["alone", "together"])
def test_what_threads_asked_for_while_it_hung(server: MemcachedServer, proxy: Proxy, cache: Cache, asked: str) -> None:
    """When it comes to, it would grant all that was asked for meanwhile, to nobody: these keys stand still for 3 s."""
    together = threading.Barrier(len(KEYS))
    Herd(*[lambda key=key: cache.get_or_compute(f"warm {key}", together.wait) for key in KEYS]).join()
    proxy.hold()  # a connection stands for each of them
    if asked == "alone":
        assert Herd(*[lambda key=key: cache.get_or_compute(key, own, wait=0.1) for key in KEYS]).join() == ["own"] * 20
        until(lambda: len(unheard) == len(KEYS))
    else:
        cache.get_or_compute_many(KEYS, lambda keys: dict.fromkeys(keys, "own"), wait=0.1)
        until(lambda: len(unheard) == 1)
    proxy.let_go()
    until(lambda: not len(unheard))
    are_free(server, *KEYS)


def test_a_closed_cache_listens_for_a_moment_only(proxy: Proxy, cache: Cache) -> None:
    """Closing it would leave connections and a thread behind for a minute, as nobody knows whether its server hangs."""
    cache.get_or_compute("warm", own)
    proxy.hold()
    assert cache.get_or_compute("k", own, wait=0.1) == "own"
    until(lambda: len(unheard) == 1)
    (line,) = unheard._lines
    cache.close()
    until(lambda: not len(unheard), 10)
    assert line.sock.fileno() == -1


def test_what_tasks_asked_for_while_it_hung(server: MemcachedServer, proxy: Proxy, cache: Cache, runs: Runs) -> None:
    """The same of an event loop's."""

    async def main() -> None:
        await cache.aget_or_compute("warm", own)
        proxy.hold()
        await asyncio.gather(*[cache.aget_or_compute(key, own, wait=0.1) for key in KEYS])
        await until_async(lambda: len(unheard) == 1)

    runs(main())
    proxy.let_go()
    until(lambda: not len(unheard))
    are_free(server, *KEYS)


def test_what_tasks_asked_for_whose_loop_has_ended(
    server: MemcachedServer, proxy: Proxy, cache: Cache, runs: Runs
) -> None:
    """Where each request has a loop, one that runs out of time would lock what it has just asked for."""

    async def main() -> None:
        await cache.aget_or_compute("warm", own)
        proxy.hold()
        for key in KEYS:
            asking = asyncio.ensure_future(cache.aget_or_compute(key, own))
            await asyncio.wait([asking], timeout=0.01)

    runs(main())
    assert len(unheard) == 1
    proxy.let_go()
    until(lambda: not len(unheard))
    are_free(server, *KEYS)


# -- who is interrupted ---------------------------------------------------------------------------------------------


class _Stop(Exception):
    """A time limit's."""


@pytest.fixture
def stop(proxy: Proxy) -> Iterator[Callable[[bytes], None]]:
    """Have this thread interrupted when the next such question has been answered, and before it has heard that."""
    stopped, here = threading.Event(), threading.main_thread().ident
    assert here is not None

    def handler(number: int, frame: object) -> None:
        stopped.set()
        raise _Stop

    def interrupt() -> None:
        signal.pthread_kill(here, signal.SIGUSR1)
        stopped.wait(LONG)

    old = signal.signal(signal.SIGUSR1, handler)
    yield lambda needle: proxy.at(needle, after=interrupt)
    signal.signal(signal.SIGUSR1, old)


@pytest.mark.parametrize("asked", ["alone", "together"])
def test_who_is_interrupted_before_the_reply(
    server: MemcachedServer, cache: Cache, stop: Callable[[bytes], None], asked: str
) -> None:
    """After Ctrl-C, or a time limit, the key would be refused to everybody for 2 s."""
    cache.get_or_compute("warm", own)
    keys = KEYS[:1] if asked == "alone" else KEYS

    def ask() -> object:
        if asked == "alone":
            return cache.get_or_compute("k0", own)
        return cache.get_or_compute_many(KEYS, lambda keys: dict.fromkeys(keys, "own"))

    stop(b"mg s:")
    with pytest.raises(_Stop):
        ask()
    until(lambda: not len(unheard))
    are_free(server, *keys)


@pytest.mark.parametrize("colour", ["sync", "async", "batch"])
def test_who_is_interrupted_behind_the_reply(
    server: MemcachedServer, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply would have been read, and its lease noted nowhere."""
    engine, near = (MemcachedEngine(server.address, sign=LONG) for _ in range(2))

    def interrupt(*_: object) -> None:
        raise _Stop

    asked = "k0", new_id(), Ask(LONG)

    async def scenario() -> None:
        await engine.aclaims.claim(*asked)

    ask: dict[str, Callable[[], object]] = {
        "sync": lambda: run_blocking(engine.claims.claim(*asked)),
        "async": lambda: asyncio.run(scenario()),
        "batch": lambda: engine.many.ask_many([Asked("claim", asked)]),
    }
    monkeypatch.setattr(engine._owned, "put", interrupt)
    with pytest.raises(_Stop):
        ask[colour]()
    until(lambda: not len(unheard))
    assert isinstance(run_blocking(near.claims.claim("k0", new_id(), Ask(LONG))), Granted)
    engine.close()
    near.close()


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_who_is_interrupted_before_the_value_is_sent(
    server: MemcachedServer, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease would stand without a name on it, and nobody know its number any more: the key stood still for 3 s."""
    engine, token = MemcachedEngine(server.address, sign=LONG), new_id()
    entry = Entry(b"value", new_id(), ttl=LONG, fresh=LONG, keep=LONG)

    def interrupt(*_: object) -> None:
        raise _Stop

    async def scenario(claims: Any) -> None:
        assert isinstance(await claims.claim("k0", token, Ask(LONG)), Granted)
        monkeypatch.setattr(verbs, "_fits", interrupt)
        with pytest.raises(_Stop):
            await claims.fill("k0", token, entry)
        await claims.abandon("k0", token)
        assert isinstance(await claims.claim("k0", new_id(), Ask(LONG)), Granted)

    if colour == "sync":
        run_blocking(scenario(engine.claims))
    else:
        asyncio.run(scenario(engine.aclaims))
    engine.close()


# -- what is not to go ----------------------------------------------------------------------------------------------


def test_what_others_have_put_there_since_stays(server: MemcachedServer, proxy: Proxy, cache: Cache) -> None:
    """A reply that comes so late would cost a value, or somebody's lease, that has taken the stub's place."""
    near = MemcachedEngine(server.address)
    cache.get_or_compute("warm", own)
    given_up, holder = threading.Event(), new_id()

    def others() -> None:
        entry = Entry(b"value", new_id(), ttl=LONG, fresh=LONG, keep=LONG)
        run_blocking(near.store.set("k0", entry))
        run_blocking(near.claims.claim("k1", holder, Ask(LONG, force=True)))
        given_up.wait(LONG)

    engine = MemcachedEngine(at(proxy), timeout=TIMEOUT)
    run_blocking(engine.store.get(["warm"]))
    proxy.at(b"mg s:k1 ", after=others)
    asked = [("claim", (key, new_id(), Ask(LONG))) for key in ("k0", "k1")]
    answers = engine.many.ask_many([Asked(*each) for each in asked])
    assert all(isinstance(answer, EngineError) for answer in answers)
    assert len(unheard) == 1
    given_up.set()
    until(lambda: not len(unheard))
    (value,) = run_blocking(near.store.get(["k0"]))
    assert value is not None
    assert run_blocking(near.claims.renew("k1", holder, LONG))
    engine.close()
    near.close()


def test_whose_name_a_reply_tells_of() -> None:
    """A stub would be looked for under another name, where a value has the shape of a claim."""
    commands = [
        meta.look(b"s:a"),
        meta.claim(b"s:b"),
        meta.put(b"s:c", b"mg s:x t c f v N3\r\n", b"0", 0, b"7"),
        meta.add(b"s:d", b"", b"0", 3),
        meta.claim(b"s:e"),
        meta.delete(b"s:b", b"8"),
        b"mn\r\n",
    ]
    assert meta.claimed(b"".join(commands)) == [b"", b"s:b", b"", b"", b"s:e", b"", b""]


# -- for how long, and how many -------------------------------------------------------------------------------------


Ends = Callable[[], tuple[socket.socket, socket.socket]]


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Ends:
    """The server's end of a connection, and ours."""

    def made() -> tuple[socket.socket, socket.socket]:
        server, ours = socket.socketpair()
        request.addfinalizer(server.close)
        server.settimeout(LONG)
        return server, ours

    return made


def test_a_server_is_not_listened_to_for_ever(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to servers that never come back would pile up, and a thread would look at them for ever."""
    monkeypatch.setattr(listening, "LONGEST", 0.05)
    server, ours = ends()
    unheard.add(ours, [b"s:k"], [], b"")
    assert server.recv(1) == b""
    until(lambda: not len(unheard))
    monkeypatch.undo()
    monkeypatch.setattr(listening, "MOST", 2)
    pairs = [ends() for _ in range(3)]
    for _, ours in pairs:
        unheard.add(ours, [b"s:k"], [], b"")
    assert pairs[0][0].recv(1) == b""
    assert len(unheard) == 2
    for server, _ in pairs:
        server.close()
    until(lambda: not len(unheard))


def test_a_reply_in_pieces_behind_others(ends: Ends) -> None:
    """What was won would not be seen, or another's number be taken for it."""
    server, ours = ends()
    first = meta.Reply(b"EN")
    unheard.add(ours, [b"", b"s:a", b"s:b", b"s:c"], [first], b"VA 0 t3 c5 f0 W\r\n\r\nVA 3 t1 c6 ")
    server.sendall(b"f0\r\nxyz\r\nVA 0 t3 c")
    server.sendall(b"7 f0 W\r\n\r\n")
    assert server.recv(100) == meta.delete(b"s:a", b"5") + meta.delete(b"s:c", b"7")
    assert len(unheard) == 1
    server.sendall(b"HD\r\nEX\r\n")
    assert server.recv(1) == b""
    until(lambda: not len(unheard))


def test_nothing_is_said_behind_half_a_question(ends: Ends) -> None:
    """Where not all has been sent, a command more would be taken for its rest: for the bytes of a value."""
    server, ours = ends()
    unheard.add(ours, [b"s:a", b"s:b"], [], b"VA 0 t3 c5 f0 W\r\n\r\n")
    until(lambda: unheard._lines and len(unheard._lines[0]._replies) == 1)
    server.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
    until(lambda: not len(unheard))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_them_to_its_parent(ends: Ends) -> None:
    """Both would read from one connection, and neither make sense of it."""
    server, ours = ends()
    unheard.add(ours, [b"s:a"], [], b"")
    child = os.fork()
    if child == 0:
        os._exit(len(unheard) or (0 if ours.fileno() < 0 else 9))
    assert os.waitpid(child, 0)[1] == 0
    server.sendall(b"VA 0 t3 c5 f0 W\r\n\r\n")
    assert server.recv(100) == meta.delete(b"s:a", b"5")
    server.close()
    until(lambda: not len(unheard))
