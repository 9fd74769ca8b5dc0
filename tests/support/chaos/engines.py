"""The servers of a soak. For each kind: what can go wrong with it, and what the docs promise of it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import psycopg
from memcached_server import MemcachedServer
from postgres_server import PgBouncer, PostgresServer
from proxy import Proxy
from servers import RedisCluster, RedisServer, Sentinels, SteppedServer, wait_until

from chaos.faults import Effect, Planned

__all__ = ["ENGINES", "World"]

_LINK = {
    "cut": Effect(3, (0, 0), 2.5),
    "slow": Effect(2, (0.5, 2), 2.5),
    "trickle": Effect(1, (0.3, 1.5), 2.5, silent=True),
    "torn": Effect(2, (0.1, 1), 2.5, silent=True),
    "hold": Effect(2, (0.2, 5), 6, silent=True),
}


class World:
    """Real servers, or a replacement for them, on which a round takes place."""

    name: ClassVar[str]
    effects: ClassVar[dict[str, Effect]]
    signed: ClassVar[bool] = False
    shared: ClassVar[bool] = True  # by processes; otherwise there is one process, and each forked child is on its own
    linked: ClassVar[bool] = False  # all traffic between processes and servers goes through the conductor's own process
    gated: ClassVar[bool] = False  # a process that is frozen in the middle of a write keeps all others from writing
    parted: ClassVar[bool] = False  # a part of it may be down, which is reported only once a minute
    time_out: ClassVar[float] = 1.0  # seconds that its client waits for an answer
    lag: ClassVar[dict[bool, float]] = {False: 0.0, True: 0.0}
    """Seconds for which other processes may get a value that was changed: without a local tier, and with one."""
    lag_of_all: ClassVar[dict[bool, float]] = {False: 1.0, True: 1.0}
    """Seconds for which they may get it after a `clear` or `invalidate_all`."""
    fences_last: ClassVar[bool] = False  # fences go on growing even if everything is forgotten

    def url(self, number: int) -> str:
        """Return the engine's URL for the process with this number."""
        raise NotImplementedError

    def options(self, dice: random.Random) -> dict[str, Any]:
        """Return the options for the caches of all processes in a round."""
        return {"signing_key": "secret"} if self.signed or dice.random() < 0.3 else {}

    def harm(self, fault: Planned, pids: list[int]) -> str:
        """Cause the fault, from its begin to its end. Return what it was done to."""
        act: Callable[[Planned, list[int]], str] = getattr(self, fault.kind.replace("-", "_"))
        return act(fault, pids)

    def mend(self) -> None:
        """Bring everything back to normal, also if a fault was cut short."""

    def upheaval(self) -> str:
        """Return what the servers have done by themselves since the last call, if it may lose acknowledged changes."""
        return ""

    @property
    def nodes(self) -> Sequence[RedisServer | MemcachedServer]:
        """The servers."""
        return ()

    def pulse(self) -> None:
        """Return when all servers have answered, or are not there."""
        for node in self.nodes:
            with contextlib.suppress(OSError, AssertionError, ValueError, IndexError):  # the server is being stopped
                node.ping()

    def standing(self) -> list[str]:
        """Return the leases and locks that are held, if the engine can list them."""
        return []

    def close(self) -> None: ...


class _Linked(World):
    """Processes reach the servers through proxies."""

    linked = True

    def __init__(self) -> None:
        self.proxies: list[Proxy] = []

    def _some(self, fault: Planned) -> tuple[list[Proxy], str]:
        """Return one of the links, or all of them, and their name."""
        at = int(fault.chance * (len(self.proxies) + 1))
        return (self.proxies, "all links") if at == len(self.proxies) else ([self.proxies[at]], f"link {at}")

    def cut(self, fault: Planned, pids: list[int]) -> str:
        links, what = self._some(fault)
        for each in links:
            each.cut()
        return what

    def slow(self, fault: Planned, pids: list[int]) -> str:
        links, what = self._some(fault)
        for each in links:
            each.delay = 0.002 + 0.03 * fault.other
        what += f" by {links[0].delay:.3f} s"
        return self._for_a_while(fault, links, what)

    def trickle(self, fault: Planned, pids: list[int]) -> str:
        """Replies come in pieces of a few bytes."""
        links, what = self._some(fault)
        for each in links:
            each.piece, each.delay = 1 + int(40 * fault.other), 0.0005
        return self._for_a_while(fault, links, what)

    def torn(self, fault: Planned, pids: list[int]) -> str:
        """Requests and replies are cut off after some byte."""
        links, what = self._some(fault)
        dice = random.Random(fault.other)
        for each in links:
            for _ in range(4):
                if dice.random() < 0.5:
                    each.at(b"", answered=dice.randrange(1, 30), silent=dice.random() < 0.2)
                else:
                    each.at(b"", sent=dice.randrange(1, 60))
        return self._for_a_while(fault, links, what)

    def hold(self, fault: Planned, pids: list[int]) -> str:
        links, what = self._some(fault)
        for each in links:
            each.hold()
        return self._for_a_while(fault, links, what)

    @staticmethod
    def _for_a_while(fault: Planned, links: list[Proxy], what: str) -> str:
        time.sleep(fault.seconds)
        for each in links:
            each.heal()
        return what

    def mend(self) -> None:
        for each in self.proxies:
            each.heal()

    def close(self) -> None:
        for each in self.proxies:
            each.close()


