"""The tests that can run on WebAssembly, where the next Pythons are to be had before anywhere else: `make next`.

There are no threads, processes, sockets, and hard links. A test that needs one of them is skipped when it asks for it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio import base_events
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

MISSING = (
    "can't start new thread",
    "does not support processes",
    "has no attribute 'link'",
    "[Errno 52] Function not implemented",
    "[Errno 138] Not supported",
    "No module named '_multiprocessing'",
    "needs msgspec: pip install",
    "needs the package 'redis'",
)
"""Errors that say that this platform has not got it, or that there is no such package for it."""

UNFIT = "not deep and not cannot_be_read and not background and not GeneratorExit"
"""Deep recursion ends this platform's interpreter, its errors of files have words of their own, and what a thread would
do in the background is never done."""


class Loop(base_events.BaseEventLoop):
    """An event loop without sockets: it sleeps until the next timer is due."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self

    def select(self, timeout: float | None) -> list[Any]:
        """Wait for what would have come from a selector. Without a timer nothing can ever come."""
        if timeout is None:
            raise RuntimeError("can't start new thread, which alone could wake this loop")
        time.sleep(timeout)
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...


class Skips:
    """A plugin of pytest."""

    @pytest.fixture
    def colour(self) -> str:
        """The colour in which a test asks, which conftest.py draws elsewhere."""
        return "sync"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None and any(each in str(call.excinfo.value) for each in MISSING):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, "Skipped: this platform has not got it")
        return report


def main(files: list[str]) -> int:
    """Run them, and return pytest's exit code."""
    print(f"Python {sys.version}")
    settings.register_profile(
        "wasm", derandomize=True, database=None, max_examples=20, suppress_health_check=[*HealthCheck], deadline=None
    )
    settings.load_profile("wasm")
    asyncio.new_event_loop = asyncio.events.new_event_loop = Loop  # type: ignore[assignment]
    asyncio._set_running_loop(None)  # that of the page
    options = ["-q", "--noconftest", "-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
    chosen = ["-m", "not redis", "-k", UNFIT, *files]
    return int(pytest.main([*options, "-p", "no:faulthandler", *chosen], plugins=[Skips()]))
