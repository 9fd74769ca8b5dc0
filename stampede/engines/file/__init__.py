"""The file engine: locks by the kernel. Each name has a file, which is locked (flock) while the lock is held."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any

from stampede.engines.file.limits import LimitFiles
from stampede.engines.kit.flock import dead, is_there, pid_here, process, shut, try_lock, unlock
from stampede.engines.kit.url import options_of, path_of
from stampede.engines.kit.wake import LOOK, SINGLE, WakeFiles
from stampede.engines.kit.whereabouts import here, parts_of
from stampede.errors import EngineClosed, EngineError
from stampede.model.ports import Busy, Engine, Granted, Held, Side
from stampede.runtime import forks
from stampede.runtime.chance import uniform
from stampede.runtime.colour import BLOCKING, SUSPENDING, Colour
from stampede.runtime.watch import Watch

__all__ = ["FileEngine", "default_directory", "from_url"]

SAFETY = 1.0  # seconds between two looks of a waiter that was not woken

_ends = Watch("stampede-ends")


class FileEngine(Engine):
    """Locks among the processes of one machine that open the same directory. There is no server and no database. The
    kernel releases a lock when the holder's process ends, however it ends. If a lease is not renewed, the holder's own
    process releases the lock, since no other process can unlock it. So a frozen process (SIGSTOP, a debugger) keeps its
    locks beyond their leases, until it resumes or is killed. If that matters, use disk://. The files are never removed:
    each one stores the last fence of its name."""

    scheme = "file"
    pushes = True
    breaks = False

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = default_directory() if directory is None else Path(directory).expanduser().absolute()
        files = self._files = _LockFiles(self.directory)
        files.prepare()
        self._limits = [LimitFiles(self.directory, colour) for colour in (BLOCKING, SUSPENDING)]
        locks, alocks = _Locks(files, BLOCKING), _Locks(files, SUSPENDING)
        self.blocking = Side(locks=locks, holds=locks, limits=self._limits[0])
        self.suspending = Side(locks=alocks, holds=alocks, limits=self._limits[1])
        self._closing = forks.closing(self, files.close)
        forks.in_child(files.start_again)

    def close(self) -> None:
        for each in self._limits:
            each.closed = True
        self._closing()

    def ping(self) -> float:
        start = time.perf_counter()
        self._files.prepare()
        return time.perf_counter() - start


def from_url(url: str, **options: Any) -> FileEngine:
    """Open `file:///run/lock/app`, `file://~/locks` in the home, or `file://` for this user's default directory."""
    options_of(url, options, {})
    path = path_of(url, _EXAMPLE)
    return FileEngine(path) if path.strip("/") else FileEngine()


def check_url(url: str) -> None:
    """Raise OptionError for a wrong URL; open nothing."""
    options_of(url, {}, {})
    path_of(url, _EXAMPLE)


_EXAMPLE = "file:///run/app, or file:// alone"


def default_directory() -> Path:
    """Return the directory for this user's locks, which is the same for all processes of the user; make it if needed.
    It is not under $XDG_RUNTIME_DIR: a cron job or a service has none, and would use other locks than a terminal."""
    path = Path(tempfile.gettempdir()) / f"stampede-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise EngineError(f"can't make {path} for locks: {error}: give a directory, as in file:///run/app") from error
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    if not private:
        raise EngineError(f"{path} is not a directory that only you can use: remove it, or give one of your own")
    return path


# -- one name, one file ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LockRecord:
    """The content of a lock's file: callers that are refused read the holder, and the next holder reads the fence."""

    fence: int = 0
    token: bytes = b""
    ends: float = 0.0
    holder: str = "-"

    def write(self, fd: int, name: str = "") -> None:
        text = f"{self.fence} {self.token.hex() or '-'} {self.ends!r} {self.holder}\n"
        os.pwrite(fd, text.encode().ljust(_LENGTH) + name.encode("utf-8", "surrogatepass"), 0)

    @classmethod
    def read(cls, fd: int) -> _LockRecord:
        """Return the record in a file, or an empty one if the file contains anything else."""
        try:
            fence, token, ends, holder = os.pread(fd, _LENGTH, 0).decode().split()
            return cls(int(fence), bytes.fromhex(token.strip("-")), float(ends), holder)
        except ValueError:
            return cls()

    @property
    def is_held(self) -> bool:
        """Whether the holder still has the lock: a live process has it even after its lease, if it could not unlock."""
        if not self.token or dead(self.holder):
            return False
        return pid_here(self.holder) is not None or self.ends > time.monotonic()


