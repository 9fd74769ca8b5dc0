"""A quorum of lock engines: what stands when a server is lost, and what ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import RedisServer, wait_until

from stampede import Cache, EngineError, Lock, LockLost, OptionError
from stampede.colour import run_blocking
from stampede.engines import check_url, open_engine
from stampede.engines.memory import MemoryEngine
from stampede.engines.null import NullEngine
from stampede.engines.quorum import Quorum
from stampede.entry import new_id
from stampede.ports import Busy, Engine, Granted
from stampede.testing.conformance import LocksSuite
from stampede.testing.conformance.suite import surely

NOBODY = ["redis://127.0.0.1:1", "redis://127.0.0.1:2", "redis://127.0.0.1:3"]


class TestQuorum(LocksSuite):
    short = 0.15  # a third of it is time for all three

    def make_engine(self) -> Engine:
        self.members = [MemoryEngine() for _ in range(3)]
        return Quorum(*self.members)

    def make_peer(self, engine: Engine) -> Engine:
        return Quorum(*self.members)


class TestQuorumAsync(TestQuorum):
    suspending = True


@pytest.fixture(scope="module")
def started() -> Iterator[list[RedisServer]]:
    servers = [RedisServer() for _ in range(3)]
    yield servers
    for each in servers:
        each.close()


@pytest.fixture
def three(started: list[RedisServer]) -> Iterator[list[RedisServer]]:
    """Servers that know nothing of each other, and are well in the end."""
    for each in started:
        each.cli("FLUSHALL")
    yield started
    for each in started:
        try:
            each.thaw()
        except AssertionError:  # it was stopped
            each.start()


@pytest.fixture
def quorum(three: list[RedisServer]) -> Iterator[Callable[[], Quorum]]:
    made: list[Quorum] = []

    def make() -> Quorum:
        made.append(Quorum(*[each.url for each in three]))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.redis
class TestQuorumRedis(LocksSuite):
    @pytest.fixture(autouse=True)
    def _servers(self, three: list[RedisServer]) -> None:
        self.urls = [each.url for each in three]

    def make_engine(self) -> Engine:
        return Quorum(*self.urls)

    def make_peer(self, engine: Engine) -> Engine:
        return Quorum(*self.urls)


# -- servers that are lost ----------------------------------------------------------------------------------------


def test_one_may_be_killed(three: list[RedisServer], quorum: Callable[[], Quorum]) -> None:
    """The locks would end with any of the servers; or there be none until all are back."""
    on = quorum()
    with Lock("l", on=on, lease=0.6, wait=0) as lock:
        three[1].stop()
        time.sleep(0.8)  # renewed, by the others
        assert lock.held
        late = quorum()  # opened while it is down
        assert not Lock("l", on=late, wait=0).acquire()
        assert Lock("l", on=late).locked()
    with Lock("l", on=late, wait=0):
        assert late.ping() < 1.0


def test_one_may_be_frozen(three: list[RedisServer], quorum: Callable[[], Quorum]) -> None:
    """Each lock would wait for it; or what it grants at last be kept from all others."""
    on = quorum()
    with Lock("l", on=on, wait=0):
        pass
    three[2].freeze()
    for patience in (1.2, 0.3, 0.3):  # then it is known to hang
        began = time.monotonic()
        with Lock("l", on=on, wait=0):
            pass
        assert time.monotonic() - began < patience
    with Lock("l", on=on, wait=0):
        assert not Lock("l", on=quorum(), wait=0).acquire()
    three[2].thaw()
    wait_until(lambda: three[2].cli("KEYS", "*L:l") == "")


def test_two_lost_are_an_error(three: list[RedisServer], quorum: Callable[[], Quorum]) -> None:
    """One of three would grant what the two others have granted to somebody else."""
    on = quorum()
    lock = Lock("l", on=on, lease=0.5)
    assert lock.acquire()
    three[0].stop()
    three[1].stop()
    for each in (Lock("l", on=on, wait=1), Lock("other", on=quorum(), wait=0)):
        with pytest.raises(EngineError, match="no majority of 3 servers can be asked") as told:
            each.acquire()
        assert str(told.value).count(f"{three[0].url}: ") == 1
    with pytest.raises(EngineError):
        Lock("l", on=on).locked()
    wait_until(lambda: lock.lost)
    with pytest.raises((LockLost, EngineError)):
        lock.release()
    assert three[2].cli("KEYS", "*L:other") == ""  # it was given back
    three[0].start()
    with Lock("other", on=on, wait=2):
        pass


def test_one_that_has_forgotten_is_told_again(three: list[RedisServer], quorum: Callable[[], Quorum]) -> None:
    """A second loss, an hour later, would be one too many."""
    with Lock("l", on=quorum(), lease=0.6, wait=0) as lock:
        three[0].restart()
        wait_until(lambda: three[0].cli("KEYS", "*L:l") != "")
        three[1].restart()
        wait_until(lambda: three[1].cli("KEYS", "*L:l") != "")
        assert lock.held
    assert [each.cli("KEYS", "*L:l") for each in three] == ["", "", ""]


def test_what_comes_late_is_given_back(three: list[RedisServer], quorum: Callable[[], Quorum]) -> None:
    """A loop that ends, or a caller who has gone, would leave votes behind that keep others out."""

    async def visit() -> None:
        lock = Lock("l", on=on, wait=0)
        assert await lock.aacquire()
        three[2].freeze()
        await lock.arelease()

    on = quorum()
    asyncio.run(visit())
    three[2].thaw()
    wait_until(lambda: [each.cli("KEYS", "*L:l") for each in three] == ["", "", ""])


# -- many at once -------------------------------------------------------------------------------------------------


class Slow:
    """An engine's locks, to which it takes a while."""

    def __init__(self, port: Any, *, acquire: float = 0.0, deaf: bool = False) -> None:
        self._port, self._acquire, self._deaf = port, acquire, deaf

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._port, verb)

    async def acquire(self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1) -> Any:
        time.sleep(self._acquire)
        return await self._port.acquire(name, token, lease)

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        if self._deaf:
            time.sleep(timeout)
        else:
            await self._port.wait(name, busy, timeout)


