"""The base of both colours' lines to the server: commands go out, rows come back, and psycopg's errors become ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from psycopg import Error

from stampede.engines.postgres.connect import PostgresConnector
from stampede.engines.postgres.talk import Answer, Command, Row
from stampede.errors import EngineError, TooLarge

__all__ = ["Command", "PostgresLine", "check_refusal", "is_refusal", "trouble"]

_REFUSES = {"25006": "it is read-only (a standby, or default_transaction_read_only)", "53100": "its disk is full"}
"""SQLSTATEs of a server that answers, but stores nothing new."""

_UNMADE = dict.fromkeys(("3F000", "42P01", "42883"), "the tables or functions are gone: run {}") | {
    "42501": "the role lacks a right: run {}, with --grant ROLE",
    "25000": "behind a pooler, the role needs ALTER ROLE ... SET default_transaction_isolation = 'read committed'",
}
"""SQLSTATEs of a server that lacks something, and how a person supplies it."""

_TOO_LARGE = {"54000", "22P05"}

_IN_THE_WAY = {"40001", "40P01", "55P03"}
"""SQLSTATEs that mean that another transaction changed the key: a conflict, a deadlock, a lock not obtained in time."""

_STALE = {"26000", "42P05"}
"""SQLSTATEs of a connection that lost its prepared statements, or has those of another client, as behind a pooler."""


class PostgresLine(ABC):
    """Sends commands to a server, and raises EngineError if it refuses or does not answer."""

    def __init__(self, server: PostgresConnector) -> None:
        self._server = server

    @abstractmethod
    async def send(self, commands: Sequence[Command]) -> list[Answer]:
        """Send the commands and return the answer to each. Raise psycopg's error, or OSError, if no answer comes."""

    async def ask(self, command: Command) -> list[Row]:
        """Return the rows of one command."""
        return (await self.ask_all((command,)))[0]

    async def ask_all(self, commands: Sequence[Command]) -> list[list[Row]]:
        """Return the rows of each command, in order. Each command is a transaction of its own."""
        if self._server.closed:
            self._server.check()
        if not commands:
            return []
        try:
            rows = _all_rows(await self.send(commands))
            if rows is None:  # repeat all: those that succeeded change nothing the second time
                rows = _all_rows(await self.send(commands), last=True)
        except (Error, OSError) as error:
            self._server.check()  # the error may only mean that another thread has closed the engine
            raise trouble(self._server, error) from error
        return rows or []


def _all_rows(answers: Sequence[Answer], *, last: bool = False) -> list[list[Row]] | None:
    """Return the rows of each answer, or raise the first refusal. None, unless `last`: a conflict, so try once more."""
    found: list[list[Row]] = []
    for answer in answers:
        if isinstance(answer, Exception):
            if isinstance(answer, Error) and answer.sqlstate in _IN_THE_WAY and not last:
                return None
            raise answer
        found.append(answer)
    return found


def trouble(server: PostgresConnector, error: Exception) -> EngineError | TooLarge:
    """Return the error of this library for one that psycopg raised. Refusals of this one question are `partial` and
    `refused`: they say nothing about other keys."""
    if isinstance(error, EngineError):
        return error
    code = getattr(error, "sqlstate", None) or ""
    message = f"{server.name}: {type(error).__name__}: {str(error).strip()}"
    if code in _TOO_LARGE:
        return TooLarge(message)
    if code in _UNMADE:
        return EngineError(f"{message}: {_UNMADE[code].format(server.init)}")
    refuses = "a standby has no unlogged tables" if _is_standbys(error) else _REFUSES.get(code)
    failure = EngineError(message if refuses is None else f"{message} ({refuses})")
    failure.partial = failure.refused = refuses is not None or code in _IN_THE_WAY
    return failure


def is_refusal(error: Exception) -> bool:
    """Return whether the server refused only this question. If not, the connection is of no use for the next one."""
    code = getattr(error, "sqlstate", None)
    if not isinstance(error, Error) or code is None or code in _STALE or code.startswith(("08", "57P")):
        return False
    if error.diag.severity_nonlocalized in ("FATAL", "PANIC"):  # as with idle_in_transaction_session_timeout
        return False
    return code != "0A000" or error.diag.source_function != "RevalidateCachedQuery"  # a prepared result type changed


def check_refusal(error: Exception) -> None:
    """Raise the error if it means that the connection is of no use any more."""
    if not is_refusal(error):
        raise error


def _is_standbys(error: Exception) -> bool:
    """Return whether a standby refused to read an unlogged table. Its message may be in any language."""
    return isinstance(error, Error) and error.sqlstate == "0A000" and error.diag.source_function == "get_relation_info"
