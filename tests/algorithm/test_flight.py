"""Flights under real threads and real event loops: who computes, who waits, who is cancelled, and what forks do."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

import pytest
from bare_cache import LONG, PLAIN, Gate, Room, World, never, until

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
    """Each colour would compute for itself."""
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
    """One traceback would grow with every follower that raises it."""

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
    """The follower of a strange exception would see a TypeError of ours instead."""

    class Strange(Exception):
        def __new__(cls, *args: Any, key: str) -> Any:
            return super().__new__(cls, *args)

        def __init__(self, *args: Any, key: str) -> None:
            super().__init__(*args)

    error = Strange("x", key="y")
    assert own_copy(error) is error


def test_a_detached_flight_keeps_its_value_for_its_leader() -> None:
    """Callers after an invalidation would get what was computed before it."""
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
    """One impatient caller would cancel everybody's computation."""
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
    """The followers of a leader that timed out would begin again."""
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
    """Work for nobody would go on, and its lease stand."""
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
    """A blocking follower isn't counted: the computation would be cancelled under it."""
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
    """Ctrl-C in one thread would end the callers in all others."""
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
    """It would wait for itself."""
    world = World()
    with pytest.raises(RecursiveComputation):
        world.ask(lambda: world.ask(never))
    assert world.ask(lambda: 1) == 1
    with pytest.raises(RecursiveComputation):
        asyncio.run(world.aask(lambda: world.aask(never, "a"), "a"))


def test_recursion_is_seen_in_threads_with_a_copied_context() -> None:
    """`asyncio.to_thread` inside a computation would hide that it waits for itself."""
    world = World()

    async def origin() -> Any:
        return await asyncio.to_thread(world.ask, never)

    with pytest.raises(RecursiveComputation):
        asyncio.run(world.aask(origin))
    with pytest.raises(RecursiveComputation), Room() as room:
        world.ask(lambda: room.run(copy_context().run, world.ask, never).result(LONG))


def test_recursion_is_seen_after_an_invalidation() -> None:
    """A computation that invalidates its own key and asks again would recurse for ever."""
    world = World()

    def origin() -> Any:
        world.invalidate()
        return world.ask(origin)

    with pytest.raises(RecursiveComputation):
        world.ask(origin)


def test_what_a_computation_leaves_behind_may_ask_for_its_key() -> None:
    """A task started inside a computation would be refused its key for ever."""
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
    """What was started inside an unstored computation would be refused its key for ever."""
    world, gate = World(), Gate()

    async def main() -> None:
        leader = asyncio.create_task(world.aask(gate.suspending))
        while not gate.begun.is_set():
            await asyncio.sleep(0)
        inside = world.ask(copy_context)  # alone: it blocks the loop that leads
        gate.open.set()
        assert await leader == "value"
        world.invalidate()
        assert inside.run(world.ask, lambda: "again") == "again"

    asyncio.run(main())


@pytest.mark.parametrize("processes", [1, 2])
def test_two_computations_that_ask_for_each_other(processes: int) -> None:
    """A waits for B, B for A: neither would ever end."""
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
    assert any(isinstance(event, Computed) and event.why == "alone" for event in one.told + two.told)


def test_a_sync_call_on_the_thread_of_the_loop_that_leads() -> None:
    """It would block the loop that must run for it to end."""
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


def test_a_herd_shares_even_what_is_not_kept() -> None:
    """With ttl 0, every process that waited would find the value due again, and compute in its turn."""
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
    """Who sleeps in the engine until the lease of "k" falls."""
    keys = world.engine._parts[0]
    lease = keys.records.get("k", NOTHING).lease
    hung = keys.awaited.get(lease.token) if lease is not None else None
    return hung.bell._listeners or [] if hung is not None else []


def test_wait_runs_out() -> None:
    """A caller with a deadline would wait as long as the computation takes."""
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
    """Callers would wait for a task that nobody will ever run."""
    world, gate = World(), Gate()
    loop = asyncio.new_event_loop()
    task = loop.create_task(world.aask(gate.suspending, policy=Policy(early=0.0, lease=0.3)))
    loop.run_until_complete(asyncio.sleep(0.01))
    assert gate.begun.is_set()
    with Room() as room:
        follower = room.run(world.ask, lambda: "again")
        world.followers(1)
        loop.close()
        assert follower.result(LONG) == "again"
        assert room.run(world.ask, never).result(LONG) == "again"
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is what this test is about
    task.get_coro().close()  # type: ignore[union-attr]


def test_the_last_follower_of_a_closed_loop_leaves_in_peace() -> None:
    """Cancelling a computation whose loop is closed would raise in whoever leaves last."""
    world, gate = World(), Gate()
    loop = asyncio.new_event_loop()
    policy = Policy(early=0.0, lease=0.3)
    task = loop.create_task(world.aask(gate.suspending, policy=policy))
    loop.run_until_complete(asyncio.sleep(0.01))
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
        each._log_destroy_pending = False  # type: ignore[attr-defined]  # it is what this test is about
        each.get_coro().close()  # type: ignore[union-attr]


def test_a_follower_whose_loop_is_closed_orphans_nobody() -> None:
    """One short-lived loop that waited would cut all others off from their leader."""
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
    """The child would fill or give back its parent's lease, or take the parent's computation for its own."""
    world, parent, verbs = World(), os.getpid(), type(World().engine.blocking.claims)

    def origin() -> str:
        pid = os.fork()
        if pid == 0:
            mine = world.ask(lambda: "the child's")  # the same key: here nobody computes it
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
    """A child would follow flights whose leaders are threads that it hasn't got."""
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


# -- beside the caller ------------------------------------------------------------------------------------------------


