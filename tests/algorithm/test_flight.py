"""Flights with real threads and event loops: leaders, followers, cancellation, recursion and forks."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
from bare_cache import LONG, PLAIN, Gate, Room, World, never, until
from herd import until_async

from stampede import Cache
from stampede.algorithm import background, flight
from stampede.algorithm.flight import Flight
from stampede.errors import EngineError, RecursiveComputation, WaitTimeout
from stampede.events import Computed
from stampede.leases.keeper import keeper
from stampede.model.entry import Entry
from stampede.model.record import NOTHING
from stampede.model.result import own_copy
from stampede.runtime import process_lock
from stampede.runtime.colour import hold_task, run_blocking
from stampede.settings.options import Policy

# -- one flight for all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leader", ["blocking", "suspending"])
def test_threads_and_loops_share_a_flight(leader: str) -> None:
    """Threads and tasks that need the same key share one flight, so the function runs once."""
    world, gate = World(), Gate()
    with Room() as room:
        if leader == "blocking":
            first = room.run(world.ask, gate)
        else:
            first = room.loop(lambda: world.aask(gate.suspending))
        assert gate.begun.wait(LONG)
        others = [room.run(world.ask, never) for _ in range(4)] + [room.loop(lambda: world.aask(never)) for _ in "ab"]
        world.followers(6)
        gate.open.set()
        assert {f.result(LONG) for f in [first, *others]} == {"value"}
    assert gate.calls == 1
    assert not world.flights._flights


def test_followers_get_copies_of_an_error() -> None:
    """Each follower gets its own copy of an error. Otherwise, one traceback would grow with each follower."""

    class Odd(Exception):
        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

    world, gate = World(), Gate(Odd(5))
    with Room() as room:
        first = room.run(world.ask, gate)
        assert gate.begun.wait(LONG)
        others = [room.run(world.ask, never) for _ in range(3)]
        world.followers(3)
        gate.open.set()
        errors = [f.exception(LONG) for f in [first, *others]]
    assert len({id(error) for error in errors}) == 4
    assert all(type(error) is Odd and error.code == 5 and str(error) == "code 5" for error in errors)


def test_an_error_that_cannot_be_copied_is_passed_on_itself() -> None:
    """An error that cannot be copied is passed on as it is. It is not replaced by a TypeError."""

    class Strange(Exception):
        def __new__(cls, *args: Any, key: str) -> Any:
            return super().__new__(cls, *args)

        def __init__(self, *args: Any, key: str) -> None:
            super().__init__(*args)

    error = Strange("x", key="y")
    assert own_copy(error) is error


def test_a_detached_flight_keeps_its_value_for_its_leader() -> None:
    """After an invalidation, only the leader gets the older value. Its followers and later callers get a new one."""
    world, old, new = World(), Gate("old"), Gate("new")
    with Room() as room:
        first = room.run(world.ask, old)
        assert old.begun.wait(LONG)
        follower = room.run(world.ask, new)
        world.followers(1)
        world.invalidate()
        late = room.run(world.ask, new)
        assert new.begun.wait(LONG)
        world.followers(1)
        old.open.set()
        assert first.result(LONG) == "old"
        new.open.set()
        assert {follower.result(LONG), late.result(LONG)} == {"new"}
    assert (old.calls, new.calls) == (1, 1)


# -- cancellation and interrupts --------------------------------------------------------------------------------------


def test_a_cancelled_waiter_disturbs_nobody() -> None:
    """A waiter that is cancelled does not cancel the computation or the other waiters."""
    world, gate = World(), Gate()

    async def main() -> None:
        leader = asyncio.create_task(world.aask(gate.suspending))
        waiter = asyncio.create_task(world.aask(never))
        patient = asyncio.create_task(world.aask(never))
        while "k" not in world.flights._flights or world.flights._flights["k"].callers < 3:
            await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        gate.open.set()
        assert await asyncio.gather(leader, patient) == ["value", "value"]

    asyncio.run(main())
    assert gate.calls == 1


def test_the_computation_outlives_its_cancelled_leader() -> None:
    """If the leader is cancelled, the computation continues for its followers."""
    world, gate = World(), Gate()

    async def main() -> None:
        leader = asyncio.create_task(world.aask(gate.suspending))
        follower = asyncio.create_task(world.aask(never))
        while not gate.begun.is_set():
            await asyncio.sleep(0)
        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        gate.open.set()
        assert await follower == "value"

    asyncio.run(main())
    assert gate.calls == 1
    assert not world.flights._flights


def test_a_computation_without_callers_is_cancelled_and_its_lease_released() -> None:
    """If all callers are cancelled, the computation is cancelled and its lease is given back."""
    world, gate = World(), Gate()

    async def main() -> None:
        tasks = [asyncio.create_task(world.aask(gate.suspending)) for _ in range(3)]
        while not gate.begun.is_set():
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        while world.leased:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), LONG))
    assert not world.flights._flights


def test_a_thread_keeps_a_computation_alive_whose_tasks_are_gone() -> None:
    """A thread that waits keeps a computation alive even if all tasks are cancelled."""
    world, gate = World(), Gate()

    async def main() -> Any:
        leader = asyncio.create_task(world.aask(gate.suspending))
        while not gate.begun.is_set():
            await asyncio.sleep(0)
        follower = asyncio.get_running_loop().run_in_executor(None, world.ask, never)
        while world.flights._flights["k"].callers < 2:
            await asyncio.sleep(0)
        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        gate.open.set()
        return await follower

    assert asyncio.run(main()) == "value"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_the_leaders_own(error: type[BaseException]) -> None:
    """A KeyboardInterrupt or SystemExit reaches only the leader. One follower computes again for the others."""
    world, gate, again = World(), Gate(error()), Gate("again")
    again.open.set()
    with Room() as room:
        leader = room.run(world.ask, gate)
        assert gate.begun.wait(LONG)
        followers = [room.run(world.ask, again) for _ in range(3)]
        world.followers(3)
        gate.open.set()
        assert isinstance(leader.exception(LONG), error)
        assert {f.result(LONG) for f in followers} == {"again"}
    assert again.calls == 1


# -- recursion and deadlocks --------------------------------------------------------------------------------------


def test_a_computation_that_asks_for_its_own_key() -> None:
    """A computation that asks for its own key is refused: it would wait for itself."""
    world = World()
    with pytest.raises(RecursiveComputation):
        world.ask(lambda: world.ask(never))
    assert world.ask(lambda: 1) == 1
    with pytest.raises(RecursiveComputation):
        asyncio.run(world.aask(lambda: world.aask(never, "a"), "a"))


def test_recursion_is_seen_in_threads_with_a_copied_context() -> None:
    """Recursion is also found in a thread with a copied context, for example in `asyncio.to_thread`."""
    world = World()

    async def origin() -> Any:
        return await asyncio.to_thread(world.ask, never)

    with pytest.raises(RecursiveComputation):
        asyncio.run(world.aask(origin))
    with pytest.raises(RecursiveComputation), Room() as room:
        world.ask(lambda: room.run(copy_context().run, world.ask, never).result(LONG))


def test_recursion_is_seen_after_an_invalidation() -> None:
    """Recursion is also found if the computation invalidates its own key before it asks for it."""
    world = World()

    def origin() -> Any:
        world.invalidate()
        return world.ask(origin)

    with pytest.raises(RecursiveComputation):
        world.ask(origin)


def test_what_a_computation_leaves_behind_may_ask_for_its_key() -> None:
    """A task that was started inside a computation may ask for the key after the computation has ended."""
    world = World()

    async def main() -> None:
        later: list[asyncio.Task[Any]] = []
        ended = asyncio.Event()

        async def after() -> Any:
            await ended.wait()
            return await world.aask(lambda: "again", policy=Policy(early=0.0))

        async def origin() -> str:
            later.append(hold_task(asyncio.create_task(after())))
            return "first"

        assert await world.aask(origin) == "first"
        world.invalidate()
        ended.set()
        assert await later[0] == "again"

    asyncio.run(main())


def test_a_context_that_outlives_a_computation_alone() -> None:
    """A context that was copied inside an unstored computation may ask for the key after the computation has ended."""
    world, gate = World(), Gate()

    async def main() -> None:
        leader = asyncio.create_task(world.aask(gate.suspending))
        while not gate.begun.is_set():
            await asyncio.sleep(0)
        inside = world.ask(copy_context)  # it computes alone: this call blocks the loop of the leader
        gate.open.set()
        assert await leader == "value"
        world.invalidate()
        assert inside.run(world.ask, lambda: "again") == "again"

    asyncio.run(main())


@pytest.mark.parametrize("processes", [1, 2])
def test_two_computations_that_ask_for_each_other(processes: int) -> None:
    """Two computations that ask for each other's keys do not deadlock: one of them computes the other's key alone."""
    one = World()
    two = one if processes == 1 else World()
    two.engine = one.engine  # two caches, as in two processes, on one engine
    policy, both = Policy(early=0.0, lease=0.2), threading.Barrier(2)

    def origin(world: World, other: str) -> Any:
        both.wait(LONG)
        return world.ask(lambda: f"{other} alone", other, policy)

    with Room() as room:
        a = room.run(one.ask, lambda: origin(one, "b"), "a", policy)
        b = room.run(two.ask, lambda: origin(two, "a"), "b", policy)
        results = {a.result(LONG), b.result(LONG)}
    assert any("alone" in result for result in results)
    if processes == 1:  # the engine may have taken a lease of 0.2 s from the other process
        assert any(isinstance(event, Computed) and event.why == "alone" for event in one.told)


def test_a_sync_call_on_the_thread_of_the_loop_that_leads() -> None:
    """A sync call on the thread of the leader's loop computes alone. If it waited, the leader could not go on."""
    world, gate = World(), Gate()

    async def main() -> None:
        leader = asyncio.create_task(world.aask(gate.suspending))
        while not gate.begun.is_set():
            await asyncio.sleep(0)
        assert world.ask(lambda: "alone") == "alone"
        gate.open.set()
        assert await leader == "value"
        assert await world.aask(never) == "value"

    asyncio.run(main())


