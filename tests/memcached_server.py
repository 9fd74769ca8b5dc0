"""Real memcached servers for the tests: each on a free port of the loopback, ended by its pid."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import time
from functools import lru_cache

import pytest

__all__ = ["MemcachedServer", "shared_memcached"]

PATIENCE = 20.0


class MemcachedServer:
    """One server: `MemcachedServer("-m", "1")`. It ends with the tests at the latest."""

    def __init__(self, *options: str) -> None:
        self._program = _need("memcached")
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        atexit.register(self.close)
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"memcached://{self.address}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, or start again on the same port, empty; returns when it answers."""
        for _ in range(5):
            port = self.port or _free_port()
            self._process = subprocess.Popen(
                [self._program, "-u", "nobody", "-l", "127.0.0.1", "-p", str(port), "-t", "2", *self._options],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            if self._answers(port):
                self.port = port
                return
        raise AssertionError("memcached doesn't start")

    def _answers(self, port: int) -> bool:
        assert self._process is not None
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", port), 1.0) as probe:
                    probe.sendall(b"version\r\n")
                    if probe.recv(64):
                        return True
            except OSError:
                time.sleep(0.005)  # there is nothing to wait on until it listens
        self.stop()
        return False

    def stop(self) -> None:
        """SIGKILL: its clients see the connection close."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        """It accepts, and never answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def say(self, commands: bytes, end: bytes = b"\r\n") -> bytes:
        """What it answers, up to `end`, on a connection of its own."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as line:
            line.sendall(commands)
            heard = b""
            while not heard.endswith(end):
                more = line.recv(65536)
                assert more, f"the server has closed the connection after {heard!r}"
                heard += more
        return heard

    def commands(self) -> int:
        """How many it has been sent that are about items."""
        words = [line.split() for line in self.say(b"stats\r\n", b"END\r\n").splitlines()]
        stats = {word[1]: word[2] for word in words if len(word) > 2}
        names = (b"cmd_get", b"cmd_set", b"cmd_touch", b"delete_hits", b"delete_misses")
        return sum(int(stats[name]) for name in names)

    def empty(self) -> None:
        self.say(b"flush_all\r\n")

    def close(self) -> None:
        self.stop()
        atexit.unregister(self.close)


@lru_cache(1)
def shared_memcached() -> MemcachedServer:
    """The session's server, for tests that need no other: empty it before use."""
    return MemcachedServer()


def _need(program: str) -> str:
    """The program's path. A machine without it skips the test, and fails it with CI=true."""
    path = shutil.which(program)
    if path is None:
        message = f"{program} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
