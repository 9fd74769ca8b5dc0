"""Layers: a module imports only from the lines below its own. Imports are read, not run.

Every import counts: at the top, inside a function, and under TYPE_CHECKING, since who needs a type from above has
to be read together with it. Not seen: `import_module(name)`, by which engines and codecs are loaded by their names.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "stampede"

# Top to bottom. Modules of one line don't know each other; a folder is one name, unless a part of it has a line.
LAYERS = """
    __init__
    __main__
    cli
    testing
    contrib
    registry
    cache
    decorate
    many
    method
    cached
    binding many_faces
    hot faces namesakes switch
    origins
    bulkhead
    crowd
    lock limiter batch each status
    holding
    scope
    stored
    generations
    core
    loaders
    front fill gather
    patience
    land admission
    call
    places
    flight
    keeper outcome
    coded outage
    signatures
    codec
    engines
    engines.kit
    settings
    keys
    local
    metrics record room window
    ports policy early breaker pace events adaptive
    colour
    entry loops watch
    threads
    greenlets
    errors decisions definitions
    forks
"""
LINES = [line.split() for line in LAYERS.strip().splitlines()]
DEPTH = {name: depth for depth, line in enumerate(LINES) for name in line}

# What the order alone does not say.
_WORLD = {"codec", "engines", "asyncio", "threading"}
NEVER = {"codec": {"engines"}, "fill": _WORLD, "patience": _WORLD, "land": _WORLD}

# Packages that are not the standard library's are imported when they are needed, by functions. At the top only:
AT_THE_TOP = {
    "definitions.py": {"annotationlib"},  # of the standard library, since Python 3.14
    "codec/certain.py": {"msgspec"},  # imported by those who have made sure that it is there
    "codec/arrays.py": {"numpy"},  # and these by who has met a value of theirs
    "codec/frames.py": {"numpy", "pandas"},
    "codec/mapped.py": {"sqlalchemy"},
    "codec/django.py": {"django"},
    "contrib/sqlalchemy.py": {"sqlalchemy"},
    "contrib/postgres.py": {"psycopg"},
    "engines/sql.py": {"sqlalchemy"},  # imported with the first URL that needs them
    "engines/postgres/*.py": {"psycopg"},
    "cli/serve.py": {"zmq"},
    "cli/postgres.py": {"psycopg"},  # imported by its command
    "engines/zmq/*.py": {"zmq"},
    "engines/dynamodb.py": {"boto3", "botocore"},
    "engines/etcd/*.py": {"urllib3"},
    "engines/zookeeper/*.py": {"kazoo"},
    "contrib/dogpile/*.py": {"dogpile"},
    "testing/conformance/machine.py": {"hypothesis"},  # imported by the suite that has need of it
    "testing/*.py": {"pytest"},  # but not by testing/__init__.py, which users' code may import outside of tests
}


class Import(NamedTuple):
    name: str  # dotted, absolute
    line: int
    at_the_top: bool  # it runs when the module is imported


def imports(source: str) -> list[Import]:
    """Every import of a module, wherever it stands."""
    return list(_imports(ast.parse(source), at_the_top=True))


def _imports(node: ast.AST, *, at_the_top: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, at_the_top) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, f"line {node.lineno}: relative import: write it out"
        names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "stampede" else [node.module]
        yield from (Import(name or "", node.lineno, at_the_top) for name in names)
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from _imports(child, at_the_top=False)
        for child in node.orelse:
            yield from _imports(child, at_the_top=at_the_top)
    else:
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, at_the_top=at_the_top and not inside)


def layer(path: Path) -> str:
    """The name in LAYERS that a file belongs to."""
    return _deepest([part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts])


def _deepest(parts: Sequence[str]) -> str:
    """A folder is one name, but for those in it that have a line of their own."""
    inner = ".".join(parts[:2])
    return inner if inner in DEPTH else parts[0]


def wrong_imports(name: str, found: list[Import]) -> list[str]:
    """What one layer imports against the order, as texts."""
    wrong = []
    for each in found:
        top, _, rest = each.name.partition(".")
        target = _deepest(rest.split(".")) if top == "stampede" else top
        if top == "stampede" and target not in DEPTH:
            wrong.append(
                f"line {each.line}: {each.name} is in no line of LAYERS, or a name of __init__: name its module"
            )
        elif target in NEVER.get(name, ()):
            wrong.append(f"line {each.line}: {name} must never import {target}")
        elif top == "stampede" and target != name and DEPTH[target] <= DEPTH[name]:
            wrong.append(f"line {each.line}: {name} imports {target}, which is not below it")
    return wrong


def foreign_at_the_top(path: Path, found: list[Import]) -> list[str]:
    """The optional packages that importing this file would need."""
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
    """Without the order there are cycles, and `fill.py` can't be read without knowing what a socket is."""
    for name in map(layer, FILES):
        assert name in DEPTH, f"{name} has no line in LAYERS: give it one"
    found = {str(path.relative_to(PACKAGE)): wrong_imports(layer(path), imports_of(path)) for path in FILES}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_optional_packages_stay_optional() -> None:
    """One import at the top of one module would make a package mandatory for everybody."""
    found = {str(path.relative_to(PACKAGE)): foreign_at_the_top(path, imports_of(path)) for path in FILES}
    assert {name: packages for name, packages in found.items() if packages} == {}


