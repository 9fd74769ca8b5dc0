"""Engines by URL: the known schemes, their options, and the errors for wrong URLs. Also, the null engine."""

from __future__ import annotations

import importlib
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from known_generation import generation_of

from stampede import Cache
from stampede.engines import open_engine, safe_url, schemes
from stampede.engines.disk import directory_of
from stampede.engines.kit.url import flag, integer, number, options_of, scheme_of, text
from stampede.engines.memory import MemoryEngine
from stampede.engines.null import NullEngine
from stampede.errors import MissingExtra, OptionError
from stampede.model.entry import Entry, Verdict, new_id
from stampede.model.ports import Ask, Engine, Granted
from stampede.runtime.colour import run_blocking
from stampede.testing.cells import MemoryCell

# -- opening ------------------------------------------------------------------------------------------------------


def test_a_scheme_opens_its_engine() -> None:
    """A URL opens the engine of its scheme, in upper or lower case."""
    memory, null = open_engine("memory://"), open_engine("NULL://")
    assert isinstance(memory, MemoryEngine)
    assert isinstance(null, NullEngine)
    assert isinstance(memory, Engine)
    assert isinstance(null, Engine)


def test_options_come_from_the_url_or_the_caller_who_wins() -> None:
    """An option of the URL applies, for example `memory://?entries=7`. An option of the call overrides it."""

    def entries(engine: Engine) -> int:
        assert isinstance(engine, MemoryEngine)
        assert engine.tier is not None
        return engine.tier.entries

    assert entries(open_engine("memory://?entries=7")) == 7
    assert entries(open_engine("memory://", entries=8)) == 8
    assert entries(open_engine("memory://?entries=7", entries=8)) == 8
    assert open_engine("memory://?codec=sealed").shared


@pytest.mark.parametrize(
    "url, told",
    [
        ("memry://", "memory"),
        ("reddis://localhost", "did you mean 'redis"),
        ("http://localhost", "there are"),
        ("memory", "'memory://'"),
        ("", "'memory://'"),
        ("memory://?entires=3", "entries"),
        ("memory://?entries=many", "whole number"),
        ("memory://?entries=0", "entries"),
        ("memory://?entries=-1", "entries"),
        ("null://?entries=3", "takes none"),
    ],
)
def test_a_wrong_url_is_told_the_right_one(url: str, told: str) -> None:
    """A mistake in a URL is refused when the engine is opened. The error says what would be right."""
    with pytest.raises(OptionError, match=told):
        open_engine(url)


def test_a_missing_package_prints_its_pip_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If a client package is missing, the error says how to install it, and does not show the password."""
    (tmp_path / "engine_without_client.py").write_text("import no_such_client\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(_known(), "redis", ("engine_without_client", "redis"))
    with pytest.raises(MissingExtra, match=r"no_such_client.*pip install 'stampede-guard\[redis\]'") as told:
        open_engine("redis://user:hunter2@localhost")
    assert "hunter2" not in str(told.value)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Installs a package that provides `theirs://`."""

    def install(source: str, leads_to: str = "their_engine:from_url") -> None:
        (tmp_path / "their_engine.py").write_text(source)
        about = tmp_path / "their_engine-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-engine\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[stampede.engines]\ntheirs = {leads_to}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "their_engine", raising=False)

    return install


def test_packages_may_bring_engines(package: Callable[..., None]) -> None:
    """A package can provide an engine for a scheme, so that users can name it in a URL."""
    package(
        "from stampede.engines.null import NullEngine\n"
        "def from_url(url, **options):\n"
        "    engine = NullEngine()\n"
        "    engine.asked = (url, options)\n"
        "    return engine\n"
    )
    engine: Any = open_engine("theirs://host", size=3)
    assert engine.asked == ("theirs://host", {"size": 3})
    assert "theirs" in schemes()
    with pytest.raises(OptionError, match="theirs"):
        open_engine("their://host")


