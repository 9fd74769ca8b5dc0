"""Settings and caches: which settings apply, when functions find their caches, and isolated caches for tests."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import python
from herd import Herd, Origin, had
from prometheus_client import REGISTRY

from stampede import (
    Cache,
    EngineError,
    OptionError,
    SettingsError,
    cache_without_dogpiling,
    cached,
    configure,
    events,
    get_cache,
)
from stampede.errors import EngineClosed
from stampede.testing import FakeClock, disabled, isolated

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated():
        yield


def counting() -> Any:
    """Return a function that returns the number of its computation."""
    calls: list[int] = []

    def compute(x: int = 0) -> int:
        calls.append(x)
        return len(calls)

    return compute


# -- observers ---------------------------------------------------------------------------------------------------------

seen: list[events.Event] = []


@pytest.mark.parametrize(
    "settings",
    [
        {"observers": {"mine": "test_registry:listen", "prometheus": False}, "caches": {"reports": {}}},
        {"observers": {"mine": seen.append}, "caches": {"reports": {}}},
        {"observers": [seen.append], "caches": {"reports": {}}},
        {"observers": ["test_registry:Listener"], "caches": {"reports": {}}},
        {"observers": [seen.append]},
        {"observers": [seen.append], "url": "memory://"},
    ],
)
def test_observers_of_the_settings(settings: Any) -> None:
    """Observers in the settings get the events of each configured cache."""
    seen.clear()
    configure(**settings)
    for name in ("default", *settings.get("caches", ())):
        get_cache(name).get_or_compute("k", lambda: 1)
        assert [type(event) for event in seen] == [events.Computed]
        seen.clear()
    with isolated(**settings):
        get_cache().get_or_compute("k", lambda: 1)
    assert [type(event) for event in seen] == [events.Computed]


def listen(event: events.Event) -> None:
    seen.append(event)


class Listener:
    def __call__(self, event: events.Event) -> None:
        listen(event)


def test_a_settings_file_turns_prometheus_on(tmp_path: Path) -> None:
    """A settings file can turn on Prometheus, with the cache's name as a label. The file may be read again."""
    file = tmp_path / "stampede.toml"
    file.write_text("[observers]\nprometheus = true\nopentelemetry = true\n[caches.by-its-name]\n")
    for computations in (1, 2):
        configure(file)
        get_cache("by-its-name").get_or_compute("k", lambda: 1)
        labels = {"cache": "by-its-name", "function": "", "why": "missing"}
        assert REGISTRY.get_sample_value("stampede_computations_total", labels) == computations


@pytest.mark.parametrize(
    "observers, message",
    [
        (
            {"promtheus": True},
            "observers.promtheus is True: did you mean 'prometheus'? Otherwise give a function of an event",
        ),
        ({"prometheus": 5}, "observers.prometheus is 5: give true or false"),
        ({"mine": "print"}, "observers.mine is 'print': give a function of an event, as 'package.module:name'; "),
        ([5], "observers.0 is 5: give a function"),
        (5, "observers is of type int: give a table, or a list of functions"),
        (
            {"mine": "no.such:thing"},
            "configure(): observers.mine names 'no.such:thing', which can't be imported: No m",
        ),
        ({"mine": "test_registry:nothing"}, "observers.mine names 'test_registry:nothing', which can't be imported: "),
    ],
)
def test_observers_that_can_not_be(observers: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        configure(observers=observers)
    assert message in str(caught.value)


def test_an_observer_of_a_file_that_can_not_be_is_named_with_the_file(tmp_path: Path) -> None:
    """If a settings file names a wrong observer, the error names the file."""
    file = tmp_path / "stampede.toml"
    file.write_text('[observers]\nmine = "no.such:thing"\n')
    with pytest.raises(OptionError, match=re.escape(f"{file}: observers.mine names 'no.such:thing', which can't")):
        configure(file)


# -- configure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "configured",
    [
        lambda path: configure(path),
        lambda path: configure(str(path)),
        lambda path: configure({"caches": {"default": {"ttl": 7}, "reports": {"ttl": 8}}}),
        lambda path: configure(caches={"default": {"ttl": 7}, "reports": {"ttl": 8}}),
    ],
)
def test_configure_takes_a_file_a_mapping_or_tables(configured: Any, tmp_path: Path) -> None:
    """`configure` accepts a file, a mapping, or tables as keywords, with the same effect."""
    file = tmp_path / "shop.toml"
    file.write_text('[caches.default]\nttl = 7\n[caches.reports]\nttl = "8s"\n')
    configured(file)
    assert get_cache().policy.ttl == 7
    assert get_cache("reports").policy.ttl == 8
    with pytest.raises(SettingsError, match="did you mean 'reports'"):
        get_cache("report")


