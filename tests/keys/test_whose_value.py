"""A value is served only to the function that computed it."""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import python

from stampede import Cache, OptionError, cached, configure, get_cache
from stampede.keys import identity_of
from stampede.testing import isolated


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    with isolated():
        yield


def at_the_top(x: int) -> int:
    return x


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name

    def price(self, item: str) -> str:
        return f"{item} of {self.name}"

    @classmethod
    def kind(cls) -> str:
        return cls.__name__


class Stall(Shop):
    pass


# -- functions that are bound to an object ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bound", [Shop("a").price, Stall.kind, ",".join, {}.get, str.upper, np.add.reduce], ids=lambda it: it.__name__
)
def test_a_method_of_one_object_is_refused(bound: Callable[..., Any]) -> None:
    """`self.price = cached(self.price)` is refused: all objects would get the values of the first one."""
    with pytest.raises(OptionError, match=r"applied to .*def"):
        cached(bound)


def test_a_decorated_method_of_one_object_is_told_by_its_object() -> None:
    """A decorated method of one object is identified by the object. Its name is the same for all objects."""

    def decorated(function: Callable[[str], str]) -> Callable[[str], str]:
        @wraps(function)
        def inner(item: str) -> str:
            return function(item)

        return inner

    first, second = (identity_of(decorated(Shop(name).price)) for name in "ab")
    assert not first.named and not second.named and first.code != second.code


def test_what_its_name_tells_is_no_method_of_one_object() -> None:
    """Class methods, builtins and C functions are identified by their names, and can be cached."""
    assert [cached(Shop.kind)(), cached(int.from_bytes)(b"a", "big"), cached(math.sqrt)(4.0)] == ["Shop", 97, 2.0]


def test_a_function_of_c_is_called_as_its_caller_does() -> None:
    """A C function gets only the arguments that its caller passed. Its declared defaults may be wrong."""
    assert [cached(np.sqrt)(4.0), cached(sorted)([2, 1]), cached(np.array)([1]).tolist()] == [2.0, [1, 2], [1]]


# -- functions without a name of their own ----------------------------------------------------------------------------


def test_two_lambdas_are_two() -> None:
    """Two lambdas have the same name, but never get each other's values."""
    double, triple = cached(lambda x: x * 2), cached(lambda x: x * 3)
    assert [double(5), triple(5), double(5)] == [10, 15, 10]


def test_two_closures_of_one_factory_are_two() -> None:
    """Closures of one factory have values of their own: `make(2)(5)` is 10, and `make(3)(5)` is 15."""

    def make(n: Any) -> Callable[[int], Any]:
        @cached
        def times(x: int) -> Any:
            return n * x

        return times

    assert [make(n)(5) for n in (2, 3, 2.0, True, "a")] == [10, 15, 10.0, 5, "aaaaa"]
    assert repr(make(2.0)(5)) == "10.0"


@pytest.mark.parametrize("captured", [lambda n: [n], lambda n: {"n": n}, lambda n: lambda: n, lambda n: str(n).zfill])
def test_whatever_a_closure_captures(captured: Callable[[int], Any]) -> None:
    """A captured list, dict, function or bound method distinguishes one closure from another."""

    def make(it: Any) -> Any:
        @cached
        def told(x: int) -> str:
            return str(it() if callable(it) and it.__name__ == "<lambda>" else it(3) if callable(it) else it)

        return told

    values = [make(captured(n))(1) for n in (1, 2)]
    assert values[0] != values[1]


def test_a_default_without_a_text_is_captured_too() -> None:
    """A default without a text is in no key. A second function with another such default is refused."""

    def make(session: Any) -> Any:
        @cached
        def of(x: int, session: Any = session) -> int:
            return id(session)

        return of

    make(object())(1)
    with pytest.raises(OptionError, match="another session"):
        make(object())

    def made(session: Any) -> Any:
        @cached(ignore="session")
        def of(x: int, session: Any = session) -> int:
            return x

        return of

    assert made(object())(1) == made(object())(1)  # an ignored parameter does not matter


