"""Rooms: the folders of the package, from top to bottom. A module imports only from its own room and the rooms below.

The test reads the imports and does not run them. Every import counts: at the top, inside a function, and under
TYPE_CHECKING, because a reader of a module has to read the types that it names. `import_module(name)`, which loads
engines and codecs by their names, is not seen.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "stampede"

# Top to bottom. Rooms on one line do not import each other. A module that is in no folder has a line of its own.
ROOMS = """
    __init__
    __main__
    cli
    testing contrib
    api
    limits
    locks
    algorithm
    outages
    leases
    codecs
    engines
    engines.kit
    local_tier
    metrics keys
    model
    settings
    runtime
    events errors
"""
LINES = [line.split() for line in ROOMS.strip().splitlines()]
DEPTH = {name: depth for depth, line in enumerate(LINES) for name in line}

# Rules that do not follow from the order.
_WORLD = {"codecs", "engines", "asyncio", "threading"}
NEVER = {
    "codecs": {"engines"},
    "algorithm/fill.py": _WORLD,
    "algorithm/patience.py": _WORLD,
    "algorithm/finish.py": _WORLD,
}

# Functions import packages outside of the standard library when they need them. Only these are imported at the top:
AT_THE_TOP = {
    "runtime/definitions.py": {"annotationlib"},  # of the standard library, since Python 3.14
    "codecs/lossless.py": {"msgspec"},  # imported after a check that it is installed
    "codecs/numpy.py": {"numpy"},  # imported when a value of this package is found
    "codecs/pandas.py": {"numpy", "pandas"},
    "codecs/sqlalchemy.py": {"sqlalchemy"},
    "codecs/django.py": {"django"},
    "contrib/celery.py": {"celery", "kombu"},
    "contrib/dramatiq.py": {"dramatiq"},
    "contrib/rq.py": {"rq"},
    "contrib/django/*.py": {"django", "asgiref"},
    "contrib/django/*/*.py": {"django"},
    "contrib/django/*/*/*.py": {"django"},
    "contrib/sqlalchemy/*.py": {"sqlalchemy"},
    "contrib/postgres.py": {"psycopg"},
    "contrib/cachelib.py": {"cachelib"},
    "contrib/flask_caching.py": {"cachelib", "flask", "flask_caching", "werkzeug"},
    "contrib/key_value.py": {"key_value"},
    "engines/sql.py": {"sqlalchemy"},  # imported with the first URL that needs them
    "engines/postgres/*.py": {"psycopg"},
    "cli/serve.py": {"zmq"},
    "cli/postgres.py": {"psycopg"},  # imported by its command only
    "engines/zmq/*.py": {"zmq"},
    "engines/dynamodb.py": {"boto3", "botocore"},
    "engines/etcd/*.py": {"urllib3"},
    "engines/zookeeper/*.py": {"kazoo"},
    "contrib/dogpile/*.py": {"dogpile"},
    "testing/conformance/machine.py": {"hypothesis"},  # imported by the suite that needs it
    "testing/*.py": {"pytest"},  # but not by testing/__init__.py, which users' code may import outside of tests
}


class Import(NamedTuple):
    name: str  # dotted, absolute
    line: int
    at_the_top: bool  # it runs when the module is imported


def imports(source: str) -> list[Import]:
    """Return every import of a module, at any depth."""
    return list(_imports(ast.parse(source), at_the_top=True))


def _imports(node: ast.AST, *, at_the_top: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, at_the_top) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, f"line {node.lineno}: relative import: write it out"
        module = node.module or ""
        for name in dict.fromkeys(f"{module}.{alias.name}" for alias in node.names):
            yield Import(name if module == "stampede" or _is_module(name) else module, node.lineno, at_the_top)
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from _imports(child, at_the_top=False)
        for child in node.orelse:
            yield from _imports(child, at_the_top=at_the_top)
    else:
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, at_the_top=at_the_top and not inside)


def _is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def room_of(path: Path) -> str:
    """Return the line of ROOMS that a file belongs to."""
    return _room([part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts])


def _room(parts: Sequence[str]) -> str:
    """Return a folder's name, or that of a folder in it that has a line of its own."""
    inner = ".".join(parts[:2])
    return inner if inner in DEPTH else parts[0]


def wrong_imports(file: str, found: list[Import]) -> list[str]:
    """Return the imports of one file that point upwards, or where this file must never look, as texts."""
    wrong = []
    room = room_of(PACKAGE / file)
    never = NEVER.get(file, set()) | NEVER.get(room, set())
    for each in found:
        top, _, rest = each.name.partition(".")
        target = _room(rest.split(".")) if top == "stampede" else top
        if top == "stampede" and target not in DEPTH:
            wrong.append(
                f"line {each.line}: {each.name} is in no line of ROOMS, or a name of __init__: import its module"
            )
        elif target in never:
            wrong.append(f"line {each.line}: {file} must never import {target}")
        elif top == "stampede" and target != room and DEPTH[target] <= DEPTH[room]:
            wrong.append(f"line {each.line}: {room} imports {target}, which is not below it")
    return wrong


def foreign_at_the_top(path: Path, found: list[Import]) -> list[str]:
    """Return the optional packages that are needed to import this file."""
    inside = path.relative_to(PACKAGE)
    allowed = {
        package
        for pattern, packages in AT_THE_TOP.items()
        if inside.match(pattern) and inside.name != "__init__.py"
        for package in packages
    }
    packages = {each.name.partition(".")[0] for each in found if each.at_the_top}
    return sorted(packages - sys.stdlib_module_names - {"stampede", inside.stem} - allowed)


FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def imports_of(path: Path) -> list[Import]:
    return imports(path.read_text("utf-8"))


def test_a_module_imports_only_from_below() -> None:
    """A module imports only from below. So `algorithm/fill.py` can be read without knowledge of sockets."""
    for name in map(room_of, FILES):
        assert name in DEPTH, f"{name} has no line in ROOMS: give it one"
    files = {path.relative_to(PACKAGE).as_posix(): path for path in FILES}
    found = {file: wrong_imports(file, imports_of(path)) for file, path in files.items()}
    assert {file: wrong for file, wrong in found.items() if wrong} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Modules of one room may import each other, but not in a circle, which can only be read as a whole."""
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    graph = {
        name: {target for each in imports_of(path) for target in (each.name, f"{each.name}.__init__")} & modules.keys()
        for name, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # CycleError names the modules


def test_rooms_are_few_and_say_what_belongs_there() -> None:
    """There are few rooms, and the docstring of each says which module to read first."""
    flat = [path.name for path in PACKAGE.glob("*.py")]
    rooms = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert len(flat) <= 5 and len(rooms) <= 20
    for room in rooms:
        docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or ""
        assert "Begin with `" in docstring, f"{room.name}/__init__.py does not say what to read first"


def test_optional_packages_stay_optional() -> None:
    """One import at the top of one module would make a package mandatory for all users."""
    found = {str(path.relative_to(PACKAGE)): foreign_at_the_top(path, imports_of(path)) for path in FILES}
    assert {name: packages for name, packages in found.items() if packages} == {}


def test_nothing_is_mandatory() -> None:
    """All modules, with few exceptions, can be imported if only the standard library is installed."""
    excepted = {path for pattern in AT_THE_TOP for path in PACKAGE.rglob(pattern)}
    excepted -= {PACKAGE / name / "__init__.py" for name in ("testing", "contrib/dogpile")}
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if path not in excepted and path.stem not in ("__main__", "pytest", "django")
    ]
    program = (
        f"import sys; sys.path[:0] = [{str(PACKAGE.parent)!r}]\n"
        f"from importlib import import_module\n"
        f"for name in {names!r}: import_module(name)\n"
    )
    run = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_init_holds_names_only() -> None:
    """`__init__` has imports and names only. Every program would run other code there, and few readers look for it."""
    path = PACKAGE / "__init__.py"
    docstring, *statements = ast.parse(path.read_text("utf-8")).body
    assert isinstance(docstring, ast.Expr)
    for node in statements:
        names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        assert isinstance(node, ast.ImportFrom) or names in (["__all__"], ["__version__"]), (
            f"line {node.lineno}: {ast.unparse(node)}"
        )


WRONG: list[tuple[str, str, str]] = [
    ("local_tier/tier.py", "from stampede.api import x", "line 1: local_tier imports api, which is not below it"),
    ("keys/x.py", "def f():\n    import stampede.api", "line 2: keys imports api, which is not below it"),
    ("keys/x.py", "if TYPE_CHECKING:\n    from stampede.api import x", "line 2: keys imports api, which is not"),
    ("testing/x.py", "from stampede import contrib", "line 1: testing imports contrib, which is not below it"),
    (
        "api/cache.py",
        "from stampede import Cache",
        "line 1: stampede.Cache is in no line of ROOMS, or a name of __init__",
    ),
    ("api/cache.py", "import stampede", "line 1: stampede is in no line of ROOMS, or a name"),
    ("codecs/x.py", "from stampede.engines.disk import x", "line 1: codecs/x.py must never import engines"),
    ("engines/kit/x.py", "from stampede.engines.redis import x", "line 1: engines.kit imports engines, which is"),
    ("engines/sql.py", "import stampede.codecs.sealed", "line 1: engines imports codecs, which is not below it"),
    (
        "algorithm/fill.py",
        "class A:\n  def f(self):\n    import asyncio.locks",
        "line 3: algorithm/fill.py must never import asyncio",
    ),
]


def test_the_order_is_enforced() -> None:
    """Imports of every kind are checked. If one kind were overlooked, the test would always pass."""
    for file, source, message in WRONG:
        found = wrong_imports(file, imports(source))
        assert len(found) == 1 and found[0].startswith(message), source


AT_ANY_DEPTH: list[tuple[str, str, list[str]]] = [
    ("cli/table.py", "import rich.table", ["rich"]),
    ("cache.py", "try:\n    from msgspec import json\nexcept ImportError: pass", ["msgspec"]),
    ("cache.py", "class A:\n    import attrs", ["attrs"]),
    ("cache.py", "def f():\n    import attrs", []),
    ("cache.py", "if TYPE_CHECKING:\n    import attrs", []),
    ("cache.py", "if TYPE_CHECKING:\n    import attrs\nelse:\n    import attrs", ["attrs"]),
    ("codecs/lossless.py", "import json, msgspec", []),
    ("testing/__init__.py", "import pytest", ["pytest"]),
    ("testing/conformance.py", "import pytest", []),
    ("contrib/django.py", "import django.core", []),
]


def test_optional_packages_are_seen() -> None:
    """An optional package at the top of a module is found, unless this module may import it."""
    for path, source, packages in AT_ANY_DEPTH:
        assert foreign_at_the_top(PACKAGE / path, imports(source)) == packages, source
