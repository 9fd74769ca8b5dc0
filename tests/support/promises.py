"""Checks that each line in PROMISES.md is needed: takes the line out of a copy, and then its tests must fail.

    make promises                        all rows, two at a time; takes an hour
    make promises ARGS='-k disk'         rows that contain this word
    make promises ARGS='--list -k disk'  only print the changes, without running tests

The top of PROMISES.md explains the notation. All tests must pass before.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PAGE = TESTS / "PROMISES.md"

LONGEST = 30.0
"""Seconds that a test may take. A test that hangs without the line has noticed that the line is missing."""
ALL = 200.0
"""Seconds that all tests of a row may take together."""

SUITES = {
    "redis": "test_redis_conformance",
    "memcached": "test_memcached_conformance",
    "disk": "test_disk_conformance",
    "cells": "test_cells",
    "postgres": "test_postgres_conformance",
}
"""The file that runs a test of `stampede/testing/conformance/`, by engine. For all other code: test_conformance."""


_BLANK = r"\s+(?:(?:#|--)[^\n]*\n\s*)*"
"""The pattern between two words: blanks and comments."""


class NotFound(Exception):
    """The text to take out is missing, or appears more than once."""


# -- the page ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A file, or the definition with this name in it."""

    path: str
    name: str = ""

    @property
    def source(self) -> str:
        return _source(self.path)

    @cached_property
    def span(self) -> tuple[int, int]:
        if not self.name:
            return 0, len(self.source)
        if not self.path.endswith(".py"):
            found = _function(self.path, self.name)
            if found is None:
                raise NotFound(f"{self.path} has no {self.name}")
            return found.span()
        return _span(self.source, _named(_tree(self.path), self.name))


@dataclass(frozen=True)
class Edit:
    """A text to take out of the source, or to replace."""

    text: str
    instead: str | None = None

    def within(self, place: Place) -> tuple[int, int] | None:
        """The span of the text. Blanks, line breaks and comments between its words do not matter."""
        pattern = _BLANK.join(re.escape(word) for word in self.text.split())
        start, end = place.span
        found = [*re.compile(pattern).finditer(place.source, start, end)]
        if len(found) > 1:
            raise NotFound(f"{place.path} {place.name} has {len(found)} times: {self.text}")
        return found[0].span() if found else None


@dataclass(frozen=True)
class Change:
    """The changes to some pieces of a file's source."""

    path: str
    pieces: tuple[tuple[int, int, str | None], ...]

    def made(self) -> str:
        source = _source(self.path)
        for start, end, instead in sorted(self.pieces, reverse=True):
            if instead is None:
                python = self.path.endswith(".py")
                start, end, instead = _statement(source, start) if python else _whole_lines(source, start, end)
            else:
                line = source.rfind("\n", 0, start) + 1
                indent = re.match(" *", source[line:])
                instead = instead.replace("⏎", "\n" + (indent.group() if indent else ""))
            source = source[:start] + instead + source[end:]
        if self.path.endswith(".py"):
            try:
                compile(self._around(source), self.path, "exec")
            except SyntaxError as error:
                raise NotFound(f"{self.path} would be no Python any more: {error}") from error
        return source

    def _around(self, source: str) -> str:
        """The top-level statements of the new source that have changed. The rest is still valid."""
        was = _source(self.path)
        ends = [_span(was, node)[1] for node in _tree(self.path).body]
        first, last = min(start for start, _, _ in self.pieces), max(end for _, end, _ in self.pieces)
        before = max((end for end in ends if end <= first), default=0)
        after = min((end for end in ends if end >= last), default=len(was))
        return source[before : len(source) - (len(was) - after)]


