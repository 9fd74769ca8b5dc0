"""What an attack on the promises broke once: each test is the shortest way to break it again."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from stampede import Cache, events
from stampede.engines.disk.boot import clock
from stampede.engines.disk.rows import key_number


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline, "it never came to that"
        sleep(0.001)


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(function()), daemon=True)
    thread.start()
    return thread, got


def test_who_comes_after_another_process_s_invalidation_is_not_given_what_was_stored_before_it(tmp_path: Path) -> None:
    """A call that joins a flight in the moment between its fill and its landing would get an invalidated value."""
    stored, go = threading.Event(), threading.Event()

    def linger(event: events.Event) -> None:
        if isinstance(event, events.Computed) and not stored.is_set():
            stored.set()
            go.wait(10)

    with Cache(f"disk://{tmp_path}", observers=[linger]) as here, Cache(f"disk://{tmp_path}") as there:
        first, old = in_thread(lambda: here.get_or_compute("k", lambda: "old"))
        assert stored.wait(10)
        assert there.invalidate("k")
        second, new = in_thread(lambda: here.get_or_compute("k", lambda: "new"))
        until(lambda: any(flight.callers == 2 for flight in here._core.flights._flights.values()))
        go.set()
        first.join(10)
        second.join(10)
    assert (old, new) == (["old"], ["new"])


@pytest.mark.parametrize("holder", ["{}", "../{}", "", ".", "..", "x\0y", b"\xff", 5, "9" * 400 + "-1-2"], ids=repr)
def test_a_hostile_holder_s_name_is_nobody_s_and_no_path(tmp_path: Path, holder: Any) -> None:
    """Who can write a row could have any file of the user removed, as the sign of life of a dead process."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    if isinstance(holder, str):
        holder = holder.format(victim if holder == "{}" else victim.name)
    with Cache(f"disk://{tmp_path}/cache", on_engine_error="raise") as cache:
        number, raw = key_number(f"{cache._root.prefix}k")
        row = (number, raw, b"somebody", clock() + 60, holder, 1)
        with closing(sqlite3.connect(next(tmp_path.glob("cache/*.sqlite")))) as file, file:
            file.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?)", row)
        assert cache.get_or_compute("k", lambda: "mine") == "mine"
    assert victim.exists()
