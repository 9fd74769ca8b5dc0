"""The keeper: it renews leases while their holders live, and no longer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from bare_cache import LONG, PLAIN, Gate, Room, World, until
from herd import until_async

from stampede.errors import EngineError
from stampede.events import Computed, LeaseLost
from stampede.leases.keeper import THREADS, Hold, Keeper
from stampede.model.ports import Ask, Busy
from stampede.runtime.colour import run_blocking
from stampede.settings.options import Policy

SHORT = 0.15  # a lease, which is renewed every 50 ms


class Port:
    """A port that renews as it is told to, and counts the renewals."""

    def __init__(self, answer: Any = True) -> None:
        self.answer = answer
        self.renewed = 0
        self.again = threading.Semaphore(0)

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        self.renewed += 1
        self.again.release()
        answer = self.answer() if callable(self.answer) else self.answer
        if isinstance(answer, BaseException):
            raise answer
        return bool(answer)

    def wait(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.again.acquire(timeout=LONG)


def hold_of(keeper: Keeper, port: Port, *, lease: float = SHORT, max_hold: float = LONG, **terms: Any) -> Hold:
    """Return a hold that is renewed often. Unless the test asks for less, its lease was extended for a minute."""
    drop: Callable[[], object] = terms.pop("drop", lambda: None)
    extended = terms.pop("extended", 60.0)
    hold = Hold(keeper, port, "k", b"token", lease, max_hold, drop, **terms)
    hold.ends += extended
    return hold


@pytest.mark.parametrize("engines, leases", [(3, 1), (1, 20), (2, 20)])
def test_an_engine_that_hangs_keeps_no_other_lease_waiting(engines: int, leases: int) -> None:
    """An engine that hangs must not occupy all threads: leases on other engines are still renewed."""
    keeper, opened = Keeper(), threading.Event()
    hung = [Port(lambda: opened.wait(LONG)) for _ in range(engines)]
    other = Port()
    with ExitStack() as held:
        for port in hung * leases:
            held.enter_context(hold_of(keeper, port))
        for port in hung:
            port.wait(min(leases, THREADS))
        with hold_of(keeper, other):
            other.wait(3)
        assert [port.renewed for port in hung] == [min(leases, THREADS)] * engines
        opened.set()


def test_what_waits_for_its_engine_is_renewed_when_that_answers() -> None:
    """Leases that wait for a stalled engine are renewed as soon as it replies."""
    keeper, opened = Keeper(), threading.Event()
    port = Port(lambda: opened.wait(LONG))
    with ExitStack() as held:
        holds = [held.enter_context(hold_of(keeper, port, lease=30.0)) for _ in range(THREADS + 3)]
        for hold in holds:
            keeper.look_at(hold, time.monotonic())  # all are due at once
        port.wait(THREADS)
        opened.set()
        port.wait(3)
        assert not any(hold.lost for hold in holds)


def test_a_hold_is_renewed_until_it_ends() -> None:
    """A hold is renewed until it ends, and not after that."""
    keeper, port, other = Keeper(), Port(), Port()
    with hold_of(keeper, port):
        port.wait(3)
    renewed = port.renewed
    with hold_of(keeper, other):
        other.wait(3)
    assert port.renewed - renewed <= 1  # one may have been under way
    assert not keeper._holds


def test_many_holds_are_all_renewed_in_time() -> None:
    """All of many holds are renewed in time. None is forgotten behind others in the queue."""
    keeper = Keeper()
    ports = [Port() for _ in range(50)]
    holds = [hold_of(keeper, port, lease=SHORT * (2 + n % 3)) for n, port in enumerate(ports)]
    for hold in holds:
        hold.__enter__()
    for port in ports:
        port.wait(2)
    for hold in holds:
        hold.end()
    assert not keeper._holds


def test_holds_that_come_from_many_threads_are_all_renewed() -> None:
    """A hold is renewed whichever thread adds it, and whenever it does."""
    keeper = Keeper()
    ports = [[Port() for _ in range(20)] for _ in range(8)]
    end = threading.Event()

    def hold_all(own: list[Port]) -> None:
        holds = [hold_of(keeper, port, lease=3 * SHORT).__enter__() for port in own]
        for port in own:
            port.wait(2)
            hold_of(keeper, port).__enter__().end()
        assert end.wait(LONG)
        for hold in holds:
            hold.end()

    threads = [threading.Thread(target=hold_all, args=[own]) for own in ports]
    for thread in threads:
        thread.start()
    end.set()
    for thread in threads:
        thread.join(LONG)
    assert not keeper._holds


def test_a_shorter_lease_that_comes_later_is_renewed_first() -> None:
    """A short lease that is added after a long one is renewed in time."""
    keeper, port = Keeper(), Port()
    with hold_of(keeper, Port(), lease=1000.0), hold_of(keeper, port):
        port.wait(2)


def test_renewal_ends_after_max_hold() -> None:
    """Renewal ends after `max_hold`. Otherwise an origin that hangs would block its key for ever."""
    keeper, port = Keeper(), Port()
    with hold_of(keeper, port, max_hold=3 * SHORT, extended=0.0) as hold:
        until(lambda: not keeper._holds)
        renewed, other = port.renewed, Port()
        with hold_of(keeper, other):
            other.wait(3)
        assert renewed <= 9
        assert port.renewed - renewed <= 1  # one may have been under way
        assert hold.lost


def test_the_clock_tells_that_a_lease_is_lost() -> None:
    """If the engine hangs, a hold is lost when its lease ends by the clock: another caller may be inside then."""
    keeper, opened = Keeper(), threading.Event()
    port, lease = Port(lambda: opened.wait(LONG)), 3.0
    began = time.monotonic()
    with hold_of(keeper, port, lease=lease, since=began - lease / 3, extended=0.0) as hold:
        assert not hold.lost or time.monotonic() - began >= lease * 2 / 3
        keeper.look_at(hold, began)
        port.wait()
        until(lambda: not keeper._holds)
        assert hold.lost
        opened.set()  # a late answer: the hold stays lost
        until(lambda: not keeper._holds)
        assert hold.lost
    assert hold_of(keeper, port, since=began - SHORT, extended=0.0).lost  # the lease counts from before the request


def test_what_is_not_renewed_is_lost_with_its_lease() -> None:
    """After `max_hold` a hold is lost when its lease ends, because another caller may get it then."""
    keeper, began = Keeper(), time.monotonic()
    with hold_of(keeper, Port(), max_hold=0.0, extended=0.0) as hold:
        until(lambda: hold.lost)
        assert time.monotonic() - began >= SHORT


def test_no_lease_is_too_short_or_too_long() -> None:
    """A very short lease is not renewed in a busy loop. A very long one does not overflow the thread's time-out."""
    keeper, brief, port = Keeper(), Port(), Port()
    with hold_of(keeper, Port(), lease=1e300), hold_of(keeper, port), hold_of(keeper, brief, lease=1e-9, extended=0.0):
        port.wait(3)
    assert brief.renewed <= 3 * LONG / 0.005


