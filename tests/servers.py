"""Real servers for the tests: each on a free port of the loopback, in a directory of its own, ended by its pid."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import pytest

__all__ = ["RedisServer", "free_port", "need", "shared_redis"]

PATIENCE = 20.0


def need(program: str) -> str:
    """The program's path. A machine without it skips the test, and fails it with CI=true."""
    path = shutil.which(program)
    if path is None:
        message = f"{program} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """One redis-server without persistence: `RedisServer("--maxmemory", "2mb")`. It ends with the tests."""

    def __init__(self, *options: str) -> None:
        self._program = need("redis-server")
        self._options = options
        self._directory = Path(tempfile.mkdtemp(prefix="stampede-redis-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = self._directory / "redis.sock"
        self.port = 0
        atexit.register(self.close)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, or start again on the same port, empty; returns when it answers."""
        for _ in range(5):
            port = self.port or free_port()
            self._process = subprocess.Popen(
                [self._program, "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket),
                 "--save", "", "--appendonly", "no", "--dir", str(self._directory), *self._options],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
            )  # fmt: skip
            if self._answers(port):
                self.port = port
                return
        raise AssertionError("redis-server doesn't start")

    def _answers(self, port: int) -> bool:
        assert self._process is not None
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", port), 1.0) as probe:
                    probe.sendall(b"PING\r\n")
                    if probe.recv(64):  # +PONG, or -NOAUTH
                        return True
            except OSError:
                time.sleep(0.005)  # there is nothing to wait on until it listens
        self.stop()  # it has ended (somebody else took the port), or never answers
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

    def cli(self, *command: str | bytes) -> str:
        """What redis-cli prints."""
        program = need("redis-cli")
        run = subprocess.run(
            [program, "-p", str(self.port), *command], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        return run.stdout.strip()

    def close(self) -> None:
        self.stop()
        atexit.unregister(self.close)
        shutil.rmtree(self._directory, ignore_errors=True)


@lru_cache(1)
def shared_redis() -> RedisServer:
    """The session's server, for tests that need no other: empty it before use."""
    return RedisServer()
