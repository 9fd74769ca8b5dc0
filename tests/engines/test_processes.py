"""One cache in several real processes, on each engine: herds, and holders that are killed, frozen, forked or overtaken.

All tests here use the public interface. What is particular to one engine is tested beside that engine.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")
pytest.importorskip("psycopg")
pytest.importorskip("sqlalchemy")
pytest.importorskip("boto3")
pytest.importorskip("moto")
pytest.importorskip("urllib3")
pytest.importorskip("kazoo")
pytest.importorskip("zmq")

from addresses import EMPTY, cache_at
from disk_world import PATIENCE, Connection, other, others
from herd import Herd, until, until_async
from interleaving import Plan, check, played

from stampede import Cache, ComputationFailed, WaitTimeout

LEASE = 60.0
"""Seconds. No lease of this length ends during a test."""

ALL = ["disk", "redis", "memcached", "postgres", "sql", "etcd", "zookeeper", "cell"]
SERVERS = ["redis", "memcached", "postgres"]
TELL_OF_DEATHS = ("disk", "postgres")
TELL_OF_CHANGES = ("disk", "redis", "postgres")


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return EMPTY[request.param](tmp_path)


def over(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("url", names, ids=names, indirect=True)


def short(url: str) -> float:
    """A lease that ends soon. memcached counts whole seconds."""
    return 2.0 if url.startswith("memcached") else 1.0


# -- one function, which is the same in each process ----------------------------------------------------------------


class Answer:
    """How a computation should end: with a value, or with an error."""

    def __init__(self, value: str = "", error: Exception | None = None) -> None:
        self.value, self.error = value, error

    def give(self) -> str:
        if self.error is not None:
            raise self.error
        return self.value


computes: dict[str, Callable[[], str]] = {}
"""What this process computes, by the cache's address. The function itself must be the same in all processes."""


def report_of(url: str, compute: Callable[[], str], **options: Any) -> Any:
    cache = cache_at(url, local=url.startswith(TELL_OF_CHANGES))
    computes[url] = compute

    @cache.cached(**{"ttl": 600, "early": 0, "lease": LEASE, **options})
    def report(customer: int) -> str:
        return computes[url]()

    return report


@pytest.fixture
def mine(url: str) -> Iterator[Callable[..., Any]]:
    """The function in this process, where it returns this value at once. Each call acts as one more process."""
    made: list[Any] = []

    def report(value: str = "mine", **options: Any) -> Any:
        made.append(report_of(url, lambda: value, **options))
        return made[-1]

    yield report
    for each in made:
        each.cache.close()


Mine = Callable[..., Any]


def told(pipe: Connection) -> str:
    """Compute: report that the computation has begun, and end as told."""
    pipe.send("computing")
    answer: Answer = pipe.recv()
    return answer.give()


def ask(pipe: Connection, url: str, options: dict[str, Any]) -> None:
    """One caller. The process sends what it got or which error it met, and whether its lease was lost."""
    report = report_of(url, lambda: told(pipe), **options)
    if url.startswith("postgres"):  # a lease that was granted before its process listens does not end with it
        report.cache.get("another")
        until(lambda: report.cache.engine._all.news.listens)
    try:
        got: Any = report(1)
    except Exception as error:
        got = error
    pipe.send((got, report.stats().lease_lost))
    pipe.recv()  # stay until the test ends: a process that ends wakes its waiters


def says_when_it_waits(report: Any, say: Callable[[], object]) -> None:
    """Have `say` called just before a caller waits, after it found the lease taken."""
    claims = report.cache.engine.blocking.claims
    wait = claims.wait

    async def tell_and_wait(*args: Any) -> Any:
        say()
        return await wait(*args)

    claims.wait = tell_and_wait


def ask_and_wait(pipe: Connection, url: str, options: dict[str, Any]) -> None:
    """One caller that finds the lease taken. The process sends what it got, or which error it met."""
    report, waits = report_of(url, lambda: told(pipe), **options), threading.Event()

    def say() -> None:
        if not waits.is_set():
            waits.set()
            pipe.send("waiting")

    says_when_it_waits(report, say)
    try:
        pipe.send(report(1))
    except Exception as error:
        pipe.send(error)


# -- herds ----------------------------------------------------------------------------------------------------------


def ask_together(pipe: Connection, url: str, count: int, suspends: bool) -> None:
    """This many threads or tasks ask for one key. The process sends what they got, and how often it computed."""
    cache = cache_at(url, early=0, lease=LEASE)

    def compute() -> str:
        return told(pipe)

    async def suspending() -> str:
        return await asyncio.to_thread(compute)

    async def tasks() -> list[str]:
        return list(await asyncio.gather(*[cache.aget_or_compute("k", suspending) for _ in range(count)]))

    got = asyncio.run(tasks()) if suspends else Herd(*[lambda: cache.get_or_compute("k", compute)] * count).join()
    pipe.send((got, cache.stats().computations))
    pipe.recv()