def test_configure_takes_the_default_cache_s_own_settings() -> None:
    """`configure` accepts the settings of the default cache as keywords."""
    configure(url="memory://?entries=5", ttl=7)
    assert get_cache().policy.ttl == 7
    assert get_cache().engine.scheme == "memory"


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: configure(5), "give a file's path, a mapping or keywords"),
        (lambda: configure({}, ttl=5), "one of them"),
        (lambda: configure(tll=5), "did you mean 'ttl'"),
        (lambda: configure(ttl=-1), "ttl"),
        (lambda: configure(caches={"default": {"tll": 5}}), r"\[caches.default\].*did you mean 'ttl'"),
        (lambda: configure("/nowhere/at/all.toml"), "/nowhere/at/all.toml.*no such file"),
        (lambda: configure(caches=[1]), "table of tables"),
    ],
)
def test_wrong_settings_change_nothing(wrong: Any, message: str) -> None:
    """An error names the wrong setting. The earlier settings still apply, and their values remain stored."""
    configure(ttl=7)
    f = cached(counting())
    assert f() == 1
    with pytest.raises(SettingsError, match=message):
        wrong()
    assert get_cache().policy.ttl == 7
    assert f() == 1


def test_functions_bind_at_their_first_call_and_again_after_configure() -> None:
    """A function finds its cache at its first call, and again after `configure`. Older values are not served."""
    f = cached(counting())

    async def suspending() -> int:
        return 1

    g = cached(suspending)
    configure(ttl=7)
    assert f() == f() == 1
    assert f.peek().ttl == 7
    assert had(g()) == 1
    configure(ttl=8)
    assert f.peek() is None
    assert f() == f() == 2
    assert f.peek().ttl == 8
    assert had(g()) == 1
    assert had(g.peek()).ttl == 8


def test_configure_under_a_computation() -> None:
    """A computation that runs during `configure` ends in the old cache. The new cache does not serve its value."""
    origin = Origin()
    f = cached(lambda: origin())
    leader = Herd(f)
    origin.has_begun()
    configure(ttl=9)
    origin.let_on()
    assert leader.join() == [1]
    assert f() == 2
    assert f() == 2


@pytest.mark.parametrize("scheme", ["memory", "disk"])
def test_configure_again_and_again_while_threads_call(scheme: str, tmp_path: Path) -> None:
    """`configure` is safe while threads call: each call gets the value of its own arguments, and no error."""
    url = "memory://" if scheme == "memory" else f"disk://{tmp_path}/d"
    configure(url=url)
    f = cached(lambda x: x)
    stop = threading.Event()
    wrong: list[Any] = []

    def call(n: int) -> None:
        while not stop.is_set():
            if f(n) != n:
                wrong.append(n)

    callers = Herd(*[lambda n=n: call(n) for n in range(8)])
    for ttl in range(1, 40):
        configure(ttl=ttl, url=url)
    stop.set()
    assert callers.join() == [None] * 8
    assert wrong == []


@pytest.mark.parametrize("many", [False, True], ids=["call", "many"])
@pytest.mark.parametrize("url", ["memory://", "memory://?codec=sealed"])
def test_an_engine_that_the_function_itself_found_closed(url: str, many: bool, colour: str) -> None:
    """If a function uses another cache that is closed, the error reaches the caller. The function is called once."""
    calls = []
    with Cache("memory://") as other:
        pass

    def get(number: int) -> object:
        calls.append(number)
        return other.get("k")

    async def aget(number: int) -> object:
        return get(number)

    configure(url=url)
    function = cached(get if colour == "sync" else aget)
    with pytest.raises(EngineError, match="was closed"):
        had(function.many([(1,)]) if many else function(1))
    assert calls == [1]


# -- cache= -----------------------------------------------------------------------------------------------------------


