"""Real etcd servers for the tests, alone or in a cluster of three: on free loopback ports, ended by their pids."""

from __future__ import annotations

import atexit
import json
import shutil
import socket
import tempfile
import urllib.request
from functools import cache
from typing import Any

import marks
from server_process import PATIENCE, ServerProcess, free_port
from servers import Authority, in_memory, need, to_empty

__all__ = ["EtcdCluster", "EtcdServer", "shared_etcd"]


class EtcdServer(ServerProcess):
    """One member. It runs alone unless other members are given. Its shortest lease is one second. `stop` keeps its
    data, `close` removes it."""

    kind = "etcd"
    beat = 10  # milliseconds between two heartbeats of a leader

    def __init__(
        self, *, name: str = "alone", peer: int = 0, members: str = "", authority: Authority | None = None
    ) -> None:
        self._name, self._peer, self._members, self._authority = name, peer or free_port(), members, authority
        self._directory = tempfile.mkdtemp(prefix="stampede-etcd-", dir=in_memory())
        atexit.register(shutil.rmtree, self._directory, ignore_errors=True)
        super().__init__()

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"

    def command(self, port: int) -> list[str]:
        its = self._authority
        here, peers = f"http{'s' if its else ''}://127.0.0.1:{port}", f"http://127.0.0.1:{self._peer}"
        terms = {
            "name": self._name, "data-dir": f"{self._directory}/data", "logger": "zap", "log-level": "fatal",
            "listen-client-urls": here, "advertise-client-urls": here,
            "listen-peer-urls": peers, "initial-advertise-peer-urls": peers,
            "initial-cluster": self._members or f"{self._name}={peers}",
            "heartbeat-interval": str(self.beat), "election-timeout": str(10 * self.beat),
            "bcrypt-cost": "4",
        }  # fmt: skip
        if its is not None:
            terms |= {"cert-file": its.certificate, "key-file": its.key, "trusted-ca-file": its.ca}
            terms |= {"client-cert-auth": "true"}
        return [need("etcd"), *(f"--{name}={value}" for name, value in terms.items())]

    def _answers(self, port: int) -> bool:
        if self._authority is not None:
            socket.create_connection(("127.0.0.1", port), PATIENCE).close()
            return True
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE) as told:
            return b"true" in told.read()

    def ask(self, path: str, **question: Any) -> dict[str, Any]:
        """Send a request of the test itself."""
        body = json.dumps(question).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", body, timeout=PATIENCE) as told:
            return dict(json.loads(told.read()))

    def empty(self) -> None:
        self.ask("/v3/kv/deleterange", key="AA==", range_end="AA==")

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


class _Member(EtcdServer):
    """A member with a longer heartbeat, so that a busy machine does not cause elections."""

    beat = 50

    def _answers(self, port: int) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=PATIENCE) as told:
            return bool(told.read())


class EtcdCluster:
    """A cluster of three members."""

    def __init__(self) -> None:
        names = {f"m{number}": free_port() for number in range(3)}
        members = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in names.items())
        # A member serves clients only after it has reached another member: start all of them at the same time.
        from threading import Thread

        self.members: list[EtcdServer] = []
        running = marks.now
        marks.starts("etcd")

        def begin(name: str, port: int) -> None:
            self.members.append(_Member(name=name, peer=port, members=members))

        threads = [Thread(target=begin, args=each) for each in names.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert running is marks.now
        assert len(self.members) == 3, "a member doesn't start"

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(f"127.0.0.1:{each.port}" for each in self.members)

    def leader(self) -> EtcdServer:
        """The member that the others follow."""
        status = {each: each.ask("/v3/maintenance/status") for each in self.members}
        return next(each for each, told in status.items() if told["header"]["member_id"] == told["leader"])

    def close(self) -> None:
        for each in self.members:
            each.close()


def shared_etcd() -> EtcdServer:
    """The server that the tests of a session share."""
    marks.starts("etcd")
    server = _etcd()
    to_empty["etcd"] = server.empty
    return server


_etcd = cache(EtcdServer)
