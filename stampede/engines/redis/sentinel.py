"""`redis+sentinel://`: each new connection asks the sentinels who the master is, and asks that server whether it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache
from importlib import import_module
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from stampede.colour import run_blocking
from stampede.engines.redis.clients import DEFAULTS, SENTINEL, Address, Server, made_with, never, several
from stampede.engines.url import flag, safe_url
from stampede.errors import OptionError

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection as SuspendingConnection
    from redis.connection import AbstractConnection as Connection

__all__ = ["Service", "of_sentinel_client", "of_sentinel_url"]

T = TypeVar("T")

_log = logging.getLogger("stampede")

_ODD = (TypeError, ValueError, LookupError, AttributeError)
"""What replies of another shape can raise in the library."""

LOOK = 1.0
"""Seconds between two questions to the sentinels while nothing happens."""

_SHAPE = "redis+sentinel://host:26379,host:26379/service/0"


class Service(Server):
    """The master of a service, whichever server that is."""

    def __init__(self, name: str, kind: str, service: str, sentinels: Sequence[Address], options: Mapping[str, Any]):
        """Options that begin with `sentinel_` are for the connections to the sentinels."""
        from redis.sentinel import Sentinel

        self._service = service
        self._sentinels = [tuple(address) for address in sentinels]
        own = {key: value for key, value in options.items() if not key.startswith(SENTINEL)}
        theirs = {key.removeprefix(SENTINEL): value for key, value in options.items() if key.startswith(SENTINEL)}
        shared = {key: value for key, value in own.items() if key.startswith(("socket_timeout", "socket_conn", "ssl_"))}
        self._theirs = DEFAULTS | shared | theirs
        self._theirs["ssl"] = flag(f"{SENTINEL}ssl", theirs.get("ssl", kind == "SSLConnection"))
        try:
            self._watch = Sentinel(self._sentinels, sentinel_kwargs=self._theirs | {"retry": never()})
        except TypeError as wrong:
            raise OptionError(f"{name}: {wrong}") from wrong
        self._look = 0.0  # when to ask the sentinels again
        self._masters, self._suspending_masters = _Masters(self), _SuspendingMasters(self)
        self._master: tuple[str, int] | None = None
        super().__init__(name, kind, own)

    def connection(self, **options: Any) -> Connection:
        its: dict[str, Any] = {"connection_pool": self._masters, "retry": never()}
        made: Connection = _kind("redis.sentinel", self._kind)(**self._options | options | its)
        return made

    def suspending_connection(self) -> SuspendingConnection:
        its: dict[str, Any] = {"connection_pool": self._suspending_masters, "retry": never("redis.asyncio.retry")}
        made: SuspendingConnection = _kind("redis.asyncio.sentinel", self._kind)(**self._options | its)
        return made

    def close(self) -> None:
        super().close()
        for sentinel in self._watch.sentinels:
            sentinel.close()

    def current(self, connection: Any) -> bool:
        return self._master is None or (connection.host, connection.port) == self._master

    def still(self, connection: Any) -> bool:
        """The same, and the sentinels are asked now and then: they let an old master go on for ten seconds when they
        replace one that lives, and it would be believed meanwhile."""
        from redis.exceptions import RedisError

        if time.monotonic() >= self._look:
            try:
                if self.master() != self._master:
                    self._meet()
            except (RedisError, OSError, *_ODD) as error:  # they are out of service, or at it: nothing has changed
                _log.debug("no answer from the sentinels: %s", error)
            self._look = time.monotonic() + LOOK
        return self.current(connection)

    def _meet(self) -> None:
        probe = self.connection()
        try:
            probe.connect()  # which tells us whom it has met
        finally:
            probe.disconnect()

    def master(self) -> tuple[str, int]:
        """Where the sentinels say that the master is."""
        watch = copy(self._watch)  # threads look side by side, and each of them puts who answers first
        watch.sentinels = [*self._watch.sentinels]
        named = run_blocking(self._named(watch))
        self._watch.sentinels = watch.sentinels
        return named

    async def suspending_master(self) -> tuple[str, int]:
        """The same, in the running loop: connections can't be kept for the next one."""
        from redis.asyncio.sentinel import Sentinel

        kwargs = self._theirs | {"retry": never("redis.asyncio.retry")}
        watch: Any = Sentinel(self._sentinels, sentinel_kwargs=kwargs)
        try:
            return await self._named(watch)
        finally:
            for sentinel in watch.sentinels:
                await sentinel.aclose()

    async def _named(self, watch: Any) -> tuple[str, int]:
        from redis.asyncio.sentinel import MasterNotFoundError as SuspendingMasterNotFoundError
        from redis.exceptions import RedisError
        from redis.sentinel import MasterNotFoundError

        try:
            found: tuple[str, int] = await _got(watch.discover_master(self._service))
        except (MasterNotFoundError, SuspendingMasterNotFoundError) as unknown:
            why = ""
            try:
                await _got(watch.sentinels[0].ping())
            except RedisError as error:  # of all sentinels, perhaps: wrong certificates, wrong passwords
                why = f": {error}"
            raise ConnectionError(f"no sentinel names a master of {self._service!r} that is up{why}") from unknown
        return found

    def found(self, master: tuple[str, int]) -> None:
        """A server says itself that it is the master: connections to another one are of no use any more."""
        moved = self._master not in (None, master)
        self._master = master
        if moved and self.on_move is not None:
            self.on_move()
        elif self.on_meet is not None:
            self.on_meet()


