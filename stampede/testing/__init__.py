"""For tests of applications and of engines: `isolated()`, `disabled()`, a clock that is set by hand, and the suites.

Here is what users import in their tests. Our own tests and their servers are in `tests/`, outside of the package. Begin
with `clock.py`, then `conformance/suite.py`.
"""

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

# The suites need pytest: a program that only isolates a test does not pay for it.
_LATE = {name for name in __all__ if name.endswith("Suite")}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.conformance"
    if module not in sys.modules and (pytest := sys.modules.get("pytest")) is not None:
        pytest.register_assert_rewrite(module)  # or who fails in a case is told nothing of what it has seen
    return getattr(import_module(module), name)
