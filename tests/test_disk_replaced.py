"""What the directory means is replaced under running processes: no value is lost that was set after, none is older."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stampede import Cache
from stampede.engines.disk import database


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
