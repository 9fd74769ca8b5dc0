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
"""The start of the file names of code that we generate around a function."""

MAIN = ("__main__", "__mp_main__")  # multiprocessing's spawn calls the first one so


def name_of(thing: Any) -> str:
    """Return `module:qualname`. A script is named after its file: a process that imports it uses the same name."""
    return f"{module_of(thing)}:{thing.__qualname__}"


def root_of(cls: type) -> str:
    """Return the package in which a class was made."""
    module = getattr(cls, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


def inmost_of(function: Any) -> Any:
    try:
        return unwrap(function)
    except ValueError:  # it wraps itself
        return function


def is_static(cls: type) -> bool:
    """Return whether a class is a static type, made in C: Python code can't make another one with its name."""
    return not cls.__flags__ & _HEAP


def found_by_name(cls: type) -> bool:
    """Return whether the class is found by its name, as pickle requires. If not, other classes may have that name."""
    if is_static(cls):
        return True
    found: Any = sys.modules.get(cls.__module__)
    try:
        for part in cls.__qualname__.split("."):
            found = getattr(found, part)
    except (AttributeError, ImportError):  # ImportError comes from modules that import lazily
        return False
    return found is cls


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for all classes that Python code makes, and for some others


def module_of(thing: Any) -> str:
    """Return the name of the module that defines a function or class; for a script, its file's name without `.py`."""
    module = str(getattr(thing, "__module__", None) or "builtins")
    if module not in MAIN:
        return module
    main = sys.modules.get(module)
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return _stem(file) if file else module


@lru_cache(8)  # Path is slow, and each key with an object of a script's class needs this
def _stem(file: str) -> str:
    return Path(file).stem
