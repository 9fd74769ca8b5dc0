"""Runs tests on WebAssembly, where new Python versions are available first: `make next`.

WebAssembly has no threads, processes, sockets and hard links. A test that tries to use one of them is skipped.
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
"""Errors that mean that this platform has no such feature, or that no such package exists for it."""

UNFIT = "not deep and not cannot_be_read and not background and not GeneratorExit"
"""Tests that cannot run: deep recursion ends this platform's interpreter, its file errors have other texts, and it has
no background threads."""


class Loop(base_events.BaseEventLoop):
    """An event loop without sockets: it sleeps until the next timer is due."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self

    def select(self, timeout: float | None) -> list[Any]:
        """Sleep until the next timer. Without a timer, no event could ever wake the loop."""
        if timeout is None:
            raise RuntimeError("can't start new thread, which alone could wake this loop")
        time.sleep(timeout)
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...


class Skips:
    """A pytest plugin that skips tests that need missing features."""

    @pytest.fixture
    def colour(self) -> str:
        """The colour of the calls of a test. On other platforms, conftest.py draws it."""
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
    """Run the test files, and return pytest's exit code."""
    print(f"Python {sys.version}")
    settings.register_profile(
        "wasm", derandomize=True, database=None, max_examples=20, suppress_health_check=[*HealthCheck], deadline=None
    )
    settings.load_profile("wasm")
    asyncio.new_event_loop = asyncio.events.new_event_loop = Loop  # type: ignore[assignment]
    asyncio._set_running_loop(None)  # leave the loop of the page
    options = ["-q", "--noconftest", "-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
    chosen = ["-m", "not redis", "-k", UNFIT, *files]
    return int(pytest.main([*options, "-p", "no:faulthandler", *chosen], plugins=[Skips()]))
