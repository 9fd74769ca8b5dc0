"""What the directory means is replaced under running processes: no value is lost that was set after, none is older."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stampede import Cache
from stampede.engines.disk import database
from stampede.engines.disk.database import stamps_of


def zeroed(directory: Path) -> None:
    """Whoever opens the file next finds it damaged; who has its first page at hand doesn't."""
    (file,) = directory.glob("*.sqlite")
    with file.open("r+b") as opened:
        opened.write(bytes(200))


def removed(directory: Path) -> None:
    shutil.rmtree(directory)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cache]]:
    """Caches on one directory, whose readers don't look by themselves what it means by now."""
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
    """A change by who had not heard of it yet was made to the new file's keys of the old one's generation: it
    returned, and everybody went on being given what was there before."""
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
    """For a moment, or while whoever replaces a damaged file doesn't run, others would be given what the old one
    says, and what they keep of it, after somebody has changed it in the new one."""
    behind = caches(local=local)
    assert behind.get_or_compute("k", lambda: "old") == "old"
    assert behind.get_or_compute("k", lambda: "none") == "old"  # if local: from its tier, from now on
    zeroed(tmp_path / "cache")
    given = []

    def replace(*paths: Any, rename: Callable[..., None] = os.replace) -> None:
        rename(*paths)
        caches().set("k", "new")
        given.append(behind.get_or_compute("k", lambda: "none"))

    monkeypatch.setattr(os, "replace", replace)
    caches()
    assert given == ["new"]


# -- who only hits what he keeps --------------------------------------------------------------------------------------


def renamed(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def without_stamps(directory: Path) -> None:
    stamps_of(directory).unlink()


def without_database(directory: Path) -> None:
    for path in directory.glob("*.sqlite*"):
        path.unlink()


def hit_until(function: Callable[[], str], value: str) -> float:
    """Seconds until hits give this."""
    began = time.monotonic()
    while function() != value:
        assert time.monotonic() - began < 5, "nobody who only hits is ever told"
        time.sleep(0.001)
    return time.monotonic() - began


@pytest.mark.parametrize("end", [removed, renamed, without_stamps, without_database])
def test_who_only_hits_sees_that_the_directory_is_gone(
    tmp_path: Path, caches: Callable[..., Cache], end: Callable[[Path], None]
) -> None:
    """It would serve from its local tier what it has, for all of its ttl, whatever is invalidated by those who have
    begun a new directory."""
    hits = caches(local=True).cached(key="k", ttl=600)(lambda: "old")
    assert [hits(), hits()] == ["old", "old"]
    end(tmp_path / "cache")
    others = caches().cached(key="k", ttl=600)(lambda: "new")
    others.invalidate()
    assert others() == "new"
    assert hit_until(hits, "new") < 0.5


def test_of_a_closed_cache_nothing_is_hit(caches: Callable[..., Cache]) -> None:
    """What is kept of a directory that nobody looks at any more would be served for ever."""
    cache = caches(local=True)
    assert [cache.get_or_compute("k", lambda: 1) for _ in range(3)] == [1, 1, 1]
    opened = cache._core.engine._rows.database._opened  # type: ignore[attr-defined]
    cache.close()
    assert not opened.pulse.holds(time.monotonic())


def test_a_forked_child_looks_for_itself(tmp_path: Path, caches: Callable[..., Cache]) -> None:
    """What a child hits would be true for ever."""
    elsewhere = tmp_path / "elsewhere"
    hits = caches(local=True).cached(key="k", ttl=600)(lambda: "new" if elsewhere.exists() else "old")
    assert [hits(), hits()] == ["old", "old"]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, hits().encode())
            hit_until(hits, "new")
            os.write(writing, b"new")
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 3) == b"old"
    renamed(tmp_path / "cache")
    assert os.read(reading, 3) == b"new"
    os.close(reading)
    os.waitpid(child, 0)