def test_a_lost_lease_is_noticed() -> None:
    """If a renewal is refused, the hold is lost: others may be inside a lock."""
    keeper, port = Keeper(), Port(False)
    with hold_of(keeper, port) as hold:
        until(lambda: hold.lost)
        until(lambda: not keeper._holds)
    assert port.renewed == 1


def test_one_unanswered_renewal_loses_nothing() -> None:
    """One failed renewal does not end a lease: the next one may succeed."""
    answers = iter([EngineError("gone"), True, True])
    keeper, port = Keeper(), Port(lambda: next(answers, True))
    with hold_of(keeper, port) as hold:
        port.wait(4)
        assert not hold.lost


def test_a_lease_that_can_no_more_be_renewed_is_lost() -> None:
    """If no renewal succeeds, the hold is lost."""
    keeper, port = Keeper(), Port(EngineError("gone"))
    with hold_of(keeper, port, extended=0.0) as hold:
        until(lambda: hold.lost)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError(), SystemExit()])
def test_a_raising_port_ends_nobody_elses_renewal(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in one engine does not end the renewal of other leases."""
    keeper, bad, good = Keeper(), Port(error), Port()
    with hold_of(keeper, bad), hold_of(keeper, good):
        bad.wait(2)
        good.wait(2)
    assert "could not be renewed" in caplog.text


def test_a_holder_that_can_never_end_gives_its_lease_back() -> None:
    """If a holder can never end, as a task of a closed loop, its lease is given back and not renewed."""
    keeper, port, dropped = Keeper(), Port(), threading.Event()
    hold_of(keeper, port, alive=lambda: False, drop=dropped.set).__enter__()
    assert dropped.wait(LONG)
    until(lambda: not keeper._holds)
    assert port.renewed == 0


def test_a_blocked_event_loop_keeps_its_lease() -> None:
    """A computation that blocks its event loop keeps its lease."""
    world = World()

    def left() -> float:
        """Return the rest of the lease by the engine's clock."""
        reply = run_blocking(world.engine.blocking.claims.claim("k", b"the test", Ask(1.0, force=False)))
        assert isinstance(reply, Busy)
        return reply.lease

    async def origin() -> str:
        least = left()
        while (now := left()) <= least:  # until it is renewed
            least = now
            time.sleep(0.01)
        return "value"

    assert asyncio.run(world.aask(origin, policy=Policy(early=0.0, lease=3.0))) == "value"
    assert [e.stored for e in world.told if isinstance(e, Computed)] == [True]
    assert not any(isinstance(e, LeaseLost) for e in world.told)


def test_a_computation_that_is_destroyed_gives_its_lease_back() -> None:
    """If an event loop is closed during a computation, the lease is given back."""
    world, gate = World(), Gate()
    loop = asyncio.new_event_loop()
    task = loop.create_task(world.aask(gate.suspending))
    loop.run_until_complete(until_async(gate.begun.is_set))
    assert world.leased
    tasks = asyncio.all_tasks(loop)
    loop.close()
    for each in tasks:
        each._log_destroy_pending = False  # type: ignore[attr-defined]  # it is destroyed on purpose
        each.get_coro().close()  # type: ignore[union-attr]
    assert task in tasks
    assert not world.leased
    assert not world.flights._flights
    assert world.ask(lambda: "again") == "again"


def test_no_thread_to_be_had() -> None:
    """If the keeper can't start a thread, the computation fails and leaves no lease."""
    world = World()

    class Threadless(Keeper):
        def add(self, hold: Hold) -> None:
            raise RuntimeError("can't start new thread")

    def hold(call: Any, max_hold: float) -> Hold:
        drop = lambda: world._drop(call)  # noqa: E731
        return Hold(Threadless(), world.engine.blocking.claims, call.key, call.token, 10.0, max_hold, drop)

    world._hold = hold  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        world.ask(lambda: 1)
    assert not world.leased
    assert not world.flights._flights


def test_a_thread_that_could_not_start_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the keeper's thread could not start, the next hold starts it. Then leases are renewed."""
    keeper, port = Keeper(), Port()
    start = threading.Thread.start
    with monkeypatch.context() as patch:

        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        first = hold_of(keeper, port)
        first.__enter__()
    assert threading.Thread.start is start
    with hold_of(keeper, Port()):
        port.wait(2)
    first.end()


EXIT = """
import sys, threading
from stampede.leases.keeper import Hold, keeper

sys.modules["stampede.leases.keeper"].AT_EXIT = 20

class Port:
    async def renew(self, key, token, lease):
        return True

def compute(ready):
    with Hold(keeper, Port(), "k", b"token", 10.0, 60.0, lambda: print("given back", flush=True)):
        ready.set()
        threading.Event().wait()

ready = threading.Event()
threading.Thread(target=compute, args=(ready,), daemon=True).start()
ready.wait()
"""


def test_leases_are_given_back_when_the_interpreter_exits() -> None:
    """At the exit of the interpreter, the leases of daemon threads are given back, so they block no other process."""
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=LONG, check=True)
    assert done.stdout.split("\n") == ["given back", ""]
    assert done.stderr == ""


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_keeps_its_own_holds_only() -> None:
    """A forked child renews its own leases, and does not give back those of its parent."""
    keeper, port, dropped = Keeper(), Port(), threading.Event()
    with hold_of(keeper, port, drop=dropped.set) as hold:
        port.wait()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                mine = Port()
                with hold_of(keeper, mine):
                    mine.wait(2)
                keeper.release_all()
                code = 0 if hold.foreign and hold.ended and not dropped.is_set() else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not hold.foreign
        port.wait(2)


