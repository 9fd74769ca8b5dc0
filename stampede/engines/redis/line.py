"""A line to one server, as both colours have it: what is asked is answered, mended, or told as trouble."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from itertools import accumulate
from typing import Any

from stampede.engines.kit.pool import is_once
from stampede.engines.redis.clients import Server, trouble
from stampede.engines.redis.news import News
from stampede.engines.redis.scripts import REMEDIES, Command, Scripts
from stampede.engines.redis.wire import LARGE

__all__ = ["ServerLine"]


class ServerLine(ABC):
    """Asks a server. Its colour says how questions are sent."""

    def __init__(self, server: Server, scripts: Scripts, news: News) -> None:
        from redis import exceptions

        self._server = server
        self._scripts = scripts
        self._news = news
        self._any, self._refusal = (exceptions.RedisError, OSError), exceptions.ResponseError

    @abstractmethod
    async def sent(self, commands: Sequence[Command], *, large: bool) -> tuple[list[Any], int]:
        """The replies as they are, and which connection will be told when what was read changes (0: none)."""

    async def ask(self, command: Command) -> Any:
        """The reply."""
        return (await self._asked([command], large=max(map(len, command)) > LARGE))[0][0]

    async def ask_all(self, commands: Sequence[Command], *, wide: bool = False) -> list[Any]:
        """The replies, in order, of what goes out together."""
        return (await self._asked(commands, large=wide))[0]

    async def read(self, command: Command, undo: Command | None = None) -> tuple[Any, int]:
        """The reply, and which connection will be told when what was read changes (0: none)."""
        replies, told = await self._asked([command], large=undo is not None)
        return replies[0], told

    def read_all(self, commands: Sequence[Command]) -> Coroutine[Any, Any, tuple[list[Any], int]]:
        """The same of many."""
        return self._asked(commands)

    async def _asked(self, commands: Sequence[Command], *, large: bool = False) -> tuple[list[Any], int]:
        if self._server.closed:
            self._server.check()
        if not commands:
            return [], 0
        try:
            replies, told = await self.sent(commands, large=large)
            for reply in replies:
                if isinstance(reply, Exception):
                    told = await self._mended(list(commands), replies, told, large)
                    break
        except self._any as error:
            self._server.check()  # then the connection was closed under our hands
            failure = trouble(self._server.name, error)
            failure.unsure = is_once(commands) and not isinstance(error, self._refusal)
            raise failure from error
        return replies, told

    async def _mended(self, commands: list[Command], replies: list[Any], told: int, large: bool) -> int:
        """Have each reply be one, or raise the refusal."""
        for tried in range(REMEDIES):
            remedies = self._scripts.remedies(commands, replies, tried)
            if not remedies:
                break
            again, teller = await self.sent([each for some in remedies.values() for each in some], large=large)
            told, ends = told if teller == told else 0, accumulate(map(len, remedies.values()))
            for number, end in zip(remedies, ends, strict=True):
                replies[number] = again[end - 1]
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return told