def test_packages_may_bring_cells(package: Callable[..., None]) -> None:
    """A package can provide just a cell. Its author does not have to know how to make an engine of it."""
    package(
        "from stampede.testing.cells import MemoryCell\n"
        "class Their(MemoryCell):\n"
        "    def __init__(self, url, *, size=1):\n"
        "        super().__init__()\n",
        "their_engine:Their",
    )
    with Cache("theirs://user:hunter2@host") as cache:
        assert cache.get_or_compute("k", lambda: 1) == cache.get_or_compute("k", lambda: 2) == 1
        assert cache.engine.called == "theirs://user:***@host"
    with Cache(MemoryCell()) as cache:
        assert cache.get_or_compute("k", lambda: 1) == cache.get_or_compute("k", lambda: 2) == 1


def test_what_a_package_gives_is_an_engine_or_a_cell(package: Callable[..., None]) -> None:
    """If a package provides neither an engine nor a cell, opening it is an OptionError, not an AttributeError later."""
    package("def from_url(url): return 1")
    with pytest.raises(OptionError, match="theirs:// gives 1, which is neither"):
        open_engine("theirs://host")


def test_engines_are_imported_when_asked_for() -> None:
    """Importing the package imports no engine, no client and no SQLite before they are used."""
    code = (
        "import sys, stampede.engines as e;"
        "assert not {'stampede.engines.disk', 'stampede.engines.null', 'sqlite3', 'cachetools'} & set(sys.modules);"
        "e.open_engine('null://');"
        "assert 'stampede.engines.null' in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=30)


def test_every_known_engine_of_this_release_opens() -> None:
    """Each engine that needs no client has a module with `from_url`."""
    for scheme in ("memory", "disk", "file", "null"):
        module = importlib.import_module(_known()[scheme][0])
        assert callable(module.from_url)


def _known() -> dict[str, tuple[str, str]]:
    table: dict[str, tuple[str, str]] = importlib.import_module("stampede.engines")._KNOWN
    return table


# -- URLs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, shown",
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:hunter2@localhost", "redis://:***@localhost"),
        ("redis://user:hunter2@localhost:6379/0", "redis://user:***@localhost:6379/0"),
        ("redis://user:hun/ter@2@localhost/0", "redis://user:***@localhost/0"),
        ("redis://user@localhost", "redis://user@localhost"),
        ("redis://h/0?password=hunter2&db=1", "redis://h/0?password=***&db=1"),
        ("x://h?a=1&ssl_PASSWORD=hunter2", "x://h?a=1&ssl_PASSWORD=***"),
        ("x://h?auth_token=hunter2", "x://h?auth_token=***"),
        ("x://h?listen=x%3A%2F%2Fu%3Ahunter2%40h&b=1", "x://h?listen=***&b=1"),
        ("disk:///home/me@work/cache", "disk:///home/me@work/cache"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("memcached://a:1,b:2", "memcached://a:1,b:2"),
        ("redis:/u:hunter2@h", "redis:/u:***@h"),
        ("u:hunter2@h", "u:***@h"),
        ("disk:///home/a:b@c", "disk:///home/a:b@c"),
        ("x://u:hun?ter#2@h/db", "x://u:***@h/db"),
        ("x://u:hun#t/er?2@h/db?a=1", "x://u:***@h/db?a=1"),
        ("x://h:6379/0?name=a@b", "x://h:6379/0?name=a@b"),
        ("x://h/db?password=hun#ter2&a=1", "x://h/db?password=***&a=1"),
        ("x://h/db?listen=y%3A%2F%2Fu%3Ahunter2%40h&a=1", "x://h/db?listen=***&a=1"),
        ("", ""),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    """A URL in logs and error messages shows no password."""
    assert safe_url(url) == shown


def test_no_error_shows_a_password() -> None:
    """No error about a wrong URL shows a password, and neither does its traceback."""
    for url in (
        "redis:/u:hunter2@h",
        "u:hunter2@h",
        "nosuch://u:hunter2@h",
        "memory://u:hunter2@h?x=1",
        "null://u:hunter2@h?y",
        "memory://u:hunter2℀@h",
        "memcached://u:hunter2@h",
        "memcached://u:hunter2/x@h",
        "dynamodb://u:hunter2@eu-central-1/t",
        "zmq://u:hunter2@h",
        "zmq://u:x?hunter2@h",
        "etcd://u:hunter2/x@h",
        "zookeeper://u:hunter2/x@h",
        "redis://u:hunter2/x@h",
        "redis+cluster://u:hunter2/x@h",
        "redis+sentinel://u:hunter2/x@h",
        "postgres://u:hunter2/x@h/d",
        "disk://u:hunter2@h/x",
        "file://u:hunter2@h",
    ):
        with pytest.raises(OptionError) as told:
            open_engine(url)
        assert "hunter2" not in "".join(traceback.format_exception(told.value))


def test_kinds() -> None:
    """Options are converted to their types, since those in URLs are strings. A wrong value is an error."""
    assert (integer("n", "12"), integer("n", 12)) == (12, 12)
    assert (number("n", "1.5"), number("n", 2)) == (1.5, 2.0)
    assert [flag("f", word) for word in ("true", "YES", "1", True)] == [True] * 4
    assert [flag("f", word) for word in ("false", "No", "0", False)] == [False] * 4
    assert text("t", "") == ""
    wrong: list[tuple[Any, Any]] = [
        (integer, "1.5"), (integer, 1.5), (integer, True), (integer, None), (integer, "x"), (integer, "²"),
        (integer, "-1"), (number, "x"), (number, "nan"), (number, -1), (number, "-1"), (number, True),
        (flag, "maybe"), (flag, 2), (flag, None), (text, 3), (text, None),
    ]  # fmt: skip
    for kind, value in wrong:
        with pytest.raises(OptionError, match="the_option"):
            kind("the_option", value)


def test_options_of_a_url() -> None:
    """Blanks and encoded characters in a URL's options are kept."""
    kinds = {"a": text, "b": integer}
    assert options_of("x://h/p?a=%26%20+b&b=3", {}, kinds) == {"a": "&  b", "b": 3}
    assert options_of("x://h?a=", {}, kinds) == {"a": ""}
    assert options_of("x://h", {"b": 4}, kinds) == {"b": 4}
    with pytest.raises(OptionError, match="there are b"):
        options_of("x://h?c=1", {}, {"b": integer})


def test_paths_and_schemes() -> None:
    """A directory with a blank in its name is found, encoded or not. A URL without a directory is an error."""
    assert directory_of("disk:///var/my%20cache") == Path("/var/my cache")
    assert directory_of("disk:///var/my cache?x=1") == Path("/var/my cache")
    for url in ("disk://", "disk:///"):
        with pytest.raises(OptionError, match="names no directory"):
            directory_of(url)
    assert scheme_of("Redis+Sentinel://h") == "redis+sentinel"


# -- null ---------------------------------------------------------------------------------------------------------


def test_null_grants_everything_and_keeps_nothing() -> None:
    """The null engine grants each claim and stores nothing. Tests that use it never wait, and share no values."""
    engine = NullEngine()
    for _ in range(2):
        token = new_id()
        assert run_blocking(engine.blocking.claims.claim("k", token, Ask(1.0))) == Granted()
        assert run_blocking(engine.blocking.claims.renew("k", token, 1.0)) is True
        assert run_blocking(engine.blocking.claims.fill("k", token, Entry("v", new_id()))) is True
    run_blocking(engine.blocking.claims.abandon("k", token, Verdict("failed"), 60.0))
    run_blocking(engine.blocking.store.set("k", Entry("v", new_id())))
    assert run_blocking(engine.blocking.store.get(["k", "l"])) == [None, None]
    assert run_blocking(engine.blocking.store.expire("k")) is False
    assert run_blocking(engine.blocking.store.invalidate("k")) is False
    run_blocking(engine.blocking.store.bump(""))
    assert generation_of(engine, "f") == generation_of(engine, "f")
    assert engine.ping() >= 0


def test_null_locks_exclude_nobody() -> None:
    """The locks of the null engine are always granted, so that tests that use it never wait."""
    engine = NullEngine()
    first, second = (run_blocking(engine.blocking.locks.acquire("l", new_id(), 1.0)) for _ in range(2))
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert first.fence < second.fence
    assert run_blocking(engine.blocking.locks.release("l", new_id())) is True


def test_a_cache_on_what_is_no_client_is_an_error() -> None:
    """A cache on an object that is no client is an error. It would be taken for memory://, and share nothing."""
    for wrong in (None, 5, b"redis://localhost", {"url": "memory://"}):
        with pytest.raises(OptionError, match="a client of redis or sqlalchemy"):
            Cache(wrong)
