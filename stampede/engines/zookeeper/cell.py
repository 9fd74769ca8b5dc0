"""Small values: nodes that are written if they still have the version that was read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from struct import Struct
from typing import Any
from urllib.parse import quote
from zlib import crc32

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

from stampede.engines.cells import Faster, Seen, Version, WatchingCell
from stampede.engines.zookeeper.session import Sessions, ZooKeeperSession
from stampede.runtime.chance import randrange, sample

__all__ = ["ZooKeeperCell"]

MOST = 1_040_000
"""The largest value in bytes: servers refuse packets of 1 MiB."""

LIVE = 10.0
"""The lease, in seconds, by which the session for values is chosen, as for a lock."""

GRAVE = 3600.0
"""Seconds for which an expired or removed value keeps its node: the next value of the name continues its versions."""

SWEEP = 64
"""The mean number of swaps between two sweeps, and the most nodes that one sweep reads."""

_HEAD = Struct(">?d")
_DRAWERS = 256
_NOTHING = Seen(None)


class ZooKeeperCell(WatchingCell):
    """The nodes of one ensemble, spread over drawers (parent nodes). Writers remove expired nodes now and then."""

    tells = True
    longest = MOST
    at_once = 100

    def __init__(self, sessions: Sessions, root: str) -> None:
        self._sessions, self._root = sessions, f"{root}/cell"

    def read(self, names: Sequence[str]) -> list[Seen]:
        session = self._sessions.of(LIVE)
        if names:
            # Our server may lag behind the others: after this it has everything that they had.
            session.client.sync_async(self._root)
        asked = [session.client.get_async(self._path(name)) for name in names]
        return [self._seen(session, each) for each in asked]

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        if version is None and data is None:
            return None
        session, path = self._sessions.of(LIVE), self._path(name)
        body = _HEAD.pack(data is not None, min(ttl, 1e12) if data is not None else 0.0) + (data or b"")
        if randrange(SWEEP) == 0:
            self._sweep(session)
        try:
            if version is None:
                stat = self._created(session, path, body)
            else:
                stat = session.reply(session.client.set_async(path, body, version[1]))
        except (NodeExistsError, NoNodeError, BadVersionError):
            return Faster(self.read([name])[0])
        return None if data is None else (stat.czxid, stat.version)

    def _created(self, session: ZooKeeperSession, path: str, body: bytes) -> Any:
        try:
            return session.reply(session.client.create_async(path, body, include_data=True))[1]
        except NoNodeError:
            session.make(path.rpartition("/")[0])
            return session.reply(session.client.create_async(path, body, include_data=True))[1]

    def _seen(self, session: ZooKeeperSession, question: Any) -> Seen:
        try:
            data, stat = session.reply(question)
        except NoNodeError:
            return _NOTHING
        version = (stat.czxid, stat.version)
        there = len(data) >= _HEAD.size and _HEAD.unpack_from(data)[0]
        return Seen(data[_HEAD.size :] if there else None, version)

    def _sweep(self, session: ZooKeeperSession) -> None:
        """Remove some expired nodes of one drawer, without waiting for the replies to the removals."""
        drawer = f"{self._root}/{randrange(_DRAWERS):02x}"
        try:
            names = session.reply(session.client.get_children_async(drawer))
            for name in sample(names, min(len(names), SWEEP)):
                data, stat = session.reply(session.client.get_async(f"{drawer}/{name}"))
                ttl = _HEAD.unpack_from(data)[1] if len(data) >= _HEAD.size else inf
                if stat.mtime / 1000 + ttl + GRAVE < time.time():
                    session.client.delete_async(f"{drawer}/{name}", stat.version)
        except NoNodeError:
            return

    def watch(self, name: str, notify: Callable[[], object]) -> Callable[[], object]:
        return self._sessions.of(LIVE).watch_always(self._path(name), notify)

    def _path(self, name: str) -> str:
        return f"{self._root}/{crc32(name.encode()) % _DRAWERS:02x}/n{quote(name, safe='')}"
