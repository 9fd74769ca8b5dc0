"""The pictures of design.md, made of the code: `python docs/pictures.py` writes rooms.svg and way.svg anew."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "stampede"


@dataclass(frozen=True)
class Room:
    """Modules that belong together; `engines/` is a folder of them."""

    name: str
    about: str
    modules: str


ROOMS = [
    Room("doors", "what is imported, and typed", "__init__ __main__ cli testing contrib"),
    Room("caches", "from settings to caches by name, and the verbs of a cache", "registry cache origins"),
    Room(
        "functions", "a decorated function: its keys, its calls, its verbs, its types",
        "decorate cached binding method many faces many_faces hot namesakes switch",
    ),
    Room("locks", "the user's locks and limits, and times of holding one", "bulkhead crowd lock limiter holding"),
    Room(
        "scopes", "behind every face: an engine, a local tier, a Scope for each function; batches",
        "core generations stored scope batch each loaders front gather status",
    ),
    Room(
        "algorithm", "the six steps of a call, and how long it waits for which",
        "fill call patience admission land places",
    ),
    Room("flights", "of all callers of a key in this process, one leads", "flight outcome"),
    Room(
        "trouble", "codecs and guards before an engine, which may be down",
        "outage coded",
    ),
    Room("keeper", "leases renewed and given back", "keeper"),
    Room("codec", "entries as bytes, and bytes as entries that may be believed", "codec"),
    Room("engines", "what keeps values and grants leases; the kit that they are built of", "engines"),
    Room(
        "names", "settings as frozen values, arguments as exact texts, signatures, the local tier",
        "settings keys local signatures",
    ),
    Room(
        "ground", "two colours, one lock for decisions, loops, threads, forks, signals, observers",
        "colour metrics loops watch decisions breaker definitions greenlets threads forks",
    ),
    Room(
        "values", "pure: what is decided takes the time as an argument, and does nothing",
        "record room window adaptive ports policy early pace events entry errors",
    ),
]  # fmt: skip
"""From top to bottom."""


def room_of(module: str) -> str:
    """Whose it is; "" if nobody has taken it in."""
    return next((room.name for room in ROOMS if module in room.modules.split()), "")


def modules() -> list[str]:
    """All of the package; a folder is one."""
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    return sorted(found)


@cache
def uses() -> dict[str, tuple[str, ...]]:
    """From which rooms each imports, by the imports as they are."""
    found: dict[str, set[str]] = {room.name: set() for room in ROOMS}
    for path in PACKAGE.rglob("*.py"):
        own = room_of(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        for name in _imported(ast.parse(path.read_text())):
            other = room_of(name)
            if own and other and other != own:
                found[own].add(other)
    return {own: tuple(room.name for room in ROOMS if room.name in others) for own, others in found.items()}


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


def rooms() -> str:
    """One below the other: each imports only from those below it, and says from which."""
    parts, y = [], EDGE
    for room in ROOMS:
        others = uses()[room.name]
        parts += [
            f'<rect class="box" x="{EDGE}" y="{y}" width="{WIDTH - 2 * EDGE}" height="{4 * LINE}" rx="5"/>',
            _text(2 * EDGE, y + LINE + 2, room.name, "name"),
            _text(150, y + LINE + 2, room.about),
            _text(150, y + 2 * LINE + 1, room.modules, "mono"),
            _text(150, y + 3 * LINE, f"imports {', '.join(others)}" if others else "imports nobody", "uses"),
        ]
        y += 4 * LINE + 8
    return _svg(y + EDGE - 8, "the rooms of the package, each importing only from those below it", parts)


STEPS = [
    ("a call", "cached.py, hot.py", "a hit in the function's own table ends here: a dict and a clock", "hit"),
    ("a key", "keys/, scope.py", "arguments as text, in today's generation; the local tier", "hit"),
    ("1 join", "flight.py", "one caller of this process leads, the others wait for its landing", "follow"),
    ("2 look, claim", "fill.py, engines/", "the engine says: found, granted, busy or failed", "found"),
    ("3 busy", "fill.py, engines/", "served what is kept, or asleep until woken; then 2 again", "stale"),
    ("4 compute", "land.py, keeper.py", "the function runs; a thread renews the lease", ""),
    ("5 fill", "land.py, engines/", "stored if the lease still stands; the herd wakes", "value"),
    ("6 or abandon", "land.py, engines/", "a verdict, a rest, or what is kept; the herd wakes", "error"),
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


PICTURES = {"rooms.svg": rooms, "way.svg": way}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (DOCS / name).write_text(picture())