def test_a_herd_shares_even_what_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `ttl=0`, callers that wait in other processes get the computed value. They do not compute one by one."""
    monkeypatch.setattr("stampede.local_tier.residents.GRACE", LONG)
    world, gate = World(), Gate()
    policy = Policy(ttl=0.0)
    others = [World() for _ in range(3)]
    with Room() as room:
        leader = room.run(lambda: world.ask(gate, policy=policy, draws=True))
        assert gate.begun.wait(LONG)
        asked = []
        for other in others:
            other.engine = world.engine
            asked.append(room.run(lambda other=other: other.ask(never, policy=policy, draws=True)))
            other.followers(0)
        until(lambda: len(listeners(world)) == 3)
        gate.open.set()
        assert {leader.result(LONG), *(f.result(LONG) for f in asked)} == {"value"}


def listeners(world: World) -> list[Any]:
    """Return the waiters that sleep in the engine until the lease of "k" ends."""
    keys = world.engine._parts[0]
    lease = keys.records.get("k", NOTHING).lease
    hung = keys.awaited.get(lease.token) if lease is not None else None
    return hung.bell._listeners or [] if hung is not None else []


def test_wait_runs_out() -> None:
    """A caller with `wait` gives up after that time, whether the computation runs in its process or in another."""
    world, gate = World(), Gate()
    with Room() as room:
        leader = room.run(world.ask, gate)
        assert gate.begun.wait(LONG)
        with pytest.raises(WaitTimeout):
            world.ask(never, policy=Policy(early=0.0, wait=0.02))
        with pytest.raises(WaitTimeout):
            asyncio.run(world.aask(never, policy=Policy(early=0.0, wait=0.02)))
        other = World()
        other.engine = world.engine
        with pytest.raises(WaitTimeout):
            other.ask(never, policy=Policy(early=0.0, wait=0.02))
        gate.open.set()
        assert leader.result(LONG) == "value"


# -- loops that close, processes that fork ----------------------------------------------------------------------------


def test_a_loop_closed_under_its_leader_orphans_the_flight() -> None:
    """If the leader's loop is closed, a follower computes. It does not wait for a task that never runs again."""
    world, gate = World(), Gate()
    loop = asyncio.new_event_loop()
    task = loop.create_task(world.aask(gate.suspending, policy=Policy(early=0.0, lease=0.3)))
    loop.run_until_complete(until_async(gate.begun.is_set))
    with Room() as room:
        follower = room.run(world.ask, lambda: "again")
        world.followers(1)
        loop.close()
        assert follower.result(LONG) == "again"
        assert room.run(world.ask, never).result(LONG) == "again"
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # the task is left pending on purpose
    task.get_coro().close()  # type: ignore[union-attr]


