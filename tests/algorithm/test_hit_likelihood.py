"""Whether a hit is to be expected."""

from __future__ import annotations

import pytest

from stampede.algorithm.call import HitLikelihood

# Calls of one function, in order; and whether the next one looks first.
CASES = {
    "nobody has called it": ("", False),
    "a miss": ("m", False),
    "a hit": ("h", True),
    "a miss, then a hit": ("mh", True),
    "a miss, then hits": ("m" + 2 * "h", True),
    "misses, and a hit now and then": (10 * "mmmh", False),
    "hits, and a miss now and then": (10 * "hhhm", True),
    "hits that have come to an end": (100 * "h" + 10 * "m", True),
    "and stay away": (100 * "h" + 11 * "m", False),
    "misses that have come to an end": (100 * "m" + 10 * "h", False),
    "and stay away, too": (100 * "m" + 11 * "h", True),
}


@pytest.mark.parametrize("case", CASES)
def test_who_looks_first(case: str) -> None:
    """A miss would cost a round trip more, or a hit its server the work of a script."""
    calls, looks = CASES[case]
    hit_likelihood = HitLikelihood()
    for call in calls:
        hit_likelihood.saw(call == "h")
    assert hit_likelihood.good is looks