@over(*ALL)
def test_a_herd_of_processes_computes_once(url: str) -> None:
    """Promise 1: of all threads and tasks of all processes, only one computes."""
    with others(2, ask_together, url, 8, False) as threads, others(2, ask_together, url, 40, True) as tasks:
        herd = threads + tasks
        wait([each.pipe for each in herd], PATIENCE)
        computing = [each for each in herd if each.pipe.poll()]
        assert [each.hear() for each in computing] == ["computing"]
        computing[0].tell(Answer("value"))
        ends = [each.hear() for each in herd]
    assert [set(got) for got, _ in ends] == [{"value"}] * 4
    assert sum(computations for _, computations in ends) == 1


# -- holders that die, are frozen, or hang -----------------------------------------------------------------------------


@over(*ALL)
def test_a_killed_holder_holds_nobody_up(url: str, mine: Mine) -> None:
    """Promise 3: if a holder is killed, one waiter computes, after the lease or when the death is reported."""
    lease = LEASE if url.startswith(TELL_OF_DEATHS) else short(url)
    waiting, report = threading.Event(), mine(lease=lease)
    says_when_it_waits(report, waiting.set)
    with other(ask, url, {"lease": lease}) as holder:
        assert holder.hear() == "computing"
        herd = Herd(*[lambda: report(1)] * 4)
        until(lambda: waiting.is_set() or not herd.waiting)  # its lease may have ended on a busy machine
        holder.kill()
        assert herd.join() == ["mine"] * 4
    assert report.stats().computations == 1


@over(*ALL)
def test_a_frozen_holder_stores_nothing_late(url: str, mine: Mine) -> None:
    """Promises 3 and 5: a frozen holder blocks no others. Its caller gets its late value, which is not stored."""
    with other(ask, url, {"lease": short(url)}) as holder:
        assert holder.hear() == "computing"
        holder.freeze()
        report = mine("new")
        assert report(1) == "new"
        holder.thaw()
        holder.tell(Answer("late"))
        assert holder.hear() == ("late", 1)
        assert report.peek(1).value == "new"


def compute_in_rounds(pipe: Connection, url: str, keys: int, lease: float) -> None:
    """In each round, one caller for each key, with a computation that takes a moment."""
    cache, dice = cache_at(url, early=0, lease=lease), random.Random(1)
    pipe.send("ready")
    while True:
        number = pipe.recv()

        def compute(number: int = number) -> list[Any]:
            time.sleep(dice.random() / 100)
            return ["old", number]

        calls = [lambda key=key: cache.get_or_compute(str(key), compute) for key in range(keys)]
        pipe.send([tuple(value) for value in Herd(*calls).join()])


@over("redis", "postgres")
def test_a_holder_that_is_frozen_anywhere_stores_nothing_late(url: str) -> None:
    """Promise 5: a holder that is frozen at any moment does not replace what others computed meanwhile."""
    keys, lease, rounds, dice, caught = 8, 0.025, 10, random.Random(2), 0
    with other(compute_in_rounds, url, keys, lease) as holder, cache_at(url, early=0, lease=LEASE) as cache:
        assert holder.hear() == "ready"
        for number in range(10 * rounds):
            if number >= rounds and caught >= 2 * rounds:
                break  # on a busy machine a round may end before its holder is frozen
            for key in range(keys):
                cache.invalidate(str(key))
            holder.tell(number)
            time.sleep(dice.random() / 80)  # anywhere: before, in or after a claim, a computation, a fill
            holder.freeze()
            new = ["new", number]
            kept = [cache.get_or_compute(str(key), lambda new=new: new) for key in range(keys)]
            holder.thaw()
            assert {key for _, key in holder.hear()} == {number}
            assert [cache.get(str(key)) for key in range(keys)] == kept
            caught += kept.count(new)
    assert caught >= 2 * rounds


def block_the_loop(pipe: Connection, url: str) -> None:
    cache = cache_at(url)

    async def main() -> str:
        async def compute() -> str:
            return told(pipe)  # blocks the whole loop

        value: str = await cache.aget_or_compute("k", compute, lease=2.5)
        return value

    pipe.send(asyncio.run(main()))


@over("disk")
def test_a_blocked_loop_keeps_its_lease(url: str) -> None:
    """Promise 3: the lease is renewed while the event loop is blocked. Otherwise, a second process would compute."""
    with other(block_the_loop, url) as holder, cache_at(url) as cache:
        assert holder.hear() == "computing"
        with pytest.raises(WaitTimeout):
            cache.get_or_compute("k", lambda: "computed twice", wait=3.5)
        holder.tell(Answer("value"))
        assert holder.hear() == "value"
        assert cache.get("k") == "value"