def test_nothing_is_mandatory() -> None:
    """The same, by doing it: every module but the excepted is imported where only the standard library is."""
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
    """Code in `__init__` is run by everybody and looked for by nobody."""
    path = PACKAGE / "__init__.py"
    docstring, *statements = ast.parse(path.read_text("utf-8")).body
    assert isinstance(docstring, ast.Expr)
    for node in statements:
        names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        assert isinstance(node, ast.ImportFrom) or names in (["__all__"], ["__version__"]), (
            f"line {node.lineno}: {ast.unparse(node)}"
        )


@pytest.mark.parametrize(
    "name, source, message",
    [
        ("local", "from stampede.fill import x", "line 1: local imports fill, which is not below it"),
        ("local", "def f():\n    import stampede.fill", "line 2: local imports fill, which is not below it"),
        ("local", "if TYPE_CHECKING:\n    from stampede.fill import x", "line 2: local imports fill, which is"),
        ("lock", "from stampede import limiter", "line 1: lock imports limiter, which is not below it"),
        (
            "cache",
            "from stampede import Cache",
            "line 1: stampede.Cache is in no line of LAYERS, or a name of __init__",
        ),
        ("cache", "import stampede", "line 1: stampede is in no line of LAYERS, or a name"),
        ("codec", "from stampede.engines.disk import x", "line 1: codec must never import engines"),
        ("engines.kit", "from stampede.engines.redis import x", "line 1: engines.kit imports engines, which is not"),
        ("engines", "import stampede.codec.sealed", "line 1: engines imports codec, which is not below it"),
        ("fill", "class A:\n  def f(self):\n    import asyncio.locks", "line 3: fill must never import asyncio"),
    ],
)
def test_the_order_is_enforced(name: str, source: str, message: str) -> None:
    """A layer test that overlooks a kind of import is green for ever."""
    (wrong,) = wrong_imports(name, imports(source))
    assert wrong.startswith(message)


@pytest.mark.parametrize(
    "path, source, packages",
    [
        ("cli/table.py", "import rich.table", ["rich"]),
        ("cache.py", "try:\n    from msgspec import json\nexcept ImportError: pass", ["msgspec"]),
        ("cache.py", "class A:\n    import attrs", ["attrs"]),
        ("cache.py", "def f():\n    import attrs", []),
        ("cache.py", "if TYPE_CHECKING:\n    import attrs", []),
        ("cache.py", "if TYPE_CHECKING:\n    import attrs\nelse:\n    import attrs", ["attrs"]),
        ("codec/certain.py", "import json, msgspec", []),
        ("testing/__init__.py", "import pytest", ["pytest"]),
        ("testing/conformance.py", "import pytest", []),
        ("contrib/django.py", "import django.core", []),
    ],
)
def test_optional_packages_are_seen(path: str, source: str, packages: list[str]) -> None:
    """The same for optional packages."""
    assert foreign_at_the_top(PACKAGE / path, imports(source)) == packages
