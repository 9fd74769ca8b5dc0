"""PROMISES.md names tests and functions. Each of them must exist under that name."""

from __future__ import annotations

import re
from functools import cache

from promises import ROOT, NotFound, Place, Row, rows, where_is

ROWS = rows()


@cache
def defined(file: str) -> frozenset[str]:
    """Return the names of the tests in a file."""
    path = ROOT / where_is(file)
    return frozenset(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), flags=re.MULTILINE))


def test_there_are_sixteen_and_each_has_its_lines() -> None:
    """There are sixteen promises, and each has at least one row."""
    promises = list(dict.fromkeys(row.promise for row in ROWS))
    assert [int(promise.partition(".")[0]) for promise in promises] == list(range(1, 17))


def test_tests_that_are_named_exist() -> None:
    """Each test that a promise names exists. Otherwise a renamed test would be lost."""
    named = {tuple(name.split("::")) for row in ROWS for name in row.tests}
    assert sorted(each for each in named if each[1] not in defined(each[0])) == []


def test_lines_that_are_named_exist() -> None:
    """Each row names a test, and each file and function that it names exists."""
    for row in ROWS:
        assert row.tests, row.line
        _found(row)


def _found(row: Row) -> None:
    path = ""
    for name in re.findall(r"`([^`]+)`", row.line.partition(":")[0]):
        if name.endswith((".py", ".lua")):
            path = name
            assert (ROOT / path).is_file(), row.line
        elif path and re.fullmatch(r"[\w.]+", name):
            assert Place(path, name).span, row.line


def test_what_is_taken_out_is_there() -> None:
    """The lines that a row takes out exist. Otherwise nothing would show that they keep the promise."""
    wrong = []
    for row in ROWS:
        if not row.by_hand:
            try:
                assert [each.made() for change in row.changes() for each in change], row.line
            except NotFound as error:
                wrong.append(f"{row.line}\n    {error}")
    told = "\n".join(wrong)
    assert not wrong, f"{told}\nSay in the rows' second column what is to be taken out now: PROMISES.md tells how"
