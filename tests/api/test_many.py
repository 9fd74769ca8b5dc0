"""`@cached.many`: a function of many ids is called once for all missing ids. Each id has its own key."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from herd import PATIENCE, Herd, Origin, had, until, until_async

import stampede
from stampede import Absent, Cache, OptionError, cached
from stampede.engines.memory import MemoryEngine
from stampede.leases.keeper import keeper
from stampede.testing import disabled, isolated


@dataclass(frozen=True)
class User:
    id: int
    region: str


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated():
        yield


@pytest.fixture(params=["memory://", "disk local", "paired"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    with made(request.param, tmp_path) as cache:
        yield cache


def made(kind: str, directory: Path) -> Cache:
    if kind == "paired":
        return Cache("memory://?codec=sealed", locks=f"file://{directory}/locks")
    if kind.startswith("disk"):
        return Cache(f"disk://{directory}/c", local=kind == "disk local", strict=True)
    return Cache(kind, strict=True)


class Table:
    """Rows by id. Above 100, only even ids exist. The table records the ids of each query."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.before: Callable[[], object] = lambda: None

    def select(self, ids: list[int], region: str = "eu") -> dict[int, User]:
        self.asked.append(ids)
        self.before()
        return {id: User(id, region) for id in sorted(ids) if id < 100 or id % 2 == 0}

    def loader(self, cache: Cache, colour: str, **options: Any) -> Any:
        """Return a decorated function of this colour that reads this table."""

        def users(ids: list[int], *, region: str = "eu") -> dict[int, User]:
            return self.select(ids, region)

        async def ausers(ids: list[int], *, region: str = "eu") -> dict[int, User]:
            await asyncio.sleep(0)
            return self.select(ids, region)

        return cache.cached.many(version=1, key="user:{ids}:{region}", **options)(users if colour == "sync" else ausers)


def test_one_call_for_what_is_missing(cache: Cache, colour: str) -> None:
    """The function is called once for all missing ids. The result has the order of the ids that were asked for."""
    table = Table()
    users = table.loader(cache, colour)
    assert list(had(users([3, 1, 2])).items()) == [(n, User(n, "eu")) for n in (3, 1, 2)]
    assert table.asked == [[3, 1, 2]]
    assert list(had(users([5, 2, 4, 1]))) == [5, 2, 4, 1]
    assert table.asked[1:] == [[5, 4]]
    assert had(users([1, 5])) == {1: User(1, "eu"), 5: User(5, "eu")}
    assert had(users([])) == {}
    assert len(table.asked) == 2


def test_single_calls_share_it(cache: Cache, colour: str) -> None:
    """`users.one(5)` and batches share their keys, so an id is loaded and stored only once."""
    table = Table()
    users = table.loader(cache, colour)
    had(users([1, 2]))
    assert had(users.one(1)) == User(1, "eu")
    assert had(users.one(3)) == User(3, "eu")
    assert had(users([1, 2, 3])) == {n: User(n, "eu") for n in (1, 2, 3)}
    assert table.asked == [[1, 2], [3]]


def test_further_parameters_are_part_of_every_key(cache: Cache, colour: str) -> None:
    """The other parameters are part of each key. The user of one region is not served for another region."""
    table = Table()
    users = table.loader(cache, colour)
    assert had(users([1], region="us")) == {1: User(1, "us")}
    assert had(users([1])) == {1: User(1, "eu")}
    assert had(users(region="us", ids=[1, 2])) == {1: User(1, "us"), 2: User(2, "us")}
    assert had(users.one(2, region="us")) == User(2, "us")
    assert table.asked == [[1], [1], [2]]
    assert users.key(1) != users.key(1, region="us")


def test_an_id_is_asked_for_once(cache: Cache, colour: str) -> None:
    """An id that occurs twice in a call is passed to the function once."""
    table = Table()
    users = table.loader(cache, colour)
    assert had(users([1, 2, 1, 2, 1])) == {1: User(1, "eu"), 2: User(2, "eu")}
    assert had(users(iter([3, 3, 3.0]))) == {3: User(3, "eu")}
    with disabled():
        assert had(users([4, 4])) == {4: User(4, "eu")}
    assert table.asked == [[1, 2], [3], [4]]


