"""Tools for tests of applications and engines: `isolated()`, `disabled()`, `FakeClock`, and the conformance suites.

Users import these in their own tests. The tests of stampede itself are in `tests/`, outside of the package.
Begin with `clock.py`, then `conformance/suite.py`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stampede.api.overrides import disabled
from stampede.api.registry import isolated
from stampede.testing.clock import FakeClock

if TYPE_CHECKING:
    from stampede.testing.conformance import CellSuite, ClaimsSuite, CodecSuite, HistoriesSuite, LocksSuite, StoreSuite

__all__ = [
    "CellSuite",
    "ClaimsSuite",
    "CodecSuite",
    "FakeClock",
    "HistoriesSuite",
    "LocksSuite",
    "StoreSuite",
    "disabled",
    "isolated",
]

# Suites are imported on first use: a program that only isolates a test does not pay for them.
_LATE = {name for name in __all__ if name.endswith("Suite")}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.conformance"
    if module not in sys.modules and (pytest := sys.modules.get("pytest")) is not None:
        pytest.register_assert_rewrite(module)  # without it, a failed assert would not show its values
    return getattr(import_module(module), name)
