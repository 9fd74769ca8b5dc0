"""`redis+cluster://`: every master is a shard with lines and news of its own; each verb goes to the shard of its key.

A ticket refers to the stamps of the shard that gave it. If a key moves, the shard that has lost it reports a change.
The owners of the slots are asked for when necessary, and corrected by what servers answer meanwhile: MOVED, and
silence. While a slot is being moved (ASK, TRYAGAIN), a verb asks again until it has arrived.

A shard that is down affects only its own keys. The shard of the generations affects all: while it is down, the
generation of a key cannot be known, and no key is asked for. Otherwise a `clear` by a process that still reaches that
shard, or made just before it died, would be overlooked for as long as it is down."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from stampede.engines.kit.url import safe_url
from stampede.engines.redis.clients import RedisAddress, RedisConnector, made_with, several
from stampede.engines.redis.routed import GENERATIONS, SLOTS, RoutedPorts, Verb, reason
from stampede.engines.redis.scripts import Scripts, is_passing
from stampede.engines.redis.shard import Ports, Shard
from stampede.errors import EngineClosed, EngineError, OptionError
from stampede.model.breaker import Breaker
from stampede.model.ports import Pulse, Recalls, Ticket
from stampede.runtime import forks
from stampede.runtime.chance import shuffle
from stampede.runtime.colour import BLOCKING, SUSPENDING, Bell, Colour
from stampede.runtime.threads import begun

__all__ = ["Cluster", "of_cluster_client", "of_cluster_url"]

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds for which a verb follows a slot that is being moved."""

PAUSE = 0.005, 0.1
"""Seconds before a question is asked again: the first time, and at most."""

REFRESH = 0.25
"""Shortest time in seconds between two questions for the owners of the slots, for all callers together."""


class Master(Shard):
    """A shard, with a breaker that says whether to ask it."""

    def __init__(self, address: RedisAddress, server: RedisConnector, scripts: Scripts, *, tracking: bool) -> None:
        super().__init__(server, scripts, tracking=tracking, sharded=True)
        self.address = address
        self.breaker = Breaker()

    async def ask(self, verb: Verb[T], colour: Colour, *, always: bool = False) -> T:
        """Return the verb's answer. If the shard was down a moment ago, raise EngineError at once, unless `always` is
        set."""
        if not always and not self.breaker.allow(time.monotonic()):  # one caller a second checks, for all
            raise EngineError(f"{self.name}: it was down a moment ago")
        try:
            answer = await verb(self.suspending if colour.suspending else self.blocking)
        except EngineError as error:
            self._note_error(reason(error))
            raise
        if self.breaker.open:
            self.breaker.succeeded(time.monotonic())
        return answer

    def _note_error(self, reason: BaseException | None) -> None:
        """Note what an error says about the shard: it is down if it is silent, or says that it is out of service. Other
        refusals are answers."""
        from redis import exceptions

        silence = exceptions.ConnectionError, exceptions.TimeoutError, OSError
        if isinstance(reason, (*silence, exceptions.ClusterDownError)):
            self.breaker.failed(time.monotonic())
        elif isinstance(reason, exceptions.ResponseError):
            self.breaker.succeeded(time.monotonic())