def test_what_cannot_be_keyed_is_an_error_at_decoration() -> None:
    """A second function with another captured session is refused, not just logged: it would get wrong values."""

    def make(session: Any, n: int = 0) -> Any:
        @cached
        def of(x: int) -> int:
            return id(session) + n

        return of

    session = threading.Lock()
    first = make(session)
    assert first(1) == make(session)(1)  # the same session
    with pytest.raises(OptionError, match=r"decorated again.*another session.*version=.*namespace=.*key="):
        make(threading.Lock())
    assert make(threading.Lock(), 1)(1)  # n distinguishes it


@pytest.mark.parametrize("remedy", ["version", "namespace", "key"])
def test_the_remedies_that_it_names(remedy: str) -> None:
    """Each remedy that the error names works."""

    def make(name: str) -> Any:
        session = threading.Lock()

        @cached(**{remedy: name if remedy != "key" else f"{name}:{{x}}"})
        def of(x: int) -> str:
            return f"{name}{id(session) and x}"

        return of

    assert [make(name)(1) for name in "ab"] == ["a1", "b1"]


def test_what_is_captured_after_the_decoration() -> None:
    """A function that calls itself, or uses a variable that is assigned after the decoration, is distinguished too."""

    def make(n: int) -> Any:
        @cached
        def power(x: int) -> int:
            return k * power(x - 1) if x else 1

        k = n
        return power

    assert [make(2)(3), make(3)(3)] == [8, 27]


CAPTURING = """
import re, numpy, pandas
from stampede import cached
class Model:
    def __init__(self, weights): self.weights, self.me = weights, self
    def predict(self, x): return x
def make(it):
    return cached(lambda x: it)
for n in (1, 2):
    frame = pandas.DataFrame({"a": ["b"] * n}, index=pandas.date_range("2026", periods=n, tz="UTC"))
    model = Model([n])
    for it in (numpy.arange(n), {"a": numpy.float64(n)}, re.compile("a" * n), (pandas.Series([n]), {"x", "y"}), frame,
               model, model.predict):
        print(make(it).key(1))
"""


def test_what_is_captured_is_told_by_what_it_holds(tmp_path: Path) -> None:
    """Captured objects are identified by their content: the keys are the same in another process, and all differ."""
    script = tmp_path / "script.py"
    script.write_text(CAPTURING)
    here, there = (_started([str(script)], tmp_path, PYTHONHASHSEED=seed).split() for seed in ("1", "2"))
    assert here == there
    assert len({*here}) == len(here) == 14


def test_a_cell_over_a_frame_may_be_run_again() -> None:
    """A notebook cell that captures an array may be run again: the array is a new object with the same content."""
    numpy = pytest.importorskip("numpy")

    def make() -> Any:
        array = numpy.arange(5)
        return cached(lambda x: array[x])

    assert make()(1) == make()(1) == 1


def test_what_nothing_can_tell_is_told_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a shared cache's function captures an object without a text, a warning says that others may differ."""

    def make(cache: Cache, **options: Any) -> Any:
        lock = threading.Lock()
        return cache.cached(**options)(lambda x: lock and x)

    with Cache(f"disk://{tmp_path}") as shared:
        assert make(shared)(1) == 1
        assert [record.getMessage() for record in caplog.records if "has captured lock" in record.getMessage()]
        caplog.clear()
        assert make(shared, version=2)(1) == make(Cache())(1) == 1
    assert not caplog.records


