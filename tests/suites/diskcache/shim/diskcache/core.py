"""A name that a test imports."""

from stampede.contrib.diskcache import ENOVAL

__all__ = ["ENOVAL"]
