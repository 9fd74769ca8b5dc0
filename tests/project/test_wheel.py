"""What is uploaded: a wheel, built from the sdist, works where nothing else is; and its page can be read."""

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
    """What a command prints; without our tree, and without the network."""
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
    """What a build may leave: an egg-info is taken by pip for an installation."""
    return sorted([*ROOT.glob("dist"), *ROOT.glob("build"), *ROOT.glob("*.egg-info")])


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The Python of an environment that has the wheel and nothing else, run in an empty directory."""
    home, empty = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("empty")
    (wheel,) = built.glob("*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", home, cwd=empty)
    python = home / "bin" / "python"
    install = ["install", "--no-index", "--quiet", "--no-compile"]  # most of it is imported by nobody here
    call(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=empty)
    assert (home / "bin" / "stampede").exists()
    return lambda *arguments: call(python, "-W", "error", *arguments, cwd=empty)


def test_the_first_ten_lines_run_where_only_the_wheel_is(installed: Callable[..., str]) -> None:
    """What everybody tries first after pip install would fail: a module left out, or a package asked for."""
    first = README.blocks("python")[0].text
    where = "import stampede\nprint(stampede.__file__)\n"
    printed = installed("-c", first + "\nassert report(42) == {'customer': 42, 'year': 2026}\n" + where)
    assert "site-packages" in printed
    assert str(ROOT) not in printed


@pytest.mark.parametrize("engine", ["memory", "disk"])
def test_all_of_it_is_there(installed: Callable[..., str], engine: str, tmp_path: Path) -> None:
    """A file that is no Python (a schema, a script) would be in the tree and not in the wheel."""
    url = {"memory": "memory://", "disk": f"disk://{tmp_path}"}[engine]
    program = (
        f"from stampede import Cache\nwith Cache({url!r}) as c: assert c.get_or_compute('k', lambda: 1) == c.get('k')"
    )
    installed("-c", program)


def test_the_command_is_there(installed: Callable[..., str]) -> None:
    """`stampede` would ask for a package that the README doesn't tell to install."""
    printed = installed("-m", "stampede", "--help")
    assert all(verb in printed for verb in ("check", "get", "invalidate", "stats"))


def test_the_page_on_pypi_can_be_shown(built: Path) -> None:
    """PyPI would refuse the upload, or show the README as plain text."""
    pytest.importorskip("twine")
    call(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


def test_what_is_in_them(built: Path) -> None:
    """The wheel would lack a file of the package, the sdist what it takes to test and document it, or have too much."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "stampede").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == package
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package | {"mkdocs.yml", "docs/tutorial.md", "tests/conftest.py", "Makefile", ".ci/run", "LICENSE"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "site", "dist"))]
