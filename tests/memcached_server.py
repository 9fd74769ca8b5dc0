"""Real memcached servers for the tests: each on a free port of the loopback, ended by its pid."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import time
from functools import cache

import marks
from servers import PATIENCE, Authority, free_port, missing, need, to_empty

__all__ = ["MemcachedServer", "shared_memcached"]


class MemcachedServer:
    """One server: `MemcachedServer("-m", "1")`. It ends with the tests at the latest."""

    def __init__(self, *options: str, tls: Authority | None = None) -> None:
        """With `tls` it speaks nothing else."""
        self._program = need("memcached")
        self._options = [*options, *(_with_certificate(tls) if tls is not None else ())]
        self._tls = tls
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
        marks.starts("memcached")
        for _ in range(5):
            port = self.port or free_port()
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
                with self._met(port, 1.0) as probe:
                    probe.sendall(b"version\r\n")
                    if probe.recv(64):
                        return True
            except OSError:
                time.sleep(0.005)  # there is nothing to wait on until it listens
        self.stop()
        return False

    def _met(self, port: int, patience: float) -> socket.socket:
        met = socket.create_connection(("127.0.0.1", port), patience)
        return met if self._tls is None else self._tls.trusted().wrap_socket(met, server_hostname="127.0.0.1")

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
        with self._met(self.port, PATIENCE) as line:
            line.sendall(commands)
            heard = b""
            while not heard.endswith(end):
                more = line.recv(65536)
                assert more, f"the server has closed the connection after {heard!r}"
                heard += more
        return heard

    def ping(self) -> None:
        """Returns when it has answered; OSError: nobody does."""
        self.say(b"version\r\n")

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


def _with_certificate(tls: Authority) -> list[str]:
    if "--enable-ssl" not in subprocess.run([need("memcached"), "-h"], capture_output=True, text=True).stdout:
        missing("this memcached was built without TLS")
    return ["-Z", "-o", f"ssl_chain_cert={tls.certificate},ssl_key={tls.key}"]


def shared_memcached() -> MemcachedServer:
    """The session's server, for tests that need no other."""
    marks.starts("memcached")
    server = _memcached()
    to_empty["memcached"] = server.empty
    return server


_memcached = cache(MemcachedServer)
