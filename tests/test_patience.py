"""A caller with a `wait` waits no longer, also for an engine that hangs."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from faces import LONG, Face
from herd import PATIENCE, Herd, until
from memcached_server import shared_memcached
from proxy import Proxy
from servers import shared_cluster, shared_redis

from stampede import Cache, WaitTimeout, guarded, workers
from stampede.colour import BLOCKING, run_blocking
from stampede.engines.memcached.generations import _scope_name
from stampede.engines.redis.routed import GENERATIONS
from stampede.engines.redis.scripts import Scripts
from stampede.testing import FakeClock
from stampede.workers import Late, Reserved, Workers, within

pytestmark = pytest.mark.alone

Before = Callable[[Any], Proxy]
Faces = Callable[..., Face]

both = pytest.mark.parametrize("colour", ["sync", "async"])
engines = pytest.mark.parametrize("engine", ["redis", "memcached"])
WAIT, SOON = 0.1, 0.3
"""Seconds: a caller's patience, and what is not much more on a busy machine (an engine that hangs takes 1.0)."""

LATER, HANGS = 1.5, 6.0
"""The same where an engine that hangs takes so long."""


def hanging(engine: str, before: Before, seconds: float | None = None) -> tuple[Proxy, str]:
    """What can be made to hang, emptied; and its URL. For so long it may take for an answer; None: as by default."""
    if engine == "redis":
        shared_redis().cli("FLUSHALL")
        proxy = before(shared_redis())
    else:
        shared_memcached().empty()
        proxy = before(shared_memcached())
    option = {"redis": "socket_timeout", "memcached": "timeout"}[engine]
    return proxy, f"{engine}://127.0.0.1:{proxy.port}" + ("" if seconds is None else f"?{option}={seconds}")


@both
@engines
def test_nobody_waits_longer_for_an_engine_that_hangs(before: Before, face: Faces, engine: str, colour: str) -> None:
    """The first to meet it would wait for a second, and one a second after it, whatever patience they have."""
    proxy, url = hanging(engine, before)
    asked = face(url, colour, pause=0.2, lease=5)
    asked("warm", lambda: 1, wait=WAIT)
    proxy.hold()
    took: list[float] = []
    for number in range(40):
        began = time.monotonic()
        assert asked(f"k{number}", lambda number=number: number, wait=WAIT) == number
        took.append(time.monotonic() - began)
        time.sleep(0.03)
    assert max(took) < SOON
    assert median(took[1:6]) < WAIT  # it is known that the first one's question has no answer
    proxy.cut()
    proxy.let_go()
    until(lambda: asked("other", lambda: 1, wait=WAIT) and not asked.down)
    for number in range(0, 40, 8):
        asked.run("set", f"k{number}", -1)
        assert asked(f"k{number}", lambda: 0, wait=WAIT) == -1


@both
@engines
@pytest.mark.parametrize("change", [None, ("invalidate", "k"), ("clear",)])
def test_nor_for_the_value_to_be_stored(
    before: Before, face: Faces, engine: str, colour: str, change: tuple[str, ...] | None
) -> None:
    """The value is there: only the engine doesn't take it; or isn't to have it any more."""
    proxy, url = hanging(engine, before, HANGS)
    asked = face(url, colour)
    asked("warm", lambda: 1)
    ends: list[float] = []

    def origin() -> int:
        if change is not None:
            getattr(asked.cache, change[0])(*change[1:])
        proxy.hold()
        ends.append(time.monotonic())
        return 1

    assert asked("k", origin, wait=WAIT) == 1
    assert time.monotonic() - ends[0] < LATER
    proxy.let_go()
    if change is None:
        until(lambda: asked.run("get", "k") == 1)  # it was on its way


@engines
def test_nor_does_a_functions_first_call_hold_its_loop_up(before: Before, engine: str) -> None:
    """All tasks of the loop would stand still for a second, for each function that is called then."""
    proxy, url = hanging(engine, before)
    lags: list[float] = []

    async def ticks() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - began)

    async def called() -> None:
        clock, began = asyncio.create_task(ticks()), time.monotonic()
        assert await f() == 1
        assert time.monotonic() - began < SOON
        clock.cancel()

    with Cache(url) as cache:

        @cache.cached(wait=WAIT)
        async def f() -> int:
            return 1

        proxy.hold()
        asyncio.run(called())
        proxy.cut()
        proxy.let_go()
    assert max(lags) < SOON


