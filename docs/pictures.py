"""The pictures of design.md, made of the code: `python docs/pictures.py` writes rooms.svg and way.svg anew."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path
from textwrap import wrap

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "stampede"
FLAT = "stampede"
"""What the modules that are in no room are called together, but for those that import nothing of ours."""


@cache
def rooms() -> dict[str, list[str]]:
    """Return each room's modules and folders, the rooms from top to bottom: each imports only from those below it."""
    order = [*TopologicalSorter(uses()).static_order()]
    return {room: _modules(room) for room in reversed(order)}


@cache
def uses() -> dict[str, tuple[str, ...]]:
    """Return the rooms from which each room imports, by the imports as they are."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        own = _room(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        for name in _imported(ast.parse(path.read_text())):
            found.setdefault(own, set()).update({_room(name)} - {own})
        found.setdefault(own, set())
    return {room: tuple(sorted(others)) for room, others in found.items()}


def _room(name: str) -> str:
    if (PACKAGE / name).is_dir():
        return name
    return name if name in ("errors", "events") else FLAT


def _modules(room: str) -> list[str]:
    if room == FLAT:
        return sorted(path.stem for path in PACKAGE.glob("*.py") if _room(path.stem) == FLAT)
    if room in ("errors", "events"):
        return []
    inside = [path for path in (PACKAGE / room).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    return sorted(path.stem + "/" * path.is_dir() for path in inside if path.stem != "__init__")


def about(room: str) -> str:
    """Return the first sentence of its docstring."""
    if room == FLAT:
        return "The names that users import, and `python -m stampede`."
    path = PACKAGE / room / "__init__.py" if (PACKAGE / room).is_dir() else PACKAGE / f"{room}.py"
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].replace("\n", " ")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "stampede":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stampede."):
            yield (node.module or "").split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("stampede."))


# -- how they look -----------------------------------------------------------------------------------------------------

WIDTH, LINE, EDGE = 860, 17, 14
STYLE = """<style>
  text { font: 13px sans-serif; fill: #263238 }
  .name { font-weight: bold; font-size: 15px }
  .mono { font-family: monospace; font-size: 12px; fill: #455a64 }
  .uses { font-size: 12px; fill: #00796b }
  .box { fill: #fafafa; stroke: #00796b }
  .no { fill: #ffffff; stroke: #b0bec5 }
  .way { stroke: #00796b; fill: none; stroke-width: 1.5 }
</style>"""
TIP = (
    '<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="#00796b"/></marker>'
)


def _svg(height: int, title: str, parts: list[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join([head, STYLE, f"<defs>{TIP}</defs>", ground, *parts, "</svg>", ""])


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(text)}</text>'


def house() -> str:
    """Draw the rooms one below the other: each imports only from those below it, and says from which."""
    parts, y = [], EDGE
    for room, modules in rooms().items():
        others = uses()[room]
        inside = wrap(" ".join(modules), 92)
        high = (2 + len(inside)) * LINE + 6
        parts += [
            f'<rect class="box" x="{EDGE}" y="{y}" width="{WIDTH - 2 * EDGE}" height="{high}" rx="5"/>',
            _text(2 * EDGE, y + LINE + 2, room, "name"),
            _text(150, y + LINE + 2, about(room)),
            *(_text(150, y + (2 + number) * LINE + 1, line, "mono") for number, line in enumerate(inside)),
            _text(150, y + (2 + len(inside)) * LINE, f"imports {', '.join(others) or 'nothing of ours'}", "uses"),
        ]
        y += high + 8
    return _svg(y + EDGE - 8, "the rooms of the package, each importing only from those below it", parts)


STEPS = [
    ("a call", "api/cached.py, fast_hit.py", "a hit in the function's own table ends here: a dict and a clock", "hit"),
    ("a key", "keys/, algorithm/scope.py", "arguments as text, in today's generation; the local tier", "hit"),
    ("1 join", "algorithm/flight.py", "one caller of this process leads, the others wait for its landing", "follow"),
    ("2 look, claim", "algorithm/fill.py, engines/", "the engine says: found, granted, busy or failed", "found"),
    ("3 busy", "algorithm/fill.py, engines/", "served what is kept, or asleep until woken; then 2 again", "stale"),
    ("4 compute", "finish.py, leases/keeper.py", "the function runs; a thread renews the lease", ""),
    ("5 fill", "algorithm/finish.py, engines/", "stored if the lease still stands; the herd wakes", "value"),
    ("6 or abandon", "algorithm/finish.py, engines/", "a verdict, a rest, or what is kept; the herd wakes", "error"),
]
"""The step, where it stands, what it does, what the caller may have from there."""


def way() -> str:
    """A call, from top to bottom; to the right, what its caller is given there."""
    parts, y, high = [], EDGE, 3 * LINE - 4
    for number, (name, where, what, given) in enumerate(STEPS):
        parts += [
            f'<rect class="box" x="{EDGE}" y="{y}" width="620" height="{high}" rx="5"/>',
            _text(2 * EDGE, y + LINE + 2, name, "name"),
            _text(2 * EDGE, y + 2 * LINE + 3, where, "mono"),
            _text(190, y + LINE + 11, what),
        ]
        if given:
            middle = y + high // 2
            parts += [
                f'<path class="way" marker-end="url(#tip)" d="M634,{middle} H720"/>',
                f'<rect class="no" x="722" y="{middle - 14}" width="110" height="28" rx="14"/>',
                _text(744, middle + 5, given),
            ]
        if number < len(STEPS) - 1:
            parts.append(f'<path class="way" marker-end="url(#tip)" d="M80,{y + high} v18"/>')
        y += high + 20
    return _svg(y + EDGE - 20, "the way of a call", parts)


PICTURES = {"rooms.svg": house, "way.svg": way}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (DOCS / name).write_text(picture())
