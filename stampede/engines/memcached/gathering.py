"""Many verbs at once, for blocking callers: what all of them ask next goes out together, on one connection per server.

The verbs are the ones of `Keys`; only their line is another: it puts questions aside until each verb has one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stampede.engines.kit.together import Wanted, together
from stampede.engines.memcached.blocking import BlockingLine
from stampede.engines.memcached.meta import Reply
from stampede.engines.memcached.servers import Line, Server, refusal
from stampede.engines.memcached.verbs import Keys
from stampede.errors import EngineError
from stampede.ports import Asked, Many

__all__ = ["Together"]

AT_ONCE, AT_ONCE_BYTES = 200, 1 << 16
"""What is under way at once: a server that can't get rid of its replies stops to read."""


class _Commands(Wanted):
    """Commands that were put aside."""

    __slots__ = ("commands", "count", "server", "since")

    def __init__(self, server: Server, commands: bytes, count: int, since: float | None) -> None:
        self.server, self.commands, self.count, self.since = server, commands, count, since


class _Aside:
    """A `Line` of one batch."""

    def __init__(self, line: BlockingLine) -> None:
        self.servers = line.servers

    async def ask(
        self, server: Server, commands: bytes, count: int = 1, since: float | None = None
    ) -> tuple[list[Reply], float]:
        replies, at = await _Commands(server, commands, count, since)
        for reply in replies:
            if reply.text:
                raise refusal(server, reply)
        return replies, at


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
            try:
                for some in _portions(group):
                    answers.update(self._replied(server, some))
            except EngineError as error:  # the other portions would find it out one by one
                answers.update((number, error) for number in group if number not in answers)
        return answers

    def _replied(self, server: Server, some: dict[int, _Commands]) -> dict[int, Any]:
        commands = b"".join(question.commands for question in some.values())
        count = sum(question.count for question in some.values())
        since = min((question.since for question in some.values() if question.since is not None), default=None)
        replies, at = self._line.told(server, commands, count, since)
        told = iter(replies)
        return {number: ([next(told) for _ in range(question.count)], at) for number, question in some.items()}


def _portions(questions: dict[int, _Commands]) -> Iterator[dict[int, _Commands]]:
    portion: dict[int, _Commands] = {}
    size = 0
    for number, question in questions.items():
        size += len(question.commands)
        if portion and (len(portion) >= AT_ONCE or size > AT_ONCE_BYTES):
            yield portion
            portion, size = {}, len(question.commands)
        portion[number] = question
    yield portion
