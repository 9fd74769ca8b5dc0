"""The disk engine in several processes, some of which are killed, frozen or forked."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_world import PATIENCE, Connection, other, others

from stampede.engines.disk import DiskEngine, rows
from stampede.engines.disk.rows import bell_of, key_number
from stampede.errors import EngineError
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Busy, Found, Granted, Reply
from stampede.runtime.colour import run_blocking

KEY = "k"
LEASE = 60.0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[DiskEngine]:
    engine = DiskEngine(tmp_path / "cache")
    yield engine
    engine.close()


def claim(engine: DiskEngine, token: bytes | None = None, key: str = KEY, **terms: Any) -> Reply:
    return run_blocking(engine.blocking.claims.claim(key, token or new_id(), Ask(terms.pop("lease", LEASE), **terms)))


def fill(engine: DiskEngine, token: bytes, value: bytes = b"value", key: str = KEY) -> bool:
    return run_blocking(engine.blocking.claims.fill(key, token, value_of(value)))


def value_of(value: bytes, fresh: float = 600.0) -> Entry[bytes]:
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh)


def herd_of_tasks(pipe: Connection, directory: Path, tasks: int) -> None:
    engine = DiskEngine(directory)
    computed = 0

    async def call() -> bytes:
        nonlocal computed
        token = new_id()
        while True:
            reply = await engine.suspending.claims.claim(KEY, token, Ask(LEASE))
            if isinstance(reply, Found):
                return reply.entry.value  # type: ignore[no-any-return]
            if isinstance(reply, Granted):
                computed += 1
                await asyncio.sleep(0.05)
                await engine.suspending.claims.fill(KEY, token, value_of(b"value"))
            elif isinstance(reply, Busy):
                await engine.suspending.claims.wait(KEY, reply, PATIENCE)

    async def all_of_them() -> None:
        values = await asyncio.gather(*[call() for _ in range(tasks)])
        pipe.send((computed, set(values), threading.active_count()))

    asyncio.run(all_of_them())


def test_herd_of_tasks(engine: DiskEngine) -> None:
    """In two processes only one of all tasks computes, and the waiting tasks need no thread each."""
    with others(2, herd_of_tasks, engine.directory, 500) as herd:
        reports = [each.hear() for each in herd]
    assert sum(computed for computed, _, _ in reports) == 1
    assert [values for _, values, _ in reports] == [{b"value"}] * 2
    assert all(threads <= 12 for _, _, threads in reports)


def wait_for_both(pipe: Connection, directory: Path, keys: list[str]) -> None:
    rows.SAFETY = 2 * PATIENCE  # only a waiter that is woken answers in time
    engine = DiskEngine(directory)
    busy = [claim(engine, key=key) for key in keys]

    def wait(number: int) -> None:
        reply = busy[number]
        while isinstance(reply, Busy):
            run_blocking(engine.blocking.claims.wait(keys[number], reply, PATIENCE))
            reply = claim(engine, key=keys[number])
        pipe.send(keys[number])

    waiters = [threading.Thread(target=wait, args=(number,)) for number in range(2)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()


def test_keys_that_share_a_slot(engine: DiskEngine) -> None:
    """If two keys share a slot, a change of one key does not prevent that waiters of the other are woken."""
    slots: dict[int, str] = {}
    keys: list[str] = []
    while not keys:
        key = f"k{len(slots)}"
        bell = bell_of(key_number(key)[0])
        keys = [slots[bell], key] if bell in slots else []
        slots[bell] = key
    tokens = [new_id(), new_id()]
    for key, token in zip(keys, tokens, strict=True):
        assert isinstance(claim(engine, token, key), Granted)
    with other(wait_for_both, engine.directory, keys) as waiter:
        stamps = engine._rows.database.opened().stamps
        for key, token in zip(keys, tokens, strict=True):
            began = time.monotonic()
            while not stamps._awaited[bell] and time.monotonic() - began < PATIENCE:
                os.sched_yield()  # until it waits, or waits again
            assert fill(engine, token, key=key)
            assert waiter.hear() == key


def hold(pipe: Connection, directory: Path, lease: float, key: str = KEY) -> None:
    """Takes the lease, says so, and fills when it is told to."""
    engine = DiskEngine(directory)
    token = new_id()
    pipe.send(type(claim(engine, token, key, lease=lease)).__name__)
    pipe.recv()
    pipe.send(fill(engine, token, b"late", key))


def test_killed_holder(engine: DiskEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a holder is killed, its key can be claimed at once, before the lease ends."""
    monkeypatch.setattr(rows, "SAFETY", 2 * PATIENCE)  # no waiter looks by itself
    with other(hold, engine.directory, LEASE) as holder:
        assert holder.hear() == "Granted"
        busy = claim(engine)
        assert isinstance(busy, Busy)
        killer = threading.Timer(0.05, holder.kill)
        killer.start()
        died = time.monotonic() + 0.05
        run_blocking(engine.blocking.claims.wait(KEY, busy, PATIENCE))
        while isinstance(reply := claim(engine), Busy):
            run_blocking(engine.blocking.claims.wait(KEY, reply, PATIENCE))
        assert time.monotonic() - died < PATIENCE / 3  # benchmarks/disk.py measures it
        killer.join()
    assert isinstance(reply, Granted)


