"""Namespace, name, version and arguments as one key, which no other composition of them makes.

    module:qualname:arguments    namespace/module:qualname#code@version:arguments    a function's keys
    key                          namespace/key                                       a cache's own, or given by `key=`

A part that holds a separator is quoted; most hold none, and stay as they are. That a plain key may look like a
function's, or like one of a namespace, is told apart in front of it: see `generation`.
"""

from __future__ import annotations

import re

from stampede.keys.identity import Identity

__all__ = ["BY_CODE", "function_in", "generation", "in_namespace", "quoted", "scope_name"]

BY_CODE = "code"
"""The version that follows a function's code."""

_SEPARATORS = re.compile("[%/:@,|#]")


def quoted(part: str) -> str:
    """The part without separators in it; another part has another text."""
    return _SEPARATORS.sub(lambda found: f"%{ord(found[0]):02X}", part)


def scope_name(namespace: str, identity: Identity, version: str | int | None) -> str:
    """The name of a function's scope, which is how its keys begin, before a colon."""
    name = f"{quoted(identity.module)}:{quoted(identity.qualname)}"
    if version == BY_CODE or not identity.named:
        name += f"#{identity.code}"
    if version not in (None, BY_CODE):
        name += f"@{quoted(str(version))}"
    return in_namespace(namespace, name)


def in_namespace(namespace: str, key: str) -> str:
    return f"{quoted(namespace)}/{key}" if namespace else key


def function_in(key: str) -> str | None:
    """The name of the scope that a function's key begins with; None if it is no such key."""
    found = _FUNCTION.match(key)
    return None if found is None else found[1]


_FUNCTION = re.compile("((?:[^/:]+/)?[^/:]+:[^/:]+):")


def generation(scope: str, own: str, whole: str) -> str:
    """What stands before the keys of a scope: its own generation, and that of all its namespace.

    It tells what follows: a function's key or a plain one (a comma), in a namespace or not (a slash).
    """
    function = ":" in scope
    generations = f"{quoted(whole)},{quoted(own)}" if function else quoted(own)
    return f"{generations}/|" if "/" in scope or (scope and not function) else f"{generations}|"
