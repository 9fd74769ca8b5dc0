"""Processes that share cells which tell nothing of time: herds, and holders that are killed and frozen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from disk_world import Connection, other, others
from file_cell import FileCell
from herd import Herd

from stampede import Cache


def cache_in(directory: Path, lease: float) -> Cache:
    return Cache(FileCell(directory), early=0, lease=lease)


def hold(pipe: Connection, directory: Path, lease: float) -> None:
    """One call, whose computation ends as it is told."""
    cache = cache_in(directory, lease)

    def compute() -> str:
        pipe.send("computing")
        value: str = pipe.recv()
        return value

    pipe.send((cache.get_or_compute("k", compute), cache.stats().lease_lost))
    pipe.recv()


def ask(pipe: Connection, directory: Path, threads: int) -> None:
    """Eight callers of one key: what they got, and how often their process computed it."""
    cache = cache_in(directory, 60.0)

    def compute() -> str:
        time.sleep(0.1)
        return str(pipe)

    pipe.recv()
    got = Herd(*[lambda: cache.get_or_compute("k", compute)] * threads).join()
    pipe.send((set(got), cache.stats().computations))
    pipe.recv()


def test_a_herd_of_processes_computes_once(tmp_path: Path) -> None:
    """Each process would compute for itself where the store knows no time."""
    with others(4, ask, tmp_path, 8) as herd:
        for each in herd:
            each.tell()
        got, computations = zip(*[each.hear() for each in herd], strict=True)
    assert len(set.union(*got)) == 1
    assert sum(computations) == 1


def test_a_killed_holder_holds_nobody_up(tmp_path: Path) -> None:
    """The herd would wait for it for ever, as nothing ends by itself there; or two of it would compute."""
    cache, lease, calls = cache_in(tmp_path, 0.5), 0.5, []
    with other(hold, tmp_path, lease) as holder:
        assert holder.hear() == "computing"
        herd = Herd(*[lambda: cache.get_or_compute("k", lambda: calls.append(1) or "alive")] * 4)
        time.sleep(2 * lease)  # it is renewed all the while: for those who watch it is never the same
        assert not calls
        holder.kill()
        killed = time.monotonic()
        assert herd.join() == ["alive"] * 4
        assert time.monotonic() - killed < lease + 1.0
    assert calls == [1]
    cache.close()


@pytest.mark.parametrize("noticed", [True, False])
def test_a_frozen_holder_stores_nothing_late(tmp_path: Path, noticed: bool) -> None:
    """What is out of date would overwrite what was computed meanwhile, or be there as if it were new."""
    cache, lease = cache_in(tmp_path, 0.5), 0.3
    with other(hold, tmp_path, lease) as holder:
        assert holder.hear() == "computing"
        holder.freeze()
        if noticed:
            assert cache.get_or_compute("k", lambda: "alive") == "alive"
        else:
            time.sleep(1.5 * lease)
        holder.tell("late")
        holder.thaw()
        told: Any = holder.hear()
        assert told == ("late", 1)
        assert cache.get("k") == ("alive" if noticed else None)
    cache.close()
