"""A directory that is replaced under running processes: no later change is lost, and no older value is served."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from herd import until

from stampede import Cache
from stampede.engines.disk import database
from stampede.engines.disk.database import stamps_of


def zeroed(directory: Path) -> None:
    """The next process that opens the file finds it damaged. A process that has its first page in memory does not."""
    (file,) = directory.glob("*.sqlite")
    with file.open("r+b") as opened:
        opened.write(bytes(200))


def removed(directory: Path) -> None:
    shutil.rmtree(directory)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cache]]:
    """Caches on one directory, whose readers do not check by themselves whether the directory was replaced."""
    monkeypatch.setattr(database, "LOOK", 3600.0)
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Cache(f"disk://{tmp_path / 'cache'}", **options))


CHANGES: dict[str, tuple[Callable[[Cache], Any], Any]] = {
    "set": (lambda cache: cache.set("k", "new"), "new"),
    "set_many": (lambda cache: cache.set_many({"k": "new"}), "new"),
    "invalidate": (lambda cache: cache.invalidate("k"), None),
    "expire": (lambda cache: cache.expire("k"), None),
    "clear": (lambda cache: cache.clear(), None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("end", [zeroed, removed])
def test_a_change_reaches_what_the_directory_means(
    tmp_path: Path, caches: Callable[..., Cache], end: Callable[[Path], None], change: str
) -> None:
    """A change by a process that has not noticed the replacement is made in the new file. Otherwise the change would be
    lost, and callers would still get the earlier value."""
    behind = caches()
    assert behind.get_or_compute("k", lambda: "old") == "old"
    end(tmp_path / "cache")
    others = caches(local=True)
    assert others.get_or_compute("k", lambda: "older") == "older"
    act, left = CHANGES[change]
    act(behind)
    assert [others.get("k"), behind.get("k")] == [left, left]


@pytest.mark.parametrize("local", [False, True])
def test_who_reads_sees_at_once_that_a_file_was_replaced(
    tmp_path: Path, caches: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """A reader notices at once that a file was replaced. Otherwise it would serve the old file's value, or one of its
    local tier, after another process has changed the value in the new file."""
    behind = caches(local=local)
    assert behind.get_or_compute("k", lambda: "old") == "old"
    assert behind.get_or_compute("k", lambda: "none") == "old"  # if local: from its local tier, from now on
    zeroed(tmp_path / "cache")
    given = []

    def replace(*paths: Any, rename: Callable[..., None] = os.replace) -> None:
        rename(*paths)
        caches().set("k", "new")
        given.append(behind.get_or_compute("k", lambda: "none"))

    monkeypatch.setattr(os, "replace", replace)
    caches()
    assert given == ["new"]


# -- callers that only hit their local tier ---------------------------------------------------------------------------


def renamed(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def without_stamps(directory: Path) -> None:
    stamps_of(directory).unlink()


def without_database(directory: Path) -> None:
    for path in directory.glob("*.sqlite*"):
        path.unlink()


@pytest.mark.parametrize("end", [removed, renamed, without_stamps, without_database])
def test_who_only_hits_sees_that_the_directory_is_gone(
    tmp_path: Path, caches: Callable[..., Cache], end: Callable[[Path], None]
) -> None:
    """A process that only hits its local tier notices that the directory is gone. Otherwise it would serve its values
    for their whole ttl, although processes on a new directory have invalidated them."""
    hits = caches(local=True).cached(key="k", ttl=600)(lambda: "old")
    assert [hits(), hits()] == ["old", "old"]
    end(tmp_path / "cache")
    others = caches().cached(key="k", ttl=600)(lambda: "new")
    others.invalidate()
    assert others() == "new"
    until(lambda: hits() == "new")  # its ttl would be longer


def test_of_a_closed_cache_nothing_is_hit(caches: Callable[..., Cache]) -> None:
    """The local tier of a closed cache is not valid. It would never hear of changes again."""
    cache = caches(local=True)
    assert [cache.get_or_compute("k", lambda: 1) for _ in range(3)] == [1, 1, 1]
    opened = cache._core.engine._rows.database._opened  # type: ignore[attr-defined]
    cache.close()
    assert not opened.pulse.holds(time.monotonic())


def test_a_forked_child_looks_for_itself(tmp_path: Path, caches: Callable[..., Cache]) -> None:
    """A forked child checks the directory by itself. Otherwise its local values would be valid for ever."""
    elsewhere = tmp_path / "elsewhere"
    hits = caches(local=True).cached(key="k", ttl=600)(lambda: "new" if elsewhere.exists() else "old")
    assert [hits(), hits()] == ["old", "old"]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, hits().encode())
            until(lambda: hits() == "new")
            os.write(writing, b"new")
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 3) == b"old"
    renamed(tmp_path / "cache")
    assert os.read(reading, 3) == b"new"
    os.close(reading)
    os.waitpid(child, 0)
