"""Many verbs at once, for blocking callers: what all of them ask next goes out together, on one connection per server.

The verbs are the ones of `Keys`; only their line is another: its links put questions aside until each verb has one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from stampede.colour import BLOCKING
from stampede.engines.kit.together import Wanted, together
from stampede.engines.looking import Costs
from stampede.engines.memcached.blocking import BlockingLine, Connection
from stampede.engines.memcached.generations import KnownGenerations
from stampede.engines.memcached.holds import Link, OwnLease, OwnLeases
from stampede.engines.memcached.meta import Reply
from stampede.engines.memcached.servers import Server, refusal, trouble
from stampede.engines.memcached.verbs import Keys
from stampede.errors import EngineError
from stampede.ports import Asked, Many

__all__ = ["Together"]

AT_ONCE, AT_ONCE_BYTES = 200, 1 << 16
"""What is under way at once: a server that can't get rid of its replies stops to read."""


LATER = 1000
"""So many leases can be signed one by one before their stubs end; more are signed at once, together."""


class _Commands(Wanted):
    """Commands."""

    __slots__ = ("commands", "count", "link", "twice")

    def __init__(self, link: _GatheringLink, commands: bytes, count: int, twice: bool) -> None:
        self.link, self.commands, self.count, self.twice = link, commands, count, twice


class _GatheringLink:
    """A connection that is shared by the verbs of one batch."""

    def __init__(self, server: Server, connection: Connection) -> None:
        self.server, self.connection = server, connection
        self.longest = connection.longest

    @property
    def born(self) -> float:
        return self.connection.born

    async def ask(self, commands: bytes, count: int = 1, *, twice: bool = False) -> list[Reply]:
        replies: list[Reply] = await _Commands(self, commands, count, twice)
        for reply in replies:
            if reply.text:
                raise refusal(self.server, reply)
        return replies


class _GatheringLine:
    """Connections for one batch: one per server, or the reason why there is none."""

    def __init__(self, line: BlockingLine) -> None:
        self.servers = line.servers
        self._line = line
        self._links: dict[Server, _GatheringLink | EngineError] = {}

    async def take(self, name: bytes) -> Link:
        return await self.reach(self.servers.of(name))

    async def reach(self, server: Server) -> Link:
        link = self._links.get(server)
        if link is None:
            try:
                link = _GatheringLink(server, self._line.connection(server))
            except EngineError as error:
                link = error
            self._links[server] = link
        if isinstance(link, EngineError):
            raise trouble(server, link) from link
        return link

    def give(self, link: Link) -> None:
        if isinstance(link, Connection):  # that was kept for a lease without a signature
            self._line.give(link)

    def end(self) -> None:
        for link in self._links.values():
            if isinstance(link, _GatheringLink):
                self._line.give(link.connection)


class Together(Many):
    """`Claims` of many keys in few round trips per server."""

    def __init__(
        self,
        line: BlockingLine,
        owned: OwnLeases,
        generations: KnownGenerations,
        costs: Costs[bytes],
        later: Callable[[OwnLease, Link], bool] | None,
    ) -> None:
        self._line = line
        self._known = owned, generations, costs
        self._later = later

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        line = _GatheringLine(self._line)
        keys = Keys(line, *self._known, BLOCKING, self._later if len(asked) <= LATER else None)
        return _done(line, [getattr(keys, verb)(*args) for verb, args in asked])


def _done(line: _GatheringLine, work: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    try:
        return together(work, _answered)
    finally:
        line.end()


def _answered(questions: dict[int, _Commands]) -> dict[int, Any]:
    """The replies, or the error, that each question gets."""
    by_link: defaultdict[_GatheringLink, list[int]] = defaultdict(list)
    for number, question in questions.items():
        by_link[question.link].append(number)
    answers: dict[int, Any] = {}
    for link, numbers in by_link.items():
        for some in _portions(questions, numbers):
            answers.update(_replied(link, {number: questions[number] for number in some}))
    return answers


def _portions(questions: dict[int, _Commands], numbers: list[int]) -> list[list[int]]:
    portions: list[list[int]] = [[]]
    size = 0
    for number in numbers:
        size += len(questions[number].commands)
        if portions[-1] and (len(portions[-1]) >= AT_ONCE or size > AT_ONCE_BYTES):
            portions.append([])
            size = len(questions[number].commands)
        portions[-1].append(number)
    return portions


def _replied(link: _GatheringLink, questions: dict[int, _Commands]) -> dict[int, Any]:
    commands = b"".join(question.commands for question in questions.values())
    count = sum(question.count for question in questions.values())
    twice = all(question.twice for question in questions.values())
    try:
        replies = iter(link.connection.replies(commands, count, twice=twice))
    except EngineError as error:
        return dict.fromkeys(questions, error)
    return {number: [next(replies) for _ in range(question.count)] for number, question in questions.items()}
