"""`@cached` as users see it: sync and async functions, the verbs, the options, and failures."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import functools
import gc
import inspect
import pickle
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from herd import Herd, Origin, had, until, until_async
from servers import shared_redis

from stampede import Cache, Entry, KeyingError, RecursiveComputation, WaitTimeout, cached, configure
from stampede.testing import disabled, isolated


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated():
        yield


def _colours(compute: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return the function as a `def` and as an `async def`."""

    async def suspending(*args: Any, **kwargs: Any) -> Any:
        return compute(*args, **kwargs)

    functools.update_wrapper(suspending, compute)
    suspending.__wrapped__ = compute  # type: ignore[attr-defined]
    return {"sync": compute, "async": suspending}


both = pytest.mark.parametrize("colour", ["sync", "async"])


def counting(colour: str) -> tuple[Any, list[Any]]:
    """Return a function of (x, y=2) that is not decorated yet, and a list of the arguments of its computations."""
    calls: list[Any] = []

    def compute(x: Any, y: Any = 2) -> Any:
        calls.append((x, y))
        return x, y, len(calls)

    return _colours(compute)[colour], calls


@cached
def at_the_top(x: int, *, y: int = 2) -> tuple[int, int]:
    """Its docstring."""
    return x, y


@cached(ttl=60)
async def at_the_top_async(x: int) -> int:
    """Its docstring."""
    return x


# -- a decorated function still looks like the original ---------------------------------------------------------------


def test_a_decorated_function_is_still_that_function() -> None:
    """A decorated function keeps its name, signature, docstring and colour, which frameworks such as FastAPI read."""
    assert inspect.isfunction(at_the_top)
    assert str(inspect.signature(at_the_top)) == "(x: 'int', *, y: 'int' = 2) -> 'tuple[int, int]'"
    assert (at_the_top.__name__, at_the_top.__qualname__, at_the_top.__module__) == ("at_the_top",) * 2 + (__name__,)
    assert at_the_top.__doc__ == "Its docstring."
    assert at_the_top.__wrapped__(1) == (1, 2)
    assert at_the_top.__annotations__["x"] == "int"
    assert not inspect.iscoroutinefunction(at_the_top)


def test_a_decorated_coroutine_function_is_still_one() -> None:
    """A decorated coroutine function is still one. Otherwise, frameworks would return its coroutines as values."""
    assert inspect.iscoroutinefunction(at_the_top_async)
    assert asyncio.iscoroutinefunction(at_the_top_async)
    assert inspect.isfunction(at_the_top_async)
    assert at_the_top_async.__doc__ == "Its docstring."


def test_a_decorated_function_can_be_pickled() -> None:
    """A decorated function can be pickled. Process pools and task queues send functions by their name."""
    assert pickle.loads(pickle.dumps(at_the_top)) is at_the_top
    assert pickle.loads(pickle.dumps(at_the_top_async)) is at_the_top_async


def test_bare_and_called(colour: str) -> None:
    """`@cached`, `@cached()` and `@cached(ttl=60)` all work."""
    for decorate in (cached, cached(), cached(ttl=60)):
        with isolated():
            function, calls = counting(colour)
            decorated = decorate(function)
            assert had(decorated(1)) == had(decorated(1)) == (1, 2, 1)
            assert calls == [(1, 2)]


def test_keywords_and_defaults_are_one_key() -> None:
    """Positional arguments, keywords and defaults give the same key, so the value is computed once."""
    function, calls = counting("sync")
    f = cached(function)
    assert f(1) == f(x=1) == f(1, 2) == f(y=2, x=1) == (1, 2, 1)
    assert f(1, 3) == (1, 3, 2)
    assert len(calls) == 2


def test_wrong_arguments_are_python_s_own_error() -> None:
    """Wrong arguments raise a TypeError, as without the decorator."""
    f = cached(counting("sync")[0])
    for wrong in (lambda: f(), lambda: f(1, 2, 3), lambda: f(1, z=3), lambda: f(1, x=1)):
        with pytest.raises(TypeError):
            wrong()
    assert f(1) == (1, 2, 1)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, NotImplemented, Ellipsis])
def test_every_value_is_one(colour: str, value: Any) -> None:
    """Each value is stored, even None. Other libraries take None for a missing value and compute it at each call."""
    calls: list[int] = []

    def compute() -> Any:
        calls.append(1)
        return value

    f = cached(strict=False)(_colours(compute)[colour])
    assert had(f()) is value
    assert had(f()) is value
    assert len(calls) == 1
    assert had(f.peek()).value is value


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


ALIKE: list[Any] = [1, True, 1.0, "1", b"1", Number.ONE, None, (1,), (True,), (1.0,), 0, -0.0, 0.0, False, "", b""]


def test_keys_are_exact_also_for_hits(colour: str) -> None:
    """Arguments that are equal but differ in type, such as 1, True and 1.0, have different keys, also for hits."""
    f = cached(strict=False)(_colours(lambda x: (type(x), repr(x)))[colour])
    for _ in range(3):  # the first computes, the second may fill the fast table, the third hits it
        for x in ALIKE:
            assert had(f(x)) == (type(x), repr(x)), x
        for x in reversed(ALIKE):
            assert had(f(x)) == (type(x), repr(x)), x


def test_subclasses_of_str_and_int_are_told_apart_from_what_they_equal() -> None:
    """Instances of subclasses of str and int are not taken for the plain values that they equal."""
    f = cached(strict=False)(lambda x: type(x))
    for _ in range(3):
        for x in ("1", 1, Number.ONE):
            assert f(x) is type(x)
    for x in (Text("1"), Whole(1)):
        try:
            assert f(x) is type(x)
        except KeyingError:
            pass  # refused, as no stable identity is known; this is exact, too


