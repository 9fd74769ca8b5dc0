"""`stampede locks` and `stampede limits` without arguments look on all engines where locks and limits may be."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_process import free_port

from stampede import Limiter, Lock, LockLost
from stampede.__main__ import main
from stampede.api.registry import isolated
from stampede.engines import open_engine
from stampede.model.ports import Engine

SETTINGS = """
[caches.default]
url = "disk://{home}/cache"

[caches.here]
url = "memory://"
"""

Run = Callable[..., str]


@pytest.fixture
def files(run: Run) -> Iterator[Engine]:
    """The engine of locks and limits that name no engine."""
    engine = open_engine("file://")
    yield engine
    engine.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command beside settings, checks its exit code, and returns its output, followed by its errors."""
    (tmp_path / "stampede.toml").write_text(SETTINGS.format(home=tmp_path))
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STAMPEDE_SETTINGS", raising=False)
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/tmp")
    monkeypatch.setattr(tempfile, "tempdir", None)

    def run(*arguments: str, code: int = 0) -> str:
        with isolated():
            ended = main(arguments)
        out, err = capsys.readouterr()
        assert ended == code, out + err
        return out + err

    yield run
    tempfile.tempdir = None


def test_a_lock_that_names_no_engine_is_shown(run: Run, files: Engine, tmp_path: Path) -> None:
    """`stampede locks` shows the locks on the default file engine and on the engines of the settings."""
    with Lock("plain", on=files), Lock("theirs", on=f"disk://{tmp_path}/cache"):
        shown = run("locks")
        assert "plain" in shown and "theirs" in shown
        assert "file://" in shown and f"disk://{tmp_path}/cache" in shown
        assert "memory:// lives inside each process" in shown
        out, *_ = run("locks", "--json").split("stampede:")
        assert {each["name"]: each["on"].partition(":")[0] for each in json.loads(out)} == {
            "plain": "file",
            "theirs": "disk",
        }
        assert "plain" not in run("locks", "default")
        assert "theirs" not in run("locks", "file://")
    assert f"no lock is held on file:// and disk://{tmp_path}/cache" in run("locks")


def test_without_settings_a_lock_is_shown(run: Run, files: Engine, tmp_path: Path) -> None:
    """Without settings, `stampede locks` shows locks on the file engine, although the default cache is in memory."""
    (tmp_path / "stampede.toml").unlink()
    with Lock("plain", on=files):
        assert "plain" in run("locks")
        assert "end that process" in run("locks", "--break", "plain", code=2)
    assert run("locks") == "no lock is held\n"


def test_a_lock_is_taken_away_where_it_is(run: Run, files: Engine, tmp_path: Path) -> None:
    """`stampede locks --break` finds a lock's engine, and asks for the address if the lock is held on two engines."""
    url = f"disk://{tmp_path}/cache"
    assert f"no process holds the lock nightly on file:// or {url}" in run("locks", "--break", "nightly", code=1)
    lock = Lock("nightly", on=url)
    assert lock.acquire()
    with Lock("nightly", on=files):
        asks = run("locks", "--break", "nightly", code=2)
        assert f"is held on file:// and {url}: give the address" in asks
        assert Lock("nightly", on=url).locked()
    assert f"the lock nightly was taken from 1 holder(s) on {url}" in run("locks", "--break", "nightly")
    assert not Lock("nightly", on=url).locked()
    with pytest.raises(LockLost):
        lock.release()


def test_an_engine_that_is_down_hides_no_other(run: Run, files: Engine, tmp_path: Path) -> None:
    """If one engine is down, the locks on the other engines are still shown, and the error is reported."""
    pytest.importorskip("redis")
    dead = f"redis://127.0.0.1:{free_port()}"
    with (tmp_path / "stampede.toml").open("a") as settings:
        settings.write(f'[caches.dead]\nurl = "{dead}"\n')
    with Lock("plain", on=files):
        shown = run("locks", code=1)
        assert "plain" in shown and dead[8:] in shown
    assert dead[8:] in run("locks", "--break", "other", code=1)
    with pytest.raises(LockLost), Lock("theirs", on=f"disk://{tmp_path}/cache"):
        assert dead[8:] in run("locks", "--break", "theirs")  # the lock was found, so the dead engine is no failure
    assert dead[8:] in run("limits", code=1)
    assert dead[8:] in run("locks", "dead", code=2)


def test_a_limit_that_names_no_engine_is_shown(run: Run, files: Engine, tmp_path: Path) -> None:
    """`stampede limits` shows the limits on the default file engine and on the engines of the settings."""
    Limiter("plain", max=3, per=60, on=files).acquire()
    Limiter("theirs", max=3, per=60, on=f"disk://{tmp_path}/cache").acquire()
    shown = run("limits")
    assert "plain" in shown and "theirs" in shown and "disk://" in shown
    assert "plain" not in run("limits", "default")
    out, *_ = run("limits", "--json").split("stampede:")
    assert sorted(each["name"] for each in json.loads(out)) == ["plain", "theirs"]
