"""Many verbs at once, for blocking callers: what all of them ask next goes out together, on one connection per server.

The verbs are the ones of `Keys`; only their line is another: it puts questions aside until each verb has one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from stampede.engines.kit.together import Wanted, together
from stampede.engines.memcached.blocking import BlockingLine
from stampede.engines.memcached.meta import Reply
from stampede.engines.memcached.servers import Line, Server, accepted
from stampede.engines.memcached.verbs import Keys
from stampede.errors import EngineError
from stampede.ports import Asked, Many

__all__ = ["Together"]


class _Commands(Wanted):
    """Commands that were put aside."""

    __slots__ = ("commands", "server", "since")

    def __init__(self, server: Server, commands: Sequence[bytes], since: float | None) -> None:
        self.server, self.commands, self.since = server, commands, since


class _Aside:
    """A `Line` of one batch."""

    def __init__(self, line: BlockingLine) -> None:
        self.servers = line.servers

    async def ask(self, server: Server, *commands: bytes, since: float | None = None) -> tuple[list[Reply], float]:
        replies, at = await _Commands(server, commands, since)
        return accepted(server, replies), at


class Together(Many):
    """`Claims` of many keys in few round trips per server."""

    def __init__(self, line: BlockingLine, keys_over: Callable[[Line], Keys]) -> None:
        self._line = line
        self._keys = keys_over(_Aside(line))

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        return together([getattr(self._keys, verb)(*args) for verb, args in asked], self._answered)

    def _answered(self, questions: dict[int, _Commands]) -> dict[int, Any]:
        """The replies, or the error, that each question gets."""
        groups: defaultdict[tuple[Server, bool], dict[int, _Commands]] = defaultdict(dict)
        for number, question in questions.items():
            groups[question.server, question.since is None][number] = question
        answers: dict[int, Any] = {}
        for (server, _), group in groups.items():
            commands = [command for question in group.values() for command in question.commands]
            since = min((question.since for question in group.values() if question.since is not None), default=None)
            try:
                replies, at = self._line.told(server, commands, since)
            except EngineError as error:
                answers.update(dict.fromkeys(group, error))
                continue
            told = iter(replies)
            for number, question in group.items():
                answers[number] = [next(told) for _ in question.commands], at
        return answers
