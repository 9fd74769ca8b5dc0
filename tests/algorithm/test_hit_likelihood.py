"""Whether the next call of a function is likely to be a hit."""

from __future__ import annotations

import pytest

from stampede.algorithm.call import HitLikelihood

# The calls of one function in order (m: a miss, h: a hit), and whether the next call looks first.
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
    """A call looks first only if a hit is likely. A wrong guess costs a round trip, or work on the server."""
    calls, looks = CASES[case]
    hit_likelihood = HitLikelihood()
    for call in calls:
        hit_likelihood.saw(call == "h")
    assert hit_likelihood.good is looks
