"""Real MariaDB servers for the tests: each on a free loopback port, in its own directory, ended by its pid."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import marks
import pymysql
from server_process import ServerProcess
from servers import in_memory, need, to_empty

__all__ = ["MariadbServer", "shared_mariadb"]


class MariadbServer(ServerProcess):
    """One server. It needs no password, and ends at the latest when the tests end."""

    kind = "mariadb"

    def __init__(self) -> None:
        self._program = need("mariadbd")
        self._directory = Path(tempfile.mkdtemp(prefix="stampede-mariadb-", dir=in_memory()))
        if os.geteuid() == 0:  # it refuses to run as root
            shutil.chown(self._directory, "nobody")
        super().__init__()
        self.say("CREATE DATABASE cache")

    @property
    def url(self) -> str:
        return f"sql+mysql+pymysql://root@127.0.0.1:{self.port}/cache?ssl_disabled=true"

    def command(self, port: int) -> list[str]:
        return [
            self._program, "--no-defaults", *(["--user=nobody"] if os.geteuid() == 0 else []),
            f"--datadir={self._directory}", f"--socket={self._directory / 'socket'}",
            f"--port={port}", "--bind-address=127.0.0.1", "--skip-grant-tables", "--skip-name-resolve",
            "--max-connections=1000", "--innodb-buffer-pool-size=16M", "--innodb-log-file-size=4M",
            "--innodb-flush-log-at-trx-commit=2",  # data survives the server, but not a crash of the machine
            "--performance-schema=OFF",
        ]  # fmt: skip

    def _answers(self, port: int) -> bool:
        try:
            self._met(port).close()
        except pymysql.err.OperationalError as trouble:
            raise ConnectionError from trouble
        return True

    def _met(self, port: int) -> pymysql.Connection:
        # No encryption: with it, the driver would read all certificates of the machine for each connection.
        return pymysql.connect(host="127.0.0.1", port=port, user="root", autocommit=True, ssl_disabled=True)

    def say(self, *commands: str) -> None:
        """Execute the commands on a new connection."""
        with self._met(self.port) as line, line.cursor() as cursor:
            for each in commands:
                cursor.execute(each)

    def empty(self) -> None:
        with suppress(pymysql.err.ProgrammingError):  # the table does not exist
            self.say("DELETE FROM cache.stampede")

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


def shared_mariadb() -> MariadbServer:
    """The server that the tests of a session share."""
    marks.starts("mariadb")
    server = _mariadb()
    to_empty["mariadb"] = server.empty
    return server


_mariadb = cache(MariadbServer)
