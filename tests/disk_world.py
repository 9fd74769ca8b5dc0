"""Other processes for the tests of engines that share a directory: real ones, told what to do through pipes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from server_process import freeze

AFRESH = multiprocessing.get_context("forkserver")
"""Processes without anything of ours, forked off one that has imported what most of them need."""

AFRESH.set_forkserver_preload(
    ["asyncio", "forked", "moto", "pymemcache", "pymysql", "pytest", "redis.asyncio", "places", "stampede.cli"]
    + [f"stampede.engines.{each}" for each in ("cells", "disk", "dynamodb", "etcd", "postgres", "sql")]
    + [f"stampede.engines.{each}" for each in ("zmq", "zookeeper")]
)
PATIENCE = 30.0


class Other:
    """A process that runs `body(pipe, *args)`. It is killed at the end of the test, whatever it does."""

    def __init__(self, body: Callable[..., object], *args: Any) -> None:
        self.pipe, theirs = AFRESH.Pipe()
        self._process = AFRESH.Process(target=body, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def hear(self) -> Any:
        """The next thing it says."""
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
        """Wait for its end. Without a timeout: with one, multiprocessing waits for its children too."""
        self._process.join()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.join()
        self._process.close()
        self.pipe.close()


@contextmanager
def others(count: int, body: Callable[..., object], *args: Any) -> Iterator[list[Other]]:
    """So many processes at once."""
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


__all__ = ["PATIENCE", "Connection", "Other", "other", "others"]