FACTORY = """
import os, sys
from stampede import Cache
class Config:
    def __init__(self):
        self.secret = os.urandom(8)
class Database:
    def __init__(self, config):
        self.config = config
    def price(self, article):
        return sys.argv[2]
def create_app(cache, **options):
    db = Database(Config())
    return [
        cache.cached(**options)(lambda article: db.price(article)),
        cache.cached(**options)((lambda ask: lambda article: ask(article))(db.price)),
        cache.cached.many(**options)(lambda ids: {id: db.price(id) for id in ids}),
    ]
with Cache(f"disk://{sys.argv[1]}") as cache:
    versioned, plain = create_app(cache, version=1), create_app(cache)
    print(versioned[0].key("tea"), versioned[1].key("tea"), versioned[2].one.key("tea"))
    print(versioned[0]("tea"), versioned[1]("tea"), versioned[2](["tea"])["tea"])
    print(plain[0].key("tea"), plain[1].key("tea"), plain[2].one.key("tea"))
"""


def test_an_application_factory_whose_objects_differ_between_processes(tmp_path: Path) -> None:
    """With a version=, processes share the values of such functions. Without, they do not, and a warning says so."""
    script = tmp_path / "script.py"
    script.write_text(FACTORY)
    one, two = (python(script, tmp_path / "cache", value, cwd=tmp_path) for value in ("first", "second"))
    (alike, values, unlike), (alike_2, values_2, unlike_2) = one.stdout.splitlines(), two.stdout.splitlines()
    assert alike == alike_2
    assert values == values_2 == "first first first"
    assert not {*unlike.split()} & {*unlike_2.split()}
    assert len(re.findall(r"has captured (?:db|ask), whose state is part of its keys", one.stderr)) == 3
    assert one.stderr.count("give a version= (other than 'code')") == 3


def test_advice_fits_a_version_that_follows_the_code() -> None:
    """If a function with version="code" is refused, the advice is to give it another version=."""
    cache = Cache()

    def make(it: Any) -> Any:
        return cache.cached(version="code")(lambda x: (it, x))

    make(threading.Lock())
    with pytest.raises(OptionError, match=r"by a version= \(other than 'code'\)"):
        make(threading.Lock())


def test_data_that_is_captured_is_told_apart_also_with_a_version() -> None:
    """With a version=, closures over different data have different values. Other captured objects do not count."""
    cache = Cache()

    def make(it: Any) -> Any:
        return cache.cached(version=1)(lambda x: (it, x))

    assert make(1)(5) == (1, 5)
    assert make(2)(5) == (2, 5)
    first, second = threading.Lock(), threading.Lock()
    assert make(first)(5) == make(second)(5) == (first, 5)


def test_a_function_in_a_function_that_calls_itself() -> None:
    """A recursive inner function captures itself, a new object in each call. It can still be used twice."""

    def solve(n: int) -> int:
        @cached
        def go(k: int) -> int:
            return 1 + go(k - 1) if k else 0

        return go(n)

    assert [solve(3), solve(4)] == [3, 4]


def test_two_caches_know_nothing_of_each_other() -> None:
    """If a factory makes a cache for each function, its second function is not refused."""

    def make(cache: Cache) -> Any:
        lock = threading.Lock()
        return cache.cached(lambda x: (x, id(lock)))

    assert make(Cache())(1) != make(Cache())(1)


def test_who_decorates_before_the_settings_are_known() -> None:
    """Functions decorated before and after `configure` share a cache: the second one to be called is refused."""

    def make() -> Any:
        lock = threading.Lock()

        @cached
        def of(x: int) -> int:
            return id(lock)

        return of

    before = make()
    configure(ttl=60)
    behind = make()
    behind(1)
    with pytest.raises(OptionError, match="another lock"):
        before(1)


def test_a_decorated_lambda_between() -> None:
    """A wrapper has the name of the function it wraps, but its own code. Two wrapped lambdas have their own values."""

    def plus(n: int) -> Any:
        def decorate(function: Any) -> Any:
            @wraps(function)
            def wrapper(x: int) -> Any:
                return function(x) + n

            return wrapper

        return decorate

    one, two = cached(plus(1)(lambda x: x)), cached(plus(2)(lambda x: x))
    assert [one(1), two(1)] == [2, 3]


