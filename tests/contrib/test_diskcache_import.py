"""`stampede diskcache import`, with directories that diskcache itself has written, and with hostile ones."""

from __future__ import annotations

import os
import pickle
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from stampede.cli.command import main
from stampede.contrib.diskcache import Cache, FanoutCache

diskcache: Any = pytest.importorskip("diskcache")

VALUES = [
    0, 2**70, -1.5, "text", "line\r\nend é", b"bytes", None, True, (1, [2, {"k": {3}}]), "x" * 50_000, b"y" * 50_000,
    ["z" * 100] * 1000, frozenset({1}), bytearray(b"b"), float("inf"),
]  # fmt: skip
KEYS = ["a", 1, 2.5, b"k", None, (1, ("b", None)), "long" * 1000]


class Evil:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return tmp_path / "old"


@pytest.fixture
def moved(tmp_path: Path, old: Path) -> Callable[..., Cache]:
    """Return a function that runs the command and returns the new cache."""

    def run(expected: int, *more: str) -> Cache:
        assert main(["diskcache", "import", str(old), f"disk://{tmp_path / 'new'}", *more]) == expected
        return Cache(tmp_path / "new")

    return run


def changed(old: Path, sql: str, *values: Any) -> None:
    with closing(sqlite3.connect(old / "cache.db", isolation_level=None)) as connection:
        connection.execute(sql, values)


def test_values_and_keys(old: Path, moved: Callable[..., Cache], capsys: pytest.CaptureFixture[str]) -> None:
    """Builtins come over as they were, as keys and values, in the database and in files."""
    with diskcache.Cache(str(old)) as cache:
        for number, value in enumerate(VALUES):
            cache[number + 100] = value
        for key in KEYS:
            cache[key] = key
    with moved(0) as new:
        assert [new[number + 100] for number in range(len(VALUES))] == VALUES
        assert [new[key] for key in KEYS] == KEYS and len(new) == len(VALUES) + len(KEYS)
    assert f"{len(VALUES) + len(KEYS)} entries" in capsys.readouterr().out


def test_expiry_and_tags(old: Path, moved: Callable[..., Cache], capsys: pytest.CaptureFixture[str]) -> None:
    """Entries expire when they would have expired, and carry their tag."""
    with diskcache.Cache(str(old)) as cache:
        cache.set("k", 1, expire=1000, tag="t")
        cache.set("n", 2, expire=1e12, tag=5)
        cache.set("gone", 3, expire=0.001)
        before = time.time()
    time.sleep(0.01)
    with moved(0) as new:
        value, expires, tag = new.get("k", expire_time=True, tag=True)
        assert (value, tag) == (1, "t") and abs(expires - before - 1000) < 60
        assert new.get("n", expire_time=True, tag=True) == (2, None, 5)
        assert new.evict("t") == 1 and list(new) == ["n"]
    assert "1 had expired" in capsys.readouterr().out


