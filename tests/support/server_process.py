"""A server for the tests as a process: begun on a free port of the loopback, frozen, thawed, ended by its pid."""

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
    """One that the kernel gives to no client: a server that starts again would find it taken, now and then."""
    while True:
        port = SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def states(pid: int) -> set[str]:
    """Of all threads of a process, as ps calls them."""
    found = set()
    for each in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended just now
            found.add(each.read_text().rpartition(")")[2].split()[0])
    return found


def freeze(pid: int) -> None:
    """SIGSTOP; returns when all its threads stand still: until then, one that runs gives one answer more."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + PATIENCE
    while states(pid) - {"T", "Z", "X"}:  # or it has ended, and nobody has heard of it
        assert time.monotonic() < end, f"the process {pid} doesn't stop"
        time.sleep(0.0005)  # it needs this core, perhaps


class ServerProcess:
    """One server. It ends with the tests at the latest."""

    kind: ClassVar[str]  # the mark of tests that use one
    environment: Mapping[str, str] | None = None  # of its process; None: as ours
    port = 0
    _process: subprocess.Popen[bytes] | None = None

    def __init__(self) -> None:
        atexit.register(self.close)
        self.start()

    def command(self, port: int) -> list[str]:
        raise NotImplementedError

    def _answers(self, port: int) -> bool:
        """Whether it does just now. OSError: not yet."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, or start again on the same port; returns when it answers. Most are empty again."""
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
            self.stop()  # it has ended (somebody else took the port), or never answers
        raise AssertionError(f"a server doesn't start: {self.command(self.port)}")

    def _comes_up(self, process: subprocess.Popen[bytes], port: int) -> bool:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and process.poll() is None:
            try:
                if self._answers(port):
                    return process.poll() is None  # or it is somebody else's, who took the port
            except OSError:
                time.sleep(0.005)  # there is nothing to wait on until it listens
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
        """From here on it accepts, and never answers."""
        freeze(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        atexit.unregister(self.close)
