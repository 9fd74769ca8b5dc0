"""A look at a shared engine beside its local tier: what it must leave to a claim, and what it must mend."""

from __future__ import annotations

import time
from pathlib import Path

from stampede import Cache


def test_a_look_does_not_stand_in_for_the_early_refresh(tmp_path: Path) -> None:
    """Broken: a due entry is found fresh in the engine by everybody, refreshed by nobody, and all block at its end."""
    with Cache(f"disk://{tmp_path}", local=True, ttl=600) as cache:
        calls = []

        @cache.cached
        def report(number: int) -> int:
            calls.append(number)
            return len(calls)

        assert [report(1), report(1)] == [1, 1]
        (resident,) = cache._core.local_tier.residents._residents.values()
        resident.end = time.monotonic()  # its early moment
        assert report(1) == 2
        assert report(1) == 2
        assert report.stats().computed == {"missing": 1, "early": 1}


def test_an_entry_whose_stamp_was_used_by_another_key_is_kept_anew(tmp_path: Path) -> None:
    """Broken: once a key of the same slot has changed, every hit goes to the engine until the entry's end."""
    with Cache(f"disk://{tmp_path}", local=True, ttl=600) as cache:

        @cache.cached
        def report(number: int) -> int:
            return number

        report(1)
        report(1)
        (resident,) = cache._core.local_tier.residents._residents.values()
        resident.stamp += 1
        report(1)
        before = report.stats()
        assert report(1) == 1
        after = report.stats()
        assert (after.hits, after.found) == (before.hits + 1, before.found)