def test_what_is_left_out(cache: Cache, colour: str) -> None:
    """A missing id is left out of the result and loaded again by the next call. `users.one` raises Absent for it."""
    table = Table()
    users = table.loader(cache, colour)
    assert had(users([1, 101])) == {1: User(1, "eu")}
    assert had(users([1, 101])) == {1: User(1, "eu")}
    with pytest.raises(Absent, match="has nothing for 101") as caught:
        had(users.one(101))
    assert isinstance(caught.value, KeyError)
    with pytest.raises(KeyError):
        had(users.refresh(101))
    assert table.asked == [[1, 101], [101], [101], [101]]
    assert had(users.peek(101)) is None


def test_that_there_is_nothing_may_be_kept(cache: Cache, colour: str) -> None:
    """`absent=` stores that an id does not exist. Otherwise, unknown ids would call the function each time."""
    table = Table()
    users = table.loader(cache, colour, absent=60, raises=OSError)
    for _ in range(2):
        assert had(users([1, 101])) == {1: User(1, "eu")}
        with pytest.raises(Absent, match="has nothing for 101"):
            had(users.one(101))
    assert table.asked == [[1, 101]]
    assert had(users.peek(101)).ttl == 60
    assert had(users.peek(1)).ttl == 300
    had(users.set(User(101, "eu"), 101))
    assert had(users([101])) == {101: User(101, "eu")}
    had(users.invalidate_many([101, 1]))
    assert had(users([101])) == {}


def test_absent_beside_a_ttl_of_the_value() -> None:
    """A `ttl` function is not called for an absent id, which has no value."""
    with Cache() as cache:
        users = cache.cached.many(ttl=lambda user: user["ttl"], absent="forever")(
            lambda ids: {id: {"ttl": 5} for id in ids if id}
        )
        assert users([0, 1]) == {1: {"ttl": 5}}
        assert users.peek(1).ttl == 5
        assert users.peek(0).ttl == float("inf")


def test_chunks(cache: Cache, colour: str) -> None:
    """With `chunk=3`, the function gets at most three ids in one call."""
    table = Table()
    users = table.loader(cache, colour, chunk=3)
    assert list(had(users(range(8)))) == list(range(8))
    assert table.asked == [[0, 1, 2], [3, 4, 5], [6, 7]]
    with disabled():
        assert list(had(users(range(4)))) == list(range(4))
    assert table.asked[3:] == [[0, 1, 2], [3]]


def test_a_chunk_that_fails(cache: Cache, colour: str) -> None:
    """If a chunk fails, the values of earlier chunks are stored. Later chunks do not begin, and no key is locked."""
    table = Table()
    users = table.loader(cache, colour, chunk=2, lease=60)

    def fail_the_second() -> None:
        if table.asked[-1] == [2, 3]:
            raise ZeroDivisionError

    table.before = fail_the_second
    with pytest.raises(ZeroDivisionError):
        had(users(range(6)))
    assert table.asked == [[0, 1], [2, 3]]
    table.before = lambda: None
    assert list(had(users(range(6)))) == list(range(6))
    assert table.asked[2:] == [[2, 3], [4, 5]]


def test_each_chunk_has_its_time() -> None:
    """`max_hold` applies to each call of the function, so the leases of later chunks are renewed for longer."""
    left: list[list[float]] = []
    with Cache() as cache:

        @cache.cached.many(chunk=1, max_hold=60)
        def load(ids: list[int]) -> dict[int, int]:
            left.append(sorted(hold._until - time.monotonic() for hold in keeper.holds() if hold.of is cache._core))
            return {id: id for id in ids}

        assert load([1, 2, 3]) == {1: 1, 2: 2, 3: 3}
    assert [round(seconds, -1) for seconds in left[0]] == [60, 120, 180]


def test_who_asks_for_its_own_id(cache: Cache, colour: str) -> None:
    """A function that asks for an id that it is loading is refused: it would wait for itself. Other ids are allowed."""

    def load(ids: list[int]) -> dict[int, int]:
        return {id: users.one(id - 10) + 10 if id > 9 else users([id])[id] if id == 5 else id for id in ids}

    async def aload(ids: list[int]) -> dict[int, int]:
        return {
            id: await users.one(id - 10) + 10 if id > 9 else (await users([id]))[id] if id == 5 else id for id in ids
        }

    users: Any = cache.cached.many(key="{ids}", chunk=2)(load if colour == "sync" else aload)
    assert had(users([1, 2, 13, 21])) == {1: 1, 2: 2, 13: 13, 21: 21}
    with pytest.raises(stampede.RecursiveComputation):
        had(users([4, 5]))
    with pytest.raises(stampede.RecursiveComputation):
        had(users.one(5))