class Hostile:
    """An object that equals everything and defines its own hash."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __stampede_key__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(1)


class Explosive(Hostile):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")


@pytest.mark.parametrize("kind", [Hostile, Explosive])
def test_arguments_with_hostile_equality(kind: type[Hostile]) -> None:
    """An argument's own `__eq__` or `__hash__` never decides which value is served, and does not break the call."""
    f = cached(lambda x: getattr(x, "name", x))
    for _ in range(3):
        assert f(1) == 1
        assert f(kind("a")) == "a"
        assert f(kind("b")) == "b"
        assert f("a") == "a"


def test_unhashable_arguments() -> None:
    """The key of a list or dict is its content. The order of the items of a dict does not matter."""
    f = cached(lambda x: repr(x))
    assert f([1, 2]) == f([1, 2]) == "[1, 2]"
    assert f([2, 1]) == "[2, 1]"
    assert f({"a": 1, "b": 2}) == f({"b": 2, "a": 1})
    assert f.stats().computations == 3


def test_values_are_the_very_objects() -> None:
    """Hits return the same object, as lru_cache does. A copy for each hit would cost more than the hit."""
    f = cached(lambda: [1])
    assert f() is f()


@pytest.mark.parametrize("make", [lambda: iter([1]), lambda: (x for x in [1]), lambda: map(str, [1]), lambda: zip()])
def test_iterators_are_refused_as_values(colour: str, make: Callable[[], Any]) -> None:
    """An iterator is refused as a value: the first caller would use it up."""
    f = cached(_colours(make)[colour])
    for _ in range(2):
        with pytest.raises(TypeError, match="iterator"):
            had(f())
    assert had(f.peek()) is None


def test_iterators_are_refused_by_set_too() -> None:
    """`set` refuses an iterator as a value."""
    f = cached(lambda: 1)
    with pytest.raises(TypeError, match="iterator"):
        f.set(iter([1]))
    with pytest.raises(TypeError, match="iterator"):
        Cache().set("k", iter([1]))
    assert f() == 1


def test_an_async_iterator_is_refused_as_a_value() -> None:
    """An async iterator is refused as a value: it can be used only once."""

    async def numbers() -> Any:
        yield 1

    f = cached(lambda: numbers())
    with pytest.raises(TypeError, match="iterator"):
        f()


def test_an_awaitable_from_a_plain_function_is_refused() -> None:
    """A coroutine that a plain function returns is refused as a value: a second caller could not await it again."""

    async def value() -> int:
        return 1

    f = cached(lambda: value())
    for _ in range(2):  # if the first call did not give its lease back, the second would hang
        started = time.monotonic()
        with pytest.raises(TypeError, match="awaitable"):
            f()
        assert time.monotonic() - started < 5
    assert f.peek() is None


def test_an_awaitable_from_a_coroutine_function_is_awaited() -> None:
    """An awaitable that a coroutine function returns is refused: a value that must be awaited is never stored."""

    async def inner() -> int:
        return 1

    @cached
    async def f() -> Any:
        return inner()

    with pytest.raises(TypeError, match="awaitable"):
        asyncio.run(f())


# -- the verbs --------------------------------------------------------------------------------------------------------


def test_verbs(colour: str) -> None:
    """Each verb does what its name says. The verbs of an async function are async."""
    function, calls = counting(colour)
    f = cached(ttl=60, stale=60)(function)
    assert had(f.peek(1)) is None
    assert calls == []
    assert had(f(1)) == (1, 2, 1)
    entry = had(f.peek(1))
    assert isinstance(entry, Entry)
    assert entry.value == (1, 2, 1)
    assert 30 < entry.fresh <= 60
    assert entry.keep - entry.fresh == pytest.approx(60)
    assert had(f.refresh(1)) == (1, 2, 2)
    assert had(f(1)) == (1, 2, 2)
    assert had(f.set("mine", 1)) is None
    assert had(f(1)) == "mine"
    assert had(f.expire(1)) is True
    assert had(f.expire(1)) is False
    assert had(f.peek(1)).fresh <= 0
    assert had(f(1)) == (1, 2, 3)
    assert had(f.invalidate(1)) is True
    assert had(f.invalidate(1)) is False
    assert had(f.peek(1)) is None
    assert had(f.many([(1,), (2, 3), (1,)])) == [(1, 2, 4), (2, 3, 5), (1, 2, 4)]
    assert had(f.invalidate_all()) is None
    assert had(f.peek(1)) is None
    assert had(f.peek(2, 3)) is None
    stats = f.stats()
    assert stats.computations == len(calls) == 5
    assert f.key(1) == f.key(x=1, y=2)
    assert f.key(1).endswith(":" + f.__qualname__ + "(1)") or "(1" in f.key(1)
    assert isinstance(f.cache, Cache)


def test_the_verbs_of_a_hit_that_is_in_the_fast_table(colour: str) -> None:
    """Each way to end a value removes it from the generated table, too. Otherwise, hits would still serve it."""
    f = cached(stale=10)(counting(colour)[0])
    for number, void in enumerate(
        [
            lambda: f.invalidate(1),
            lambda: f.expire(1),
            lambda: f.invalidate_all(),
            lambda: f.refresh(1),
            lambda: f.cache.clear(),
            lambda: configure(ttl=5),
        ],
        start=1,
    ):
        for _ in range(3):
            assert had(f(1)) == (1, 2, number)
        had(void())
    assert had(f(1)) == (1, 2, 7)


