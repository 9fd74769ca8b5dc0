"""Brokers and clients in trouble: killed, frozen, disconnected, forked, or sent invalid data."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zmq
from broker_server import Address, BrokerProcess, BrokerThread, Capacity, ZmqEngine
from disk_world import Script
from herd import Herd, until
from proxy import Proxy
from server_process import free_port, freeze

from stampede import Bulkhead, EngineError, Lock, LockLost, LockTimeout, OptionError, StampedeError, once, try_lock
from stampede.cli.command import main
from stampede.engines import open_engine
from stampede.engines.zmq import wire
from stampede.engines.zmq.curve import make_keys
from stampede.engines.zmq.server import PAGE, Broker
from stampede.engines.zmq.wire import Word
from stampede.errors import EngineClosed
from stampede.model.entry import new_id
from stampede.model.ports import Busy, Granted, Rate
from stampede.runtime.colour import BLOCKING
from stampede.runtime.colour import run_blocking as run

LONG = 20.0

Open = Callable[..., ZmqEngine]


@pytest.fixture
def broker() -> Iterator[BrokerThread]:
    made = BrokerThread()
    yield made
    made.stop()


@pytest.fixture
def open_() -> Iterator[Open]:
    opened: list[Any] = []

    def open_one(url: str, **options: Any) -> Any:
        opened.append(open_engine(url, **{"timeout": LONG, **options}))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def broker_of(engine: ZmqEngine, name: str) -> Address:
    """The broker that has the locks of this name."""
    return engine._links.of(wire.name_of(name)).place


def took(engine: ZmqEngine, name: str = "l", token: bytes | None = None, lease: float = LONG) -> bool:
    return isinstance(run(engine.blocking.locks.acquire(name, token or new_id(), lease)), Granted)


HOLDER = """
import sys, time
from stampede import Lock
lock = Lock("l", on=sys.argv[1], lease=20)
assert lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder() -> Iterator[Callable[[str], Script]]:
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(Script(HOLDER, url))


def test_what_a_killed_client_had_is_free_in_a_moment(
    broker: BrokerThread, open_: Open, holder: Callable[[str], Script]
) -> None:
    """If a client is killed, its lock is soon free. Otherwise, a crash would stop the fleet for a whole lease."""
    process = holder(broker.url)
    assert process.stdout.readline() == "held\n"
    lock = Lock("l", on=open_(broker.url), lease=20)
    assert not lock.acquire(0.1)
    process.kill()
    assert lock.acquire(10), "it waits for the end of the lease"
    lock.release()


def test_a_holder_whose_connection_is_reset_comes_back(open_: Open) -> None:
    """A holder whose connection is cut and made again keeps its lock, for example when a proxy is reloaded."""
    now = time.monotonic()
    broker = BrokerThread(clock=lambda: now)
    proxy = Proxy(broker.port)

    def passes(seconds: float) -> None:
        """Let this time pass for the broker, until it has looked at its clients."""
        nonlocal now
        now += seconds
        until(lambda: broker.broker._tick == now)

    def is_gone() -> bool:
        passes(0.11)
        return session.gone < math.inf

    try:
        engine, other = open_(f"zmq://127.0.0.1:{proxy.port}"), open_(broker.url)
        assert took(engine)
        (session,) = broker.broker.machine.sessions.values()
        proxy.hold()
        proxy.cut()
        until(is_gone)
        passes(0.8)
        assert not took(other)
        proxy.let_go()
        until(lambda: session.gone == math.inf)
        passes(0.8)
        assert not took(other)
    finally:
        proxy.close()
        broker.stop()


def test_a_frozen_client_keeps_its_lock_for_its_lease(
    broker: BrokerThread, open_: Open, holder: Callable[[str], Script]
) -> None:
    """A frozen client keeps its lock for its lease, since the broker cannot know that a silent client is dead."""
    process = holder(broker.url)
    assert process.stdout.readline() == "held\n"
    freeze(process.pid)
    engine = open_(broker.url)
    began = time.monotonic()
    while time.monotonic() - began < 1.8:  # longer than a client may be silent for any other purpose
        assert not took(engine)
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGCONT)