def test_who_is_served_what_is_stale_waits_for_nobody(cache: Cache) -> None:
    """With `background=True`, batches and single calls get stale values at once. One batch refreshes them."""
    table, origin = Table(), Origin()
    users = table.loader(cache, "sync", stale=60, background=True)
    users.set_many({1: User(1, "old"), 2: User(2, "old")})
    users.expire(1)
    users.expire(2)
    table.before = origin
    assert users([1, 2]) == {1: User(1, "old"), 2: User(2, "old")}
    origin.has_begun()
    assert users.one(1) == User(1, "old")
    origin.let_on()
    until(lambda: users([1, 2]) == {1: User(1, "eu"), 2: User(2, "eu")})
    assert table.asked == [[1, 2]]


def test_who_waits_for_the_first_chunk_does_not_wait_for_the_second(cache: Cache) -> None:
    """A caller that waits for an id of the first chunk does not wait for the second chunk."""
    table, first, second = Table(), Origin(), Origin()
    users = table.loader(cache, "sync", chunk=1, lease=60)
    table.before = lambda: (first if table.asked[-1] == [1] else second)()
    batch = Herd(lambda: users([1, 2]))
    first.has_begun()
    single = Herd(lambda: users.one(1))
    until(lambda: any(flight.callers == 2 for flight in list(cache._core.flights._flights.values())))
    first.let_on()
    assert single.join() == [User(1, "eu")]
    second.let_on()
    assert batch.join() == [{1: User(1, "eu"), 2: User(2, "eu")}]
    assert table.asked == [[1], [2]]


def test_the_verbs_of_one_id(cache: Cache, colour: str) -> None:
    """Each verb does for an id what it does for the arguments of an ordinary function."""
    table = Table()
    users = table.loader(cache, colour, stale=60)
    assert had(users.peek(1)) is None
    had(users([1]))
    assert had(users.peek(1)).value == User(1, "eu")
    had(users.set(User(1, "set"), 1))
    assert had(users([1])) == {1: User(1, "set")}
    assert had(users.expire(1)) is True
    assert had(users.refresh(1)) == User(1, "eu")
    assert had(users.invalidate(1)) is True
    assert had(users.invalidate(1)) is False
    assert users.stats().computations == 2
    assert users.key(7) == "user:7:eu" == users.one.key(7)
    assert isinstance(users.cache, Cache)
    assert inspect.iscoroutinefunction(users) == (colour == "async") == inspect.iscoroutinefunction(users.one)
    assert had(users.__wrapped__([1])) == {1: User(1, "eu")}
    assert had(users.one.__wrapped__(1)) == User(1, "eu")


def test_the_verbs_of_many_ids(cache: Cache, colour: str) -> None:
    """`set_many` and `invalidate_many` change the values of many ids."""
    table = Table()
    users = table.loader(cache, colour)
    had(users.set_many({1: User(1, "set"), 2: User(2, "set")}, region="us"))
    assert had(users([1, 2], region="us")) == {1: User(1, "set"), 2: User(2, "set")}
    assert had(users.invalidate_many([1, 3], region="us")) == 1
    assert had(users([1, 2], region="us")) == {1: User(1, "us"), 2: User(2, "set")}
    assert table.asked == [[1]]


def test_all_of_them(cache: Cache, colour: str) -> None:
    """`invalidate_all` ends the values of all ids."""
    calls: list[Any] = []

    def load(ids: list[int]) -> dict[int, int]:
        calls.append(ids)
        return dict.fromkeys(ids, len(calls))

    async def aload(ids: list[int]) -> dict[int, int]:
        return load(ids)

    users: Any = cache.cached.many(load if colour == "sync" else aload)
    assert had(users([1, 2])) == {1: 1, 2: 1}
    had(users.invalidate_all())
    assert had(users([1, 2])) == {1: 2, 2: 2}
    assert users.key(1).endswith(":(1)")