def test_set_replaces_a_hit(colour: str) -> None:
    """`set` replaces the value in the generated table, too."""
    f = cached(counting(colour)[0])
    for _ in range(3):
        had(f(1))
    had(f.set("new", 1))
    assert [had(f(1)) for _ in range(3)] == ["new"] * 3


def test_eviction_leaves_the_fast_table() -> None:
    """A value that the engine has evicted does not remain in the generated table."""
    cache = Cache("memory://?entries=10")

    class Big:
        pass

    f = cached(cache=cache)(lambda n: Big())
    values = [weakref.ref(f(n)) for n in range(200) if f(n)]
    gc.collect()
    assert sum(value() is not None for value in values) <= 11  # the last one is also in the last event, for a moment
    assert f.stats().computations == 200


def test_invalidate_via_a_hook() -> None:
    """With `via`, the value is invalidated when the hook runs, for example after a commit, and not earlier."""
    f = cached(counting("sync")[0])
    hooks: list[Callable[[], object]] = []
    assert f(1) == (1, 2, 1)
    assert f.invalidate(1, via=hooks.append) is None
    assert f(1) == (1, 2, 1)
    hooks.pop()()
    assert f(1) == (1, 2, 2)


def test_invalidate_via_a_hook_in_a_loop() -> None:
    """The hook of an async function is a plain callable, because databases accept no other."""
    f = cached(counting("async")[0])
    hooks: list[Callable[[], Any]] = []

    async def main() -> None:
        assert await f(1) == (1, 2, 1)
        await f.invalidate(1, via=hooks.append)
        assert await f(1) == (1, 2, 1)
        await hooks.pop()()
        assert await f(1) == (1, 2, 2)

    asyncio.run(main())


@pytest.mark.redis
def test_invalidate_via_a_hook_stops_no_loop(before: Callable[[Any], Any]) -> None:
    """In an event loop, the hook returns at once even if the server hangs. Otherwise, it would block all requests."""
    proxy = before(shared_redis())
    hooks: list[Callable[[], Any]] = []

    async def main() -> None:
        with Cache(f"{proxy.url}?socket_timeout=20", namespace=str(time.monotonic_ns())) as cache:
            f = cache.cached(counting("async")[0])
            assert await f(1) == (1, 2, 1)
            await f.invalidate(1, via=hooks.append)
            proxy.hold()
            invalidation = hooks.pop()()  # returns although the server does not reply
            await asyncio.sleep(0)
            assert not invalidation.done()
            proxy.let_go()
            await invalidation
            assert await f(1) == (1, 2, 2)

    asyncio.run(main())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_invalidate_via_a_hook_where_the_engine_is_down(colour: str, caplog: pytest.LogCaptureFixture) -> None:
    """If the engine is down, the hook raises no error, because the commit is already done. The log names the keys."""
    hooks: list[Callable[[], Any]] = []

    async def main() -> None:
        for number in (1, 2):
            given = f.invalidate(number, via=hooks.append)
            if colour == "async":
                await given
        done = [run() for run in hooks]
        if colour == "async":
            await asyncio.gather(*done)
            hooks[0]().cancel()  # as a loop does when it ends
            await asyncio.sleep(0)

    with Cache("redis://127.0.0.1:1") as cache:
        f = cache.cached(key="user:{x}")(counting(colour)[0])
        asyncio.run(main())
    told = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    keys = [key for each in told for key in ("user:1", "user:2") if f"'{key}' was not invalidated" in each]
    assert sorted(keys) == ["user:1", "user:2"] if colour == "sync" else ["user:1", "user:1", "user:2"]


def test_a_parameter_called_via_is_the_function_s_own() -> None:
    """A function may have a parameter called `via`."""
    f = cached(lambda via: via)
    assert f("mail") == "mail"
    assert f.invalidate(via="mail") is True


def test_parameters_called_as_ours_are() -> None:
    """A function may have parameters with the names that the generated code and the verbs use."""

    def compute(self, slow_, fast_, now_, e_, type_, value, key, args, kwargs, fn, _):  # type: ignore[no-untyped-def]
        return [self, slow_, fast_, now_, e_, type_, value, key, args, kwargs, fn, _]

    f = cached(compute)
    for _ in range(3):
        assert f(*range(12)) == list(range(12))
    named = dict(zip(inspect.signature(compute).parameters, range(12), strict=True))
    assert f(**named) == list(range(12))
    assert f.invalidate(*range(12)) is True


def test_star_arguments() -> None:
    """A function with `*args` or `**kwargs` has no generated table. Its keys are exact, too."""
    f = cached(lambda *args, **kwargs: (args, kwargs))
    for _ in range(2):
        assert f(1, 2, a=3, b=4) == ((1, 2), {"a": 3, "b": 4})
        assert f(1, 2, b=4, a=3) == ((1, 2), {"a": 3, "b": 4})
        assert f(True, 2) == ((True, 2), {})
        assert f(1, 2) == ((1, 2), {})
        assert f((1, 2)) == (((1, 2),), {})
    assert f.stats().computations == 4


def test_many_computes_only_what_is_missing() -> None:
    """`many` computes only the values that are not stored."""
    function, calls = counting("sync")
    f = cached(function)
    f(2)
    assert [value[0] for value in f.many([(1,), (2,), [3]])] == [1, 2, 3]
    assert calls == [(2, 2), (1, 2), (3, 2)]
    assert f.many([]) == []