class _Masters:
    """What the library's connections ask of their pool."""

    is_master = True
    check_connection = False

    def __init__(self, server: Service) -> None:
        self._server = server
        self.service_name = server._service

    def get_master_address(self) -> Any:
        return self._server.master()

    def meet(self, address: tuple[str, int], role: Any) -> bool:
        """Whether the server that answered is the master."""
        leads = role is None or role[0] in (b"master", "master")
        if leads:
            self._server.found(address)
        return leads


class _SuspendingMasters(_Masters):
    async def get_master_address(self) -> Any:
        return await self._server.suspending_master()


@cache
def _kind(module: str, name: str) -> Any:
    """The library's connection, which finds the master, and asks it whether it is: sentinels may not know yet."""
    base: Any = getattr(import_module(module), f"SentinelManaged{name}")
    if module == "redis.sentinel":

        class Managed(base):  # type: ignore[misc]
            def connect_to(self, address: tuple[str, int]) -> None:
                run_blocking(_met(self, super().connect_to, address))

        return Managed

    class SuspendingManaged(base):  # type: ignore[misc]
        async def connect_to(self, address: tuple[str, int]) -> None:
            await _met(self, super().connect_to, address)

    return SuspendingManaged


async def _met(connection: Any, connect: Callable[[tuple[str, int]], Any], address: tuple[str, int]) -> None:
    from redis.exceptions import NoPermissionError

    await _got(connect(address))
    await _got(connection.send_command("ROLE"))
    try:
        role = await _got(connection.read_response())
    except NoPermissionError:
        role = None
    if not connection.connection_pool.meet(address, role):
        await _got(connection.disconnect())
        raise ConnectionError(f"{address[0]}:{address[1]} is no master (any more, or yet)")


async def _got(answer: Any) -> Any:
    """What the library says, in either colour."""
    return await answer if isawaitable(answer) else answer


def of_sentinel_url(url: str, given: Mapping[str, Any]) -> Service:
    """The master behind `redis+sentinel://user:password@host:port,host:port/service/db?sentinel_password=...`."""
    sentinels, options = several(url, 26379)
    service, _, db = urlsplit(url).path.lstrip("/").partition("/")
    if not service:
        raise OptionError(f"{safe_url(url)}: name the service, as in {_SHAPE}")
    if db and not db.isdecimal():
        raise OptionError(f"{safe_url(url)}: {db!r} is no number of a database, as in {_SHAPE}")
    if db:
        options["db"] = int(db)
    return Service(safe_url(url), options.pop("kind"), unquote(service), sentinels, options | dict(given))


def of_sentinel_client(client: Any, given: Mapping[str, Any]) -> Service | None:
    """The same of what `Sentinel.master_for` gives, in either colour; None of any other client."""
    pool: Any = getattr(client, "connection_pool", None)
    kind = getattr(getattr(pool, "connection_class", None), "__name__", "")
    if not kind.startswith("SentinelManaged"):
        return None
    if not pool.is_master:
        raise OptionError("client leads to replicas: give what Sentinel.master_for returns")
    watch = pool.sentinel_manager
    places = [each.connection_pool.connection_kwargs for each in watch.sentinels]
    sentinels = [Address(place["host"], place["port"]) for place in places]
    theirs = {SENTINEL + key: value for key, value in made_with(watch.sentinel_kwargs).items()}
    options = made_with(pool.connection_kwargs) | theirs | dict(given)
    name = f"redis+sentinel://{','.join(f'{each.host}:{each.port}' for each in sentinels)}/{pool.service_name}"
    return Service(name, kind.removeprefix("SentinelManaged"), pool.service_name, sentinels, options)
