"""Run tests that other projects publish over our adapters: `make suites` (ARGS='django cachelib' chooses).

A suite is a folder in `tests/suites/` with a `suite.py`, which names the source distribution that the tests come in.
The distribution is downloaded and unpacked into `.venv/suites/`; nothing of it is copied into this project. The other
files of the folder configure its tests, so that they run over our adapter."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ROOT / "tests" / "suites"
UNPACKED = ROOT / ".venv" / "suites"


@dataclass(frozen=True)
class Suite:
    """Published tests, and how they are run over our adapter.

    `command` is what Python is to run: "{sources}" stands for the unpacked distribution, "{here}" for the folder of
    `suite.py`, "{report}" for the JUnit file to write. It runs in `inside`, a folder of the distribution. Folders of
    `path` come first in PYTHONPATH. `left_out` has patterns for the names of tests that do not apply (found anywhere in
    `module.class.test`), with the reason for each."""

    distribution: str
    command: Sequence[str]
    inside: str = "."
    path: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    servers: Sequence[str] = ()  # "redis": its URL is in $REDIS_URL


@dataclass
class Outcome:
    """What a run of a suite gave: how many tests passed, and the names of the others."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)  # by reason
    seconds: float = 0.0
    output: str = ""

    def __str__(self) -> str:
        some = sum(map(len, self.left_out.values()))
        return f"{self.passed} passed, {some} not applicable, {len(self.failed)} failed, {self.seconds:.1f} s"


def names() -> list[str]:
    return sorted(each.parent.name for each in FOLDERS.glob("*/suite.py"))


def suite_of(name: str) -> Suite:
    where = FOLDERS / name / "suite.py"
    spec = importlib.util.spec_from_file_location(f"suite_of_{name.replace('-', '_')}", where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Suite = module.SUITE
    return found


def _folder(distribution: str) -> Path:
    return UNPACKED / distribution.replace("==", "-")


def unpacked(distribution: str) -> Path:
    """Return the folder of a source distribution, after downloading it if it is not there yet."""
    into = _folder(distribution)
    if into.exists():
        return into
    UNPACKED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=UNPACKED) as place:
        load = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        name = distribution.partition("==")[0]  # not ":all:", which would build the build's own tools from source, too
        subprocess.run([*load, "--no-deps", "--no-binary", name, "--dest", place, distribution], check=True)
        (archive,) = Path(place).glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(place, filter="data")
        (folder,) = (each for each in Path(place).iterdir() if each.is_dir())
        folder.rename(into)
    return into


def run(name: str, urls: Mapping[str, str]) -> Outcome:
    """Run the suite and return its outcome. `urls` has the addresses of the servers that it needs."""
    suite, here = suite_of(name), FOLDERS / name
    sources = unpacked(suite.distribution)
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        known = {"sources": str(sources), "here": str(here), "report": str(report)}
        inside = sources / suite.inside
        path = [
            str(inside),
            str(here),
            str(ROOT),
            str(ROOT / "tests" / "support"),
            *os.environ.get("PYTHONPATH", "").split(":"),
        ]
        path = [each.format(**known) for each in suite.path] + [each for each in path if each]
        environment = {
            **os.environ,
            **{server.upper() + "_URL": urls[server] for server in suite.servers},
            **{key: value.format(**known) for key, value in suite.environment.items()},
            "PYTHONPATH": ":".join(path),
            "PYTHONWARNINGS": "default",
            "TMPDIR": place,
        }
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, *(each.format(**known) for each in suite.command)],
            cwd=inside,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        outcome = read(report, suite.left_out) if report.exists() else Outcome(failed=["(no report)"])
        outcome.seconds, outcome.output = time.monotonic() - began, done.stdout + done.stderr
    return outcome


def read(report: Path, left_out: Mapping[str, str]) -> Outcome:
    """Return the outcome that a JUnit file tells. A test that was skipped counts as not applicable; so does one that
    failed, if it is to be left out. One that is to be left out and passed is told, too: then the entry is wrong."""
    outcome, used = Outcome(), set()
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        pattern = next((each for each in left_out if re.search(each, name)), None)
        skipped, bad = case.find("skipped"), case.find("failure") is not None or case.find("error") is not None
        if pattern is not None:
            used.add(pattern)
            if not bad and skipped is None:
                outcome.failed.append(f"{name} passed, though {pattern!r} leaves it out")
            else:
                outcome.left_out.setdefault(left_out[pattern], []).append(name)
        elif skipped is not None:
            outcome.left_out.setdefault(skipped.get("message") or "skipped", []).append(name)
        elif bad:
            outcome.failed.append(name)
        else:
            outcome.passed += 1
    outcome.failed += [f"no test is named {each!r}, which is left out" for each in left_out.keys() - used]
    return outcome


def main(chosen: Sequence[str]) -> int:
    from servers import shared_redis

    server, bad = shared_redis().url.rpartition("/")[0], False
    names_of_all = list(chosen or names())
    # Side by side, as most of their time is spent asleep, and each with a database of its own on the server.
    urls = [{"redis": f"{server}/{number}"} for number in range(1, 1 + len(names_of_all))]
    pool = ThreadPoolExecutor()
    for name, outcome in zip(names_of_all, pool.map(run, names_of_all, urls), strict=True):
        print(f"{name}: {outcome}", flush=True)
        for reason, tests in outcome.left_out.items():
            print(f"  not applicable ({len(tests)}): {reason}")
        if outcome.failed:
            bad = True
            print(outcome.output[-20_000:], *(f"  failed: {each}" for each in outcome.failed), sep="\n")
    return bad


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(sys.argv[1:]))