class Cluster:
    """All shards, and the ports over them."""

    def __init__(
        self, name: str, seeds: Sequence[RedisAddress], kind: str, options: Mapping[str, Any], *, tracking: bool
    ) -> None:
        self.name = name
        self._seeds = list(seeds)
        self.scripts = Scripts(sharded=True)
        self._kind, self._options, self._tracking = kind, options, tracking
        self._shards: dict[RedisAddress, Master] = {}
        self._owners: list[RedisAddress | None] = []
        self._several = False  # whether there are several masters
        self._homes: set[RedisAddress | None] = set()  # shards that have, or have had, the generations
        self._closed = False
        self._begin()
        self._shard(self._seeds[0])  # wrong options raise now
        self.blocking, self.suspending = RoutedPorts(self, BLOCKING), RoutedPorts(self, SUSPENDING)
        self.recalls: Recalls = self

    def _begin(self) -> None:
        self._lock = threading.RLock()  # a finalizer, or a signal, may ask in the middle of this
        self._due = 0.0

    def follow(self) -> None:
        """Have every shard report changes from now on."""
        self._tracking = True
        for shard in list(self._shards.values()):
            shard.follow()

    async def ping(self) -> None:
        """Ask every shard."""
        for shard in await self._all():
            await shard.ping()

    async def _all(self) -> list[Master]:
        """Return every shard that the cluster has now."""
        await self._refresh(BLOCKING)
        return [self._shard(address) for address in {address for address in self._owners if address is not None}]

    async def facts(self) -> dict[str, dict[str, Any]]:
        """Return what an operator wants to know, by shard."""
        return {name: found for shard in await self._all() for name, found in (await shard.facts()).items()}

    async def advice(self) -> list[str]:
        """Return what the shards' eviction policies put at risk."""
        return [risk for shard in await self._all() for risk in await shard.advice()]

    def refusal(self) -> str | None:
        """Return why the first shard that refuses to report changes does so. None if there is none."""
        return next((why for shard in list(self._shards.values()) if (why := shard.refusal())), None)

    def close(self) -> None:
        with self._lock:
            self._closed = True  # first, so that no shard is added after this
        for shard in list(self._shards.values()):
            shard.close()

    def start_again(self) -> None:
        self._begin()
        forks.each(shard.start_again for shard in self._shards.values())

    # -- asking -------------------------------------------------------------------------------------------------

    async def of_key(self, slot: int, colour: Colour, verb: Verb[T], *, always: bool = False) -> T:
        """Return the verb's answer from the shard of a key's slot, as `at` does. Raise EngineError if the generations'
        shard is down."""
        if not always and self._owners and not self._generations_up():
            await self._ask_generations(colour)
        return await self.at(slot, colour, verb, always=always)

    async def at(self, slot: int, colour: Colour, verb: Verb[T], *, always: bool = False) -> T:
        """Return the verb's answer from the shard that has the slot, even if the slot moves meanwhile: verbs may be
        sent twice. `always` is for finishing what has begun there: a computed value should not be lost by a moment's
        silence."""
        from redis import exceptions

        if self._closed:
            raise EngineClosed(self.name)
        end, pause = time.monotonic() + PATIENCE, PAUSE[0]
        while True:
            shard = await self._owner(slot, colour)
            try:
                return await shard.ask(verb, colour, always=always)
            except EngineClosed as closed:
                if self._closed:
                    raise
                # Only this shard was closed, since it left the cluster: another one has its slots, or soon will.
                if time.monotonic() >= end:
                    raise EngineError(
                        f"{self.name}: the cluster's servers change faster than they can be asked"
                    ) from closed
            except EngineError as error:
                if error.partial:
                    raise  # the shard's answer about this key alone
                cause = error.__cause__
                if (
                    error.unsure
                    or time.monotonic() >= end
                    or (isinstance(cause, exceptions.AskError) and cause.slot_id != slot)
                ):
                    await self._judge(error, shard, colour)
                    raise  # (an ASK about another slot concerns another of many keys)
                if isinstance(cause, exceptions.MovedError):
                    await self._moved(slot, _address(cause, shard.address), colour)
                elif isinstance(cause, (exceptions.AskError, exceptions.TryAgainError)) or is_passing(error):
                    await colour.park(Bell(), pause)
                    pause = min(2 * pause, PAUSE[1])
                else:
                    await self._refresh(colour, avoid=shard.address)
                    if self._owners[slot] in (shard.address, None):
                        await self._judge(error, shard, colour)
                        raise

    async def _judge(self, error: EngineError, shard: Master, colour: Colour) -> None:
        """Mark the error as partial, about one shard alone, if the shard of the generations is up."""
        from redis import exceptions

        if isinstance(error.__cause__, exceptions.ClusterDownError) and shard.address != self._owners[GENERATIONS]:
            with suppress(EngineError):  # a shard that has just come back also answers so for a while
                await self._ask_generations(colour)
        error.partial = self._several and self._generations_up()

    def generation_at_hand(self, scope: str) -> str | None:
        """Return the current generation of a scope if this process knows it."""
        owner = self._owners[GENERATIONS] if self._owners else None
        shard = self._shards.get(owner) if owner is not None else None
        return None if shard is None else shard.generations.generation_at_hand(scope)

    def ticket_of_generation(self, scope: str) -> Ticket | None:
        """Return the proof that the scope's generation is still the one that this process knows, or None."""
        owner = self._owners[GENERATIONS] if self._owners else None
        shard = self._shards.get(owner) if owner is not None else None
        return None if shard is None else shard.generations.ticket_of_generation(scope)

    def _generations_up(self) -> bool:
        owner = self._owners[GENERATIONS]
        shard = self._shards.get(owner) if owner is not None else None
        return owner is not None and (shard is None or not shard.breaker.open)

    async def _ask_generations(self, colour: Colour) -> None:
        await self.at(GENERATIONS, colour, lambda ports: ports.line.ask((b"GET", b"{stampede}g")))

    async def _owner(self, slot: int, colour: Colour) -> Master:
        if not self._owners or self._owners[slot] is None:
            await self._refresh(colour)
        owner = self._owners[slot]
        if owner is None:
            error = EngineError(f"{self.name}: no server has slot {slot}")
            error.partial = self._several and self._generations_up()
            raise error
        return self._shard(owner)

    async def owners(self, slots: Sequence[int], colour: Colour) -> list[RedisAddress | None]:
        """Return the known owners of the slots."""
        if not self._owners:
            await self._refresh(colour)
        owners = self._owners
        return [owners[slot] for slot in slots]

    # -- the owners of slots ------------------------------------------------------------------------------------

    async def _refresh(self, colour: Colour, avoid: RedisAddress | None = None) -> None:
        """Ask any server for the owners of the slots. Servers that just did not answer come last."""
        now = time.monotonic()
        if self._owners and now < self._due:
            return
        self._due = now + REFRESH
        known = list(self._shards)
        shuffle(known)
        places = list(dict.fromkeys([*known, *self._seeds]))
        places.sort(key=lambda place: (place in self._shards and self._shards[place].breaker.open, place == avoid))
        for place in places:
            try:
                shard = self._shard(place)
                self._learn(await shard.ask(_slots, colour, always=not self._owners), place)
                return
            except (EngineError, TypeError, ValueError, LookupError) as error:  # no answer, or not a list of slots
                silence = error
        if self._closed:
            raise EngineClosed(self.name)
        if not self._owners:
            raise EngineError(f"{self.name}: no server says which server has which slot: {silence}") from silence

    def _learn(self, answer: Any, told_by: RedisAddress) -> None:
        owners: list[RedisAddress | None] = [None] * SLOTS
        for first, last, master, *_ in answer:
            host = (master[0] or b"").decode() if isinstance(master[0], bytes) else ""
            address = RedisAddress(told_by.host if host in ("", "?") else host, int(master[1]))
            owners[first : last + 1] = [address] * (last + 1 - first)
        with self._lock:
            self._owners = owners
            masters = set(owners)
            self._several = len(masters - {None}) > 1
            self._homes.add(owners[GENERATIONS])
            gone = [self._shards.pop(place) for place in list(self._shards) if place not in masters]
        for shard in gone:
            # In a thread, since closing may wait for another thread that is about to connect.
            if begun("stampede-redis-leave", shard.close) is None:
                shard.close()

    async def _moved(self, slot: int, address: RedisAddress, colour: Colour) -> None:
        """Note the new owner of one slot, and ask for all: others may have moved too."""
        await self._refresh(colour)
        self._owners[slot] = address
        self._homes.add(self._owners[GENERATIONS])

    def _shard(self, address: RedisAddress) -> Master:
        shard = self._shards.get(address)
        if shard is None:
            with self._lock:
                shard = self._shards.get(address)
                if shard is None:
                    shard = self._shards.setdefault(address, self._made(address))
        return shard

    def _made(self, address: RedisAddress) -> Master:
        if self._closed:
            raise EngineClosed(self.name)
        options = {**self._options, "host": address.host, "port": address.port}
        server = RedisConnector(f"{self.name} ({address.host}:{address.port})", self._kind, options)
        shard = Master(address, server, self.scripts, tracking=self._tracking)
        shard.news.on_void = partial(self._voided, address)
        shard.news.pulse = Pulse(partial(self._heard_until, shard), shard.news.stamps.stood)
        return shard

    def _heard_until(self, shard: Master, now: float) -> float:
        """Return until when local hits may trust the stamps: those of the shard, and of the shards with the
        generations, which hits do not ask for."""
        homes = [home for address, home in list(self._shards.items()) if address in self._homes]
        return min(each.news.heard_until(now) for each in (shard, *homes))

    def _voided(self, address: RedisAddress) -> None:
        """End the tickets of all shards if this one reports generations: one may have ended, so every local value may
        be too old."""
        if address in self._homes:
            for shard in list(self._shards.values()):
                shard.news.stamps.void_all()


