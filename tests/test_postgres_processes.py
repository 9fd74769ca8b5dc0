"""Caches of several processes on one Postgres server: herds, and holders that are killed, frozen, cut off, forked and
overtaken."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("psycopg")

from disk_world import Connection, other, others
from herd import Herd, until, until_async
from interleaving import Plan, check, played
from postgres_server import PostgresServer, shared_postgres

from stampede import Cache
from stampede.colour import run_blocking as run
from stampede.engines.postgres import PostgresEngine, verbs
from stampede.entry import Entry, new_id
from stampede.ports import Ask, Busy, Granted

LEASE = 60.0
"""So long that no test here ends by it."""

STANDING = "SELECT FROM stampede.leases WHERE token IS NOT NULL AND ends > stampede.clock()"


@pytest.fixture
def server() -> PostgresServer:
    shared_postgres().prepare()
    return shared_postgres()


@pytest.fixture
def mine(request: pytest.FixtureRequest, server: PostgresServer) -> Callable[..., Cache]:
    """A cache of this process."""

    def made(**options: Any) -> Cache:
        cache = cache_at(server.postgres_url, **options)
        request.addfinalizer(cache.close)
        return cache

    return made


Mine = Callable[..., Cache]


def cache_at(url: str, **options: Any) -> Cache:
    return Cache(url, **{"local": True, "early": 0, "lease": LEASE, **options})


# -- herds ----------------------------------------------------------------------------------------------------------


def look_seldom() -> None:
    """Who is not woken waits for longer than any test does."""
    verbs.LOOK = verbs.SAFETY = 30.0


def ask_at_once(pipe: Connection, url: str, number: int) -> None:
    """Eight threads, or tasks, that all ask for one key when they are told; what they got, and when."""
    look_seldom()
    cache = cache_at(url)
    ended: list[float] = []

    def compute() -> str:
        time.sleep(0.3)
        ended.append(time.monotonic())
        return f"by {number}"

    async def suspending() -> str:
        await asyncio.sleep(0.3)
        ended.append(time.monotonic())
        return f"by {number}"

    def ask() -> tuple[str, float]:
        return str(cache.get_or_compute("k", compute)), time.monotonic()

    async def task() -> tuple[str, float]:
        return str(await cache.aget_or_compute("k", suspending)), time.monotonic()

    async def tasks() -> list[tuple[str, float]]:
        return await asyncio.gather(*[task() for _ in range(8)])

    cache.get("another")
    pipe.send("ready")
    pipe.recv()
    got = asyncio.run(tasks()) if number % 2 else Herd(*[ask] * 8).join()
    pipe.send(([value for value, _ in got], max(at for _, at in got), ended))
    pipe.recv()


def test_a_herd_of_processes_computes_once(server: PostgresServer) -> None:
    """Promise 1: each process, or each thread or task, would ask the origin; or they would look for what is there."""
    herd = [others(1, ask_at_once, server.postgres_url, number) for number in range(8)]
    opened = [context.__enter__()[0] for context in herd]
    try:
        assert [each.hear() for each in opened] == ["ready"] * 8
        for each in opened:
            each.tell()
        ends = [each.hear() for each in opened]
    finally:
        for context in herd:
            context.__exit__(None, None, None)
    values = [value for got, _, _ in ends for value in got]
    assert len(values) == 64
    assert len(set(values)) == 1
    (ended,) = [moment for _, _, computed in ends for moment in computed]
    last = max(at for _, at, _ in ends) - ended
    print(f"the last waiter had it {1000 * last:.1f} ms after it was computed")
    assert last < 5.0


WAKES: dict[str, Callable[[PostgresEngine, bytes], object]] = {
    "fill": lambda engine, token: run(engine.blocking.claims.fill("k", token, some(b"new", token))),
    "abandon": lambda engine, token: run(engine.blocking.claims.abandon("k", token)),
    "set": lambda engine, token: run(engine.blocking.store.set("k", some(b"new"))),
    "replace": lambda engine, token: run(engine.blocking.store.replace("k", None, some(b"new"))),
    "expire": lambda engine, token: run(engine.blocking.store.expire("k")),
    "invalidate": lambda engine, token: run(engine.blocking.store.invalidate("k")),
    "force": lambda engine, token: run(engine.blocking.claims.claim("k", new_id(), Ask(LEASE, force=True))),
}


def some(value: bytes, id: bytes = b"") -> Entry[Any]:
    return Entry(value, id or new_id(), ttl=LEASE, fresh=LEASE, keep=LEASE)


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("change", WAKES)
def test_what_wakes_those_who_wait(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch, change: str, colour: str
) -> None:
    """Whoever waits would see the end of what he waits for only when he looks."""
    monkeypatch.setattr(verbs, "LOOK", 30.0)
    monkeypatch.setattr(verbs, "SAFETY", 30.0)
    near, far = (PostgresEngine(server.postgres_url) for _ in range(2))
    try:
        token = new_id()
        assert isinstance(run(near.blocking.claims.claim("k", token, Ask(LEASE))), Granted)
        busy = run(far.blocking.claims.claim("k", new_id(), Ask(LEASE)))
        assert isinstance(busy, Busy)
        waiting = Herd(
            (lambda: run(far.blocking.claims.wait("k", busy, LEASE)))
            if colour == "sync"
            else lambda: asyncio.run(wait(far, busy))  # its engine's coroutine is the loop's
        )
        until(lambda: server.ask("SELECT FROM stampede.leases WHERE homes IS NOT NULL"))
        WAKES[change](near, token)
        began = time.monotonic()
        (found,) = waiting.join()
        assert time.monotonic() - began < 10
        assert (found and found.entry.value) == (b"new" if change == "fill" else None)
    finally:
        near.close()
        far.close()


async def wait(engine: PostgresEngine, busy: Busy) -> Any:
    assert engine.suspending.claims is not None
    return await engine.suspending.claims.wait("k", busy, LEASE)


# -- holders that die, that sleep, and that are cut off --------------------------------------------------------------


def hold(pipe: Connection, url: str, lease: float) -> None:
    """One call whose computation ends as it is told; then what it got, and whether the lease was lost."""
    cache = cache_at(url, lease=lease)
    cache.get("another")
    until(lambda: cache.engine._all.news.listens)  # type: ignore[attr-defined]

    def compute() -> Any:
        pipe.send("computing")
        return pipe.recv()

    pipe.send((cache.get_or_compute("k", compute), cache.stats().lease_lost))
    pipe.recv()


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
def test_a_killed_holder_holds_nobody_up(server: PostgresServer, mine: Mine, colour: str, bound: bool) -> None:
    """Promise 3: a herd would wait for the dead one: for its connection's end, or else its lease's."""
    lease, began = (LEASE, []) if bound else (0.4, list[float]())
    url = f"{server.postgres_url}&bound={str(bound).lower()}"
    cache = cache_at(url, lease=lease)

    def compute() -> str:
        began.append(time.monotonic())
        return "alive"

    async def tasks() -> list[Any]:
        return await asyncio.gather(*[cache.aget_or_compute("k", compute) for _ in range(4)])

    with other(hold, url, lease) as holder:
        assert holder.hear() == "computing"
        herd = Herd(
            *[lambda: asyncio.run(tasks())] if colour == "async" else [lambda: cache.get_or_compute("k", compute)] * 4
        )
        if bound:
            until(lambda: server.ask("SELECT FROM stampede.leases WHERE homes IS NOT NULL"))
        else:
            time.sleep(2.5 * lease)  # renewed all the while
        assert began == []
        killed = time.monotonic()
        holder.kill()
        got = herd.join()
    cache.close()
    assert got == [["alive"] * 4] if colour == "async" else ["alive"] * 4
    assert len(began) == 1
    print(f"taken over after {1000 * (began[0] - killed):.0f} ms")
    assert began[0] - killed < (2.0 if bound else lease + 1.0)


def test_a_holder_whose_connection_is_cut_is_overtaken(server: PostgresServer, mine: Mine) -> None:
    """Promise 5: nobody can tell it from one that died. What it has computed would replace what was computed since."""
    cache = mine()
    with other(hold, server.postgres_url, LEASE) as holder:
        assert holder.hear() == "computing"
        ((pid,),) = server.ask("SELECT pid FROM stampede.leases")
        holder.freeze()  # or it may say that it lives before anybody asks
        server.ask("SELECT pg_terminate_backend(%s)", pid)
        assert cache.get_or_compute("k", lambda: "new") == "new"
        holder.thaw()
        holder.tell("old")
        assert holder.hear() == ("old", 1)
        assert cache.get("k") == "new"


def test_a_holder_whose_connection_is_cut_stores_what_nobody_else_computes(server: PostgresServer, mine: Mine) -> None:
    """Each short trouble with one connection would cost all the work that was under way."""
    cache = mine()
    with other(hold, server.postgres_url, LEASE) as holder:
        assert holder.hear() == "computing"
        ((pid,),) = server.ask("SELECT pid FROM stampede.leases")
        server.ask("SELECT pg_terminate_backend(%s)", pid)
        holder.tell("value")
        assert holder.hear() == ("value", 0)
        assert cache.get("k") == "value"


def test_a_renewed_lease_is_bound_to_the_connection_that_is_there(server: PostgresServer, mine: Mine) -> None:
    """Who had a short trouble, and is well again, would be taken for dead until it is done."""
    cache, lease = mine(), 1.0
    with other(hold, server.postgres_url, lease) as holder:
        assert holder.hear() == "computing"
        ((pid,),) = server.ask("SELECT pid FROM stampede.leases")
        server.ask("SELECT pg_terminate_backend(%s)", pid)
        until(lambda: server.ask("SELECT FROM stampede.leases WHERE pid <> %s AND stampede.lives(pid, started)", pid))
        herd = Herd(lambda: cache.get_or_compute("k", lambda: "another"))
        until(lambda: server.ask("SELECT FROM stampede.leases WHERE homes IS NOT NULL"))
        holder.tell("value")
        assert holder.hear() == ("value", 0)
        assert herd.join() == ["value"]


def compute_in_rounds(pipe: Connection, url: str, keys: int, lease: float) -> None:
    """In each round, a caller for each key, whose computation takes a moment."""
    cache, dice = cache_at(url, lease=lease, local=False), random.Random(1)
    pipe.send("ready")
    while True:
        number = pipe.recv()

        def compute(number: int = number) -> list[Any]:
            time.sleep(dice.random() / 100)
            return ["old", number]

        calls = [lambda key=key: cache.get_or_compute(str(key), compute) for key in range(keys)]
        pipe.send([tuple(value) for value in Herd(*calls).join()])


def test_a_frozen_holder_stores_nothing_late(server: PostgresServer, mine: Mine) -> None:
    """Promise 5: what it computed before its sleep would replace what others computed meanwhile."""
    keys, lease, dice, caught = 8, 0.025, random.Random(2), 0
    cache = mine(local=False)
    with other(compute_in_rounds, server.postgres_url, keys, lease) as holder:
        assert holder.hear() == "ready"
        for number in range(40):
            for key in range(keys):
                cache.invalidate(str(key))
            holder.tell(number)
            time.sleep(dice.random() / 80)  # anywhere: before, in, or behind a claim, a computation, a fill
            holder.freeze()
            new = ["new", number]
            kept = [cache.get_or_compute(str(key), lambda new=new: new) for key in range(keys)]
            holder.thaw()
            assert {key for _, key in holder.hear()} == {number}
            assert [cache.get(str(key)) for key in range(keys)] == kept
            caught += kept.count(new)
    assert caught >= 80
    assert server.ask(STANDING) == []


# -- overtaken by another process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["invalidate", "set", "clear"])
def test_a_change_elsewhere_ends_a_computation(server: PostgresServer, mine: Mine, verb: str) -> None:
    """Promise 4: what was computed from what is no longer true would be stored after it was invalidated."""
    cache = mine()
    cache.get("k")
    with other(hold, server.postgres_url, LEASE) as holder:
        assert holder.hear() == "computing"
        waiting = Herd(lambda: cache.get_or_compute("k", lambda: "new"))
        match verb:
            case "invalidate":
                mine().invalidate("k")
            case "set":
                mine().set("k", "new")
            case "clear":
                before = cache._root.prefix
                mine().clear()
                until(lambda: cache.get("told") is None and cache._root.prefix != before)  # who believes joins those
        if verb != "clear":  # who asked before it may wait for what was asked for before it
            assert waiting.join() == ["new"]
            assert cache.get("k") == "new"
        until(lambda: cache.get_or_compute("k", lambda: "new") == "new")
        holder.tell("old")
        value, lost = holder.hear()
        assert value == "old"
        assert lost == 1 or verb == "clear"  # under a generation of its own, it may keep it
        assert cache.get("k") == "new"
        assert waiting.join()[0] in ("new", "old")


# -- forks, loops and cancellations ----------------------------------------------------------------------------------


def fork_after_use(pipe: Connection, url: str) -> None:
    """gunicorn with preload: connections, news, a loop and a local tier were in use before the fork."""
    cache = cache_at(url)
    counted, counter = os.pipe()

    def compute() -> str:
        os.write(counter, b".")
        time.sleep(0.05)
        return "value"

    async def both_colours(key: str) -> str:
        return str(await cache.aget_or_compute(key, compute))

    cache.set("warm", "warm")
    runner = asyncio.Runner()
    for _ in range(3):
        cache.get("warm")
        runner.run(both_colours("warm"))
    start, go = os.pipe()
    pids = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(go)
                os.read(start, 1)  # until the parent closes its end
                fine = [
                    cache.get_or_compute("k", compute) if number % 2 else asyncio.run(both_colours("k")),
                    asyncio.run(both_colours("l")),
                    cache.get("warm"),
                ]
                cache.set(f"child {number}", number)
                code = 0 if fine == ["value", "value", "warm"] else 2
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(go)
    ours = [cache.get_or_compute("k", compute), runner.run(both_colours("l"))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    told = [cache.get(f"child {number}") for number in range(4)]
    os.set_blocking(counted, False)
    pipe.send((codes, ours, told, len(os.read(counted, 100)), runner.run(both_colours("warm"))))
    runner.close()


def test_both_sides_of_a_fork_go_on(server: PostgresServer) -> None:
    """Promise 13: parent and children would read each other's replies and news, or each compute."""
    with other(fork_after_use, server.postgres_url) as parent:
        assert parent.hear() == ([0] * 4, ["value"] * 2, [0, 1, 2, 3], 2, "warm")