def over(members: list[MemoryEngine], **slow: Any) -> Quorum:
    """Another client of the same; slow to the member of a number, in its words."""
    engines = []
    for number, member in enumerate(members):
        engine = MemoryEngine()
        engine.locks = Slow(member.locks, **slow.get(f"to_{number}", {}))
        engines.append(engine)
    return Quorum(*engines)


@pytest.mark.parametrize("renews", [False, True])
def test_a_majority_that_loses_one(renews: bool) -> None:
    """Who has the votes of two would not know whether he has the lock when one of these is lost; or lose it, though the
    third is free."""
    members = [MemoryEngine() for _ in range(3)]
    on, token = Quorum(*members), new_id()
    locks, third = surely(on.locks), surely(members[2].locks)
    assert isinstance(run_blocking(third.acquire("l", token[::-1], 30.0)), Granted)
    assert isinstance(run_blocking(locks.acquire("l", token, 30.0)), Granted)
    assert run_blocking(third.release("l", token[::-1]))
    surely(members[0].locks).release = surely(members[0].locks).renew = _lost  # type: ignore[method-assign]
    if renews:
        assert run_blocking(locks.renew("l", token, 30.0))
        assert [its for its, _ in run_blocking(surely(members[2].holds).holder("l"))] == [token]
    assert run_blocking(locks.release("l", token)) is True


async def _lost(*asked: object) -> bool:
    raise EngineError("it is lost")


def test_split_votes_end() -> None:
    """Of two who come at once each would have a part of the votes, and none the lock."""
    members = [MemoryEngine() for _ in range(3)]
    members[2].close()
    both = [over(members, to_0={"acquire": 0.02}), over(members, to_1={"acquire": 0.02})]
    for round_ in range(5):
        gate, got = threading.Barrier(2), []

        def visit(engine: Quorum, name: str, gate: threading.Barrier, got: list[bool]) -> None:
            gate.wait(10)
            reply = run_blocking(surely(engine.locks).acquire(name, new_id(), 30.0))
            got.append(isinstance(reply, Granted))

        threads = [threading.Thread(target=visit, args=(each, f"l{round_}", gate, got)) for each in both]
        for each in threads:
            each.start()
        for each in threads:
            each.join(20)
        assert sorted(got) == [False, True]


def test_what_is_granted_late_is_given_back() -> None:
    """Who has taken a lock of two members, and given it back, would then have it from the third."""
    members = [MemoryEngine() for _ in range(3)]
    one = over(members, to_2={"acquire": 0.1})
    token = new_id()
    assert isinstance(run_blocking(surely(one.locks).acquire("l", token, 30.0)), Granted)
    assert run_blocking(surely(one.locks).release("l", token))
    time.sleep(0.15)
    assert run_blocking(surely(members[2].holds).holder("l")) == []