_LENGTH = 256
"""Bytes of a record. The lock's name follows it in the file, for people."""


class _HeldFile:
    """The locked file of a lock that this process holds. If the last reference is lost, it is closed and unlocked."""

    def __init__(self, path: str, token: bytes) -> None:
        self.path = path
        self.record = _LockRecord(0, token, 0.0, process())
        self.fd = -1
        self.fd = os.open(path, _FLAGS, 0o600)

    @property
    def is_in_place(self) -> bool:
        """Whether the locked file is still the one of this path, which other processes would lock."""
        return is_there(self.fd, self.path)

    @property
    def is_valid(self) -> bool:
        return self.record.ends > time.monotonic() and self.is_in_place

    def free(self) -> None:
        """Unlock the file. Closing it is not enough: a child that is just being started may have it open, too."""
        with suppress(OSError):  # the disk is full: release the lock all the same
            _LockRecord(self.record.fence).write(self.fd)
        unlock(self.fd)
        self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        shut(fd)

    __del__ = close


_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class _LockFiles:
    """The lock files of one directory, and those that this process holds."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._folder = directory, str(directory)
        self.wake_files = WakeFiles(directory, dead)
        self.closed = False
        self._begin()

    def _begin(self) -> None:
        self.held: dict[tuple[str, bytes], _HeldFile] = {}
        self.lock = threading.RLock()  # re-entrant: the handler of a signal may ask for a lock while this is held
        self._alarm = inf  # when `look` is called next

    def prepare(self) -> None:
        """Make the directory if needed, and raise EngineError if files can't be made in it."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.directory / f"probe-{os.urandom(6).hex()}"
            os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            probe.unlink()
        except OSError as error:
            raise self.trouble(error) from error

    def take(self, name: str, token: bytes) -> _HeldFile | Busy:
        """Lock the file of a name, or return what is known of its holder."""
        path, _ = self.file(name)
        while True:
            try:
                held = _HeldFile(path, token)
            except FileNotFoundError:
                self.prepare()
                held = _HeldFile(path, token)
            if not try_lock(held.fd):
                return _busy(_LockRecord.read(held.fd))
            if held.is_in_place:
                fence = _LockRecord.read(held.fd).fence + 1
                held.record.fence = max(fence, int(time.time() * 1000))  # so that it grows even if files were lost
                self.held[name, token] = held
                return held
            held.close()  # the file was removed before we locked it: other processes lock a new one

    def extend(self, held: _HeldFile, lease: float, name: str = "") -> None:
        """Begin the lease again from now. The write also shows cleaners of old files that this one is in use."""
        held.record.ends = time.monotonic() + lease
        held.record.write(held.fd, name)
        if held.record.ends < self._alarm and _ends.add(self, held.record.ends):
            self._alarm = held.record.ends

    def drop(self, name: str, token: bytes) -> None:
        held = self.held.pop((name, token), None)
        if held is not None:
            held.free()

    def look(self, now: float) -> float | None:
        """Release the locks whose leases have ended, as no other process can. Return when to look again."""
        with self.lock:
            expired = [key for key, held in self.held.items() if held.record.ends <= now]
            for key in expired:
                self.drop(*key)
            self._alarm = min((held.record.ends for held in self.held.values()), default=inf)
            alarm = self._alarm
        self._ring_after(expired)
        return alarm if alarm < inf else None

    def _ring_after(self, released: list[tuple[str, bytes]]) -> None:
        for name, _ in released:
            self.wake_files.ring(self.file(name)[1])

    def file(self, name: str) -> tuple[str, int]:
        """Return the path for a name, and the number of its bells."""
        digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return f"{self._folder}/{digest.hex()}.lock", SINGLE + int.from_bytes(digest[:7], "little")

    def trouble(self, error: OSError) -> EngineError:
        return EngineError(f"can't lock in {self.directory}: {error}: give a directory that can be made and written")

    def close(self) -> None:
        with self.lock:
            self.closed = True
            released = list(self.held)
            for key in released:
                self.drop(*key)
        self._ring_after(released)
        self.wake_files.close()

    def start_again(self) -> None:
        """Close the files in a forked child, without unlocking: the locks are the parent's, and would be lost there."""
        for held in self.held.values():
            held.close()
        self._begin()
        self.wake_files.start_again()