def fork_inside(pipe: Connection, url: str) -> None:
    cache = cache_at(url)
    pids: list[int] = []

    def compute() -> str:
        pids.append(os.fork())
        if pids[-1] == 0:
            return "the child's"
        return f"the parent's, whose child ended with {os.waitstatus_to_exitcode(os.waitpid(pids[-1], 0)[1])}"

    value = cache.get_or_compute("k", compute)
    if pids[-1] == 0:
        os._exit(7 if value == "the child's" and cache.get("k") is None else 1)
    pipe.send((value, cache.stats().lease_lost, cache.get("k")))


def test_a_child_leaves_its_parents_lease_alone(server: PostgresServer) -> None:
    """Promise 13: the child would store, or release the lease of, what its parent computes."""
    with other(fork_inside, server.postgres_url) as parent:
        value, lost, kept = parent.hear()
    assert value == kept == "the parent's, whose child ended with 7"
    assert lost == 0


def test_one_event_loop_after_the_other(server: PostgresServer, mine: Mine) -> None:
    """Promise 13: a loop per test, or per request: the second would be given the connections of the first."""
    cache = mine()

    async def ask(number: int) -> Any:
        cancelled = asyncio.ensure_future(cache.aget_or_compute(f"c{number}", lambda: asyncio.sleep(10)))
        got = await asyncio.gather(*[cache.aget_or_compute(f"k{number % 2}", lambda: number) for _ in range(10)])
        cancelled.cancel()
        return set(got)

    assert [asyncio.run(ask(number)) for number in range(5)] == [{0}, {1}, {0}, {1}, {0}]
    assert server.ask(STANDING) == []