def test_the_cache_of_a_function() -> None:
    """`cache=` may be a name, a Cache, or a function that returns a Cache."""
    mine = Cache(ttl=9)
    configure(caches={"default": {"ttl": 7}, "reports": {"ttl": 8}})
    functions = {7: cached(counting()), 8: cached(cache="reports")(counting()), 9: cached(cache=mine)(counting())}
    functions[10] = cached(cache=lambda: mine, ttl=10)(counting())
    for ttl, f in functions.items():
        f(ttl)
        assert f.peek(ttl).ttl == ttl
    assert functions[8].cache.policy == get_cache("reports").policy
    assert mine.cached(ttl=11)(counting())(5) == 1


def test_caches_of_two_names_are_two() -> None:
    """A function in one cache is not served from another cache."""
    configure(caches={"a": {}, "b": {}})

    def compute() -> str:
        return "a"

    first = cached(cache="a")(compute)
    second = cached(cache="b")(compute)
    assert first() == "a"
    assert second.peek() is None


def test_a_name_that_is_not_there() -> None:
    """An unknown name of a cache raises an error at each call. Once the name is configured, the function works."""
    f = cached(cache="reprots")(counting())
    configure(caches={"reports": {}})
    for _ in range(2):
        with pytest.raises(SettingsError, match="did you mean 'reports'"):
            f()
    configure(caches={"reprots": {}})
    assert f() == 1


@pytest.mark.parametrize("wrong", [5, None, b"default"])
def test_what_cache_can_not_be(wrong: Any) -> None:
    """A wrong `cache=` raises an error when the function is decorated."""
    with pytest.raises(OptionError, match="give a name of the settings, a Cache"):
        cached(cache=wrong)


def test_a_callable_that_returns_no_cache() -> None:
    """If a `cache=` function returns no Cache, the call raises an error that says so."""
    f = cached(cache=lambda: "default")(counting())  # type: ignore[arg-type, return-value]
    with pytest.raises(OptionError, match="must return a Cache"):
        f()


# -- where settings come from -----------------------------------------------------------------------------------------

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
from stampede import cached, get_cache
@cached
def f(): return 1
f(); f()
print("ttl", f.peek().ttl)
"""
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}


def run(cwd: Path, program: str = PROGRAM, **environ: str) -> str:
    return _well(python("-c", program, cwd=cwd, env={**ENVIRONMENT, **environ}))


def started(cwd: Path, program: str, **environ: str) -> str:
    """Return the output of a program in a new interpreter, because its imports are tested."""
    command, env = [sys.executable, "-c", program], {**ENVIRONMENT, **environ}
    return _well(subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60))


def _well(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_settings_is_memory_and_one_line_that_says_so(tmp_path: Path) -> None:
    """Without settings, values are stored in memory, and the log says so once."""
    out = run(tmp_path)
    assert out.count("INFO no settings") == 1
    assert "ttl 300" in out


def test_the_file_in_the_directory(tmp_path: Path) -> None:
    """`stampede.toml` in the current directory is read."""
    (tmp_path / "stampede.toml").write_text("[caches.default]\nttl = 7\n")
    out = run(tmp_path)
    assert "ttl 7" in out
    assert "no settings" not in out


def test_the_environment_beats_the_file_and_configure_beats_both(tmp_path: Path) -> None:
    """The environment overrides the file, and `configure` overrides both."""
    (tmp_path / "stampede.toml").write_text("[caches.default]\nttl = 7\n")
    (tmp_path / "other.toml").write_text("[caches.default]\nttl = 8\n")
    assert "ttl 8" in run(tmp_path, STAMPEDE_SETTINGS="other.toml")
    program = PROGRAM.replace("f(); f()", "from stampede import configure; configure(ttl=9); f()")
    assert "ttl 9" in run(tmp_path, program, STAMPEDE_SETTINGS="other.toml")


def test_importing_reads_no_settings(tmp_path: Path) -> None:
    """Importing and decorating read no settings. If the file is wrong, each call raises an error."""
    (tmp_path / "stampede.toml").write_text("[caches.default]\ntll = 7\n")
    program = """
from stampede import cached, SettingsError
@cached
def f(): return 1
for _ in range(2):
    try: f()
    except SettingsError as error: print(error)
