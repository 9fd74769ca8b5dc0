"""Real processes for the tests of engines that share a directory. The tests control them through pipes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from server_process import freeze

AFRESH = multiprocessing.get_context("forkserver")
"""Starts processes without the state of the tests: it forks them off a server that has imported most modules."""

AFRESH.set_forkserver_preload(
    ["asyncio", "moto", "pymemcache", "pymysql", "pytest", "redis.asyncio", "stampede.cli"]
    + ["disk_world", "exclusion", "both_colours", "forked", "herd", "interleaving"]
    + ["addresses"] * (find_spec("zmq") is not None)  # without zmq, this module skips the test that imports it
    + [f"stampede.engines.{each}" for each in ("cells", "disk", "dynamodb", "etcd", "postgres", "sql")]
    + [f"stampede.engines.{each}" for each in ("zmq", "zookeeper")]
)
PATIENCE = 60.0


@cache
def ready() -> None:
    """Start the fork server with the path of the test helpers. multiprocessing does not pass it, and the fork server
    ignores modules that it does not find: each process would import them again."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Other:
    """A process that runs `body(pipe, *args)`. It is killed at the end of the test."""

    def __init__(self, body: Callable[..., object], *args: Any) -> None:
        ready()
        self.pipe, theirs = AFRESH.Pipe()
        self._process = AFRESH.Process(target=body, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def hear(self) -> Any:
        """The next message of the process."""
        assert self.pipe.poll(PATIENCE), "the other process says nothing"
        return self.pipe.recv()

    def tell(self, word: Any = None) -> None:
        self.pipe.send(word)

    def freeze(self) -> None:
        freeze(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> None:
        """Wait for its end, without a timeout: with a timeout, multiprocessing also waits for its children."""
        self._process.join()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.join()
        self._process.close()
        self.pipe.close()


@contextmanager
def others(count: int, body: Callable[..., object], *args: Any) -> Iterator[list[Other]]:
    """Run this many processes at the same time."""
    started = [Other(body, *args) for _ in range(count)]
    try:
        yield started
    finally:
        for each in started:
            each.end()


@contextmanager
def other(body: Callable[..., object], *args: Any) -> Iterator[Other]:
    with others(1, body, *args) as (one,):
        yield one


class Script:
    """Runs code with arguments like `python -c`, but in a forked process, which need not import everything again.
    It does not run `atexit` functions. It is killed at the end of the `with`."""

    def __init__(self, code: str, *words: str) -> None:
        ready()
        hears, tells = os.pipe()
        told, says = os.pipe()
        self.stdin, self.stdout = open(tells, "w"), open(told)  # noqa: SIM115  closed at the end
        try:
            ends = [_End(hears), _End(says)]
            self._process = AFRESH.Process(target=_run, args=(code, words, *ends), daemon=True)
            self._process.start()
        finally:
            os.close(hears)
            os.close(says)
        assert self._process.pid is not None
        self.pid: int = self._process.pid  # remains valid after the process has ended

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()
        self._process.close()
        self.stdout.close()
        with suppress(BrokenPipeError):
            self.stdin.close()


class _End:
    """One end of a pipe that is sent to another process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _at_its_end, (DupFd(self._number),)


def _at_its_end(given: Any) -> int:
    number: int = given.detach()
    return number


def _run(code: str, words: tuple[str, ...], stdin: int, stdout: int) -> None:
    for number, at in (stdin, 0), (stdout, 1):
        os.dup2(number, at)
        os.close(number)
    sys.stdin, sys.stdout, sys.argv = open(0), open(1, "w"), ["-c", *words]  # noqa: SIM115  until it ends
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})


__all__ = ["PATIENCE", "Connection", "Other", "Script", "other", "others", "ready"]