async def _slots(ports: Ports) -> Any:
    return await ports.line.ask((b"CLUSTER", b"SLOTS"))


def _address(redirect: Any, told_by: RedisAddress) -> RedisAddress:
    return RedisAddress(redirect.host or told_by.host, redirect.port)


def of_cluster_url(url: str, given: Mapping[str, Any], *, tracking: bool) -> Cluster:
    """Return the cluster behind `redis+cluster://user:password@host:port,host:port?options`. Naming some of its servers
    is enough."""
    seeds, options = several(url, 6379)
    path = urlsplit(url).path.strip("/")
    options |= given
    if path not in ("", "0") or int(options.get("db") or 0) != 0:
        raise OptionError(f"{safe_url(url)}: a cluster has only database 0: leave the database out")
    kind = options.pop("kind")
    return Cluster(safe_url(url), seeds, kind, options, tracking=tracking)


def of_cluster_client(client: Any, given: Mapping[str, Any], *, tracking: bool) -> Cluster | None:
    """Return the cluster of a `RedisCluster` of either colour. None for any other client."""
    known: Any = getattr(client, "nodes_manager", None)
    if known is None:
        return None
    nodes = {**known.startup_nodes, **known.nodes_cache}
    seeds = list(dict.fromkeys(RedisAddress(node.host, node.port) for node in nodes.values()))
    used: Mapping[str, Any] = getattr(client, "connection_kwargs", None) or known.connection_kwargs
    secret = used.get("ssl", False) or getattr(used.get("connection_class"), "__name__", "") == "SSLConnection"
    options = {key: value for key, value in made_with(used).items() if key not in ("host", "port", "ssl")}
    if not secret:
        options = {key: value for key, value in options.items() if not key.startswith("ssl_")}
    kind = "SSLConnection" if secret else "Connection"
    name = f"redis+cluster://{','.join(f'{seed.host}:{seed.port}' for seed in seeds)}"
    return Cluster(name, seeds, kind, options | dict(given), tracking=tracking)