def test_who_waits_is_told_by_most() -> None:
    """He would sleep on where one of them says nothing, or ask all the time where one knows nothing of the holder."""
    members = [MemoryEngine() for _ in range(3)]
    holder, other = over(members), over(members, to_1={"deaf": True})
    locks, token = surely(other.locks), new_id()
    assert isinstance(run_blocking(surely(holder.locks).acquire("l", token, 30.0)), Granted)
    wait_until(lambda: all(run_blocking(surely(each.holds).holder("l")) for each in members))
    assert run_blocking(surely(members[2].locks).release("l", token))  # it forgets
    busy = run_blocking(locks.acquire("l", new_id(), 30.0))
    assert isinstance(busy, Busy) and busy.token == token
    began = time.monotonic()
    run_blocking(locks.wait("l", busy, 0.2))
    assert time.monotonic() - began >= 0.2
    release = threading.Timer(0.1, lambda: run_blocking(surely(holder.locks).release("l", token)))
    release.start()
    began = time.monotonic()
    run_blocking(locks.wait("l", busy, 1.5))
    assert time.monotonic() - began < 1.0
    release.join()


def test_nobody_is_inside_with_another(three: list[RedisServer], quorum: Callable[[], Quorum]) -> None:
    """Two would be, when a server is lost and comes back, a lease later, with nothing."""
    engines, over = [quorum() for _ in range(2)], threading.Event()
    inside: list[int] = []
    wrong: list[object] = []
    entered = [0] * 6

    def visit(number: int) -> None:
        while not over.is_set():
            try:
                with Lock("l", on=engines[number % 2], lease=0.6, wait=10):
                    inside.append(number)
                    if len(inside) != 1:
                        wrong.append(list(inside))
                    time.sleep(0.005)
                    inside.remove(number)
                entered[number] += 1
            except BaseException as error:
                wrong.append(error)
                raise

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    wait_until(lambda: sum(entered) > 10)
    three[0].stop()
    before = sum(entered)
    time.sleep(0.7)  # what it had granted has ended
    wait_until(lambda: sum(entered) > before + 10)
    three[0].start()
    before = sum(entered)
    wait_until(lambda: sum(entered) > before + 10 and all(entered))
    over.set()
    for each in threads:
        each.join(20)
    assert not wrong


# -- what can be one ----------------------------------------------------------------------------------------------


def test_the_locks_of_a_cache() -> None:
    """A herd in two caches would compute twice."""
    store, locks = MemoryEngine(), Quorum(*[MemoryEngine() for _ in range(3)])
    calls: list[int] = []

    def slow() -> int:
        calls.append(1)
        time.sleep(0.05)
        return 7

    with Cache(engine=store, locks=locks) as one, Cache(engine=store, locks=locks) as other:
        got: list[int] = []
        threads = [
            threading.Thread(target=lambda it=it: got.append(it.get_or_compute("k", slow, ttl=60)))  # type: ignore[misc]
            for it in (one, other) * 4
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(20)
    assert (got, len(calls)) == ([7] * 8, 1)


def test_there_is_no_fence() -> None:
    """A resource would compare numbers of which each server has its own."""
    with Lock("l", on=Quorum(*[MemoryEngine() for _ in range(3)])) as lock:
        with pytest.raises(OptionError, match="has no fence"):
            _ = lock.fence
        assert lock.held
    with Lock("l", on=MemoryEngine()) as lock:
        assert lock.fence


@pytest.mark.parametrize(
    "members, told",
    [
        (NOBODY[:2], "2 members"),
        ([*NOBODY[:2], NOBODY[0] + "/3"], "2 times"),
        (["redis://localhost", "redis://127.0.0.1:6379/1", NOBODY[0]], "2 times"),
        ([NullEngine(), NullEngine()], "2 members"),
        (["disk:///tmp/a", "disk:///tmp/a", NOBODY[0]], "2 times"),
    ],
)
def test_what_is_no_quorum(members: list[str | Engine], told: str) -> None:
    """One server would be the majority."""
    with pytest.raises(OptionError, match=told):
        Quorum(*members)


def test_one_engine_twice() -> None:
    """The same of an engine that has no address."""
    one = MemoryEngine()
    with pytest.raises(OptionError, match="2 times"):
        Quorum(one, MemoryEngine(), one)
    with pytest.raises(OptionError, match="can't be shared"):
        Lock("l", on=Quorum(one, MemoryEngine(), MemoryEngine()), shared=True)


@pytest.mark.redis
def test_by_its_url(three: list[RedisServer]) -> None:
    """Settings couldn't name one."""
    url = "quorum+redis://" + ",".join(f"127.0.0.1:{each.port}" for each in three) + "/0"
    check_url(url)
    engine = open_engine(url)
    try:
        assert isinstance(run_blocking(surely(engine.locks).acquire("l", new_id(), 5.0)), Granted)
        wait_until(lambda: all(each.cli("KEYS", "*L:l") != "" for each in three))
    finally:
        engine.close()
    for bad in ("quorum://a,b,c", "quorum+redis://a,b", "quorum+redis://a,b,a", "quorum+nothing://a,b,c"):
        with pytest.raises(OptionError):
            check_url(bad)
