"""Looks at a shared engine by a local tier: what a look must leave to a claim, and what it must repair."""

from __future__ import annotations

import time
from pathlib import Path

from stampede import Cache


def test_a_look_does_not_stand_in_for_the_early_refresh(tmp_path: Path) -> None:
    """An entry that is due for its early refresh is claimed. If looks served it as fresh, it would not be refreshed."""
    with Cache(f"disk://{tmp_path}", local=True, ttl=600) as cache:
        calls = []

        @cache.cached
        def report(number: int) -> int:
            calls.append(number)
            return len(calls)

        assert [report(1), report(1)] == [1, 1]
        (resident,) = cache._core.local_tier.residents._residents.values()
        resident.end = time.monotonic()  # the moment of its early refresh
        assert report(1) == 2
        assert report(1) == 2
        assert report.stats().computed == {"missing": 1, "early": 1}


def test_an_entry_whose_stamp_was_used_by_another_key_is_kept_anew(tmp_path: Path) -> None:
    """If another key of the same slot changes, one look renews the local entry. Later hits do not ask the engine."""
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
