"""Locks on etcd: their cost, their order, and what a lost request leaves behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from typing import Any
from urllib.error import HTTPError

import pytest

pytest.importorskip("urllib3")

from etcd_server import EtcdServer, shared_etcd
from herd import PATIENCE, Herd, until
from proxy import Proxy
from servers import Authority

from stampede import Cache, EngineError, Lock, LockLost, LockTimeout
from stampede.engines import check_url
from stampede.engines.etcd import EtcdEngine, from_url, lock_steps, watches
from stampede.engines.etcd.gateway import b64
from stampede.errors import EngineClosed, OptionError
from stampede.model.entry import new_id
from stampede.model.ports import Busy, Granted
from stampede.runtime.colour import run_blocking as run

LONG = 600.0


@pytest.fixture
def server() -> EtcdServer:
    shared_etcd().empty()
    return shared_etcd()


@pytest.fixture
def open_(request: pytest.FixtureRequest, server: EtcdServer) -> Callable[..., EtcdEngine]:
    """Opens engines as different processes would, and closes them at the end."""

    def opened(url: str = "", **options: Any) -> EtcdEngine:
        engine = from_url(url or server.url, **{"timeout": PATIENCE, **options})
        request.addfinalizer(engine.close)
        return engine

    return opened


Open = Callable[..., EtcdEngine]


@pytest.fixture
def proxy(server: EtcdServer) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


def asked_of(engine: EtcdEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that go to the server from now on."""
    asked: list[str] = []
    tried = engine._gateway._tried

    def counted(member: Any, path: str, *args: Any, **terms: Any) -> Any:
        asked.append(path.rpartition("/")[2])
        return tried(member, path, *args, **terms)

    monkeypatch.setattr(engine._gateway, "_tried", counted)
    return asked


def keys(server: EtcdServer) -> int:
    return int(server.ask("/v3/kv/range", key="AA==", range_end="AA==", count_only=True).get("count", 0))


def entered(engine: EtcdEngine, name: str = "l") -> bool:
    """Whether a waiter gets the lock."""
    with Lock(name, on=engine, wait=LONG) as lock:
        return lock.held


