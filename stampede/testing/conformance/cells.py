"""The suite for a cell alone, before an engine is made of it: its two verbs, and what it declares."""

from __future__ import annotations

import threading
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from stampede.engines.cells import Cell, Faster, Seen, Version, WatchingCell
from stampede.testing.conformance.suite import HERD, SOON

__all__ = ["CellSuite"]

NAMES = [
    "a", "A", "a:", "a/b", "../a", ".", "%61", "*", "?", "'", '"', "\\", "{a}", "~",
    "s:" + "x" * 198, "s#" + "0" * 40, "x" * 249 + "1", "x" * 249 + "2",
]  # fmt: skip
BYTES = [b"\x00", b"0", b"\r\n", b"END\r\n", bytes(range(256)), "é".encode(), b"\xff" * 3]
TTL = 60.0


class CellSuite:
    """The suite for the verbs of a cell. Run it first: a failure here makes many tests of the other suites fail.

    >>> from stampede.testing import CellSuite
    >>> from stampede.testing.cells import MemoryCell  # yours
    >>> class TestMyCell(CellSuite):  # by pytest
    ...     def make_cell(self):
    ...         return MemoryCell()
    """

    slack: ClassVar[float] = 0.5  # seconds by which ages may be wrong, and by which data may outlive its ttl

    def make_cell(self) -> Cell:
        """Return a new cell on an empty store."""
        raise NotImplementedError

    def make_peer(self, cell: Cell) -> Cell:
        """Return another client of the same store, or the cell itself."""
        return cell

    @contextmanager
    def cells(self) -> Iterator[tuple[Cell, Cell]]:
        """Give a new cell and its peer, and close both at the end."""
        cell = self.make_cell()
        try:
            peer = self.make_peer(cell)
            try:
                yield cell, peer
            finally:
                if peer is not cell:
                    peer.close()
        finally:
            cell.close()

    def test_what_is_written_is_read(self) -> None:
        """A read must return exactly what was written; otherwise records would be changed or lost."""
        with self.cells() as (cell, peer):
            assert _one(cell).data is None
            version = None
            for data in (*BYTES, b"x" * min(cell.longest or 1_000_000, 1_000_000)):
                version = _written(cell, data, version)
                seen = _one(peer)
                assert seen.data == data
                assert type(seen.data) is bytes
                assert seen.version == version

    def test_names_are_exact(self) -> None:
        """Similar names must stay distinct; otherwise two keys would be one. Many databases ignore case by default."""
        with self.cells() as (cell, peer):
            for number, name in enumerate(NAMES):
                _written(cell, b"%d" % number, name=name)
            for number, name in enumerate(NAMES):
                assert _one(peer, name).data == b"%d" % number, name

    def test_a_read_is_in_order(self) -> None:
        """Each name must have its answer, in the same order; otherwise values would be given to the wrong keys."""
        with self.cells() as (cell, peer):
            for name in ("a", "b", "d"):
                _written(cell, name.encode(), name=name)
            assert [seen.data for seen in peer.read(["d", "c", "a", "b"])] == [b"d", None, b"a", b"b"]
            names = ["d", *[f"n{number}" for number in range((cell.at_once or 100) - 1)]]
            assert [seen.data for seen in peer.read(names)] == [b"d"] + [None] * (len(names) - 1)

    def test_who_has_seen_something_else_is_too_late(self) -> None:
        """A swap of an old version must fail; otherwise a computation that was overtaken would be stored."""
        with self.cells() as (cell, peer):
            first = _written(cell, b"1")
            second = _written(peer, b"2", first)
            for version in (None, first):
                for data in (b"late", None) if version is not None else (b"late",):
                    reply = cell.swap("n", version, data, TTL)
                    assert isinstance(reply, Faster)
                    assert reply.seen is None or (reply.seen.data, reply.seen.version) == (b"2", second)
                    assert reply.seen is not None or not cell.tells
            assert _one(cell).data == b"2"
            assert _one(cell).version == second

    def test_what_is_removed_is_gone(self) -> None:
        """A swap to None must remove the data; otherwise an invalidated value would be served."""
        with self.cells() as (cell, peer):
            version = _written(cell, b"1")
            assert not isinstance(peer.swap("n", version, None, TTL), Faster)
            assert _one(cell).data is None
            assert isinstance(cell.swap("n", version, b"late", TTL), Faster)
            _written(cell, b"2", _one(cell).version)
            assert _one(peer).data == b"2"

    def test_versions_never_come_back(self) -> None:
        """A name must never have the same version twice; otherwise late values would be stored, a renewed lease would
        look dead, and a lease could be taken for another one."""
        with self.cells() as (cell, peer):
            met: list[Version] = []
            for number in range(8):
                version = _written((cell, peer)[number % 2], b"%d" % number, _one(cell).version)
                assert version is not None
                assert all(version != old for old in met)
                met.append(version)
                if number % 3 == 2:
                    cell.swap("n", version, None, TTL)
            if cell.grows:
                assert all(type(version) is int for version in met)
                assert met == sorted(met)

    def test_one_of_many_is_the_first(self) -> None:
        """Only one of many concurrent swaps may succeed; otherwise several callers would compute: the stampede."""
        with self.cells() as (cell, peer):
            for name, version in (("n", None), ("m", _written(cell, b"1", name="m"))):
                swapped = _together([
                    partial((cell, peer)[number % 2].swap, name, version, b"by %d" % number, TTL)
                    for number in range(HERD)
                ])  # fmt: skip
                assert sum(not isinstance(each, Faster) for each in swapped) == 1

    def test_what_ends_is_there_until_then(self) -> None:
        """Data must live for its ttl; otherwise leases would end too early, and values without an end would be lost."""
        with self.cells() as (cell, _):
            began = time.monotonic()
            cell.swap("n", None, b"1", 0.3)
            while (seen := _one(cell)).data is not None and time.monotonic() - began < 0.6:
                time.sleep(0.02)
            assert seen.data is not None or time.monotonic() - began > 0.3
            cell.swap("m", None, b"1", float("inf"))
            assert _one(cell, "m").data == b"1"

    def test_ages_are_told(self) -> None:
        """The age must be right, or None; otherwise leases and values would expire too early or too late."""
        with self.cells() as (cell, peer):
            began, _ = time.monotonic(), _written(cell, b"1")
            seen = _one(peer)
            if not cell.ages:
                assert seen.age is None
                raise unittest.SkipTest("the cell declares that it tells no ages")
            time.sleep(0.1)
            age = _one(peer).age
            assert age is not None
            assert 0.1 - self.slack <= age <= time.monotonic() - began + self.slack
            began, _ = time.monotonic(), _written(cell, b"2", seen.version)
            assert -0.001 <= (_one(peer).age or 0.0) <= time.monotonic() - began + self.slack

    def test_changes_are_told(self) -> None:
        """A watched name must report each change; otherwise waiters would sleep until they next poll."""
        with self.cells() as (cell, peer):
            if not isinstance(cell, WatchingCell):
                raise unittest.SkipTest("the cell is no WatchingCell")
            changed, other = threading.Event(), threading.Event()
            ends = [cell.watch("n", changed.set), cell.watch("n", changed.set), cell.watch("m", other.set)]
            version = None
            for data in (b"1", b"2", None):
                changed.clear()
                version = peer.swap("n", version, data, TTL)
                assert changed.wait(SOON), data
            for end in ends:
                end()

    def test_it_can_be_asked_from_everywhere(self) -> None:
        """A cell must be usable from many threads at once; otherwise threads would get each other's answers."""
        with self.cells() as (cell, _):
            assert 0 <= cell.ping() < SOON
            for number in range(HERD):
                _written(cell, b"%d" % number, name=f"n{number}")
            seen = _together([partial(_one, cell, f"n{number}") for number in range(HERD)] * 4)
            assert [each.data for each in seen] == [b"%d" % number for number in range(HERD)] * 4


def _one(cell: Cell, name: str = "n") -> Seen:
    (seen,) = cell.read([name])
    return seen


def _written(cell: Cell, data: bytes, version: Version = None, name: str = "n") -> Version:
    new = cell.swap(name, version, data, TTL)
    assert not isinstance(new, Faster), "the swap failed, although no other client wrote"
    return new


def _together(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [each.result(SOON) for each in [pool.submit(task) for task in tasks]]
