"""Whether a function's next call is likely to find its value: then it looks before it claims. Pure.

A look saves the engine most of a hit's work, and is a round trip too many where there is nothing to be seen.
"""

from __future__ import annotations

__all__ = ["STEP", "Odds"]

STEP = 1 / 16
"""Weight of the newest call: about as many make the share."""


class Odds:
    """The share of hits among the calls of one function. Of one that was never called nobody knows that it hits."""

    __slots__ = ("good", "share")

    def __init__(self, share: float = 0.5) -> None:
        self.share = share
        self.good = share > 0.5

    def saw(self, hit: bool) -> None:
        """What a first question has come to. (Two threads at once may count as one.)"""
        self.share += STEP * (hit - self.share)
        self.good = self.share > 0.5