@pytest.fixture
def alarmed() -> Iterator[None]:
    """An alarm interrupts whom it finds, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarmed")
@engines
def test_nor_for_a_lease_to_be_given_back_by_who_is_interrupted_twice(before: Before, face: Faces, engine: str) -> None:
    """The second Ctrl-C, of one who sees that nothing happens, would have it wait for a second more."""
    proxy, url = hanging(engine, before)
    asked = face(url)
    asked("warm", lambda: 1)
    began: list[float] = []

    def origin() -> int:
        proxy.hold()
        began.append(time.monotonic())
        signal.setitimer(signal.ITIMER_REAL, WAIT / 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked("k", origin, wait=WAIT)
    assert time.monotonic() - began[0] < WAIT / 2 + SOON


@pytest.mark.usefixtures("alarmed")
@engines
def test_nor_by_who_is_interrupted_while_it_asks(before: Before, face: Faces, engine: str) -> None:
    """The lease that it may have been granted would be given back as if it had all the time."""
    proxy, url = hanging(engine, before)
    asked = face(url)
    asked("warm", lambda: 1)
    proxy.hold()
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, WAIT / 2)
    with pytest.raises(KeyboardInterrupt):
        asked("k", lambda: 1, wait=WAIT)
    assert time.monotonic() - began < WAIT / 2 + SOON


@engines
def test_the_question_of_a_loop_that_was_left_keeps_nobody_from_asking(before: Before, engine: str) -> None:
    """Nobody in that loop hears its answer: all who are impatient would do without the engine for ever."""
    proxy, url = hanging(engine, before)
    with Cache(url) as cache, asyncio.Runner() as left:
        left.run(cache.aget_or_compute("warm", lambda: 1))
        proxy.hold()
        assert left.run(cache.aget_or_compute("k", lambda: 1, wait=WAIT)) == 1
        proxy.let_go()
        keys = [f"other{number}" for number in range(20)]
        cache.set_many(dict.fromkeys(keys, "stored"))
        herd = Herd(*[lambda key=key: cache.get_or_compute(key, lambda: "computed", wait=WAIT) for key in keys])
        assert herd.join() == ["stored"] * 20


class Counted(Workers):
    """Places to ask in, and how many have asked."""

    asked = 0

    def reserve(self) -> Reserved | None:
        self.asked += 1
        return super().reserve()


@engines
def test_who_is_spared_asks_no_more_than_now_and_then(
    before: Before, face: Faces, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take a place beside itself for as long as the engine hangs, until there are none; or nobody would ask,
    and who finds it well again would be a matter of chance."""
    places = Counted(100, "stampede-ask")
    monkeypatch.setattr("stampede.workers._askers", places)
    proxy, url = hanging(engine, before)
    asked = face(url)
    asked("warm", lambda: 1, wait=WAIT)
    proxy.hold()
    asked("first", lambda: 1, wait=0.0)
    began, calls, places.asked = time.monotonic(), 0, 0
    while time.monotonic() - began < 1.7 * guarded.EVERY:
        asked(f"k{calls}", lambda: 1, wait=0.0)
        calls += 1
    assert calls > 10
    assert 2 <= places.asked <= 4  # of these, one or two may be asked for the generation
    proxy.let_go()
    until(lambda: not places._taken)