def test_storms_of_cancellations(server: PostgresServer, mine: Mine) -> None:
    """Promises 11 and 12: a cancelled caller would take others with it, take their replies, or leave its lease."""
    cache, dice = mine(local=False), random.Random(3)
    running = 0

    async def storm(number: int) -> None:
        async def compute(key: int) -> list[int]:
            nonlocal running
            running += 1
            try:
                await asyncio.sleep(dice.random() / 100)
                return [number, key]
            finally:
                running -= 1

        keys = [dice.randrange(8) for _ in range(120)]
        calls = [
            asyncio.ensure_future(cache.aget_or_compute(f"{number} {key}", lambda key=key: compute(key)))
            for key in keys
        ]
        doomed = [call for call in calls if dice.random() < 0.8]
        for call in doomed:
            if dice.random() < 0.3:
                await asyncio.sleep(dice.random() / 1000)
            call.cancel()
        for key, call in zip(keys, calls, strict=True):
            try:
                assert list(await call) == [number, key]
            except asyncio.CancelledError:
                assert call in doomed
        await until_async(lambda: running == 0)

    async def storms() -> None:
        for number in range(10):
            await storm(number)

    before = threading.active_count()  # other tests' daemons are still here
    asyncio.run(storms())
    assert server.ask(STANDING) == []
    assert threading.active_count() < before + 50


# -- everything at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local,lag", [(True, 0.5), (False, 0.05)], ids=["local", "shared"])
def test_random_interleavings(server: PostgresServer, local: bool, lag: float) -> None:
    """Promises 1 and 4: a value that was invalidated would come back by some order of steps that nobody thought of."""
    plans = [Plan(server.postgres_url, number, 7, local, 4, 330, 0.003, clears=local) for number in range(4)]
    found = check(*played(plans), lag)
    assert (found.old, found.twice, found.apart) == ([], [], [])
    assert found.calls > 5000
    assert found.computations > 100
