"""Parses the pages of the documentation: README.md, CONTRIBUTING.md, and all files below docs/.

`test_docs.py` runs their code. The Python blocks of a page, from top to bottom, form one program. It runs in an empty
directory. A block with a title (```` ```python title="shop.py" ````) is a file there, which the program may import. A
block whose title is `test_*.py` runs in pytest. If the page says `localhost:6379` or `localhost:11211`, a Redis or a
memcached is available.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    text: str = field(repr=False)
    first: int
    """The line number in the page where the block starts."""


class Page:
    """One file, with its blocks, tables, anchors and links."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(DOCS if DOCS in path.parents else ROOT))
        self.text = path.read_text()

    def blocks(self, *languages: str) -> list[Block]:
        """The blocks in these languages, or all blocks."""
        found = [
            Block(match[1], match[2], match[3], self.text.count("\n", 0, match.start(3)) + 1)
            for match in _BLOCK.finditer(self.text)
        ]
        return [each for each in found if not languages or each.language in languages]

    def rows(self, number: int = 0) -> list[list[str]]:
        """The cells of a table, without its header row."""
        tables = re.findall(r"(?:^\|.*\n?)+", self.text, re.MULTILINE)
        lines = [line for line in tables[number].splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]

    def prose(self) -> str:
        """The text without its code blocks."""
        return _BLOCK.sub("", self.text)

    def flat(self) -> str:
        """The text on one line."""
        return " ".join(self.text.split())

    def anchors(self) -> set[str]:
        """The anchors of the page: the names that may follow `#` in a link."""
        headings = re.findall(r"^#+ (.*)$", self.prose(), re.MULTILINE)
        said = set(re.findall(r'<a id="([^"]+)">', self.prose()))
        return said | {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in headings}

    def links(self) -> list[str]:
        """The targets of its links: `[text](target)`, and `[text][name]` with the target of the name."""
        text = self.prose()
        said = dict(re.findall(r"^\[([^]]+)\]: (\S+)$", text, re.MULTILINE))
        names = [
            name for name in re.findall(r"\]\[([^]]+)\]", text) if not name.startswith("stampede.")
        ]  # links to the API reference
        assert said.keys() == set(names), said.keys() ^ set(names)
        return re.findall(r"\]\(([^)\s]+)\)", text) + list(said.values())


README, CONTRIBUTING = Page(ROOT / "README.md"), Page(ROOT / "CONTRIBUTING.md")
PAGES = {page.name: page for page in [README, CONTRIBUTING, *map(Page, sorted(DOCS.rglob("*.md")))]}


def named(text: str) -> list[str]:
    """The texts in `code` style."""
    return re.findall(r"`([^`]+)`", text)
