"""`redis+sentinel://`: each new connection leads to the server that the library's `Sentinel` names as the master."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

from stampede.engines.kit.replies import ODD
from stampede.engines.kit.url import flag, safe_url
from stampede.engines.kit.worker_threads import WorkerThreads
from stampede.engines.redis.clients import DEFAULTS, SENTINEL, RedisAddress, RedisConnector, made_with, never, several
from stampede.errors import OptionError

__all__ = ["Service", "of_sentinel_client", "of_sentinel_url"]

_log = logging.getLogger("stampede")

LOOK = 1.0
"""Seconds between two questions to the sentinels while nothing happens. When they replace a master that is alive, the
old one goes on for ten seconds, and would be trusted meanwhile."""

_SHAPE = "redis+sentinel://host:26379,host:26379/service/0"


class Service(RedisConnector):
    """The current master of a service. A former master refuses all our questions, since the server counts each of them
    as a write."""

    moves = True

    def __init__(
        self, name: str, kind: str, service: str, sentinels: Sequence[RedisAddress], options: Mapping[str, Any]
    ):
        """Check the options. Those that begin with `sentinel_` are for the connections to the sentinels."""
        from redis.sentinel import Sentinel

        self._service = service
        own = {key: value for key, value in options.items() if not key.startswith(SENTINEL)}
        theirs = {key.removeprefix(SENTINEL): value for key, value in options.items() if key.startswith(SENTINEL)}
        shared = {key: value for key, value in own.items() if key.startswith(("socket_timeout", "socket_conn", "ssl_"))}
        theirs = DEFAULTS | shared | theirs
        theirs["ssl"] = flag(f"{SENTINEL}ssl", theirs.get("ssl", kind == "SSLConnection"))
        try:
            self._watch = Sentinel([tuple(each) for each in sentinels], sentinel_kwargs=theirs | {"retry": never()})
        except TypeError as wrong:
            raise OptionError(f"{name}: {wrong}") from wrong
        self._worker_threads = WorkerThreads(2)
        self._lock = threading.RLock()
        self._look = 0.0  # when to ask the sentinels again
        self._master: tuple[str, int] | None = None  # where the last connection led
        self._wires: WeakSet[Any] = WeakSet()  # open connections; their `current` becomes False when the master changes
        super().__init__(name, kind, own)

    def connection(self, **options: Any) -> Any:
        host, port = self.master()
        return super().connection(**options, host=host, port=port)

    async def suspending_connection(self) -> Any:
        host, port = await self._worker_threads.run(self.master)
        return self._made("redis.asyncio", host=host, port=port)

    def master(self) -> tuple[str, int]:
        """Return the address that the sentinels name as the master's."""
        from redis.exceptions import RedisError
        from redis.sentinel import MasterNotFoundError

        watch = copy(self._watch)  # threads ask in parallel, and `discover_master` reorders the list of sentinels
        watch.sentinels = [*self._watch.sentinels]
        try:
            host, port = watch.discover_master(self._service)
        except MasterNotFoundError as unknown:
            why = ""
            try:
                watch.sentinels[0].ping()
            except RedisError as error:  # perhaps true of all sentinels: wrong certificates, wrong passwords
                why = f": {error}"
            raise ConnectionError(f"no sentinel knows a working master of {self._service!r}{why}") from unknown
        except ODD as odd:
            raise ConnectionError(f"the sentinels returned an invalid address: {odd}") from odd
        finally:
            if self.closed:  # by another thread, perhaps before this one has made a connection
                self.close()
        self._watch.sentinels = watch.sentinels
        return host, port

    def met(self, wire: Any) -> None:
        self._move((wire.connection.host, wire.connection.port))
        with self._lock:
            self._wires.add(wire)

    def look(self) -> None:
        from redis.exceptions import RedisError

        if time.monotonic() >= self._look:
            try:
                self._move(self.master())
            except (RedisError, OSError) as error:  # the sentinels do not answer: keep the known master
                _log.debug("no answer from the sentinels: %s", error)
            self._look = time.monotonic() + LOOK

    def _move(self, master: tuple[str, int]) -> None:
        """If the master has changed, mark the connections to the old one as useless."""
        with self._lock:
            before, self._master = self._master, master
            if before in (None, master):
                return
            for wire in self._wires:
                wire.current = False
            self._wires.clear()
        if self.on_move is not None:
            self.on_move()

    def close(self) -> None:
        super().close()
        for sentinel in self._watch.sentinels:
            sentinel.close()


def of_sentinel_url(url: str, given: Mapping[str, Any]) -> Service:
    """Return the master behind `redis+sentinel://host:port,host:port/service/db?sentinel_password=...`."""
    sentinels, options = several(url, 26379)
    service, _, db = urlsplit(url).path.lstrip("/").partition("/")
    if not service:
        raise OptionError(f"{safe_url(url)}: name the service, as in {_SHAPE}")
    if db and not db.isdecimal():
        raise OptionError(f"{safe_url(url)}: {db!r} is not a database number, as in {_SHAPE}")
    if db:
        options["db"] = int(db)
    return Service(safe_url(url), options.pop("kind"), unquote(service), sentinels, options | dict(given))


def of_sentinel_client(client: Any, given: Mapping[str, Any]) -> Service | None:
    """Return the master behind a result of `Sentinel.master_for`, in either colour. None for any other client."""
    pool: Any = getattr(client, "connection_pool", None)
    kind = getattr(getattr(pool, "connection_class", None), "__name__", "")
    if not kind.startswith("SentinelManaged"):
        return None
    if not pool.is_master:
        raise OptionError("client leads to replicas: give what Sentinel.master_for returns")
    watch = pool.sentinel_manager
    places = [each.connection_pool.connection_kwargs for each in watch.sentinels]
    sentinels = [RedisAddress(place["host"], place["port"]) for place in places]
    theirs = {SENTINEL + key: value for key, value in made_with(watch.sentinel_kwargs).items()}
    options = made_with(pool.connection_kwargs) | theirs | dict(given)
    name = f"redis+sentinel://{','.join(f'{each.host}:{each.port}' for each in sentinels)}/{pool.service_name}"
    return Service(name, kind.removeprefix("SentinelManaged"), pool.service_name, sentinels, options)