@pytest.mark.parametrize("left_out", [False, True])
def test_a_herd_computes_each_id_once(cache: Cache, colour: str, left_out: bool) -> None:
    """Batches that overlap and single calls load each id once. If an id is absent, all callers are told."""
    origin = Origin()
    asked: list[int] = []

    def load(ids: list[int]) -> dict[int, int]:
        asked.extend(ids)
        origin()
        return {} if left_out else {id: id for id in ids}

    async def aload(ids: list[int]) -> dict[int, int]:
        asked.extend(ids)
        await origin.suspending()
        return {} if left_out else {id: id for id in ids}

    def one(id: int) -> Any:
        try:
            return had(users.one(id))
        except Absent:
            return "absent"

    users: Any = cache.cached.many(key="{ids}")(load if colour == "sync" else aload)
    first = Herd(lambda: had(users([1, 2, 3])))
    origin.has_begun()
    # In this order, each waits for the first batch before it loads ids of its own.
    others = Herd(*[lambda: had(users([1, 2]))] * 3, *[lambda: one(1)] * 3)
    until(lambda: sum(flight.callers for flight in list(cache._core.flights._flights.values())) >= 9)
    origin.let_on()
    there = {} if left_out else {1: 1, 2: 2}
    assert first.join() == [{} if left_out else {1: 1, 2: 2, 3: 3}]
    assert others.join() == [*[there] * 3, *["absent" if left_out else 1] * 3]
    if not left_out:
        assert sorted(asked) == [1, 2, 3]


def test_there_being_nothing_is_told_to_all_who_wait() -> None:
    """If an id does not exist, waiters in this process and in others are told. They do not load it again."""
    engine, asked = MemoryEngine(), []

    async def main() -> None:
        done = asyncio.Event()

        async def users(ids: list[int]) -> dict[int, int]:
            asked.append(ids)
            await done.wait()
            return {}

        here, there = (Cache(engine=engine).cached.many(key="{ids}")(users) for _ in range(2))
        first = asyncio.create_task(here([1]))
        while not asked:
            await asyncio.sleep(0)
        others = [asyncio.create_task(users.one(1)) for users in (here, there) for _ in range(3)]
        for _ in range(10):
            await asyncio.sleep(0)
        done.set()
        assert await first == {}
        for ended in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(ended, Absent)
            assert "has nothing for 1" in str(ended)

    asyncio.run(main())
    assert asked == [[1]]