# -- keys -------------------------------------------------------------------------------------------------------------


def test_key_options() -> None:
    """Keys may be made by a format or a function, ignore parameters, and contain a version and a namespace."""
    by_format = cached(key="user:{x}")(counting("sync")[0])
    assert by_format.key(1) == "user:1"
    assert by_format(1, 1) == by_format(1, 5)
    by_function = cached(key=lambda x, y=2: f"{x + y}")(counting("sync")[0])
    assert by_function(1, 4) == by_function(2, 3)
    without = cached(ignore="y")(counting("sync")[0])
    assert without(1, 1) == without(1, 5)
    assert without(1, 1) == without(1, 5)
    first, second = cached(version=1)(at_the_top.__wrapped__), cached(version=2)(at_the_top.__wrapped__)
    assert len({first.key(1), second.key(1), at_the_top.key(1)}) == 3
    assert cached(namespace="shop")(at_the_top.__wrapped__).key(1).startswith("shop/")


def test_verbs_ask_for_nothing_that_is_no_part_of_the_key(colour: str) -> None:
    """Verbs that need only the key take no arguments that are not part of it, such as a session."""

    def user(session: object, id: int, *, deep: bool = False) -> str:
        return f"{id} {deep}"

    f = cached(ignore="session", strict=False)(_colours(user)[colour])
    assert had(f(object(), 1, deep=True)) == "1 True" == had(f.peek(1, deep=True)).value
    assert f.key(1, deep=True) == f.key(id=1, deep=True) != f.key(1)
    assert had(f.invalidate(1, deep=True)) and had(f.peek(1, deep=True)) is None
    had(f.set("mine", 1))
    assert had(f(object(), 1)) == "mine"
    assert had(f.expire(1))
    assert had(f.refresh(object(), 1)) == "1 False" == had(f.many([(object(), 1)]))[0]
    with pytest.raises(TypeError, match="too many positional arguments"):
        f.key(object(), 1)
    by_format = cached(key="user:{id}")(_colours(user)[colour])
    assert had(by_format(None, 7)) == "7 False"
    assert by_format.key(7) == by_format.key(id=7) == "user:7"
    assert had(by_format.invalidate(7))

    class Shop:
        @cached(ignore={"self", "session"})
        def price(self, session: object, x: int) -> int:
            return x

    assert Shop().price(object(), 1) == 1
    assert Shop().price.invalidate(1)
    assert not Shop().price.invalidate(1)


def test_a_key_function_may_look_around() -> None:
    """A key function may read a context variable. A hit must not ignore it and serve another tenant's value."""
    tenant = contextvars.ContextVar("tenant", default="a")
    f = cached(key=lambda x: f"{tenant.get()}:{x}")(lambda x: (tenant.get(), x))
    for name in ("a", "b", "a", "b"):
        tenant.set(name)
        assert f(1) == (name, 1)


# -- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ttl, seconds", [(60, 60.0), (60.5, 60.5), (timedelta(minutes=2), 120.0), ("1h30m", 5400.0), (None, float("inf"))]
)
def test_ttl(ttl: Any, seconds: float) -> None:
    """`ttl` may be seconds, a timedelta, a text or None. It is stored with the entry."""
    f = cached(ttl=ttl)(lambda: 1)
    f()
    assert f.peek().ttl == seconds


def test_ttl_as_a_function_of_the_value() -> None:
    """`ttl` may be a function of the value, for example for a token that says when it expires."""
    f = cached(ttl=lambda value: value)(lambda x: x)
    assert f.many([(60,), (5,), (0,)]) == [60, 5, 0]
    assert (f.peek(60).ttl, f.peek(5).ttl) == (60, 5)
    assert f.peek(0) is None


def test_ttl_0_keeps_nothing(colour: str) -> None:
    """With `ttl=0`, no value is stored, and the next call computes."""
    f = cached(ttl=0)(counting(colour)[0])
    assert [had(f(1))[2] for _ in range(3)] == [1, 2, 3]
    assert had(f.peek(1)) is None


def test_ttl_0_coalesces() -> None:
    """With `ttl=0`, callers that come during a computation share its value."""
    origin = Origin()
    f = cached(ttl=0)(lambda: origin())
    leader = Herd(f)
    origin.has_begun()
    followers = Herd(*[f] * 8)
    until(lambda: _callers(f) == 9)
    origin.let_on()
    assert leader.join() + followers.join() == [1] * 9
    assert origin.calls == 1


def _callers(f: Any) -> int:
    """Return the number of callers in the flights of the function's cache."""
    flights = f.cache._core.flights._flights
    return sum(flight.callers for flight in list(flights.values()))


def test_a_value_ends() -> None:
    """After its ttl, a value is computed again, even if the generated table still holds it."""
    f = cached(ttl=0.05, early=0)(counting("sync")[0])
    assert f(1)[2] == 1
    until(lambda: f(1)[2] == 2)


def test_stale_is_served_while_somebody_computes(colour: str) -> None:
    """With `stale`, one caller computes an expired value. The others get the old value at once."""
    origin = Origin(open=True)
    f = cached(ttl=60, stale=60)(_named(origin, colour))
    assert had(f()) == 1
    origin.has_begun()
    had(f.expire())
    origin.hold()
    leader = Herd(lambda: had(f()))
    origin.has_begun()
    assert [had(f()) for _ in range(3)] == [1, 1, 1]
    origin.let_on()
    assert leader.join() == [2]
    assert had(f()) == 2
    assert f.stats().served == {"computing": 3}


