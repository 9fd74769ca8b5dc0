"""Where no threads can be started, and while the interpreter ends, calls still work, without useless warnings."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from forked import python
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import shared_redis

ENGINES = ["memory", "disk", "redis", "memcached", "postgres"]


def url_of(engine: str, tmp_path: Path) -> str:
    if engine == "postgres":
        return prepared_postgres().postgres_url
    if engine in ("redis", "memcached"):
        return (shared_redis() if engine == "redis" else shared_memcached()).url
    return {"memory": "memory://", "disk": f"disk://{tmp_path}"}[engine]


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The output of a Python process on both streams. The process must have succeeded."""
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def run(program: str, *args: str) -> str:
    return said(python("-c", textwrap.dedent(program), *args))


NO_DAEMONS = """
    import sys, threading, time
    from concurrent.futures import ThreadPoolExecutor

    class Refused(threading.Thread):
        def __init__(self, *args, daemon=None, **kwargs):
            if daemon:
                raise RuntimeError("daemon threads are disabled in this (sub)interpreter")
            super().__init__(*args, **kwargs)

    threading.Thread = Refused
"""

USE = """
    import asyncio
    from stampede import Cache, Lock

    with Cache(sys.argv[1], ttl=60, namespace=sys.argv[2], local=sys.argv[1] != "memory://") as cache:
        def slow():
            time.sleep(0.05)
            return 1

        with ThreadPoolExecutor(4) as pool:
            herd = [pool.submit(cache.get_or_compute, "k", slow) for _ in range(4)]
            assert [each.result() for each in herd] == [1] * 4
        other = Cache(sys.argv[1], ttl=60, namespace=sys.argv[2])
        with other, ThreadPoolExecutor(4) as pool:
            both = [pool.submit(each.get_or_compute, "j", slow) for each in (cache, other)]
            assert [each.result() for each in both] == [1, 1]
        assert asyncio.run(cache.aget_or_compute("a", slow)) == 1
        assert cache.get_or_compute("b", slow, ttl=60, background=True) == 1
        assert cache.invalidate("k")
        with cache.lock("l", lease=5, wait=5):
            pass
    with Lock("m", lease=5, wait=5):
        pass
    print("well")
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_where_no_thread_is_to_be_had(engine: str, tmp_path: Path) -> None:
    """Where daemon threads are disabled, calls still work, as they must where no thread at all can be started."""
    assert run(NO_DAEMONS + USE, url_of(engine, tmp_path), tmp_path.name) == "well\n"


@pytest.mark.skipif(sys.version_info < (3, 13), reason="isolated subinterpreters came with Python 3.13")
@pytest.mark.parametrize("engine", ENGINES)
def test_in_an_isolated_subinterpreter(engine: str, tmp_path: Path) -> None:
    """In an isolated subinterpreter, all calls work, although it allows no daemon threads."""
    program = f"""
        import _interpreters, sys
        code = "import sys, threading, time; from concurrent.futures import ThreadPoolExecutor\\n"
        code += f"sys.path[:0] = {{[p for p in sys.path if p]!r}}; sys.argv = {{sys.argv!r}}\\n"
        code += {textwrap.dedent(USE)!r}
        made = _interpreters.create("isolated")
        failed = _interpreters.run_string(made, code)
        _interpreters.destroy(made)
        sys.exit(failed and failed.errdisplay)
    """
    assert run(program, url_of(engine, tmp_path), tmp_path.name) == "well\n"


AT_EXIT = """
    import atexit, logging, sys, threading, time

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    begun, go = threading.Event(), threading.Event()

    @atexit.register  # before ours, and so it runs after them
    def last():
        go.set()
        deadline = time.monotonic() + 5
        while _refreshers.taken and time.monotonic() < deadline:
            time.sleep(0.001)  # until the refresh has landed, by whatever way

    import asyncio
    from stampede import Cache
    from stampede.algorithm.background import _refreshers

    cache = Cache(sys.argv[1], namespace=sys.argv[2], ttl=600, stale=600)

    def refreshed():
        begun.set()
        go.wait(10)
        return "new"

    cache.set("k", "old")
    cache.expire("k")
    assert cache.get_or_compute("k", refreshed, background=True) == "old"
    begun.wait(10)

    @atexit.register
    def first():
        async def compute():
            return 1

        print(asyncio.run(cache.aget_or_compute("a", compute)))
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_where_the_interpreter_ends(engine: str, tmp_path: Path) -> None:
    """At exit, a refresh that is running does not report that the engine is down, and async functions still work."""
    command = [sys.executable, "-c", textwrap.dedent(AT_EXIT), url_of(engine, tmp_path), tmp_path.name]
    assert said(subprocess.run(command, capture_output=True, text=True, timeout=60)) == "1\n"
