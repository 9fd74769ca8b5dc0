"""Keys: exact, readable, and the same in every process, run and Python version."""

from stampede.keys.canonical import canonical, name_of
from stampede.keys.maker import key_maker
from stampede.keys.parameters import FAST_TYPES, Parameter, Parameters

__all__ = ["FAST_TYPES", "Parameter", "Parameters", "canonical", "key_maker", "name_of"]