def _named(origin: Origin, colour: str) -> Any:
    """Return the origin as a named function."""

    def compute() -> int:
        return origin()

    async def suspending() -> int:
        return await origin.suspending()

    return compute if colour == "sync" else suspending


def test_stale_is_served_when_the_computation_fails(colour: str) -> None:
    """If the computation fails, the stale value is served. Until `retry_after` ends, the function is not called."""
    answers: list[Any] = [1, ValueError("down"), 3]
    calls: list[int] = []

    def compute() -> Any:
        calls.append(1)
        answer = answers[len(calls) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    f = cached(ttl=60, stale=60, retry_after=60)(_colours(compute)[colour])
    assert had(f()) == 1
    had(f.expire())
    assert [had(f()) for _ in range(3)] == [1, 1, 1]
    assert len(calls) == 2
    assert f.stats().served == {"failed": 1, "resting": 2}
    assert had(f.refresh()) == 3


def test_retry_after_without_a_value() -> None:
    """After a failure, callers get an error at once until `retry_after` ends. The function is not called."""
    from stampede import ComputationFailed

    calls: list[int] = []

    @cached(retry_after=60)
    def f() -> None:
        calls.append(1)
        raise ValueError("down")

    with pytest.raises(ValueError, match="down"):
        f()
    with pytest.raises(ComputationFailed, match=r"ValueError: down"):
        f()
    assert len(calls) == 1


@both
def test_background_refreshes_block_nobody(colour: str) -> None:
    """With `background=True`, the caller that finds a stale value gets it at once, too."""
    origin = Origin(open=True)
    f = cached(ttl=60, stale=60, background=True)(_named(origin, colour))

    async def main() -> None:
        assert await f() == 1
        await f.expire()
        origin.hold()
        assert [await f() for _ in range(5)] == [1] * 5
        origin.let_on()
        await until_async(lambda: origin.calls == 2)
        while await f() != 2:
            await asyncio.sleep(0.001)

    if colour == "async":
        asyncio.run(main())
    else:
        assert f() == 1
        f.expire()
        origin.hold()
        assert [f() for _ in range(5)] == [1] * 5
        origin.let_on()
        until(lambda: f() == 2)
    assert origin.calls == 2


def test_wait_runs_out() -> None:
    """With `wait`, a caller gets an error when this time has passed. The computation continues."""
    origin = Origin()
    f = cached(wait=0.05)(_named(origin, "sync"))
    leader = Herd(f)
    origin.has_begun()
    with pytest.raises(WaitTimeout, match="another caller has been computing"):
        f()
    origin.let_on()
    assert leader.join() == [1]
    assert f() == 1


def test_wait_runs_out_in_a_loop() -> None:
    """With `wait`, an async caller gets an error when this time has passed. The computation continues."""
    origin = Origin()
    f = cached(wait=0.05)(_named(origin, "async"))

    async def main() -> None:
        leader = asyncio.create_task(f())
        await until_async(lambda: origin.calls)
        with pytest.raises(WaitTimeout):
            await f()
        origin.let_on()
        assert await leader == 1

    asyncio.run(main())


def test_jitter_takes_off() -> None:
    """`jitter` makes the ttl of each key shorter by a random amount, so that keys do not expire together."""
    f = cached(ttl=100, jitter=0.5)(lambda x: x)
    f.many([(n,) for n in range(50)])
    ends = {f.peek(n).ttl for n in range(50)}
    assert len(ends) == 50
    assert all(50 <= end <= 100 for end in ends)


def test_cache_if(colour: str) -> None:
    """A value that `cache_if` refuses is returned and not stored."""
    answers = iter([None, None, "there"])
    f = cached(cache_if=lambda value: value is not None)(_colours(lambda: next(answers))[colour])
    assert [had(f()) for _ in range(4)] == [None, None, "there", "there"]
    assert f.stats().unkept == 2


# -- errors -----------------------------------------------------------------------------------------------------------


class NotFound(LookupError):
    def __init__(self, kind: str, number: int) -> None:
        super().__init__(kind, number)
        self.number = number


class Gone(NotFound):
    pass


def test_an_error_reaches_the_caller_and_nothing_is_kept(colour: str) -> None:
    """An error reaches the caller and is not stored. The next call computes again."""
    answers: list[Any] = [ValueError("once"), 2]

    def compute() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    f = cached(_colours(compute)[colour])
    with pytest.raises(ValueError, match="once") as caught:
        had(f())
    assert any(frame.name == "compute" for frame in caught.traceback)  # the traceback shows the original function
    assert had(f()) == 2


def test_errors_that_are_answers(colour: str) -> None:
    """An error that `raises` names is stored. Each call raises a new object of its class, with its arguments."""
    calls: list[int] = []

    def compute(kind: type[NotFound]) -> None:
        calls.append(1)
        raise kind("customer", 42)

    f = cached(raises=LookupError, key=lambda kind: kind.__name__)(_colours(compute)[colour])
    seen: list[BaseException] = []
    for kind in (NotFound, Gone, NotFound, Gone, NotFound):
        with pytest.raises(kind) as caught:
            had(f(kind))
        assert type(caught.value) is kind
        assert caught.value.args == ("customer", 42)
        assert caught.value.number == 42
        seen.append(caught.value)
    assert len(calls) == 2
    assert len({id(error) for error in seen}) == 5  # a shared object would collect the tracebacks of all callers


def test_followers_get_copies_of_the_error() -> None:
    """Each follower gets its own copy of an error. One shared object would collect the tracebacks of all threads."""
    origin = Origin()

    class Broken(Exception):
        def __init__(self, code: int, *, hint: str) -> None:
            super().__init__(f"code {code}")
            self.code, self.hint = code, hint

    @cached
    def f() -> None:
        origin()
        raise Broken(5, hint="restart")

    leader = Herd(f)
    origin.has_begun()
    followers = Herd(*[f] * 6)
    until(lambda: _callers(f) == 7)
    origin.let_on()
    errors = leader.join() + followers.join()
    assert origin.calls == 1
    assert {(type(e), str(e), e.code, e.hint) for e in errors} == {(Broken, "code 5", 5, "restart")}
    assert len({id(e) for e in errors}) == 7


@pytest.mark.parametrize("kind", [StopIteration, GeneratorExit, KeyboardInterrupt, SystemExit, StopAsyncIteration])
def test_odd_exceptions_of_a_plain_function(kind: type[BaseException]) -> None:
    """StopIteration, GeneratorExit and similar errors of a plain function reach the caller. No key remains locked."""
    answers: list[Any] = [kind("odd"), 2]

    @cached
    def f() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    with pytest.raises(kind) as caught:
        f()
    assert caught.value.args == ("odd",)
    started = time.monotonic()
    assert f() == 2
    assert time.monotonic() - started < 5  # nothing stayed locked
    assert _callers(f) == 0


@pytest.mark.parametrize("kind", [StopAsyncIteration, GeneratorExit, asyncio.CancelledError])
def test_odd_exceptions_of_a_coroutine_function(kind: type[BaseException]) -> None:
    """StopAsyncIteration, GeneratorExit and CancelledError of an async function reach the caller."""
    answers: list[Any] = [kind("odd"), 2]

    @cached
    async def f() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def main() -> None:
        with pytest.raises(kind):
            await f()
        assert await asyncio.wait_for(f(), 5) == 2

    asyncio.run(main())
    assert _callers(f) == 0


def test_an_interrupted_leader_is_followed_by_another() -> None:
    """If the leader gets a KeyboardInterrupt, one of its followers computes for the others."""
    origin = Origin()
    calls: list[int] = []

    @cached
    def f() -> int:
        calls.append(1)
        if len(calls) == 1:
            origin()
            raise KeyboardInterrupt
        return len(calls)

    leader = Herd(f)
    origin.has_begun()
    followers = Herd(*[f] * 4)
    until(lambda: _callers(f) == 5)
    origin.let_on()
    (interrupted,) = leader.join()
    assert isinstance(interrupted, KeyboardInterrupt)
    assert followers.join() == [2] * 4


@both
def test_recursion_is_an_error(colour: str) -> None:
    """A computation that asks for its own key is refused: it would wait for itself."""

    @cached
    def f(x: int) -> int:
        return int(f(x))

    @cached
    async def af(x: int) -> int:
        return int(await af(x))

    with pytest.raises(RecursiveComputation, match="its own key"):
        had((f if colour == "sync" else af)(1))


def test_recursion_is_an_error_where_something_is_kept() -> None:
    """A computation that asks for its own key is refused even if a stale value could be served."""
    cache, met = Cache(), []

    def origin() -> int:
        with pytest.raises(RecursiveComputation) as caught:
            cache.get_or_compute("k", lambda: 2)
        met.append(caught.value)
        return 3

    cache.get_or_compute("k", lambda: 1, stale=600)
    cache.expire("k")
    assert cache.get_or_compute("k", origin) == 3
    assert len(met) == 1


def test_recursion_through_another_function() -> None:
    """Recursion through another function is refused, too."""

    @cached
    def f(x: int) -> int:
        return int(g(x))

    @cached
    def g(x: int) -> int:
        return int(f(x))

    with pytest.raises(RecursiveComputation):
        f(1)
    with pytest.raises(RecursiveComputation):
        g(1)


def test_recursion_with_other_arguments() -> None:
    """A recursive function may call itself with other arguments."""

    @cached
    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)  # type: ignore[no-any-return]

    assert fib(60) == 1548008755920
    assert fib.stats().computations == 61


