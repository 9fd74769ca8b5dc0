"""Helpers of the Redis benchmarks: a server, and the commands that it received."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE = 20.0


class Server:
    """A redis-server without persistence, on a free port of the loopback, on one core. It is ended by its pid."""

    def __init__(self, core: int | None = None) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise SystemExit("redis-server is not installed")
        self._directory = Path(tempfile.mkdtemp(prefix="stampede-bench-"))
        self.port = _free_port()
        self._process = subprocess.Popen(
            [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
             "--dir", str(self._directory)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        )  # fmt: skip
        atexit.register(self.close)
        if core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self._process.pid, {core})
        end = time.monotonic() + PATIENCE
        while not self._answers():
            if time.monotonic() > end:
                raise TimeoutError("redis-server doesn't start")
            time.sleep(0.01)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as probe:
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def client(self, **options: Any) -> Any:
        import redis

        return redis.Redis(port=self.port, **options)

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Count the commands that all clients send during the block, by name; `lua NAME` for those of scripts.

        This uses MONITOR: the statistics of INFO don't distinguish commands of clients from those of scripts.
        """
        counts: Counter[str] = Counter()
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as ear, ear.makefile("rb") as lines:
            ear.sendall(b"MONITOR\r\n")
            lines.readline()
            yield counts
            with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as mark:
                mark.sendall(b"ECHO the-end\r\n")
                for line in lines:
                    head, _, words = line.decode("latin-1").partition("] ")
                    if words.startswith('"ECHO" "the-end"'):
                        break
                    name = words.split('"', 2)[1].upper()
                    counts[f"lua {name}" if head.endswith(" lua") else name] += 1

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        atexit.unregister(self.close)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Crew:
    """Processes that run given functions of importable modules, all at the same time."""

    def __init__(self, size: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.members = []
        for _ in range(size):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_obey, args=(there,), daemon=True)
            process.start()
            self.members.append((process, here))
        self.all(os.getpid)

    def order(self, function: Callable[..., Any], *args: Any) -> None:
        for _, pipe in self.members:
            pipe.send((function, args))

    def told(self) -> list[Any]:
        answers = []
        for _, pipe in self.members:
            if not pipe.poll(120):
                raise TimeoutError("a process doesn't answer")
            answers.append(pipe.recv())
        return answers

    def all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.order(function, *args)
        return self.told()

    def kill(self) -> None:
        for process, _ in self.members:
            process.kill()
            process.join()

    def end(self) -> None:
        for process, pipe in self.members:
            pipe.send(None)
            process.join(10)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.end()
        else:
            self.kill()


def _obey(pipe: Any) -> None:
    while (order := pipe.recv()) is not None:
        function, args = order
        pipe.send(function(*args))


def percentile(samples: list[float], part: float) -> float:
    """Return the sample below which this fraction of all samples lies."""
    return sorted(samples)[min(int(part * len(samples)), len(samples) - 1)]


def on_the_wire(counts: Counter[str]) -> Counter[str]:
    """Return the counts without commands of scripts, and without the pings that check a connection."""
    return Counter({name: count for name, count in counts.items() if not name.startswith("lua ") and name != "PING"})


def eventually(what: Callable[[], object]) -> None:
    """Wait until the condition is true."""
    end = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > end:
            raise TimeoutError("it didn't come to that")
        time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