def test_results_of_functions(old: Path, moved: Callable[..., Cache]) -> None:
    """What diskcache's memoize has stored is found by ours."""

    def f(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    with diskcache.Cache(str(old)) as cache:
        cache.memoize(ignore={"c"})(f)(1, "x", b=2, c=3)

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was computed")

    never.__qualname__ = f.__qualname__
    with moved(0) as new:
        assert new.memoize(ignore={"c"})(never)(1, "x", b=2, c=5) == ((1, "x"), {"b": 2, "c": 3})


def test_fanout_and_json(tmp_path: Path, old: Path, moved: Callable[..., Cache]) -> None:
    """All shards of a FanoutCache are read, and what JSONDisk has written."""
    with diskcache.FanoutCache(str(old), shards=3, disk=diskcache.JSONDisk) as cache:
        for number in range(20):
            cache[number] = [number] * 10_000
    moved(0, "--json-disk", "--namespace", "mine").close()
    with FanoutCache(tmp_path / "new", namespace="mine") as new:
        assert sorted(new) == list(range(20)) and new[7] == [7] * 10_000


def test_again(old: Path, moved: Callable[..., Cache], capsys: pytest.CaptureFixture[str]) -> None:
    """A second run leaves newer values as they are. The new directory may be the old one."""
    with diskcache.Cache(str(old)) as cache:
        cache["a"], cache["b"] = 1, 2
    with moved(0) as new:
        new["a"] = 5
        del new["b"]
        with moved(0):
            assert new["a"] == 5 and new["b"] == 2
    assert "1 were there already" in capsys.readouterr().out
    assert main(["diskcache", "import", str(old), f"disk://{old}"]) == 0
    with Cache(old) as same:
        assert same["a"] == 1


def test_hostile_pickles(
    tmp_path: Path, old: Path, moved: Callable[..., Cache], capsys: pytest.CaptureFixture[str]
) -> None:
    """No pickle runs, whether it is a key, a value or in a file, of any protocol. Foreign types are listed."""
    evil = Evil(tmp_path / "ran")
    with diskcache.Cache(str(old)) as cache:
        cache["evil"], cache["big"], cache["date"] = evil, [evil, "x" * 100_000], date(2026, 1, 1)
        cache[evil, 1] = 1
        cache["good"] = {"k": 1}
    for protocol in range(6):
        cache = diskcache.Cache(str(old), disk_pickle_protocol=protocol)
        cache[f"evil {protocol}"] = evil
        cache.close()
    for number, body in enumerate(
        [
            b"",
            b".",
            b"(" * 5000,
            b"]" * 100_000 + b"a" * 99_999 + b".",
            b"cos\nsystem\n(S'x'\ntR.",
            b"\x82\x01.",
            b"N.N.",
        ]
    ):
        with diskcache.Cache(str(old)) as cache:
            cache[f"raw {number}"] = None
        changed(old, "UPDATE Cache SET value = ? WHERE key = ?", body, f"raw {number}")
    with moved(1) as new:
        assert list(new) == ["good"]
    assert not evil.file.exists()
    out = capsys.readouterr().out
    assert "posix.mkdir" in out and "datetime.date" in out and "'evil'" in out


def test_hostile_rows(tmp_path: Path, old: Path, moved: Callable[..., Cache]) -> None:
    """Files outside of the directory are not read, and rows of nonsense are skipped."""
    (tmp_path / "secret").write_text("secret")
    with diskcache.Cache(str(old)) as cache:
        for number in range(12):
            cache[number] = "x" * 50_000
    (old / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(old / "pipe")
    (old / "latin").write_bytes(b"\xff")
    for number, name in enumerate(["../secret", str(tmp_path / "secret"), "link", "pipe", "none", "latin", "a\0b"]):
        changed(old, "UPDATE Cache SET filename = ? WHERE key = ?", name, number)
    changed(old, "UPDATE Cache SET mode = 'x' WHERE key = 7")
    changed(old, "UPDATE Cache SET expire_time = 'never' WHERE key = 8")
    changed(old, "UPDATE Cache SET raw = 5 WHERE key = 9")
    changed(old, "UPDATE Cache SET filename = NULL WHERE key = 10")
    changed(old, "UPDATE Cache SET key = CAST(x'ff' AS TEXT) WHERE key = 11")
    with moved(1) as new:
        assert list(new) == ["\udcff"]


@pytest.mark.parametrize("name", ["cache.db", "000"])
def test_links_to_other_directories(tmp_path: Path, old: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The database of another user, which only the user of the command may read, is not copied."""
    with diskcache.Cache(str(tmp_path / "others")) as cache:
        cache["secret"] = 1
    old.mkdir()
    (old / name).symlink_to(tmp_path / "others" / ("cache.db" if name == "cache.db" else ""))
    assert main(["diskcache", "import", str(old), f"disk://{tmp_path / 'new'}"]) == 2
    assert "is a link" in capsys.readouterr().err


def test_a_pipe_in_place_of_a_journal(tmp_path: Path, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SQLite would wait for ever for its other end, and could not be interrupted."""
    with diskcache.Cache(str(old)) as cache:
        cache["k"] = 1
    changed(old, "PRAGMA journal_mode = DELETE")
    os.mkfifo(old / "cache.db-journal")
    assert main(["diskcache", "import", str(old), f"disk://{tmp_path / 'new'}"]) == 2
    assert "or a pipe" in capsys.readouterr().err


def test_a_huge_file(old: Path, moved: Callable[..., Cache]) -> None:
    """A file of terabytes, which may need no room on the disk, is skipped. The other entries are copied."""
    with diskcache.Cache(str(old)) as cache:
        cache["huge"], cache["k"] = b"x" * 50_000, 1
    (file,) = old.rglob("*.val")
    os.truncate(file, 1 << 42)
    with moved(1) as new:
        assert list(new) == ["k"]


def test_what_is_no_directory(tmp_path: Path, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong arguments and damaged files are errors that say what to do."""
    new = f"disk://{tmp_path / 'new'}"
    assert main(["diskcache", "import", str(old), new]) == 2
    assert "is no directory of diskcache" in capsys.readouterr().err
    old.mkdir()
    (old / "cache.db").write_bytes(pickle.dumps(list(range(1000))))
    assert main(["diskcache", "import", str(old), new]) == 2
    assert "can't be read" in capsys.readouterr().err
    assert main(["diskcache", "import", str(old), "memory://"]) == 2
    assert "is not on disk" in capsys.readouterr().err


def test_too_little_room(tmp_path: Path, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If entries were evicted while others were copied, the command says so."""
    with diskcache.Cache(str(old)) as cache:
        for number in range(30):
            cache[number] = bytes(100_000)
    assert main(["diskcache", "import", str(old), f"disk://{tmp_path / 'new'}?max_bytes=1048576"]) == 1
    assert "?max_bytes=" in capsys.readouterr().out
