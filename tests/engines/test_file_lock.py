"""The file engine: its locks of the kernel pass the suite of all lock engines. Other tests check the differences."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_world import PATIENCE, Connection, other

from stampede.engines import open_engine
from stampede.engines.file import FileEngine, default_directory
from stampede.errors import EngineError, OptionError
from stampede.model.ports import Busy, Engine, Granted
from stampede.runtime.colour import run_blocking
from stampede.testing.conformance import LocksSuite


class TestFile(LocksSuite):
    def make_engine(self) -> FileEngine:
        return FileEngine(tempfile.mkdtemp(prefix="stampede-test-"))

    def make_peer(self, engine: Engine) -> FileEngine:
        assert isinstance(engine, FileEngine)
        return FileEngine(engine.directory)

    def drop_engine(self, engine: Engine) -> None:
        assert isinstance(engine, FileEngine)
        engine.close()
        shutil.rmtree(engine.directory, ignore_errors=True)


class TestFileAsync(TestFile):
    suspending = True


LEASE = 60.0
SOON = 5.0  # on a busy machine; who is not woken waits for longer


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FileEngine]:
    engine = FileEngine(tmp_path / "locks")
    yield engine
    engine.close()


def take(engine: FileEngine, token: bytes = b"mine", lease: float = LEASE) -> Granted | Busy:
    return run_blocking(engine.blocking.locks.acquire("l", token, lease))


def take_when_free(engine: FileEngine, token: bytes = b"mine") -> float:
    """Wait for the lock and take it. Return the moment when it was taken."""
    while isinstance(reply := take(engine, token), Busy):
        run_blocking(engine.blocking.locks.wait("l", reply, PATIENCE))
    return time.monotonic()


def release(engine: FileEngine, token: bytes = b"mine") -> bool:
    return run_blocking(engine.blocking.locks.release("l", token))


def renew(engine: FileEngine, token: bytes = b"mine") -> bool:
    return run_blocking(engine.blocking.locks.renew("l", token, LEASE))


def hold(pipe: Connection, directory: Path, lease: float) -> None:
    engine = FileEngine(directory)
    pipe.send(type(take(engine, b"theirs", lease)).__name__)
    while pipe.recv() == "release":
        pipe.send(release(engine, b"theirs"))


def test_released_by_another_process(engine: FileEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter for another process's lock is woken when the lock is released. It does not poll."""
    monkeypatch.setattr("stampede.engines.file.SAFETY", LEASE)
    with other(hold, engine.directory, LEASE) as holder:
        assert holder.hear() == "Granted"
        taken: list[float] = []
        waiter = threading.Thread(target=lambda: taken.append(take_when_free(engine)))
        waiter.start()
        while not engine._files.wake_files._bells:
            os.sched_yield()
        released = time.monotonic()
        holder.tell("release")
        assert holder.hear() is True
        waiter.join(PATIENCE)
        assert taken[0] - released < SOON