"""
    assert started(tmp_path, program).count("did you mean 'ttl'") == 2


def test_disabled_by_the_environment(tmp_path: Path) -> None:
    """With `STAMPEDE_DISABLED=1`, calls run the functions without a cache, in the whole process."""
    program = """
from stampede import cached
calls = []
@cached
def f():
    calls.append(1)
    return len(calls)
print("values", f(), f(), f())
"""
    assert "values 1 2 3" in started(tmp_path, program, STAMPEDE_DISABLED="1")
    assert "values 1 1 1" in started(tmp_path, program, STAMPEDE_DISABLED="0")
    assert "values 1 1 1" in started(tmp_path, program, STAMPEDE_DISABLED="")


# -- for tests --------------------------------------------------------------------------------------------------------


def test_isolated_is_empty_and_leaves_nothing() -> None:
    """An `isolated()` block begins empty and leaves nothing behind, even if it ends with an error."""
    f = cached(counting())
    assert f() == 1
    with isolated(ttl=5):
        assert f() == 2
        assert f.peek().ttl == 5
        with isolated():
            assert f() == 3
            assert f.peek().ttl == 300
        assert f() == 2
    assert f() == 1

    def fails() -> None:
        with isolated():
            f()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert f() == 1


def test_isolated_ignores_the_settings_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`isolated()` ignores the settings file of the directory, so that tests do not use a developer's server."""
    (tmp_path / "stampede.toml").write_text("[caches.default]\nttl = 7\n")
    monkeypatch.chdir(tmp_path)
    with isolated():
        assert get_cache().policy.ttl == 300


def test_isolated_takes_settings_as_configure_does(tmp_path: Path) -> None:
    """`isolated` accepts settings as `configure` does, for example another engine."""
    with isolated(url=f"disk://{tmp_path}/cache"):
        f = cached(counting())
        assert [f(), f()] == [1, 1]
        assert get_cache().engine.scheme == "disk"


def test_isolated_has_a_cache_of_every_name() -> None:
    """In `isolated()`, there is a cache of each name, so that a test need not list those of its application."""
    f, g = cached(cache="reports")(counting()), cached(cache="prices")(counting())
    with isolated(ttl=5):
        assert [f(), f(), g(), f.peek().ttl] == [1, 1, 1, 5]
        assert get_cache("reports") is not get_cache("prices")
    with isolated(caches={"reports": {}}), pytest.raises(SettingsError, match="prices"):
        g()


@pytest.mark.parametrize("settings", [{}, {"local": True}, {"caches": {"default": {"ttl": 300}}}])
def test_isolated_by_a_clock(settings: Any) -> None:
    """With `clock=`, a test can move the time forward and need not wait."""
    clock = FakeClock()
    f = cached(stale="1h", early=0)(counting())
    with isolated(clock=clock, **settings):
        assert [f(), f()] == [1, 1]
        clock.advance(299)
        assert f() == 1 and f.peek().fresh == pytest.approx(1)
        clock.advance(2)
        assert f.peek().fresh <= 0 < f.peek().keep and [f(), f()] == [2, 2]
        clock.advance(3901)
        assert f.peek() is None and f() == 3
    with isolated(clock=clock, url="disk:///nowhere"), pytest.raises(SettingsError, match="clock"):
        f()


def test_who_configures_inside_of_isolated_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """`configure` with a server's URL inside `isolated()` logs a warning, because the test would use that server."""
    with isolated():
        configure(ttl=5)
        assert "configure()" not in caplog.text
    with isolated():
        configure(url="redis://:secret@localhost:6379/0")
    (told,) = [each for each in caplog.messages if "configure()" in each]
    assert "redis://" in told and "secret" not in told and "enter isolated() after" in told


def test_locks_of_isolated_exclude_nobody_outside() -> None:
    """A lock inside `isolated()` and a lock of the same name outside do not exclude each other."""
    from stampede import Lock, try_lock

    with Lock("isolated-nightly"), isolated(), Lock("isolated-nightly", wait=0):
        assert not try_lock("isolated-nightly").acquire()
    with try_lock("isolated-nightly") as lock:
        assert lock


def test_isolated_locks() -> None:
    """A lock on a cache inside `isolated()` is not the lock of the same name on the cache outside."""
    from stampede import Lock

    with Lock("nightly", on="default"), isolated(), Lock("nightly", on="default", wait=0):
        pass


