"""What type checkers must make of the public face. It is read by mypy and pyright, and never run."""

from __future__ import annotations

from typing import assert_type

from stampede.policy import Policy

assert_type(Policy().ttl_of("value"), float)
