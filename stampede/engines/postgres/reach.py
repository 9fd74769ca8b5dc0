"""Connecting, and what is said first: in the time that there is for it, as libpq's own limit is 2 seconds at least."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from typing import Any

from psycopg import Connection, OperationalError, RawCursor
from psycopg.conninfo import make_conninfo
from psycopg.pq import ConnStatus, PGconn, PollingStatus

from stampede.engines.kit.replies import MORE
from stampede.engines.postgres.talk import Command, Row, Talk, encoded

__all__ = ["LOOK", "READ", "WRITE", "Look", "reached", "said", "until_ready"]

Look = Callable[[], object]
"""Called now and then by a thread that waits. It raises if the wait is in vain."""

LOOK = 0.05
"""Seconds between two looks."""

READ, WRITE = select.POLLIN, select.POLLIN | select.POLLOUT


def until_ready(poll: select.poll, seconds: float, look: Look) -> bool:
    """Wait until a connection is ready. False: it takes longer."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        look()
        if poll.poll(1000 * min(left, LOOK)):
            return True
    return bool(poll.poll(0))


def reached(conninfo: Mapping[str, Any], seconds: float, look: Look) -> Connection[Row]:
    """A blocking connection, in autocommit, which prepares nothing by itself. Of several hosts each has its time, by
    psycopg's own measure."""
    if _are_many(conninfo):
        return Connection.connect(**conninfo, autocommit=True, prepare_threshold=None, cursor_factory=RawCursor)
    end = time.monotonic() + seconds
    its = PGconn.connect_start(make_conninfo("", **conninfo).encode())
    while its.status != ConnStatus.BAD:
        status = its.connect_poll()
        if status == PollingStatus.OK:
            its.nonblocking = 1
            made: Connection[Row] = Connection(its)
            made.autocommit, made.prepare_threshold, made.cursor_factory = True, None, RawCursor
            return made
        if status == PollingStatus.FAILED:
            break
        poll = select.poll()  # libpq may have another socket by now
        poll.register(its.socket, select.POLLIN if status == PollingStatus.READING else select.POLLOUT)
        if not until_ready(poll, max(end - time.monotonic(), 0.0), look):
            raise TimeoutError(f"it has let nobody in for {seconds:g} s")
    raise OperationalError(f"connection failed: {its.get_error_message()}")


def _are_many(conninfo: Mapping[str, Any]) -> bool:
    return any("," in str(conninfo.get(each) or "") for each in ("host", "hostaddr"))


def said(talk: Talk, command: Command, seconds: float) -> list[Row]:
    """The rows of a command, over a connection that nobody else has yet."""
    talk.put(encoded(command))
    end, poll, fd = time.monotonic() + seconds, select.poll(), talk.connection.fileno()
    while (answer := talk.gets()) is MORE:
        poll.register(fd, WRITE if talk.flush() else READ)
        if not until_ready(poll, end - time.monotonic(), lambda: None):
            raise TimeoutError(f"it has said nothing for {seconds:g} s")
        talk.feed()
    if isinstance(answer, Exception):
        raise answer
    rows: list[Row] = answer
    return rows
