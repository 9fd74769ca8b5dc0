"""Locks on ZooKeeper: the order of waiters, and what remains of killed servers and holders."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import cache, partial
from typing import Any

import pytest

pytest.importorskip("kazoo")

from disk_world import Connection, other
from herd import Herd, until
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from proxy import Proxy
from server_process import PATIENCE
from servers import Authority
from zookeeper_server import ZooKeeperEnsemble, ZooKeeperServer, shared_zookeeper

from stampede import Cache, EngineError, Lock, LockLost, LockTimeout
from stampede.engines import check_url
from stampede.engines.zookeeper import ZooKeeperEngine, from_url
from stampede.errors import EngineClosed, OptionError
from stampede.model.entry import new_id
from stampede.model.ports import Busy, Granted
from stampede.runtime.colour import run_blocking as run

LEASE = 3.0


@pytest.fixture
def open_(request: pytest.FixtureRequest) -> Callable[..., ZooKeeperEngine]:
    def opened(url: str = "") -> ZooKeeperEngine:
        url = url or shared_zookeeper().url
        engine = from_url(url if "?" in url else f"{url}?timeout={PATIENCE}")
        request.addfinalizer(engine.close)
        return engine

    return opened


Open = Callable[..., ZooKeeperEngine]


def waiting(engine: ZooKeeperEngine) -> int:
    (held,) = run(engine.blocking.locks.held())
    assert held.pid == os.getpid()
    return held.waiting


def test_a_server_that_hangs_keeps_nobody_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` does not wait for a frozen server, even if no thread can be started, as at the end of a program."""
    with closing(ZooKeeperServer()) as server:
        engine = from_url(server.url, timeout=PATIENCE)
        with Lock("l", on=engine, lease=LEASE):
            pass
        monkeypatch.setattr("stampede.engines.zookeeper.session.begun", lambda *_: None)
        server.freeze()
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 5
        server.thaw()
        for session in engine._sessions._sessions.values():
            session._end()


def test_a_release_wakes_the_next_one(open_: Open) -> None:
    """A release wakes only the next waiter, in the order of arrival. Fences grow."""
    shared_zookeeper().empty()
    holder, crowd, order = open_(), [open_() for _ in range(3)], list[int]()
    lock = Lock("l", on=holder)
    assert lock.acquire()
    herd = []
    for number, engine in enumerate(crowd):

        def visit(number: int = number, engine: ZooKeeperEngine = engine) -> int | None:
            with Lock("l", on=engine, wait=20) as mine:
                order.append(number)
                return mine.fence

        herd.append(Herd(visit))
        until(lambda number=number: waiting(holder) == number + 1)
    fences = [lock.fence]
    lock.release()
    fences += [fence for each in herd for fence in each.join()]
    assert order == [0, 1, 2]
    assert fences == sorted(set(fences))  # type: ignore[type-var]


@pytest.mark.parametrize("lost", ["question", "answer"])
@pytest.mark.parametrize("step", ["acquire", "release"])
def test_a_cut_connection_leaves_no_contender(open_: Open, step: str, lost: str) -> None:
    """A node whose creation or removal got no reply is removed. Otherwise it would remain until its process ends."""
    shared_zookeeper().empty()
    proxy = Proxy(shared_zookeeper().port)
    try:
        engine, far = open_(f"zookeeper://127.0.0.1:{proxy.port}"), open_()
        with Lock("l", on=engine):
            pass  # there is a session, and the lock's node
        token = new_id()
        if step == "release":
            assert isinstance(run(engine.blocking.locks.acquire("l", token, LEASE)), Granted)
        proxy.at(token.hex().encode(), **({"sent": 0} if lost == "question" else {"answered": 0}))  # type: ignore[arg-type]
        locks = engine.blocking.locks
        with pytest.raises(EngineError):
            run(locks.acquire("l", token, LEASE) if step == "acquire" else locks.release("l", token))  # type: ignore[type-var]
        until(lambda: run(far.blocking.locks.holder("l")) == [])
        assert isinstance(run(far.blocking.locks.acquire("l", new_id(), LEASE)), Granted)
        assert not any(each.dead for each in engine._sessions._sessions.values())  # and no session was ended for that
    finally:
        proxy.close()


def hold(pipe: Connection, url: str) -> None:
    """Take the lock, and report it."""
    lock = Lock("l", on=from_url(url, timeout=PATIENCE), lease=1.0)
    assert lock.acquire()
    pipe.send(lock.fence)
    pipe.recv()


