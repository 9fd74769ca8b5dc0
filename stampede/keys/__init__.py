"""Keys that are exact, readable, and equal in every process, run and Python version.

This package turns a call's arguments into a text, and names functions. It does not know what a key is used for.
Begin with `maker.py`, then `canonical.py`."""

from stampede.keys.canonical import canonical, name_of
from stampede.keys.compose import BY_CODE, function_in, generation, in_namespace, quoted, scope_name
from stampede.keys.identity import Identity, identity_of
from stampede.keys.maker import arguments_named, in_namespace_of, key_maker, tags_of_call, ttl_of_call
from stampede.keys.names import GENERATED
from stampede.keys.parameters import FAST_IDS, FAST_TYPES, Parameter, Parameters

__all__ = [
    "BY_CODE",
    "FAST_IDS",
    "FAST_TYPES",
    "GENERATED",
    "Identity",
    "Parameter",
    "Parameters",
    "arguments_named",
    "canonical",
    "function_in",
    "generation",
    "identity_of",
    "in_namespace",
    "in_namespace_of",
    "key_maker",
    "name_of",
    "quoted",
    "scope_name",
    "tags_of_call",
    "ttl_of_call",
]