def test_killed_holder(engine: FileEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a process is killed, its lock is free soon after."""
    monkeypatch.setattr("stampede.engines.file.SAFETY", LEASE)
    with other(hold, engine.directory, LEASE) as holder:
        assert holder.hear() == "Granted"
        taken: list[float] = []
        waiter = threading.Thread(target=lambda: taken.append(take_when_free(engine)))
        waiter.start()
        while not engine._files.wake_files._bells:
            os.sched_yield()
        died = time.monotonic()
        holder.kill()
        waiter.join(PATIENCE)
        assert taken[0] - died < SOON


def test_fences_grow_over_processes_and_engines(engine: FileEngine) -> None:
    """Fences grow over processes, engines, and the loss of the lock's file. A resource can refuse a late holder."""
    first = take(engine)
    release(engine)
    engine.close()
    again = FileEngine(engine.directory)
    second = take(again)
    release(again)
    shutil.rmtree(engine.directory)
    time.sleep(0.002)  # if the file is lost, the fence is the time of day in ms
    third = take(again)
    again.close()
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert isinstance(third, Granted)
    assert first.fence < second.fence < third.fence


def test_removed_file_loses_the_lock(engine: FileEngine) -> None:
    """If the file of a lock is removed, its holder loses the lock, since others lock a new file of the same name."""
    assert isinstance(take(engine), Granted)
    peer = FileEngine(engine.directory)
    shutil.rmtree(engine.directory)
    assert isinstance(take(peer, b"theirs"), Granted)
    assert not renew(engine)
    assert not release(engine)
    assert isinstance(take(engine), Busy)
    assert release(peer, b"theirs")
    peer.close()


def test_lock_of_another_program(engine: FileEngine) -> None:
    """`flock FILE command` and a lock of ours exclude each other."""
    take(engine)
    release(engine)
    (path,) = engine.directory.glob("*.lock")
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert isinstance(take(engine), Busy)
    threading.Timer(0.05, os.close, (fd,)).start()
    take_when_free(engine)


def test_child_neither_has_nor_releases_it(engine: FileEngine) -> None:
    """A forked child does not have the locks of its parent, and does not release them when it ends."""
    assert isinstance(take(engine), Granted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            said = [isinstance(take(engine, b"child's"), Busy), not release(engine), not renew(engine)]
            engine.close()
            os._exit(not all(said))
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    peer = FileEngine(engine.directory)
    assert isinstance(take(peer, b"other"), Busy)
    assert release(engine)
    assert isinstance(take(peer, b"other"), Granted)
    peer.close()


def fork_while_holding(pipe: Connection, directory: Path) -> None:
    engine = FileEngine(directory)
    take(engine, b"theirs")
    if os.fork() == 0:
        pipe.send(os.getpid())
        signal.pause()
    pipe.recv()


def test_child_does_not_keep_its_dead_parents_lock(engine: FileEngine) -> None:
    """If the holder is killed, its lock is free, even if a forked child of it still runs."""
    with other(fork_while_holding, engine.directory) as holder:
        child = holder.hear()
        try:
            assert isinstance(take(engine), Busy)
            holder.kill()
            take_when_free(engine)
        finally:
            os.kill(child, signal.SIGKILL)


def test_interpreters_end(engine: FileEngine) -> None:
    """When a process ends, its locks are free, even if it never released them."""
    with other(take_and_return, engine.directory) as holder:
        assert holder.hear() == "Granted"
        holder.join()
        assert isinstance(take(engine), Granted)


def take_and_return(pipe: Connection, directory: Path) -> None:
    pipe.send(type(take(FileEngine(directory), b"theirs")).__name__)


# -- directories ----------------------------------------------------------------------------------------------------


def test_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of one user use the same directory, whether or not XDG_RUNTIME_DIR is set."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))  # cron does not set it
    path = default_directory()
    assert path == tmp_path / f"stampede-{os.getuid()}"
    assert path.stat().st_mode & 0o777 == 0o700
    assert default_directory() == path
    for url in ("file://", "file:///"):
        engine = open_engine(url)
        assert isinstance(engine, FileEngine)
        assert engine.directory == path
        engine.close()


def _open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _a_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def _a_file(path: Path) -> None:
    path.touch()


def _anothers(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can make a directory somebody else's")
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("trap", [_open_to_all, _a_link, _a_file, _anothers])
def test_default_directory_that_others_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: Callable[[Path], None]
) -> None:
    """A default directory that another user could have prepared is refused. That user could hold our locks, or have us
    write to files of their choice."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trap(tmp_path / f"stampede-{os.getuid()}")
    with pytest.raises(EngineError, match="stampede-"):
        default_directory()


def test_impossible_directory() -> None:
    """A directory that cannot be used is refused when the engine is made. The error says what to do."""
    with pytest.raises(EngineError, match=r"/proc/locks/x.*give a directory"):
        FileEngine("/proc/locks/x")


def test_options() -> None:
    """A wrong option is refused, not ignored."""
    with pytest.raises(OptionError, match="takes none"):
        open_engine("file:///tmp/x?lease=3")
