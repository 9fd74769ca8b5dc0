"""Random numbers of the library's own. A program that calls `random.seed` with the same number in each of its processes
would otherwise make all of them poll, and refresh, at the same moments."""

from __future__ import annotations

from random import Random

from stampede.runtime import forks

__all__ = ["random", "randrange", "sample", "shuffle", "uniform"]

_own = Random()
random, uniform, randrange, sample, shuffle = _own.random, _own.uniform, _own.randrange, _own.sample, _own.shuffle

forks.in_child(_own.seed)
