"""`@cached` among real processes: herds, and holders that are killed, frozen, forked, overtaken and slow.

Everything here goes through the public face; what the engine does by itself is tested beside the engine.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from disk_world import Connection, other, others

from stampede import Cache, ComputationFailed, WaitTimeout
from stampede.colour import BLOCKING
from stampede.engines import disk

LEASE = 60.0
"""So long that no test here ends by it."""


class Answer:
    """What a computation is told to end with: a value, or an error."""

    def __init__(self, value: str = "", error: Exception | None = None) -> None:
        self.value, self.error = value, error

    def give(self) -> str:
        if self.error is not None:
            raise self.error
        return self.value


def report_of(directory: Path, compute: Any, **options: Any) -> Any:
    """One function, the same in every process, with a computation of the process's own."""
    cache, where = Cache(f"disk://{directory}/cache", local=True), str(directory)
    computes[where] = compute

    @cache.cached(**{"ttl": 600, "early": 0, "lease": LEASE, **options})
    def report(customer: int) -> str:
        value: str = computes[where]()
        return value

    return report


computes: dict[str, Any] = {}  # not captured by the function, which would be another one in each process


def told(pipe: Connection) -> str:
    """A computation that tells that it has begun, and ends as it is told."""
    pipe.send("computing")
    answer: Answer = pipe.recv()
    return answer.give()


def ask(pipe: Connection, directory: Path, options: dict[str, Any]) -> None:
    """One caller: what it got or met, and whether its lease was lost."""
    report = report_of(directory, lambda: told(pipe), **options)
    try:
        got: Any = report(1)
    except Exception as error:
        got = error
    pipe.send((got, report.stats().lease_lost))
    pipe.recv()  # stay until the test's end: a process that ends wakes those who wait for it


def mine(directory: Path, value: str = "mine", **options: Any) -> Any:
    """The same function in this process, where it gives this value at once."""
    return report_of(directory, lambda: value, **options)


