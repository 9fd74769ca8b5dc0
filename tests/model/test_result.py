"""How a call ends: the meaning of entries that earlier releases stored."""

from __future__ import annotations

from stampede.model.entry import Entry
from stampede.model.result import Nothing, Result, comes_back, parts_of

STORED = ("stampede.outcome.Nothing", ("there is no product 7",))
"""The value that the first releases stored for an id that a batch function left out."""


def test_an_id_that_was_stored_as_absent_stays_absent() -> None:
    """The class of a missing id moved, but entries stored under its old name still mean that the id is absent."""
    entry = Entry(STORED, b"an id...", raised=True)
    assert Result(entry).is_nothing
    assert parts_of(Nothing(*STORED[1])) == STORED
    assert comes_back(entry, Nothing(*STORED[1]), (Nothing,))