# -- functions with a name --------------------------------------------------------------------------------------------


def test_a_name_that_tells_is_all_that_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An importable function is identified by its name alone, so new code does not empty its cache."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "shop_of_whose_value.py"
    keys = []
    for source in ("def price(x): return 1", "def price(x): return 2"):
        module.write_text(source)
        out = _run(
            ["-c", "import shop_of_whose_value as s, stampede; print(stampede.cached(s.price).key(1))"], tmp_path
        )
        keys.append(out)
    assert keys == ["shop_of_whose_value:price:(1)"] * 2


def test_the_version_may_follow_the_code() -> None:
    """With version="code", new code makes new keys. Moved code and changed comments do not."""

    def versions(source: str) -> str:
        variables: dict[str, Any] = {"__name__": __name__}
        exec(source, variables)
        return str(cached(version="code")(variables["f"]).key(1))

    assert (
        versions("def f(x): return 1") == versions("\n\ndef f(x): return 1  # moved") != versions("def f(x): return 2")
    )
    assert "#" in cached(version="code")(at_the_top).key(1)
    assert cached(at_the_top).key(1) == f"{__name__}:at_the_top:(1)"


def test_a_fingerprint_is_the_same_in_every_process(tmp_path: Path) -> None:
    """A fingerprint does not depend on the order of sets, which differs between processes."""
    script = tmp_path / "script.py"
    script.write_text(
        "from stampede import cached\n"
        "def make(n):\n"
        "    return cached(lambda x: x in {'a', 'b', 'c', 'd'} and n or (lambda: {'e', 'f', 'g'}))\n"
        "print(make({'x', 'y', 'z'}).key(1))\n"
    )
    assert len({_started([str(script)], tmp_path, PYTHONHASHSEED=seed) for seed in "01"}) == 1  # the order differs


def test_what_is_loaded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a module is reloaded, its old and its new function each return their own values."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "reloaded_of_whose_value.py"
    source = "from stampede import cached\n@cached\ndef price(x):\n    return {}\n"
    file.write_text(source.format(1))
    module: Any = importlib.import_module(file.stem)
    try:
        older = module.price
        assert older(1) == 1
        for value in ("2 + 0 * x", "3 - 0 * x"):
            file.write_text(source.format(value))
            importlib.reload(module)
            assert module.price(1) == int(value[0])
            assert older(1) == 1
        file.write_text(source.format(1))
        importlib.reload(module)
        assert module.price(1) == 1
        assert module.price.key(1) == older.key(1)
    finally:
        sys.modules.pop(file.stem)


# -- scripts and notebooks --------------------------------------------------------------------------------------------

SCRIPT = """
from stampede import Cache
cache = Cache("disk://{path}/cache")
@cache.cached(ttl=600)
def price(x):
    return {value}
print(price(1))
"""


@pytest.mark.parametrize("by", ["path", "stdin", "-c"])
def test_an_edited_script(tmp_path: Path, by: str) -> None:
    """An edited script never gets values that its old version stored. Two programs on stdin never share values."""
    for value in ("1", "2"):
        source, script = SCRIPT.format(path=tmp_path, value=value), tmp_path / "script.py"
        script.write_text(source)
        out = {
            "path": lambda script=script: _run([str(script)], tmp_path),
            "stdin": lambda source=source: _started(["-"], tmp_path, source),
            "-c": lambda source=source: _run(["-c", source], tmp_path),
        }[by]()
        assert out == value


def test_a_cell_that_is_run_again() -> None:
    """A corrected notebook cell never gets values that its old version computed."""
    cache, cell = Cache(), "@cached\ndef f(x):\n    return {}"
    variables: dict[str, Any] = {"__name__": "__main__", "cached": cache.cached}
    for value in ("1", "2", "1"):
        exec(cell.format(value), variables)
        assert variables["f"](0) == int(value)