def test_disabled_reaches_every_door() -> None:
    """`disabled()` also applies to `Cache` and `cache_without_dogpiling`. Nothing is stored in the block."""
    cache, compute = Cache(), counting()
    f = cached(cache=cache)(compute)
    with disabled():
        assert [f(), f()] == [1, 2]
        with disabled():
            assert f() == 3
        assert f() == 4
        assert [cache.get_or_compute("k", compute), cache.get_or_compute("k", compute)] == [5, 6]
        assert [cache_without_dogpiling("k", compute), cache_without_dogpiling("k", compute)] == [7, 8]
    assert f.peek() is None
    assert cache.get("k") is None
    assert [f(), f()] == [9, 9]


def test_what_few_need_is_not_imported(tmp_path: Path) -> None:
    """Modules that few programs need are not imported, so that processes start faster."""
    program = """
import sys
import stampede
with stampede.Cache("memory://") as cache: assert cache.get_or_compute("k", lambda: 1) == 1
assert not {"importlib.metadata", "email", "zipfile", "sqlite3"} & sys.modules.keys()
"""
    started(tmp_path, program)


def test_a_wrong_url_of_the_settings_is_named_with_its_file(tmp_path: Path) -> None:
    """If a settings file contains a wrong URL, the error names the file and the table."""
    (tmp_path / "stampede.toml").write_text('[caches.default]\nurl = "disk://var/cache"\n')
    program = """
import stampede
try: stampede.cached(lambda: 1)()
except stampede.SettingsError as error: print(error)
"""
    assert "stampede.toml: [caches.default] url: 'disk://var/cache' has two slashes" in run(tmp_path, program)


def test_testing_is_light_and_holds_what_it_names(tmp_path: Path) -> None:
    """`stampede.testing` works without pytest, and contains all names that it lists."""
    program = """
import sys
sys.modules["pytest"] = None
import stampede.testing as testing
with testing.isolated(), testing.disabled(): testing.FakeClock().advance(1)
assert "stampede.testing.conformance" not in sys.modules
"""
    started(tmp_path, program)
    import stampede.testing

    assert all(hasattr(stampede.testing, name) for name in stampede.testing.__all__)
    assert not hasattr(stampede.testing, "no_such_name")


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_function_decorated_twice_is_one(caplog: pytest.LogCaptureFixture) -> None:
    """If a function is decorated twice, both share its values. No warning is logged."""
    compute = counting()
    first, second = cached(compute), cached(ttl=5)(compute)
    with caplog.at_level(logging.WARNING, "stampede"):
        assert [first(), second(), first()] == [1, 1, 1]
    assert "test_registry" not in caplog.text


def test_versions_and_namespaces_keep_apart() -> None:
    """Functions with different versions or namespaces do not share values."""

    def compute() -> int:
        return next(numbers)

    numbers = iter(range(10))
    functions = [cached(version=v, namespace=n)(compute) for v in (1, "2") for n in ("a", "b")]
    assert [f() for f in functions] == [0, 1, 2, 3]
    assert [f() for f in functions] == [0, 1, 2, 3]
    assert len({f.key() for f in functions}) == 4


def test_a_cache_s_namespace_is_in_the_keys() -> None:
    """The namespace of a cache is part of its keys."""
    assert Cache(namespace="shop").cached(counting()).key(1).startswith("shop/")


# -- the helper -------------------------------------------------------------------------------------------------------


def test_cache_without_dogpiling() -> None:
    """`cache_without_dogpiling` takes a key, a function and a ttl, and other options by name."""
    compute = counting()
    assert cache_without_dogpiling("k", compute) == 1
    assert cache_without_dogpiling("k", compute) == 1
    assert cache_without_dogpiling("k2", compute, 60) == 2
    cache = get_cache()
    first, second = cache.peek("k"), cache.peek("k2")
    assert first is not None
    assert second is not None
    assert (first.ttl, second.ttl) == (300, 60)
    assert cache_without_dogpiling("k3", compute, 60, stale=5) == 3
    with pytest.raises(OptionError, match="did you mean 'stale'"):
        cache_without_dogpiling("k4", compute, stael=5)