class _Locks:
    """`Locks` and `Holds` of one colour. Only `wait` suspends."""

    def __init__(self, files: _LockFiles, colour: Colour) -> None:
        self._files = files
        self._colour = colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        files = self._files
        try:
            with files.lock:
                if files.closed:
                    raise EngineClosed(f"file://{files.directory}")
                held = files.held.get((name, token))
                if held is not None and not held.is_valid:
                    files.drop(name, token)
                    held = None
                taken = held or files.take(name, token)
                if isinstance(taken, Busy):
                    return taken
                files.extend(taken, lease, name if held is None else "")
                return Granted(fence=taken.record.fence)
        except OSError as error:
            raise files.trouble(error) from error

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        files = self._files
        try:
            with files.lock:
                held = files.held.get((name, token))
                if held is None or not held.is_valid:
                    return False
                files.extend(held, lease)
                return True
        except OSError as error:
            raise files.trouble(error) from error

    async def release(self, name: str, token: bytes) -> bool:
        files = self._files
        with files.lock:
            held = files.held.get((name, token))
            was_valid = held is not None and held.is_valid
            files.drop(name, token)
        if held is not None:
            files.wake_files.ring(files.file(name)[1])
        return was_valid

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        files = self._files
        record = _record_of(files.file(name)[0])
        return [(record.token, max(record.ends - time.monotonic(), 0.0))] if record.is_held else []

    async def held(self, prefix: str = "") -> list[Held]:
        files = self._files
        found = []
        for path in sorted(files.directory.glob("*.lock")):
            record, name = _record_of(path), _name_in(path)
            if not record.is_held or not name.startswith(prefix):
                continue
            host, left = parts_of(here())[0], max(record.ends - time.monotonic(), 0.0)
            found.append(Held(name, host, pid_here(record.holder), None, record.fence, None, None, left, True, None))
        return found

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        """Wait for the release or for the holder's death. The bell is listened to before the file is read: a release in
        between rings it."""
        files = self._files
        path, number = files.file(name)
        bell, is_woken = files.wake_files.listen(number)  # False: no process can wake us
        try:
            record = _record_of(path)
            if record.token != busy.token:
                return
            pid = pid_here(record.holder)
            if pid != os.getpid():
                is_woken = is_woken and pid is not None  # the death of a process in another container is not seen
                files.wake_files.watch(record.holder, bell)
            longest = SAFETY * uniform(0.9, 1.1) if is_woken else LOOK
            await self._colour.park(bell, min(timeout, longest, max(record.ends - time.monotonic(), LOOK)))
        finally:
            files.wake_files.forget(number, bell)


def _busy(record: _LockRecord) -> Busy:
    """Return what a refused caller waits for. A locked file without a record is another program's: look again soon."""
    return Busy(record.token, max(record.ends - time.monotonic(), LOOK) if record.token else LOOK)


def _record_of(path: str | Path) -> _LockRecord:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return _LockRecord()
    try:
        return _LockRecord.read(fd)
    finally:
        os.close(fd)


def _name_in(path: Path) -> str:
    try:
        return path.read_bytes()[_LENGTH:].decode("utf-8", "surrogatepass")
    except (OSError, ValueError):  # the file was removed, or is another program's
        return ""
