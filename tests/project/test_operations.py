"""What docs/operations.md says of log lines, metrics and alerts is what the code has."""

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
ALERTS = ROOT / "examples" / "operations" / "alerts.yml"
LEVELS = {"info", "warning", "error", "exception"}


def log_lines() -> Iterator[str]:
    """Yield the text of each line that the library logs at INFO or above."""
    for path in sorted((ROOT / "stampede").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                if isinstance(node.func.value, ast.Name) and node.func.value.id in ("log", "_log"):
                    text = node.args[0]
                    if isinstance(text, ast.Constant) and text.value != "%s":
                        yield str(text.value)


def is_there(text: str) -> bool:
    """Whether the page has the fixed pieces of a line, in their order."""
    pieces = [re.escape(piece) for piece in re.split(r"%[-.\d]*[a-z]", text)]
    return re.search(r"[^|]*?".join(pieces), PAGE.flat().replace("`", "")) is not None


@pytest.mark.parametrize("text", sorted(set(log_lines())))
def test_each_log_line_is_explained(text: str) -> None:
    """An operator would search the documentation for a line of the log, in vain."""
    assert is_there(" ".join(text.split())), "give it a row in the table of log lines"


def test_the_metrics_exist() -> None:
    """The page, or an alert, would name a metric that no process has."""
    known = {f"stampede_{metric.name}" for metric in METRICS}
    named = set(re.findall(r"\bstampede_\w+", PAGE.text + ALERTS.read_text()))
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in named} <= known


def test_each_alert_is_explained() -> None:
    """An alert would wake a person, and nothing would say what to do."""
    assert set(re.findall(r"alert: (\w+)", ALERTS.read_text())) == {row[0].strip("`") for row in PAGE.rows(1)}


@pytest.mark.prometheus
def test_prometheus_takes_the_alerts() -> None:
    """A rule with an error keeps Prometheus from loading any."""
    subprocess.run([need("promtool"), "check", "rules", str(ALERTS)], check=True, capture_output=True, timeout=60)


def test_the_page_is_linked() -> None:
    assert "operations.md" in Path(ROOT, "mkdocs.yml").read_text()
