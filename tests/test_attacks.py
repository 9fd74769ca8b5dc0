"""What an attack on the promises broke once: each test is the shortest way to break it again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from stampede import Cache, events


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
