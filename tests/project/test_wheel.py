"""The uploaded files: the wheel, built from the sdist, works without other packages, and PyPI can show its page."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import README, ROOT

pytest.importorskip("build")
pytest.importorskip("hatchling")


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command without environment variables that lead to this source tree. Return what it prints."""
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "STAMPEDE"))}
    done = subprocess.run(command, cwd=cwd, env=quiet | {"HOME": str(cwd)}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel made from it. The tree is left as it was."""
    dist = tmp_path_factory.mktemp("dist")
    before = litter()
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT, cwd=dist)
    assert litter() == before
    return dist


def litter() -> list[Path]:
    """Return what a build may leave behind. (pip takes an egg-info for an installation.)"""
    return sorted([*ROOT.glob("dist"), *ROOT.glob("build"), *ROOT.glob("*.egg-info")])


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that runs the Python of an environment with only the wheel, in an empty directory."""
    home, empty = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("empty")
    (wheel,) = built.glob("*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", home, cwd=empty)
    python = home / "bin" / "python"
    install = ["install", "--no-index", "--quiet", "--no-compile"]  # most modules are not imported here
    call(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=empty)
    assert (home / "bin" / "stampede").exists()
    return lambda *arguments: call(python, "-W", "error", *arguments, cwd=empty)


def test_the_first_ten_lines_run_where_only_the_wheel_is(installed: Callable[..., str]) -> None:
    """The README's first example runs if only the wheel is installed. No module is left out of the wheel."""
    first = README.blocks("python")[0].text
    where = "import stampede\nprint(stampede.__file__)\n"
    printed = installed("-c", first + "\nassert report(42) == {'customer': 42, 'year': 2026}\n" + where)
    assert "site-packages" in printed
    assert str(ROOT) not in printed


def test_all_of_it_is_there(installed: Callable[..., str], tmp_path: Path) -> None:
    """The wheel has everything that a call needs, also files that are not Python (a schema, a script)."""
    url = f"disk://{tmp_path}"
    program = (
        f"from stampede import Cache\nwith Cache({url!r}) as c: assert c.get_or_compute('k', lambda: 1) == c.get('k')"
    )
    installed("-c", program)


def test_the_command_is_there(installed: Callable[..., str]) -> None:
    """The command `stampede` runs without another package."""
    printed = installed("-m", "stampede", "--help")
    assert all(verb in printed for verb in ("check", "get", "invalidate", "stats"))


def test_the_page_on_pypi_can_be_shown(built: Path) -> None:
    """PyPI accepts the upload, and shows the README as a page."""
    pytest.importorskip("twine")
    call(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


def test_what_is_in_them(built: Path) -> None:
    """The wheel has each file of the package. The sdist also has what tests and docs need, and nothing more."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "stampede").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == package
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package | {"mkdocs.yml", "docs/tutorial.md", "tests/conftest.py", "Makefile", ".ci/run", "LICENSE"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "site", "dist"))]
