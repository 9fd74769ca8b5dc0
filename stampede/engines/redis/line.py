"""Asking one server, in both colours: a command is answered, sent again, or fails with an EngineError."""

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
"""Commands for which a key of another type counts as missing: a later claim stores a value in its place."""

AGAIN = 3
"""How often commands are sent again that the server could not run. It may be many servers behind one address, which
learn scripts one by one."""


class ServerLine(ABC):
    """The way to ask one server. A subclass for each colour says how questions are sent."""

    def __init__(self, server: RedisConnector, scripts: Scripts, news: RedisNews) -> None:
        from redis import exceptions

        self._server = server
        self._scripts = scripts
        self._news = news
        self._any, self._refusal = (exceptions.RedisError, OSError), exceptions.ResponseError

    @abstractmethod
    async def ask_all(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        """Return the replies to commands that are sent together, and the number of the news connection that is notified
        when what was read changes (0: none)."""

    async def ask(self, command: Command) -> Any:
        """Return the reply to one command."""
        replies, _ = await self.ask_all([command])
        return replies[0]

    async def _refused(self, commands: Sequence[Command], replies: list[Any], reporter: int) -> tuple[list[Any], int]:
        """Send refused commands again where that may help. Return all replies, or raise the first refusal that
        remains."""
        for tried in range(AGAIN):
            again = self._scripts.again(commands, replies, tried)
            if not again:
                break
            others, other = await self._sent(list(again.values()))
            reporter = reporter if other == reporter else 0
            for number, reply in zip(again, others, strict=True):
                replies[number] = reply
        for number, reply in enumerate(replies):
            if isinstance(reply, Exception):
                if commands[number][0] not in _LOOKS or not is_damage(reply):
                    raise reply
                replies[number] = None
        return replies, reporter

    @abstractmethod
    async def _sent(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        """Return the replies as they are, refusals included."""

    def _failure(self, commands: Sequence[Command], error: Exception) -> EngineError:
        """Return what to raise instead of an error of the library."""
        self._server.check()  # raises EngineClosed if the engine was closed meanwhile
        failure = trouble(self._server.name, error)
        failure.unsure = is_once(commands) and not isinstance(error, self._refusal)
        return failure
