"""The library's own random numbers."""

from __future__ import annotations

import os
import random

import pytest

from stampede.runtime import chance


def test_the_program_s_seed_does_not_matter() -> None:
    """Processes that seed `random` alike must not draw alike. Nor does the library change the program's numbers."""
    random.seed(1)
    ours = chance.random()
    theirs = random.random()
    random.seed(1)
    assert chance.random() != ours and random.random() == theirs


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_draws_others() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, repr(chance.random()).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert float(os.read(reading, 100)) != chance.random()