def test_the_last_follower_of_a_closed_loop_leaves_in_peace() -> None:
    """If the loop of a computation is closed, its last follower can leave without an error."""
    world, gate = World(), Gate()
    loop = asyncio.new_event_loop()
    policy = Policy(early=0.0, lease=0.3)
    task = loop.create_task(world.aask(gate.suspending, policy=policy))
    loop.run_until_complete(until_async(gate.begun.is_set))
    with Room() as room:
        follower = room.run(world.ask, lambda: "again")
        world.followers(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
        work = list(asyncio.all_tasks(loop))
        loop.close()
        assert follower.result(LONG) == "again"
    for each in work:
        each._log_destroy_pending = False  # type: ignore[attr-defined]  # the task is left pending on purpose
        each.get_coro().close()  # type: ignore[union-attr]


def test_a_follower_whose_loop_is_closed_orphans_nobody() -> None:
    """If the loop of a follower is closed, the other callers still wait for the leader."""
    world, gate = World(), Gate()

    async def impatient() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(world.aask(never), 0.02)

    with Room() as room:
        leader = room.loop(lambda: world.aask(gate.suspending))
        assert gate.begun.wait(LONG)
        asyncio.run(impatient())
        follower = room.run(world.ask, never)
        world.followers(1)
        assert world.flights._flights["k"].is_under_way()
        gate.open.set()
        assert (leader.result(LONG), follower.result(LONG)) == ("value", "value")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forked_inside_a_computation(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is forked inside a computation computes for itself and does not use its parent's lease."""
    world, parent, verbs = World(), os.getpid(), type(World().engine.blocking.claims)

    def origin() -> str:
        pid = os.fork()
        if pid == 0:
            mine = world.ask(lambda: "the child's")  # the same key: in the child, no computation of it is running
            for verb in ("fill", "abandon"):
                monkeypatch.setattr(verbs, verb, lambda *args: os._exit(3))
            if fails:
                raise OSError(mine)
            return str(mine)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return "the parent's"

    try:
        got = world.ask(origin)
        if os.getpid() != parent:
            os._exit(0 if got == "the child's" and not fails else 4)
    except OSError as error:
        if os.getpid() != parent:
            os._exit(0 if str(error) == "the child's" and fails else 5)
        raise
    finally:
        if os.getpid() != parent:
            os._exit(6)
    assert got == "the parent's"
    assert world.ask(never) == "the parent's"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_while_others_fly() -> None:
    """A forked child computes for itself. It does not follow flights whose leaders are threads of its parent."""
    world, gate = World(), Gate()
    with Room() as room:
        leader = room.run(world.ask, gate)
        assert gate.begun.wait(LONG)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if world.ask(lambda: "the child's") == "the child's" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        gate.open.set()
        assert leader.result(LONG) == "value"


# -- in the background ------------------------------------------------------------------------------------------------


def test_a_refresh_in_the_background_keeps_nobody_waiting() -> None:
    """With `background=True`, callers get the stale value at once, and only one refresh is started."""
    world, gate = World(), Gate("new")
    run_blocking(world.engine.blocking.store.set("k", Entry("old", b"old", fresh=0.0, keep=100.0)))
    with Room() as room:
        begun: list[Future[Any]] = []

        class Beside:
            def reserve(self) -> bool:
                return True

            def begin(self, work: Any, bell: Any, longest: float, *, waits: bool) -> None:
                assert not waits
                begun.append(room.run(run_blocking, work))

        terms: dict[str, Any] = {"policy": PLAIN.with_options(background=True), "beside": Beside()}
        assert world.ask(gate, **terms) == "old"
        assert gate.begun.wait(LONG)
        assert world.ask(never, **terms) == "old"
        gate.open.set()
        begun[0].result(LONG)
        assert world.ask(never) == "new"
    assert len(begun) == 1


def test_a_copy_of_an_error_has_its_cause_and_attributes() -> None:
    """A follower's copy of an error has the cause, the attributes and the traceback of the original."""

    def fail() -> None:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            error = OSError(2, "gone", "file")
            error.seen = "x"  # type: ignore[attr-defined]
            raise error from inner

    with pytest.raises(OSError, match="gone") as caught:
        fail()
    error, twin = caught.value, own_copy(caught.value)
    assert twin is not error
    assert isinstance(twin, OSError)
    assert (twin.errno, twin.filename, twin.__cause__) == (2, "file", error.__cause__)
    assert twin.seen == "x"  # type: ignore[attr-defined]
    assert twin.__traceback__ is error.__traceback__


@pytest.mark.parametrize("error", [EngineError("the reason"), FileNotFoundError(2, "gone", "file"), ImportError("no")])
def test_a_copied_error_says_the_same(error: Exception) -> None:
    """A copied error has the text of the original. Otherwise, followers would not learn why the call failed."""
    assert str(own_copy(error)) == str(error)


def test_flights_of_other_caches_are_other_flights() -> None:
    """Two caches that use the same key have separate flights. A call of one inside the other is no recursion."""
    one, two = World(), World()
    assert one.ask(lambda: two.ask(lambda: "inner")) == "inner"
    assert isinstance(Flight(one.flights, "k", None), Flight)


def test_a_finalizer_may_end_a_computation_in_the_middle_of_a_decision() -> None:
    """A finalizer may end a computation while its thread holds a lock of the library. This does not deadlock."""
    world = World()

    def decide() -> Any:
        with process_lock.lock, keeper.lock:
            return world.ask(lambda: "value")

    with Room() as room:
        assert room.run(decide).result(LONG) == "value"


# -- leaders that hang ------------------------------------------------------------------------------------------------

BRIEF = Policy(early=0.0, lease=0.1, max_hold=0.2)
LASTING: dict[str, Any] = {"lease": 60, "max_hold": 60}  # a busy machine loses no lease of who computes in time


@pytest.mark.parametrize("follower", ["thread", "loop"])
@pytest.mark.parametrize("leader", ["thread", "loop"])
def test_a_leader_that_hangs_is_left_after_max_hold(leader: str, follower: str) -> None:
    """If an origin hangs, followers wait no longer than `max_hold`, then one computes. The late value is not stored."""
    world, hung = World(), Gate("too late")
    with Room() as room:
        if leader == "thread":
            first = room.run(world.ask, hung, "k", BRIEF)
        else:
            first = room.loop(lambda: world.aask(hung.suspending, policy=BRIEF))
        assert hung.begun.wait(LONG)
        began = time.monotonic()
        if follower == "thread":
            others = [room.run(world.ask, lambda: "in time", "k", PLAIN) for _ in range(3)]
        else:
            others = [room.loop(lambda: world.aask(lambda: "in time", policy=PLAIN)) for _ in range(3)]
        assert [other.result(LONG) for other in others] == ["in time"] * 3
        assert time.monotonic() - began < LONG / 2
        assert world.ask(never) == "in time"
        hung.open.set()
        assert first.result(LONG) == "too late"
        assert world.ask(never) == "in time"
    assert sum(isinstance(event, Computed) and event.stored for event in world.told) == 1


def test_a_computation_whose_loop_rests_is_left_after_max_hold() -> None:
    """If the loop of a computation no longer runs, followers wait no longer than `max_hold`, then one computes."""
    world, gate = World(), Gate()
    with Room() as room, asyncio.Runner() as runner:

        async def main() -> Future[Any]:
            leader = asyncio.create_task(world.aask(gate.suspending, policy=BRIEF))
            while not gate.begun.is_set():
                await asyncio.sleep(0)
            led = world.flights._flights["k"]
            follower = room.run(world.ask, lambda: "in time", "k", PLAIN)
            while led.callers < 2 and not led.detached:
                await asyncio.sleep(0)
            leader.cancel()
            await asyncio.gather(leader, return_exceptions=True)
            return follower

        follower = runner.run(main())
        assert follower.result(LONG) == "in time"
        gate.open.set()


def test_a_leader_that_only_asks_is_left_with_its_loop_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the leader's loop no longer runs, followers do not wait for the leader to process the engine's reply."""
    monkeypatch.setattr(flight, "SAFETY", 0.05)
    world, elsewhere, gate = World(), World(), Gate()
    elsewhere.engine = world.engine
    with Room() as room, asyncio.Runner() as runner:
        holder = room.run(elsewhere.ask, gate)
        assert gate.begun.wait(LONG)

        async def main() -> asyncio.Task[Any]:
            leader = asyncio.create_task(world.aask(never))
            while "k" not in world.flights._flights or not listeners(world):
                await asyncio.sleep(0)
            return leader

        leader = runner.run(main())
        led = world.flights._flights["k"]
        follower = room.run(world.ask, never)
        until(lambda: led.callers > 1 or led.detached)
        gate.open.set()
        assert holder.result(LONG) == "value"
        assert follower.result(LONG) == "value"
        leader.cancel()


@pytest.mark.parametrize("colour", ["thread", "loop"])
def test_people_are_told_who_waits_for_whom(colour: str, caplog: pytest.LogCaptureFixture) -> None:
    """If a computation waits for itself in a thread of a pool, the log warns of a possible deadlock."""
    world, policy = World(), Policy(early=0.0, lease=0.05, max_hold=60)

    def told() -> list[str]:
        text = "s for 'k', longer than its lease of 0.05 s: possibly a deadlock"
        return [each for each in caplog.messages if text in each]

    def asks_for_itself() -> Any:
        return room.run(world.ask, lambda: "alone", "k", policy).result(LONG)

    async def asks_in_a_thread() -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, asks_for_itself)

    with Room() as room, caplog.at_level("WARNING", "stampede"):
        if colour == "thread":
            first = room.run(world.ask, asks_for_itself, "k", policy)
        else:
            first = room.loop(lambda: world.aask(asks_in_a_thread, "k", policy))
        until(told)
        world.invalidate()  # this ends the wait
        assert first.result(LONG) == "alone"
    assert len(told()) == 1


def test_a_batch_that_hangs_is_left_after_max_hold() -> None:
    """If the loader of a batch hangs, callers of its keys wait no longer than `max_hold`."""
    begun, end = threading.Event(), threading.Event()

    def hangs(keys: list[str]) -> dict[str, str]:
        begun.set()
        assert end.wait(LONG)
        return dict.fromkeys(keys, "too late")

    with Room() as room, Cache("memory://", lease=0.1, max_hold=0.2) as cache:
        batch = room.run(cache.get_or_compute_many, ["a", "b"], hangs)
        assert begun.wait(LONG)
        assert room.run(partial(cache.get_or_compute, "b", lambda: "in time", **LASTING)).result(LONG) == "in time"
        end.set()
        assert batch.result(LONG) == {"a": "too late", "b": "too late"}
        assert cache.get("b") == "in time"


def test_refreshes_that_hang_leave_their_places_to_others() -> None:
    """Refreshes that hang give up their places after `max_hold`, so other values are still refreshed."""
    hung, where = Gate("too late"), list[str]()
    terms: dict[str, Any] = {"background": True, "stale": 60, "lease": 0.1, "max_hold": 0.2}

    def stale(cache: Cache, key: str) -> str:
        cache.set(key, "old", stale=60)
        cache.expire(key)
        return key

    def refresh() -> str:
        where.append(threading.current_thread().name)
        return "new"

    with Cache("memory://", early=0, **terms) as cache:
        try:
            for n in range(4):
                assert cache.get_or_compute(stale(cache, f"hung {n}"), hung) == "old"
            until(lambda: hung.calls == 4)
            until(lambda: max(background._refreshers.taken.values()) < time.monotonic())
            assert cache.get_or_compute(stale(cache, "k"), refresh, **LASTING) == "old"
            until(lambda: cache.get("k") == "new")
        finally:
            hung.open.set()
        until(lambda: background._refreshers.taken == {})
    assert where == ["stampede-refresh"]
