"""Real ZooKeeper servers for the tests, alone or as three: on free loopback ports, ended by their pids."""

from __future__ import annotations

import atexit
import shutil
import socket
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import marks
from server_process import PATIENCE, ServerProcess, free_port
from servers import Authority, in_memory, missing, need, to_empty, wait_until

__all__ = ["ZooKeeperEnsemble", "ZooKeeperServer", "shared_zookeeper"]

JARS = [
    *("zookeeper", "zookeeper-jute", "slf4j-api", "slf4j-nop"),
    *("netty-all", "metrics-core", "snappy-java", "commons-cli"),
]
NETTY = [f"netty-{each}" for each in ("common", "buffer", "codec", "handler", "transport", "resolver")]
NETTY += ["netty-transport-native-unix-common", "netty-transport-native-epoll"]
"""The jars that TLS needs. `netty-all` itself contains no code."""
SMALL = ["-Xmx64m", "-XX:TieredStopAtLevel=1", "-XX:CICompilerCount=1", "-XX:-UsePerfData", "-XX:+UseSerialGC"]
SMALL += ["-Dzookeeper.admin.enableServer=false"]


class ZooKeeperServer(ServerProcess):
    """One server. It runs alone unless other members are given. `stop` keeps its data, `close` removes it."""

    kind = "zookeeper"
    _client: Any = None  # the client of the tests themselves

    def __init__(
        self, *, number: int = 0, members: str = "", tick: int = 100, authority: Authority | None = None
    ) -> None:
        """With an authority, it accepts only TLS, and only clients with a certificate of the authority."""
        self._number, self._members, self._tick, self._authority = number, members, tick, authority
        self._directory = tempfile.mkdtemp(prefix="stampede-zookeeper-", dir=in_memory())
        atexit.register(shutil.rmtree, self._directory, ignore_errors=True)
        super().__init__()

    @property
    def url(self) -> str:
        return f"zookeeper://127.0.0.1:{self.port}"

    def command(self, port: int) -> list[str]:
        jars = [Path(f"/usr/share/java/{each}.jar") for each in [*JARS, *(NETTY if self._authority else ())]]
        if not jars[0].exists():
            missing("zookeeper is not installed")
        Path(self._directory, "myid").write_text(str(self._number))
        config = Path(self._directory, "zoo.cfg")
        config.write_text(
            f"tickTime={self._tick}\ninitLimit=100\nsyncLimit={max(2000 // self._tick, 2)}\ndataDir={self._directory}\n"
            f"{self._place(port)}\nmaxClientCnxns=0\nminSessionTimeout=200\n"
            f"maxSessionTimeout=200000\n4lw.commands.whitelist=*\nforceSync=no\npreAllocSize=1024\n{self._members}"
        )
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        return [need("java"), *SMALL, "-cp", ":".join(map(str, jars)), main, str(config)]

    def _place(self, port: int) -> str:
        its = self._authority
        if its is None:
            return f"clientPort={port}\nclientPortAddress=127.0.0.1"
        own = Path(self._directory, "own.pem")
        own.write_text(Path(its.key).read_text() + Path(its.certificate).read_text())
        return (
            f"secureClientPort={port}\nsecureClientPortAddress=127.0.0.1\nssl.clientAuth=need\n"
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n"
            f"ssl.keyStore.location={own}\nssl.trustStore.location={its.ca}"
        )

    def _answers(self, port: int) -> bool:
        if self._authority is not None:
            socket.create_connection(("127.0.0.1", port), PATIENCE).close()
            return True
        return "Mode:" in self._word("srvr", port, 0.5)  # a starting server may never answer

    def _word(self, word: str, port: int = 0, patience: float = PATIENCE) -> str:
        with socket.create_connection(("127.0.0.1", port or self.port), patience) as line:
            line.sendall(word.encode())
            return b"".join(iter(lambda: line.recv(4096), b"")).decode()

    @property
    def serves(self) -> bool:
        with suppress(OSError):
            return self._answers(self.port)
        return False

    @property
    def leads(self) -> bool:
        return "Mode: leader" in self._word("srvr")

    def empty(self) -> None:
        if self._client is None:
            from kazoo.client import KazooClient

            self._client = KazooClient(f"127.0.0.1:{self.port}")
            self._client.start(PATIENCE)
        if self._client.exists("/stampede"):
            self._client.delete("/stampede", recursive=True)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


class ZooKeeperEnsemble:
    """Three servers. Every half tick, the leader asks the others which sessions are alive."""

    def __init__(self, tick: int = 100) -> None:
        ports = [(free_port(), free_port()) for _ in range(3)]
        lines = [f"server.{at + 1}=127.0.0.1:{one}:{two}\n" for at, (one, two) in enumerate(ports)]
        self.members: list[ZooKeeperServer] = []
        marks.starts("zookeeper")

        def begin(number: int) -> None:
            self.members.append(ZooKeeperServer(number=number, members="".join(lines), tick=tick))

        threads = [Thread(target=begin, args=(number,)) for number in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(self.members) == 3, "a server doesn't start"

    @property
    def url(self) -> str:
        return "zookeeper://" + ",".join(f"127.0.0.1:{each.port}" for each in self.members)

    def leader(self) -> ZooKeeperServer:
        """Wait until all servers serve, and return the leader."""
        wait_until(lambda: all(each.serves for each in self.members))
        return next(each for each in self.members if each.leads)


def shared_zookeeper() -> ZooKeeperServer:
    """The server that the tests of a session share."""
    marks.starts("zookeeper")
    server = _zookeeper()
    to_empty["zookeeper"] = server.empty
    return server


_zookeeper = cache(ZooKeeperServer)
