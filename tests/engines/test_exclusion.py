"""A lock has one holder at a time, even if processes are paused. Checked on each engine, from records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from exclusion import Event, Pause, played, wrongs

VISITS = 4


def file(path: Path) -> str:
    return f"file://{path}"


def disk(path: Path) -> str:
    return f"disk://{path}"


def sql(path: Path) -> str:
    pytest.importorskip("sqlalchemy")
    return f"sql+sqlite:///{path}/locks.db"


def redis(_: Path) -> str:
    pytest.importorskip("redis")
    from servers import shared_redis

    return shared_redis().url


def memcached(_: Path) -> str:
    pytest.importorskip("pymemcache")
    from memcached_server import shared_memcached

    return shared_memcached().url


def postgres(_: Path) -> str:
    pytest.importorskip("psycopg")
    from postgres_server import prepared_postgres

    return prepared_postgres().postgres_url


def zmq(_: Path) -> str:
    from broker_server import BrokerThread

    return BrokerThread().url


def etcd(_: Path) -> str:
    from etcd_server import shared_etcd

    return shared_etcd().url


def zookeeper(_: Path) -> str:
    pytest.importorskip("kazoo")
    from zookeeper_server import shared_zookeeper

    shared_zookeeper().empty()
    return shared_zookeeper().url


SHORT = 0.6
"""Seconds of a lease: long enough that even on a busy machine a process that is not paused rarely loses it."""


@pytest.mark.parametrize(
    "engine, lease",
    [
        (zookeeper, 0.9),  # the shortest session has four seconds
        (etcd, 1.0),  # etcd makes it two seconds
        (memcached, 1.0),
        (file, SHORT), (disk, SHORT), (sql, SHORT), (redis, SHORT), (postgres, SHORT), (zmq, SHORT),
    ],
)  # fmt: skip
def test_one_at_a_time_also_after_a_pause(engine: Callable[[Path], str], lease: float, memory_path: Path) -> None:
    """Two processes are never inside at the same time. A holder that was paused beyond its lease notices the loss, and
    its late write is refused."""
    histories = played(engine(memory_path), lease, VISITS, keeps=engine is file)
    for history in histories:
        assert wrongs(history.events, history.pause, visits=VISITS, crowd=history.crowd) == []


# -- the judge of histories -----------------------------------------------------------------------------------------

TOLD = """
0.0 a granted 1 1.0
0.1 a frozen
1.1 b granted 2 2.1
1.2 b written 2
1.3 a thawed
1.4 a refused 1
1.5 a lost 1 1.0
1.6 a loud 1 1.0
1.7 b held 2 2.1
1.8 b leaving 2 2.1
1.9 b left 2 2.1
2.0 a granted 3 3.0
2.1 a written 3
2.2 a held 3 3.0
2.3 a leaving 3 3.0
2.4 a left 3 3.0
"""
"""The events of a paused holder, of the next holder, and of the first one again."""


def judged(told: str, *, keeps: bool = False) -> list[str]:
    events = []
    for line in filter(None, told.splitlines()):
        words = line.split()
        at, who, what, fence, ends = words + ["0", "inf"][len(words) - 3 :]
        events.append(Event(float(at), who, what, int(fence), float(ends)))
    return wrongs(events, Pause("a", keeps), visits=1, crowd=["a", "b"])


def test_a_history_as_it_should_be() -> None:
    """The judge accepts a correct history. Otherwise, it would find errors in every engine."""
    assert judged(TOLD) == []
    kept = TOLD.replace("1.1 b granted", "1.31 b granted").replace("1.2 b", "1.32 b")
    assert judged(kept, keeps=True) == []
    heard_late = TOLD.replace("2.0 a granted 3", "1.95 b granted 1 1.9\n2.0 a granted 3")
    assert judged(heard_late) == []  # it had ended before its process heard of it


@pytest.mark.parametrize(
    "was, instead, wrong",
    [
        ("1.1 b granted", "0.9 b granted", "two inside: b with fence 2"),
        ("2.0 a granted", "1.75 a granted", "two inside: a with fence 3"),
        ("2.0 a granted 3 3.0\n2.1 a written 3", "2.0 a granted 2 3.0\n2.1 a written 2", "a fence that doesn't grow"),
        ("2.0 a granted 3 3.0\n2.1 a written 3", "2.0 a granted 1 3.0\n2.1 a refused 1", "a fence that doesn't grow"),
        ("1.4 a refused", "1.4 a written", "a late write: a wrote"),
        ("1.4 a refused 1", "", "a late write that was not refused, or not tried"),
        ("1.3 a thawed", "0.3 a thawed", "nobody was paused beyond its end"),
        ("1.5 a lost", "1.5 a held", "a loss unheard of"),
        ("1.5 a lost 1 1.0", "", "a loss unheard of: a with fence 1 woke up"),
        ("1.6 a loud", "1.6 a left", "a block that ended without a word"),
        ("1.7 b held 2", "1.65 b lost 2 2.1\n1.7 b held 2", "a loss unheard of: b"),
        ("1.7 b held 2", "1.65 b lost 2 2.1\n1.7 b lost 2", "a block that ended without a word: b"),
        ("2.4 a left", "2.4 a loud", "no progress: a"),
        ("1.9 b left", "1.9 b loud", "no progress: b"),
        ("1.3 a thawed", "1.05 a thawed", "no progress: nobody got in"),
    ],
)
def test_what_is_wrong_is_found(was: str, instead: str, wrong: str) -> None:
    """The judge finds each kind of error. An error that it cannot find would pass in every engine."""
    assert was in TOLD
    assert any(found.startswith(wrong) for found in judged(TOLD.replace(was, instead)))


def test_a_frozen_holder_that_keeps_it_is_alone() -> None:
    """A paused holder keeps a lock of the kernel until it resumes. A process that got in before that is an error."""
    assert any(found.startswith("two inside: b") for found in judged(TOLD, keeps=True))
