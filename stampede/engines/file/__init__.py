"""Locks by the kernel: a file per name, locked (flock) while its lock is held."""

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
from random import uniform
from typing import Any

from stampede.engines.file.limits import LimitFiles
from stampede.engines.kit.flock import dead, is_there, pid_here, process, shut, try_lock, unlock
from stampede.engines.kit.url import options_of, path_of
from stampede.engines.kit.wake import LOOK, SINGLE, WakeFiles
from stampede.engines.kit.whereabouts import here, parts_of
from stampede.errors import EngineClosed, EngineError
from stampede.model.ports import Busy, Engine, Granted, Held, Side
from stampede.runtime import forks
from stampede.runtime.colour import BLOCKING, SUSPENDING, Colour
from stampede.runtime.watch import Watch

__all__ = ["FileEngine", "default_directory", "from_url"]

SAFETY = 1.0  # seconds between two looks of a waiter that nobody woke

_ends = Watch("stampede-ends")


class FileEngine(Engine):
    """Locks among the processes of this machine that open the same directory, with no server and no database.

    The kernel frees a lock when its holder's process ends, however it ends. A lease that isn't renewed is ended by
    the holder's own process; so a process that is frozen (SIGSTOP, a debugger) keeps its locks until it goes on or
    is killed, whatever their leases: nobody else can unlock a kernel's lock. Where that matters, use disk://.
    The files stay: a name's file remembers the last fence.
    """

    scheme = "file"
    pushes = True
    breaks = False

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = default_directory() if directory is None else Path(directory).expanduser().absolute()
        names = self._names = _Names(self.directory)
        names.prepare()
        self._limits = [LimitFiles(self.directory, colour) for colour in (BLOCKING, SUSPENDING)]
        locks, alocks = _Locks(names, BLOCKING), _Locks(names, SUSPENDING)
        self.blocking = Side(locks=locks, holds=locks, limits=self._limits[0])
        self.suspending = Side(locks=alocks, holds=alocks, limits=self._limits[1])
        self._closing = forks.closing(self, names.close)
        forks.in_child(names.start_again)

    def close(self) -> None:
        for each in self._limits:
            each.closed = True
        self._closing()

    def ping(self) -> float:
        start = time.perf_counter()
        self._names.prepare()
        return time.perf_counter() - start


def from_url(url: str, **options: Any) -> FileEngine:
    """`file:///run/lock/app`; `file://~/locks` is in the home; `file://` alone is this user's own directory."""
    options_of(url, options, {})
    path = path_of(url, _EXAMPLE)
    return FileEngine(path) if path.strip("/") else FileEngine()


def check_url(url: str) -> None:
    options_of(url, {}, {})
    path_of(url, _EXAMPLE)


_EXAMPLE = "file:///run/app, or file:// alone"


def default_directory() -> Path:
    """A directory for this user's locks that all processes of the user agree on, made if need be.

    Not under $XDG_RUNTIME_DIR: a cron job or a service has none, and would not exclude the one in a terminal.
    """
    path = Path(tempfile.gettempdir()) / f"stampede-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise EngineError(f"can't make {path} for locks: {error}: give a directory, as in file:///run/app") from error
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    if not mine:
        raise EngineError(f"{path} is not a directory that only you can use: remove it, or give one of your own")
    return path


# -- one name, one file ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Record:
    """What a lock's file says: to those who can't have it, and to the next who can."""

    fence: int = 0
    token: bytes = b""
    ends: float = 0.0
    holder: str = "-"

    def write(self, fd: int, name: str = "") -> None:
        text = f"{self.fence} {self.token.hex() or '-'} {self.ends!r} {self.holder}\n"
        os.pwrite(fd, text.encode().ljust(_LENGTH) + name.encode("utf-8", "surrogatepass"), 0)

    @classmethod
    def read(cls, fd: int) -> _Record:
        """What the file says; nothing, if that is no record."""
        try:
            fence, token, ends, holder = os.pread(fd, _LENGTH, 0).decode().split()
            return cls(int(fence), bytes.fromhex(token.strip("-")), float(ends), holder)
        except ValueError:
            return cls()

    @property
    def stands(self) -> bool:
        """Its holder lives, as far as can be seen from here; one that is frozen has it also beyond its end."""
        if not self.token or dead(self.holder):
            return False
        return pid_here(self.holder) is not None or self.ends > time.monotonic()


_LENGTH = 256
"""Bytes of a record. Behind it stands the lock's name, for people."""


class _Held:
    """A lock that this process has. The kernel unlocks it when this is closed with the last reference to it."""

    def __init__(self, path: str, token: bytes) -> None:
        self.path = path
        self.record = _Record(0, token, 0.0, process())
        self.fd = -1
        self.fd = os.open(path, _FLAGS, 0o600)

    @property
    def is_in_place(self) -> bool:
        """Whether it locks the file that others would lock."""
        return is_there(self.fd, self.path)

    @property
    def stands(self) -> bool:
        return self.record.ends > time.monotonic() and self.is_in_place

    def free(self) -> None:
        """Let others have it. Not only by closing it: a child being started may have the file open, too."""
        with suppress(OSError):  # a full disk: the lock goes all the same
            _Record(self.record.fence).write(self.fd)
        unlock(self.fd)
        self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        shut(fd)

    __del__ = close


