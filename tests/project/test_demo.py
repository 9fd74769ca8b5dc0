"""The demo of examples/demo: it runs as `make demo` runs it, and the figures that it draws are right."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from forked import python

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
SVG = "{http://www.w3.org/2000/svg}"

sys.path.insert(0, str(DEMO))
from caller import Mark, Reads  # noqa: E402
from timeline import Timeline  # noqa: E402

sys.path.remove(str(DEMO))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(home / "tmp"), "COLUMNS": "120"}


def played(home: Path, *arguments: str) -> str:
    """Run the demo until each of its processes has ended. Return what it prints."""
    words = [sys.executable, str(DEMO), *arguments]
    done = subprocess.run(words, cwd=home, env=environment(home), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--processes", "1"], "'1': give a whole number from 2 to 32"),
        (["--callers", "none"], "'none': give a whole number from 1 to 32"),
        (["--seconds", "nan"], "'nan': give seconds from 0.01 to 10"),
        (["--out", "nowhere/demo.html"], "demo: nowhere/demo.html can't be written"),
        (["--out", "."], "demo: . can't be written"),
    ],
)
def test_wrong_arguments_are_named(home: Path, arguments: list[str], message: str) -> None:
    """Wrong arguments are refused before the demo runs, and the message names them."""
    done = python(DEMO / "__main__.py", *arguments, cwd=home, env=environment(home))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and message in done.stderr


SMALL = ["--processes", "2", "--callers", "3", "--seconds", "0.1"]


def rows_of(panel: ET.Element) -> list[str]:
    """Return the text about each caller in one panel."""
    titles = [group.findtext(f"{SVG}title") or "" for group in panel.iter(f"{SVG}g")]
    return [title for title in titles if title.startswith("caller ")]


def panels_of(picture: ET.Element) -> list[ET.Element]:
    return [group for group in picture.findall(f"{SVG}g") if group.find(f"{SVG}rect[@class='card']") is not None]


def test_the_demo_leaves_a_page_and_nothing_else(home: Path) -> None:
    """The demo writes a valid page that shows every caller, and leaves no processes or directories behind."""
    said = played(home, *SMALL)  # returns when each process that writes to its output has ended
    first, *_, last = said.splitlines()
    assert first.startswith("2 processes × 3 callers want one value at once")
    assert last == "every caller's timeline: demo.html"
    assert re.search(r"\ncold, without +[2-6] ", said)
    assert re.search(r"\ncold, with stampede +1 ", said)
    assert re.search(r"\nprocess is killed +2 \(1 killed\) ", said)
    assert list((home / "tmp").iterdir()) == []

    text = (home / "demo.html").read_text("utf-8")
    page = ET.fromstring(text)
    assert "<script" not in text and "href=" not in text and "src=" not in text
    panels = panels_of(next(page.iter(f"{SVG}svg")))
    assert [len(rows_of(panel)) for panel in panels] == [6, 6, 6, 6]
    stories = [rows_of(panel) for panel in panels]
    assert sum("computing" in story for story in stories[0]) > 1
    assert sum("computing" in story for story in stories[1]) == 1
    assert all("served" in story for scene in stories[:3] for story in scene)
    assert sum("killed" in story for story in stories[3]) == 3
    assert "SIGKILL" in text


def test_the_demo_can_leave_just_the_picture(home: Path) -> None:
    """The demo can write the picture alone. The README's picture is made in this way."""
    played(home, *SMALL, "--out", "demo.svg")
    assert len(panels_of(ET.parse(home / "demo.svg").getroot())) == 4


@pytest.mark.parametrize(
    "number, code, moment", [(signal.SIGINT, 130, "starting"), (signal.SIGTERM, 143, "2 processes")]
)
def test_an_interrupted_demo_leaves_nothing(home: Path, number: signal.Signals, code: int, moment: str) -> None:
    """An interrupted demo prints no traceback, and leaves no processes, directories or page behind."""
    with subprocess.Popen(
        [sys.executable, str(DEMO), *SMALL, "--seconds", "1"],
        cwd=home,
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        assert any(line.startswith(moment) for line in demo.stdout)
        try:
            if number == signal.SIGINT:
                os.killpg(demo.pid, number)  # as a terminal does
            else:
                demo.send_signal(number)
            _, trouble = demo.communicate(timeout=30)  # returns when each process that writes to its output has ended
        finally:
            demo.kill()
    assert demo.returncode == code
    assert trouble == ""
    assert list((home / "tmp").iterdir()) == []
    assert not (home / "demo.html").exists()


def timeline(*news: Mark | Reads, lasting: bool = False) -> Timeline:
    made = Timeline("made up", "Made up", 3, lasting=lasting, begin=0.0, end=10.0, ttl=4.0)
    for each in news:
        made.add(each)
    return made


def whats(made: Timeline, caller: int) -> list[tuple[str, float, float]]:
    return [tuple(span) for span in made.rows()[caller] if span.end > span.start]


def test_figures_of_a_herd() -> None:
    """The figures of a herd, and the row of each caller, follow from what happened."""
    made = timeline(
        Mark("asked", 0, 1), Mark("asked", 1, 1), Mark("began", 0, 2), Mark("admitted", 0, 3), Mark("ended", 0, 5),
        Mark("served", 0, 6), Mark("served", 1, 7), Mark("asked", 2, 2),
    )  # fmt: skip
    assert made.counts() == (1, 0, 1, 2, 0)
    assert made.lateness == 2 and made.blocked == 3 and made.takeover is None
    assert whats(made, 0) == [
        ("waiting", 1, 2), ("queued", 2, 3), ("computing", 3, 5), ("waiting", 5, 6), ("served", 6, 10),
    ]  # fmt: skip
    assert whats(made, 1) == [("waiting", 1, 7), ("served", 7, 10)]
    assert whats(made, 2) == [("waiting", 2, 10)]


def test_figures_of_a_murder() -> None:
    """A computation that was killed is counted, and its callers are neither waiting nor served."""
    made = timeline(Mark("asked", 0, 1), Mark("began", 0, 1), Mark("admitted", 0, 1), Mark("asked", 2, 1))
    made.kill(range(2), 3.0)
    made.add(Mark("began", 2, 4))
    made.add(Mark("ended", 2, 6))
    made.add(Mark("served", 2, 6.5))
    assert made.counts() == (2, 0, 0, 1, 2)
    assert made.takeover == 1 and made.lateness == 0.5
    assert whats(made, 0) == [("computing", 1, 3)]


def test_figures_of_readers_under_load() -> None:
    """A reader that waits for a computation is blocked. A reader that waits a millisecond for the engine is not."""
    made = timeline(
        Mark("began", 0, 2), Mark("admitted", 0, 2), Mark("ended", 0, 3),
        Reads(0, 9, 0.1, [(0, 9)], []), Reads(1, 9, 0.1, [(0, 9)], [(1, 1.001)]), Reads(2, 9, 2, [(0, 9)], [(4, 6)]),
        lasting=True,
    )  # fmt: skip
    assert made.blocked == 1
    assert made.expiries == [4.0, 7.0]
    assert whats(made, 0) == [("served", 0, 9), ("computing", 2, 3)]
    assert whats(made, 2) == [("served", 0, 9), ("blocked", 4, 6)]
