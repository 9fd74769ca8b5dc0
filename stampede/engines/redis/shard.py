"""One server's ports: the lines of both colours, its news, and the verbs over them."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from stampede.engines.kit.generations import PushedGenerations
from stampede.engines.redis.blocking import RedisBlocking
from stampede.engines.redis.clients import RedisConnector
from stampede.engines.redis.limits import RedisLimits
from stampede.engines.redis.locks import RedisLocks
from stampede.engines.redis.news import RedisNews, refusal_of, slot_of_scope
from stampede.engines.redis.scripts import Scripts
from stampede.engines.redis.suspending import RedisSuspending
from stampede.engines.redis.verbs import RedisKeys, RedisLine
from stampede.errors import EngineError
from stampede.runtime import forks
from stampede.runtime.colour import BLOCKING, SUSPENDING, Colour

__all__ = ["Ports", "Shard"]


class Ports(NamedTuple):
    """The ports of one server in one colour."""

    line: RedisLine
    keys: RedisKeys
    locks: RedisLocks
    limits: RedisLimits


_RISKS = {
    "noeviction": "stores nothing new once it is full",
    "volatile-ttl": "evicts leases and locks first",
    "-random": "may evict leases and locks that are in use",
    "allkeys-": "may evict a generation (as `clear` would) and entries without a ttl",
}
"""What a full server may lose, by a part of the name of its eviction policy."""


class Shard:
    """A server as the engine sees it: the whole engine, or one of a cluster's masters."""

    def __init__(self, server: RedisConnector, scripts: Scripts, *, tracking: bool, sharded: bool = False) -> None:
        self._server = server
        self.scripts = scripts
        self.name = server.name
        self.news = RedisNews(server, tracks=tracking, sharded=sharded)
        server.on_move = self.news.stray
        self.generations = self.recalls = PushedGenerations(self.news, slot_of_scope)
        self.line = RedisBlocking(server, scripts, self.news)
        self.aline = RedisSuspending(server, scripts, self.news)
        self.news.on_tick = self.aline.close_dead
        self.news.on_refused = partial(scripts.refused, server.name)
        self.news.on_deaf = partial(scripts.untold, server.name)
        self.news.answered_others = lambda: server.hang_detector.heard
        self.blocking, self.suspending = self._ports(self.line, BLOCKING), self._ports(self.aline, SUSPENDING)

    def _ports(self, line: RedisLine, colour: Colour) -> Ports:
        keys = RedisKeys(line, self.scripts, self.news, self.generations, colour)
        locks = RedisLocks(line, self.scripts, self.news, colour)
        return Ports(line, keys, locks, RedisLimits(line, self.scripts))

    def follow(self) -> None:
        """Have the server report changes from now on."""
        self.news.track()

    def refusal(self) -> str | None:
        """Ask now whether the server reports changes. If it refuses, return why, and what is done instead; else
        None."""
        return refusal_of(self._server.connection(protocol=3), self._server.connection())

    async def ping(self) -> None:
        await self.line.ask((b"PING",))

    async def _info(self) -> dict[str, str]:
        """Return the server's answer to INFO, by field."""
        answer = await self.line.ask((b"INFO",))
        text = bytes(answer).decode("utf-8", "replace") if isinstance(answer, (bytes, bytearray)) else str(answer)
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    async def advice(self) -> list[str]:
        """Return what the eviction policy puts at risk. Raise EngineError if the server is full and evicts nothing."""
        info = await self._info()
        policy, most = info.get("maxmemory_policy", ""), int(info.get("maxmemory", 0))
        if policy == "noeviction" and 0 < most <= int(info.get("used_memory", 0)):
            used, limit = info.get("used_memory_human"), info.get("maxmemory_human")
            raise EngineError(
                f"{self.name} is full ({used} of {limit}) and stores nothing new, as maxmemory-policy is noeviction: "
                "raise maxmemory, or set maxmemory-policy volatile-lru"
            )
        risk = next((risk for part, risk in _RISKS.items() if most and part in policy), None)
        return [f"{self.name} has maxmemory-policy {policy}, which {risk}: set volatile-lru"] if risk else []

    async def facts(self) -> dict[str, dict[str, Any]]:
        """Return what an operator wants to know about the server, under its name."""
        info = await self._info()
        keys = await self.line.ask((b"DBSIZE",))
        facts = {
            "version": info.get("redis_version", "?"),
            "keys, also of others": int(keys),
            "bytes of memory": int(info.get("used_memory", 0)),
            "at most": int(info.get("maxmemory", 0)) or None,
            "when full": info.get("maxmemory_policy", "?"),
            "evicted since its start": int(info.get("evicted_keys", 0)),
            "connections": int(info.get("connected_clients", 0)),
        }
        return {self.name: facts}

    def close(self) -> None:
        self._server.closed = True  # callers that are woken below see that it is closed
        for part in (self.news, self.line, self.aline, self._server):
            part.close()

    def start_again(self) -> None:
        """Begin anew in a forked child."""
        forks.each(part.start_again for part in (self.line, self.aline, self.news, self.generations))
