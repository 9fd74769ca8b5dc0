"""A pair of a store and another engine's locks keeps its promises, whichever engines these are.

Each pair runs one case of the suite, in turn, so that each store and each engine of locks runs all cases that involve
both. `make pairs` runs the whole suite for all pairs.
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("redis")
pytest.importorskip("psycopg")
pytest.importorskip("sqlalchemy")
pytest.importorskip("boto3")
pytest.importorskip("moto")
pytest.importorskip("urllib3")
pytest.importorskip("kazoo")
pytest.importorskip("zmq")

from addresses import EMPTY

from stampede.engines import open_engine
from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired
from stampede.model.ports import Engine
from stampede.testing.conformance import ClaimsSuite

LOCKS = [name for name in EMPTY if name != "cell"]
STORES = [name for name in LOCKS if name not in ("file", "zmq")]

STANDS_LONGER = {"test_own_token_is_granted_again", "test_renew_moves_the_end"}
"""Cases that are told how long a lock remains valid. etcd and ZooKeeper report only the time of the first lease."""

WHOLE = bool(os.environ.get("STAMPEDE_PAIRS"))
CASES = [name for name in vars(ClaimsSuite) if name.startswith("test_")] if WHOLE else [
    "test_one_of_many_is_granted",  # a herd computes once
    "test_an_outcome_wakes",
    "test_verdict_answers_those_who_waited",
    "test_force_kills_the_standing_lease",
    "test_fill_after_set_is_refused",
    "test_fill_after_invalidate_is_refused",
]  # fmt: skip


class Pair(ClaimsSuite):
    short, slack = 1.0, 2.0  # as coarse as the coarsest engine
    largest = 390_000
    urls: Sequence[str]

    def make_engine(self) -> Engine:
        self._parts = [open_engine(url) for url in self.urls]
        return Paired(*self._parts)

    def make_peer(self, engine: Engine) -> Engine:
        theirs = zip(self.urls, self._parts, strict=True)
        return Paired(*(part if isinstance(part, MemoryEngine) else open_engine(url) for url, part in theirs))


PAIRS = [
    (store, locks, case, row % 2 == 1)
    for (row, store), (column, locks) in product(enumerate(STORES), enumerate(LOCKS))
    if WHOLE or (row + column) % 4 == 0  # each with some of the others; `make pairs` tries all
    for case in (CASES if WHOLE else [CASES[(row + column // 4) % len(CASES)]])
    if case not in STANDS_LONGER or locks not in ("etcd", "zookeeper")
]


@pytest.mark.parametrize("store, locks, case, suspending", PAIRS)
def test_a_pair_keeps_its_promises(store: str, locks: str, case: str, suspending: bool, memory_path: Path) -> None:
    """Users combine any store with any locks. No pair lets two callers compute, or stores an old value."""
    urls = [EMPTY[name](memory_path) for name in dict.fromkeys([store, locks])]
    suite = type("ThePair", (Pair,), {"urls": (urls[0], urls[-1]), "suspending": suspending})
    try:
        getattr(suite(), case)()
    except unittest.SkipTest as skipped:
        pytest.skip(str(skipped))