def test_killed_holder_of_a_lock(engine: DiskEngine) -> None:
    """If the holder of a lock is killed, the lock can be acquired at once."""
    with other(hold_lock, engine.directory) as holder:
        assert holder.hear() == "Granted"
        reply = run_blocking(engine.blocking.locks.acquire("l", b"mine", LEASE))
        assert isinstance(reply, Busy)
        holder.kill()
        assert isinstance(run_blocking(engine.blocking.locks.acquire("l", b"mine", LEASE)), Granted)


def hold_lock(pipe: Connection, directory: Path) -> None:
    engine = DiskEngine(directory)
    pipe.send(type(run_blocking(engine.blocking.locks.acquire("l", b"theirs", LEASE))).__name__)
    pipe.recv()


def freeze_inside_a_write(pipe: Connection, directory: Path) -> None:
    engine = DiskEngine(directory)
    with engine._rows.database.writing() as write:
        write.execute("DELETE FROM entries")
        pipe.send("inside")
        pipe.recv()


def test_frozen_inside_a_write(tmp_path: Path) -> None:
    """If a process is frozen inside a write, reads still work, and the writes of others fail with an error."""
    engine = DiskEngine(tmp_path / "cache", timeout=0.2)
    run_blocking(engine.blocking.store.set(KEY, value_of(b"value")))
    with other(freeze_inside_a_write, engine.directory) as writer:
        assert writer.hear() == "inside"
        writer.freeze()
        assert isinstance(claim(engine), Found)
        assert run_blocking(engine.blocking.store.get([KEY]))[0] is not None
        for verb in (
            lambda: run_blocking(engine.blocking.store.set(KEY, value_of(b"new"))),
            lambda: run_blocking(engine.blocking.store.invalidate(KEY)),
            lambda: claim(engine, key="cold"),
            engine.ping,
        ):
            start = time.monotonic()
            with pytest.raises(EngineError, match=str(writer.pid)):
                verb()
            assert time.monotonic() - start < PATIENCE / 3
        writer.kill()
        run_blocking(engine.blocking.store.set(KEY, value_of(b"new")))
    found = claim(engine)
    assert isinstance(found, Found)
    assert found.entry.value == b"new"
    assert found.ticket is not None
    engine.close()


# -- forks ----------------------------------------------------------------------------------------------------------


def fork_inside_a_computation(pipe: Connection, directory: Path) -> None:
    """A holder whose child outlives it."""
    engine = DiskEngine(directory)
    token = new_id()
    granted = type(claim(engine, token)).__name__
    child = os.fork()
    if child == 0:
        pipe.send((granted, os.getpid()))
        signal.pause()
    pipe.recv()


def test_a_child_does_not_keep_its_dead_parents_lease(engine: DiskEngine) -> None:
    """The lease of a dead parent ends, even if a child that was forked inside its computation is alive."""
    with other(fork_inside_a_computation, engine.directory) as holder:
        granted, child = holder.hear()
        try:
            assert granted == "Granted"
            assert isinstance(claim(engine), Busy)
            holder.kill()
            assert isinstance(claim(engine), Granted)
        finally:
            os.kill(child, signal.SIGKILL)


def daemonize(pipe: Connection, directory: Path) -> None:
    """The parent exits and the child goes on: it must have connections of its own by then."""
    engine = DiskEngine(directory)
    run_blocking(engine.blocking.store.set("before", value_of(b"before")))
    child = os.fork()
    if child:
        engine.close()
        os._exit(0)
    pipe.send(os.getpid())
    pipe.recv()
    for number in range(50):
        run_blocking(engine.blocking.store.set(f"k{number}", value_of(b"x" * 1000)))
    pipe.send("done")
    pipe.recv()
    pipe.send(run_blocking(engine.blocking.store.get(["after"]))[0] is not None)
    pipe.recv()


def test_a_daemons_writes_are_not_lost(tmp_path: Path) -> None:
    """A daemon's writes remain after its parent exits: the parent's close must not remove the log."""
    directory = tmp_path / "cache"
    with other(daemonize, directory) as parent:
        parent.hear()
        parent.join()
        engine = DiskEngine(directory)
        run_blocking(engine.blocking.store.set("between", value_of(b"x")))
        parent.tell()
        assert parent.hear() == "done"
        assert None not in run_blocking(engine.blocking.store.get(["before", *[f"k{number}" for number in range(50)]]))
        run_blocking(engine.blocking.store.set("after", value_of(b"x")))
        parent.tell()
        assert parent.hear() is True
        engine.close()


def test_a_fork_while_another_thread_opens(tmp_path: Path) -> None:
    """A child that is forked while another thread opens the database does not wait for that thread."""
    engine = DiskEngine(tmp_path / "cache")
    held, done = threading.Event(), threading.Event()

    def opens() -> None:
        with engine._rows.database._opening:
            held.set()
            done.wait(20)

    opener = threading.Thread(target=opens)
    opener.start()
    assert held.wait(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        run_blocking(engine.blocking.store.set("k", value_of(b"x")))
        os._exit(0)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        opener.join()
    engine.close()


def test_forks_while_others_write(tmp_path: Path) -> None:
    """A child that is forked during the transaction of another thread can write."""
    engine = DiskEngine(tmp_path / "cache", timeout=15)  # on a busy machine a writer may wait so long for its turn
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            run_blocking(engine.blocking.store.set("busy", value_of(b"x" * 100)))

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        for number in range(10):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                signal.alarm(20)
                try:
                    run_blocking(engine.blocking.store.set(f"child {number}", value_of(b"x")))
                    os._exit(0)
                except BaseException:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        for writer in writers:
            writer.join()
    assert None not in run_blocking(engine.blocking.store.get([f"child {number}" for number in range(10)]))
    engine.close()