def ask_in_threads(pipe: Connection, directory: Path, threads: int) -> None:
    lock = threading.Lock()

    def compute() -> str:
        with lock:
            pipe.send("computing")
        value: str = pipe.recv().give()
        return value

    report, got = report_of(directory, compute), []
    callers = [threading.Thread(target=lambda: got.append(report(1))) for _ in range(threads)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    with lock:
        pipe.send((got, report.stats().computations))


def test_a_herd_of_processes_computes_once(tmp_path: Path) -> None:
    """Promise 1: every process, or every thread, would ask the origin."""
    with others(4, ask_in_threads, tmp_path, 4) as herd:
        computing = []
        while not computing:
            computing = [each for each in herd if each.pipe.poll(0.01)]
        assert [each.hear() for each in computing] == ["computing"]
        computing[0].tell(Answer("value"))
        ends = [each.hear() for each in herd]
    assert [got for got, _ in ends] == [["value"] * 4] * 4
    assert sum(computations for _, computations in ends) == 1


def test_a_killed_holder_holds_nobody_up(tmp_path: Path) -> None:
    """Promise 3: the herd would wait for the dead one's lease, a minute."""
    with other(ask, tmp_path, {}) as holder:
        assert holder.hear() == "computing"
        with other(ask_and_wait, tmp_path, {}) as waiter:
            assert waiter.hear() == "waiting"
            holder.kill()
            assert waiter.hear() == "computing"
            waiter.tell(Answer("value"))
            assert waiter.hear() == "value"
    assert mine(tmp_path).peek(1).value == "value"


def test_a_frozen_holder_stores_nothing_late(tmp_path: Path) -> None:
    """Promises 3 and 5: it would hold all up, or store what is old by now; and its caller would get an error."""
    with other(ask, tmp_path, {"lease": 0.2}) as holder:
        assert holder.hear() == "computing"
        holder.freeze()
        report = mine(tmp_path, "new")
        assert report(1) == "new"
        holder.thaw()
        holder.tell(Answer("late"))
        assert holder.hear() == ("late", 1)
        assert report.peek(1).value == "new"


def block_the_loop(pipe: Connection, directory: Path) -> None:
    cache = Cache(f"disk://{directory}/cache")

    async def main() -> str:
        async def compute() -> str:
            return told(pipe)  # blocks the whole loop

        value: str = await cache.aget_or_compute("k", compute, lease=0.5)
        return value

    pipe.send(asyncio.run(main()))


def test_a_blocked_loop_keeps_its_lease(tmp_path: Path) -> None:
    """Promise 3: renewed by a task, it would end, and a second process compute."""
    with other(block_the_loop, tmp_path) as holder, Cache(f"disk://{tmp_path}/cache") as cache:
        assert holder.hear() == "computing"
        with pytest.raises(WaitTimeout):
            cache.get_or_compute("k", lambda: "computed twice", wait=1.0)
        holder.tell(Answer("value"))
        assert holder.hear() == "value"
        assert cache.get("k") == "value"


def test_a_hung_holder_ends_with_max_hold(tmp_path: Path) -> None:
    """Promise 3: one hung origin would hang its key for ever."""
    with other(ask, tmp_path, {"lease": 0.1, "max_hold": 0.3}) as holder:
        assert holder.hear() == "computing"
        assert mine(tmp_path)(1) == "mine"
        holder.tell(Answer("late"))
        assert holder.hear() == ("late", 1)


@pytest.mark.parametrize("verb", ["invalidate", "set", "invalidate_all"])
def test_invalidation_wins_over_a_computation_elsewhere(tmp_path: Path, verb: str) -> None:
    """Promise 4: what was computed from the old data would be stored after the invalidation."""
    report = mine(tmp_path, "new")
    with other(ask, tmp_path, {}) as holder:
        assert holder.hear() == "computing"
        if verb == "set":
            report.set("new", 1)
        else:
            getattr(report, verb)(*([1] if verb == "invalidate" else []))
        assert report(1) == "new"  # does not wait for the old one either
        holder.tell(Answer("old"))
        assert holder.hear()[0] == "old"
        assert report(1) == report.peek(1).value == "new"


def test_invalidation_wakes_the_herd(tmp_path: Path) -> None:
    """Promises 2 and 4: a waiter in another process would sleep until the old computation's end."""
    report = mine(tmp_path)
    with other(ask, tmp_path, {}) as holder:
        assert holder.hear() == "computing"
        with other(ask_and_wait, tmp_path, {}) as waiter:
            assert waiter.hear() == "waiting"
            report.invalidate(1)
            assert waiter.hear() == "computing"
            waiter.tell(Answer("new"))
            assert waiter.hear() == "new"
        holder.tell(Answer("old"))
        assert holder.hear() == ("old", 1)
    assert report.peek(1).value == "new"


def test_a_change_is_seen_by_hits_elsewhere(tmp_path: Path) -> None:
    """Promise 4: a local tier would go on serving what another process has invalidated."""
    report = mine(tmp_path, "new")
    with other(hit_when_told, tmp_path) as reader:
        assert reader.hear() == ["old"] * 3
        for verb in (lambda: report.invalidate(1), report.invalidate_all, lambda: report.expire(1)):
            report.set("old", 1)
            reader.tell()
            assert reader.hear() == ["old"] * 3
            verb()
            reader.tell()
            assert reader.hear() == ["computed"] * 3


def hit_when_told(pipe: Connection, directory: Path) -> None:
    report = report_of(directory, lambda: "computed")
    report.set("old", 1)
    while True:
        pipe.send([report(1) for _ in range(3)])  # from the engine, from the local tier, from the function's own table
        pipe.recv()


@pytest.mark.parametrize("declared", [False, True])
def test_a_failure_is_told_to_waiters_elsewhere(tmp_path: Path, declared: bool) -> None:
    """Promise 6: each waiter would try the failing origin, one after another; or wait for the lease's end."""
    options = {"raises": LookupError} if declared else {}
    with other(ask, tmp_path, options) as holder:
        assert holder.hear() == "computing"
        with others(2, ask_and_wait, tmp_path, options) as waiters:
            assert [each.hear() for each in waiters] == ["waiting", "waiting"]
            holder.tell(Answer(error=LookupError("no such customer")))
            met = [each.hear() for each in waiters]
        assert repr(holder.hear()[0]) == "LookupError('no such customer')"
    if declared:
        assert [repr(error) for error in met] == ["LookupError('no such customer')"] * 2
    else:
        assert [(type(error), error.type_name, error.message) for error in met] == [
            (ComputationFailed, "builtins.LookupError", "no such customer")
        ] * 2


def ask_and_wait(pipe: Connection, directory: Path, options: dict[str, Any]) -> None:
    """One caller that tells when it has found the lease taken, just before it waits."""
    report = report_of(directory, lambda: told(pipe), **options)
    port = report.cache.engine.blocking.claims
    wait = port.wait

    async def tell_and_wait(key: str, busy: Any, timeout: float) -> Any:
        pipe.send("waiting")
        port.wait = wait
        return await wait(key, busy, timeout)

    port.wait = tell_and_wait
    try:
        pipe.send(report(1))
    except Exception as error:
        pipe.send(error)


@pytest.mark.parametrize("news", ["fill", "abandon", "invalidate", "set"])
def test_news_are_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, news: str) -> None:
    """Promise 2: waiters would sleep until their next look, a second later; here, half a minute."""
    monkeypatch.setattr(disk, "SAFETY", 30.0)
    asleep, got = threading.Event(), []
    report = mine(tmp_path)
    park = type(BLOCKING).park

    async def note_and_park(*args: Any) -> bool:
        asleep.set()  # the lease has been looked at, and stood: nothing but news will end this
        return await park(*args)

    monkeypatch.setattr(type(BLOCKING), "park", note_and_park)

    def call() -> None:
        try:
            got.append(report(1))
        except ComputationFailed as error:
            got.append(error.type_name)

    with other(ask, tmp_path, {}) as holder:
        assert holder.hear() == "computing"
        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        assert asleep.wait(10)
        match news:
            case "fill":
                holder.tell(Answer("theirs"))
            case "abandon":
                holder.tell(Answer(error=LookupError()))
            case "invalidate":
                mine(tmp_path).invalidate(1)
            case "set":
                mine(tmp_path).set("set", 1)
        caller.join(10)
        assert got == [{"fill": "theirs", "abandon": "builtins.LookupError", "invalidate": "mine", "set": "set"}[news]]


