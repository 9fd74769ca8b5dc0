"""The library's threads receive no signals: those are for the program's own threads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from servers import shared_redis
from zookeeper_server import shared_zookeeper

import stampede
from stampede import Cache

PACKAGE = Path(stampede.__file__).parent

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads the masks of threads from /proc")

USE = """
import asyncio, os, signal, sys, threading, time
from stampede import Cache

def mask(status):
    try:
        (line,) = [line for line in open(status) if line.startswith("SigBlk:")]
    except OSError:
        return -1  # the thread has just ended
    return int(line.split()[1], 16)

def unblocked():
    '''Threads other than this one that can receive SIGTERM.'''
    others = [task for task in os.listdir("/proc/self/task") if int(task) != threading.get_native_id()]
    assert others, "there is no thread to look at"
    return [task for task in others if not mask(f"/proc/self/task/{task}/status") >> (signal.SIGTERM - 1) & 1]

cache = Cache(sys.argv[1], ttl=60, lease=1.5, namespace=str(os.getpid()))

@cache.cached(stale=60, background=True)
def aged(): return threading.current_thread().name

@cache.cached
def slow(): time.sleep(0.6)  # longer than a third of its lease, which is then renewed

@cache.cached
async def suspended(): await asyncio.sleep(0.6)

slow()
asyncio.run(suspended())
with cache.lock("a"): time.sleep(0.6)
aged()
aged.expire()
aged()
while not aged().startswith("stampede"): time.sleep(0.005)
"""


def ran(program: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr or done.returncode
    return done.stdout


@pytest.mark.parametrize(
    "kind",
    ["disk", pytest.param("redis", marks=pytest.mark.redis), pytest.param("zookeeper", marks=pytest.mark.zookeeper)],
)
def test_no_thread_of_ours_receives_the_process_s_signals(kind: str, tmp_path: Path) -> None:
    """If the main thread blocks SIGTERM, no thread of the library receives it and so kills the process."""
    urls = {
        "disk": lambda: f"disk://{tmp_path}/c",
        "redis": lambda: shared_redis().url,
        "zookeeper": lambda: shared_zookeeper().url,
    }
    if kind == "zookeeper":
        program = (
            USE.partition("cache = ")[0]
            + """
from stampede import Lock
held = Lock("a", on=sys.argv[1])
held.acquire()
"""
        )
    else:
        program = USE
    program += """
end = time.monotonic() + 20
while unblocked():  # a function of the program is at its end, with the program's own signals
    assert time.monotonic() < end, [each.name for each in threading.enumerate()]
    time.sleep(0.005)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
assert signal.SIGTERM in signal.sigpending()  # it waits for the main thread
signal.signal(signal.SIGTERM, lambda *_: print("received"))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
"""
    assert ran(program, urls[kind]()) == "received\n"


def test_processes_that_a_function_starts_can_be_terminated() -> None:
    """A process that a cached function starts can be terminated, although it inherits its thread's signal mask."""
    computed_by = set()

    def child(n: int = 0) -> int:
        computed_by.add(threading.current_thread().name)
        barrier.wait(10)
        child = subprocess.Popen(["sleep", "60"])
        try:
            child.terminate()
            return child.wait(20)
        finally:
            child.kill()

    with Cache("memory://", ttl=60) as cache:
        barrier = threading.Barrier(1)
        assert cache.cached(deadline=50)(child)() == -signal.SIGTERM
        barrier = threading.Barrier(2)
        assert cache.cached(child).many([(1,), (2,)], workers=2) == [-signal.SIGTERM] * 2
    assert {"stampede-beside", "stampede-many"} <= computed_by


def test_threads_are_started_in_one_place() -> None:
    """All threads are started in one module. A thread that another module starts would receive signals."""
    files = [path for path in PACKAGE.rglob("*.py") if not {"testing", "threads.py"} & set(path.parts)]
    found = [
        path
        for path in files
        if re.search(r"\b(Thread|threading\.Timer|ThreadPoolExecutor)\(", path.read_text("utf-8"))
    ]
    assert found == []
