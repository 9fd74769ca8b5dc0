"""The log lines, metrics and alerts of docs/operations.md are those of the code."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import PAGES, ROOT
from servers import need

from stampede.metrics.table import METRICS

PAGE = PAGES["operations.md"]
FLAT = PAGE.flat().replace("`", "")
ALERTS = ROOT / "examples" / "operations" / "alerts.yml"
LOGGED = {(logger, level) for logger in ("log", "_log") for level in ("debug", "info", "warning", "error", "exception")}
OTHERS = {"%s", "%s: %s", "%s %s, %s: %s"}
"""Lines whose text comes from their arguments."""


def log_lines() -> Iterator[str]:
    """Yield the text of each line that the library logs."""
    for path in sorted((ROOT / "stampede").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[::2] in LOGGED and node.args:
                yield from _texts(node.args[0])
            elif (isinstance(node, ast.FunctionDef) and node.name == "_line" and path.name == "log.py") or (
                isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("CAPTURED", "_HELD")
            ):
                yield from _texts(node)


def _texts(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and " " in each.value:
            yield from {each.value} - OTHERS


def is_there(text: str) -> bool:
    """Return whether the page has the fixed pieces of a line, in their order."""
    pieces = [re.escape(piece) for piece in re.split(r"%[-.\d]*[a-z]", text)]
    return re.search(r"[^|]*?".join(pieces), FLAT) is not None


def test_each_log_line_is_explained() -> None:
    """The page explains each log line. Otherwise an operator would search for it in vain."""
    texts = {" ".join(text.split()) for text in log_lines()}
    assert len(texts) > 50
    assert sorted(text for text in texts if not is_there(text)) == [], "give them rows in the table of log lines"


def test_the_metrics_exist() -> None:
    """Each metric that the page or an alert names exists."""
    known = {f"stampede_{metric.name}" for metric in METRICS}
    named = set(re.findall(r"\bstampede_\w+", PAGE.text + ALERTS.read_text()))
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in named} <= known


def test_each_alert_is_explained() -> None:
    """The page explains each alert, and so says what to do."""
    assert set(re.findall(r"alert: (\w+)", ALERTS.read_text())) == {row[0].strip("`") for row in PAGE.rows(1)}


@pytest.mark.prometheus
def test_prometheus_takes_the_alerts() -> None:
    """Prometheus accepts the rules. One rule with an error would keep it from loading all of them."""
    subprocess.run([need("promtool"), "check", "rules", str(ALERTS)], check=True, capture_output=True, timeout=60)


def test_the_page_is_linked() -> None:
    assert "operations.md" in Path(ROOT, "mkdocs.yml").read_text()
