"""The ZooKeeper engine: locks, made of ephemeral sequential nodes, and a store of small values.

session.py      sessions of kazoo; a lost one is never used again
line.py         the connection of a session: its signs of life, and its end if the server is silent
queue.py        the meaning of the nodes in a lock's queue
lock_steps.py   the steps of a lock, and `Locks` in both colours
cell.py         values"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from stampede.engines.cells import CellEngine
from stampede.engines.kit.url import Kind, addresses_of, duration, flag, number, options_of, parts_of, safe_url, text
from stampede.engines.kit.worker_threads import WorkerThreads, here
from stampede.engines.zookeeper.cell import ZooKeeperCell
from stampede.engines.zookeeper.lock_steps import ZooKeeperLocks, ZooKeeperLockSteps
from stampede.engines.zookeeper.session import Sessions
from stampede.errors import OptionError
from stampede.runtime.colour import BLOCKING, SUSPENDING

__all__ = ["ZooKeeperEngine", "check_url", "from_url"]

OPTIONS: dict[str, Kind] = {"tls": flag, "ca": text, "cert": text, "key": text, "timeout": duration, "session": number}

PORT = 2181

THREADS = 16
"""Requests of event loops that are under way at once."""


class ZooKeeperEngine(CellEngine):
    """An ensemble, by one or more of its servers. All nodes are below the node `root`. Each waiter for a lock has a
    place in the lock's queue, and watches the place before its own."""

    fair = True
    pushes = True
    rooms = True

    def __init__(self, sessions: Sessions, root: str = "/stampede") -> None:
        self._sessions = sessions
        self._steps = steps = ZooKeeperLockSteps(sessions, root)
        super().__init__(ZooKeeperCell(sessions, root), "zookeeper")
        locks = ZooKeeperLocks(steps, here, BLOCKING)
        alocks = ZooKeeperLocks(steps, WorkerThreads(THREADS).run, SUSPENDING)
        # No handover: the node of a lock ends with its session, which belongs to this process.
        self.blocking = replace(self.blocking, locks=locks, holds=locks, handover=None)
        self.suspending = replace(self.suspending, locks=alocks, holds=alocks, handover=None)

    def close(self) -> None:
        self._sessions.close()
        super().close()

    def _start_again(self) -> None:
        self._sessions.start_again()
        self._steps.start_again()
        super()._start_again()


def _parsed(url: str, **options: Any) -> tuple[str, str, dict[str, Any]]:
    parts, found = parts_of(url), options_of(url, options, OPTIONS)
    login, servers = parts.netloc.rpartition("@")[0], ",".join(map(str, addresses_of(url, PORT)))
    root = f"/{unquote(parts.path).strip('/') or 'stampede'}"
    if any(part in ("", ".", "..", "zookeeper") for part in root[1:].split("/")[:1]) or "//" in root:
        raise OptionError(f"{safe_url(url)!r}: {root!r} can't be a node: write a path such as /stampede")
    if "key" in found and "cert" not in found:
        raise OptionError(f"{safe_url(url)}: key= is the key of a certificate: give cert=, too")
    files = {theirs: found[ours] for ours, theirs in _FILES.items() if ours in found}
    tls = files | {"use_ssl": True} if found.get("tls", bool(files)) else {}
    terms = {"timeout": found.get("timeout", 1.0), "least": found.get("session", 0.0)}
    return servers, root, terms | {"login": unquote(login), "tls": tls}


_FILES = {"ca": "ca", "cert": "certfile", "key": "keyfile"}


def from_url(url: str, **options: Any) -> ZooKeeperEngine:
    """Open `zookeeper://user:password@h1:2181,h2:2181,h3:2181/root?timeout=3`."""
    servers, root, terms = _parsed(url, **options)
    return ZooKeeperEngine(Sessions(servers, **terms), root)


check_url = _parsed
