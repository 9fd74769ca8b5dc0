"""Real PostgreSQL servers for the tests: each on a free port of the loopback, in its own directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import marks
import psycopg
from server_process import ServerProcess, freeze
from servers import in_memory, missing, to_empty

__all__ = ["PostgresServer", "shared_postgres"]


def _program(name: str) -> str:
    """Debian keeps them beside each other, in a place for each version, and on nobody's path."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda place: float(place.parent.name))
    found = shutil.which(name, path=os.pathsep.join([*map(str, reversed(places)), os.environ.get("PATH", "")]))
    if found is None:
        missing(f"{name} is not installed")
    return found


class PostgresServer(ServerProcess):
    """One server, with these settings. It needs nobody's password, and ends with the tests at the latest."""

    kind = "postgres"

    def __init__(self, *settings: str) -> None:
        self._settings = settings
        self._directory = Path(tempfile.mkdtemp(prefix="stampede-postgres-", dir=in_memory()))
        self._as: list[str] = []
        if os.geteuid() == 0:  # it doesn't run as root
            shutil.chown(self._directory, "nobody", "nogroup")
            self._as = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        made = [*self._as, _program("initdb"), "--no-sync", "--no-instructions", "--auth=trust", "--username=root",
                "--encoding=UTF8", "--locale=C", f"--pgdata={self._directory}/data"]  # fmt: skip
        subprocess.run(made, check=True, capture_output=True, cwd="/")
        super().__init__()

    @property
    def url(self) -> str:
        return f"sql+postgresql+psycopg://root@127.0.0.1:{self.port}/postgres?sslmode=disable"

    def command(self, port: int) -> list[str]:
        settings = [
            "listen_addresses=127.0.0.1", f"port={port}", "unix_socket_directories=", "max_connections=300",
            "shared_buffers=16MB", "dynamic_shared_memory_type=mmap",
            "fsync=off",  # what it has said outlives it, if not the machine
            *self._settings,
        ]  # fmt: skip
        given = [word for each in settings for word in ("-c", each)]
        return [*self._as, _program("postgres"), "-D", f"{self._directory}/data", *given]

    def _answers(self, port: int) -> bool:
        try:
            self._met(port).close()
        except psycopg.OperationalError as trouble:
            raise ConnectionError from trouble
        return True

    def _met(self, port: int) -> psycopg.Connection[Any]:
        return psycopg.connect(f"host=127.0.0.1 port={port} user=root dbname=postgres sslmode=disable", autocommit=True)

    def say(self, *commands: str) -> None:
        """On a connection of its own."""
        with self._met(self.port) as line:
            for each in commands:
                line.execute(each.encode())

    def empty(self) -> None:
        with suppress(psycopg.errors.UndefinedTable):
            self.say("DELETE FROM stampede")

    # Each connection has a process of its own.

    def stop(self) -> None:
        """SIGKILL to all: its clients see the connections close."""
        theirs = self._children() if self._process is not None else []
        super().stop()
        for pid in theirs:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze(self) -> None:
        super().freeze()
        for pid in self._children():
            with suppress(ProcessLookupError):
                freeze(pid)

    def thaw(self) -> None:
        for pid in [self.pid, *self._children()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _children(self) -> list[int]:
        with suppress(FileNotFoundError):
            return [int(each) for each in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        return []

    def close(self) -> None:
        if self._process is not None:
            self.thaw()
            self._process.send_signal(signal.SIGQUIT)  # at once, and it leaves no shared memory behind
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


def shared_postgres() -> PostgresServer:
    """The session's server, for tests that need no other."""
    marks.starts("postgres")
    server = _postgres()
    to_empty["postgres"] = server.empty
    return server


_postgres = cache(PostgresServer)
