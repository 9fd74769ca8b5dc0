"""A server process for the tests: on a free loopback port, to be frozen, thawed, and ended by its pid."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import ClassVar

import marks

__all__ = ["PATIENCE", "ServerProcess", "free_port", "freeze", "states"]

PATIENCE = 20.0


def free_port() -> int:
    """A port outside the kernel's range for clients. Otherwise a client could take it while its server restarts."""
    while True:
        port = SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def states(pid: int) -> set[str]:
    """The states of all threads of a process, as `ps` names them."""
    found = set()
    for each in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found.add(each.read_text().rpartition(")")[2].split()[0])
    return found


def freeze(pid: int) -> None:
    """Send SIGSTOP and wait until all threads have stopped: a running thread could still send one answer."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + PATIENCE
    while states(pid) - {"T", "Z", "X"}:  # stopped, or ended but not reaped
        assert time.monotonic() < end, f"the process {pid} doesn't stop"
        time.sleep(0.0005)  # the process may need this core to stop


class ServerProcess:
    """One server. It ends at the latest when the tests end."""

    kind: ClassVar[str]  # the mark of tests that use this server
    environment: Mapping[str, str] | None = None  # of the process; None: as the tests'
    port = 0
    _process: subprocess.Popen[bytes] | None = None

    def __init__(self) -> None:
        atexit.register(self.close)
        self.start()

    def command(self, port: int) -> list[str]:
        raise NotImplementedError

    def _answers(self, port: int) -> bool:
        """Whether the server answers now. OSError means not yet."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start or restart the server on its port, and wait until it answers. A restart empties most servers."""
        marks.starts(self.kind)
        for _ in range(5):
            port = self.port or free_port()
            self._process = subprocess.Popen(
                self.command(port), env=self.environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            if self._comes_up(self._process, port):
                self.port = port
                return
            self.stop()  # it has ended (another process took the port), or never answers
        raise AssertionError(f"a server doesn't start: {self.command(self.port)}")

    def _comes_up(self, process: subprocess.Popen[bytes], port: int) -> bool:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and process.poll() is None:
            try:
                if self._answers(port):
                    return process.poll() is None  # if ours has ended, another process took the port and answers
            except OSError:
                time.sleep(0.005)  # poll: there is no event to wait for
        return False

    def stop(self) -> None:
        """Send SIGKILL. Clients see their connections close."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        """The server then accepts connections, but does not answer."""
        freeze(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        atexit.unregister(self.close)