def test_what_is_answered_says_more_than_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection that is dead, or one loop that rests, would keep all from an engine that answers."""
    clock = FakeClock()
    monkeypatch.setattr(guarded, "_clock", clock)
    its, asked = guarded._Server(), []
    for _ in range(4):
        clock.advance(1)
        asked.append(guarded._Pending())
    clock.advance(1)
    assert not its.hangs_for(0)  # nobody has found one late
    its.late(asked[1])
    assert its.hangs_for(3)
    assert not its.hangs_for(3.1)  # who has more patience asks
    its.answered(asked[0])  # it was before
    assert its.hangs_for(3)
    assert [its.is_due(), its.is_due()] == [True, False]
    clock.advance(guarded.EVERY)
    assert its.is_due()
    its.answered(asked[2])
    assert not its.hangs_for(0)
    its.late(asked[0])  # found late, and overtaken
    assert not its.hangs_for(0)
    its.late(asked[3])
    assert its.hangs_for(0)
    its.ended(asked[3])  # by its time-out: what that means is for others to say
    assert not its.hangs_for(0)


@both
def test_a_server_that_hangs_says_nothing_of_the_others_of_its_ring(
    before: Before, face: Faces, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for a key of another one would compute what is stored there; as would all, where those who ask it have
    taken all places there are."""
    monkeypatch.setattr("stampede.workers._askers", Workers(20, "stampede-ask"))
    proxies = [before(shared_memcached()) for _ in range(2)]
    asked = face("memcached://" + ",".join(f"127.0.0.1:{each.port}" for each in proxies), colour)
    asked("warm", lambda: 1)
    owner = asked.cache._core.engine._servers.of(_scope_name(asked.cache._root.name)).name
    proxy = next(each for each in proxies if str(each.port) not in str(owner))  # else the names of all keys change
    _one_of_two_hangs(asked, proxy.port, proxy.hold, proxy.let_go)


