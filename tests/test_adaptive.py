"""How much an origin can bear: told from what it does, without its word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stampede.adaptive import Adaptive


class Database:
    """It bears so many at once; above that, all take as much longer. Its callers fill the room that they have."""

    def __init__(self, bears: float, usual: float = 0.05) -> None:
        self.bears, self.usual, self.now = bears, usual, 100.0

    def seconds(self, inside: float) -> float:
        return self.usual * max(1.0, (inside / self.bears) ** 2)

    def work(self, adaptive: Adaptive, seconds: float) -> list[int]:
        rooms, end = [], self.now + seconds
        while self.now < end:
            room = adaptive.room
            took = self.seconds(room)
            self.now += took / room
            adaptive.ended("rows", took, self.now, failed=False)
            rooms.append(room)
        return rooms


def warmed(most: int, least: int = 1) -> Adaptive:
    """It knows how long that takes when all is well."""
    adaptive = Adaptive(most, least)
    adaptive.ended("rows", 0.05, 1.0, failed=False)
    return adaptive


def test_an_origin_that_is_well_has_all_of_its_room() -> None:
    adaptive = warmed(32)
    assert set(Database(bears=100).work(adaptive, 60)) == {32}


@pytest.mark.parametrize("bears", [4, 12])
def test_it_is_given_about_what_it_bears(bears: int) -> None:
    """A slow database would be given more, as each of its callers takes longer."""
    adaptive, database = warmed(64), Database(bears)
    database.work(adaptive, 30)
    rooms = database.work(adaptive, 60)
    assert bears / 2 <= sum(rooms) / len(rooms) <= 2 * bears
    assert max(rooms) <= 3 * bears


def test_it_has_its_room_again_when_it_is_well_again() -> None:
    adaptive, database = warmed(32), Database(bears=2)
    database.work(adaptive, 30)
    assert adaptive.room < 10
    database.bears = 100
    database.work(adaptive, 60)
    assert adaptive.room == 32


def test_failures_are_a_sign_too_and_one_of_many_counts() -> None:
    """Thirty that fail together are one event: each by itself would close the origin for good."""
    adaptive = warmed(32)
    for _ in range(30):
        adaptive.ended("rows", 0.05, 10.0, failed=True)
    assert adaptive.room == 24
    for round_ in range(30):
        adaptive.ended("rows", 0.05, 20.0 + round_, failed=True)
    assert adaptive.room == 1


def test_who_is_slow_by_nature_is_no_sign() -> None:
    """A report among lookups would look like a database that is down."""
    adaptive = Adaptive(16)
    for number in range(400):
        name, seconds = ("report", 5.0) if number % 4 == 0 else ("row", 0.01)
        adaptive.ended(name, seconds, float(number), failed=False)
    assert adaptive.room == 16


def test_what_has_become_slower_for_good_is_usual_by_and_by() -> None:
    """A table that has grown would be held to what it was for ever."""
    adaptive, database = warmed(8), Database(bears=100, usual=0.15)
    database.work(adaptive, 120)
    assert adaptive.room == 8


@given(
    most=st.integers(1, 100),
    least=st.integers(1, 100),
    ended=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 100), st.floats(0, 10), st.booleans())),
)
def test_the_room_is_between_its_bounds(most: int, least: int, ended: list[tuple[str, float, float, bool]]) -> None:
    adaptive, now = Adaptive(most, least), 0.0
    for name, seconds, later, failed in ended:
        now += later
        adaptive.ended(name, seconds, now, failed=failed)
        assert min(least, most) <= adaptive.room <= most