class Redis(_Linked):
    """One server, with a proxy for each process."""

    name = "redis"
    effects: ClassVar = {
        **_LINK,
        "kill-connections": Effect(4, (0, 0), 2.5),
        "freeze": Effect(3, (0.2, 5), 6, silent=True),
        "restart": Effect(3, (0, 2), 4, keeps=False),
        "flush": Effect(3, (0, 0), 2.5, keeps=False),
        "full": Effect(2, (0.5, 2), 3),
        "evict": Effect(1, (0.5, 2), 3, keeps=False, again=True),
    }
    lag: ClassVar = {False: 0.0, True: 0.5}
    fences_last = True

    def __init__(self) -> None:
        super().__init__()
        self.server = self._server()
        self.proxies = [Proxy(self.server.port) for _ in range(4)]

    @property
    def nodes(self) -> Sequence[RedisServer]:
        return [self.server]

    def _server(self) -> Any:
        return RedisServer()

    def url(self, number: int) -> str:
        return self.proxies[number % len(self.proxies)].url

    def kill_connections(self, fault: Planned, pids: list[int]) -> str:
        kind = ("normal", "pubsub")[fault.chance < 0.5]
        self.server.cli("CLIENT", "KILL", "TYPE", kind)
        return kind

    def freeze(self, fault: Planned, pids: list[int]) -> str:
        self.server.freeze()
        try:
            time.sleep(fault.seconds)
        finally:
            self.server.thaw()
        return ""

    def restart(self, fault: Planned, pids: list[int]) -> str:
        self.server.stop()
        time.sleep(fault.seconds)
        self.server.start()
        return ""

    def flush(self, fault: Planned, pids: list[int]) -> str:
        self.server.cli("FLUSHALL")
        return ""

    def full(self, fault: Planned, pids: list[int]) -> str:
        """The server takes nothing new, and evicts nothing."""
        self.server.cli("CONFIG", "SET", "maxmemory", "1")
        time.sleep(fault.seconds)
        self.server.cli("CONFIG", "SET", "maxmemory", "0")
        return ""

    def evict(self, fault: Planned, pids: list[int]) -> str:
        """There is room for almost nothing, and any key may be evicted."""
        self.server.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
        self.server.cli("CONFIG", "SET", "maxmemory", "1")
        time.sleep(fault.seconds)
        self.server.cli("CONFIG", "SET", "maxmemory", "0")
        self.server.cli("CONFIG", "SET", "maxmemory-policy", "noeviction")
        return ""

    def mend(self) -> None:
        super().mend()
        with contextlib.suppress(OSError):
            self.server.cli("CONFIG", "SET", "maxmemory", "0")

    def standing(self) -> list[str]:
        return _standing([self.server])

    def close(self) -> None:
        super().close()
        self.server.close()


class SteppedRedis(Redis):
    """A Valkey server whose wall clock is set. Every value is signed, so that a doubled reply is no false value."""

    name = "redis-clock"
    signed = True
    fences_last = False  # lost fences begin again from the server's clock, which may have been set back long before
    effects: ClassVar = {
        **Redis.effects,
        "clock": Effect(6, (0, 0), 4, keeps=False, step=True),
        "double": Effect(2, (0.2, 1), 3),
    }

    def _server(self) -> Any:
        return SteppedServer()

    def clock(self, fault: Planned, pids: list[int]) -> str:
        seconds = [-3600, -60, -4, 4, 60, 3600][int(fault.chance * 6)]
        self.server.step(seconds)
        return f"to {seconds:+d} s"

    def double(self, fault: Planned, pids: list[int]) -> str:
        """Every piece of a reply comes twice."""
        links, what = self._some(fault)
        for each in links:
            each.double = True
        return self._for_a_while(fault, links, what)


