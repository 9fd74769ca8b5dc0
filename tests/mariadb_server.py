"""Real MariaDB servers for the tests: each on a free port of the loopback, in its own directory, ended by its pid."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import marks
import pymysql
from servers import PATIENCE, free_port, need, to_empty

__all__ = ["MariadbServer", "shared_mariadb"]


def _place() -> str | None:
    """In memory, where the machine has such a place: no disk is waited for."""
    place = "/dev/shm"
    return place if os.access(place, os.W_OK) and shutil.disk_usage(place).free > 256 << 20 else None


class MariadbServer:
    """One server. It needs nobody's password, and ends with the tests at the latest."""

    def __init__(self) -> None:
        self._program = need("mariadbd")
        self._directory = Path(tempfile.mkdtemp(prefix="stampede-mariadb-", dir=_place()))
        if os.geteuid() == 0:  # it doesn't run as root
            shutil.chown(self._directory, "nobody")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        atexit.register(self.close)
        self.start()
        self.say("CREATE DATABASE cache")

    @property
    def url(self) -> str:
        return f"sql+mysql+pymysql://root@127.0.0.1:{self.port}/cache?ssl_disabled=true"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, or start again on the same port with what it had; returns when it answers."""
        marks.starts("mariadb")
        for _ in range(5):
            port = self.port or free_port()
            self._process = subprocess.Popen(
                [self._program, "--no-defaults", *(["--user=nobody"] if os.geteuid() == 0 else []),
                 f"--datadir={self._directory}", f"--socket={self._directory / 'socket'}",
                 f"--port={port}", "--bind-address=127.0.0.1", "--skip-grant-tables", "--skip-name-resolve",
                 "--max-connections=1000", "--innodb-buffer-pool-size=16M", "--innodb-log-file-size=4M",
                 "--innodb-flush-log-at-trx-commit=2",  # what it has said outlives it, if not the machine
                 "--performance-schema=OFF"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            if self._answers(port):
                self.port = port
                return
        raise AssertionError("mariadbd doesn't start")

    def _answers(self, port: int) -> bool:
        assert self._process is not None
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self._process.poll() is None:
            try:
                self._met(port).close()
                return True
            except pymysql.err.OperationalError:
                time.sleep(0.01)  # there is nothing to wait on until it listens
        self.stop()
        return False

    def _met(self, port: int) -> pymysql.Connection:
        # Without encryption: for it the driver would read all certificates of the machine, each time.
        return pymysql.connect(host="127.0.0.1", port=port, user="root", autocommit=True, ssl_disabled=True)

    def say(self, *commands: str) -> None:
        """On a connection of its own."""
        with self._met(self.port) as line, line.cursor() as cursor:
            for each in commands:
                cursor.execute(each)

    def empty(self) -> None:
        with suppress(pymysql.err.ProgrammingError):  # there is none
            self.say("DELETE FROM cache.stampede")

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

    def close(self) -> None:
        self.stop()
        atexit.unregister(self.close)
        shutil.rmtree(self._directory, ignore_errors=True)


def shared_mariadb() -> MariadbServer:
    """The session's server, for tests that need no other."""
    marks.starts("mariadb")
    server = _mariadb()
    to_empty["mariadb"] = server.empty
    return server


_mariadb = cache(MariadbServer)