def test_a_refresh_in_the_background_keeps_nobody_waiting() -> None:
    """The caller that notices would wait for the refresh; or a second one would start."""
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
    """The follower's traceback would say less than the leader's."""

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
    """Callers who had joined read "[Errno None] None: None -> None", and never learned why."""
    assert str(own_copy(error)) == str(error)


def test_flights_of_other_caches_are_other_flights() -> None:
    """The same key in two caches would be taken for recursion."""
    one, two = World(), World()
    assert one.ask(lambda: two.ask(lambda: "inner")) == "inner"
    assert isinstance(Flight(one.flights, "k", None), Flight)


def test_a_finalizer_may_end_a_computation_in_the_middle_of_a_decision() -> None:
    """The collector closes a lost coroutine while its thread holds one of our locks: it would wait for itself."""
    world = World()

    def decide() -> Any:
        with process_lock.lock, keeper.lock:
            return world.ask(lambda: "value")

    with Room() as room:
        assert room.run(decide).result(LONG) == "value"


# -- leaders that hang ------------------------------------------------------------------------------------------------

BRIEF = Policy(early=0.0, lease=0.1, max_hold=0.2)


@pytest.mark.parametrize("follower", ["thread", "loop"])
@pytest.mark.parametrize("leader", ["thread", "loop"])
def test_a_leader_that_hangs_is_left_after_max_hold(leader: str, follower: str) -> None:
    """One origin without a time-out would hang its key for all callers of its process, for ever."""
    world, hung = World(), Gate("too late")
    with Room() as room:
        if leader == "thread":
            first = room.run(world.ask, hung, "k", BRIEF)
        else:
            first = room.loop(lambda: world.aask(hung.suspending, policy=BRIEF))
        assert hung.begun.wait(LONG)
        began = time.monotonic()
        if follower == "thread":
            others = [room.run(world.ask, lambda: "in time", "k", BRIEF) for _ in range(3)]
        else:
            others = [room.loop(lambda: world.aask(lambda: "in time", policy=BRIEF)) for _ in range(3)]
        assert [other.result(LONG) for other in others] == ["in time"] * 3
        assert time.monotonic() - began < LONG / 2
        assert world.ask(never) == "in time"
        hung.open.set()
        assert first.result(LONG) == "too late"
        assert world.ask(never) == "in time"
    assert sum(isinstance(event, Computed) and event.stored for event in world.told) == 1


def test_a_computation_whose_loop_rests_is_left_after_max_hold() -> None:
    """A caller that was cancelled leaves its computation to a thread, and the loop that should run it is at rest."""
    world, gate = World(), Gate()
    with Room() as room, asyncio.Runner() as runner:

        async def main() -> Future[Any]:
            leader = asyncio.create_task(world.aask(gate.suspending, policy=BRIEF))
            while not gate.begun.is_set():
                await asyncio.sleep(0)
            follower = room.run(world.ask, lambda: "in time", "k", BRIEF)
            while world.flights._flights["k"].callers < 2:
                await asyncio.sleep(0)
            leader.cancel()
            await asyncio.gather(leader, return_exceptions=True)
            return follower

        follower = runner.run(main())
        assert follower.result(LONG) == "in time"
        gate.open.set()


def test_a_leader_that_only_asks_is_left_with_its_loop_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads would wait for a task that has heard from the engine, and is never run again."""
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
        follower = room.run(world.ask, never)
        world.followers(1)
        gate.open.set()
        assert holder.result(LONG) == "value"
        assert follower.result(LONG) == "value"
        leader.cancel()


@pytest.mark.parametrize("colour", ["thread", "loop"])
def test_people_are_told_who_waits_for_whom(colour: str, caplog: pytest.LogCaptureFixture) -> None:
    """A computation that asks for its own key in a thread of a pool would wait for itself, and nobody know why."""
    world, policy = World(), Policy(early=0.0, lease=0.05, max_hold=60)

    def asks_for_itself() -> Any:
        return room.run(world.ask, never, "k", policy.with_options(wait=0.3)).result(LONG)

    async def asks_in_a_thread() -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, asks_for_itself)

    with Room() as room, caplog.at_level("WARNING", "stampede"):
        if colour == "thread":
            first = room.run(world.ask, asks_for_itself, "k", policy)
        else:
            first = room.loop(lambda: world.aask(asks_in_a_thread, "k", policy))
        assert isinstance(first.exception(LONG), WaitTimeout)
    [line] = [record.getMessage() for record in caplog.records if record.name == "stampede"]  # and not asyncio
    assert "s for 'k', longer than its lease of 0.05 s: possibly a deadlock" in line


def test_a_batch_that_hangs_is_left_after_max_hold() -> None:
    """The keys of a batch would hang with it, for all who ask for one of them."""
    begun, end = threading.Event(), threading.Event()

    def hangs(keys: list[str]) -> dict[str, str]:
        begun.set()
        assert end.wait(LONG)
        return dict.fromkeys(keys, "too late")

    with Room() as room, Cache("memory://", lease=0.1, max_hold=0.2) as cache:
        batch = room.run(cache.get_or_compute_many, ["a", "b"], hangs)
        assert begun.wait(LONG)
        assert room.run(cache.get_or_compute, "b", lambda: "in time").result(LONG) == "in time"
        end.set()
        assert batch.result(LONG) == {"a": "too late", "b": "too late"}
        assert cache.get("b") == "in time"


def test_refreshes_that_hang_leave_their_places_to_others() -> None:
    """Four hung refreshes, and no other value of the process would ever be refreshed beside its callers again."""
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
            assert cache.get_or_compute(stale(cache, "k"), refresh) == "old"
            until(lambda: cache.get("k") == "new")
        finally:
            hung.open.set()
        until(lambda: background._refreshers.taken == {})
    assert where == ["stampede-refresh"]
