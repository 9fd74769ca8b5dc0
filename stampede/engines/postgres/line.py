"""A line to a server, as both colours have it: what is asked is answered, or told as trouble."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from psycopg import Error

from stampede.engines.postgres.connect import PostgresConnector
from stampede.engines.postgres.talk import Answer, Command, Row
from stampede.errors import EngineError, TooLarge

__all__ = ["Command", "PostgresLine", "check_refusal", "is_refusal", "trouble"]

_REFUSES = {"25006": "it writes nothing (a standby, or default_transaction_read_only)", "53100": "its disk is full"}
"""What a server says that answers, and takes nothing new."""

_UNMADE = dict.fromkeys(("3F000", "42P01", "42883"), "what was here is gone: run {}") | {
    "42501": "the role lacks a right: run {}, with --grant ROLE",
    "25000": "behind a pooler, the role needs ALTER ROLE ... SET default_transaction_isolation = 'read committed'",
}
"""What is said by one that lacks something, which a person can give it."""

_TOO_LARGE = {"54000", "22P05"}

_IN_THE_WAY = {"40001", "40P01", "55P03"}
"""The same where somebody else was at the key: a conflict, a deadlock, a lock that was not to be had in time."""

_STALE = {"26000", "42P05"}
"""The same of one that hasn't got what was prepared on it, as a pooler's."""


class PostgresLine(ABC):
    """Asks a server, and raises EngineError if there is no answer, or a refusal. Its colour says how it is sent."""

    def __init__(self, server: PostgresConnector) -> None:
        self._server = server

    @abstractmethod
    async def sent(self, commands: Sequence[Command]) -> list[Answer]:
        """The answer to each. It raises whatever psycopg does if they don't come."""

    async def ask(self, command: Command) -> list[Row]:
        """Return the rows."""
        return (await self.ask_all((command,)))[0]

    async def ask_all(self, commands: Sequence[Command]) -> list[list[Row]]:
        """Return the rows of each, in order; each is a transaction of its own."""
        if self._server.closed:
            self._server.check()
        if not commands:
            return []
        try:
            rows = _all_rows(await self.sent(commands))
            if rows is None:  # what was done of it is done again, and changes nothing
                rows = _all_rows(await self.sent(commands), last=True)
        except (Error, OSError) as error:
            self._server.check()  # then the connection was closed under our hands
            raise trouble(self._server, error) from error
        return rows or []


def _all_rows(answers: Sequence[Answer], *, last: bool = False) -> list[list[Row]] | None:
    """The rows of each, or raise the first refusal. None: ask once more."""
    found: list[list[Row]] = []
    for answer in answers:
        if isinstance(answer, Exception):
            if isinstance(answer, Error) and answer.sqlstate in _IN_THE_WAY and not last:
                return None
            raise answer
        found.append(answer)
    return found


def trouble(server: PostgresConnector, error: Exception) -> EngineError | TooLarge:
    """What psycopg raised, as ours."""
    if isinstance(error, EngineError):
        return error
    code = getattr(error, "sqlstate", None) or ""
    said = f"{server.name}: {type(error).__name__}: {str(error).strip()}"
    if code in _TOO_LARGE:
        return TooLarge(said)
    if code in _UNMADE:
        return EngineError(f"{said}: {_UNMADE[code].format(server.init)}")
    refuses = "a standby has no unlogged tables" if _is_standbys(error) else _REFUSES.get(code)
    failure = EngineError(said if refuses is None else f"{said} ({refuses})")
    failure.partial = failure.refused = refuses is not None or code in _IN_THE_WAY
    return failure


def is_refusal(error: Exception) -> bool:
    """Whether the server has answered a question, which it doesn't like; the next one may be another matter."""
    code = getattr(error, "sqlstate", None)
    if not isinstance(error, Error) or code is None or code in _STALE or code.startswith(("08", "57P")):
        return False
    if error.diag.severity_nonlocalized in ("FATAL", "PANIC"):  # as it ends what is idle in a transaction
        return False
    return code != "0A000" or error.diag.source_function != "RevalidateCachedQuery"  # prepared for what has changed


def check_refusal(error: Exception) -> None:
    """Raise what says that this connection is of no use any more."""
    if not is_refusal(error):
        raise error


def _is_standbys(error: Exception) -> bool:
    """Whether it says, in whatever language, that what isn't logged can't be read there."""
    return isinstance(error, Error) and error.sqlstate == "0A000" and error.diag.source_function == "get_relation_info"
