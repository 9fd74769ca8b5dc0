"""The coherent local tier: a value under a valid ticket is never older than the last completed write."""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from disk_world import Connection, Other, other
from known_generation import generation_of

from stampede.engines.disk import DiskEngine
from stampede.engines.disk.database import DiskDatabase, Write
from stampede.engines.disk.rows import key_number
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Found, Ticket
from stampede.runtime.colour import run_blocking

KEYS = [f"k{number}" for number in range(4)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[DiskEngine]:
    engine = DiskEngine(tmp_path / "cache")
    yield engine
    engine.close()


def put(engine: DiskEngine, key: str, number: int) -> None:
    run_blocking(engine.blocking.store.set(key, Entry(b"%d" % number, new_id())))


def look(engine: DiskEngine, key: str) -> Found | None:
    rows = engine._rows
    reply = rows.database.patiently(lambda: rows.answer(key, new_id(), Ask(60.0)))  # a writer may keep readers out
    return reply if isinstance(reply, Found) else None


def kept(engine: DiskEngine, key: str) -> tuple[int, Ticket]:
    """The stored number, and the ticket under which a local tier keeps it."""
    reply = look(engine, key)
    assert reply is not None
    assert reply.ticket is not None
    return int(reply.entry.value), reply.ticket


def holds(ticket: Ticket) -> bool:
    return ticket.stamps[ticket.slot] == ticket.stamp


# -- each verb -----------------------------------------------------------------------------------------------------


def fill(engine: DiskEngine) -> None:
    token = new_id()
    run_blocking(engine.blocking.claims.claim("k", token, Ask(60.0, force=True)))
    run_blocking(engine.blocking.claims.fill("k", token, Entry(b"2", new_id())))


CHANGES: dict[str, Callable[[DiskEngine], object]] = {
    "fill": fill,
    "set": lambda engine: put(engine, "k", 2),
    "expire": lambda engine: run_blocking(engine.blocking.store.expire("k")),
    "invalidate": lambda engine: run_blocking(engine.blocking.store.invalidate("k")),
    "bump all": lambda engine: run_blocking(engine.blocking.store.bump("")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_voids_tickets(engine: DiskEngine, change: str) -> None:
    """Every change makes tickets invalid. Otherwise other processes would keep the old value in their local tiers."""
    peer = DiskEngine(engine.directory)
    put(engine, "k", 1)
    _, ticket = kept(peer, "k")
    assert holds(ticket)
    CHANGES[change](engine)
    assert not holds(ticket)
    peer.close()


def test_a_bump_ends_only_its_own_generation(engine: DiskEngine) -> None:
    """The bump of a scope ends the ticket of its generation in all processes, and no other ticket."""
    peer = DiskEngine(engine.directory)
    put(engine, "k", 1)
    _, ticket = kept(peer, "k")
    assert peer.recalls is not None
    for scope in ("f", "g"):
        generation_of(peer, scope)
    own, other = (peer.recalls.ticket_of_generation(scope) for scope in ("f", "g"))
    for verb in (engine.blocking.store.bump, engine.blocking.softens.soften):
        assert holds(own)
        run_blocking(verb("f"))
        assert not holds(own)
        assert peer.recalls.generation_at_hand("f") is None
        assert holds(ticket)
        assert holds(other)
        generation_of(peer, "f")
        own = peer.recalls.ticket_of_generation("f")
    peer.close()


def test_what_is_evicted_can_be_invalidated(engine: DiskEngine) -> None:
    """The invalidation of an evicted value makes its tickets invalid, because local tiers may still have it."""
    put(engine, "k", 1)
    _, ticket = kept(engine, "k")
    with engine._rows.database.writing() as write:
        write.execute("DELETE FROM entries")
    assert holds(ticket)
    assert run_blocking(engine.blocking.store.invalidate("k")) is False
    assert not holds(ticket)


def test_hits_and_claims_void_nothing(engine: DiskEngine) -> None:
    """Hits and claims leave tickets valid. Otherwise local tiers would read again without need."""
    put(engine, "k", 1)
    _, ticket = kept(engine, "k")
    token = new_id()
    run_blocking(engine.blocking.claims.claim("k", token, Ask(60.0, force=True)))
    run_blocking(engine.blocking.claims.renew("k", token, 60.0))
    run_blocking(engine.blocking.claims.abandon("k", token))
    kept(engine, "k")
    assert holds(ticket)


def test_read_under_a_mark_is_not_kept(engine: DiskEngine) -> None:
    """A read during a write gets no ticket. Otherwise the old value would be kept under the new stamp."""
    put(engine, "k", 1)
    inside, go = threading.Event(), threading.Event()

    def write() -> None:
        with engine._rows.database.writing() as write:
            write.change(_number("k"))
            inside.set()
            go.wait(30)

    writer = threading.Thread(target=write)
    writer.start()
    inside.wait(30)
    reply = look(engine, "k")
    assert reply is not None
    assert reply.ticket is None
    go.set()
    writer.join()
    assert holds(kept(engine, "k")[1])


def _number(key: str) -> int:
    return key_number(key)[0]


# -- writers that are killed -------------------------------------------------------------------------------------------


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(function: Callable[..., object]) -> Callable[..., None]:
    def then_die(*args: object) -> None:
        function(*args)
        die()

    return then_die


POINTS: dict[str, tuple[type, str, Callable[[Callable[..., object]], Callable[..., None]]]] = {
    "before the transaction": (DiskDatabase, "_begin_write", lambda _: die),
    "in the transaction": (DiskDatabase, "_begin_write", after),
    "under the mark": (Write, "change", after),
    "after the commit": (Write, "settle", lambda _: die),
    "after the stamp": (Write, "settle", after),
}


def write_and_die(pipe: Connection, directory: Path, point: str) -> None:
    engine = DiskEngine(directory)
    owner, name, how = POINTS[point]
    pipe.send("ready")
    pipe.recv()
    setattr(owner, name, how(getattr(owner, name)))
    put(engine, "k", 2)


@pytest.mark.parametrize("point", POINTS)
def test_killed_writer(engine: DiskEngine, point: str) -> None:
    """A writer that is killed leaves no old value under a valid ticket, and later reads get tickets again."""
    put(engine, "k", 1)
    first, ticket = kept(engine, "k")
    with other(write_and_die, engine.directory, point) as writer:
        writer.hear()
        writer.tell()
        writer.join()
    reply = look(engine, "k")
    assert reply is not None
    there = int(reply.entry.value)
    if holds(ticket):
        assert there == first
    put(engine, "k", 3)  # the next writer removes the mark
    again, ticket = kept(engine, "k")
    assert again == 3
    put(engine, "k", 4)
    assert not holds(ticket)
    assert kept(engine, "k")[0] == 4


# -- everything at once ------------------------------------------------------------------------------------------


def write_for_a_while(pipe: Connection, directory: Path, memory: str, key: str) -> None:
    """Writes numbers that only grow, at least to 100: even ones are set, odd ones invalidate. A completed number is
    published."""
    engine = DiskEngine(directory)
    shared = SharedMemory(memory)
    at = 8 * KEYS.index(key)
    (number,) = struct.unpack_from("q", shared.buf, at)
    pipe.send("ready")
    while number < 100 or not pipe.poll():
        number += 1 + (random.random() < 0.3)
        if number % 2:
            run_blocking(engine.blocking.store.invalidate(key))
        else:
            put(engine, key, number)
        struct.pack_into("q", shared.buf, at, number)
    shared.close()
    pipe.send("over")


def read_for_a_while(pipe: Connection, directory: Path, memory: str) -> None:
    """Reads through a local tier. Reports how often it looked, how often a ticket was valid, and what was wrong."""
    engine = DiskEngine(directory)
    shared = SharedMemory(memory)
    tier: dict[str, tuple[int, Ticket]] = {}
    looks = hits = 0
    wrong: list[str] = []
    pipe.send("ready")
    while looks < 1000 or not pipe.poll():
        for at, key in enumerate(KEYS):
            for _ in range(20):
                looks += 1
                (completed,) = struct.unpack_from("q", shared.buf, 8 * at)
                local = tier.get(key)
                if local is not None and holds(local[1]):
                    hits += 1
                    if local[0] < completed:
                        wrong.append(f"{key}: {local[0]} after {completed}")
                    continue
                reply = look(engine, key)
                if reply is not None and int(reply.entry.value) < completed:
                    wrong.append(f"{key}: read {reply.entry.value!r} after {completed}")
                if reply is not None and reply.ticket is not None:
                    tier[key] = int(reply.entry.value), reply.ticket
    shared.close()
    pipe.send((looks, hits, wrong))


def test_no_reader_is_ever_behind(engine: DiskEngine) -> None:
    """No reader gets a value that another process has already replaced or invalidated."""
    memory = SharedMemory(create=True, size=8 * len(KEYS))
    try:
        readers = [Other(read_for_a_while, engine.directory, memory.name) for _ in range(3)]
        writers = [Other(write_for_a_while, engine.directory, memory.name, key) for key in KEYS[:3]]
        try:
            for each in [*readers, *writers]:
                each.hear()
            time.sleep(1.0)  # the load runs for this long
            killed = writers.pop()
            killed.kill()  # at any point: only what it has published counts
            time.sleep(0.3)
            for each in [*writers, *readers]:
                each.tell()
            for each in writers:
                each.hear()
            reports = [each.hear() for each in readers]
        finally:
            for each in [*readers, *writers, killed]:
                each.end()
        assert [wrong for _, _, wrong in reports] == [[], [], []]
        assert all(hits > looks / 10 for looks, hits, _ in reports)
    finally:
        memory.close()
        memory.unlink()
