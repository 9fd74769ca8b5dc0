"""How a call ends: what stored entries of releases before this one mean today."""

from __future__ import annotations

from stampede.model.entry import Entry
from stampede.model.result import Nothing, Result, comes_back, parts_of

STORED = ("stampede.outcome.Nothing", ("there is no product 7",))
"""What the first releases stored for an id that a function of many ids had left out."""


def test_an_id_that_was_stored_as_absent_stays_absent() -> None:
    """During a deploy, an id without a value would be an error of another kind, since the class lies elsewhere now."""
    entry = Entry(STORED, b"an id...", raised=True)
    assert Result(entry).is_nothing
    assert parts_of(Nothing(*STORED[1])) == STORED
    assert comes_back(entry, Nothing(*STORED[1]), (Nothing,))