def test_a_module_that_is_run_by_its_name(tmp_path: Path) -> None:
    """`python -m shop` and a process that imports shop use the same keys, so they share values."""
    (tmp_path / "shop.py").write_text("import stampede\ndef f(x): return x\nprint(stampede.cached(f).key(1))\n")
    assert _run(["-m", "shop"], tmp_path) == _run(["-c", "import shop"], tmp_path) == "shop:f:(1)"


def test_methods_of_a_class_in_a_function() -> None:
    """A method that uses `super` captures its class, which has no text and does not exist yet. It can be cached."""

    def make(n: int) -> Any:
        class Shop:
            def __stampede_key__(self) -> int:
                return 0

            @cached
            def price(self, x: int) -> int:
                return n + x + (super().__init__() or 0)  # type: ignore[func-returns-value]

        return Shop()

    assert [make(1).price(1), make(2).price(1), make(1).price(1)] == [2, 3, 2]


# -- a key that was chosen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["", "shop"])
def test_a_chosen_key_is_the_whole_key(namespace: str) -> None:
    """A chosen key is the whole key: `get_cache().invalidate("user:1")` removes the value."""
    configure(namespace=namespace)
    values = iter(range(9))

    @cached(key="user:{id}")
    def user(id: int) -> int:
        return next(values)

    assert [user(1), user(1), user.cache.get("user:1")] == [0, 0, 0]
    assert get_cache().invalidate("user:1")
    assert user(1) == 1
    get_cache().set("user:1", 7)
    assert user(1) == 7
    assert user.stats().computations == 2


def test_two_functions_of_one_template_share_on_purpose() -> None:
    """Two functions with the same `key=` share values, because a chosen key is the whole key."""
    one = cached(key="user:{id}")(lambda id: "one")
    two = cached(key="user:{id}")(lambda id: "two")
    assert [one(1), two(1), two(2), one(2)] == ["one", "one", "two", "two"]


def test_all_of_a_chosen_key_is_refused() -> None:
    """`invalidate_all` is refused for a function with `key=`: its entries can't be told from others."""
    with pytest.raises(OptionError, match=r"key=.*clear"):
        cached(key="user:{x}")(lambda x: x).invalidate_all()


def test_a_function_that_says_that_it_wraps_itself() -> None:
    """A function may claim that it wraps itself. The search for the inmost function ends all the same."""

    def wheel(x: int) -> int:
        return x

    wheel.__wrapped__ = wheel  # type: ignore[attr-defined]
    assert identity_of(at_the_top).named
    assert not identity_of(wheel).named


def _started(arguments: list[str], cwd: Path, stdin: str = "", **env: str) -> str:
    """Return the output of a new interpreter."""
    command = [sys.executable, *arguments]
    return _said(
        subprocess.run(command, cwd=cwd, input=stdin, text=True, capture_output=True, timeout=60, env=_env(cwd) | env)
    )


def _run(arguments: list[str], cwd: Path) -> str:
    return _said(python(*arguments, cwd=cwd, env=_env(cwd)))


def _env(cwd: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{cwd}"}


def _said(done: subprocess.CompletedProcess[str]) -> str:
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_a_captured_application_is_walked_through_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A captured application is examined once, not once for each of its functions. The warning names the variable."""

    def create() -> Any:
        app = App()
        for n in range(12):
            app.views[f"/{n}"] = lambda: (app, n)
        return cached(lambda x: app and x)

    with isolated(url=f"disk://{tmp_path}"), caplog.at_level(logging.WARNING, "stampede"):
        began = time.monotonic()
        assert create()(1) == 1
        assert time.monotonic() - began < 30
    (warning,) = [each for each in caplog.messages if "has captured" in each]
    assert "has captured app, " in warning


class App:
    """An object like a web framework's application: it refers to its views, and they refer to it."""

    def __init__(self) -> None:
        self.views: dict[str, Any] = {}