def taken(engine: EtcdEngine, token: bytes = b"", *, waits: bool = False, room: float = 1) -> Granted | Busy:
    return run(engine.blocking.locks.acquire("l", token or new_id(), LONG, waits=waits, room=room))


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_to_take_a_lock_and_give_it_back_is_two_round_trips(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking and releasing a lock takes two round trips. Each additional one would cost a commit to most disks."""
    engine = open_()
    with Lock("l", on=engine, lease=LONG):
        pass
    asked = asked_of(engine, monkeypatch)
    for wait in (0, 1):
        with Lock("l", on=engine, lease=LONG, wait=wait):
            pass
    assert asked == ["txn", "deleterange"] * 2
    token = new_id()
    assert isinstance(taken(engine, token), Granted)
    assert run(engine.blocking.locks.release("l", token))
    asked.clear()
    assert isinstance(taken(engine, token), Granted)
    assert run(engine.blocking.locks.renew("l", token, LONG))
    assert not isinstance(taken(engine), Granted)
    assert asked == ["txn", "keepalive", "grant", "txn"]  # two callers at once, so that there are two leases


def test_a_release_wakes_one(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release wakes one waiter. If all waiters asked at each release, a thousand would ask a million times."""
    monkeypatch.setattr(lock_steps, "SAFETY", LONG)
    holder, crowd = open_(), [open_() for _ in range(6)]
    asked = [asked_of(each, monkeypatch) for each in crowd]
    lock, order = Lock("l", on=holder), list[int]()
    assert lock.acquire()
    herd = []
    for number, engine in enumerate(crowd):

        def visit(number: int = number, engine: EtcdEngine = engine) -> None:
            with Lock("l", on=engine, lease=LONG):
                order.append(number)

        herd.append(Herd(visit))
        until(lambda number=number: len(run(holder.blocking.locks.held())) == 1 and waiting(holder) == number + 1)
    until(lambda: all(engine._steps.queue("l").updated for engine in crowd))
    lock.release()
    assert [each.join() for each in herd] == [[None]] * 6
    assert order == list(range(6))
    # It takes a place, reads and watches the queue, and releases. It does not ask whether it is its turn.
    assert asked == [["grant", "txn", "range", "watch", "deleterange"]] * 6


def waiting(engine: EtcdEngine) -> int:
    (held,) = run(engine.blocking.locks.held())
    return held.waiting


def test_many_of_one_process_take_turns(server: EtcdServer, open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and tasks of one engine, and those of another engine, enter one at a time, in the order of the fences."""
    monkeypatch.setattr(lock_steps, "SAFETY", LONG)
    near, far, inside, entered = open_(), open_(), list[int](), list[int]()

    def enter(engine: EtcdEngine) -> None:
        for _ in range(3):
            with Lock("l", on=engine, wait=LONG) as lock:
                inside.append(1)
                assert len(inside) == 1
                entered.append(lock.fence or 0)
                inside.pop()

    async def aenter() -> None:
        async with Lock("l", on=near, wait=LONG) as lock:
            inside.append(1)
            await asyncio.sleep(0)
            assert len(inside) == 1
            entered.append(lock.fence or 0)
            inside.pop()

    async def tasks() -> None:
        await asyncio.gather(*[aenter() for _ in range(8)])

    jobs: list[Callable[[], Any]] = [lambda: enter(near), lambda: enter(far)] * 4
    assert Herd(*jobs, lambda: asyncio.run(tasks()), lambda: asyncio.run(tasks())).join() == [None] * 10
    assert len(entered) == 40
    assert entered == sorted(set(entered))
    assert keys(server) == 0


# -- holders ----------------------------------------------------------------------------------------------------------


def test_readers_are_together_and_a_writer_is_alone(open_: Open) -> None:
    """Readers share the lock, a writer is alone, and new readers do not pass a writer that waits."""
    engine = open_()
    readers, writer, late = [new_id(), new_id()], new_id(), new_id()
    fences = [taken(engine, token, room=inf) for token in readers]
    assert [type(each) for each in fences] == [Granted, Granted]
    assert isinstance(taken(engine, writer), Busy)  # without `waits` it gets no place in the queue
    busy = taken(engine, writer, waits=True)
    assert isinstance(busy, Busy)
    assert busy.token == readers[0]
    for waits in (False, True):
        assert isinstance(taken(engine, late, waits=waits, room=inf), Busy)
    for token in readers:
        assert isinstance(taken(engine, writer, waits=True), Busy)
        assert run(engine.blocking.locks.release("l", token))
    assert isinstance(taken(engine, writer, waits=True), Granted)
    busy = taken(engine, late, waits=True, room=inf)
    assert isinstance(busy, Busy)
    other = Herd(lambda: run(engine.blocking.locks.wait("l", busy, LONG)))
    assert run(engine.blocking.locks.release("l", writer))
    assert other.join() == [None]
    assert isinstance(taken(engine, late, waits=True, room=inf), Granted)


@pytest.mark.parametrize("waits", [False, True])
def test_no_more_are_inside_than_there_is_room_for(open_: Open, waits: bool) -> None:
    """No more holders than `room` are inside, over all engines together."""
    engines, inside, most, met = [open_(), open_()], list[int](), list[int](), threading.Event()

    def visit(engine: EtcdEngine) -> None:
        for _ in range(3):
            token = new_id()
            while isinstance(reply := taken(engine, token, waits=waits, room=3), Busy):
                run(engine.blocking.locks.wait("l", reply, LONG))
            inside.append(1)
            most.append(len(inside))
            if len(inside) > 1:
                met.set()
            assert met.wait(PATIENCE), "one at a time is inside"
            time.sleep(0.005)
            inside.pop()
            assert run(engine.blocking.locks.release("l", token))

    assert Herd(*[lambda: visit(engines[0]), lambda: visit(engines[1])] * 4).join() == [None] * 8
    assert max(most) <= 3


def test_who_has_a_lock_is_told(open_: Open) -> None:
    """Another engine sees the name, the process and the rest of the lease of each held lock."""
    engine, other, token, reader = open_(), open_(), new_id(), new_id()
    assert isinstance(run(engine.blocking.locks.acquire("a/b é", token, 300.0)), Granted)
    assert isinstance(run(engine.blocking.locks.acquire("other", reader, 300.0, room=inf)), Granted)
    (held,) = run(other.blocking.locks.held("a/"))
    assert (held.name, held.waiting, held.bound) == ("a/b é", 0, False)
    assert held.pid is not None and 290 <= held.lease <= 331 and 0 <= held.seconds < 40
    assert [each.name for each in run(other.blocking.locks.held())] == ["a/b é", "other"]
    ((inside, left),) = run(other.blocking.locks.holder("a/b é"))
    assert inside == token and 290 <= left <= 331
    assert run(other.blocking.locks.holder("nobody's")) == []


def test_a_lock_that_is_broken_is_lost(open_: Open) -> None:
    """If a lock is broken, its holder can no longer renew it, and its release says that it was lost."""
    engine, admin, token = open_(), open_(), new_id()
    assert isinstance(taken(engine, token), Granted)
    assert run(admin.blocking.locks.release("l", token))
    assert not run(engine.blocking.locks.renew("l", token, LONG))
    assert isinstance(taken(admin), Granted)
    assert run(engine.blocking.locks.release("l", token)) is False


def test_another_process_goes_on_with_a_lock(open_: Open) -> None:
    """Another process that has the token can renew and release the lock, as a worker does for a web request."""
    engine, worker, token = open_(), open_(), new_id()
    assert isinstance(run(engine.blocking.locks.acquire("l", token, 5.0)), Granted)
    assert run(worker.blocking.locks.renew("l", token, 30.0))  # longer than it was taken for
    assert run(worker.blocking.locks.holder("l"))[0][1] > 20
    assert isinstance(run(worker.blocking.locks.acquire("l", token, 5.0)), Granted)
    assert run(worker.blocking.locks.release("l", token)) is True
    assert run(engine.blocking.locks.release("l", token)) is False


@pytest.mark.parametrize("how", ["handed over", "frozen", "astray"])
def test_a_lock_is_renewed_by_the_lease_on_which_it_stands(
    open_: Open, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A renewal renews the lock's own etcd lease. Otherwise the lock would end while its holder relies on it."""
    engine, worker, token = open_(), open_(), new_id()
    assert isinstance(run(engine.blocking.locks.acquire("l", token, 9.0)), Granted)
    if how == "frozen":  # its lease could have ended, but has not
        worker, had = engine, engine._steps._owned.get(("l", token))
        assert had is not None
        had.lease.renewed -= LONG
    if how == "astray":  # the reply to the change to a longer lease is lost
        worker, ask = engine, engine._gateway.ask

        def lost(path: str, question: Any, **terms: Any) -> Any:
            told = ask(path, question, **terms)
            if path.endswith("txn"):
                raise EngineError("no answer")
            return told

        with monkeypatch.context() as patch:
            patch.setattr(engine._gateway, "ask", lost)
            with pytest.raises(EngineError):
                run(engine.blocking.locks.renew("l", token, 30.0))
        assert run(engine.blocking.locks.renew("l", token, 9.0))
    else:
        assert isinstance(run(worker.blocking.locks.acquire("l", token, 30.0)), Granted)
    look = {"request_range": {"key": b64(worker._steps._names.place("l", token))}}
    ((place,),) = worker._steps._txn([], [look], []).places
    own = worker._steps._owned.get(("l", token))
    assert own is not None
    assert own.lease.id == place.lease
    assert run(worker.blocking.locks.holder("l"))[0][1] >= 20
    assert run(worker.blocking.locks.release("l", token)) is True


# -- what goes astray -------------------------------------------------------------------------------------------------

CUTS: dict[str, dict[str, Any]] = {
    "the question": {"sent": 30},
    "the answer": {"answered": 30},
    "the connection": {"answered": 0},
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("step", [b"/v3/lease/grant", b"/v3/kv/txn", b"deleterange", b"/v3/watch", b"keepalive"])
def test_no_cut_connection_leaves_anything(
    server: EtcdServer, open_: Open, proxy: Proxy, step: bytes, cut: str
) -> None:
    """If a connection is cut at any step, the caller still gets its lock, and leaves no second place in the queue."""
    engine, other = open_(f"etcd://127.0.0.1:{proxy.port}"), open_()
    lock = Lock("l", on=other)
    proxy.at(step, **CUTS[cut])
    if step == b"/v3/watch":
        assert lock.acquire()
        Herd(lambda: (until(lambda: proxy.met), lock.release()))
    with Lock("l", on=engine, wait=LONG) as mine:
        if step == b"keepalive":
            assert run(engine.blocking.locks.renew("l", mine.token or b"", 30.0))
        assert isinstance(run(other.blocking.locks.acquire("l", new_id(), LONG)), Busy)
    assert proxy.met == 1
    assert isinstance(taken(other), Granted)
    assert keys(server) == 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_question_that_comes_after_its_withdrawal_takes_nothing(
    server: EtcdServer, open_: Open, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A request that arrives after its withdrawal is refused. Otherwise it would take the lock for no caller."""
    engine, token, astray = open_(), new_id(), list[Any]()
    ask = engine._gateway.ask

    def goes_astray(path: str, question: Any, **terms: Any) -> Any:
        if not astray and path.endswith("txn"):
            astray.append(question)
            raise EngineError("no answer")
        return ask(path, question, **terms)

    monkeypatch.setattr(engine._gateway, "ask", goes_astray)
    with pytest.raises(EngineError):
        taken(engine, token, waits=waits)
    assert run(engine.blocking.locks.release("l", token)) is False
    other = new_id()
    assert isinstance(run(engine.blocking.locks.acquire("another", other, LONG)), Granted)
    with pytest.raises(HTTPError, match="404"):  # there is no such lease
        server.ask("/v3/kv/txn", **astray[0])
    assert keys(server) == 1
    assert isinstance(taken(engine), Granted)


def test_a_server_that_hangs_keeps_nobody(open_: Open, proxy: Proxy) -> None:
    """If the server hangs, `acquire` fails soon, and the late request leaves no lock behind."""
    engine, other = open_(f"etcd://127.0.0.1:{proxy.port}", timeout=1.0), open_()
    with suppress(EngineError), Lock("other", on=engine):
        pass  # its lease is there for the next lock
    proxy.hold()
    start = time.monotonic()
    with pytest.raises(EngineError):
        Lock("l", on=engine, wait=0.2).acquire()
    assert time.monotonic() - start < 10
    proxy.let_go()
    with Lock("l", on=other, wait=10):
        pass


def test_what_no_etcd_says_is_trouble(open_: Open, proxy: Proxy) -> None:
    """A reply that is not from etcd, such as a proxy's error page, is an EngineError."""
    engine = open_(f"etcd://127.0.0.1:{proxy.port}", timeout=0.5)
    proxy.alter = lambda data: b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n<html/>"
    for ask in (lambda: taken(engine), lambda: taken(engine, waits=True), engine.ping):
        with pytest.raises(EngineError):
            ask()


def test_what_others_write_into_a_queue_is_a_holder_like_any_other(server: EtcdServer, open_: Open) -> None:
    """A key that another program writes into a queue counts as a holder, and causes no other error."""
    engine = open_()
    key = engine._steps._names.queue("l")[0] + b"no token"
    engine._gateway.ask("/v3/kv/put", {"key": b64(key), "value": "eA=="})
    assert isinstance(taken(engine), Busy)
    assert len(run(engine.blocking.locks.held())) == 1
    with pytest.raises(LockTimeout), Lock("l", on=engine, wait=0.05):
        pass


# -- connections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_who_waits_is_woken_by_the_end_of_the_engine(open_: Open, colour: str) -> None:
    """If an engine is closed, its waiters get EngineClosed and do not wait for their locks."""
    engine, holder = open_(), open_()
    assert isinstance(taken(holder), Granted)

    async def wait() -> None:
        await Lock("l", on=engine).aacquire()

    waiter = Herd(Lock("l", on=engine).acquire if colour == "sync" else lambda: asyncio.run(wait()))
    until(lambda: engine._watches._watches)
    engine.close()
    (error,) = waiter.join()
    assert isinstance(error, EngineClosed)
    with pytest.raises(EngineClosed):
        taken(engine)


def test_beyond_so_many_streams_one_looks(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process opens only a limited number of watches. Further waiters look by themselves, and get their locks."""
    monkeypatch.setattr(watches, "MOST", 2)
    engine, holder = open_(), open_()
    names = [f"l{number}" for number in range(5)]
    held = [Lock(name, on=holder) for name in names]
    assert all(each.acquire() for each in held)
    herd = Herd(*[lambda name=name: entered(engine, name) for name in names])
    until(lambda: all(each.waiting for each in run(holder.blocking.locks.held())))
    assert len(engine._watches._watches) <= 2
    for each in held:
        each.release()
    assert herd.join() == [True] * 5


def test_a_watch_that_ends_is_told(server: EtcdServer, open_: Open, proxy: Proxy) -> None:
    """The end of a watch is reported, because its user may have missed changes."""
    engine, told = open_(f"etcd://127.0.0.1:{proxy.port}"), list[Any]()
    ear = engine._watches.watch((b"k", b""), told.append)
    server.ask("/v3/kv/put", key=b64(b"k"))
    until(lambda: told)
    assert [each["kv"]["key"] for each in told.pop()] == [b64(b"k")]
    proxy.cut()
    until(lambda: told == [None])
    assert not ear.active
    assert engine._watches._watches == set()


def test_the_watch_of_a_queue_outlives_its_connection(
    open_: Open, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the connection of a watch breaks, the watch is opened again, so that the waiter hears of its turn."""
    monkeypatch.setattr(lock_steps, "SAFETY", LONG)
    engine, holder = open_(f"etcd://127.0.0.1:{proxy.port}"), open_()
    lock = Lock("l", on=holder)
    assert lock.acquire()
    herd = Herd(lambda: entered(engine))
    until(lambda: engine._steps.queue("l").updated)
    proxy.cut()
    until(lambda: engine._watches._watches)
    lock.release()
    assert herd.join() == [True]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_who_waits_for_a_value_is_woken(open_: Open, monkeypatch: pytest.MonkeyPatch, colour: str) -> None:
    """A waiter for a value is woken at once, and does not wait for its look once a second."""
    monkeypatch.setattr("stampede.engines.cells.records.SAFETY", LONG)
    began, go_on = threading.Event(), threading.Event()

    def compute() -> int:
        began.set()
        assert go_on.wait(20)
        return 1

    async def wait() -> int:
        return int(await near.aget_or_compute("k", lambda: 2))

    engine = open_()
    with Cache(engine=engine) as near, Cache(engine=open_()) as far:
        first = Herd(lambda: far.get_or_compute("k", compute))
        assert began.wait(20)
        second = Herd(lambda: near.get_or_compute("k", lambda: 2) if colour == "sync" else asyncio.run(wait()))
        until(lambda: engine._watches._watches)
        go_on.set()
        assert first.join() == [1]
        assert second.join() == [1]


def test_a_lock_that_was_long_waited_for_stands_for_its_lease(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that was granted after a long wait is valid for its whole lease, and not for the rest of its place."""
    engine, first, token = open_(), new_id(), new_id()
    assert isinstance(taken(engine, first), Granted)
    assert isinstance(taken(engine, token, waits=True), Busy)
    own = engine._steps._owned.get(("l", token))
    assert own is not None
    own.lease.renewed -= 0.2 * LONG  # as if it had waited so long
    assert run(engine.blocking.locks.release("l", first))
    asked = asked_of(engine, monkeypatch)
    assert isinstance(taken(engine, token, waits=True), Granted)
    assert asked == ["txn", "keepalive"]
    assert own.lease.left >= LONG


def test_what_has_gone_before_one_waits_for_it_is_not_waited_for(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lock was released before the wait began, the wait returns, although no event will come."""
    monkeypatch.setattr(lock_steps, "SAFETY", LONG)
    engine, other, token = open_(), open_(), new_id()
    assert isinstance(taken(engine, token), Granted)
    waiters = [(each, taken(each, waits=waits)) for each in (engine, other) for waits in (False, True)]
    assert run(engine.blocking.locks.release("l", token))
    start = time.monotonic()
    for each, busy in waiters:
        assert isinstance(busy, Busy)
        if busy.token == token and busy is not waiters[3][1]:  # the last one waits for the other waiter with a place
            run(each.blocking.locks.wait("l", busy, LONG))
    assert time.monotonic() - start < 5


def test_a_member_without_answers_is_not_listened_to(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a member gives no answers, its watches end too, and the waiters on it are woken."""
    monkeypatch.setattr(lock_steps, "SAFETY", LONG)
    engine, holder = open_(), open_()
    assert isinstance(taken(holder), Granted)
    busy = taken(engine, waits=True)
    assert isinstance(busy, Busy)
    waiter = Herd(lambda: run(engine.blocking.locks.wait("l", busy, LONG)))
    until(lambda: engine._watches._watches)
    engine._gateway.leave(engine._gateway.member())
    assert waiter.join() == [None]


def test_who_waits_for_longer_than_a_lease_keeps_its_place(open_: Open) -> None:
    """A waiter that waits for longer than its lease keeps its place in the queue: it renews the lease of its place."""
    holder, patient, late = open_(), open_(), open_()
    lock, order = Lock("l", on=holder), list[str]()
    assert lock.acquire()

    def visit(engine: EtcdEngine, name: str) -> None:
        with Lock("l", on=engine, lease=30):
            order.append(name)

    first = Herd(lambda: visit(patient, "patient"))
    until(lambda: waiting(holder) == 1)
    (own,) = patient._steps._owned.values()
    own.lease.renewed -= 15  # as if it had waited so long
    since = own.lease.renewed
    until(lambda: own.lease.renewed > since)
    second = Herd(lambda: visit(late, "late"))
    until(lambda: waiting(holder) == 2)
    lock.release()
    assert first.join() + second.join() == [None, None]
    assert order == ["patient", "late"]


def test_the_server_s_shortest_lease_is_respected(open_: Open) -> None:
    """A lease shorter than the server's minimum becomes that minimum, so the lock does not end early."""
    engine, token = open_(), new_id()
    assert isinstance(run(engine.blocking.locks.acquire("l", token, 0.1)), Granted)
    own = engine._steps._owned.get(("l", token))
    assert own is not None and own.lease.ttl >= 1


def test_users_and_passwords(open_: Open) -> None:
    """The engine logs in with user and password, and logs in again when its token has ended."""
    server = EtcdServer()
    try:
        server.ask("/v3/auth/user/add", name="root", password="s:@/cret")
        server.ask("/v3/auth/user/grant", user="root", role="root")
        server.ask("/v3/auth/enable")
        engine = open_(f"etcd://root:s%3A%40%2Fcret@127.0.0.1:{server.port}")
        assert "cret" not in repr(engine._gateway.called) + engine.called
        with Lock("l", on=engine, lease=5) as lock:
            another = open_(f"etcd://root:s%3A%40%2Fcret@127.0.0.1:{server.port}")
            waiter = Herd(lambda: entered(another))
            until(lambda: waiting(engine) == 1)
            engine._gateway._token = "gone.1"
            assert run(engine.blocking.locks.renew("l", lock.token or b"", 5.0))
        assert waiter.join() == [True]
        with pytest.raises(EngineError, match="authentication failed"):
            taken(open_(f"etcd://root:other@127.0.0.1:{server.port}"))
        with pytest.raises(EngineError):
            taken(open_(f"etcd://127.0.0.1:{server.port}"))
    finally:
        server.close()


def test_tls(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks and watches work over TLS, and a certificate that can't be verified is refused."""
    monkeypatch.setattr(lock_steps, "SAFETY", LONG)
    authority = Authority()
    server = EtcdServer(authority=authority)
    try:
        url = f"etcd://127.0.0.1:{server.port}?ca={authority.ca}&cert={authority.certificate}&key={authority.key}"
        holder, engine = Lock("l", on=open_(url)), open_(url)
        assert holder.acquire()
        herd = Herd(lambda: entered(engine))
        until(lambda: engine._steps.queue("l").updated)
        holder.release()
        assert herd.join() == [True]
        with pytest.raises(EngineError):
            taken(open_(f"etcd://127.0.0.1:{server.port}?tls=true", timeout=0.5))
    finally:
        server.close()


@pytest.mark.parametrize(
    "url, why",
    [
        ("etcd://", "names no server"),
        ("etcd://h:port", "not HOST:PORT"),
        ("etcd://h?time=1", "timeout"),
        ("etcd://h?timeout=0", "more than 0"),
        ("etcd://h?key=k.pem", "give cert="),
    ],
)
def test_a_url_that_can_be_none_is_refused(url: str, why: str) -> None:
    """A wrong URL is refused when it is checked, and not at the first lock."""
    with pytest.raises(OptionError, match=why):
        check_url(url)


def test_files_that_are_not_there() -> None:
    """If a certificate file is missing, the error names the file."""
    with pytest.raises(OptionError, match=r"nowhere\.pem"):
        from_url("etcd://h?ca=nowhere.pem")


def test_a_lock_that_ends_is_lost(open_: Open) -> None:
    """If a lock was lost, its `release` raises LockLost."""
    engine, admin = open_(), open_()
    lock = Lock("l", on=engine, lease=2.5)
    assert lock.acquire() and lock.token is not None
    assert run(admin.blocking.locks.release("l", lock.token))
    until(lambda: lock.lost)
    with pytest.raises(LockLost):
        lock.release()