def test_recursion_takes_few_frames() -> None:
    """Each level of recursion adds few frames. Otherwise, deep recursive functions would exceed Python's limit."""
    frames: list[int] = []

    @cached(ttl=None)
    def depth(n: int) -> int:
        frames.append(len(inspect.stack(0)))
        return 0 if n == 0 else 1 + depth(n - 1)

    assert depth(2) == 2
    assert frames[2] - frames[1] <= 10


def test_recursion_that_is_too_deep_leaves_nothing_behind() -> None:
    """If Python's stack ends anywhere in the library's code, no key remains locked longer than its lease."""

    @cached(lease=1, max_hold=1)
    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)  # type: ignore[no-any-return]

    def deeper(frames: int) -> None:
        if frames:
            deeper(frames - 1)
        else:
            fib(5000)

    started = time.monotonic()
    for frames in range(20):  # extra frames, so that the stack ends at different places in the library
        with pytest.raises(RecursionError):
            deeper(frames)
    for n in range(0, 5000, 20):
        assert fib(n) >= 0
    assert time.monotonic() - started < 30


def test_context_variables_go_both_ways() -> None:
    """A computation sees the context variables of its caller, and the caller sees those that it sets."""
    user = contextvars.ContextVar("user", default="nobody")
    seen = contextvars.ContextVar("seen", default=0)

    @cached
    def f(x: int) -> str:
        seen.set(x)
        return user.get()

    user.set("ann")
    assert f(7) == "ann"
    assert seen.get() == 7