def test_cache_without_dogpiling_of_an_async_function() -> None:
    """With an async function, `cache_without_dogpiling` returns an awaitable. Both colours share the key."""

    async def compute() -> int:
        return 5

    async def main() -> None:
        assert await cache_without_dogpiling("k", compute) == 5
        assert await cache_without_dogpiling("k", compute, 60) == 5

    asyncio.run(main())
    assert cache_without_dogpiling("k", lambda: 6) == 5


def test_the_cache_is_the_one_of_now() -> None:
    """`cache_without_dogpiling` uses the settings of the last `configure`."""
    assert cache_without_dogpiling("k", lambda: 1) == 1
    configure(ttl=5)
    assert cache_without_dogpiling("k", lambda: 2) == 2


# -- misspelt settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, said",
    [
        ("reddis://localhost:6379", "there is no engine 'reddis://': did you mean 'redis'"),
        ("quorum+redis://a,b,c", "there is no engine 'quorum+redis://': there are disk, "),
        ("disk:///x?max_byte=5", "has no option 'max_byte': did you mean 'max_bytes'"),
        ("disk://", "names no directory"),
        ("memory://?entires=5", "did you mean 'entries'"),
        ("memory://?codec=sealde", "codec is 'sealde': did you mean 'sealed'"),
        ("null://?a=1", "it takes none"),
        ("file://?a=1", "it takes none"),
        ("redis://localhost:notaport/0", "notaport"),
        ("redis://localhost/abc", "'abc' is not a database number"),
        ("redis://localhost/0?ttl=5", "has no option 'ttl': it takes those of redis-py"),
        ("redis://localhost/0?tracking=perhaps", "tracking is 'perhaps'"),
        ("redis+sentinel://localhost:26379", "name the service"),
        ("redis+cluster://localhost:0", "'0' is not a port"),
        ("memcached://localhost:port", "memcached://localhost:port: "),
        ("memcached://localhost?timeuot=1", "did you mean 'timeout'"),
    ],
)
def test_a_url_that_can_not_be_is_an_error_of_configure(url: str, said: str) -> None:
    """`configure` refuses a wrong URL. Otherwise, the application would start, and each request would fail."""
    with pytest.raises(SettingsError) as alone:
        configure(url=url)
    assert str(alone.value).startswith("configure(): url: ") and said in str(alone.value)
    with pytest.raises(SettingsError) as among:
        configure(caches={"default": {}, "reports": {"url": "memory://", "locks": url}})
    assert str(among.value).startswith("configure(): [caches.reports] locks: ") and said in str(among.value)
    assert get_cache().settings.url == "memory://"


def test_a_default_cache_that_is_misspelt_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """If the default cache is used, but only a cache with a similar name is configured, a warning says so."""
    configure(caches={"defualt": {}})
    f = cached(counting())
    with caplog.at_level(logging.WARNING, "stampede"):
        assert f(1) == f(1) == 1
    assert caplog.text.count("configure(): there is no [caches.default], only 'defualt': is 'defualt' meant?") == 1


def test_who_never_asks_for_a_default_cache_needs_none(caplog: pytest.LogCaptureFixture) -> None:
    """If the default cache is never used, no warning says that it is not configured."""
    configure(caches={"shop": {}, "reports": {}})
    with caplog.at_level(logging.WARNING, "stampede"):
        assert cached(cache="shop")(counting())(1) == 1
        get_cache("reports").set("k", 1)
    assert "caches.default" not in caplog.text


def test_the_codec_of_a_memory_url_is_the_one_that_encodes() -> None:
    """The codec in a memory URL encodes the values, so that a test in memory finds what production's codec refuses."""
    value = {1: (1, 2)}
    for name, kept in (("sealed", True), ("msgpack", False), ("json", False)):
        with Cache(f"memory://?codec={name}") as cache:
            assert cache.get_or_compute("k", lambda: value) == value
            assert (cache.peek("k") is not None) == kept
    with Cache("memory://?codec=sealed", codec="json") as cache:
        assert cache.get_or_compute("k", lambda: value) == value and cache.peek("k") is None


def test_a_closed_cache_says_the_way_on() -> None:
    """The error of a closed cache says to call `configure` again. After that, the function works."""
    configure(url="memory://")
    f = cached(counting())
    f(1)
    get_cache().close()
    with pytest.raises(EngineClosed, match=r"call configure\(\) again, for example in the lifespan"):
        f(2)
    configure(url="memory://")
    assert f(1) == 2
