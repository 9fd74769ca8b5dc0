"""A line to one server, as both colours have it: what is asked is answered, asked again, or told as trouble."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from stampede.engines.kit.pool import is_once
from stampede.engines.redis.clients import RedisConnector, trouble
from stampede.engines.redis.news import RedisNews
from stampede.engines.redis.scripts import Command, Scripts, is_damage
from stampede.errors import EngineError

__all__ = ["ServerLine"]

_LOOKS = frozenset([b"GET", b"GETEX"])
"""Somebody's list is nothing to these: a claim of the key stores a value in its place."""

AGAIN = 3
"""How often a command is sent again that its server could not do: it may be many servers, which learn one by one."""


class ServerLine(ABC):
    """Asks a server. Its colour says how questions are sent."""

    def __init__(self, server: RedisConnector, scripts: Scripts, news: RedisNews) -> None:
        from redis import exceptions

        self._server = server
        self._scripts = scripts
        self._news = news
        self._any, self._refusal = (exceptions.RedisError, OSError), exceptions.ResponseError

    @abstractmethod
    async def ask_all(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        """The replies to what goes out together, and which connection will be told when what was read changes (0:
        none)."""

    async def ask(self, command: Command) -> Any:
        """The reply."""
        replies, _ = await self.ask_all([command])
        return replies[0]

    async def _refused(self, commands: Sequence[Command], replies: list[Any], told: int) -> tuple[list[Any], int]:
        """The same where some replies are refusals: asked again, or else the first of them is raised."""
        for tried in range(AGAIN):
            again = self._scripts.again(commands, replies, tried)
            if not again:
                break
            others, teller = await self._sent(list(again.values()))
            told = told if teller == told else 0
            for number, reply in zip(again, others, strict=True):
                replies[number] = reply
        for number, reply in enumerate(replies):
            if isinstance(reply, Exception):
                if commands[number][0] not in _LOOKS or not is_damage(reply):
                    raise reply
                replies[number] = None
        return replies, told

    @abstractmethod
    async def _sent(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        """The replies as they are, refusals among them."""

    def _failure(self, commands: Sequence[Command], error: Exception) -> EngineError:
        """What to raise instead of an error of the library."""
        self._server.check()  # then the connection was closed under our hands
        failure = trouble(self._server.name, error)
        failure.unsure = is_once(commands) and not isinstance(error, self._refusal)
        return failure