def test_context_variables_of_a_task() -> None:
    """An async computation sees the context variables of its caller."""
    user = contextvars.ContextVar("user", default="nobody")

    @cached
    async def f() -> str:
        return user.get()

    async def main() -> None:
        user.set("ann")
        assert await f() == "ann"

    asyncio.run(main())


# -- loops ------------------------------------------------------------------------------------------------------------


def test_one_loop_after_the_other() -> None:
    """A cached function can be called in one loop after another, as with one loop for each test or request."""
    f = cached(ttl=0)(_colours(lambda: 1)["async"])
    for _ in range(3):
        assert had(f()) == 1


def test_loops_side_by_side_share_a_computation() -> None:
    """Threads that each have a loop, and plain threads, share one computation."""
    origin = Origin()
    cache = Cache()

    def compute() -> int:
        return origin()

    async def compute_async() -> int:
        return await origin.suspending()

    leader = Herd(lambda: had(cache.aget_or_compute("k", compute_async)))
    origin.has_begun()
    others = Herd(
        *[lambda: had(cache.aget_or_compute("k", compute_async))] * 3, *[lambda: cache.get_or_compute("k", compute)] * 3
    )
    until(lambda: sum(f.callers for f in list(cache._core.flights._flights.values())) == 7)
    origin.let_on()
    assert leader.join() + others.join() == [1] * 7
    assert origin.calls == 1


def test_a_task_that_is_cancelled_leaves_the_computation_to_the_others() -> None:
    """A cancelled task does not cancel the computation for the others, even if its call started it."""
    origin = Origin()
    f = cached(_named(origin, "async"))

    async def main() -> None:
        tasks = [asyncio.create_task(f()) for _ in range(5)]
        await until_async(lambda: origin.calls and _callers(f) == 5)
        tasks[0].cancel()
        tasks[3].cancel()
        done = await asyncio.gather(tasks[0], tasks[3], return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in done)
        origin.let_on()
        assert await asyncio.gather(tasks[1], tasks[2], tasks[4]) == [1, 1, 1]

    asyncio.run(main())
    assert origin.calls == 1


