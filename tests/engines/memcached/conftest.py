"""Time in the tests of memcached: a server may reply late, and only tests that are about time let it run out."""

from __future__ import annotations

import pytest
from servers import PATIENCE


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is well may take longer than the default time-outs. Tests of servers that hang name their own."""
    from stampede.engines.memcached.servers import _DEFAULTS

    if "by_default" not in request.node.name:
        for name in ("timeout", "connect_timeout"):
            monkeypatch.setitem(_DEFAULTS, name, PATIENCE)
