"""Bad input raises an error of the library as early as possible. The error names the input and the remedy."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property, partial, update_wrapper
from pathlib import Path
from typing import Any

import pytest

from stampede import (
    Cache,
    CodecError,
    EngineError,
    KeyingError,
    Lock,
    MissingExtra,
    OptionError,
    SettingsError,
    StampedeError,
    cached,
    configure,
    try_lock,
)
from stampede.testing import isolated


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated(caches={}):
        yield


def plain(x: Any = 1) -> Any:
    return x


def generator() -> Iterator[int]:
    yield 1


async def coroutine(x: Any) -> str:
    return str(x)


async def async_generator() -> Any:
    yield 1


def asked_twice(**options: Any) -> Any:
    cache = Cache()
    cache.get_or_compute("k", int)
    return cache.get_or_compute("k", int, **options)


# Each entry: the call, its error, its builtin base class, and a pattern of its text.
AT_ONCE: list[tuple[Callable[[], object], type[Exception], type[Exception], str]] = [
    (lambda: cached(ttl=-1), OptionError, ValueError, "ttl is -1.*at least 0"),
    (lambda: cached(ttl=math.nan), OptionError, ValueError, "ttl is nan"),
    (lambda: cached(ttl="soon"), OptionError, ValueError, "ttl is 'soon'.*'10m'"),
    (lambda: cached(ttl=b"60"), OptionError, ValueError, "ttl is b'60'.*seconds"),  # type: ignore[call-overload]
    (lambda: cached(ttl=True), OptionError, ValueError, "ttl is True"),
    (lambda: cached(ttl=timedelta(seconds=-1)), OptionError, ValueError, "ttl"),
    (lambda: cached(wait=-1), OptionError, ValueError, "wait is -1"),
    (lambda: cached(stale=-1), OptionError, ValueError, "stale is -1"),
    (lambda: cached(lease=0), OptionError, ValueError, "lease is 0.*more than 0"),
    (lambda: cached(lease=math.inf), OptionError, ValueError, "lease is inf"),
    (lambda: cached(max_hold=0), OptionError, ValueError, "max_hold is 0"),
    (lambda: cached(jitter=1), OptionError, ValueError, "jitter is 1.*fraction"),
    (lambda: cached(early=-1), OptionError, ValueError, "early is -1"),
    (lambda: cached(background=1), OptionError, ValueError, "background is 1.*True or False"),  # type: ignore[call-overload]
    (lambda: cached(cache_if=5), OptionError, ValueError, "cache_if is 5.*function"),  # type: ignore[call-overload]
    (lambda: cached(raises=5), OptionError, ValueError, "raises holds 5"),  # type: ignore[call-overload]
    (lambda: cached(raises=KeyboardInterrupt), OptionError, ValueError, "raises holds"),  # type: ignore[call-overload]
    (lambda: cached(tll=5), OptionError, ValueError, "no option 'tll'.*did you mean 'ttl'"),  # type: ignore[call-overload]
    (lambda: cached(codec="sealde"), OptionError, ValueError, "codec is 'sealde'.*did you mean 'sealed'"),
    (lambda: cached(compress=-1), OptionError, ValueError, "compress is -1"),
    (lambda: cached(max_bytes="many"), OptionError, ValueError, "max_bytes is 'many'"),  # type: ignore[call-overload]
    (lambda: cached(trust=[5]), OptionError, ValueError, "trust holds 5"),  # type: ignore[call-overload, list-item]
    (lambda: cached(signing_key=[]), OptionError, ValueError, "signing_key is an empty list"),
    (lambda: asked_twice(tll=5), OptionError, ValueError, "did you mean 'ttl'"),
    (lambda: cached(lambda a, b: a).many(["ab"]), OptionError, ValueError, "one call's arguments"),
    (lambda: cached(lambda a, b: a).many([{1: 2}]), OptionError, ValueError, "one call's arguments"),
    (lambda: cached(signing_key=""), OptionError, ValueError, "signing_key holds an empty string"),
    (lambda: cached(version=1.5), OptionError, ValueError, "version is 1.5"),  # type: ignore[call-overload]
    (lambda: cached(property(plain)), OptionError, ValueError, "between @property and the def"),
    (lambda: cached(cached_property(plain)), OptionError, ValueError, "between @property and the def"),
    (lambda: cached(partial(plain, 1)), OptionError, ValueError, "write a def that calls it"),
    (lambda: cached(update_wrapper(partial(plain, 1), plain)), OptionError, ValueError, "write a def that calls it"),
    (lambda: cached(int), OptionError, ValueError, "class int.*a def that makes an object"),
    (lambda: cached(key=5), OptionError, ValueError, "key is 5.*function"),  # type: ignore[call-overload]
    (lambda: cached(key="{y}")(plain), OptionError, ValueError, "'y'.*'x'|did you mean 'x'|there are x"),
    (lambda: cached(key="{x")(plain), OptionError, ValueError, "key"),
    (lambda: cached(key=coroutine)(plain), OptionError, ValueError, "give a plain function"),
    (lambda: cached(ignore="y")(plain), OptionError, ValueError, "ignore names 'y'.*plain"),
    (lambda: cached(generator), OptionError, ValueError, "generator is a generator function"),
    (lambda: cached(async_generator), OptionError, ValueError, "async_generator is a generator function"),
    (lambda: cached(5), OptionError, ValueError, "applied to 5.*options are named"),  # type: ignore[call-overload]
    (lambda: cached(60)(plain), OptionError, ValueError, "applied to 60"),  # type: ignore[call-overload]
    (lambda: Cache("memroy://"), OptionError, ValueError, "no engine 'memroy://'.*did you mean 'memory'"),
    (lambda: Cache("memory"), SettingsError, ValueError, "url is 'memory'.*without a scheme"),
    (lambda: Cache("memory://?entires=5"), OptionError, ValueError, "entires.*did you mean 'entries'"),
    (lambda: Cache("memory://?entries=0"), OptionError, ValueError, "entries"),
    (lambda: Cache(ttl=-1), SettingsError, ValueError, "ttl is -1"),
    (lambda: Cache(tll=1), SettingsError, ValueError, "tll.*did you mean 'ttl'"),
    (lambda: Cache("file:///tmp"), OptionError, ValueError, "stores no values.*locks="),
    (lambda: Cache(codec="pickle"), SettingsError, ValueError, "pickle.*signing_key"),
    (lambda: Cache(on_engine_error="riase"), SettingsError, ValueError, "did you mean 'raise'"),
    (lambda: Cache(trust=["no.such.Thing"]), OptionError, ValueError, "no.such.Thing.*can't be imported"),
    (lambda: Cache().get_or_compute(5, plain), KeyingError, TypeError, "key 5.*give a str"),  # type: ignore[arg-type]
    (lambda: Cache().get_or_compute("k", 5), OptionError, ValueError, "'k' is 5.*callable"),  # type: ignore[arg-type]
    (lambda: Cache().get_or_compute("k", plain, tll=5), OptionError, ValueError, "did you mean 'ttl'"),  # type: ignore[call-arg]
    (lambda: Cache().set("k", 1, ttl=-1), OptionError, ValueError, "ttl is -1"),
    (lambda: try_lock("a", wait=5), OptionError, ValueError, "never waits.*Lock"),  # type: ignore[call-arg]
    (lambda: Lock("", on="memory://"), OptionError, ValueError, "name of a lock is ''"),
    (lambda: Lock(5, on="memory://"), OptionError, ValueError, "name of a lock is 5"),  # type: ignore[arg-type]
    (lambda: Lock("a", on="memroy://"), OptionError, ValueError, "did you mean 'memory'"),
    (lambda: Lock("a", on=5), OptionError, ValueError, "on is 5.*URL"),  # type: ignore[arg-type]
    (lambda: Lock("a", on="memory://", lease=0), OptionError, ValueError, "lease is 0"),
    (lambda: Lock("a", on="memory://", wait=-1), OptionError, ValueError, "wait is -1"),
    (lambda: Lock("a", on="memory://", release_via=5), OptionError, ValueError, "release_via is 5.*function"),
    (lambda: Lock("a", on="no-such-cache"), SettingsError, ValueError, "no-such-cache"),
    (lambda: try_lock("", on="memory://"), OptionError, ValueError, "name of a lock is ''"),
]


@pytest.mark.parametrize("number", range(len(AT_ONCE)))
def test_errors_of_the_line_that_is_wrong(number: int) -> None:
    """Wrong input raises an error in the line that contains it, and not in a later call."""
    act, kind, family, text = AT_ONCE[number]
    with pytest.raises(kind, match=text) as caught:
        act()
    assert isinstance(caught.value, StampedeError)
    assert isinstance(caught.value, family)


@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_codecs_that_are_not_installed(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec that is not installed raises an error when the function is decorated."""
    for name in [name for name in sys.modules if name.startswith(("msgspec", f"stampede.codecs.{codec}"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(MissingExtra, match=rf"codec='{codec}' needs msgspec: pip install 'stampede-guard\["):
        cached(codec=codec)


def test_an_argument_that_can_not_be_a_key() -> None:
    """An argument that cannot be part of a key raises an error that names the function and the parameter."""
    f = cached(plain)
    with pytest.raises(KeyingError, match=r"plain: parameter 'x'.*object"):
        f(object())
    assert f(1) == 1
    for verb in (f.key, f.peek, f.refresh, f.invalidate, f.expire):
        with pytest.raises(KeyingError, match="parameter 'x'"):
            verb(object())
    with pytest.raises(KeyingError, match="parameter 'x'"):
        f.set("value", object())


class Foreign:
    """A class that no codec can store."""


@pytest.mark.parametrize("url", ["memory://?codec=sealed", "disk"])
def test_a_value_that_the_codec_can_not_hold(url: str, tmp_path: Path) -> None:
    """Callers get a value that cannot be stored, and no stale value in its place. The key is not locked."""
    values: list[Any] = [1, Foreign(), Foreign(), 2]
    cache = Cache(f"disk://{tmp_path}/c" if url == "disk" else url, stale=60)
    f = cache.cached(lambda: values.pop(0))
    assert f() == 1
    f.expire()
    for _ in range(2):
        started = time.monotonic()
        assert isinstance(f(), Foreign)
        assert time.monotonic() - started < 5
    assert f.stats().unkept == 2
    assert f() == 2
    with pytest.raises(CodecError, match="Foreign"):
        f.set(Foreign())
    assert f() == 2
    cache.close()


def test_a_value_that_is_too_large(tmp_path: Path) -> None:
    """A value that is too large is returned and not stored. No error is raised."""
    cache = Cache(f"disk://{tmp_path}/c", max_bytes=1000)
    f = cache.cached(lambda n: "x" * n)
    assert [len(f(10)), len(f(10_000)), len(f(10_000))] == [10, 10_000, 10_000]
    assert f.peek(10_000) is None
    assert f.stats().unkept == 2
    cache.close()


@pytest.mark.parametrize("wrong", [-1, math.nan, "soon", object()])
def test_a_ttl_function_that_answers_nonsense(wrong: Any) -> None:
    """If a `ttl` function returns an invalid value, the call raises an error. The next call need not wait."""
    answers = [wrong, 60]
    f = cached(ttl=lambda value: answers.pop(0))(plain)
    with pytest.raises(OptionError, match="as the function returned it"):
        f(1)
    started = time.monotonic()
    assert f(1) == 1
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("option", ["ttl", "cache_if"])
def test_an_option_s_function_that_fails(option: str) -> None:
    """If the function of an option fails, its error reaches the caller. The key does not remain locked."""
    answers: list[Any] = [ZeroDivisionError(), 60]

    def function(value: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    f = cached(**{option: function})(plain)  # type: ignore[call-overload]
    with pytest.raises(ZeroDivisionError):
        f(1)
    started = time.monotonic()
    assert f(1) == 1
    assert time.monotonic() - started < 5


def test_a_key_function_that_fails_or_answers_nonsense() -> None:
    """If the key function fails or returns an invalid key, the call raises an error."""
    with pytest.raises(ZeroDivisionError):
        cached(key=lambda x: 1 / 0)(plain)(1)
    with pytest.raises(KeyingError):
        cached(key=lambda x: object())(plain)(1)


def test_a_directory_that_can_not_be_written() -> None:
    """If a directory cannot be created, the first use raises an error. (In `/proc`, not even root can create one.)"""
    for url in ("disk:///proc/nowhere", "file:///proc/nowhere"):
        with pytest.raises(EngineError, match=r"/proc/nowhere.*directory") as caught:
            Lock("a", on=url).acquire()
        assert isinstance(caught.value, ConnectionError)
        assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(EngineError, match=r"/proc/nowhere.*give a directory that can be made"):
        Cache("disk:///proc/nowhere").set("k", 1)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[caches.default]\nurl = 5", r"\[caches.default\] url is of type int"),
        ("[caches.default]\nttl = -1", r"\[caches.default\] ttl is -1"),
        ("[caches.default]\nurll = 'memory://'", "urll.*did you mean 'url'"),
        ("[cache.default]\nttl = 1", "cache.*did you mean 'caches'"),
        ("ttl = 5", r"ttl.*write it under \[caches.default\]"),
        ("[caches.default", "it isn't TOML"),
        ("[caches.default]\nurl = '${NO_SUCH_VARIABLE}'", "environment has no 'NO_SUCH_VARIABLE'"),
        ("[origins.db]\nrate = 'fast'", r"\[origins.db\] rate is 'fast'"),
    ],
)
def test_a_wrong_settings_file(tmp_path: Path, text: str, message: str) -> None:
    """The error of a wrong settings file names the file, the table and the key, and suggests a correction."""
    file = tmp_path / "stampede.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        configure(file)
    assert str(file) in str(caught.value)
    assert cached(plain)(1) == 1


def test_an_unreadable_settings_file(tmp_path: Path) -> None:
    """A settings file that is a directory, not text or missing raises an error that says so."""
    with pytest.raises(SettingsError, match="is a directory"):
        configure(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="isn't UTF-8"):
        configure(tmp_path / "binary.toml")
    with pytest.raises(SettingsError, match="no such file"):
        configure(tmp_path / "nothing.toml")