_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class _Names:
    """The locks of one directory, for one process."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._folder = directory, str(directory)
        self.wake_files = WakeFiles(directory, dead)
        self.closed = False
        self._begin()

    def _begin(self) -> None:
        self.held: dict[tuple[str, bytes], _Held] = {}
        self.lock = threading.RLock()  # a signal's handler may want a lock in the middle of this
        self._alarm = inf  # when `look` is called

    def prepare(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.directory / f"probe-{os.urandom(6).hex()}"
            os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            probe.unlink()
        except OSError as error:
            raise self.trouble(error) from error

    def take(self, name: str, token: bytes) -> _Held | Busy:
        path, _ = self.file(name)
        while True:
            try:
                held = _Held(path, token)
            except FileNotFoundError:
                self.prepare()
                held = _Held(path, token)
            if not try_lock(held.fd):
                return _busy(_Record.read(held.fd))
            if held.is_in_place:
                fence = _Record.read(held.fd).fence + 1
                held.record.fence = max(fence, int(time.time() * 1000))  # grows also where files were lost
                self.held[name, token] = held
                return held
            held.close()  # somebody removed the file before we had it: others lock another one

    def extend(self, held: _Held, lease: float, name: str = "") -> None:
        """Let it stand from now on. Writing also tells cleaners of old files that this one is in use."""
        held.record.ends = time.monotonic() + lease
        held.record.write(held.fd, name)
        if held.record.ends < self._alarm and _ends.add(self, held.record.ends):
            self._alarm = held.record.ends

    def drop(self, name: str, token: bytes) -> None:
        held = self.held.pop((name, token), None)
        if held is not None:
            held.free()

    def look(self, now: float) -> float | None:
        """End what isn't renewed: nobody else can. Return when to look again."""
        with self.lock:
            over = [key for key, held in self.held.items() if held.record.ends <= now]
            for key in over:
                self.drop(*key)
            self._alarm = min((held.record.ends for held in self.held.values()), default=inf)
            alarm = self._alarm
        self._ring_after(over)
        return alarm if alarm < inf else None

    def _ring_after(self, over: list[tuple[str, bytes]]) -> None:
        for name, _ in over:
            self.wake_files.ring(self.file(name)[1])

    def file(self, name: str) -> tuple[str, int]:
        """The file of a name, and the number that its bells go by."""
        digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return f"{self._folder}/{digest.hex()}.lock", SINGLE + int.from_bytes(digest[:7], "little")

    def trouble(self, error: OSError) -> EngineError:
        return EngineError(f"can't lock in {self.directory}: {error}: give a directory that can be made and written")

    def close(self) -> None:
        with self.lock:
            self.closed = True
            mine = list(self.held)
            for key in mine:
                self.drop(*key)
        self._ring_after(mine)
        self.wake_files.close()

    def start_again(self) -> None:
        """In a forked child: the locks are the parent's; unlocking here would unlock them there."""
        for held in self.held.values():
            held.close()
        self._begin()
        self.wake_files.start_again()


class _Locks:
    """`Locks` and `Holds` of one colour. Only `wait` suspends."""

    def __init__(self, names: _Names, colour: Colour) -> None:
        self._names = names
        self._colour = colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        names = self._names
        try:
            with names.lock:
                if names.closed:
                    raise EngineClosed(f"file://{names.directory}")
                mine = names.held.get((name, token))
                if mine is not None and not mine.stands:
                    names.drop(name, token)
                    mine = None
                taken = mine or names.take(name, token)
                if isinstance(taken, Busy):
                    return taken
                names.extend(taken, lease, name if mine is None else "")
                return Granted(fence=taken.record.fence)
        except OSError as error:
            raise names.trouble(error) from error

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        names = self._names
        try:
            with names.lock:
                held = names.held.get((name, token))
                if held is None or not held.stands:
                    return False
                names.extend(held, lease)
                return True
        except OSError as error:
            raise names.trouble(error) from error

    async def release(self, name: str, token: bytes) -> bool:
        names = self._names
        with names.lock:
            held = names.held.get((name, token))
            stood = held is not None and held.stands
            names.drop(name, token)
        if held is not None:
            names.wake_files.ring(names.file(name)[1])
        return stood

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        names = self._names
        record = _record_of(names.file(name)[0])
        return [(record.token, max(record.ends - time.monotonic(), 0.0))] if record.stands else []

    async def held(self, prefix: str = "") -> list[Held]:
        names = self._names
        found = []
        for path in sorted(names.directory.glob("*.lock")):
            record, name = _record_of(path), _name_in(path)
            if not record.stands or not name.startswith(prefix):
                continue
            host, left = parts_of(here())[0], max(record.ends - time.monotonic(), 0.0)
            found.append(Held(name, host, pid_here(record.holder), None, record.fence, None, None, left, True, None))
        return found

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        """Until the release, or the holder's death. The bell hangs before the file is read: nothing falls between."""
        names = self._names
        path, number = names.file(name)
        bell, told = names.wake_files.listen(number)
        try:
            record = _record_of(path)
            if record.token != busy.token:
                return
            pid = pid_here(record.holder)
            if pid != os.getpid():
                told = told and pid is not None
                names.wake_files.watch(record.holder, bell)
            longest = SAFETY * uniform(0.9, 1.1) if told else LOOK
            await self._colour.park(bell, min(timeout, longest, max(record.ends - time.monotonic(), LOOK)))
        finally:
            names.wake_files.forget(number, bell)


def _busy(record: _Record) -> Busy:
    """A lock without a record is another program's: there is nothing to go by but looking again."""
    return Busy(record.token, max(record.ends - time.monotonic(), LOOK) if record.token else LOOK)


def _record_of(path: str | Path) -> _Record:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return _Record()
    try:
        return _Record.read(fd)
    finally:
        os.close(fd)


def _name_in(path: Path) -> str:
    try:
        return path.read_bytes()[_LENGTH:].decode("utf-8", "surrogatepass")
    except (OSError, ValueError):  # it is gone, or another program's
        return ""
