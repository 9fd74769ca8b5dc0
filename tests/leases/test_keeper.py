"""The keeper: leases stand while their holders live, and no longer."""

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

from stampede.errors import EngineError
from stampede.events import Computed, LeaseLost
from stampede.leases.keeper import THREADS, Hold, Keeper
from stampede.settings.options import Policy

SHORT = 0.6  # a lease: a machine that stands still for half of it ends none


class Port:
    """Renews as it is told to, and counts."""

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
    drop: Callable[[], object] = terms.pop("drop", lambda: None)
    return Hold(keeper, port, "k", b"token", lease, max_hold, drop, **terms)


@pytest.mark.parametrize("engines, leases", [(3, 1), (1, 20), (2, 20)])
def test_an_engine_that_hangs_keeps_no_other_lease_waiting(engines: int, leases: int) -> None:
    """One hung server would end the leases of all engines of this process, if it took all threads."""
    keeper, opened = Keeper(), threading.Event()
    hung = [Port(lambda: opened.wait(LONG)) for _ in range(engines)]
    other = Port()
    with ExitStack() as held:
        for port in hung * leases:
            held.enter_context(hold_of(keeper, port))
        for port in hung:
            port.wait(min(leases, THREADS))
        with hold_of(keeper, other) as hold:
            other.wait(3)
            assert not hold.lost
        assert [port.renewed for port in hung] == [min(leases, THREADS)] * engines
        opened.set()


def test_what_waits_for_its_engine_is_renewed_when_that_answers() -> None:
    """A short stall would end the leases that were due meanwhile."""
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
    """Leases would end under their holders, or stand after them."""
    keeper, port, other = Keeper(), Port(), Port()
    with hold_of(keeper, port):
        port.wait(3)
    renewed = port.renewed
    with hold_of(keeper, other):
        other.wait(3)
    assert port.renewed - renewed <= 1  # one may have been on its way
    assert not keeper._holds


def test_many_holds_are_all_renewed_in_time() -> None:
    """A hold behind others in the queue would be forgotten."""
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
    """One that is added while the watch looks away would never be renewed."""
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
    """The thread would sleep until the longer one's time."""
    keeper, port = Keeper(), Port()
    with hold_of(keeper, Port(), lease=1000.0), hold_of(keeper, port):
        port.wait(2)


def test_renewal_ends_after_max_hold() -> None:
    """One hung origin would hang its key for ever."""
    keeper, port = Keeper(), Port()
    with hold_of(keeper, port, max_hold=3 * SHORT) as hold:
        until(lambda: not keeper._holds)
        renewed, other = port.renewed, Port()
        with hold_of(keeper, other):
            other.wait(3)
        assert 1 <= renewed <= 9
        assert port.renewed == renewed
        assert hold.lost


def test_the_clock_tells_that_a_lease_is_lost() -> None:
    """Whoever asks, and whoever is to be told, would wait for an engine that hangs, while somebody else is in."""
    keeper, opened = Keeper(), threading.Event()
    port, lease = Port(lambda: opened.wait(LONG)), 3 * SHORT
    began = time.monotonic()
    with hold_of(keeper, port, lease=lease, since=began - lease / 3) as hold:
        assert not hold.lost or time.monotonic() - began >= lease * 2 / 3
        port.wait()
        until(lambda: not keeper._holds)
        assert hold.lost
        opened.set()  # the answer comes after all: it was told to be lost, and stays so
        until(lambda: not keeper._holds)
        assert hold.lost
    assert hold_of(keeper, port, lease=lease, since=began - lease).lost  # it is counted from before the question


def test_what_is_not_renewed_is_lost_with_its_lease() -> None:
    """After max_hold somebody else gets the lease, and its holder would still believe in it."""
    keeper, began = Keeper(), time.monotonic()
    with hold_of(keeper, Port(), max_hold=0.0) as hold:
        until(lambda: hold.lost)
        assert time.monotonic() - began >= SHORT


def test_no_lease_is_too_short_or_too_long() -> None:
    """The one would be renewed in a spin; the other asks the system for a time-out that it can't take."""
    keeper, brief, port = Keeper(), Port(), Port()
    with hold_of(keeper, Port(), lease=1e300), hold_of(keeper, port), hold_of(keeper, brief, lease=1e-9):
        port.wait(3)
    assert brief.renewed <= 3 * LONG / 0.005


def test_a_lost_lease_is_noticed() -> None:
    """A lock's holder would never learn that others may be inside."""
    keeper, port = Keeper(), Port(False)
    with hold_of(keeper, port, lease=3 * SHORT) as hold:
        until(lambda: hold.lost)
        until(lambda: not keeper._holds)
    assert port.renewed == 1


