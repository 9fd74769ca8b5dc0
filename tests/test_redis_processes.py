"""Caches of several processes on one Redis: herds, and holders that are killed, frozen, forked and overtaken."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("redis")

from disk_world import Connection, other, others
from herd import Herd, until, until_async
from interleaving import Plan, check, played
from servers import RedisServer

from stampede import Cache

LEASE = 60.0
"""So long that no test here ends by it."""


@pytest.fixture
def mine(request: pytest.FixtureRequest, server: RedisServer) -> Callable[..., Cache]:
    """A cache of this process."""

    def made(**options: Any) -> Cache:
        cache = cache_at(server.url, **options)
        request.addfinalizer(cache.close)
        return cache

    return made


Mine = Callable[..., Cache]


def cache_at(url: str, **options: Any) -> Cache:
    return Cache(url, **{"local": True, "early": 0, "lease": LEASE, **options})


def never() -> Any:
    raise AssertionError("a second computation")


# -- herds ----------------------------------------------------------------------------------------------------------


def ask_at_once(pipe: Connection, url: str, number: int) -> None:
    """Four threads, or forty tasks, that all ask for one key when they are told."""
    cache = cache_at(url)

    def compute() -> str:
        time.sleep(0.1)
        return f"by {number}"

    async def suspending() -> str:
        await asyncio.sleep(0.1)
        return f"by {number}"

    async def tasks() -> list[str]:
        return await asyncio.gather(*[cache.aget_or_compute("k", suspending) for _ in range(40)])

    pipe.send("ready")
    pipe.recv()
    if number % 2:
        got = asyncio.run(tasks())
    else:
        got = Herd(*[lambda: cache.get_or_compute("k", compute)] * 4).join()
    pipe.send((set(got), cache.stats().computations))
    pipe.recv()


def test_a_herd_of_processes_computes_once(server: RedisServer) -> None:
    """Promise 1: each process, or each thread or task, would ask the origin."""
    herd = [others(1, ask_at_once, server.url, number) for number in range(8)]
    opened = [context.__enter__()[0] for context in herd]
    try:
        assert [each.hear() for each in opened] == ["ready"] * 8
        for each in opened:
            each.tell()
        ends = [each.hear() for each in opened]
    finally:
        for context in herd:
            context.__exit__(None, None, None)
    assert len(set.union(*[got for got, _ in ends])) == 1
    assert sum(computations for _, computations in ends) == 1


# -- holders that die, and that sleep -------------------------------------------------------------------------------


def hold(pipe: Connection, url: str, lease: float) -> None:
    """One call whose computation ends as it is told; then what it got, and whether the lease was lost."""
    cache = cache_at(url, lease=lease)

    def compute() -> Any:
        pipe.send("computing")
        return pipe.recv()

    pipe.send((cache.get_or_compute("k", compute), cache.stats().lease_lost))
    pipe.recv()


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_killed_holder_holds_nobody_up(server: RedisServer, mine: Mine, colour: str) -> None:
    """Promise 3: the herd would wait for the dead one, or look for its death only once a second."""
    lease, began = 0.4, []
    cache = mine(lease=lease)

    def compute() -> str:
        began.append(time.monotonic())
        return "alive"

    async def tasks() -> list[Any]:
        return await asyncio.gather(*[cache.aget_or_compute("k", compute) for _ in range(4)])

    with other(hold, server.url, lease) as holder:
        assert holder.hear() == "computing"
        herd = Herd(
            *[lambda: asyncio.run(tasks())] if colour == "async" else [lambda: cache.get_or_compute("k", compute)] * 4
        )
        time.sleep(2.5 * lease)  # renewed all the while
        assert began == []
        killed = time.monotonic()
        holder.kill()
        got = herd.join()
    assert got == [["alive"] * 4] if colour == "async" else ["alive"] * 4
    assert len(began) == 1
    assert began[0] - killed < lease + 0.1


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


def test_a_frozen_holder_stores_nothing_late(server: RedisServer, mine: Mine) -> None:
    """Promise 5: what it computed before its sleep would replace what others computed meanwhile."""
    keys, lease, dice, caught = 8, 0.025, random.Random(2), 0
    cache = mine(local=False)
    with other(compute_in_rounds, server.url, keys, lease) as holder:
        assert holder.hear() == "ready"
        for number in range(100):
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
    assert caught >= 200
    assert server.cli("KEYS", "{*}l") == ""


# -- overtaken by another process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["invalidate", "set", "clear"])
def test_a_change_elsewhere_ends_a_computation(server: RedisServer, mine: Mine, verb: str) -> None:
    """Promise 4: what was computed from what is no longer true would be stored after it was invalidated."""
    cache = mine()
    cache.get("k")
    with other(hold, server.url, LEASE) as holder:
        assert holder.hear() == "computing"
        waiting = Herd(lambda: cache.get_or_compute("k", lambda: "new"))
        match verb:
            case "invalidate":
                mine().invalidate("k")
            case "set":
                mine().set("k", "new")
            case "clear":
                mine().clear()
        if verb != "clear":  # who asked before it may wait for what was asked for before it
            assert waiting.join() == ["new"]
            assert cache.get("k") == "new"
        time.sleep(0.05)
        assert cache.get_or_compute("k", lambda: "new") == "new"
        holder.tell("old")
        value, lost = holder.hear()
        assert value == "old"
        assert lost == 1 or verb == "clear"  # under a generation of its own, it may keep it
        assert cache.get("k") == "new"
        assert waiting.join()[0] in ("new", "old")


# -- forks ----------------------------------------------------------------------------------------------------------


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


def test_both_sides_of_a_fork_go_on(server: RedisServer) -> None:
    """Promise 13: parent and children would read each other's replies and news, or each compute."""
    with other(fork_after_use, server.url) as parent:
        assert parent.hear() == ([0] * 4, ["value"] * 2, [0, 1, 2, 3], 2, "warm")


