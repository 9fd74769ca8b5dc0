"""Real memcached servers for the tests: each on a free loopback port, ended by its pid."""

from __future__ import annotations

import socket
import subprocess
from functools import cache

import marks
from server_process import ServerProcess
from servers import PATIENCE, Authority, missing, need, to_empty

__all__ = ["MemcachedServer", "shared_memcached"]


class MemcachedServer(ServerProcess):
    """One server: `MemcachedServer("-m", "1")`. It ends at the latest when the tests end."""

    kind = "memcached"

    def __init__(self, *options: str, tls: Authority | None = None) -> None:
        """With `tls`, it accepts only TLS connections."""
        self._program = need("memcached")
        self._options = [*options, *(_with_certificate(tls) if tls is not None else ())]
        self._tls = tls
        super().__init__()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"memcached://{self.address}"

    def command(self, port: int) -> list[str]:
        return [self._program, "-u", "nobody", "-l", "127.0.0.1", "-p", str(port), "-t", "2", *self._options]

    def _answers(self, port: int) -> bool:
        with self._met(port, 1.0) as probe:
            probe.sendall(b"version\r\n")
            return probe.recv(64) != b""

    def _met(self, port: int, patience: float) -> socket.socket:
        met = socket.create_connection(("127.0.0.1", port), patience)
        return met if self._tls is None else self._tls.trusted().wrap_socket(met, server_hostname="127.0.0.1")

    def say(self, commands: bytes, end: bytes = b"\r\n") -> bytes:
        """Send commands on a new connection, and return the answer up to `end`."""
        with self._met(self.port, PATIENCE) as line:
            line.sendall(commands)
            heard = b""
            while not heard.endswith(end) and not heard.startswith(b"BUSY"):  # it looks through its items already
                more = line.recv(65536)
                assert more, f"the server has closed the connection after {heard!r}"
                heard += more
        return heard

    def ping(self) -> None:
        """Return when the server has answered. Raises OSError if there is none."""
        self.say(b"version\r\n")

    def commands(self) -> int:
        """The number of item commands that the server has received."""
        words = [line.split() for line in self.say(b"stats\r\n", b"END\r\n").splitlines()]
        stats = {word[1]: word[2] for word in words if len(word) > 2}
        names = (b"cmd_get", b"cmd_set", b"cmd_touch", b"delete_hits", b"delete_misses")
        return sum(int(stats[name]) for name in names)

    def empty(self) -> None:
        self.say(b"flush_all\r\n")


def _with_certificate(tls: Authority) -> list[str]:
    if "--enable-ssl" not in subprocess.run([need("memcached"), "-h"], capture_output=True, text=True).stdout:
        missing("this memcached was built without TLS")
    return ["-Z", "-o", f"ssl_chain_cert={tls.certificate},ssl_key={tls.key}"]


def shared_memcached() -> MemcachedServer:
    """The server that the tests of a session share."""
    marks.starts("memcached")
    server = _memcached()
    to_empty["memcached"] = server.empty
    return server


_memcached = cache(MemcachedServer)
