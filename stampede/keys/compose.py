"""Namespace, name, version and arguments as one key, which no other composition of them makes.

    module:qualname:arguments    namespace/module:qualname@version:arguments    a function's keys
    key                          namespace/key                                  a cache's own

A part that holds a separator is quoted; most hold none, and stay as they are. That a plain key may look like a
function's, or like one of a namespace, is told apart in front of it: see `generation`.
"""

from __future__ import annotations

import re
from typing import Any

from stampede.keys.names import module_of

__all__ = ["function_in", "generation", "in_namespace", "quoted", "scope_name"]

_SEPARATORS = re.compile("[%/:@,|]")


def quoted(part: str) -> str:
    """The part without separators in it; another part has another text."""
    return _SEPARATORS.sub(lambda found: f"%{ord(found[0]):02X}", part)


def scope_name(namespace: str, function: Any, version: str | int | None) -> str:
    """The name of a function's scope, which is how its keys begin, before a colon."""
    name = f"{quoted(module_of(function))}:{quoted(function.__qualname__)}"
    return in_namespace(namespace, name if version is None else f"{name}@{quoted(str(version))}")


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
