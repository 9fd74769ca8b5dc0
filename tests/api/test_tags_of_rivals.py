"""What the tests of FusionCache, Symfony and cashews check about tags and conditional refresh, checked here.

`docs/guides/tags-compared.md` has all of these behaviours in tables, and says where ours differs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")
pytest.importorskip("psycopg")
pytest.importorskip("sqlalchemy")
pytest.importorskip("moto")

from addresses import EMPTY
from herd import PATIENCE, had, until, until_async

from stampede import Cache, ComputationFailed, OptionError, current
from stampede.engines.memory import MemoryEngine
from stampede.errors import EngineClosed, KeyingError
from stampede.events import Event, Invalidated
from stampede.model.entry import Entry, new_id
from stampede.model.tags import EVER, key_of_tag, name_of_tag
from stampede.runtime.colour import run_blocking

STORES = ["memory", "disk", "redis"]
coherent = pytest.mark.parametrize("world", ["disk", "redis"], indirect=True)


class World:
    """An engine with several caches, as several processes have them. All verbs are called by one colour."""

    def __init__(self, url: str, opened: ExitStack, colour: str) -> None:
        self.url = url
        self.colour = colour
        self._engine = MemoryEngine() if url == "memory://" else None
        self._opened = opened

    def cache(self, **options: Any) -> Side:
        made = Cache(self.url, engine=self._engine, **{"early": 0, "ttl": 600, "stale": 600, **options})
        return Side(self._opened.enter_context(made), self.colour)


class Side:
    """The verbs of a cache, in one colour, and functions of it."""

    def __init__(self, cache: Cache, colour: str) -> None:
        self.cache = cache
        self.colour = colour

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        method = getattr(self.cache, verb if self.colour == "sync" else f"a{verb}")
        return lambda *args, **options: had(method(*args, **options))

    def compute(self, key: str, value: Any, **options: Any) -> Any:
        """Return the key's value. If it is computed, it is `value`, or what `value` returns."""

        def function() -> Any:
            return value() if callable(value) else value

        async def suspending() -> Any:
            return function()

        return self.get_or_compute(key, function if self.colour == "sync" else suspending, **options)

    def function(self, body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return a cached function of one argument, called `user`."""

        def blocking(user: Any) -> Any:
            return body(user)

        async def suspending(user: Any) -> Any:
            return body(user)

        cached = self.cache.cached(version=1, **options)(blocking if self.colour == "sync" else suspending)
        return lambda user: had(cached(user))


@pytest.fixture(params=STORES)
def world(request: pytest.FixtureRequest, memory_path: Path, colour: str) -> Iterator[World]:
    with ExitStack() as opened:
        yield World(EMPTY[request.param](memory_path), opened, colour)


class Calls:
    """A function that returns how often it was called."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, user: Any = None) -> int:
        self.number += 1
        return self.number


# -- what a tag ends ------------------------------------------------------------------------------------------------


def test_values_that_were_set_and_computed(world: World) -> None:
    """A tag ends all that carries it, whether it was set or computed, and nothing else. Caches that exist learn of it,
    and caches that are opened afterwards."""
    here, there = world.cache(), world.cache()
    here.set("foo", 1, tags=["x", "y"])
    here.set("bar", 2, tags=["y", "z"])
    here.set("plain", 4)
    assert there.compute("baz", 3, tags=["x", "z"]) == 3
    assert [there.compute("foo", 11, tags=["x", "y"]), here.compute("baz", 33, tags=["x", "z"])] == [1, 3]
    here.invalidate_tags("x")
    assert there.get("foo") is None
    assert [here.compute("bar", 222, tags=["y", "z"]), there.compute("baz", 333, tags=["x", "z"])] == [2, 333]
    there.invalidate_tags("y")
    assert [here.compute(key, 4444, tags=["y"]) for key in ("foo", "bar", "baz", "plain")] == [4444, 4444, 333, 4]
    here.invalidate_tags("y")
    assert world.cache().get_many(["foo", "bar", "baz", "plain"]) == {"baz": 333, "plain": 4}


def test_several_tags_at_once(world: World) -> None:
    """Several tags end what carries any of them. No tag at all ends nothing, and a tag that nothing carries is not
    an error."""
    here, there = world.cache(), world.cache()
    here.set("foo", 1, tags=["x", "y"])
    here.set("bar", 2, tags=["y"])
    here.compute("baz", 3, tags=["z"])
    here.invalidate_tags("blah")
    here.invalidate_tags()
    here.expire_tags()
    keys = ["foo", "bar", "baz"]
    assert there.get_many(keys) == {"foo": 1, "bar": 2, "baz": 3}
    here.invalidate_tags("x", "z")
    assert there.get_many(keys) == here.get_many(keys) == {"bar": 2}
    there.invalidate_tags("y", "non-existing", "y")
    assert there.get_many(keys) == here.get_many(keys) == {}


def test_a_value_has_the_tags_of_its_own_computation(world: World) -> None:
    """Each new value has only the tags that came with it: those of the value before have no effect on it, and a call
    that gets the stored value changes no tags."""
    cache, other = world.cache(), world.cache()
    assert cache.compute("foo", 1, tags=["t1", "t2"]) == 1
    cache.invalidate_tags("t1")
    assert cache.compute("foo", 2, tags=["t1", "t2", "t3"]) == 2
    cache.invalidate_tags("t3")
    assert cache.compute("foo", 3, tags=["t1"]) == 3
    cache.invalidate_tags("t2")
    assert other.compute("foo", 4, tags=["t9"]) == cache.compute("foo", 4) == 3
    cache.invalidate_tags("t9")
    assert cache.get("foo") == 3
    other.invalidate_tags("t1", "t2", "t3", "t4")
    assert cache.compute("foo", 5) == 5
    cache.invalidate_tags("t1", "t2", "t3", "t4")
    assert cache.get("foo") == other.get("foo") == 5


@pytest.mark.parametrize("removed", [False, True], ids=["replaced", "removed before"])
def test_set_replaces_the_tags(world: World, removed: bool) -> None:
    """A value that is set has only the tags of this `set`, whether the key had a value or it was removed before."""
    cache = world.cache()
    cache.set("k", 1, tags=["foo"])
    if removed:
        cache.invalidate("k")
        cache.set("k", 2)
    else:
        cache.set("k", 2, tags=["bar"])
    cache.invalidate_tags("foo")
    assert cache.get("k") == 2
    cache.invalidate_tags("bar")
    assert (cache.get("k") is None) is not removed


def test_a_counter_with_a_tag(world: World) -> None:
    """A tag ends a counter, which then begins again with its default."""
    cache = world.cache()
    add = lambda: cache.update("visits", lambda n: n + 1, 0, tags=["tag"])  # noqa: E731
    assert [add(), add()] == [1, 2]
    cache.invalidate_tags("tag")
    assert cache.get("visits") is None
    assert add() == 1


@pytest.mark.parametrize("how", ["on demand", "when stale", "in the background"])
def test_a_refresh_gives_the_value_its_tags(world: World, how: str) -> None:
    """A value without tags has the tags of the call that refreshed it, also if that happened in the background."""
    cache = world.cache()
    cache.set("foo", 1)
    options = {"tags": ["c", "d"], "background": how == "in the background"}
    if how == "on demand":
        with cache.cache.refreshing():
            assert cache.compute("foo", 2, **options) == 2
    else:
        cache.expire("foo")
        refresh = in_one_loop if world.colour == "async" else Side.compute
        assert refresh(cache, "foo", 2, **options) == (1 if options["background"] else 2)
    until(lambda: cache.get("foo") == 2)
    cache.invalidate_tags("c")
    assert cache.get("foo") is None


def in_one_loop(side: Side, key: str, value: int, **options: Any) -> Any:
    """What a call returns, in an event loop that runs until the value is stored: a task may compute it."""

    async def two() -> int:
        return value

    async def main() -> Any:
        first = await side.cache.aget_or_compute(key, two, **options)
        await until_async(lambda: side.cache.get(key) == value)
        return first

    return had(main())


def test_a_value_that_has_ended_is_stored_again(world: World) -> None:
    """A value whose `ttl` has ended may be set again with the same tag. It is fresh then, and the tag ends it."""
    cache = world.cache(stale=0)
    for _ in range(2):
        cache.set("test", 1, ttl=0.05, tags=["1234"])
        until(lambda: cache.get("test") is None)
    cache.set("test", 2, tags=["1234"])
    assert cache.get("test") == 2
    cache.invalidate_tags("1234")
    assert cache.get("test") is None


def test_more_than_a_hundred_values_of_one_tag(world: World) -> None:
    """A tag ends hundreds of values at once, and may be invalidated again: it writes one small entry, and
    removes none of the values."""
    cache, calls = world.cache(), []

    def values(numbers: list[int]) -> dict[int, int]:
        calls.append(numbers)
        return dict.fromkeys(numbers, len(calls))

    async def avalues(numbers: list[int]) -> dict[int, int]:
        return values(numbers)

    function = values if world.colour == "sync" else avalues
    many = cache.cache.cached.many(version=1, tags=["{numbers}", "all"])(function)
    numbers = list(range(150))
    assert had(many(numbers)) == dict.fromkeys(numbers, 1)
    cache.invalidate_tags("1", "2", "100")
    cache.invalidate_tags("1", "2", "100")
    assert had(many(numbers)) == dict.fromkeys(numbers, 1) | dict.fromkeys([1, 2, 100], 2)
    cache.invalidate_tags("5", "all")
    assert had(many(numbers)) == dict.fromkeys(numbers, 3)
    assert calls == [numbers, [1, 2, 100], numbers]


def test_two_namespaces_have_tags_of_their_own(world: World) -> None:
    """A tag ends values of its namespace, in every process, and none of another namespace of the same engine."""
    mine, same, other = (world.cache(namespace=name) for name in ("shop", "shop", "blog"))
    for cache in (mine, other):
        cache.set("milk", 1, tags=["beverage", "white"])
        cache.compute("wine", 2, tags=["beverage", "red"])
    same.invalidate_tags("red")
    assert [mine.get("milk"), mine.get("wine"), other.get("milk"), other.get("wine")] == [1, None, 1, 2]
    mine.clear()
    assert same.get("milk") is None


# -- tags and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["!@#$%^&*():8", "{}()/\\@:", "é ü", " ", "*", "#", "a\nb", "\ud800"])
def test_a_tag_may_have_any_characters(world: World, tag: str) -> None:
    """Every character may be in a tag. None has a meaning: `*` does not end everything."""
    cache = world.cache()
    cache.set("foo", 1, tags=[tag])
    cache.set("bar", 2, tags=["bar"])
    cache.set("plain", 3)
    assert cache.get("foo") == 1
    cache.invalidate_tags(tag)
    assert cache.get_many(["foo", "bar", "plain"]) == {"bar": 2, "plain": 3}


@pytest.mark.parametrize("tag", ["", 1, 1.5, None, True, b"x", ["x"], Path("x"), "x" * 257])
def test_what_is_no_tag(world: World, tag: Any) -> None:
    """A tag is a string of 1 to 256 characters. Other things are refused before anything happens, also objects that
    could be made strings: two of them might be made the same string."""
    cache = world.cache()
    cache.set("ok", 1, tags=["ok"])
    with pytest.raises(OptionError, match="a tag is a string"):
        cache.set("foo", 1, tags=[tag])
    with pytest.raises(OptionError, match="a tag is a string"):
        cache.compute("foo", lambda: current().tag(tag))
    for verb in (cache.invalidate_tags, cache.expire_tags):
        with pytest.raises(OptionError, match="a tag is a string"):
            verb("ok", tag)  # not even what is a tag
    assert cache.get_many(["ok", "foo"]) == {"ok": 1}


@pytest.mark.parametrize("tags", ["ab", 5, [str(number) for number in range(129)]], ids=["text", "number", "129"])
def test_what_is_no_list_of_tags(world: World, tags: Any) -> None:
    """One string is not a list of its letters. An entry has at most 128 tags."""
    cache = world.cache()
    with pytest.raises(OptionError, match=r"give a list of strings|at most 128"):
        cache.set("foo", 1, tags=tags)
    assert cache.get("foo") is None


def test_tags_of_a_computation_are_added(world: World) -> None:
    """`current().tag` may be called several times, with tags that are there already: it adds to those of the call. In
    FusionCache the computation replaces them."""
    cache = world.cache()

    def body() -> int:
        current().tag("one")
        current().tag("one", "two")
        current().tag()
        assert current().tags == ("one", "two")
        return 1

    for tag in ("call", "one", "two"):
        assert cache.compute("foo", body, tags=["call"]) == 1
        assert cache.get("foo") == 1
        cache.invalidate_tags(tag)
        assert cache.get("foo") is None


@dataclass
class Settings:
    theme: str


@dataclass
class User:
    name: str
    settings: Settings


@pytest.mark.parametrize(
    "key, tag, ended",
    [
        ("{user.name}:{user.settings.theme}", "user:{user.name}", "user:ann"),
        ("{user.name}:{user.settings.theme}", "{user.name}/{user.settings.theme}", "ann/dark"),
        ("{user.settings.theme} of {user.name}", "theme:{user.settings.theme}", "theme:dark"),
    ],
)
def test_tags_with_attributes_of_arguments(world: World, key: str, tag: str, ended: str) -> None:
    """A tag may name attributes of an argument, and attributes of those, as a key may. Only what has the same value
    there is ended."""
    cache, calls = world.cache(), Calls()
    function = cache.function(calls, key=key, tags=[tag, "all"])
    ann, bob = User("ann", Settings("dark")), User("bob", Settings("light"))
    assert [function(ann), function(bob), function(User("ann", Settings("dark"))), function(bob)] == [1, 2, 1, 2]
    cache.invalidate_tags(ended)
    assert [function(ann), function(bob)] == [3, 2]
    cache.invalidate_tags("all")
    assert [function(ann), function(bob)] == [4, 5]


def test_a_tag_of_none(world: World) -> None:
    """An argument that is None is the text None in a tag, as it is in any other format string."""
    cache, calls = world.cache(), Calls()
    function = cache.function(calls, tags=["a:{user};b"])
    assert [function(None), function("None")] == [1, 2]
    cache.invalidate_tags("a:;b")
    assert function(None) == 1
    cache.invalidate_tags("a:None;b")
    assert [function(None), function("None")] == [3, 4]


def test_tags_that_a_function_makes(world: World) -> None:
    """`tags=` may be a function of arguments. It may use more than them, such as the tenant in a context."""
    tenant: ContextVar[str] = ContextVar("tenant", default="none")
    cache, calls = world.cache(), Calls()
    function = cache.function(calls, tags=lambda user: [f"user:{hash(user) % 7}", f"tenant:{tenant.get()}"])
    tenant.set("a")
    assert function(1) == 1
    tenant.set("b")
    assert [function(1), function(9)] == [1, 2]
    cache.invalidate_tags("tenant:a")
    assert [function(1), function(9)] == [3, 2]
    cache.invalidate_tags("tenant:b")
    assert [function(1), function(9)] == [4, 5]
    cache.invalidate_tags("user:1")
    assert [function(1), function(9)] == [6, 5]


def test_tags_that_cannot_be_filled_in(world: World) -> None:
    """A tag that names no parameter is refused when the function is decorated, and one that an argument cannot fill in
    when it is called."""
    cache, calls = world.cache(), Calls()
    with pytest.raises(OptionError, match="not a parameter of"):
        cache.function(calls, tags=["{nobody}"])
    with pytest.raises(KeyingError, match="can't be filled in"):
        cache.function(calls, tags=["{user.name}"])(3)
    assert calls.number == 0


@pytest.mark.parametrize(
    "options", [{}, {"stale": 0}, {"stale": 600}, {"early": 1}, {"background": True}, {"jitter": 0.1}], ids=str
)
def test_tags_go_with_every_way_to_refresh(world: World, options: dict[str, Any]) -> None:
    """A tag ends a value, whatever else the function does to refresh it: the next caller waits for the new one."""
    cache, calls = world.cache(), Calls()
    function = cache.function(calls, tags=["all", "tag:{user}"], **options)
    assert [function(1), function(2), function(5)] == [1, 2, 3]
    cache.invalidate_tags("tag:1")
    assert [function(1), function(2), function(5)] == [4, 2, 3]
    cache.invalidate_tags("all")
    assert [function(2), function(5)] == [5, 6]


def test_a_cached_function_that_calls_another(world: World) -> None:
    """Tags are not inherited: a tag of the inner function alone does not end what the outer one has stored."""
    cache, calls = world.cache(), Calls()
    inner = cache.cache.cached(version=1, key="in:{user}", tags=["all", "tag:{user}"])(lambda user: calls())

    def outer(user: int) -> Any:
        return inner(user)

    function = cache.function(outer, key="out:{user}", tags=["all"])
    assert [function(2), function(5)] == [1, 2]
    cache.invalidate_tags("tag:2")
    assert [function(2), function(5)] == [1, 2]
    cache.invalidate_tags("all")
    assert [function(2), function(5)] == [3, 4]


# -- stale or gone --------------------------------------------------------------------------------------------------


def test_stale_or_gone(world: World) -> None:
    """`expire_tags` leaves the value for those that accept a stale one, and for calls whose computation fails.
    `invalidate_tags` leaves nothing. In FusionCache this is an option of the cache; here it is the caller's choice."""
    cache = world.cache()

    def fails() -> int:
        raise OSError("the origin is away")

    cache.set("foo", 1, tags=["x", "y"])
    cache.set("bar", 2, tags=["y", "z"])
    cache.expire_tags("x")
    assert cache.get("foo") is None
    assert (cache.peek("foo").value, cache.peek("foo").fresh <= 0) == (1, True)
    assert (cache.get("bar"), cache.peek("bar").value, cache.peek("bar").fresh > 0) == (2, 2, True)
    assert cache.compute("foo", fails) == 1
    cache.invalidate_tags("x")
    assert cache.peek("foo") is None

    def is_computed() -> bool:
        try:
            cache.compute("foo", fails)
        except ComputationFailed:  # the key rests, for as long as the computation before has taken
            return False
        except OSError:
            return True
        raise AssertionError("an ended value was served")

    until(is_computed)
    assert cache.get("bar") == 2


@pytest.mark.parametrize("soft", [False, True], ids=["clear", "expire_all"])
def test_all_of_a_cache(world: World, soft: bool) -> None:
    """`expire_all` and `clear` are for everything, with tags or without. A cache that is opened later knows, and what
    is stored afterwards is fresh, and has tags that work."""
    cache, other = world.cache(), world.cache()
    cache.set("foo", 1)
    cache.set("bar", 2, tags=["x"])
    assert other.get_many(["foo", "bar"]) == {"foo": 1, "bar": 2}
    (cache.expire_all if soft else cache.clear)()
    for each in (cache, other, world.cache()):
        assert each.get_many(["foo", "bar"]) == {}
        assert [entry and entry.value for entry in map(each.peek, ["foo", "bar"])] == ([1, 2] if soft else [None, None])
    other.set("bar", 22, tags=["x"])
    assert cache.get_many(["foo", "bar"]) == {"bar": 22}
    cache.invalidate_tags("x")
    assert other.get_many(["foo", "bar"]) == {}


# -- tags that are lost or damaged, caches that are closed ----------------------------------------------------------


def put_for_tag(cache: Cache, tag: str, value: bytes | None) -> None:
    """Store these bytes in place of a tag, or remove it."""
    store, key = cache.engine.blocking.store, key_of_tag(name_of_tag(cache.namespace, tag))
    assert store is not None
    if value is None:
        run_blocking(store.invalidate(key))
    else:
        run_blocking(store.set(key, Entry(value, new_id(), ttl=600, fresh=600, keep=600)))


@pytest.mark.parametrize("bytes_of_tag", [None, b"", b"\x00abc\xff", b"12345678x", b"12345678n"], ids=repr)
def test_a_tag_that_is_lost_or_damaged(world: World, bytes_of_tag: bytes | None) -> None:
    """If an engine has lost a tag, or something else is stored in its place, what carries it is gone: it is never
    served again by mistake. No error reaches a caller, and the next value with this tag is stored as usual."""
    cache, other = world.cache(), world.cache()
    cache.set("foo", 1, tags=["bar", "baz"])
    put_for_tag(cache.cache, "bar", bytes_of_tag)
    assert (cache.get("foo"), other.peek("foo")) == (None, None)
    assert cache.compute("foo", 2, tags=["bar"]) == 2
    assert other.compute("foo", 3, tags=["bar"]) == 2
    other.set("qux", 4, tags=["bar"])
    assert cache.get("qux") == 4
    put_for_tag(cache.cache, "bar", bytes_of_tag)
    cache.invalidate_tags("bar")
    assert other.get_many(["foo", "qux"]) == {}
    put_for_tag(cache.cache, "bar", bytes_of_tag)
    cache.expire_tags("bar")
    assert other.compute("foo", 5, tags=["bar"]) == 5
    assert cache.get("foo") == 5


@pytest.mark.parametrize("ttl", [1, 100_000, "30d", None], ids=str)
def test_a_tag_lasts_as_long_as_its_values(world: World, ttl: Any) -> None:
    """A tag is stored for at least as long as what carries it, also if that comes later and stays longer. Otherwise
    values would end with their tags. If a tag is lost after its invalidation, no value comes back."""
    cache = world.cache()
    store, key = cache.cache.engine.blocking.store, key_of_tag(name_of_tag("", "baz"))
    assert store is not None
    cache.set("first", 0, ttl=1, tags=["baz"])
    cache.set("foo", 1, ttl=ttl, tags=["baz"])
    (tag,), entry = run_blocking(store.get([key])), cache.peek("foo")
    assert tag is not None
    assert tag.keep >= min(entry.keep, EVER) - 1
    cache.invalidate_tags("baz")
    put_for_tag(cache.cache, "baz", None)
    assert cache.peek("foo") is cache.peek("first") is None


def test_a_closed_cache_invalidates_no_tags(world: World) -> None:
    """Whoever invalidates on a closed cache is told: nothing would happen, and old values would be served elsewhere."""
    cache = world.cache()
    cache.set("foo", 1, tags=["tag-1"])
    cache.cache.close()
    for verb in (cache.invalidate_tags, cache.expire_tags):
        with pytest.raises(EngineClosed):
            verb("tag-1")


def test_observers_hear_of_tags(world: World) -> None:
    """One call is one event, which names its verb and its tags, whether anything carried them or not."""
    heard: list[Event] = []
    cache = world.cache(observers=[heard.append])
    cache.invalidate_tags("foo", "bar")
    cache.expire_tags("foo")
    told = [(event.verb, event.key) for event in heard if isinstance(event, Invalidated)]
    assert told == [("invalidate_tags", "foo, bar"), ("expire_tags", "foo")]


@coherent
def test_a_local_tier_learns_of_tags(world: World) -> None:
    """What a process keeps itself goes at once if it invalidates the tag, and soon if another process does."""
    here, there = world.cache(local=True), world.cache(local=True)
    here.set("key", "test", tags=["tag"])
    assert [each.compute("key", "new", tags=["tag"]) for each in (here, there, here, there)] == ["test"] * 4
    there.invalidate_tags("tag")
    assert there.get("key") is None
    until(lambda: here.get("key") is None)


# -- conditional refresh --------------------------------------------------------------------------------------------


class Endpoint:
    """A server with one body, which answers 304 to a client that has it, and counts its answers."""

    def __init__(self, body: int) -> None:
        self.body = body
        self.asked = self.conditional = self.full = self.unmodified = 0

    def get(self, tag: str | None = None) -> int:
        """Ask the server, as a cached function does."""
        context = current()
        if tag is not None:
            context.tag(tag)
        self.asked += 1
        if context.stale is not None and context.etag is not None:
            self.conditional += 1
            if context.etag == f"v{self.body}":
                self.unmodified += 1
                return context.not_modified()  # type: ignore[no-any-return]
        self.full += 1
        context.etag = f"v{self.body}"
        return self.body

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.asked, self.conditional, self.full, self.unmodified


def test_a_conditional_refresh(world: World) -> None:
    """Two refreshes of what has not changed send no body, and one of what has changed does. Any process may refresh,
    because the version is stored with the value."""
    here, there, endpoint = world.cache(), world.cache(), Endpoint(1)
    assert [each.compute("foo", endpoint.get) for each in (here, there)] == [1, 1]
    for each in (here, there):
        here.expire("foo")
        assert each.compute("foo", endpoint.get) == 1
    endpoint.body = 42
    there.expire("foo")
    assert here.compute("foo", endpoint.get) == there.compute("foo", endpoint.get) == 42
    assert endpoint.counts == (4, 3, 2, 2)
    assert there.peek("foo").etag == "v42"


def test_an_expired_tag_leaves_what_can_be_confirmed(world: World) -> None:
    """After `expire_tags` a computation can confirm the stored value, which is fresh then, and has its tags still.
    After `invalidate_tags` there is nothing to confirm."""
    here, there, endpoint = world.cache(), world.cache(), Endpoint(1)
    for each, tag in [(here, "page"), (there, "seen"), (here, "page")]:
        assert each.compute("foo", lambda: endpoint.get("seen"), tags=["page"]) == 1
        each.expire_tags(tag)
        assert there.get("foo") is None
    assert here.compute("foo", endpoint.get) == 1  # it names no tags, and the value keeps those it has
    assert endpoint.counts == (4, 3, 1, 3)
    assert there.compute("foo", endpoint.get) == 1
    there.expire_tags("seen")
    assert here.get("foo") is None
    here.invalidate_tags("page")
    assert there.peek("foo") is None
    assert there.compute("foo", endpoint.get) == 1
    assert endpoint.counts == (5, 3, 2, 3)


# -- what a computation decides about its own value -----------------------------------------------------------------


def test_a_ttl_of_its_own(world: World) -> None:
    """A computation may choose the `ttl` of its value. The options of the call and of the cache stay as they are, so
    the next value has their `ttl` again."""
    cache, options = world.cache(ttl=300), {"ttl": 100}

    def short() -> int:
        current().ttl = 10
        return 3

    assert cache.compute("foo", short, **options) == 3
    assert cache.peek("foo").ttl == 10
    assert (options, cache.cache.policy.ttl) == ({"ttl": 100}, 300)
    cache.invalidate("foo")
    cache.compute("foo", 4, **options)
    cache.compute("bar", 5)
    assert [cache.peek("foo").ttl, cache.peek("bar").ttl] == [100, 300]


def test_a_ttl_that_is_chosen_in_the_background(world: World) -> None:
    """A computation that ends after its caller has got the stale value has a say about the new one all the same."""
    cache = world.cache().cache
    goes_on = threading.Event()

    def slow() -> int:
        assert goes_on.wait(PATIENCE)
        current().ttl = 10
        return 42

    cache.set("foo", 21)
    cache.expire("foo")
    assert cache.get_or_compute("foo", slow, background=True) == 21
    goes_on.set()
    until(lambda: cache.get("foo") == 42)
    assert cache.peek("foo").ttl == 10


def test_a_value_that_is_not_kept(world: World) -> None:
    """`dont_keep` gives the new value to its caller, and leaves the stale one where it is."""
    cache = world.cache()

    def body() -> int:
        current().dont_keep()
        return 2

    cache.set("foo", 1, tags=["x"])
    cache.expire("foo")
    assert cache.compute("foo", body, tags=["x"]) == 2
    assert (cache.get("foo"), cache.peek("foo").value) == (None, 1)
    assert cache.compute("foo", 4, tags=["x"]) == 4
    cache.invalidate_tags("x")
    assert cache.peek("foo") is None


def test_a_failure_that_no_stale_value_covers(world: World) -> None:
    """A computation can let its caller see one failure, although a stale value is there: it raises an exception that
    `raises` names, with a ttl of 0. Other failures are covered, before and afterwards."""
    cache = world.cache()

    def uncovered() -> str:
        current().ttl = 0
        raise LookupError("no such page")

    def covered() -> str:
        raise OSError("the origin is away")

    cache.set("foo", "bar")
    cache.expire("foo")
    assert cache.compute("foo", covered, raises=LookupError) == "bar"
    with pytest.raises(LookupError, match="no such page"):
        until(lambda: cache.compute("foo", uncovered, raises=LookupError) != "bar")  # it rests for a moment
    assert cache.compute("foo", covered, raises=LookupError) == "bar"