@dataclass(frozen=True)
class Row:
    number: int
    promise: str
    line: str  # as written in the table
    edits: tuple[tuple[Edit, ...], ...]  # each is one change, with one or more pieces
    by_hand: str
    tests: tuple[str, ...]

    @cached_property
    def places(self) -> tuple[Place, ...]:
        return tuple(_places(self.line))

    def changes(self) -> Iterator[tuple[Change, ...]]:
        """The changes that a test must notice, one after the other. Raises NotFound if the source does not match."""
        for edits in self.edits:
            spans = [(edit, self._where(edit)) for edit in edits]
            if len(edits) == 1:  # a change of its own for each place
                yield from ((Change(path, ((start, end, edits[0].instead),)),) for path, start, end in spans[0][1])
                continue
            files: dict[str, list[tuple[int, int, str | None]]] = {}
            for edit, found in spans:
                for path, start, end in found:
                    files.setdefault(path, []).append((start, end, edit.instead))
            yield tuple(Change(path, tuple(pieces)) for path, pieces in files.items())

    def _where(self, edit: Edit) -> list[tuple[str, int, int]]:
        found = {(place.path, *span) for place in self.places if (span := edit.within(place)) is not None}
        if not found:
            raise NotFound(f"none of its places has: {edit.text}")
        return sorted(found)

    def wanted(self) -> list[tuple[str, str, str]]:
        """The tests of the row: the file, a prefix of the class name, and the name."""
        found = []
        for test in self.tests:
            file, _, name = test.partition("::")
            if not file.startswith("stampede/testing/conformance/"):
                found.append((where_is(file), "", name))
                continue
            inner = [place.path.split("/")[2] for place in self.places if "/engines/" in place.path]
            engines = dict.fromkeys(name.removesuffix(".py") for name in inner)
            suites = [SUITES[engine] for engine in engines if engine in SUITES]
            kind = "TestMemory" if "memory" in engines else ""
            found += [(where_is(f"{suite}.py"), kind, name) for suite in suites or ["test_conformance"]]
        return found


@cache
def _files() -> dict[str, str]:
    return {path.name: path.relative_to(ROOT).as_posix() for path in TESTS.rglob("test_*.py")}


def where_is(file: str) -> str:
    """Return the path of a test file, from the root. The names of test files are unique."""
    return _files().get(file, file)


def rows() -> list[Row]:
    """All rows of the page."""
    found: list[Row] = []
    promise = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            promise = line[3:]
        elif line.startswith("| `"):
            what, edits, tests = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:4])
            by_hand = edits.removeprefix("by hand") if edits.startswith("by hand") else ""
            told, named = tuple(_edits(edits)) if not by_hand else (), tuple(re.findall(r"`([\w/]+\.py::\w+)`", tests))
            found.append(Row(len(found) + 1, promise, what, told, by_hand, named))
    return found


def _edits(cell: str) -> Iterator[tuple[Edit, ...]]:
    parts = re.split(r"(`[^`]*`)", cell.replace(r"\|", "|"))
    texts, betweens = [part[1:-1] for part in parts[1::2]], [part.strip() for part in parts[2::2]]
    together: list[Edit] = []
    at = 0
    while at < len(texts):
        replaced = betweens[at] == "→"
        together.append(Edit(texts[at], texts[at + 1]) if replaced else Edit(texts[at]))
        at += 1 + replaced
        if betweens[at - 1] != "and":
            yield tuple(together)
            together = []


def _places(cell: str) -> Iterator[Place]:
    """The places in a cell: each file, with those of the names after it that the file defines."""
    path, names = "", 0
    for text in re.findall(r"`([^`]+)`", cell):
        if re.fullmatch(r"stampede/[\w/]+\.(py|lua|sql)", text):
            if path and not names:
                yield Place(path)
            path, names = text, 0
        elif path and re.fullmatch(r"[\w.]+", text) and _has(path, text):
            names += 1
            yield Place(path, text)
    if path and not names:
        yield Place(path)


def _has(path: str, name: str) -> bool:
    if not path.endswith(".py"):
        return _function(path, name) is not None
    try:
        return _named(_tree(path), name) is not None
    except NotFound:
        return False


# -- the source --------------------------------------------------------------------------------------------------------


@cache
def _source(path: str) -> str:
    return (ROOT / path).read_text()


_FUNCTIONS = {
    ".lua": r"^local function {}\b.*?^end",
    ".sql": r"^CREATE FUNCTION stampede\.{}\(.*?(?=^CREATE |\Z)",
}


def _function(path: str, name: str) -> re.Match[str] | None:
    """The function with this name in a Lua or SQL file."""
    pattern = _FUNCTIONS[Path(path).suffix].format(re.escape(name))
    return re.search(pattern, _source(path), re.MULTILINE | re.DOTALL)


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse(_source(path))


def _named(tree: ast.Module, name: str) -> ast.stmt:
    """The definition of a function, a class, a method (`Class.method`) or a top-level name."""
    parts = name.split(".")
    found = _inside(tree.body, parts)
    if found is None and len(parts) == 1:
        found = next(
            (node for node in ast.walk(tree) if getattr(node, "name", None) == name and isinstance(node, ast.stmt)),
            None,
        )
    if found is None:
        raise NotFound(f"there is no {name}")
    return found