def test_nobody_waits_behind_a_frozen_waiter(
    broker: BrokerThread, open_: Open, holder: Callable[[str], Script]
) -> None:
    """A frozen waiter is skipped when the lock is free. Otherwise, the lock would be reserved for it repeatedly."""
    first = open_(broker.url)
    token = new_id()
    assert took(first, token=token)
    process = holder(broker.url)
    until(lambda: any(session.waits for session in list(broker.broker.machine.sessions.values())))
    freeze(process.pid)
    until(lambda: not any(session.waits for session in list(broker.broker.machine.sessions.values())))
    assert run(first.blocking.locks.release("l", token))
    assert took(open_(broker.url))


def test_locks_outlive_a_broker_that_is_killed(open_: Open) -> None:
    """If a broker is killed, its successor grants nothing during the grace, and the holder keeps its lock."""
    server = BrokerProcess("--grace", "0s")
    try:
        engine, other = open_(server.url), open_(server.url)
        lock, refused = Lock("l", on=engine, lease=20, wait=10), new_id()
        assert lock.acquire()
        fence = lock.fence
        server._options = ("--grace", "3s")
        server.restart()
        lock._last.hold.again(0.0)  # type: ignore[union-attr]  # as it is renewed now and then
        while other.grace():
            assert isinstance(run(other.blocking.locks.acquire("l", refused, 1.0)), Busy)
        assert isinstance(run(other.blocking.locks.acquire("l", refused, 1.0)), Busy)
        assert lock.held
        lock.release()
        again = run(other.blocking.locks.acquire("l", refused, 1.0))
        assert isinstance(again, Granted)
        assert again.fence > fence
    finally:
        server.close()


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_who_is_refused_in_a_grace_is_told_so(open_: Open, colour: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If a broker was just started and grants nothing yet, the error says so. It does not say that the lock is held."""
    began = BrokerThread(quiet=30.0)
    try:
        engine = open_(began.url)
        said = rf"is not available yet, and wait ran out: 0.1 s: {began.url} was just started, and for another 2\d"

        async def meet(lock: Lock) -> bool:
            with pytest.raises(LockTimeout, match=said):
                async with lock:
                    pass
            return await lock.alocked()

        for lock in Lock("l", on=engine, wait=0.1), Bulkhead("b", concurrency=3, on=engine, wait=0.1):
            if colour == "async":
                assert asyncio.run(meet(lock))
                continue
            with pytest.raises(LockTimeout, match=said), lock:
                pass
            assert lock.locked()
        with pytest.raises(EngineError, match="can't tell for another 2"), once("nightly", every=20, on=engine):
            pass
        assert main(["locks", began.url]) == 0
        assert (
            capsys.readouterr().out.splitlines()[0].startswith(f"{began.url} has just been started, and for another 2")
        )
        assert list(engine.grace()) == [began.url]
    finally:
        began.stop()


def test_a_lock_that_its_holder_has_again_in_a_grace_is_somebody_s(open_: Open) -> None:
    """If a holder has its lock again during the grace, another caller is told that the lock is held."""
    server = BrokerProcess("--grace", "0s")
    try:
        with Lock("l", on=open_(server.url)) as lock:
            server._options = ("--grace", "20s")
            server.restart()
            lock.extend(20)
            other = Lock("l", on=open_(server.url), wait=0)
            with pytest.raises(LockTimeout, match="the lock 'l' is already held"), other:
                pass
    finally:
        server.close()


@pytest.mark.parametrize("verb", ["extend", "detach"])
def test_a_lock_outlives_what_its_broker_refuses(open_: Open, verb: str) -> None:
    """If a broker refuses a longer lease, the caller gets an error, and the lock is still held and renewed."""
    server = BrokerThread(limits=Capacity(longest=5.0))
    try:
        with Lock("l", on=open_(server.url), lease=3.0) as lock:
            with pytest.raises(
                EngineError,
                match="a lease of 600 s: it grants 5 s at most: start it with stampede serve --longest 600s",
            ):
                getattr(lock, verb)("10m")
            ends = lock.hold.ends
            until(lambda: lock.lost or lock.hold.ends > ends)
            assert lock.held and lock.remaining <= 3.0
    finally:
        server.stop()


def test_killed_and_restarted_under_load(open_: Open) -> None:
    """If a broker is killed under load, there is one holder at a time, fences grow, and no caller hangs."""
    server = BrokerProcess("--grace", "0.8s", "--longest", "0.8s")
    inside: list[Lock] = []
    overlaps, over = list[str](), threading.Event()
    visits: list[tuple[int, float, float]] = []  # the fence, when it was asked for, and when it was there

    def visit(engine: ZmqEngine) -> None:
        lock = Lock("l", on=engine, lease=0.8, wait=10)
        while not over.is_set():
            asked = time.monotonic()
            with suppress(LockLost, EngineError), lock:
                inside.append(lock)
                if sum(each.held for each in inside.copy()) > 1:  # a holder may learn late that it lost the lock
                    overlaps.append("two are inside")
                visits.append((lock.fence, asked, time.monotonic()))
                time.sleep(0.002)
                inside.remove(lock)

    try:
        engines = [open_(server.url) for _ in range(3)]
        threads = [threading.Thread(target=visit, args=(each,), daemon=True) for each in engines for _ in range(2)]
        for each in threads:
            each.start()
        for _ in range(2):
            known = len(visits)
            until(lambda: len(visits) > known + 20)
            server.restart()
        known = len(visits)
        until(lambda: len(visits) > known + 20)
        over.set()
        for each in threads:
            each.join(15)
            assert not each.is_alive()
        assert not overlaps
        visits.sort()
        assert len({fence for fence, *_ in visits}) == len(visits)
        latest = 0.0
        for _, asked, there in visits:
            assert there > latest, "a fence was lower than one that was there before it was asked for"
            latest = max(latest, asked)
    finally:
        over.set()
        server.close()


def test_who_comes_before_the_broker_waits_for_it(open_: Open) -> None:
    """A client that starts before its broker waits for it. A rack that is switched on does not begin with errors."""
    port = free_port()
    engine = open_(f"zmq://127.0.0.1:{port}", timeout=10)
    tried: list[bool] = []
    thread = threading.Thread(target=lambda: tried.append(took(engine)))
    thread.start()
    time.sleep(0.2)
    broker = BrokerThread(port=port)
    thread.join(10)
    broker.stop()
    assert tried == [True]


def test_a_broker_that_hangs_is_an_error_in_time_and_is_used_again(open_: Open) -> None:
    """If a broker hangs, a lock soon raises an error. When the broker resumes, it is used again."""
    server = BrokerProcess("--grace", "0s")
    try:
        engine, token = open_(server.url, timeout=1), new_id()
        until(lambda: _answers(engine, token))
        server.freeze()
        with pytest.raises(EngineError, match=r"no answer from zmq://[0-9.:]+ within 1 s$"):
            run(engine.blocking.locks.acquire("l", new_id(), LONG))
        with pytest.raises(EngineError), try_lock("l", on=engine):
            pass
        server.thaw()
        until(lambda: _answers(engine, token))
    finally:
        server.close()


@pytest.mark.parametrize("listens", [False, True])
def test_who_has_no_answer_is_told_what_is_known(open_: Open, listens: bool) -> None:
    """If a broker does not reply, the error says whether anything listens at its address."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        if listens:  # and never replies
            door.listen()
        place = f"zmq://127.0.0.1:{door.getsockname()[1]}"
        known = "is it running?" if listens else "nothing listens there"
        engine = open_(place, timeout=0.3)

        def is_told() -> bool:
            with pytest.raises(EngineError) as error, try_lock("l", on=engine):
                pass
            return str(error.value).endswith(f"no answer from {place} within 0.3 s: {known}")

        until(is_told)


MEETS = """
import asyncio, atexit, sys, threading
from stampede import EngineError, try_lock
from stampede.engines.zmq.client import BrokerLink

times = iter([0.3])  # for the first question; all others would wait for long
BrokerLink._timeout = property(lambda link: next(times, 60.0), lambda link, seconds: None)

def refused(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def meet(url):
    with try_lock("l", on=url):
        pass

async def ameet(url):
    async with try_lock("l", on=url):
        pass

url, colour, threads = sys.argv[1:]
try:
    meet(url) if colour == "sync" else asyncio.run(ameet(url))
except EngineError:
    if threads == "none":  # as it is since Python 3.12
        atexit.register(setattr, threading.Thread, "start", refused)
    print("met", flush=True)
"""


@pytest.mark.parametrize("threads", ["threads", "none"])
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_who_leaves_where_nobody_listens_is_gone_in_a_moment(colour: str, threads: str) -> None:
    """A script that finds no broker ends soon after its error. It does not wait for the broker's time-out."""
    words = [sys.executable, "-c", MEETS, f"zmq://127.0.0.1:{free_port()}", colour, threads]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "met\n"
        assert process.wait(20) == 0
        assert not process.stderr.read()


def _answers(engine: ZmqEngine, token: bytes) -> bool:
    with suppress(EngineError):
        return took(engine, "other", token)
    return False


def test_the_command_ends_when_it_is_told_to(tmp_path: Path, open_: Open) -> None:
    """The broker ends soon after SIGTERM, and records that no lock is held. Its successor can grant at once."""
    memory = tmp_path / "broker.json"
    server = BrokerProcess("--memory", str(memory))
    try:
        assert server._process is not None
        with Lock("l", on=open_(server.url), lease=4):  # granted at once: no broker has run here before
            assert memory.read_text() == '{"longest": 6.0}'
        server._process.send_signal(signal.SIGTERM)
        assert server._process.wait(20) == 0
        assert memory.read_text() == '{"longest": 0.0}'
    finally:
        server.close()


def test_lists_keep_nobody_from_its_lock(broker: BrokerThread, open_: Open) -> None:
    """Long lists come in pages, and other requests are answered between two pages. So no leases end meanwhile."""
    machine, counts = broker.broker.machine, broker.broker.counts
    session, _ = machine.hello(b"other", "h:1", time.monotonic())
    session.last_heard = math.inf  # the broker does not look for it
    for number in range(2500):
        counts.take(b"user:%d" % number, Rate(5, 3600.0), 1, 0.0, time.monotonic())
        machine.acquire(session, b"%d:lock" % (number % 2), new_id(), 60.0, math.inf, False, time.monotonic())
    engine = open_(broker.url)
    assert len(run(engine.blocking.limits.listed())) == 2500
    assert len(run(engine.blocking.holds.held("1:"))) == PAGE
    _, payload = run(engine._links.links[0].ask(BLOCKING, Word.LIMITS, wire.pack_page(0, b"")))
    at, rows = json.loads(payload)
    assert at == len(rows) == PAGE, "others are answered between two pages"


def test_rubbish_costs_its_sender_only(broker: BrokerThread, open_: Open) -> None:
    """Invalid data from one client, or from a port scanner, does not stop the locks of the others."""
    random, engine = Random(5), open_(broker.url, timeout=10)
    context: zmq.Context[Any] = zmq.Context()
    senders = [context.socket(kind) for kind in (zmq.DEALER, zmq.DEALER, zmq.REQ, zmq.DEALER)]
    try:
        for each in senders:
            each.linger = 0
            each.connect(f"tcp://{broker.place}")
        senders[0].send(wire.VERSION + wire.record(Word.HELLO, 1, wire.pack_hello(0, "h:1")))
        assert senders[0].poll(5000)
        kinds = [*range(20), 65, 73, 255]
        for number in range(2, 3000):
            payload = random.choice(
                [
                    random.randbytes(random.randrange(80)),
                    wire.pack_lock(random.randbytes(5), random.randbytes(3), random.choice([1.0, -1.0, float("nan")])),
                    struct.pack(">ddQBB", random.random(), random.random(), 1 << 63, 1, 200) + b"x" * 20,
                    wire.pack_page(1 << 63, b"zz"), wire.pack_page(random.randrange(9), b""),
                ]
            )  # fmt: skip
            said = wire.VERSION + wire.record(random.choice(kinds), random.choice([number, 0, 1 << 63]), payload)
            cut = random.randrange(len(said)) if random.random() < 0.2 else len(said)
            parts = [said[:cut]] + [b"more"] * (random.random() < 0.05)
            random.choice(senders[:2] if random.random() < 0.8 else senders[3:]).send_multipart(parts)
        senders[2].send(b"\x01")
        senders[1].send(b"x" * (1 << 20))  # larger than a message may be: its connection is closed
        with socket.create_connection(broker.place) as raw:
            raw.sendall(random.randbytes(5000))
        with socket.create_connection(broker.place) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for _ in range(20):
            assert took(engine, "mine" + os.urandom(3).hex())
        assert broker._thread.is_alive()
        until(lambda: broker.broker._malformed > 100)
    finally:
        context.destroy(linger=0)


def test_what_is_asked_twice_is_done_in_its_order(broker: BrokerThread) -> None:
    """A client repeats requests if its connection broke. The broker handles them in order, and no lock remains."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://{broker.place}")

        def say(*some: bytes) -> list[tuple[int, int]]:
            dealer.send(wire.VERSION + b"".join(some))
            heard: list[tuple[int, int]] = []
            while len(heard) < len(some) and dealer.poll(5000):
                heard += [(kind, number) for kind, number, _ in wire.records(dealer.recv())]
            return heard

        greeting = wire.record(Word.HELLO, 1, wire.pack_hello(0, "h:1"))
        acquire = wire.record(Word.ACQUIRE, 1, wire.pack_lock(b"l", b"t", 5.0))
        release = wire.record(Word.RELEASE, 2, wire.pack_lock(b"l", b"t"))
        assert say(wire.record(Word.PING, 1)) == [(Word.WHO, 0)]
        assert say(greeting) == [(Word.WELCOME, 1)]
        assert say(acquire, release) == [(Word.GRANTED, 1), (Word.YES, 2)]
        assert say(acquire, acquire, release) == [(Word.GRANTED, 1), (Word.GRANTED, 1), (Word.YES, 2)]
        assert say(release) == [(Word.NO, 2)], "what became of it the first time is not known any more"
        assert broker.broker.machine.leases == 0
    finally:
        context.destroy(linger=0)


def test_a_start_of_a_limit_is_asked_for_once(broker: BrokerThread, open_: Open) -> None:
    """A start of a limit is sent only once, since it could count twice. Other requests are sent again."""
    proxy = Proxy(broker.port)
    try:
        engine = open_(f"zmq://127.0.0.1:{proxy.port}")
        proxy.at(b"starts", sent=0)
        herd = Herd(lambda: run(engine.blocking.limits.take("starts", Rate(5, 60.0), 1, 0.0)))
        until(lambda: proxy.met)
        assert run(engine.blocking.limits.used("starts")).used == 0  # it is behind all that is sent again
        engine.close()
        assert isinstance(herd.join()[0], EngineClosed)  # it was not answered
    finally:
        proxy.close()


def test_keys_let_in_who_has_them(tmp_path: Path, open_: Open) -> None:
    """With keys, only clients that have the right keys get locks. Without keys, a broker serves only the loopback."""
    for name in ("right", "wrong"):
        make_keys(tmp_path / name)
    assert (tmp_path / "right" / "server.key_secret").stat().st_mode & 0o77 == 0
    with pytest.raises(OptionError, match="there already"):
        make_keys(tmp_path / "right")
    with pytest.raises(OptionError, match="not loopback: give --keys"):
        Broker(["0.0.0.0:7867"])
    broker = BrokerThread(keys=tmp_path / "right")
    try:
        assert took(open_(f"{broker.url}?keys={tmp_path / 'right'}"))
        (tmp_path / "mixed").mkdir()
        (tmp_path / "mixed" / "server.key").write_text((tmp_path / "right" / "server.key").read_text())
        (tmp_path / "mixed" / "client.key_secret").write_text((tmp_path / "wrong" / "client.key_secret").read_text())
        for keys in ("", f"?keys={tmp_path / 'wrong'}", f"?keys={tmp_path / 'mixed'}"):
            with pytest.raises(EngineError):
                run(open_(f"{broker.url}{keys}", timeout=0.5).blocking.locks.acquire("m", new_id(), LONG))
        with pytest.raises(OptionError, match="key"):
            open_(f"{broker.url}?keys={tmp_path}")
        assert took(open_(f"{broker.url}?keys={tmp_path / 'right'}"), "m")
    finally:
        broker.stop()


def test_names_are_spread_over_brokers_and_one_that_is_down_takes_only_its_own(open_: Open) -> None:
    """All clients find a name on the same broker. If one broker is down, only its own names cannot be locked."""
    brokers = [BrokerThread() for _ in range(3)]
    try:
        places = [str(each.place) for each in brokers]
        engine = open_(f"zmq://{','.join(places)}")
        other = open_(f"zmq://{','.join(reversed(places))}")
        names = [f"name {number}" for number in range(60)]
        for name in names:
            assert broker_of(engine, name) == broker_of(other, name)
            assert took(engine, name)
            assert not took(other, name)
        counts = [each.broker.machine.leases for each in brokers]
        assert sum(counts) == 60
        assert min(counts) > 5
        assert {each.name for each in run(other.blocking.holds.held())} == set(names)  # type: ignore[union-attr]
        brokers[0].stop()
        lost = [name for name in names if broker_of(engine, name) == brokers[0].place]
        assert not any(took(engine, name) for name in names if name not in lost)
        hurried = open_(f"zmq://{','.join(places)}", timeout=0.5)
        with pytest.raises(EngineError):
            took(hurried, lost[0])
        assert next(iter(hurried.facts().values())).keys() == {"down"}
    finally:
        for each in brokers:
            each.stop()


def test_a_forked_child_has_a_connection_of_its_own(broker: BrokerThread, open_: Open) -> None:
    """A forked child uses its own connection, and does not give back the locks of its parent."""
    engine = open_(broker.url)
    lock = Lock("l", on=engine)
    assert lock.acquire()
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            code = (
                0
                if not took(engine) and took(engine, "m") and run(engine.blocking.locks.release("m", b"x")) is False
                else 2
            )
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    until(lambda: took(engine, "m"))  # the child has ended, and so has its lock
    assert lock.held
    assert not took(open_(broker.url))
    lock.release()


@pytest.mark.parametrize("suspending", [False, True])
def test_close_wakes_who_waits(broker: BrokerThread, open_: Open, suspending: bool) -> None:
    """Closing an engine wakes its waiters with EngineClosed. Otherwise, the program would not end."""
    engine = open_(broker.url)
    assert took(open_(broker.url))
    locks = engine.suspending.locks if suspending else engine.blocking.locks

    async def waiting() -> None:
        token = new_id()
        while isinstance(busy := await locks.acquire("l", token, LONG, waits=True), Busy):
            await locks.wait("l", busy, LONG)

    failed: list[BaseException] = []

    def wait() -> None:
        try:
            asyncio.run(waiting()) if suspending else run(waiting())
        except StampedeError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: any(session.waits for session in list(broker.broker.machine.sessions.values())))
    engine.close()
    thread.join(LONG)
    assert not thread.is_alive()
    assert isinstance(failed[0], EngineClosed)
    with pytest.raises(EngineClosed):
        took(engine)


def test_many_loops_and_threads_share_one_connection(broker: BrokerThread, open_: Open) -> None:
    """Event loops and threads share one connection, also after a loop has ended. The lock has one holder at a time."""
    engine, inside, most = open_(broker.url), list[int](), list[int]()

    async def visit() -> None:
        for _ in range(5):
            async with Lock("l", on=engine, wait=20):
                inside.append(1)
                most.append(len(inside))
                await asyncio.sleep(0)
                inside.pop()

    async def visits() -> None:
        await asyncio.gather(*(visit() for _ in range(4)))

    threads = [threading.Thread(target=asyncio.run, args=(visits(),)) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    asyncio.run(visits())
    assert most == [1] * 100
    assert len(broker.broker.machine.sessions) == 1


def test_one_more_than_it_bears_is_an_error_that_says_so(open_: Open) -> None:
    """If a broker's limit for locks, leases or clients is reached, the error names the option that sets it."""
    broker = BrokerThread(limits=Capacity(clients=1, locks=2, longest=30))
    try:
        engine = open_(broker.url)
        assert took(engine, "1")
        assert took(engine, "2")
        with pytest.raises(EngineError, match="--max-locks"):
            took(engine, "3")
        with pytest.raises(EngineError, match="--longest"):
            took(engine, "1", lease=31)
        with pytest.raises(EngineError, match="--max-clients"):
            took(open_(broker.url), "1")
        assert 0 < engine.ping() < LONG
    finally:
        broker.stop()


@pytest.mark.parametrize(
    "url",
    [
        "zmq://",
        "zmq://h:0",
        "zmq://h:x",
        "zmq://u@h",
        "zmq://h/path",
        "zmq://h,h",
        "zmq://h?size=3",
        "zmq://h?timeout=x",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    """A malformed URL is refused when the engine is opened."""
    with pytest.raises(OptionError):
        open_engine(url)


def test_places_have_ports() -> None:
    """An address without a port means the port that `stampede serve` uses by default."""
    assert str(Address("::1", 7867)) == "[::1]:7867"
    engine = open_engine("zmq://localhost,[::1],h:1")
    assert isinstance(engine, ZmqEngine)
    assert [link.place for link in engine._links.links] == [("localhost", 7867), ("::1", 7867), ("h", 1)]
    engine.close()