def fork_and_compute(pipe: Connection, directory: Path) -> None:
    """gunicorn with preload: the cache was used before the fork, and a computation is under way at it."""
    pids: list[int] = []

    def compute() -> str:
        pids.append(os.fork())
        if pids[-1] == 0:
            return "the child's"
        _, status = os.waitpid(pids[-1], 0)
        return f"the parent's, whose child ended with {os.waitstatus_to_exitcode(status)}"

    report = report_of(directory, compute)
    report.set("of before", 2)
    value = report(1)
    if pids[-1] == 0:
        fine = value == "the child's" and report.peek(1) is None and report(2) == "of before"
        os._exit(7 if fine else 1)
    pipe.send((value, report.stats().lease_lost, report.peek(1).value))


def test_a_child_leaves_its_parents_lease_alone(tmp_path: Path) -> None:
    """Promise 13: the child would store, or release the lease of, what its parent computes."""
    with other(fork_and_compute, tmp_path) as parent:
        value, lost, kept = parent.hear()
    assert value == kept == "the parent's, whose child ended with 7"
    assert lost == 0


def preload_and_fork(pipe: Connection, directory: Path) -> None:
    report = report_of(directory, lambda: (os.write(computations, b"."), "value")[1])
    came, computations = os.pipe()
    report.set("warm", 2)
    report(2)
    start, go = os.pipe()
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            os.close(go)
            os.read(start, 1)  # until the parent closes its end
            os._exit(0 if report(1) == "value" and report(2) == "warm" else 1)
        pids.append(pid)
    os.close(go)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    pipe.send((codes, os.read(came, 10)))


def test_forked_workers_share_one_computation(tmp_path: Path) -> None:
    """Promise 13: workers would use their parent's connections and flights; or each compute."""
    with other(preload_and_fork, tmp_path) as parent:
        assert parent.hear() == ([0, 0, 0, 0], b".")
