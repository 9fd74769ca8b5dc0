"""Damage to the disk engine's files causes an EngineError at worst, and the engine recovers by itself."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from disk_world import Connection, other
from known_generation import generation_of

from stampede import Cache
from stampede.engines import open_engine
from stampede.engines.disk import DiskEngine
from stampede.engines.disk.database import file_of
from stampede.engines.kit import boot_clock
from stampede.errors import EngineError, OptionError, TooLarge
from stampede.model.entry import Entry, Verdict, new_id
from stampede.model.ports import Ask, Busy, Found, Granted, Reply
from stampede.runtime.colour import run_blocking

KEY = "k"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[DiskEngine]:
    engine = DiskEngine(tmp_path / "cache", timeout=0.5)
    yield engine
    engine.close()


def claim(engine: DiskEngine, token: bytes | None = None, key: str = KEY, **terms: Any) -> Reply:
    return run_blocking(engine.blocking.claims.claim(key, token or new_id(), Ask(60.0, **terms)))


def put(engine: DiskEngine, value: bytes = b"value", key: str = KEY, fresh: float = 600.0) -> None:
    run_blocking(engine.blocking.store.set(key, Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh)))


def get(engine: DiskEngine, key: str = KEY) -> bytes | None:
    entry = run_blocking(engine.blocking.store.get([key]))[0]
    return None if entry is None else entry.value


def found(engine: DiskEngine, key: str = KEY) -> Found:
    reply = claim(engine, key=key)
    assert isinstance(reply, Found), reply
    return reply


def holds(reply: Found) -> bool:
    assert reply.ticket is not None
    stamps, slot, stamp, *_ = reply.ticket
    return stamps[slot] == stamp


def tries(verb: Callable[[], object], times: int = 3) -> list[tuple[str, bool]]:
    """The errors of several tries, and whether each only refuses a change. Only EngineError may be raised."""
    said = []
    for _ in range(times):
        try:
            verb()
        except EngineError as error:
            said.append((str(error), error.partial and error.refused))
    return said


def database_of(engine: DiskEngine) -> Path:
    return engine._rows.database.open().file


# -- removed --------------------------------------------------------------------------------------------------------


def test_removed_directory_is_made_again(engine: DiskEngine) -> None:
    """If the directory of a running program is removed, the engine makes it again."""
    put(engine)
    shutil.rmtree(engine.directory)
    put(engine, b"new")
    assert get(engine) == b"new"
    token = new_id()
    assert isinstance(claim(engine, token, "l"), Granted)
    assert run_blocking(engine.blocking.claims.fill("l", token, Entry(b"l", new_id())))


def test_a_directory_that_is_removed_while_a_connection_is_made(
    engine: DiskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the directory is removed during a connect, the caller gets an EngineError, and not a FileNotFoundError."""
    put(engine)
    engine._rows.database.opened()._close_idle()
    statvfs = os.statvfs

    def removed(path: Path) -> os.statvfs_result:
        shutil.rmtree(engine.directory)
        return statvfs(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", removed)
        with pytest.raises(EngineError, match="was removed"):
            get(engine)
    put(engine, b"new")
    assert get(engine) == b"new"


def test_removed_directory_voids_tickets(engine: DiskEngine) -> None:
    """The removal of the directory makes tickets invalid: other processes can no longer invalidate the local values."""
    put(engine)
    peer = DiskEngine(engine.directory)
    reply = found(engine)
    assert holds(reply)
    shutil.rmtree(engine.directory)
    put(peer, b"new")
    assert not holds(reply)
    time.sleep(0.11)  # a reader looks every 100 ms; nothing tells it sooner
    assert get(engine) == b"new"
    peer.close()


def test_lease_of_a_removed_directory_is_lost(engine: DiskEngine) -> None:
    """The leases of a removed directory are lost, and a fill under one of them is refused."""
    token = new_id()
    assert isinstance(claim(engine, token), Granted)
    shutil.rmtree(engine.directory)
    assert not run_blocking(engine.blocking.claims.fill(KEY, token, Entry(b"late", new_id())))
    assert get(engine) is None


def test_a_write_in_a_removed_directory_keeps_nobody_waiting(tmp_path: Path) -> None:
    """If a process is frozen inside a write, other processes can write again once the directory is removed."""
    with closing(DiskEngine(tmp_path / "cache", timeout=20)) as engine:
        put(engine)
        with closing(sqlite3.connect(database_of(engine), isolation_level=None)) as frozen:
            frozen.execute("BEGIN IMMEDIATE")
            shutil.rmtree(engine.directory)
            began = time.monotonic()
            put(engine, b"new")
            assert time.monotonic() - began < 5  # and not the 20 seconds of the timeout
            assert get(engine) == b"new"


def test_a_child_of_whom_the_directory_was_removed(engine: DiskEngine) -> None:
    """A child that is forked after the directory was removed can write, although its parent has no open file."""
    put(engine)
    shutil.rmtree(engine.directory)
    child = os.fork()
    if child == 0:
        try:
            put(engine, b"new")
            os._exit(0 if get(engine) == b"new" else 2)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(0.11)
    assert get(engine) == b"new"


@pytest.mark.parametrize("pattern", ["*.sqlite", "stamps*", "*.sqlite-*", "alive", "wake"])
def test_single_files_removed(engine: DiskEngine, pattern: str) -> None:
    """If only some files of the directory are removed, the engine recovers within a few tries."""
    put(engine)
    peer = DiskEngine(engine.directory)
    for path in engine.directory.glob(pattern):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert len(tries(lambda: put(engine, b"new"))) < 3
    time.sleep(0.11)
    assert len(tries(lambda: get(peer))) < 3
    assert len(tries(lambda: put(engine, b"new"))) < 3
    time.sleep(0.11)
    assert get(peer) == get(engine) == b"new"
    token = new_id()
    assert isinstance(claim(peer, token, "l"), Granted)
    assert isinstance(claim(engine, key="l"), Busy)
    assert run_blocking(peer.blocking.claims.fill("l", token, Entry(b"l", new_id())))
    assert found(engine, "l").entry.value == b"l"
    peer.close()


def begin(pipe: Connection, directory: Path, number: int) -> None:
    pipe.send("ready")
    pipe.recv()
    engine = DiskEngine(directory)
    put(engine, b"value", f"k{number}")
    pipe.send(database_of(engine).name)
    pipe.recv()


def test_many_begin_at_once(tmp_path: Path) -> None:
    """Processes that start together in an empty directory share one cache."""
    with ExitStack() as stack:
        all_of_them = [stack.enter_context(other(begin, tmp_path / "cache", number)) for number in range(8)]
        for each in all_of_them:
            each.hear()
        for each in all_of_them:
            each.tell()
        names = {each.hear() for each in all_of_them}
        assert len(names) == 1
        assert {path.name for path in (tmp_path / "cache").glob("*.sqlite")} == names
        engine = DiskEngine(tmp_path / "cache")
        assert [get(engine, f"k{number}") for number in range(8)] == [b"value"] * 8
        engine.close()


def test_orphans_are_removed(tmp_path: Path) -> None:
    """Old files of starts that were interrupted are removed."""
    directory = tmp_path / "cache"
    directory.mkdir()
    old, new = (file_of(directory, number) for number in ("00", "01"))
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    DiskEngine(directory).close()
    assert not old.exists()
    assert new.exists()


# -- damaged --------------------------------------------------------------------------------------------------------


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def scratched(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for at in range(4096, size, 4096):
            file.seek(at)
            file.write(os.urandom(512))


@pytest.mark.parametrize("damage", [garbage, truncated, emptied, scratched])
@pytest.mark.parametrize("running", [True, False])
def test_damaged_database(
    tmp_path: Path, damage: Callable[[Path], None], running: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged file is reported and moved aside, and the engine goes on with a new one."""
    engine = DiskEngine(tmp_path / "cache")
    for number in range(500):
        put(engine, os.urandom(200), f"k{number}")
    file = database_of(engine)
    engine.close()  # everything is in the file now
    survivor = DiskEngine(tmp_path / "cache") if running else None
    damage(file)
    engine = DiskEngine(tmp_path / "cache")
    said = tries(lambda: [get(engine, f"k{number}") for number in range(500)])
    said += tries(lambda: put(engine, b"new"))
    said += tries(lambda: [run_blocking(engine.blocking.store.invalidate(f"k{number}")) for number in range(500)])
    assert any("damaged" in each for each in [*said, *caplog.messages])
    assert list(engine.directory.glob("*.damaged"))
    put(engine, b"new")
    assert get(engine) == b"new"
    if survivor is not None:
        time.sleep(0.11)
        assert get(survivor) == b"new"
        survivor.close()
    engine.close()


def whole_life(engine: DiskEngine) -> None:
    """Calls every verb, for keys that are stored and for keys that aren't."""
    token = new_id()
    for key in ("k0", "new", "busy", "failed"):
        if isinstance(claim(engine, token, key), Granted):
            assert run_blocking(
                engine.blocking.claims.fill(key, token, Entry(b"x", new_id(), ttl=60, fresh=60, keep=60))
            )
        engine.near.look(key)  # type: ignore[union-attr]
    run_blocking(engine.blocking.store.expire("k1"))
    run_blocking(engine.blocking.store.invalidate("k2"))
    run_blocking(engine.blocking.store.bump("f"))
    assert isinstance(generation_of(engine, "f"), str)
    claim(engine, token, "other")
    run_blocking(engine.blocking.claims.abandon("other", token, Verdict("failed", "E", "no"), 0.1))
    run_blocking(engine.blocking.locks.acquire("lock", token, 5.0))
    granted = run_blocking(engine.blocking.locks.acquire("another", token, 5.0))
    assert isinstance(granted, Granted)
    assert isinstance(granted.fence, int)
    assert run_blocking(engine.blocking.locks.release("another", token))
    put(engine, b"last", "last")
    assert get(engine, "last") == b"last"


def test_every_byte(memory_path: Path) -> None:
    """If any byte of the file is flipped, the engine works again after at most two EngineErrors.

    Of the bytes that mean something every ninth is flipped; EVERY_BYTE=1 flips them all."""
    engine = DiskEngine(memory_path / "whole")
    for number in range(3):
        put(engine, key=f"k{number}")
    run_blocking(engine.blocking.store.bump("f"))
    claim(engine, key="busy")
    claim(engine, b"token", "failed")
    run_blocking(engine.blocking.claims.abandon("failed", b"token", Verdict("failed", "ValueError", "no"), 300.0))
    run_blocking(engine.blocking.locks.acquire("lock", b"token", 600.0))
    file = database_of(engine)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole, (stamps,) = file.read_bytes(), engine.directory.glob("stamps*")
    directory = memory_path / "flipped"
    telling = [at for at, byte in enumerate(whole) if byte or at < 100]
    for at in telling[:: 1 if os.environ.get("EVERY_BYTE") else 9]:
        directory.mkdir()
        shutil.copy(stamps, directory)
        (directory / file.name).write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])

        def live() -> None:
            flipped = DiskEngine(directory, timeout=0.5)
            try:
                whole_life(flipped)
            finally:
                flipped.close()

        said = tries(live, 3)
        assert len(said) < 3, f"byte {at}: {said[-1]}"
        shutil.rmtree(directory)
    engine.close()


def test_a_damaged_file_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a file is found damaged while a cache is opened, the log says where it was moved, and the cache works."""
    directory = tmp_path / "cache"
    with Cache(f"disk://{directory}") as cache:
        cache.get_or_compute("k", lambda: 1)
    (file,) = directory.glob("*.sqlite")
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"tableentriesentries", b"table\x82ntriesentries").replace(b"TABLE ent", b"TXBLE ent"))
    with Cache(f"disk://{directory}") as cache:
        assert cache.get_or_compute("k", lambda: 2) == 2
        assert cache.get("k") == 2
    assert any("damaged" in message and "moved to" in message for message in caplog.messages)


def test_damage_is_healed_once(tmp_path: Path) -> None:
    """If several processes find the same damage, they move the file aside once and share one new file."""
    engines = [DiskEngine(tmp_path / "cache") for _ in range(4)]
    put(engines[0])
    file = database_of(engines[0])
    garbage(file)
    for path in file.parent.glob("*-wal"):
        garbage(path)
    for engine in engines:
        tries(lambda engine=engine: put(engine, b"new"), 2)  # type: ignore[misc]
    assert len({database_of(engine) for engine in engines}) == 1
    assert len(list((tmp_path / "cache").glob("*.damaged"))) == 1
    assert [get(engine) for engine in engines] == [b"new"] * 4
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("damage", [garbage, truncated, emptied])
def test_damaged_stamps(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """A damaged stamps file is replaced. The use of a mapping of a file that is too short would be a SIGBUS."""
    engine = DiskEngine(tmp_path / "cache")
    put(engine)
    engine.close()
    (stamps,) = engine.directory.glob("stamps*")
    damage(stamps)
    engine = DiskEngine(tmp_path / "cache")
    put(engine, b"new")
    assert get(engine) == b"new"
    engine.close()


def test_locked_by_another_program(engine: DiskEngine) -> None:
    """If a sqlite3 shell keeps a transaction open, writers get an error and do not hang, and reads work."""
    put(engine)
    shell = sqlite3.connect(database_of(engine), isolation_level=None)
    shell.execute("BEGIN IMMEDIATE")
    with pytest.raises(EngineError, match="locked"):
        put(engine, b"new")
    assert get(engine) == b"value"
    shell.execute("ROLLBACK")
    shell.close()
    put(engine, b"new")


def test_a_write_that_a_signal_interrupted_keeps_nobody_waiting(engine: DiskEngine) -> None:
    """A write that a signal handler interrupted does not block other writes, even while its traceback is kept."""
    interrupted = engine._rows.database.writing()
    interrupted.__enter__()
    put(engine, b"new")
    assert get(engine) == b"new"
    with pytest.raises(EngineError):  # the interrupted write was not stored, and says so if it goes on
        interrupted.__exit__(None, None, None)


# -- full, read-only ------------------------------------------------------------------------------------------------


def fill_a_small_file_limit(pipe: Connection, directory: Path) -> None:
    """A disk that has room for 2 MB more."""
    import resource
    import signal

    engine = DiskEngine(directory)
    put(engine, b"before", "before")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
    said = tries(lambda: [put(engine, os.urandom(100_000), f"k{number}") for number in range(50)])
    read = get(engine, "before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    put(engine, b"after")
    pipe.send((said, read, get(engine)))


def test_no_room(tmp_path: Path) -> None:
    """On a full disk writes are refused, reads work, and writes work again when there is room."""
    with other(fill_a_small_file_limit, tmp_path / "cache") as process:
        said, read, after = process.hear()
    assert [refused for _, refused in said] == [True] * 3  # refused, but no outage: each hit would end it
    assert read == b"before"
    assert after == b"after"


SMALL = """
import os, sys, time
from stampede import Cache

end = time.monotonic() + 60
with Cache(f"disk://{sys.argv[1]}/cache", strict=True) as cache:
    for number in range(600):
        cache.set(last := f"k{number}", os.urandom(20_000))
        disk = os.statvfs(sys.argv[1])
        assert disk.f_bavail * disk.f_frsize > 1 << 20, "no room for a log that is emptied late"
    while not cache.get(last):
        assert time.monotonic() < end
    assert cache.invalidate(last)
"""


def test_a_file_system_smaller_than_max_bytes(tmp_path: Path) -> None:
    """A cache on a file system smaller than max_bytes keeps working, and never fills it."""
    mount = f"mount -t tmpfs -o size=8M tmpfs {tmp_path}"
    in_private = ["unshare", "--mount", "--map-root-user", "sh", "-c"]  # so that no other process sees the mount
    if shutil.which("unshare") is None or subprocess.run([*in_private, mount], capture_output=True).returncode:
        pytest.skip("this process may not mount a file system of its own")
    ran = subprocess.run([*in_private, f'{mount} && exec "$0" -c "$1" "$2"', sys.executable, SMALL, tmp_path])
    assert ran.returncode == 0


def use_without_rights(pipe: Connection, directory: Path) -> None:
    engine = DiskEngine(directory)
    put(engine, b"before")
    if os.getuid() == 0:  # no permission stops root
        for path in [directory, *directory.rglob("*")]:
            os.chmod(path, 0o555 if path.is_dir() else 0o444)
        os.chmod(directory.parent, 0o755)
        engine.close()
        os.setuid(65534)
    else:
        for path in [*directory.rglob("*"), directory]:
            os.chmod(path, 0o555 if path.is_dir() else 0o444)
        engine.close()
    try:
        put(DiskEngine(directory))
        pipe.send("written")
    except EngineError as error:
        pipe.send(str(error))


def test_read_only(tmp_path: Path) -> None:
    """If the directory can't be written, the error names the directory and says what to do."""
    for path in tmp_path.parents:
        if path.owner() == "root" and path.stat().st_mode & 0o777 == 0o700:
            os.chmod(path, 0o711)  # pytest's own directories, which keep others out
    directory = tmp_path / "cache"
    with other(use_without_rights, directory) as process:
        said = process.hear()
    assert str(directory) in said
    assert "give a directory" in said


@pytest.mark.parametrize("path", ["/proc/stampede/cache", "/dev/null/cache", "/dev/null"])
def test_impossible_directory(path: str) -> None:
    """If the directory can't be made, the error names the directory, and not a file of SQLite."""
    with pytest.raises(EngineError, match=path):
        get(DiskEngine(path))


def test_options() -> None:
    """A misspelt option, a wrong value, or a wrong path in a URL is refused."""
    for url, what in [
        ("disk:///tmp/x?max_byte=10", "max_bytes"),
        ("disk:///tmp/x?max_bytes=ten", "whole number"),
        ("disk:///tmp/x?max_bytes=10", "1048576"),
        ("disk:///tmp/x?timeout=0", "timeout"),
        ("disk:///", "directory"),
        ("disk://", "directory"),
        ("disk://var/cache", "write disk:///var/cache .* or disk://./var/cache "),
        ("file://var", "write file:///var .* or file://./var "),
    ]:
        with pytest.raises(OptionError, match=what):
            open_engine(url)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, `~` and escapes in a URL give the right directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url, path in [
        (f"disk://{tmp_path}/a%20b", tmp_path / "a b"),
        ("disk://./here/there", tmp_path / "here" / "there"),
        ("disk://~/c", tmp_path / "home" / "c"),
        ("disk:///~/c", tmp_path / "home" / "c"),
    ]:
        engine = open_engine(url)
        assert isinstance(engine, DiskEngine)
        assert engine.directory == path
        engine.close()


def test_a_directory_that_has_become_a_file_can_be_closed(tmp_path: Path) -> None:
    """A cache whose directory was replaced by a file can be closed without a NotADirectoryError."""
    directory = tmp_path / "cache"
    cache = Cache(f"disk://{directory}")
    cache.set("k", 1)
    with cache.lock("l"):
        pass
    shutil.rmtree(directory)
    directory.write_text("a file")
    cache.close()


def test_closed(engine: DiskEngine) -> None:
    """A closed engine can be closed again, and does not open again by itself."""
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        get(engine)


# -- bounds ---------------------------------------------------------------------------------------------------------


def test_bounded_by_bytes(tmp_path: Path) -> None:
    """The files remain near max_bytes, and a value in use remains while unused ones are evicted."""
    engine = DiskEngine(tmp_path / "cache", max_bytes=4 << 20)
    for number in range(3000):
        put(engine, os.urandom(5000), f"k{number}")
        if number % 10 == 0:
            put(engine, b"hot", "hot") if get(engine, "hot") is None else None
        if number == 100:
            put(engine, b"used", "used")
        get(engine, "used")
    engine.close()
    size = sum(path.stat().st_size for path in engine.directory.glob("*.sqlite*"))
    assert size < 6 << 20
    engine = DiskEngine(tmp_path / "cache", max_bytes=4 << 20)
    assert get(engine, "used") == b"used"
    assert get(engine, "k0") is None
    engine.close()


def test_what_has_gone_makes_room(engine: DiskEngine) -> None:
    """Expired values are removed to make room, and do not stay on the disk until it is full."""
    for number in range(50):
        put(engine, b"x", f"k{number}", fresh=-1.0)
    for number in range(20):
        put(engine, b"x", f"l{number}")
    with engine._rows.database.reading() as (_, connection):
        (count,) = connection.execute("SELECT count(*) FROM entries").fetchone()
    assert count <= 30


def test_larger_than_the_bound(tmp_path: Path) -> None:
    """A value larger than max_bytes is refused, and does not evict the others."""
    engine = DiskEngine(tmp_path / "cache", max_bytes=1 << 20)
    put(engine)
    with pytest.raises(TooLarge, match=KEY):
        put(engine, bytes(2 << 20))
    assert get(engine) == b"value"
    engine.close()


# -- boots ----------------------------------------------------------------------------------------------------------


class Machine:
    """A machine with a clock since its boot, a time of day, and an id of its boot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.wall = 1_000_000.0, 1_800_000_000.0
        self._patch = monkeypatch
        monkeypatch.setattr("stampede.engines.disk.rows.clock", lambda: self.now)
        monkeypatch.setattr(boot_clock, "clock", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.wall)
        self.boot("first")

    def boot(self, name: str, now: float | None = None) -> None:
        self._patch.setattr(boot_clock, "boot", name)
        self.now = self.now if now is None else now

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


def test_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot values keep the rest of their time, although the clock starts again. Leases have ended."""
    machine = Machine(monkeypatch)
    engine = DiskEngine(tmp_path / "cache")
    put(engine, fresh=600.0)
    put(engine, b"old", "old", fresh=100.0)
    token = new_id()
    assert isinstance(claim(engine, token, "l"), Granted)
    engine.close()
    machine.passes(200.0)
    machine.boot("second", now=5.0)
    engine = DiskEngine(tmp_path / "cache")
    assert abs(found(engine).entry.fresh - 400.0) < 1.0
    assert get(engine, "old") is None
    assert isinstance(claim(engine, key="l"), Granted)
    engine.close()


def test_reboot_into_the_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a machine boots with its clock in 1970, values count as expired. They would be fresh for decades otherwise."""
    machine = Machine(monkeypatch)
    engine = DiskEngine(tmp_path / "cache")
    put(engine)
    engine.close()
    machine.wall = 0.0
    machine.boot("second", now=5.0)
    engine = DiskEngine(tmp_path / "cache")
    assert get(engine) is None
    engine.close()


def test_steps_of_the_time_of_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the time of day does not change the age of values."""
    machine = Machine(monkeypatch)
    engine = DiskEngine(tmp_path / "cache")
    put(engine)
    for step in (-1e9, 2e9):
        machine.wall += step
        peer = DiskEngine(tmp_path / "cache")
        assert abs(found(peer).entry.fresh - 600.0) < 1.0
        peer.close()
    engine.close()