def test_one_unanswered_renewal_loses_nothing() -> None:
    """A hiccup of the network would end leases that stand."""
    answers = iter([EngineError("gone"), True, True])
    keeper, port = Keeper(), Port(lambda: next(answers, True))
    with hold_of(keeper, port) as hold:
        port.wait(4)
        assert not hold.lost


def test_a_lease_that_can_no_more_be_renewed_is_lost() -> None:
    """A holder that is cut off would believe in its lease for ever."""
    keeper, port = Keeper(), Port(EngineError("gone"))
    with hold_of(keeper, port) as hold:
        until(lambda: hold.lost)
    assert port.renewed >= 3


@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError(), SystemExit()])
def test_a_raising_port_ends_nobody_elses_renewal(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """One engine's bug would end all leases of the process."""
    keeper, bad, good = Keeper(), Port(error), Port()
    with hold_of(keeper, bad), hold_of(keeper, good):
        bad.wait(2)
        good.wait(2)
    assert "could not be renewed" in caplog.text


def test_a_holder_that_can_never_end_gives_its_lease_back() -> None:
    """The lease of a task whose loop was closed would be renewed until max_hold."""
    keeper, port, dropped = Keeper(), Port(), threading.Event()
    hold_of(keeper, port, alive=lambda: False, drop=dropped.set).__enter__()
    assert dropped.wait(LONG)
    until(lambda: not keeper._holds)
    assert port.renewed == 0


def test_a_blocked_event_loop_keeps_its_lease() -> None:
    """A computation that blocks its loop would lose the lease that a task was to renew."""
    world = World()

    async def origin() -> str:
        time.sleep(2 * SHORT)
        return "value"

    assert asyncio.run(world.aask(origin, policy=Policy(early=0.0, lease=SHORT))) == "value"
    assert [e.stored for e in world.told if isinstance(e, Computed)] == [True]
    assert not any(isinstance(e, LeaseLost) for e in world.told)


def test_a_computation_that_is_destroyed_gives_its_lease_back() -> None:
    """A loop that is closed under a computation would leave the key leased."""
    world, gate = World(), Gate()
    loop = asyncio.new_event_loop()
    task = loop.create_task(world.aask(gate.suspending))
    loop.run_until_complete(asyncio.sleep(0.01))
    assert world.leased
    tasks = asyncio.all_tasks(loop)
    loop.close()
    for each in tasks:
        each._log_destroy_pending = False  # type: ignore[attr-defined]  # it is what this test is about
        each.get_coro().close()  # type: ignore[union-attr]
    assert task in tasks
    assert not world.leased
    assert not world.flights._flights
    assert world.ask(lambda: "again") == "again"


def test_no_thread_to_be_had() -> None:
    """A computation in a process without room for one more thread would fail, and leave its lease."""
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
    """After one failure no lease of this process would ever be renewed again."""
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
import threading, time
from stampede.leases.keeper import Hold, keeper

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
    """A daemon thread's lease would block everybody for its whole length."""
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=LONG, check=True)
    assert done.stdout.split("\n") == ["given back", ""]
    assert done.stderr == ""


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_keeps_its_own_holds_only() -> None:
    """A child would give its parent's leases back at its exit, or renew nothing: threads don't come along."""
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
    """The arguments of every call would live for a third of a lease after it."""

    class Call:
        def drop(self) -> None: ...

    keeper, call = Keeper(), Call()
    with hold_of(keeper, Port(), lease=1000.0, drop=call.drop):
        left = weakref.ref(call)
        del call
        assert left() is not None
    assert left() is None


def test_a_frozen_holder_stores_nothing() -> None:
    """A process that slept past its lease would overwrite what its successor stored."""
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
    """An ordinary invalidation by another process would be logged as a frozen process, or the other way round."""
    keeper = Keeper()
    refused = hold_of(keeper, Port(False))
    frozen = Hold(keeper, Port(), "k", b"token", SHORT, LONG, lambda: None, since=time.monotonic() - SHORT)
    assert not frozen.overruled and frozen.lost
    with refused:
        assert refused.overruled
        until(lambda: refused.lost)
        assert refused.overruled and refused.lost


def test_a_hold_that_has_ended_is_forgotten() -> None:
    """Its engine, long closed, would live on in the frame of the thread that waits for the next lease."""
    keeper, port = Keeper(), Port()
    left = weakref.ref(port)
    with hold_of(keeper, port, lease=0.03):
        pass
    del port
    until(lambda: left() is None)
