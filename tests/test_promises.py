"""PROMISES.md names tests and functions: each must be there, and have that name."""

from __future__ import annotations

import re
from functools import cache

import pytest
from promises import ROOT, TESTS, NotFound, Place, Row, rows

ROWS = rows()


@cache
def defined(file: str) -> frozenset[str]:
    """The tests in a file."""
    path = (ROOT if "/" in file else TESTS) / file
    return frozenset(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), flags=re.MULTILINE))


def test_there_are_sixteen_and_each_has_its_lines() -> None:
    """A promise would stand there with nothing that keeps it."""
    promises = list(dict.fromkeys(row.promise for row in ROWS))
    assert [int(promise.partition(".")[0]) for promise in promises] == list(range(1, 17))


@pytest.mark.parametrize("name", sorted({name for row in ROWS for name in row.tests}))
def test_a_test_that_is_named_exists(name: str) -> None:
    """A promise would be kept by a test that was renamed, and then forgotten."""
    file, _, test = name.partition("::")
    assert test in defined(file)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.line[1:70])
def test_a_line_that_is_named_exists(row: Row) -> None:
    """A reader would be sent to a function that is not there."""
    assert row.tests
    path = ""
    for name in re.findall(r"`([^`]+)`", row.line.partition(":")[0]):
        if name.endswith((".py", ".lua")):
            path = name
            assert (ROOT / path).is_file()
        elif path and re.fullmatch(r"[\w.]+", name):
            assert Place(path, name).span


@pytest.mark.parametrize("row", [row for row in ROWS if not row.by_hand], ids=lambda row: row.line[1:70])
def test_what_is_taken_out_is_there(row: Row) -> None:
    """Nobody could find out any more whether the line keeps its promise."""
    try:
        assert [each.made() for change in row.changes() for each in change]
    except NotFound as error:
        pytest.fail(f"{error}. Say in the row's second column what is to be taken out now: PROMISES.md tells how")
