"""Tests of code that uses a cache. Run them with pytest, or run this file."""

import stampede.testing
from stampede import cached

asked: list[int] = []


@cached(ttl=600)
def report(customer: int) -> list[int]:
    asked.append(customer)
    return [customer]


def test_the_second_call_is_a_hit() -> None:
    asked.clear()
    with stampede.testing.isolated():  # this block has its own, empty caches in memory
        assert report(1) is report(1)
    assert asked == [1]


def test_tests_leave_nothing_for_each_other() -> None:
    asked.clear()
    for _ in range(2):
        with stampede.testing.isolated():
            report(1)
    assert asked == [1, 1]


def test_without_any_cache() -> None:
    with stampede.testing.disabled():  # calls go straight to the function, as STAMPEDE_DISABLED=1 does for a whole run
        assert report(1) is not report(1)


def test_values_survive_production_s_encoding() -> None:
    with stampede.testing.isolated(url="memory://?codec=sealed"):  # values are stored as bytes, as on disk
        assert report(1) == report(1)
        assert report(1) is not report(1)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("passed:", name)
