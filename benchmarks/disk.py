"""The disk engine alone, on raw bytes: hits compared with diskcache, misses, herds, and killed holders.

python benchmarks/disk.py
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from stampede.engines.disk import DiskEngine
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Busy, Found, Granted
from stampede.runtime.colour import run_blocking

SPAWN = multiprocessing.get_context("spawn")
KEY = "k"
VALUE = os.urandom(200)
ROUNDS = 7


def entry() -> Entry[bytes]:
    return Entry(VALUE, new_id(), fresh=600.0, keep=600.0)


# -- one process, pinned ----------------------------------------------------------------------------------------------


def single() -> None:
    """Return medians of interleaved rounds, in µs."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    folder = Path(tempfile.mkdtemp(prefix="stampede-bench-"))
    engine = DiskEngine(folder / "ours")
    run_blocking(engine.blocking.store.set(KEY, entry()))
    token = new_id()
    reply = run_blocking(engine.blocking.claims.claim(KEY, token, Ask(10.0)))
    assert isinstance(reply, Found)
    assert reply.ticket is not None
    stamps, slot, stamp = reply.ticket
    fresh = iter(range(10**9))

    def miss() -> None:
        key = f"m{next(fresh)}"
        run_blocking(engine.blocking.claims.claim(key, token, Ask(10.0)))
        run_blocking(engine.blocking.claims.fill(key, token, entry()))

    subjects: dict[str, tuple[int, Callable[[], object]]] = {
        "stampede: look (a hit)": (5_000, lambda: engine.looks.look(KEY)),
        "stampede: claim (a hit)": (5_000, lambda: run_blocking(engine.blocking.claims.claim(KEY, token, Ask(10.0)))),
        "stampede: get": (5_000, lambda: run_blocking(engine.blocking.store.get([KEY]))),
        "stampede: ticket check": (100_000, lambda: stamps[slot] == stamp),
        "stampede: generation": (50_000, lambda: run_blocking(engine.blocking.store.generation("f"))),
        "stampede: claim + fill (a miss)": (500, miss),
        "stampede: set": (500, lambda: run_blocking(engine.blocking.store.set(KEY, entry()))),
        "stampede: invalidate": (500, lambda: run_blocking(engine.blocking.store.invalidate("nothing"))),
    }
    try:
        import diskcache  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        print("(without diskcache: pip install diskcache)")
    else:
        peer = diskcache.Cache(str(folder / "peer"))
        peer.set(KEY, VALUE, expire=600)
        subjects |= {
            "diskcache: get (a hit)": (5_000, lambda: peer.get(KEY)),
            "diskcache: set": (500, lambda: peer.set(KEY, VALUE, expire=600)),
        }
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(ROUNDS):
        for name, (times, call) in subjects.items():
            figures[name].append(timed(call, times))
    nothing = statistics.median(timed(lambda: None, 100_000) for _ in range(ROUNDS))
    print(f"{'one process, 200 bytes':34} {'µs':>9}")
    for name, rounds in figures.items():
        print(f"{name:34} {statistics.median(rounds) - nothing:9.3f}")
    engine.close()
    shutil.rmtree(folder)


def timed(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times * 1e6


# -- herds ----------------------------------------------------------------------------------------------------------


def call(engine: DiskEngine, key: str, cost: float) -> tuple[float, float | None]:
    """Return the time at which this caller had the value, and the time at which it had stored it, if it computed."""
    token = new_id()
    while True:
        reply = run_blocking(engine.blocking.claims.claim(key, token, Ask(10.0)))
        if isinstance(reply, Found):
            return time.monotonic(), None
        if isinstance(reply, Granted):
            time.sleep(cost)
            run_blocking(engine.blocking.claims.fill(key, token, entry()))
            return time.monotonic(), time.monotonic()
        if isinstance(reply, Busy):
            run_blocking(engine.blocking.claims.wait(key, reply, 10.0))


def callers(pipe: Connection, folder: Path, threads: int) -> None:
    engine = DiskEngine(folder)
    while (key := pipe.recv()) is not None:
        with ThreadPoolExecutor(threads) as pool:
            pipe.send(list(pool.map(partial(call, engine, key), [0.2] * threads)))


def herd(processes: int, threads: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="stampede-bench-"))
    pipes = []
    for _ in range(processes):
        ours, theirs = SPAWN.Pipe()
        SPAWN.Process(target=callers, args=(theirs, folder / "herd", threads), daemon=True).start()
        pipes.append(ours)
    late: list[float] = []
    computed: list[int] = []
    for number in range(ROUNDS + 1):
        for pipe in pipes:
            pipe.send(f"herd {number}")
        ends = [end for pipe in pipes for end in pipe.recv()]
        stored = [when for _, when in ends if when is not None]
        if number:  # the first one imports and opens
            computed.append(len(stored))
            late.append(1000 * (max(when for when, _ in ends) - min(stored)))
    for pipe in pipes:
        pipe.send(None)
    print(f"\nherd of {processes} processes x {threads} threads: computations {computed}")
    print(f"last waiter after the store: median {statistics.median(late):.1f} ms, worst {max(late):.1f} ms")
    shutil.rmtree(folder, ignore_errors=True)


def holder(pipe: Connection, folder: Path, key: str) -> None:
    engine = DiskEngine(folder)
    run_blocking(engine.blocking.claims.claim(key, new_id(), Ask(60.0)))
    pipe.send("held")
    signal.pause()


def takeover() -> None:
    folder = Path(tempfile.mkdtemp(prefix="stampede-bench-"))
    engine = DiskEngine(folder / "kill")
    took = []
    for number in range(ROUNDS):
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=holder, args=(theirs, folder / "kill", f"k{number}"))
        process.start()
        ours.recv()
        granted: list[float] = []
        waiter = threading.Thread(target=lambda: granted.append(until_granted(engine, f"k{number}")))  # noqa: B023
        waiter.start()
        time.sleep(0.05)
        killed = time.monotonic()
        os.kill(process.pid or 0, signal.SIGKILL)
        waiter.join()
        took.append(1000 * (granted[0] - killed))
        process.join()
    print(f"\nholder killed: next lease after median {statistics.median(took):.1f} ms, worst {max(took):.1f} ms")
    engine.close()
    shutil.rmtree(folder, ignore_errors=True)


def until_granted(engine: DiskEngine, key: str) -> float:
    while isinstance(reply := run_blocking(engine.blocking.claims.claim(key, new_id(), Ask(10.0))), Busy):
        run_blocking(engine.blocking.claims.wait(key, reply, 10.0))
    return time.monotonic()


def main() -> None:
    everywhere = os.sched_getaffinity(0)
    single()
    os.sched_setaffinity(0, everywhere)
    herd(8, 8)
    takeover()


if __name__ == "__main__":
    main()
