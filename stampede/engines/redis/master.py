"""A master of a cluster: a shard that may be down by itself, and how a question goes to it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from stampede.breaker import Breaker
from stampede.colour import Colour
from stampede.engines.redis.clients import Address, Server
from stampede.engines.redis.locks import RedisLocks
from stampede.engines.redis.scripts import Command, Scripts
from stampede.engines.redis.shard import Shard
from stampede.engines.redis.verbs import Keys, Line
from stampede.errors import EngineError

__all__ = ["Asking", "Master", "Ports", "Verb", "reason"]

T = TypeVar("T")


class Ports(NamedTuple):
    line: Line
    keys: Keys
    locks: RedisLocks


Verb = Callable[[Ports], Awaitable[T]]


class Master(Shard):
    """A shard, and whether it is worth asking."""

    def __init__(self, address: Address, server: Server, scripts: Scripts, *, tracking: bool) -> None:
        super().__init__(server, scripts, tracking=tracking, sharded=True)
        self.address = address
        self.breaker = Breaker()

    def at_hand(self, colour: Colour) -> Ports:
        if colour.suspending:
            return Ports(self.aline, self.aclaims, self.alocks)
        return Ports(self.line, self.claims, self.locks)

    def admit(self) -> None:
        """EngineError if it was down a moment ago. One caller a second finds out, for all."""
        if not self.breaker.allow(time.monotonic()):
            raise EngineError(f"{self.name}: it was down a moment ago")

    async def ask(self, verb: Verb[T], ports: Ports, *, always: bool = False) -> T:
        """What the verb says. It may not be asked now, unless this is to be done `always`."""
        if not always:
            self.admit()
        try:
            answer = await verb(ports)
        except EngineError as error:
            self._heard(reason(error))
            raise
        if self.breaker.open:
            self.breaker.succeeded(time.monotonic())
        return answer

    def _heard(self, reason: BaseException | None) -> None:
        """It is down if it is silent, or out of service by its own words. Any other refusal is an answer."""
        from redis import exceptions

        silence = exceptions.ConnectionError, exceptions.TimeoutError, OSError
        if isinstance(reason, (*silence, exceptions.ClusterDownError)):
            self.breaker.failed(time.monotonic())
        elif isinstance(reason, exceptions.ResponseError):
            self.breaker.succeeded(time.monotonic())


def reason(error: EngineError) -> BaseException | None:
    """What the library raised; None if the trouble is this process's own."""
    cause = error.__cause__
    return reason(cause) if isinstance(cause, EngineError) else cause


class Asking:
    """A line to a shard that is being given a slot, and takes questions about it only if they say that they know."""

    def __init__(self, line: Line, scripts: Scripts) -> None:
        self._line = line
        self._scripts = scripts

    async def ask(self, command: Command) -> Any:
        return (await self.ask_all([command]))[0][0]

    async def ask_all(self, commands: Sequence[Command], *, large: bool = False) -> tuple[list[Any], int]:
        asked = [each for command in commands for each in ((b"ASKING",), self._scripts.with_text(command))]
        replies, _ = await self._line.ask_all(asked, large=large)
        return replies[1::2], 0  # no tickets before it is there