def open_sockets() -> set[str]:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {name for name in map(os.readlink, filter(os.path.islink, links)) if name.startswith("socket:")}


def fork_in_a_loop(pipe: Connection, url: str, uvloop: bool) -> None:
    """A server of asyncio's that forks while it serves; its child asks, and is to be told, in threads."""
    caches = [cache_at(f"{url}?client_name={number}") for number in range(3)]
    plain, ours = cache_at(url, local=False), set[str]()

    def child() -> None:
        assert ours and not ours & open_sockets()
        assert [cache.get_or_compute("k", never) for cache in caches] == ["old"] * 3
        for _ in range(3):  # local by now
            assert [cache.get("k") for cache in caches] == ["old"] * 3
        pipe.send("asked")
        until(lambda: [cache.get_or_compute("k", never) for cache in caches] == ["new"] * 3, 3.0)

    async def main() -> None:
        caches[0].set("k", "old")
        for cache in caches:
            for _ in range(3):
                assert await cache.aget_or_compute("k", never) == "old"
        before = open_sockets()
        await plain.aget("k")
        ours.update(open_sockets() - before)
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if Herd(child).join() == [None] else 1)
            finally:
                os._exit(1)
        pipe.recv()
        await caches[0].aset("k", "new")
        code = os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1])
        end = time.monotonic() + 3.0  # it may be told later than its child
        while (seen := [await cache.aget("k") for cache in caches]) != ["new"] * 3 and time.monotonic() < end:
            await asyncio.sleep(0.001)
        pipe.send((code, seen, [cache.stats().engine_downs for cache in caches]))

    with asyncio.Runner(loop_factory=import_module("uvloop").new_event_loop if uvloop else None) as runner:
        runner.run(main())


@pytest.mark.parametrize("uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_a_fork_in_a_running_loop(server: RedisServer, uvloop: bool) -> None:
    """Promise 13: parent and child would read each other's replies, and the child would hear no news."""
    if uvloop:
        pytest.importorskip("uvloop")
    with other(fork_in_a_loop, server.url, uvloop) as parent:
        assert parent.hear() == "asked"
        parent.tell()
        assert parent.hear() == (0, ["new"] * 3, [0] * 3)


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


def test_a_child_leaves_its_parents_lease_alone(server: RedisServer) -> None:
    """Promise 13: the child would store, or release the lease of, what its parent computes."""
    with other(fork_inside, server.url) as parent:
        value, lost, kept = parent.hear()
    assert value == kept == "the parent's, whose child ended with 7"
    assert lost == 0


# -- loops and cancellations ----------------------------------------------------------------------------------------


def test_one_event_loop_after_the_other(server: RedisServer, mine: Mine) -> None:
    """Promise 13: a loop per test, or per request: the second would be given the connections of the first."""
    cache = mine()

    async def ask(number: int) -> Any:
        cancelled = asyncio.ensure_future(cache.aget_or_compute(f"c{number}", lambda: asyncio.sleep(10)))
        got = await asyncio.gather(*[cache.aget_or_compute(f"k{number % 2}", lambda: number) for _ in range(10)])
        cancelled.cancel()
        return set(got)

    assert [asyncio.run(ask(number)) for number in range(5)] == [{0}, {1}, {0}, {1}, {0}]
    assert server.cli("KEYS", "{*}l") == ""


def test_storms_of_cancellations(server: RedisServer, mine: Mine) -> None:
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
        for number in range(15):
            await storm(number)

    before = threading.active_count()  # other tests' daemons are still here
    asyncio.run(storms())
    assert server.cli("KEYS", "{*}l") == ""
    assert threading.active_count() < before + 50


# -- everything at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local,lag", [(True, 0.5), (False, 0.05)], ids=["local", "shared"])
def test_random_interleavings(server: RedisServer, local: bool, lag: float) -> None:
    """Promises 1 and 4: a value that was invalidated would come back by some order of steps that nobody thought of."""
    plans = [Plan(server.url, number, 7, local, 4, 330, 0.003, clears=local) for number in range(4)]
    found = check(*played(plans), lag)
    assert (found.old, found.twice, found.apart) == ([], [], [])
    assert found.calls > 5000
    assert found.computations > 100
