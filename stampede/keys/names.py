"""Names of functions and classes that are the same in every process."""

from __future__ import annotations

import sys
from functools import lru_cache
from inspect import unwrap
from pathlib import Path
from typing import Any

DATA = frozenset({"numpy", "pandas", "polars", "pyarrow"})
"""The packages whose values hold data and nothing else."""

GENERATED = "<stampede: "
"""How names of files begin in which the code is that we have made around a function."""

MAIN = ("__main__", "__mp_main__")  # the second: what multiprocessing's spawn makes of the first


def name_of(thing: Any) -> str:
    """`module:qualname`; a script goes by its file's name, so that who runs it and who imports it agree."""
    return f"{module_of(thing)}:{thing.__qualname__}"


def root_of(cls: type) -> str:
    """Return the package in which a class was made."""
    module = getattr(cls, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


def inmost_of(function: Any) -> Any:
    try:
        return unwrap(function)
    except ValueError:  # it says that it wraps itself
        return function


def found_for_good(cls: type) -> bool:
    """Whether nobody can make another one of its name."""
    return not cls.__flags__ & _HEAP


def found_by_name(cls: type) -> bool:
    """Whether its name leads to it, as pickle wants it, too. If not, another class may have the very name."""
    if found_for_good(cls):
        return True
    found: Any = sys.modules.get(cls.__module__)
    try:
        for part in cls.__qualname__.split("."):
            found = getattr(found, part)
    except (AttributeError, ImportError):  # the latter of modules that import lazily
        return False
    return found is cls


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: of all classes that Python code has made, and of some others


def module_of(thing: Any) -> str:
    """The module in which a function or class was made; of a script, its name without `.py`."""
    module = str(getattr(thing, "__module__", None) or "builtins")
    if module not in MAIN:
        return module
    main = sys.modules.get(module)
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return _stem(file) if file else module


@lru_cache(8)  # paths are slow, and every instance of a script's class is keyed by this
def _stem(file: str) -> str:
    return Path(file).stem