def test_a_killed_holder_blocks_nobody_beyond_its_session(open_: Open) -> None:
    """The lock of a killed holder is free when its session ends."""
    shared_zookeeper().empty()
    engine = open_()
    with other(hold, shared_zookeeper().url) as one:
        old = one.hear()
        assert isinstance(run(engine.blocking.locks.acquire("l", new_id(), LEASE)), Busy)
        one.kill()
        with Lock("l", on=engine, wait=20) as lock:
            assert lock.fence > old


def test_a_forked_child_has_a_session_of_its_own(open_: Open) -> None:
    """A forked child uses a session of its own. It must not use or end the connection of its parent."""
    shared_zookeeper().empty()
    engine = open_()
    token = new_id()
    assert isinstance(run(engine.blocking.locks.acquire("l", token, LEASE)), Granted)
    pid = os.fork()
    if pid == 0:
        try:
            busy = isinstance(run(engine.blocking.locks.acquire("l", new_id(), LEASE)), Busy)
            mine = isinstance(run(engine.blocking.locks.acquire("other", new_id(), LEASE)), Granted)
            os._exit(0 if busy and mine else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run(engine.blocking.locks.renew("l", token, LEASE))
    assert run(engine.blocking.locks.release("l", token))


def test_a_lock_is_not_extended_beyond_its_session(open_: Open) -> None:
    """A lease can't be extended beyond its session: its holder would rely on it after the servers have ended it."""
    shared_zookeeper().empty()
    engine, token = open_(), new_id()
    assert isinstance(run(engine.blocking.locks.acquire("l", token, 1.0)), Granted)
    with pytest.raises(EngineError, match="session="):
        run(engine.blocking.locks.renew("l", token, 60.0))
    assert run(engine.blocking.locks.renew("l", token, 1.0))
    assert run(engine.blocking.locks.release("l", token))


def test_a_lease_that_no_session_outlasts_is_refused(open_: Open) -> None:
    """A lease that no session can outlast is refused."""
    with pytest.raises(EngineError, match="maxSessionTimeout"):
        run(open_().blocking.locks.acquire("l", new_id(), 1000.0))


@pytest.mark.parametrize("url", ["zookeeper://", "zookeeper://h?timeout=0", "zookeeper://h?key=k", "zookeeper://h:x"])
def test_bad_urls(url: str) -> None:
    """Wrong URLs are refused at once, before they are used in production."""
    with pytest.raises(OptionError):
        check_url(url)


def below(session: KazooClient, path: str) -> Iterator[str]:
    yield path
    for each in session.get_children(path):
        yield from below(session, f"{path}/{each}")


def test_what_has_a_password_is_nobody_else_s(open_: Open) -> None:
    """With a password, other clients of the servers can neither read the values nor take or break the locks."""
    server = shared_zookeeper()
    own, same = (open_(f"zookeeper://us:it%3As@127.0.0.1:{server.port}/theirs") for _ in range(2))
    strangers = [
        open_(f"zookeeper://{login}127.0.0.1:{server.port}/theirs") for login in ("", "us:other@", "you:it%3As@")
    ]
    lock = Lock("l", on=own)
    with closing(KazooClient(f"127.0.0.1:{server.port}", auth_data=[("digest", "us:it:s")])) as owner:
        owner.start(PATIENCE)
        try:
            with Cache(own) as cache, lock:
                cache.set("k", 1)
                assert Cache(same).get("k") == 1
                assert [token for token, _ in run(same.blocking.locks.holder("l"))] == [lock.token]
                for each in strangers:
                    for act in (
                        lambda each=each: Lock("l", on=each).acquire(),
                        lambda each=each: Lock("another", on=each).acquire(),
                        lambda each=each: run(each.blocking.locks.holder("l")),
                    ):
                        with pytest.raises(EngineError, match="NoAuth"):
                            act()
                with closing(KazooClient(f"127.0.0.1:{server.port}")) as nobody:
                    nobody.start(PATIENCE)
                    for path in below(owner, "/theirs"):
                        for verb in (nobody.get, nobody.get_children, nobody.delete, nobody.get_acls):
                            if (verb, path) != (nobody.delete, "/theirs"):  # that needs rights at the root
                                with pytest.raises(NoAuthError):
                                    verb(path)
                        with pytest.raises(NoAuthError):
                            nobody.set(path, b"mine")
                        with pytest.raises(NoAuthError):
                            nobody.create(f"{path}/mine")
                    nobody.stop()
                assert lock.held
            with Lock("l", on=same) as mine:
                assert mine.held
        finally:
            owner.delete("/theirs", recursive=True)
            owner.stop()


@pytest.mark.filterwarnings("ignore:unclosed <ssl:ResourceWarning")  # kazoo drops refused connections
def test_over_tls(open_: Open) -> None:
    """Both sides verify certificates. A client without a signed certificate, or with another authority, is refused."""
    its, engines = Authority(), list[ZooKeeperEngine]()

    def opened(url: str) -> ZooKeeperEngine:
        engines.append(open_(url))
        return engines[-1]

    with closing(ZooKeeperServer(authority=its)) as server:
        place = f"zookeeper://127.0.0.1:{server.port}?timeout=10"
        whole = f"{place}&ca={its.ca}&cert={its.certificate}&key={its.key}"
        with Lock("l", on=opened(whole), lease=10.0) as lock:
            assert run(opened(whole).blocking.locks.holder("l"))[0][0] == lock.token
        other_authority = Authority()
        for wrong in (place, f"{place}&ca={its.ca}", whole.replace(its.ca, other_authority.ca)):
            with pytest.raises(EngineError, match="no server"):
                run(opened(wrong.replace("timeout=10", "timeout=0.5")).blocking.locks.acquire("l", new_id(), 1.0))
        for engine in engines:  # before their server ends, or they would reconnect and leave sockets
            engine.close()
        until(lambda: not any(each.name == "stampede-zookeeper-end" for each in threading.enumerate()))
    gc.collect()


def _visit(engine: ZooKeeperEngine) -> bool:
    with Lock("l", on=engine, wait=20) as lock:
        return lock.held


@pytest.mark.parametrize("suspending", [False, True])
def test_close_wakes_who_waits_and_leaves_nothing(open_: Open, suspending: bool) -> None:
    """`close` wakes the waiters of its engine with an error, and removes their places: waiters behind them move up."""
    shared_zookeeper().empty()
    holder, engine, behind = open_(), open_(), open_()
    lock = Lock("l", on=holder)
    assert lock.acquire()

    async def enter() -> bool:
        async with Lock("l", on=engine, wait=60):
            return True

    first = Herd(*[(lambda: asyncio.run(enter())) if suspending else (lambda: _visit(engine))] * 3)
    until(lambda: waiting(holder) == 3)
    last = Herd(lambda: _visit(behind))
    until(lambda: waiting(holder) == 4)
    engine.close()
    assert [type(each) for each in first.join()] == [EngineClosed] * 3
    until(lambda: waiting(holder) == 1)  # before their session would time out, after 33 s
    lock.release()
    assert last.join() == [True]


def test_close_gives_back_what_is_held(open_: Open) -> None:
    """`close` releases the locks of its engine, so waiters need not wait for the end of its session."""
    shared_zookeeper().empty()
    engine, far = open_(), open_()
    assert isinstance(run(engine.blocking.locks.acquire("l", new_id(), 60.0)), Granted)
    waiter = Herd(lambda: _visit(far))
    until(lambda: waiting(engine) == 1)
    engine.close()
    assert waiter.join() == [True]


_ensemble = cache(partial(ZooKeeperEnsemble, 500))
"""Three servers. Their leader asks for signs of life so rarely that a lock can be taken between two of them."""


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_locks_outlive_the_leader(open_: Open, how: str) -> None:
    """A lock survives the loss of the leader, and remains exclusive. A holder that is connected only to the lost leader
    loses its lock and learns of it."""
    ensemble = _ensemble()
    leader = ensemble.leader()
    followers = [each for each in ensemble.members if each is not leader]
    theirs = "zookeeper://" + ",".join(each.url[12:] for each in followers)
    holder, waiter, cut_off = open_(f"{theirs}?timeout=3"), open_(f"{theirs}?timeout=10"), open_(leader.url)
    lock, own_lock = Lock("l", on=holder, lease=20.0), Lock("m", on=cut_off, lease=LEASE)
    assert lock.acquire() and own_lock.acquire()
    fences, hold = [lock.fence, own_lock.fence], own_lock._last.hold  # type: ignore[union-attr]

    def visit(name: str) -> Any:
        with Lock(name, on=waiter, lease=10.0, wait=30) as mine:
            return mine.fence, hold.lost  # type: ignore[union-attr]

    herds = [Herd(partial(visit, name)) for name in ("l", "m")]
    until(lambda: [each.waiting for each in run(holder.blocking.locks.held())] == [1, 1])
    own = holder._steps._owned["l", lock.token]  # type: ignore[index]
    if how == "frozen":
        leader.freeze()
    else:
        leader.stop()
    began = time.monotonic()
    try:
        with suppress(EngineError):  # without a leader, a follower does not know which sessions have ended
            assert not run(holder.blocking.locks.renew("l", lock.token, 20.0)) or any(each.leads for each in followers)
        until(lambda: own.end > began + 20.0)
        assert lock.held
        assert herds[0].waiting
        lock.release()
        ((fence, _),) = herds[0].join()
        ((other_fence, lost),) = herds[1].join()
    finally:
        if how == "frozen":
            leader.thaw()
        else:
            leader.start()
    assert lost
    assert fence > fences[0] and other_fence > fences[1]
    with pytest.raises(LockLost):
        own_lock.release()


def come_back(pipe: Connection, url: str, lease: float) -> None:
    """Take the lock and release it. When told to, take it again, and send the time at which its lease ends."""
    lock = Lock("l", on=from_url(url, timeout=PATIENCE), lease=lease)
    with lock:
        pass
    pipe.send(None)
    pipe.recv()
    assert lock.acquire()
    pipe.send(lock._last.hold.ends)  # type: ignore[union-attr]
    pipe.recv()


@pytest.mark.parametrize("lease, silence, frozen", [(7.0, 2.2, False), (2.0, 3.9, True)], ids=["idle", "frozen"])
def test_a_lock_that_only_a_follower_knows_of_stands(open_: Open, lease: float, silence: float, frozen: bool) -> None:
    """A follower is cut off after it granted a lock, before the leader asked it for signs of life. The lock must not be
    granted to another while its holder relies on it."""
    ensemble = _ensemble()
    leader = ensemble.leader()
    follower = next(each for each in ensemble.members if each is not leader)
    engine = open_(leader.url)
    with Lock("l", on=engine, lease=1.0):
        pass
    with other(come_back, follower.url, lease) as one:
        one.hear()
        if frozen:
            one.freeze()
        time.sleep(silence)  # nothing happens in this time
        if frozen:
            one.thaw()
        one.tell()
        believed = one.hear()
        follower.freeze()
        try:
            with suppress(LockTimeout), Lock("l", on=engine, wait=max(believed - time.monotonic(), 0)):
                assert time.monotonic() >= believed
        finally:
            follower.thaw()


def test_a_holder_leaves_a_server_that_is_silent(open_: Open) -> None:
    """A holder changes to another server if its own becomes silent with the connection still open."""
    shared_zookeeper().empty()
    proxies = [Proxy(shared_zookeeper().port) for _ in range(2)]
    engine = open_("zookeeper://" + ",".join(f"127.0.0.1:{each.port}" for each in proxies) + "?timeout=4")
    lock = Lock("l", on=engine, lease=10.0)
    try:
        with lock:
            (used,) = (each for each in proxies if each.accepted)
            hold = lock._last.hold  # type: ignore[union-attr]
            used.hold()
            silent = time.monotonic()
            until(lambda: hold.lost or hold.ends > silent + 10.0)  # a later renewal has been answered
            assert not hold.lost
    finally:
        for each in proxies:
            each.close()


@pytest.mark.parametrize("how", ["silent", "unreachable"])
def test_one_server_that_does_not_answer_keeps_nobody_from_the_others(open_: Open, how: str) -> None:
    """A new process must not spend its whole timeout on one server that does not answer."""
    shared_zookeeper().empty()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, ExitStack() as stack:
        port = silent.getsockname()[1]
        if how == "unreachable":  # its backlog is full: it does not answer new connections
            for _ in range(4):
                full = stack.enter_context(socket.socket())
                full.setblocking(False)
                full.connect_ex(("127.0.0.1", port))
        url = f"zookeeper://127.0.0.1:{port},127.0.0.1:{shared_zookeeper().port}?timeout=4"
        engines = [open_(url) for _ in range(5)]  # each tries the servers in a random order
        herd = Herd(*[partial(run, each.blocking.locks.acquire("l", new_id(), 30.0)) for each in engines])
        assert sorted(isinstance(each, Granted) for each in herd.join()) == [False] * 4 + [True]


def test_a_reply_to_another_question_is_an_engine_error() -> None:
    """A reply with a wrong number is an EngineError, not kazoo's RuntimeError. The session keeps its other locks."""
    proxy, spoilt = Proxy(shared_zookeeper().port), []

    def spoil(piece: bytes) -> bytes:
        size, xid = struct.unpack(">ii", piece[:8]) if len(piece) > 20 else (0, 0)
        if spoilt or not 0 < xid < 2**20 or len(piece) != size + 4:
            return piece
        spoilt.append(piece)
        return piece[:4] + struct.pack(">i", xid + 1) + piece[8:]

    url = f"zookeeper://127.0.0.1:{proxy.port}?timeout={PATIENCE}"
    with closing(proxy), closing(from_url(url)) as engine, Lock("kept", on=engine, wait=PATIENCE) as kept:
        proxy.alter = spoil
        while not spoilt:
            with suppress(EngineError):  # requests whose replies do not matter raise nothing
                run(engine.blocking.locks.release("odd", new_id()))
                run(engine.blocking.locks.acquire("odd", new_id(), 1.0))  # if it is granted, its lease has to end first
        with Lock("odd", on=engine, wait=PATIENCE):
            assert kept.held