def _of_many(failover: tuple[float, float]) -> dict[str, Effect]:
    """Return the faults of servers that others replace, after so many seconds."""
    return {
        "kill-connections": Effect(4, (0, 0), 2.5),
        "blink": Effect(3, (0.1, 0.6), 3, silent=True),
        "failover": Effect(2, failover, 8, keeps=False, forgets=True),
        "thaw-late": Effect(2, failover, 8, keeps=False, forgets=True),
        "flush": Effect(2, (0, 0), 2.5, keeps=False),
    }


class Cluster(World):
    """Three masters, and a replica of each."""

    name = "cluster"
    parted = True
    effects: ClassVar = _of_many((3, 4))
    lag: ClassVar = {False: 0.0, True: 0.5}
    fences_last = True

    def __init__(self) -> None:
        self.cluster = RedisCluster(3, 1)
        self._served = self._masters()

    def upheaval(self) -> str:
        """If a master cannot run for a while, the other servers replace it."""
        served = self._masters()
        before, self._served = self._served, served
        return " ".join(f"to {node.port}" for node in served if node not in before)

    @property
    def nodes(self) -> list[RedisServer]:
        return [*self.cluster.nodes, *self.cluster.replicas]

    def url(self, number: int) -> str:
        return self.cluster.url

    def _masters(self) -> list[RedisServer]:
        return [node for node in self.nodes if "role:master" in node.cli("INFO", "replication")]

    def _one(self, fault: Planned) -> RedisServer:
        masters = self._masters()
        return masters[int(fault.chance * len(masters))]

    def kill_connections(self, fault: Planned, pids: list[int]) -> str:
        for node in self.nodes:
            node.cli("CLIENT", "KILL", "TYPE", ("normal", "pubsub")[fault.chance < 0.5])
        return ""

    def blink(self, fault: Planned, pids: list[int]) -> str:
        """Freeze a master for a time that is too short for the others to notice."""
        return _frozen(self._one(fault), fault.seconds)

    def failover(self, fault: Planned, pids: list[int]) -> str:
        node = self._one(fault)
        node.stop()
        time.sleep(fault.seconds)
        node.start()
        self._settle()
        return f"from {node.port}"

    def thaw_late(self, fault: Planned, pids: list[int]) -> str:
        """Freeze a master until another server has replaced it."""
        what = _frozen(self._one(fault), fault.seconds)
        self._settle()
        return what

    def _settle(self) -> None:
        """Wait until every server knows the three masters again, and their replicas are up to date."""
        wait_until(lambda: self.cluster.is_whole(len(self.nodes)) and len(self._masters()) == 3)
        wait_until(lambda: sum("master_link_status:up" in node.cli("INFO", "replication") for node in self.nodes) == 3)

    def flush(self, fault: Planned, pids: list[int]) -> str:
        for node in self._masters():
            node.cli("FLUSHALL")
        return ""

    def standing(self) -> list[str]:
        return _standing(self._masters())

    def close(self) -> None:
        self.cluster.close()


class Sentinel(World):
    """A master, two replicas, three sentinels."""

    name = "sentinel"
    effects: ClassVar = _of_many((4, 5))
    lag: ClassVar = {False: 0.0, True: 0.5}
    fences_last = True

    def __init__(self) -> None:
        self.house = Sentinels()
        self._named = self.house.named()

    def upheaval(self) -> str:
        """If the sentinels cannot run for a while, they may replace a master that works."""
        before, self._named = self._named, self.house.named()
        return f"to {self._named}" if before != self._named else ""

    @property
    def nodes(self) -> list[RedisServer]:
        return [self.house.master, *self.house.replicas]

    def url(self, number: int) -> str:
        return self.house.url

    def _master(self) -> RedisServer:
        port = self.house.named()
        return next(node for node in self.nodes if node.port == port)

    def kill_connections(self, fault: Planned, pids: list[int]) -> str:
        self._master().cli("CLIENT", "KILL", "TYPE", ("normal", "pubsub")[fault.chance < 0.5])
        return ""

    def blink(self, fault: Planned, pids: list[int]) -> str:
        return _frozen(self._master(), fault.seconds)

    def failover(self, fault: Planned, pids: list[int]) -> str:
        node = self._master()
        node.stop()
        time.sleep(fault.seconds)
        node.start()
        self._settle()
        return f"from {node.port}"

    def thaw_late(self, fault: Planned, pids: list[int]) -> str:
        what = _frozen(self._master(), fault.seconds)
        self._settle()
        return what

    def _settle(self) -> None:
        def together() -> bool:
            try:
                return self._master().cli("INFO", "replication").count("state=online") == 2
            except OSError:
                return False

        # After a vote without a winner, the next one is held 6 s later. Sentinels ask a master that is back every 10 s
        # what it is, and 8 s after its answer they tell it that it is a master no more.
        wait_until(together, 45)

    def flush(self, fault: Planned, pids: list[int]) -> str:
        self._master().cli("FLUSHALL")
        return ""

    def standing(self) -> list[str]:
        return _standing([self._master()])

    def close(self) -> None:
        self.house.close()


