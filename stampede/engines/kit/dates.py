"""The clock of a service, as the dates of its answers tell it."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from math import inf

__all__ = ["ServiceClock"]

DRIFT = 1e-4
"""Seconds by which two clocks come apart in one."""


class ServiceClock:
    """The service's clock, by the dates of its answers: whole seconds, so that each answer narrows it down."""

    def __init__(self) -> None:
        self.told = -inf, inf, 0.0  # ahead of ours at least, and at most; as of when

    def heard(self, date: str, sent: float) -> None:
        """It has answered what was sent then."""
        received, said = time.monotonic(), parsedate_to_datetime(date).timestamp()
        drift = DRIFT * (received - self.told[2])
        news, known = (said - received, said + 1.0 - sent), (self.told[0] - drift, self.told[1] + drift)
        both = max(news[0], known[0]), min(news[1], known[1])
        self.told = *(both if both[0] <= both[1] else news), received  # one of the two was set
