"""Keys: exact, readable, and the same in every process, run and Python version."""

from stampede.keys.canonical import canonical, name_of
from stampede.keys.compose import BY_CODE, function_in, generation, in_namespace, quoted, scope_name
from stampede.keys.identity import Identity, identity_of
from stampede.keys.maker import arguments_named, in_namespace_of, key_maker, ttl_of_call
from stampede.keys.names import GENERATED
from stampede.keys.parameters import FAST_TYPES, Parameter, Parameters, are_fast

__all__ = [
    "BY_CODE",
    "FAST_TYPES",
    "GENERATED",
    "Identity",
    "Parameter",
    "Parameters",
    "are_fast",
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
    "ttl_of_call",
]
