"""The memcached engine.

meta.py         commands and replies of the meta protocol, as bytes;  items.py   a key's record as an item
servers.py      the servers of a URL, and which of them has a key
blocking.py, suspending.py   how each colour sends commands
verbs.py        Claims and Store;  generations.py, locks.py, limits.py   their ports"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from stampede.engines.kit.expiring import Ending
from stampede.engines.kit.polling import Costs
from stampede.engines.kit.url import anything, flag, number, options_of, parts_of, safe_url
from stampede.engines.memcached.blocking import BlockingLine
from stampede.engines.memcached.generations import KnownGenerations
from stampede.engines.memcached.limits import MemcachedLimits, Seen
from stampede.engines.memcached.locks import MemcachedLocks
from stampede.engines.memcached.servers import MemcachedNode, Servers
from stampede.engines.memcached.suspending import SuspendingLine
from stampede.engines.memcached.verbs import MemcachedBatch, MemcachedKeys, Numbers
from stampede.errors import OptionError
from stampede.model.ports import Engine, Side
from stampede.runtime import forks
from stampede.runtime.colour import BLOCKING, SUSPENDING, run_blocking

__all__ = ["MemcachedEngine", "from_url"]


class MemcachedEngine(Engine):
    """Values and leases on one memcached server (1.6.13 or newer), or on a ring of several, by its meta protocol.

    The limits of memcached:

    - It forgets. A value that it evicts, or loses in a restart, is computed again. If it evicts a lease, the value goes
      to its caller and is not stored. If it evicts a `Lock`, or loses it with the server, two callers can hold it: use
      such locks to save work, and take redis, etcd or zookeeper where two holders would be an error. The fence grows
      only as long as the server runs.
    - Its clock ticks in seconds: `ttl=5` ends within the fifth second, leases last up to one second longer than asked,
      locks up to two, and fractions are rounded up. Nothing that expires is kept for more than 30 days.
    - It cannot push. Waiters look again: soon at first, at the moment that the key's last cost suggests, and at the
      latest after a tenth of the time they have waited, or 50 ms.
    - A key belongs to one server of the ring, by its name. While this server is down, its keys are computed once per
      process and kept there for seconds, as with any engine that is down; the other servers go on. No other server
      stores these keys, since the first one would come back with outdated values. `invalidate` of such a key raises.
    - `clear` and `invalidate_all` change a number that each process reads once a second. While the server with a
      function's number is down, each process uses a number of its own, and shares no values of that function.
    - Values above the server's item limit (`-I`) are returned and not stored.
    - A plain `get` of another program finds our items with the client flags 1470758913 (a header of 50 bytes, then the
      value) or 1470758914 (a lease, perhaps with a value). They are no values for other programs.

    Options are passed to pymemcache's `Client`, `tls_context` too."""

    scheme = "memcached"
    looks = True
    tick = 3.0

    def __init__(self, *servers: str, **options: Any) -> None:
        self._servers = Servers(servers, options)
        self._line, self._aline = BlockingLine(self._servers), SuspendingLine(self._servers)
        self._numbers: Numbers = Ending()
        known = self._numbers, KnownGenerations(), Costs[bytes]()
        self.recalls = keys = MemcachedKeys(self._line, *known, BLOCKING)
        akeys = MemcachedKeys(self._aline, *known, SUSPENDING)
        self.many = MemcachedBatch(keys, self._line)
        locks = MemcachedLocks(self._line, self._numbers, BLOCKING)
        alocks = MemcachedLocks(self._aline, self._numbers, SUSPENDING)
        seen: Seen = {}
        limits, alimits = MemcachedLimits(self._line, BLOCKING, seen), MemcachedLimits(self._aline, SUSPENDING, seen)
        self.blocking = Side(keys, keys, locks, limits, softens=keys, shows=keys, holds=locks, handover=locks)
        self.suspending = Side(akeys, akeys, alocks, alimits, softens=akeys, shows=akeys, holds=alocks, handover=alocks)
        forks.in_child(self._start_again)

    def ping(self) -> float:
        """Return the seconds of a round trip to the slowest server."""
        return max(self._ping(name) for name in self._servers.all)

    def _ping(self, server: MemcachedNode) -> float:
        start = time.perf_counter()
        run_blocking(self._line.ask(server, b"mn\r\n"))
        return time.perf_counter() - start

    def close(self) -> None:
        self._servers.close()
        self._line.close()
        self._aline.close()

    def _start_again(self) -> None:
        forks.each([self._numbers.clear, self._line.start_again, self._aline.start_again])


def from_url(url: str, **options: Any) -> MemcachedEngine:
    """Return an engine for `memcached://host:port,host:port` or `memcached:///path/of.sock`."""
    return MemcachedEngine(*_servers_of(url), **options_of(url, options, _KINDS))


def check_url(url: str) -> None:
    Servers(_servers_of(url), options_of(url, {}, _KINDS))


def _servers_of(url: str) -> Sequence[str]:
    parts = parts_of(url)
    if "@" in parts.netloc:
        raise OptionError(f"{safe_url(url)!r} has a user, but memcached has no users: remove everything before the @")
    servers = [each for each in parts.netloc.split(",") if each]
    return servers or ([unquote(parts.path)] if parts.path.strip("/") else [])


_KINDS = {
    "connect_timeout": number, "timeout": number, "no_delay": flag,
    "socket_keepalive": anything, "tls_context": anything, "socket_module": anything,
}  # fmt: skip