def _inside(body: Sequence[ast.stmt], parts: list[str]) -> ast.stmt | None:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == parts[0]:
            found = _inside(node.body, parts[1:]) if len(parts) > 1 else node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and len(parts) == 1:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = node if any(isinstance(each, ast.Name) and each.id == parts[0] for each in targets) else None
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            found = _inside([*node.body, *getattr(node, "orelse", [])], parts)
        else:
            found = None
        if found is not None:
            return found
    return None


@cache
def _begins(source: str) -> list[int]:
    """The offsets at which the lines begin."""
    return [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]


def _span(source: str, node: ast.stmt) -> tuple[int, int]:
    begins = _begins(source)

    def at(line: int, column: int) -> int:
        text = source[begins[line - 1] : begins[line]]
        return begins[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)


def _statement(source: str, at: int) -> tuple[int, int, str]:
    """The innermost statement around this offset, and its replacement."""
    start, end = min(
        (span for span in _statements(source) if span[0] <= at < span[1]), key=lambda span: span[1] - span[0]
    )
    return start, end, "pass"


@cache
def _statements(source: str) -> list[tuple[int, int]]:
    return [_span(source, node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]


def _whole_lines(source: str, start: int, end: int) -> tuple[int, int, str]:
    return source.rfind("\n", 0, start) + 1, (source + "\n").index("\n", end), ""


# -- the copies --------------------------------------------------------------------------------------------------------

_moments = itertools.count(1_000_000_000)
"""Modification times. Each write gets a new one, or Python would use the compiled file of the last version."""


class Copy:
    """A copy of the repository for the changes."""

    def __init__(self, parent: Path, number: int) -> None:
        self.root = parent / f"copy{number}"
        idle = shutil.ignore_patterns(
            ".venv*", ".git", "__pycache__", ".*_cache", ".hypothesis", "site", "dist", "build"
        )
        shutil.copytree(ROOT, self.root, ignore=idle, symlinks=True)

    def run(self, wanted: Sequence[tuple[str, str, str]], changes: Sequence[Change]) -> dict[str, str]:
        """Return the outcome of each test by name: passed, failed, or `hung`. Tests that did not run are missing."""
        for change in changes:
            self._write(change.path, change.made())
        told = self.root / "told.json"
        told.unlink(missing_ok=True)
        paths = [str(self.root), str(self.root / "tests" / "support")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths), "PROMISES_WANTED": json.dumps(wanted), "PROMISES_TOLD": str(told),
            "PYTHONPYCACHEPREFIX": str(self.root / "compiled"),
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "-p", "promises", "-p", "no:cacheprovider", "-p", "no:xdist"]
        files = dict.fromkeys(file for file, _, _ in wanted)
        hung = False
        with (self.root / "said.txt").open("wb") as said:
            process = subprocess.Popen(
                [*command, f"--timeout={LONGEST}", *files], cwd=self.root, env=environment, stdin=subprocess.DEVNULL,
                stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(ALL)
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                _end(process)
                for change in changes:
                    self._write(change.path, _source(change.path))
        result: dict[str, str] = json.loads(told.read_text()) if told.exists() else {}
        if hung or process.returncode not in (0, 1):  # pytest crashed or was killed: no test counts as passed
            result = {name: "failed" if result.get(name) == "failed" else "hung" for _, _, name in wanted}
        return result

    def _write(self, path: str, source: str) -> None:
        (self.root / path).write_text(source)
        moment = next(_moments)
        os.utime(self.root / path, (moment, moment))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its group: servers normally end with their process, but not if it was killed."""
    with_it = process.poll() is None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if with_it:
        process.wait()


# -- inside the copy: a plugin of pytest -------------------------------------------------------------------------------

if "PROMISES_TOLD" in os.environ:
    import pytest

    _wanted = [tuple(each) for each in json.loads(os.environ["PROMISES_WANTED"])]
    _told: dict[str, str] = {}

    def _name_of(item: Any) -> str:
        return str(getattr(item, "originalname", None) or item.name)

    def _is_wanted(item: Any) -> bool:
        file, kind = where_is(Path(item.path).name), item.cls.__name__ if item.cls is not None else ""
        return any(file == path and kind.startswith(first) and _name_of(item) == name for path, first, name in _wanted)

    def pytest_collection_modifyitems(items: list[Any]) -> None:
        import stampede

        assert str(Path.cwd()) in str(stampede.__file__), "it is not the copy that is tried"
        items[:] = filter(_is_wanted, items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(item: Any) -> bool | None:
        return True if _told.get(_name_of(item)) == "failed" else None  # one failure among its parameters is enough

    def pytest_runtest_logreport(report: Any) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.failed:
            _told[name] = "failed"
        elif report.when == "call" and report.passed:
            _told.setdefault(name, "passed")
        Path(os.environ["PROMISES_TOLD"]).write_text(json.dumps(_told))


# -- all of them -------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    row: Row
    trouble: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    seconds: float = 0.0


def tried(row: Row, copy: Copy) -> Verdict:
    """Check one row."""
    verdict, began = Verdict(row), time.monotonic()
    try:
        changes = [*row.changes()]
        for each in changes:
            for change in each:
                change.made()
    except (NotFound, OSError) as error:
        verdict.trouble.append(f"can't be taken out: {error}")
        return verdict
    wanted = row.wanted()
    names, ever = {name for _, _, name in wanted}, set[str]()
    for change in changes:
        told = copy.run(wanted, change)
        seen = {name for name, end in told.items() if end != "passed"}
        ever |= seen
        if not seen:
            idle = "nobody ran" if not told else "all pass"
            verdict.trouble.append(f"{idle} without: {_shown(change)}")
    if not verdict.trouble and names - ever:
        verdict.remarks.append(f"passes whatever is taken out: {', '.join(sorted(names - ever))}")
    verdict.seconds = time.monotonic() - began
    return verdict


def _shown(changes: Sequence[Change]) -> str:
    texts = []
    for change in changes:
        source = Place(change.path).source
        for start, end, instead in change.pieces:
            text = " ".join(source[start:end].split())
            texts.append(f"{change.path}: {text}" + ("" if instead is None else f" → {instead}"))
    return "; ".join(texts)


def _chosen(rows: list[Row], words: str) -> list[Row]:
    """The rows with one of these words or numbers: `disk`, `7`, `20-30`, `20-`."""
    found: list[Row] = []
    for row in rows:
        text = f"{row.promise} {row.line} {row.tests}".lower()
        for word in words.lower().split(","):
            span = re.fullmatch(r"(\d+)(-?)(\d*)", word)
            if span is None and word not in text:
                continue
            if span is not None and not int(span[1]) <= row.number <= int(
                span[3] or (len(rows) if span[2] else span[1])
            ):
                continue
            found.append(row)
            break
    return found


def _listed(rows: list[Row]) -> int:
    broken = 0
    for row in rows:
        print(f"{row.number}: {row.line}")
        try:
            for change in row.changes():
                for each in change:
                    each.made()
                print(f"    without {_shown(change)}")
        except (NotFound, OSError) as error:
            broken += 1
            print(f"    CAN'T BE TAKEN OUT: {error}")
        if row.by_hand:
            print(f"    by hand{row.by_hand}")
    print(f"{len(rows)} rows, {broken} that can't be taken out")
    return 1 if broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="promises", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-k", default="", help="rows with one of these words, or numbers: disk,7,20-30")
    parser.add_argument("--list", action="store_true", help="say what would be taken out")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="processes side by side")
    given = parser.parse_args()
    chosen = _chosen(rows(), given.k)
    if given.list:
        return _listed(chosen)
    todo = [row for row in chosen if not row.by_hand]
    failed: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="stampede-promises-") as parent:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(given.at_once):
            copies.put(Copy(Path(parent), number))
        says = threading.Lock()

        def one(row: Row) -> None:
            copy = copies.get()
            try:
                verdict = tried(row, copy)
            finally:
                copies.put(copy)
            with says:
                print(
                    f"{'HOLE' if verdict.trouble else 'ok  '} {row.number} {verdict.seconds:.0f}s {row.line}",
                    flush=True,
                )
                for each in verdict.trouble + verdict.remarks:
                    print(f"       {each}", flush=True)
                if verdict.trouble:
                    failed.append(verdict)

        with ThreadPoolExecutor(given.at_once) as pool:
            list(pool.map(one, todo))
    left = len(chosen) - len(todo)
    print(f"{len(todo)} rows tried, {len(failed)} with trouble; {left} are tried by hand")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