@over("disk")
def test_a_hung_holder_ends_with_max_hold(url: str, mine: Mine) -> None:
    """Promise 3: a computation that hangs is given up after `max_hold`, and another process computes."""
    with other(ask, url, {"lease": 0.1, "max_hold": 0.3}) as holder:
        assert holder.hear() == "computing"
        assert mine()(1) == "mine"
        holder.tell(Answer("late"))
        assert holder.hear() == ("late", 1)


# -- changes and failures, as seen by other processes ------------------------------------------------------------------


@over("disk", *SERVERS, "sql", "etcd", "zookeeper")
@pytest.mark.parametrize("verb", ["invalidate", "set", "invalidate_all"])
def test_a_change_elsewhere_ends_a_computation(url: str, mine: Mine, verb: str) -> None:
    """Promises 2 and 4: a change by another process wakes waiters, and no value computed before it is stored."""
    asked, changer, waiting = mine("new"), mine("new"), threading.Event()
    says_when_it_waits(asked, waiting.set)
    with other(ask, url, {}) as holder:
        assert holder.hear() == "computing"
        herd = Herd(lambda: asked(1)) if verb != "invalidate_all" else None  # its waiters use the old generation
        assert herd is None or waiting.wait(20)
        getattr(changer, verb)(*{"invalidate": [1], "set": ["new", 1], "invalidate_all": []}[verb])
        assert changer(1) == "new"
        assert herd is None or herd.join() == ["new"]
        holder.tell(Answer("old"))
        value, lost = holder.hear()
        assert value == "old"
        assert lost == 1 or verb == "invalidate_all"  # then, the holder may keep its lease, in the old generation
        assert changer(1) == changer.peek(1).value == "new"


def hit_when_told(pipe: Connection, url: str) -> None:
    report = report_of(url, lambda: "computed")
    while True:
        expected = pipe.recv()
        until(lambda expected=expected: report(1) == expected)
        pipe.send([report(1) for _ in range(3)])  # from the engine, the local tier, and the function's own table


@over("disk", *SERVERS)
def test_a_change_is_seen_by_hits_elsewhere(url: str, mine: Mine) -> None:
    """Promise 4: after a change by another process, this process no longer serves the old value from its memory."""
    report = mine("new")
    with other(hit_when_told, url) as reader:
        for verb in (lambda: report.invalidate(1), report.invalidate_all, lambda: report.expire(1)):
            report.set("old", 1)
            reader.tell("old")
            assert reader.hear() == ["old"] * 3
            verb()
            reader.tell("computed")
            assert reader.hear() == ["computed"] * 3


@pytest.mark.parametrize(
    "url, declared",
    [
        *((name, False) for name in ["disk", *SERVERS, "sql", "etcd", "zookeeper"]),
        *((name, True) for name in ["disk", *SERVERS, "sql"]),  # of the engines made of cells, only one
    ],
    indirect=["url"],
)
def test_a_failure_is_told_to_waiters_elsewhere(url: str, declared: bool) -> None:
    """Promise 6: if the computation fails, waiters in other processes get its error at once. They do not compute."""
    options = {"raises": LookupError} if declared else {}
    with other(ask, url, options) as holder:
        assert holder.hear() == "computing"
        with others(2, ask_and_wait, url, options) as waiters:
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


LOOKS = [
    "disk.rows.LOOK",
    "disk.rows.SAFETY",
    "redis.verbs.LOOK",
    "redis.verbs.SAFETY",
    "postgres.verbs.LOOK",
    "postgres.verbs.SAFETY",
]
"""How often waiters look by themselves. This does not apply to the first look, which comes soon."""


@over("disk", "redis", "postgres")
@pytest.mark.parametrize("news", ["fill", "abandon", "invalidate", "set"])
def test_news_are_pushed(url: str, mine: Mine, monkeypatch: pytest.MonkeyPatch, news: str) -> None:
    """Promise 2: the engine wakes waiters when something happens. Otherwise, they would sleep until their next look."""
    for each in LOOKS:
        monkeypatch.setattr(f"stampede.engines.{each}", 30.0)
    report, waiting = mine(), threading.Event()
    says_when_it_waits(report, waiting.set)
    with other(ask, url, {}) as holder:
        assert holder.hear() == "computing"
        caller = Herd(lambda: report(1))
        assert waiting.wait(20)
        time.sleep(0.1)  # the caller falls asleep; if it has not by then, it needs no news
        match news:
            case "fill":
                holder.tell(Answer("theirs"))
            case "abandon":
                holder.tell(Answer(error=LookupError()))
            case "invalidate":
                mine().invalidate(1)
            case "set":
                mine().set("set", 1)
        (got,) = caller.join()
    if news == "abandon":
        assert got.type_name == "builtins.LookupError"
    else:
        assert got == {"fill": "theirs", "invalidate": "mine", "set": "set"}[news]