def test_an_ended_hold_lets_its_call_go() -> None:
    """A hold that has ended keeps no reference to its call, so the arguments of the call are freed at once."""

    class Call:
        def drop(self) -> None: ...

    keeper, call = Keeper(), Call()
    hold = hold_of(keeper, Port(), lease=1000.0, drop=call.drop)
    with hold:
        left = weakref.ref(call)
        del call
        assert left() is not None
    assert left() is None


def test_a_frozen_holder_stores_nothing() -> None:
    """If a process was frozen past the end of its lease, it does not overwrite what its successor stored."""
    world, gate = World(), Gate("late")

    def cut_off(call: Any, max_hold: float) -> Hold:
        return Hold(Keeper(), Port(EngineError("gone")), call.key, call.token, 10.0, max_hold, lambda: None)  # type: ignore[arg-type]

    other = World()
    other.engine = world.engine
    world._hold = cut_off  # type: ignore[method-assign]
    with Room() as room:
        frozen = room.run(world.ask, gate, "k", Policy(early=0.0, lease=0.05))
        assert gate.begun.wait(LONG)
        assert other.ask(lambda: "new", policy=PLAIN) == "new"
        gate.open.set()
        assert frozen.result(LONG) == "late"
    assert other.ask(lambda: "newer") == "new"
    assert any(isinstance(event, LeaseLost) for event in world.told)


def test_a_lease_that_was_taken_away_is_told_from_one_that_ran_out() -> None:
    """A hold knows whether its lease was taken away, as by an invalidation, or ended because the process was frozen."""
    keeper = Keeper()
    refused = hold_of(keeper, Port(False))
    frozen = Hold(keeper, Port(), "k", b"token", SHORT, LONG, lambda: None, since=time.monotonic() - SHORT)
    assert not frozen.overruled and frozen.lost
    with refused:
        assert refused.overruled
        until(lambda: refused.lost)
        assert refused.overruled and refused.lost


def test_a_hold_that_has_ended_is_forgotten() -> None:
    """The keeper's waiting thread keeps no reference to a hold that has ended, or to its closed engine."""
    keeper, port = Keeper(), Port()
    left = weakref.ref(port)
    with hold_of(keeper, port, lease=0.03):
        pass
    del port
    until(lambda: left() is None)
