"""Namespace, name, version and arguments as one key, which differs from that of any other composition.

    module:qualname:arguments    namespace/module:qualname#code@version:arguments    a function's keys
    key                          namespace/key                                       a cache's own, or given by `key=`

Separators inside a part are quoted; most parts have none, and stay as they are. A plain key may look like a function's,
or like one of a namespace. The prefix in front of it distinguishes them: see `generation`."""

from __future__ import annotations

import re

from stampede.keys.identity import Identity

__all__ = ["BY_CODE", "function_in", "generation", "in_namespace", "quoted", "scope_name"]

BY_CODE = "code"
"""The `version` that changes with the function's code."""

_SEPARATORS = re.compile("[%/:@,|#]")


def quoted(part: str) -> str:
    """Return a part with its separators quoted. Different parts give different texts."""
    return _SEPARATORS.sub(lambda found: f"%{ord(found[0]):02X}", part)


def scope_name(namespace: str, identity: Identity, version: str | int | None) -> str:
    """Return the name of a function's scope. The function's keys begin with it, followed by a colon."""
    name = f"{quoted(identity.module)}:{quoted(identity.qualname)}"
    if version == BY_CODE or not identity.named:
        name += f"#{identity.code}"
    if version not in (None, BY_CODE):
        name += f"@{quoted(str(version))}"
    return in_namespace(namespace, name)


def in_namespace(namespace: str, key: str) -> str:
    return f"{quoted(namespace)}/{key}" if namespace else key


def function_in(key: str) -> str | None:
    """Return the name of the scope that a function's key begins with; None if the key is not a function's."""
    found = _FUNCTION.match(key)
    return None if found is None else found[1]


_FUNCTION = re.compile("((?:[^/:]+/)?[^/:]+:[^/:]+):")


def generation(scope: str, own: str, whole: str) -> str:
    """Return the prefix of a scope's keys: the scope's own generation, and that of its whole namespace. The prefix
    shows what follows: with a comma a function's key, else a plain one; with a slash a key in a namespace."""
    function = ":" in scope
    generations = f"{quoted(whole)},{quoted(own)}" if function else quoted(own)
    return f"{generations}/|" if "/" in scope or (scope and not function) else f"{generations}|"