# -- forks ----------------------------------------------------------------------------------------------------------


def fork_and_compute(pipe: Connection, url: str) -> None:
    """A fork as in gunicorn with preload: the cache was used before it, and a computation is running during it."""
    pids: list[int] = []

    def compute() -> str:
        pids.append(os.fork())
        if pids[-1] == 0:
            return "the child's"
        _, status = os.waitpid(pids[-1], 0)
        return f"the parent's, whose child ended with {os.waitstatus_to_exitcode(status)}"

    report = report_of(url, compute)
    report.set("of before", 2)
    value = report(1)
    if pids[-1] == 0:
        fine = value == "the child's" and report.peek(1) is None and report(2) == "of before"
        os._exit(7 if fine else 1)
    pipe.send((value, report.stats().lease_lost, report.peek(1).value))


@over(*ALL)
def test_a_child_leaves_its_parents_lease_alone(url: str) -> None:
    """Promise 13: a forked child does not store what its parent computes, and does not release its parent's lease."""
    with other(fork_and_compute, url) as parent:
        value, lost, kept = parent.hear()
    assert value == kept == "the parent's, whose child ended with 7"
    assert lost == 0


def fork_after_use(pipe: Connection, url: str) -> None:
    """A fork as in gunicorn with preload: connections, news, a loop and a local tier were in use before it."""
    cache = cache_at(url, local=url.startswith(TELL_OF_CHANGES), early=0, lease=LEASE)
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
    stored = [cache.get(f"child {number}") for number in range(4)]
    os.set_blocking(counted, False)
    pipe.send((codes, ours, stored, len(os.read(counted, 100)), runner.run(both_colours("warm"))))
    runner.close()


@over(*ALL)
def test_both_sides_of_a_fork_go_on(url: str) -> None:
    """Promise 13: after a fork, parent and children share no replies or news, and each key is computed once."""
    with other(fork_after_use, url) as parent:
        assert parent.hear() == ([0] * 4, ["value"] * 2, [0, 1, 2, 3], 2, "warm")


# -- loops and cancellations ----------------------------------------------------------------------------------------


@over(*ALL)
def test_one_event_loop_after_the_other(url: str) -> None:
    """Promise 13: one event loop can follow another. It does not get the connections of the first."""
    with cache_at(url, early=0, lease=LEASE) as cache:

        async def ask(number: int) -> Any:
            cancelled = asyncio.ensure_future(cache.aget_or_compute("c", lambda: asyncio.sleep(10)))
            got = await asyncio.gather(*[cache.aget_or_compute(f"k{number % 2}", lambda: number) for _ in range(10)])
            cancelled.cancel()
            return set(got)

        assert [asyncio.run(ask(number)) for number in range(5)] == [{0}, {1}, {0}, {1}, {0}]
        assert asyncio.run(cache.aget_or_compute("c", lambda: "free", wait=LEASE / 4)) == "free"


@over("disk", *SERVERS)
def test_storms_of_cancellations(url: str) -> None:
    """Promises 11 and 12: a cancelled caller cancels no other caller, takes no other's reply, and leaves no lease."""
    dice, running = random.Random(3), 0

    async def storm(cache: Cache, number: int) -> None:
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
        for key in range(8):  # no lease remains
            assert number in await cache.aget_or_compute(f"{number} {key}", lambda: [number], wait=5)

    async def storms(cache: Cache) -> None:
        for number in range(5):
            await storm(cache, number)

    before = threading.active_count()  # daemon threads of other tests may still run
    with cache_at(url, early=0, lease=LEASE) as cache:
        asyncio.run(storms(cache))
    assert threading.active_count() < before + 50


# -- everything at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, local",
    [("disk", True), ("redis", True), ("redis", False), ("memcached", False), ("postgres", True)],
    indirect=["url"],
)
def test_random_interleavings(url: str, local: bool) -> None:
    """Promises 1 and 4: in a random order of steps, no old value comes back, and no two callers compute at once."""
    plans = [Plan(url, number, 7, local, 4, 60, 0.003, clears=local) for number in range(4)]
    lag = 2.0 if url.startswith("postgres") else 0.5  # Postgres tells its listeners when it gets to it
    found = check(*played(plans), lag if local else 0.05)
    assert (found.old, found.twice, found.apart) == ([], [], [])
    assert found.calls > 825
    assert found.computations > 20