def test_when_nobody_waits_the_computation_is_cancelled_and_the_lease_released() -> None:
    """If all callers are cancelled, the computation is cancelled, and its lease is given back."""
    origin = Origin()
    ended: list[bool] = []

    @cached(lease=60)
    async def f() -> int:
        try:
            return await origin.suspending()
        finally:
            ended.append(True)

    async def main() -> None:
        tasks = [asyncio.create_task(f()) for _ in range(5)]
        await until_async(lambda: origin.calls and _callers(f) == 5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert ended == [True]
        assert _callers(f) == 0
        origin.let_on()
        assert await asyncio.wait_for(f(), 5) == 2

    asyncio.run(main())


def test_a_loop_that_is_closed_under_a_computation() -> None:
    """If a loop is closed during a computation, a caller in another loop computes and does not hang."""
    origin = Origin()
    f = cached(lease=1)(_named(origin, "async"))
    loop = asyncio.new_event_loop()
    task = loop.create_task(f())
    loop.run_until_complete(until_async(lambda: origin.calls))
    origin.let_on()
    for each in asyncio.all_tasks(loop):  # including the task of the computation
        each._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    started = time.monotonic()
    assert had(f()) == 2
    assert time.monotonic() - started < 10
    assert not task.done()


def test_a_plain_call_on_the_thread_of_the_loop_that_computes() -> None:
    """A plain call on the thread of the loop that computes the key computes alone. It would block that loop."""
    origin = Origin()
    cache = Cache()

    async def main() -> None:
        task = asyncio.create_task(cache.aget_or_compute("k", origin.suspending))
        await until_async(lambda: origin.calls)
        assert cache.get_or_compute("k", lambda: "alone") == "alone"
        origin.let_on()
        assert await task == 1

    asyncio.run(main())
    assert cache.get("k") == 1


# -- herds ------------------------------------------------------------------------------------------------------------


def test_a_herd_computes_once(colour: str) -> None:
    """A herd of callers causes one computation."""
    origin = Origin()
    f = cached(_named(origin, colour))
    leader = Herd(lambda: had(f()))
    origin.has_begun()
    followers = Herd(*[lambda: had(f())] * 31)
    until(lambda: _callers(f) == 32)
    origin.let_on()
    assert leader.join() + followers.join() == [1] * 32
    assert origin.calls == 1


def test_invalidation_detaches_the_flight() -> None:
    """A call that begins after `invalidate` has returned does not get a value whose computation began before."""
    origin = Origin()
    f = cached(_named(origin, "sync"))
    leader = Herd(f)
    origin.has_begun()
    follower = Herd(f)
    until(lambda: _callers(f) == 2)
    f.invalidate()
    later = Herd(f)
    origin.has_begun()
    origin.let_on()
    assert leader.join() == [1]
    assert follower.join() == [2]
    assert later.join() == [2]
    assert f() == 2
    assert origin.calls == 2


@pytest.mark.parametrize("void", ["set", "refresh", "invalidate_all", "clear"])
@pytest.mark.parametrize("namespace", ["", "shop"])
def test_a_computation_under_way_never_wins_over_what_came_later(void: str, namespace: str) -> None:
    """A slow computation does not replace the value of a later `set`, `refresh`, `invalidate_all` or `clear`."""
    origin = Origin()
    f = cached(cache=Cache(namespace=namespace))(_named(origin, "sync"))
    leader = Herd(f)
    origin.has_begun()
    if void == "set":
        f.set("new")
        expected: Any = "new"
    elif void == "refresh":
        again = Herd(f.refresh)
        origin.has_begun()
        expected = 2
    else:
        f.invalidate_all() if void == "invalidate_all" else f.cache.clear()
        again = Herd(f)
        origin.has_begun()
        expected = 2
    origin.let_on()
    assert leader.join() == [1]
    if void != "set":
        assert again.join() == [2]
    assert f() == expected


def test_no_value_is_older_than_the_last_invalidation() -> None:
    """Promise 4 under load: readers of a few keys never get a value from before the last invalidation."""
    truth, floor = [0] * 4, [0] * 4
    f = cached(ttl=60)(lambda key: truth[key])
    wrong: list[Any] = []
    writing = list(range(4))

    def read(key: int) -> None:
        while writing:
            least = floor[key]
            value = f(key)
            if value < least:
                wrong.append((key, value, least))
            time.sleep(0)  # otherwise the readers, which never wait, would starve the writers

    def write(key: int) -> None:
        for number in range(1, 61):
            truth[key] = number
            f.invalidate(key)
            floor[key] = number  # from here on, no reader may get an older value
        writing.remove(key)

    readers = Herd(*[functools.partial(read, n % 4) for n in range(60)])
    Herd(*[functools.partial(write, key) for key in range(4)]).join()
    assert readers.join() == [None] * 60
    assert wrong == []
    assert f.many([(key,) for key in range(4)]) == [60] * 4


# -- bound late -------------------------------------------------------------------------------------------------------


def test_disabled(colour: str) -> None:
    """In a `disabled()` block, calls run the function, even if a value is stored. Afterwards, hits are served again."""
    f = cached(counting(colour)[0])
    assert had(f(1)) == (1, 2, 1)
    with disabled():
        assert had(f(1)) == (1, 2, 2)
        assert had(f(1)) == (1, 2, 3)
    assert had(f(1)) == (1, 2, 1)


def test_a_hit_costs_no_call_of_ours() -> None:
    """A hit runs only the generated function, and no other frame of the library."""
    f = cached(lambda x: x)
    f(1)
    f(1)
    frames: list[str] = []
    gc.disable()  # finalizers have frames, too
    sys.setprofile(lambda frame, event, arg: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        f(1)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert len(frames) == 1, frames


def test_a_decorated_function_can_be_collected() -> None:
    """A decorated function can be garbage-collected. Otherwise, closures that each request decorates would leak."""
    f = cached(lambda x: x)
    f(1)
    f(1)
    gone = weakref.ref(f.__wrapped__)
    del f
    gc.collect()
    assert gone() is None


async def _value() -> int:
    return 1


def test_partial_objects_and_builtins() -> None:
    """A partial object has no name for stable keys and is refused. A builtin function has one and is accepted."""
    from stampede import OptionError

    with pytest.raises(OptionError, match="write a def"):
        cached(functools.partial(_value))
    assert cached(len)([1, 2]) == 2


def test_awaitables_are_typed_as_they_are() -> None:
    """A call of an async function returns a coroutine."""
    call: Awaitable[int] = at_the_top_async(1)
    assert inspect.iscoroutine(call)
    assert had(call) == 1


# -- parameters with names that the library uses ----------------------------------------------------------------------

OURS = [
    "self",
    "value",
    "args",
    "kwargs",
    "key",
    "via",
    "cls",
    "bound",
    "bound_",
    "slow_",
    "type_",
    "function",
    "calls",
]


@pytest.mark.parametrize("shape", ["{}", "*, {}", "{}=0", "**{}", "a=0, /, {}=0"])
def test_a_parameter_may_have_any_name(shape: str, colour: str) -> None:
    """A parameter may have a name that the library's own methods use."""
    for name in OURS:
        with isolated():
            _may_be_called(name, shape, colour)


def _may_be_called(name: str, shape: str, colour: str) -> None:
    made: dict[str, Any] = {}
    marked = "async " if colour == "async" else ""
    taken = shape.format(name)
    exec(f"class C:\n    {marked}def m(this, {taken}): return dict(it={name})", made)
    made["C"].__stampede_key__ = lambda this: 1
    exec(f"{marked}def f({taken}): return dict(it={name})", made)
    made["C"].m = cached(made["C"].m)
    made["C"].m.__set_name__(made["C"], "m")
    for f in (cached(made["f"]), made["C"]().m):
        given = {name: 7}
        expected = {"it": given if shape.startswith("**") else 7}
        assert had(f(**given)) == had(f(**given)) == expected
        assert had(f.peek(**given)).value == expected
        assert had(f.refresh(**given)) == expected
        assert had(f.set("mine", **given)) is None
        assert had(f(**given)) == "mine"
        assert "7" in f.key(**given)
        assert had(f.expire(**given)) is True
        assert had(f.invalidate(**given)) is True


def test_a_function_of_any_names_may_be_invalidated_later() -> None:
    """`via=` with a callable delays the invalidation, even if the function accepts all names."""
    later: list[Any] = []

    @cached
    def f(**fields: int) -> dict[str, int]:
        return fields

    assert f(a=1, via=2) == {"a": 1, "via": 2}
    assert f.invalidate(a=1, via=2) is True
    f(a=1)
    f.invalidate(a=1, via=later.append)
    assert f.peek(a=1) is not None
    later[0]()
    assert f.peek(a=1) is None
