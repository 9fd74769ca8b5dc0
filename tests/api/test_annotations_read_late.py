"""Annotations that are evaluated only when they are read, as in Python 3.14 (`make next` runs this test there).
This module has no `from __future__ import annotations`, which would turn them into strings.
"""

import dataclasses
import inspect
import sys
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import pytest

from stampede import cached
from stampede.codecs.annotations import fields_of, returns_of
from stampede.testing import isolated

if TYPE_CHECKING:
    from somewhere import Missing  # type: ignore[import-not-found]

pytestmark = pytest.mark.skipif(sys.version_info < (3, 14), reason="before, they are evaluated where they stand")

if sys.version_info >= (3, 14):

    @dataclasses.dataclass
    class Row:
        number: int
        next: Row | None = None  # noqa: F821  it is not defined yet
        later: Later | None = None  # noqa: F821

    class Pair(NamedTuple):
        number: int
        other: Missing | None = None

    class Options(TypedDict):
        number: int
        other: Missing

    @cached(ttl=60)
    def rows(number: int) -> list[Row]:
        return [Row(number, Row(1))]

    @cached(ttl=60)
    def pair(number: Missing) -> Pair:
        return Pair(number)

    @cached(ttl=60)
    async def missing(number: int, *, other: Missing = 1) -> Missing:
        return number

    class Shop:
        @cached(ttl=60)
        def best(self, number: int) -> Shop | None:  # noqa: F821
            return None

        def __stampede_key__(self) -> int:
            return 1


class Later:
    pass


def test_functions_are_decorated_whose_annotations_name_what_is_not_there() -> None:
    """A cached method may return its own class, or a type that is imported only for type checkers."""
    with isolated():
        assert rows(1) == rows(1) == [Row(1, Row(1))]
        assert pair(1) == pair(1) == (1, None)
        assert missing.key(1, other=2).endswith(":(1,other=2)")
        assert Shop().best(1) is None
        assert list(inspect.signature(rows).parameters) == ["number"]


def test_what_is_known_of_types_is_known() -> None:
    """Types that can be resolved are known. Otherwise, values would be stored for a type that is not annotated."""
    assert returns_of(rows.__wrapped__) == list[Row]
    assert returns_of(missing.__wrapped__) is None
    assert fields_of(Row) == {"number": int, "next": Row | None, "later": Later | None}
    assert fields_of(Pair)["number"] is fields_of(Options)["number"] is int