class Memcached(_Linked):
    """A ring of three servers. All processes use the same three proxies, because the addresses identify a ring."""

    name = "memcached"
    parted = True
    effects: ClassVar = {
        **_LINK,
        "freeze": Effect(3, (0.2, 5), 6, silent=True),
        "restart": Effect(3, (0, 2), 4, keeps=False),
        "flush": Effect(3, (0, 0), 2.5, keeps=False),
    }
    lag: ClassVar = {False: 0.0, True: 1.0}
    lag_of_all: ClassVar = {False: 1.0, True: 2.0}

    def __init__(self) -> None:
        super().__init__()
        self._servers = [MemcachedServer() for _ in range(3)]
        self.proxies = [Proxy(server.port) for server in self._servers]

    @property
    def nodes(self) -> Sequence[MemcachedServer]:
        return self._servers

    def url(self, number: int) -> str:
        return "memcached://" + ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.proxies)

    def _server(self, fault: Planned) -> MemcachedServer:
        return self._servers[int(fault.other * 3)]

    def freeze(self, fault: Planned, pids: list[int]) -> str:
        return _frozen(self._server(fault), fault.seconds)

    def restart(self, fault: Planned, pids: list[int]) -> str:
        server = self._server(fault)
        server.stop()
        time.sleep(fault.seconds)
        server.start()
        return str(server.port)

    def flush(self, fault: Planned, pids: list[int]) -> str:
        server = self._server(fault)
        server.empty()
        return str(server.port)

    def close(self) -> None:
        super().close()
        for each in self._servers:
            each.close()


class Postgres(_Linked):
    """One server, with a proxy for each process. If a process's connection is cut, it loses what it holds."""

    name = "postgres"
    time_out = 3.0
    effects: ClassVar = {
        # A process that has lost a reply waits for it until the time-out, two seconds longer than on Redis.
        **{kind: effect._replace(keeps=False, after=effect.after + 2) for kind, effect in _LINK.items()},
        "kill-connections": Effect(4, (0, 0), 2.5, keeps=False),
        "freeze": Effect(3, (0.2, 5), 6, keeps=False, silent=True),
        "restart": Effect(3, (0, 2), 4, keeps=False),
        "flush": Effect(2, (0, 0), 2.5, keeps=False),
    }
    lag: ClassVar = {False: 0.0, True: 0.5}
    fences_last = True

    def __init__(self) -> None:
        super().__init__()
        self.server = PostgresServer()
        self.server.prepare()
        self.proxies = [Proxy(self._port()) for _ in range(4)]

    def _port(self) -> int:
        """Return the port to which the links lead."""
        return self.server.port

    def url(self, number: int) -> str:
        port = self.proxies[number % len(self.proxies)].port
        return f"postgres://root@127.0.0.1:{port}/postgres?sslmode=disable"

    def pulse(self) -> None:
        with contextlib.suppress(psycopg.Error):  # the server is being stopped
            self.server.ask("SELECT 1")

    def kill_connections(self, fault: Planned, pids: list[int]) -> str:
        return str(self.server.terminate("stampede%"))

    def freeze(self, fault: Planned, pids: list[int]) -> str:
        return _frozen(self.server, fault.seconds)

    def restart(self, fault: Planned, pids: list[int]) -> str:
        self.server.stop()
        time.sleep(fault.seconds)
        self.server.start()
        return ""

    def flush(self, fault: Planned, pids: list[int]) -> str:
        try:
            self.server.empty()
        except psycopg.errors.DeadlockDetected:  # with a caller; the server chose this transaction
            return "in vain"
        return ""

    def standing(self) -> list[str]:
        held = "SELECT convert_from(name, 'UTF8') FROM stampede.{} WHERE token IS NOT NULL AND ends > stampede.clock()"
        return [name for table in ("leases", "locks") for (name,) in self.server.ask(held.format(table))]

    def close(self) -> None:
        super().close()
        self.server.close()