@both
def test_nor_of_the_others_of_its_cluster(face: Faces, colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same."""
    monkeypatch.setattr("stampede.workers._askers", Workers(20, "stampede-ask"))
    cluster = shared_cluster()
    asked = face(cluster.url, colour)
    asked("warm", lambda: 1)
    generations = asked.cache._core.engine._servers._owners[GENERATIONS]
    node = next(node for node in cluster.nodes if node.port != generations.port)
    _one_of_two_hangs(asked, node.port, node.freeze, node.thaw)


def _one_of_two_hangs(asked: Face, port: int, hang: Callable[[], object], heal: Callable[[], object]) -> None:
    """Whoever asks it, over and over; and all that is at the other one is found, by those who are as impatient."""
    places = workers._askers
    asked("warm", lambda: 1)
    cache = asked.cache
    of = [cache.engine.server_of(cache._root.prefix + cache._key(f"k{number}")) for number in range(60)]
    hung, well = ([f"k{at}" for at in range(60) if (str(port) in str(of[at])) is its] for its in (True, False))
    assert hung
    assert len(well) > 8
    missing, well = well[:3], well[3:]
    for key in well:
        asked.run("set", key, "stored")
    over = threading.Event()

    def ask(some: list[str]) -> None:
        while not over.is_set():
            for key in some:
                assert cache.get_or_compute(key, lambda: "computed", wait=0.0) == "computed"

    hang()
    herd = Herd(*[lambda some=hung[at::4]: ask(some) for at in range(4)])
    try:
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            assert [asked(key, lambda: "computed", wait=0.05) for key in well] == ["stored"] * len(well)
        assert [asked(key, lambda: "computed", wait=0.05) for key in missing] == ["computed"] * 3
        kept = run_blocking(cache.engine.store.get([cache._root.prefix + cache._key(key) for key in missing]))
        assert len([each for each in kept if each is not None]) > 1  # and not each in this process only
    finally:
        over.set()
        ends = herd.join()
        heal()
    assert ends == [None] * 4
    until(lambda: not places._taken)


@both
@engines
def test_nor_for_one_that_hangs_while_somebody_computes(before: Before, face: Faces, engine: str, colour: str) -> None:
    """Who looks now and then whether the value is there would wait for the answer to one of these looks."""
    proxy, url = hanging(engine, before)
    holder, waiter = face(f"{engine}://127.0.0.1:{proxy.target}"), face(url, colour)
    begun, end = threading.Event(), threading.Event()
    herd = Herd(lambda: holder("k", lambda: (begun.set(), end.wait(LONG))[1]))
    assert begun.wait(LONG)
    waiter("warm", lambda: 1)
    threading.Timer(WAIT / 2, proxy.hold).start()
    began = time.monotonic()
    with suppress(WaitTimeout):
        waiter("k", lambda: 2, wait=WAIT)
    assert time.monotonic() - began < WAIT + SOON
    end.set()
    assert herd.join() == [True]


@engines
def test_nor_for_one_thing_after_the_other(before: Before, face: Faces, engine: str) -> None:
    """Who asks for today's generation first, and joins a flight then, would have all his time again."""
    proxy, url = hanging(engine, before)
    asked = face(url)
    asked("warm", lambda: 1)
    proxy.hold()
    herd = Herd(lambda: asked("k", lambda: 1))
    until(lambda: asked.cache._core.flights._flights)
    generations = asked.cache._core.engine.recalls._generations
    generations.forget() if engine == "redis" else generations.clear()
    began = time.monotonic()
    with suppress(WaitTimeout):
        asked("k", lambda: 1, wait=4 * WAIT)
    assert time.monotonic() - began < 4 * WAIT + SOON
    assert herd.join() == [1]


@both
def test_nor_to_keep_what_was_found(before: Before, face: Faces, colour: str) -> None:
    """Who has its value, and asks whether that is of today's generation, would have all its time again for this."""
    proxy, url = hanging("redis", before)
    direct, asked = face(proxy.url.replace(str(proxy.port), str(proxy.target))), face(url, colour, local=True)
    direct.run("set", "k", 1)
    asked("warm", lambda: 1)
    generations = asked.cache._core.engine.recalls._generations

    def stop() -> None:
        time.sleep(5 * WAIT)
        proxy.hold()
        generations.forget()

    proxy.at(b"|k\r\n", after=stop)
    began = time.monotonic()
    assert asked("k", lambda: 2, wait=8 * WAIT) == 1
    assert time.monotonic() - began < 12 * WAIT  # of thirteen
    assert proxy.met == 1
    proxy.let_go()


@engines
def test_nor_for_the_engine_when_the_leader_has_gone(before: Before, face: Faces, engine: str) -> None:
    """Who has followed for nearly as long as it may, and claims for itself then, would have all its time again."""
    proxy, url = hanging(engine, before)
    asked = face(url)
    asked("warm", lambda: 1)
    begun = threading.Event()

    def origin() -> None:
        proxy.hold()
        begun.set()
        time.sleep(6 * WAIT)
        raise KeyboardInterrupt

    leader = Herd(lambda: asked("k", origin, wait=0.0))
    assert begun.wait(PATIENCE)
    began = time.monotonic()
    assert asked("k", lambda: 2, wait=10 * WAIT) == 2
    assert time.monotonic() - began < 14 * WAIT  # of sixteen
    assert isinstance(leader.join()[0], KeyboardInterrupt)


@engines
def test_nor_for_what_was_first_asked_slowly(before: Before, face: Faces, engine: str) -> None:
    """Who is told at last that somebody computes would wait for that as if it had only just come."""
    proxy, url = hanging(engine, before)
    holder, waiter = face(f"{engine}://127.0.0.1:{proxy.target}"), face(url)
    for _ in range(30):
        waiter("warm", lambda: 1)  # until it looks first, as it expects to find
    begun, end = threading.Event(), threading.Event()
    herd = Herd(lambda: holder("k", lambda: (begun.set(), end.wait(LONG))[1]))
    assert begun.wait(LONG)
    proxy.delay = 8 * WAIT
    began = time.monotonic()
    with suppress(WaitTimeout):
        waiter("k", lambda: 2, wait=10 * WAIT)
    assert time.monotonic() - began < 16 * WAIT  # of eighteen
    proxy.delay = 0.0
    end.set()
    assert herd.join() == [True]


@engines
def test_nor_does_one_who_is_followed_to_say_that_it_failed(before: Before, face: Faces, engine: str) -> None:
    """It asks whether its lease stood, for its followers, and gives that back: each would take as long as it takes."""
    proxy, url = hanging(engine, before, HANGS)
    asked = face(url)
    asked("warm", lambda: 1)
    begun, followed, ends = threading.Event(), threading.Event(), []

    def origin() -> None:
        begun.set()
        assert followed.wait(PATIENCE)
        proxy.hold()
        ends.append(time.monotonic())
        raise ValueError

    def lead() -> float:
        with pytest.raises(ValueError):
            asked("k", origin, wait=WAIT)
        return time.monotonic() - ends[0]

    leader = Herd(lead)
    assert begun.wait(PATIENCE)
    follower = Herd(lambda: asked("k", lambda: 2, wait=10 * WAIT))
    (flight,) = asked.cache._core.flights._flights.values()
    until(lambda: flight.callers > 1)
    followed.set()
    assert leader.join()[0] < LATER
    follower.join()


@both
@engines
def test_nor_does_a_batch_for_one_key_after_the_other(before: Before, face: Faces, engine: str, colour: str) -> None:
    """For each key that somebody else computes it would have all its time again."""
    _, url = hanging(engine, before)
    holder, waiter = face(url), face(url, colour)
    keys, herds = [f"k{number}" for number in range(12)], []
    ends = [threading.Event() for _ in keys]
    for key, end in zip(keys, ends, strict=True):
        begun = threading.Event()
        herds.append(Herd(lambda key=key, end=end, begun=begun: holder(key, lambda: (begun.set(), end.wait(LONG))[1])))
        assert begun.wait(LONG)
    began = time.monotonic()
    for number, end in enumerate(ends):
        threading.Timer((number + 1) * 1.5 * WAIT, end.set).start()
    with pytest.raises(WaitTimeout):
        waiter.run("get_or_compute_many", keys, lambda keys: dict.fromkeys(keys, 2), wait=2 * WAIT)
    assert time.monotonic() - began < 12 * WAIT  # of eighteen
    for end in ends:
        end.set()
    for herd in herds:
        assert herd.join() == [True]


@both
@engines
def test_nor_does_a_batch(before: Before, face: Faces, engine: str, colour: str) -> None:
    """It would wait for as long as the engine has for an answer: to its claims, and to all that it stores."""
    proxy, url = hanging(engine, before, HANGS)
    asked = face(url, colour, lease=LONG)
    asked("warm", lambda: 1)
    proxy.hold()
    began = time.monotonic()
    assert asked.many(["a", "b"], lambda keys: dict.fromkeys(keys, 1), wait=WAIT) == {"a": 1, "b": 1}
    assert time.monotonic() - began < LATER
    proxy.let_go()
    until(lambda: not asked.down)
    until(lambda: asked.many(["a", "b"], lambda keys: dict.fromkeys(keys, 2), wait=LONG) == {"a": 2, "b": 2})
    ends: list[float] = []

    def loader(keys: list[str]) -> dict[str, int]:
        proxy.hold()
        ends.append(time.monotonic())
        return dict.fromkeys(keys, 3)

    assert asked.many(["c", "d"], loader, wait=WAIT) == {"c": 3, "d": 3}
    assert time.monotonic() - ends[0] < LATER
    proxy.let_go()
    until(lambda: asked.run("get", "c") == asked.run("get", "d") == 3)


@both
def test_a_batch_finds_what_the_other_servers_of_its_ring_have(before: Before, face: Faces, colour: str) -> None:
    """Those that answer would be taken for the one that hangs."""
    proxy, well = before(shared_memcached()), shared_memcached().port
    asked = face(f"memcached://127.0.0.1:{proxy.port},127.0.0.1:{well}", colour)
    keys = [f"k{number}" for number in range(40)]
    assert set(asked.many(keys, lambda keys: dict.fromkeys(keys, 1)).values()) == {1}
    of = {key: asked.cache.engine.server_of(asked.cache._root.prefix + asked.cache._key(key)) for key in keys}
    proxy.hold()
    for _ in range(2):
        found = asked.many(keys, lambda keys: dict.fromkeys(keys, 2), wait=WAIT)
        assert {key for key in keys if found[key] == 1} == {key for key in keys if str(proxy.port) not in str(of[key])}
    proxy.let_go()


@both
def test_a_value_that_is_not_sent_leaves_no_lease(before: Before, face: Faces, colour: str) -> None:
    """As another question hangs, it is kept here only: all other processes would wait for a lease that nobody holds."""
    proxy, url = hanging("redis", before)
    asked = face(url, colour, lease=30)
    asked("warm", lambda: 1)

    def origin() -> int:
        proxy.hold()
        hangs = Herd(lambda: asked.cache.get_or_compute("hangs", lambda: 1, wait=0.01))
        time.sleep(WAIT + 0.1)
        tried = Herd(lambda: asked.cache.get_or_compute("tried", lambda: 1, wait=0.01))  # and no other is, for a while
        return hangs.join()[0] * tried.join()[0]

    assert asked("k", origin, wait=WAIT) == 1
    proxy.let_go()
    until(lambda: not shared_redis().cli("KEYS", "*}l"), bound=5)


@both
def test_a_lease_that_comes_too_late_is_given_back(before: Before, face: Faces, colour: str) -> None:
    """The others would wait for one that nobody holds."""
    proxy, url = hanging("redis", before)
    asked = face(url, colour)
    asked("warm", lambda: 1)
    proxy.hold()
    assert asked("k", lambda: 1, wait=WAIT) == 1
    came = threading.Event()
    proxy.at(Scripts().claim.hash, after=came.set)
    proxy.let_go()
    assert came.wait(PATIENCE)
    until(lambda: not shared_redis().cli("KEYS", "*}l"))
    until(lambda: not asked.down)  # that it could be given back is noticed
    assert asked("k", lambda: 2, wait=WAIT) == 2


@both
@engines
def test_a_batch_waits_for_an_engine_that_is_slow(before: Before, face: Faces, engine: str, colour: str) -> None:
    """That it waits for nobody's computation would be taken for impatience: each process would compute all of it."""
    proxy, url = hanging(engine, before)
    asked = face(url, colour, lease=5)
    asked.run("set", "k", 1)
    proxy.delay = 0.12
    assert asked.many(["k"], lambda keys: dict.fromkeys(keys, 2)) == {"k": 1}


@engines
def test_nor_where_no_place_is_left_to_wait_in(
    before: Before, face: Faces, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds none would wait where nothing bounds it; or not hear of what others compute."""
    monkeypatch.setattr("stampede.workers._waiters", Workers(1, "stampede-wait"))
    monkeypatch.setattr("stampede.workers.MOMENT", 0.05)
    proxy, url = hanging(engine, before)
    holder, waiter = face(f"{engine}://127.0.0.1:{proxy.target}"), face(url)
    keys, begun, end = ["a", "b", "c"], Herd(), threading.Event()
    for key in keys:
        held = threading.Event()
        begun = Herd(lambda key=key, held=held: holder(key, lambda: (held.set(), end.wait(LONG), key)[2]))
        assert held.wait(LONG)
    waiter("warm", lambda: 1)
    well = Herd(*[lambda key=key: waiter(key, lambda: "mine", wait=2.0) for key in keys])
    threading.Timer(WAIT, end.set).start()
    assert well.join() == keys
    assert begun.join() == ["c"]


@engines
def test_nor_for_one_that_hangs_where_no_place_is_left(
    before: Before, face: Faces, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look for itself, and wait for the answer."""
    monkeypatch.setattr("stampede.workers._waiters", Workers(0, "stampede-wait"))
    test_nor_for_one_that_hangs_while_somebody_computes(before, face, engine, "sync")


@engines
def test_nor_where_no_place_is_left_to_ask_in(
    before: Before, face: Faces, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are places wait for an engine that hangs: the next would ask it as if it had all the time."""
    places = Workers(1, "stampede-ask")
    monkeypatch.setattr("stampede.workers._askers", places)
    proxy, url = hanging(engine, before)
    asked = face(url)
    asked("warm", lambda: 1, wait=WAIT)
    proxy.hold()
    herd = Herd(lambda: asked("hangs", lambda: 1, wait=10 * WAIT))
    until(lambda: places._taken)
    began = time.monotonic()
    assert asked("k", lambda: 2, wait=WAIT) == 2
    assert time.monotonic() - began < SOON
    assert herd.join() == [1]


def test_a_place_that_is_found_when_the_time_is_over() -> None:
    """A process that doesn't run in between would ask to wait for less than no time: a ValueError."""

    async def answer() -> int:
        return 1

    told: list[Any] = []
    answered = threading.Event()

    def late(result: Any, error: BaseException | None) -> None:
        told.append(error or result)
        answered.set()

    got = run_blocking(within(BLOCKING, answer(), -1.0, late))
    assert got == 1 or (got is Late.LATE and answered.wait(PATIENCE) and told == [1])
