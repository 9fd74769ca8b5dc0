"""Time in the tests of Redis: what ends soon elsewhere lasts, so that a test may take its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

LONG, BRIEF = 60.0, 0.2


@pytest.fixture
def hurry() -> Callable[[Any], None]:
    """A function that lets the open connections of a `Shard`, and its pipe of the running loop, wait only briefly."""

    def hurried(shard: Any) -> None:
        for wire in shard.line._wires.all:
            if wire.sock is not None:
                wire.sock.settimeout(BRIEF)
        if asyncio._get_running_loop() is not None:
            shard.aline._pipes.to(None)._patience = BRIEF

    return hurried


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pings: the connection for notifications is not given up, and tickets do not end, if a reply comes late."""
    monkeypatch.setattr("stampede.engines.kit.feed.TICK", LONG)


@pytest.fixture
def unaided(steady: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No safety poll: a waiter that is not notified sleeps on, so that its time shows whether it was."""
    for module in ("verbs", "locks"):
        for name in ("SAFETY", "LOOK"):
            monkeypatch.setattr(f"stampede.engines.redis.{module}.{name}", LONG)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server passes over no waiter of a lock, however late that one asks. (See TURN and LATELY in `lock.lua`.)"""
    from stampede.engines.redis.scripts import Script

    init, terms = Script.__init__, b"FENCED = 200, 300,"

    def patiently(script: Script, source: bytes, *first: Any) -> None:
        assert terms in source or b"FENCED" not in source
        init(script, source.replace(terms, b"FENCED = 60000, 60000,"), *first)

    monkeypatch.setattr(Script, "__init__", patiently)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation is believed until the end of the test. Otherwise calls would ask for it now and then."""
    monkeypatch.setattr("stampede.engines.kit.generations.KNOWN", LONG)
