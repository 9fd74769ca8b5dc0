"""Connecting, in the time that there is for it: libpq's own limit is 2 seconds at least."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from psycopg import AsyncConnection, AsyncRawCursor, Connection, OperationalError, RawCursor
from psycopg.conninfo import make_conninfo
from psycopg.pq import ConnStatus, PGconn, PollingStatus

from stampede.engines.postgres.drive import Hook, Ready
from stampede.engines.postgres.talk import READ, WRITE, Row

__all__ = ["reached", "reached_in_loop"]

LATE = "it has let nobody in for {:g} s"


def reached(conninfo: Mapping[str, Any], seconds: float, look: Hook) -> Connection[Row]:
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
        wanted = READ if status == PollingStatus.READING else WRITE
        if not Ready(its.socket).wait(wanted, max(end - time.monotonic(), 0.0), look):
            raise TimeoutError(LATE.format(seconds))
    raise OperationalError(f"connection failed: {its.get_error_message()}")


async def reached_in_loop(conninfo: Mapping[str, Any], seconds: float) -> AsyncConnection[Row]:
    """The same of the running event loop."""
    try:
        async with asyncio.timeout(None if _are_many(conninfo) else seconds):
            return await AsyncConnection.connect(
                **conninfo, autocommit=True, prepare_threshold=None, cursor_factory=AsyncRawCursor
            )
    except TimeoutError as late:
        raise TimeoutError(LATE.format(seconds)) from late


def _are_many(conninfo: Mapping[str, Any]) -> bool:
    return any("," in str(conninfo.get(each) or "") for each in ("host", "hostaddr"))