class PooledPostgres(Postgres):
    """Postgres behind pgbouncer. Every other process gets notifications over a direct connection."""

    name = "postgres-pooled"
    effects: ClassVar = {**Postgres.effects, "restart-pooler": Effect(3, (0, 2), 4)}

    def _port(self) -> int:
        if not hasattr(self, "_pooler"):
            self._pooler = PgBouncer(self.server, "default_pool_size=5")
        return self._pooler.port

    def url(self, number: int) -> str:
        return super().url(number) + ("&listen=" + quote(self.server.postgres_url, safe="") if number % 2 else "")

    def restart_pooler(self, fault: Planned, pids: list[int]) -> str:
        self._pooler.stop()
        time.sleep(fault.seconds)
        self._pooler.start()
        return ""

    def close(self) -> None:
        super().close()
        self._pooler.close()


class Disk(World):
    """A directory that all processes share. Values are signed, so that a damaged value is noticed."""

    name = "disk"
    time_out = 2.0  # for a writer that waits for its turn
    gated = True
    signed = True
    effects: ClassVar = {
        "damage": Effect(3, (0, 0), 2.5, keeps=False, lurks=True),
        "zeroed": Effect(1, (0, 0), 2.5, keeps=False, lurks=True),
        "remove": Effect(2, (0, 0), 2.5, keeps=False, unseen=0.1),
        "no-room": Effect(2, (0.3, 2), 2.5),
    }
    lag_of_all: ClassVar = {False: 0.0, True: 0.0}

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="stampede-chaos-")) / "cache"

    def url(self, number: int) -> str:
        return f"disk://{self.directory}"

    def _database(self) -> Path | None:
        found = sorted(self.directory.glob("*.sqlite"))
        return found[0] if found else None

    def damage(self, fault: Planned, pids: list[int]) -> str:
        """Overwrite one page of the database with invalid bytes. (SQLite does not notice a few changed bytes
        in an index. Then it searches for a row in the wrong place, and stores it a second time.)"""
        return self._written(fault, b"\xff" + os.urandom(_PAGE - 1))

    def zeroed(self, fault: Planned, pids: list[int]) -> str:
        """Overwrite the header of the database with zeros."""
        return self._written(fault._replace(other=0.0), bytes(200))

    def _written(self, fault: Planned, what: bytes) -> str:
        path = self._database()
        if path is None:
            return "nothing"
        with contextlib.suppress(OSError), path.open("r+b") as file:
            at = int(path.stat().st_size // _PAGE * fault.other) * _PAGE
            file.seek(at)
            file.write(what)
            return f"{path.name} at {at}"
        return "nothing"

    def remove(self, fault: Planned, pids: list[int]) -> str:
        shutil.rmtree(self.directory, ignore_errors=True)
        return ""

    def no_room(self, fault: Planned, pids: list[int]) -> str:
        """Limit the size of one process's files to a few bytes."""
        import resource

        pid = pids[int(fault.chance * len(pids))]
        with contextlib.suppress(ProcessLookupError):
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            time.sleep(fault.seconds)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        return f"for {pid}"

    def close(self) -> None:
        shutil.rmtree(self.directory.parent, ignore_errors=True)


class Memory(World):
    """Threads and an event loop of one process. There is nothing else that can go wrong."""

    name = "memory"
    shared = False
    effects: ClassVar = {}
    lag_of_all: ClassVar = {False: 0.0, True: 0.0}

    def url(self, number: int) -> str:
        return "memory://"

    def options(self, dice: random.Random) -> dict[str, Any]:
        return {}


_PAGE = 4096


def _frozen(server: Any, seconds: float) -> str:
    server.freeze()
    try:
        time.sleep(seconds)
    finally:
        server.thaw()
    return str(server.port)


# The key of a lock remains when its holders have left, so that fences go on growing.
_HELD = """
local time, held = redis.call('TIME'), {}
local now = time[1] * 1000 + time[2] / 1000
for _, key in ipairs(redis.call('KEYS', '*}L:*')) do
  for _, each in ipairs(cmsgpack.unpack(redis.call('GET', key)).inside) do
    if each.ends > now then
      held[#held + 1] = key
    end
  end
end
return held
"""


def _standing(servers: list[RedisServer]) -> list[str]:
    asked = (("KEYS", "*}l"), ("EVAL", _HELD, "0"))
    return [line for server in servers for command in asked for line in server.cli(*command).splitlines()]


ENGINES: dict[str, type[World]] = {
    each.name: each
    for each in (Redis, SteppedRedis, Cluster, Sentinel, Memcached, Postgres, PooledPostgres, Disk, Memory)
}
