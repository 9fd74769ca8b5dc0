"""Small values: nodes that are written while they have the version that was seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from random import randrange, sample
from struct import Struct
from typing import Any
from urllib.parse import quote
from zlib import crc32

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

from stampede.engines.cells import Faster, Seen, Version, WatchingCell
from stampede.engines.zookeeper.session import Sessions, ZooKeeperSession

__all__ = ["ZooKeeperCell"]

MOST = 1_040_000
"""Bytes of a value; servers refuse packets of 1 MiB."""

LIVE = 10.0
"""Seconds for which the session of values lives without a sign of life."""

GRAVE = 3600.0
"""Seconds for which what is over or removed leaves its version to the next one of its name."""

SWEEP = 64
"""Swaps between two looks at what is over."""

_HEAD = Struct(">?d")
_DRAWERS = 256
_NOTHING = Seen(None)


class ZooKeeperCell(WatchingCell):
    """Nodes of one ensemble, spread over drawers. What is over is removed by those who write others."""

    tells = True
    longest = MOST
    at_once = 100

    def __init__(self, sessions: Sessions, root: str) -> None:
        self._sessions, self._root = sessions, f"{root}/cell"

    def read(self, names: Sequence[str]) -> list[Seen]:
        session = self._sessions.of(LIVE)
        if names:
            # a server may be behind the others: it has what they had when it answers this
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
                stat = session.told(session.client.set_async(path, body, version[1]))
        except (NodeExistsError, NoNodeError, BadVersionError):
            return Faster(self.read([name])[0])
        return None if data is None else (stat.czxid, stat.version)

    def _created(self, session: ZooKeeperSession, path: str, body: bytes) -> Any:
        try:
            return session.told(session.client.create_async(path, body, include_data=True))[1]
        except NoNodeError:
            session.make(path.rpartition("/")[0])
            return session.told(session.client.create_async(path, body, include_data=True))[1]

    def _seen(self, session: ZooKeeperSession, question: Any) -> Seen:
        try:
            data, stat = session.told(question)
        except NoNodeError:
            return _NOTHING
        version = (stat.czxid, stat.version)
        there = len(data) >= _HEAD.size and _HEAD.unpack_from(data)[0]
        return Seen(data[_HEAD.size :] if there else None, version)

    def _sweep(self, session: ZooKeeperSession) -> None:
        """A few of one drawer, in nobody's time: no answer is waited for but of what is there."""
        drawer = f"{self._root}/{randrange(_DRAWERS):02x}"
        try:
            names = session.told(session.client.get_children_async(drawer))
            for name in sample(names, min(len(names), SWEEP)):
                data, stat = session.told(session.client.get_async(f"{drawer}/{name}"))
                ttl = _HEAD.unpack_from(data)[1] if len(data) >= _HEAD.size else inf
                if stat.mtime / 1000 + ttl + GRAVE < time.time():
                    session.client.delete_async(f"{drawer}/{name}", stat.version)
        except NoNodeError:
            return

    def watch(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
        return self._sessions.of(LIVE).always(self._path(name), told)

    def _path(self, name: str) -> str:
        return f"{self._root}/{crc32(name.encode()) % _DRAWERS:02x}/n{quote(name, safe='')}"