def test_a_cancelled_batch(cache: Cache) -> None:
    """A cancelled batch gives back its leases at once, so that the next batch need not wait."""
    origin = Origin()

    @cache.cached.many(lease=60)
    async def users(ids: list[int]) -> dict[int, int]:
        await origin.suspending()
        return {id: id for id in ids}

    async def main() -> None:
        task = asyncio.create_task(users([1, 2]))
        await until_async(lambda: origin.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        origin.let_on()
        assert await asyncio.wait_for(users([2, 1]), PATIENCE) == {2: 2, 1: 1}

    asyncio.run(main())
    assert origin.calls == 2


def test_a_failure_of_all(cache: Cache, colour: str) -> None:
    """If the function fails, callers get its error, or the stale value if one is stored."""
    table = Table()
    users = table.loader(cache, colour, stale=60)
    had(users([1, 2]))
    had(users.expire(1))
    had(users.expire(2))

    def fail() -> None:
        raise ZeroDivisionError

    table.before = fail
    assert had(users([1, 2])) == {1: User(1, "eu"), 2: User(2, "eu")}
    with pytest.raises(ZeroDivisionError):
        had(users([3]))
    with pytest.raises(ZeroDivisionError):
        had(users.one(4))


def test_another_function_s_absent_is_an_error_like_any(cache: Cache, colour: str) -> None:
    """An Absent that another function raises is an error like any other. If a stale value is stored, it is served."""
    inner = Table().loader(cache, "sync", absent=60)

    def load(ids: list[int]) -> dict[int, User]:
        return {id: inner.one(id + 100) for id in ids}

    async def aload(ids: list[int]) -> dict[int, User]:
        return load(ids)

    users: Any = cache.cached.many(key="outer:{ids}", stale=60, absent=60)(load if colour == "sync" else aload)
    with pytest.raises(Absent, match="for 101"):
        had(users([1]))
    had(users.set(User(1, "kept"), 1))
    had(users.expire(1))
    assert had(users([1])) == {1: User(1, "kept")}
    assert had(users.one(1)) == User(1, "kept")


@pytest.mark.parametrize("wrong", [["row"], None, 5])
def test_what_is_no_mapping(cache: Cache, colour: str, wrong: Any) -> None:
    """A result that is no mapping raises a TypeError. Otherwise, all ids would count as missing."""

    def load(ids: list[int]) -> Any:
        return wrong

    async def aload(ids: list[int]) -> Any:
        return wrong

    users: Any = cache.cached.many(load if colour == "sync" else aload)
    for call in (lambda: users([1]), lambda: users.one(1)):
        with pytest.raises(TypeError, match="return a mapping"):
            had(call())


def test_ids_of_another_type_are_told(cache: Cache, colour: str, caplog: pytest.LogCaptureFixture) -> None:
    """If the ids in the result have another type than those that were asked for, the log says so."""

    def load(ids: list[int]) -> dict[str, int]:
        return {str(id): id for id in ids}

    async def aload(ids: list[int]) -> dict[str, int]:
        return load(ids)

    users: Any = cache.cached.many(load if colour == "sync" else aload)
    for call in (lambda: users([7, 8]), lambda: had(users.one(7))):
        caplog.clear()
        with suppress(Absent):
            assert had(call()) == {}
        assert "asked for 7, but returned a value for '7'" in caplog.text
    caplog.clear()
    everything: Any = cache.cached.many(key="{ids}")(lambda ids: {1: 1, 2: 2})
    assert everything([3]) == {}
    assert "asked for" not in caplog.text


def _takes(*ids: int) -> dict[int, int]:
    return {}


def _named(*, ids: list[int]) -> dict[int, int]:
    return {}


def _nothing() -> dict[int, int]:
    return {}


@pytest.mark.parametrize(
    "use, message",
    [
        (lambda: cached.many(_takes), "takes no list of ids"),
        (lambda: cached.many(_named), "takes no list of ids"),
        (lambda: cached.many(_nothing), "takes no list of ids"),
        (lambda: cached.many(ignore="ids")(lambda ids: {}), "takes no list of ids"),
        (lambda: cached.many(chunk=0), "chunk is 0"),
        (lambda: cached.many(chunk=True), "chunk is True"),
        (lambda: cached.many(chunk="5"), "chunk is '5'"),
        (lambda: cached.many(absent=-1), "absent is -1"),
        (lambda: cached.many(absent=True), "absent is True"),
        (lambda: cached.many(chnk=5), "chnk"),
        (lambda: cached.many(5), "put it on a def"),
        (lambda: cached.many(lambda ids: {})("ab"), "was given 'ab'"),
        (lambda: cached.many(lambda ids: {})(5), "was given 5"),
        (lambda: cached.many(lambda ids: {}).invalidate_many("ab"), "was given 'ab'"),
        (lambda: cached(chunk=5), "no option 'chunk'"),
    ],
)
def test_wrong_uses(use: Callable[[], object], message: str) -> None:
    """A wrong use of `cached.many` raises an OptionError that says what is wrong."""
    with pytest.raises(OptionError, match=message):
        use()


def test_wrong_calls() -> None:
    """A call with wrong arguments raises a TypeError, as a call of any function does."""
    users: Any = cached.many(lambda ids, region="eu": dict.fromkeys(ids, region))
    with pytest.raises(TypeError, match="ids"):
        users()
    with pytest.raises(TypeError, match="country"):
        users([1], country="de")
    with pytest.raises(TypeError):
        users([[1]])
    with pytest.raises(stampede.KeyingError, match="ids"):
        users([object()])
    assert users([1], "us") == {1: "us"}


class Repository:
    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[Any] = []

    def __stampede_key__(self) -> str:
        return self.name

    @cached.many(ttl=60)
    def users(self, ids: list[int], *, region: str = "eu") -> dict[int, str]:
        self.asked.append(ids)
        return {id: f"{self.name} {id} {region}" for id in ids if id < 100}

    @cached.many
    async def ausers(self, ids: list[int]) -> dict[int, str]:
        self.asked.append(ids)
        return {id: f"{self.name} {id}" for id in ids}

    @classmethod
    @cached.many
    def above(cls, ids: list[int]) -> dict[int, str]:
        return {id: f"{cls.__name__} {id}" for id in ids}

    @cached.many
    @classmethod
    def below(cls, ids: list[int]) -> dict[int, str]:
        return {id: f"{cls.__name__} {id}" for id in ids}

    @staticmethod
    @cached.many
    def static(ids: list[int]) -> dict[int, int]:
        return {id: id for id in ids}

    @cached.many
    @staticmethod
    def static_below(ids: list[int]) -> dict[int, int]:
        return {id: id for id in ids}


def test_methods() -> None:
    """The object of a method is part of each key. Calls and verbs are bound to it."""
    one, two = Repository("one"), Repository("two")
    assert one.users([1, 2]) == {1: "one 1 eu", 2: "one 2 eu"}
    assert two.users([1]) == {1: "two 1 eu"}
    assert one.users([2, 3], region="eu") == {2: "one 2 eu", 3: "one 3 eu"}
    assert one.users(ids=[2]) == {2: "one 2 eu"}
    assert one.users.one(3) == "one 3 eu"
    assert one.asked == [[1, 2], [3]]
    one.users.invalidate_many([1, 2])
    one.users.set_many({5: "set"})
    one.users.set("set, too", 6)
    assert one.users([1, 5, 6]) == {1: "one 1 eu", 5: "set", 6: "set, too"}
    assert two.users.peek(1) is not None
    assert one.users.peek(2) is None
    assert one.users.key(1) == Repository.users.key(one, 1) == Repository.users.one.key(one, 1)
    assert Repository.users(two, [1]) == {1: "two 1 eu"}
    assert two.asked == [[1]]
    with pytest.raises(Absent):
        one.users.one(101)
    assert one.users.__wrapped__([9]) == {9: "one 9 eu"}
    assert one.users == one.users != two.users
    one.users.invalidate_all()
    assert two.users.peek(1) is None
    assert isinstance(one.users.cache, Cache)


def test_async_methods() -> None:
    """Async methods work as sync methods do."""
    one = Repository("one")
    assert inspect.iscoroutinefunction(one.ausers)

    async def main() -> None:
        assert await one.ausers([1, 2]) == {1: "one 1", 2: "one 2"}
        assert await one.ausers.one(2) == "one 2"
        assert await one.ausers.invalidate_many([1]) == 1
        assert await one.ausers([1, 2]) == {1: "one 1", 2: "one 2"}

    asyncio.run(main())
    assert one.asked == [[1, 2], [1]]


def test_methods_of_classes() -> None:
    """`@cached.many` works above and below `@classmethod` and `@staticmethod`."""
    for function in (Repository.above, Repository("one").below, Repository.below):
        assert function([1]) == {1: "Repository 1"}
    assert Repository.below.one(1) == "Repository 1"
    for static in (Repository.static, Repository("one").static, Repository.static_below):
        assert static([1]) == {1: 1}
        assert static.one(1) == 1


def test_parameters_that_are_no_part_of_the_key() -> None:
    """An ignored parameter may come before the ids. It is passed on to the function, and verbs do not need it."""
    sessions: list[Any] = []

    @cached.many(ignore=["session"])
    def users(session: object, ids: list[int]) -> dict[int, int]:
        sessions.append(session)
        return {id: id for id in ids}

    session = object()
    assert users(session, [1, 2]) == {1: 1, 2: 2}
    assert users(object(), [1, 2]) == {1: 1, 2: 2}
    assert users.one(object(), 1) == 1
    assert sessions == [session]
    assert users.invalidate(1) is True
    assert users.invalidate_many([1, 2]) == 1
    users.set_many({5: 50})
    assert users(session, ids=[5]) == {5: 50}


def test_methods_of_objects_that_are_no_part_of_the_key() -> None:
    """With `ignore="self"`, the ids are still the first parameter after `self`."""

    class Service:
        @cached.many(ignore="self")
        def prices(self, ids: list[int], /) -> dict[int, int]:
            asked.append(ids)
            return {id: id for id in ids}

    asked: list[list[int]] = []
    one, two = Service(), Service()
    assert one.prices([1, 2]) == two.prices([1, 2]) == {1: 1, 2: 2}
    assert two.prices.invalidate(1) is True
    assert two.prices.invalidate_many([2]) == 1
    assert one.prices.one(2) == 2
    assert asked == [[1, 2], [2]]


def test_a_reload_of_many() -> None:
    """In a `refreshing()` block, one call of the function loads all ids of a batch."""
    with Cache() as cache:
        table = Table()
        users = table.loader(cache, "sync")
        users([1, 2])
        with stampede.refreshing():
            assert list(users([2, 1, 3])) == [2, 1, 3]
            users.one(1)
        assert table.asked == [[1, 2], [2, 1, 3]]


@cached.many
def table(ids: list[int]) -> dict[int, int]:
    """The rows."""
    return {id: id for id in ids}


def test_bound_ones_are_pickled() -> None:
    """`obj.users` and `obj.users.one` can be pickled, and keep their types."""
    one = Repository("one")
    for bound in (one.users, one.users.one):
        again = pickle.loads(pickle.dumps(bound))
        assert type(again) is type(bound)
        assert again.__self__.name == "one"


def test_what_it_looks_like() -> None:
    """A decorated function can be pickled, and keeps its docstring and its signature."""
    assert pickle.loads(pickle.dumps(table)) is table
    assert pickle.loads(pickle.dumps(table.one)) is table.one
    assert pickle.loads(pickle.dumps(cached)) is cached
    assert table.__doc__ == "The rows."
    assert str(inspect.signature(table)) == "(ids: 'list[int]') -> 'dict[int, int]'"
    assert table.key(1) == "test_many:table:(1)"


def test_ids_are_exact() -> None:
    """1 and "1" are different ids."""
    users: Any = cached.many(lambda ids: {id: repr(id) for id in ids})
    assert users([1, "1", (1,), None]) == {1: "1", "1": "'1'", (1,): "(1,)", None: "None"}
    assert users.one(True) == "True"


def test_values_are_of_the_annotated_type(tmp_path: Path, colour: str) -> None:
    """If a codec decodes to the annotated type, the values have this type."""
    pytest.importorskip("msgspec")
    for codec in ("msgpack", "json"):
        with Cache(f"disk://{tmp_path}/{codec}", codec=codec, strict=True) as cache:
            table = Table()
            users = table.loader(cache, colour)
            had(users([1]))
            assert had(users([1])) == {1: User(1, "eu")}
            assert table.asked == [[1]]


def test_hits_are_at_hand() -> None:
    """Values in memory are hits and need no claim."""
    with Cache() as cache:
        users = Table().loader(cache, "sync")
        users([1, 2])
        before = users.stats()
        users([1, 2])
        users.one(1)
        assert users.stats().hits == before.hits + 3


def test_a_mapping_that_is_no_dict() -> None:
    """The function may return any mapping. Only ids that the mapping contains have values."""

    class Rows(Mapping[int, int]):
        def __getitem__(self, id: int) -> int:
            return id

        def __iter__(self) -> Iterator[int]:
            return iter([1])

        def __len__(self) -> int:
            return 1

        def __contains__(self, id: object) -> bool:
            return id == 1

    assert cached.many(lambda ids: Rows())([1, 2]) == {1: 1}


@pytest.mark.parametrize("chunk", [None, 2])
def test_the_list_is_the_function_s_own(cache: Cache, colour: str, chunk: int | None) -> None:
    """The function gets its own list of ids, and may change it."""

    def users(ids: list[int]) -> dict[int, int]:
        found = {}
        while ids:
            id = ids.pop()
            found[id] = id
        return found

    async def ausers(ids: list[int]) -> dict[int, int]:
        return users(ids)

    f = cache.cached.many(chunk=chunk)(users if colour == "sync" else ausers)
    assert had(f([1, 2, 3])) == {1: 1, 2: 2, 3: 3}
    assert had(f([2, 3, 4])) == {2: 2, 3: 3, 4: 4}
    assert had(f.one(5)) == 5
    with stampede.bypassed():
        assert had(f([1, 2, 3])) == {1: 1, 2: 2, 3: 3}
    f2: Any = cache.get_or_compute_many
    assert f2(["a", "b"], lambda keys: {keys.pop(): 1 for _ in range(2)}) == {"a": 1, "b": 1}


def test_ids_of_one_key(cache: Cache, colour: str) -> None:
    """If `key=` makes the same key of two ids, both are in the result."""
    table = Table()
    users = table.loader(cache, colour)
    assert list(had(users(["1", 2, 1]))) == ["1", 2, 1]
    assert len(table.asked[0]) == 2
    assert had(users(["1", 1]))["1"] == had(users([1]))[1]
