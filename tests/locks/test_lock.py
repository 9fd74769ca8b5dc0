"""`Lock` and `try_lock` over every engine of one machine: exclusion, handing over, loss and waiting."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from herd import PATIENCE, Herd, until
from memcached_server import shared_memcached
from proxy import Proxy
from servers import shared_redis

import stampede
from stampede import EngineError, Lock, LockLost, LockTimeout, OptionError, try_lock
from stampede.engines import open_engine
from stampede.leases.keeper import keeper
from stampede.locks.holding import Holding
from stampede.model.ports import Engine
from stampede.runtime.colour import run_blocking
from stampede.testing import isolated

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated():
        yield


def _url(kind: str, directory: Path) -> str:
    return {"memory": "memory://", "disk": f"disk://{directory}/d?timeout=20", "file": f"file://{directory}/f"}[kind]


@pytest.fixture(params=["memory", "disk"])
def on(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return _url(request.param, tmp_path)


@pytest.fixture(params=["disk", "file"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Engines that other processes can use."""
    return _url(request.param, tmp_path)


def free(name: str, on: str) -> bool:
    """Return whether another caller could take the lock now."""
    with try_lock(name, on=on) as lock:
        return bool(lock)


# -- one holder -------------------------------------------------------------------------------------------------------


def test_a_lock_is_held_in_its_block(on: str) -> None:
    """A lock is held in its block, and free after it."""
    lock = Lock("a", on=on)
    assert not lock.held
    assert lock.token is None
    assert lock.fence is None
    with lock as holding:
        assert holding
        assert lock.held
        assert lock
        assert not lock.lost
        assert lock.token == holding.token
        assert lock.fence == holding.fence
        assert isinstance(lock.fence, int)
        assert not free("a", on)
        assert free("b", on)
    assert not lock.held
    assert lock.token is None
    assert free("a", on)


def test_a_lock_in_a_loop(on: str) -> None:
    """`async with` takes and releases a lock like `with`, and both exclude each other."""

    async def main() -> None:
        lock = Lock("a", on=on, wait=0)
        async with lock:
            assert lock.held
            assert not free("a", on)
            with pytest.raises(LockTimeout):
                async with Lock("a", on=on, wait=0):
                    pass
        assert not lock.held
        async with try_lock("a", on=on) as attempt:
            assert attempt

    asyncio.run(main())
    assert free("a", on)


def test_plain_verbs(on: str) -> None:
    """`acquire` returns whether the lock was taken, and `release` gives it back. Only its holder can release it."""
    first, other = Lock("a", on=on), Lock("a", on=on)
    assert first.acquire()
    assert not other.acquire(wait=0)
    first.release()
    assert other.acquire(wait=0)
    other.release()
    with pytest.raises(LockLost, match="'a' is not held through this object"):
        other.release()


def test_async_verbs(on: str) -> None:
    """`aacquire` and `arelease` do what `acquire` and `release` do."""

    async def main() -> None:
        first, other = Lock("a", on=on), Lock("a", on=on)
        assert await first.aacquire()
        assert not await other.aacquire(wait=0)
        await first.arelease()
        assert await other.aacquire(wait=0)
        await other.arelease()

    asyncio.run(main())


def test_fences_grow(on: str) -> None:
    """Fences grow. By the highest one that it has seen, a resource can refuse a holder that resumed too late."""
    lock, fences = Lock("a", on=on), []
    for _ in range(5):
        with lock:
            fences.append(lock.fence)
    assert fences == sorted(set(fences))


def test_tokens_differ(on: str) -> None:
    """Each hold has a new token. Otherwise one holder could release the lock of another."""
    lock, tokens = Lock("a", on=on), set()
    for _ in range(5):
        with lock:
            tokens.add(lock.token)
    assert len(tokens) == 5


def test_a_lock_is_released_on_an_exception(on: str) -> None:
    """An exception leaves the block, and the lock is released."""
    for kind in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(kind), Lock("a", on=on):
            raise kind
        assert free("a", on)


def test_a_lock_may_be_released_inside_its_block(on: str) -> None:
    """A lock may be released inside its block. The end of the block raises no error then."""
    with Lock("a", on=on) as lock:
        lock.release()
        assert free("a", on)


def test_the_same_caller_twice(on: str) -> None:
    """A lock is not re-entrant, and the error says so."""
    lock = Lock("a", on=on, wait=0)
    with lock:
        assert not lock.acquire()
        with pytest.raises(LockTimeout, match=r"this Lock object already holds 'a', and is not re-entrant"), lock:
            pass
        assert lock.held
        assert not free("a", on)
    assert free("a", on)


def test_names_are_told_apart(on: str) -> None:
    """Names that look alike, or like paths, are different locks."""
    names = ["a", "A", "a ", "../a", "a/b", "a\x00", "é", "e\u0301", "x" * 5000]
    held = [Lock(name, on=on, wait=0) for name in names]
    for lock in held:
        assert lock.acquire()
    for lock in held:
        lock.release()


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_wait_runs_out(on: str) -> None:
    """After `wait`, LockTimeout is raised. It is a TimeoutError."""
    with Lock("a", on=on):
        started = time.monotonic()
        got = Herd(lambda: Lock("a", on=on, wait=0.1).__enter__()).join()
        assert isinstance(got[0], LockTimeout)
        assert isinstance(got[0], TimeoutError)
        assert "'a'" in str(got[0])
        assert 0.1 <= time.monotonic() - started < 5


def test_waiters_get_it_in_turn(on: str) -> None:
    """Eight threads use one lock: only one is inside at a time, and none waits for ever."""
    inside, most, total = 0, 0, 0

    def add() -> None:
        nonlocal inside, most, total
        for _ in range(5):
            with Lock("a", on=on, wait=PATIENCE):
                inside += 1
                most = max(most, inside)
                total += 1
                inside -= 1

    assert Herd(*[add] * 8).join() == [None] * 8
    assert (most, total) == (1, 40)


def test_one_object_for_many_threads(on: str) -> None:
    """Threads that share one lock object exclude each other, and the holder sees that it holds the lock."""
    lock, wrong, inside = Lock("a", on=on, wait=PATIENCE), [], []

    def use() -> None:
        for _ in range(5):
            with lock:
                inside.append(1)
                if len(inside) != 1 or not lock.held:
                    wrong.append(len(inside))
                inside.pop()

    assert Herd(*[use] * 6).join() == [None] * 6
    assert wrong == []
    assert not lock.held


def test_one_object_for_many_tasks(on: str) -> None:
    """Tasks that share one lock object exclude each other."""
    lock, wrong, inside = Lock("a", on=on, wait=PATIENCE), [], []

    async def use() -> None:
        for _ in range(3):
            async with lock:
                inside.append(1)
                await asyncio.sleep(0)
                if len(inside) != 1 or not lock.held:
                    wrong.append(len(inside))
                inside.pop()

    async def main() -> None:
        await asyncio.gather(*[use() for _ in range(6)])

    asyncio.run(main())
    assert wrong == []


def test_a_lock_is_handed_over_between_threads(on: str) -> None:
    """A lock that a request's thread took can be released by the worker that finished the job."""
    lock = Lock("a", on=on)
    lock.acquire()
    assert Herd(lock.release).join() == [None]
    assert not lock.held
    assert free("a", on)


def test_only_the_holder_has_what_acquire_gave(on: str) -> None:
    """The result of a refused `acquire` is false, even if another thread holds the lock through the same object."""
    lock = Lock("a", on=on)
    with lock as mine:
        assert not Herd(lambda: bool(lock.acquire(wait=0))).join()[0]
        assert mine.held


def test_another_thread_does_not_give_away_what_it_merely_waits_for(on: str) -> None:
    """A `with` that times out in another thread does not release the holder's lock."""
    lock = Lock("a", on=on, wait=0)
    with lock:
        (got,) = Herd(lambda: lock.__enter__()).join()
        assert isinstance(got, LockTimeout)
        assert lock.held
        assert not free("a", on)
    assert free("a", on)


@pytest.mark.parametrize("kind", [Lock, try_lock])
def test_who_was_refused_gives_back_nobody_s_lock(on: str, kind: type[Lock]) -> None:
    """The result of a refused `acquire` can't be released: that would end the lock of another thread."""
    lock = kind("a", on=on)
    with lock as mine:
        for refused in (lock.acquire(wait=0), asyncio.run(lock.aacquire(wait=0)), Lock("a", on=on).acquire(wait=0)):
            assert not refused
            with pytest.raises(LockLost, match="refused"):
                refused.release()
            with pytest.raises(LockLost, match="refused"):
                asyncio.run(refused.arelease())
        with pytest.raises(LockLost, match="not held through this object"):
            Lock("a", on=on).release()
        assert mine.held
        assert not free("a", on)


@pytest.mark.parametrize("by", ["holding", "lock"])
def test_what_a_task_of_its_own_has_taken(on: str, by: str) -> None:
    """A lock that an inner task took can be released outside: `asyncio.wait_for` makes such a task on Python 3.11."""

    async def main() -> None:
        lock = Lock("a", on=on)
        holding = await asyncio.create_task(lock.aacquire())
        assert lock.held
        assert not await lock.aacquire(wait=0)
        await (holding if by == "holding" else lock).arelease()
        assert not lock.held

    asyncio.run(main())
    assert free("a", on)


def test_try_lock(on: str) -> None:
    """If the lock is taken, `try_lock` is false at once. The end of its block takes nothing from the holder."""
    with Lock("a", on=on) as lock:
        started = time.monotonic()
        with try_lock("a", on=on) as attempt:
            assert not attempt
            assert not attempt.held
        assert time.monotonic() - started < 5
        assert lock.held
        assert not free("a", on)
    assert free("a", on)


def test_one_try_lock_object_in_two_threads(on: str) -> None:
    """Two threads may share a `try_lock` object: the end of a refused block does not release the lock."""
    lock = try_lock("a", on=on)
    with lock as mine:
        assert mine

        def other() -> bool:
            with lock as theirs:
                return bool(theirs)

        assert Herd(other).join() == [False]
        with lock:  # nor does an inner block of the holder itself
            pass
        assert lock.held
        assert not free("a", on)
    assert free("a", on)


def test_a_cancelled_waiter_leaves_nothing(on: str) -> None:
    """If a waiter is cancelled just as it gets the lock, the lock is given back."""

    async def main() -> None:
        lock = Lock("a", on=on)
        async with lock:
            waiters = [asyncio.create_task(Lock("a", on=on).aacquire()) for _ in range(4)]
            await asyncio.sleep(0.02)
            for waiter in waiters:
                waiter.cancel()
            done = await asyncio.gather(*waiters, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in done)
        async with Lock("a", on=on, wait=5):
            pass

    asyncio.run(main())


# -- loss -------------------------------------------------------------------------------------------------------------


def take_away(engine: Engine, name: str, lock: Lock | Holding) -> None:
    """End the lease without its holder, as an engine that restarts does."""
    assert engine.blocking.locks is not None
    assert lock.token is not None
    run_blocking(engine.blocking.locks.release(name, lock.token))


@pytest.fixture(params=["memory", "disk", "file"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine = open_engine(_url(request.param, tmp_path))
    yield engine
    engine.close()


def test_a_lost_lock_is_told_at_the_end(engine: Engine) -> None:
    """If the lock was lost inside its block, LockLost is raised at the end: another caller may have been inside."""
    with pytest.raises(LockLost, match="'a' ended before its block did"), Lock("a", on=engine) as lock:
        take_away(engine, "a", lock)
    assert not lock.held


def test_the_block_s_own_error_goes_first(engine: Engine) -> None:
    """If the block raises an error, that is raised, and not LockLost, which would hide it."""

    def fails() -> None:
        with Lock("a", on=engine) as lock:
            take_away(engine, "a", lock)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fails()


def test_the_keeper_notices_the_loss(engine: Engine) -> None:
    """The keeper notices the loss of a lock. `lost` and `held` tell a long block to stop."""
    lock = Lock("a", on=engine)
    hold = lock.acquire().hold
    assert hold is not None
    take_away(engine, "a", lock)
    keeper.look_at(hold, time.monotonic())  # as if a third of its lease had passed
    until(lambda: lock.lost)
    assert not lock.held
    assert isinstance(lock.fence, int)  # it remains, because of what the block has written
    with pytest.raises(LockLost):
        lock.release()
    with lock:
        assert lock.held  # the object can be used again
        assert not lock.lost


def test_a_late_release_takes_nothing_from_the_next_holder(engine: Engine) -> None:
    """A late release does not end the lock of the next holder, because it has another token."""
    first, second = Lock("a", on=engine), Lock("a", on=engine)
    first.acquire()
    take_away(engine, "a", first)
    assert second.acquire(wait=0)
    with pytest.raises(LockLost):
        first.release()
    assert not Lock("a", on=engine).acquire(wait=0)
    second.release()


def test_a_held_lock_is_renewed(engine: Engine) -> None:
    """A block that takes longer than its lease keeps the lock: the keeper renews it."""
    with Lock("a", on=engine, lease=3) as lock:
        least = lock.remaining
        while (now := lock.remaining) <= least:  # until it is renewed
            least = now
            assert not Lock("a", on=engine).acquire(wait=0)
            time.sleep(0.05)
        assert lock.held


def test_who_overran_max_hold_hears_of_it_in_time(engine: Engine) -> None:
    """When another caller gets a lock after `max_hold`, the earlier holder already sees that it lost the lock."""
    lock = Lock("a", on=engine, lease=0.15, max_hold=0.01)
    lock.acquire()
    with Lock("a", on=engine, wait=PATIENCE):
        assert lock.lost
        assert not lock.held
    with pytest.raises(LockLost):
        lock.release()


@pytest.mark.parametrize("options", [{"lease": 1e11}, {"lease": 10**400}, {"wait": 1e11}, {"max_hold": 1e11}])
def test_absurd_durations_are_refused(options: dict[str, float]) -> None:
    """A duration of more than a hundred years is refused where it is given. Otherwise it would fail much later."""
    with pytest.raises(OptionError, match=rf"{next(iter(options))} is more than a hundred years"):
        Lock("a", on="memory://", **options)
    with pytest.raises(OptionError, match="is more than a hundred years"):
        stampede.Cache("memory://", **options)
    with pytest.raises(OptionError, match="is more than a hundred years"):
        stampede.Cache("memory://").get_or_compute("k", lambda: 1, **options)
    with pytest.raises(OptionError, match="is more than a hundred years"):
        stampede.cached(**options)(lambda: 1)


def test_a_lock_that_is_forgotten_while_it_is_held_is_released(on: str, caplog: pytest.LogCaptureFixture) -> None:
    """If the object of a held lock is dropped, the lock is released, and the log says so."""
    held = [Lock("a", on=on)]
    hold = held[0].acquire().hold
    held.clear()
    assert hold is not None
    keeper.look_at(hold, time.monotonic())  # as if a third of its lease had passed
    with Lock("a", on=on, wait=PATIENCE):
        pass
    assert "the lock 'a' was held, and never released" in caplog.text


def test_what_with_has_taken_is_released_by_its_block(on: str) -> None:
    """A lock that a block holds can't be released through the lock object, only by the block or its holding."""
    lock = Lock("a", on=on)
    with lock as mine:
        assert not lock.acquire(wait=0)
        with pytest.raises(LockLost, match="is not held through this object"):
            lock.release()
        assert mine.held


def test_a_lock_keeps_its_engine() -> None:
    """A lock keeps its engine open, even if its cache has no other reference."""
    for made in (lambda: Lock("a", on=stampede.Cache("memory://")), lambda: stampede.Cache("memory://").lock("a")):
        lock = made()
        gc.collect()
        with lock:
            assert lock.held


def test_a_lock_finds_its_engine_again_after_configure(tmp_path: Path) -> None:
    """A lock that was made before `configure`, as at the top of a module, uses the new settings after it."""
    default, by_url, by_name = Lock("a"), try_lock("a", on=f"disk://{tmp_path}/d"), Lock("a", on="default")
    with default, by_url, by_name:
        pass
    stampede.configure(url=f"disk://{tmp_path}/e")
    for lock in (default, by_url, by_name):
        with lock:
            assert lock.held
    with by_name:
        assert not free("a", f"disk://{tmp_path}/e")


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("server", [shared_redis, shared_memcached], ids=["redis", "memcached"])
def test_a_block_that_ends_without_its_server(
    server: Callable[[], Any], colour: str, before: Callable[[Any], Proxy]
) -> None:
    """If the server is down at the end of a block, the error is EngineError if the holder was alone in it, and LockLost
    if another caller may have been inside."""

    async def block(lock: Lock, body: Callable[[], object]) -> None:
        if colour == "sync":
            with lock:
                body()
        else:
            async with lock:
                body()

    def ended(lease: float, *, lost: bool) -> BaseException:
        proxy = before(server())
        cache = stampede.Cache(server().url.replace(f":{server().port}", f":{proxy.port}"))
        lock = cache.lock(f"ended {lease} {colour}", lease=lease)

        def body() -> None:
            proxy.close()
            until(lambda: lock.lost is lost)

        with pytest.raises(stampede.StampedeError) as told:
            asyncio.run(block(lock, body))
        assert not lock.held
        cache.close()
        return told.value

    alone, lost = ended(60, lost=False), ended(0.3, lost=True)
    assert isinstance(alone, EngineError)
    assert str(alone).startswith(f"the lock 'ended 60 {colour}' can't be released")
    assert isinstance(lost, LockLost)
    assert isinstance(lost.__cause__, EngineError)


# -- release_via ------------------------------------------------------------------------------------------------------


def test_release_via_a_commit(on: str) -> None:
    """The lock is held after its block until the commit. Before the commit, others would read the old row."""
    hooks: list[Callable[[], object]] = []
    with Lock("a", on=on, release_via=hooks.append):
        assert hooks == []
    assert not free("a", on)
    hooks.pop()()
    assert free("a", on)


def test_release_via_and_an_exception(on: str) -> None:
    """After an exception there is no commit, so the hook is not called, and the lock is released at once."""
    hooks: list[Callable[[], object]] = []
    with pytest.raises(ValueError), Lock("a", on=on, release_via=hooks.append):
        raise ValueError
    assert hooks == []
    assert free("a", on)


def test_release_via_ends_renewal_with_the_block(engine: Engine) -> None:
    """After its block the lock is not renewed: a commit that never comes holds it for one lease at most."""
    hooks: list[Callable[[], object]] = []
    with Lock("a", on=engine, release_via=hooks.append) as lock:
        pass
    assert lock.token not in {hold.token for hold in keeper.holds()}
    take_away(engine, "a", lock)
    with pytest.raises(LockLost):
        hooks.pop()()


def test_release_via_a_coroutine(on: str) -> None:
    """A hook may be an `async def` in `async with`. In `with` it is refused, and the lock is released."""

    async def hook(release: Callable[[], object]) -> None:
        await asyncio.sleep(0)
        release()

    async def main() -> None:
        async with Lock("a", on=on, release_via=hook):
            assert not free("a", on)
        assert free("a", on)

    asyncio.run(main())
    with pytest.raises(OptionError, match="async with"), Lock("a", on=on, release_via=hook):
        pass
    assert free("a", on)


def test_release_via_a_hook_that_fails(on: str) -> None:
    """The error of a hook reaches the caller, and the lock is released."""

    def hook(release: Callable[[], object]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Lock("a", on=on, release_via=hook):
        pass
    assert free("a", on)


def test_release_via_in_a_loop(on: str) -> None:
    """A hook may be a plain function in `async with`, too."""
    hooks: list[Callable[[], object]] = []

    async def main() -> None:
        async with Lock("a", on=on, release_via=hooks.append):
            pass
        assert not free("a", on)
        if (task := hooks.pop()()) is not None:
            await task  # type: ignore[misc]
        assert free("a", on)

    asyncio.run(main())


@pytest.mark.redis
def test_release_via_stops_no_loop(before: Callable[[Any], Proxy]) -> None:
    """A release after a commit does not block its event loop while the server hangs."""
    proxy = before(shared_redis())
    hooks: list[Callable[[], Any]] = []

    async def main() -> None:
        async with Lock("r", on=proxy.url, release_via=hooks.append):
            pass
        proxy.hold()
        release = hooks.pop()()  # it returns although the server does not reply
        await asyncio.sleep(0)
        assert not release.done()
        proxy.let_go()
        await release
        async with Lock("r", on=proxy.url, wait=0):
            pass

    asyncio.run(main())


@pytest.mark.redis
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_release_via_where_the_engine_is_down(
    colour: str, before: Callable[[Any], Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    """If the release after a commit fails, this is logged and not raised: an error could not undo the commit."""
    proxy = before(shared_redis())
    hooks: list[Callable[[], Any]] = []

    async def main() -> None:
        async with Lock("down", on=proxy.url, lease=5, release_via=hooks.append):
            pass
        proxy.close()
        proxy.cut()
        await hooks.pop()()

    if colour == "async":
        asyncio.run(main())
    else:
        with Lock("down", on=proxy.url, lease=5, release_via=hooks.append):
            pass
        proxy.close()
        proxy.cut()
        hooks.pop()()
    told = [each for each in caplog.records if "'down' was not released after a commit" in each.getMessage()]
    assert [each.levelname for each in told] == ["ERROR"]


# -- engines ----------------------------------------------------------------------------------------------------------


def test_null_excludes_nobody() -> None:
    """`null://` is for tests: it grants every lock."""
    with Lock("a", on="null://") as first, Lock("a", on="null://") as second:
        assert first.held
        assert second.held


def test_a_cache_s_lock() -> None:
    """`cache.lock(...)` and `on=cache` use the engine of the cache."""
    from stampede import Cache

    cache = Cache()
    with cache.lock("a"), try_lock("a", on=cache) as attempt:
        assert not attempt
    with cache.lock("a", wait=0):
        pass


def test_an_engine_of_values_only_is_no_lock() -> None:
    """An engine without locks is refused when the lock is made, with a remedy."""

    class Values(Engine):
        scheme = "values"
        shared = pushes = coherent = False

        def ping(self) -> float:
            return 0.0

        def close(self) -> None: ...

    with pytest.raises(OptionError, match=r"values:// has no locks.*on="):
        Lock("a", on=Values())


def test_trouble_of_the_engine_raises(tmp_path: Path) -> None:
    """If the engine fails, `Lock` must not run its block, and `try_lock` must not report that the lock is taken."""
    import shutil

    url = f"file://{tmp_path}/f"
    with Lock("a", on=url):
        pass
    shutil.rmtree(tmp_path / "f")
    (tmp_path / "f").write_text("no directory")
    for attempt in (lambda: Lock("a", on=url).__enter__(), lambda: try_lock("a", on=url).__enter__()):
        with pytest.raises(EngineError):
            attempt()


# -- processes --------------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from stampede import Lock
options = {"on": sys.argv[1]} if sys.argv[1] else {}
with Lock("a", lease=60, **options):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(on: str, **environ: str) -> subprocess.Popen[str]:
    """Start a process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, on],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_lock_without_settings_works_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Lock("nightly")` in a cron job excludes other cron jobs, without any settings."""
    stampede.configure()  # as outside of a test
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    process = holder("")
    try:
        with try_lock("a") as attempt:
            assert not attempt
        lock = Lock("a", wait=PATIENCE)
        waiter = Herd(lock.acquire)
        process.communicate("")
        (holding,) = waiter.join()
        holding.release()
    finally:
        ended(process)


def test_a_killed_holder_frees_the_lock(shared: str) -> None:
    """If the holder is killed, the lock is free at once, long before its lease of 60 s ends."""
    process = holder(shared)
    try:
        assert not free("a", shared)
        lock = Lock("a", on=shared, wait=PATIENCE)
        waiter = Herd(lock.acquire)
        started = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        (holding,) = waiter.join()
        assert time.monotonic() - started < 5
        holding.release()
    finally:
        ended(process)


def test_a_killed_holder_frees_the_lock_for_tasks(shared: str) -> None:
    """If the holder is killed, a task that waits for the lock gets it at once."""
    process = holder(shared)

    async def main() -> None:
        lock = Lock("a", on=shared, wait=PATIENCE)
        waiter = asyncio.create_task(lock.aacquire())
        await asyncio.sleep(0.02)
        assert not waiter.done()
        os.kill(process.pid, signal.SIGKILL)
        assert await asyncio.wait_for(waiter, 5)
        await lock.arelease()

    try:
        asyncio.run(main())
    finally:
        ended(process)


def test_a_fork_in_the_block(shared: str) -> None:
    """A forked child does not release its parent's lock at the end of the inherited block, and does not keep it."""
    lock = Lock("a", on=shared)
    reading, writing = os.pipe()
    with lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                lock.__exit__(None, None, None)  # the end of the inherited block
                code = 0 if not free("a", shared) else 2
            finally:
                os.read(reading, 1)  # live until the parent has released
                os._exit(code)
        assert lock.held
        # the child sleeps when it has left the block; the parent must still hold the lock
        until(lambda: _sleeps(child))
        assert not free("a", shared)
    try:
        assert free("a", shared), "the child still holds it"
    finally:
        os.write(writing, b"x")
        _, status = os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    assert os.waitstatus_to_exitcode(status) == 0


def _sleeps(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    channel = Path(f"/proc/{pid}/syscall").read_text().split()[0]
    return state == "S" and channel in ("0", "63")  # the numbers of read(2), which reads the pipe


# -- nothing is left --------------------------------------------------------------------------------------------------


def test_the_keeper_is_left_with_nothing(on: str) -> None:
    """The keeper forgets a lock that was released. Otherwise it would renew it for ever."""
    name = "the keeper has nothing of it"

    def kept() -> int:
        return sum(hold.key == name for hold in keeper.holds())

    with Lock(name, on=on):
        assert kept() == 1
    with pytest.raises(ValueError), Lock(name, on=on):
        raise ValueError
    with try_lock(name, on=on):
        pass
    assert kept() == 0


def test_a_thread_that_ends_with_the_lock(on: str) -> None:
    """If a thread ends without a release, the lock stays held, and can be released through the object."""
    lock = Lock("a", on=on)
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    assert lock.token is not None
    assert not free("a", on)
    lock.release()
    assert free("a", on)


# -- what a block gives back ------------------------------------------------------------------------------------------


def _kept(lock: Lock) -> Iterator[bool]:
    """A dependency of a web framework: each of its steps may run in any thread or task."""
    with lock as mine:
        yield bool(mine)


def test_the_end_of_a_block_that_was_released_takes_nothing_from_the_next(on: str) -> None:
    """If a block's lock was released early, the end of the block does not release the lock of the next holder."""
    lock, inside = Lock("a", on=on, wait=PATIENCE), threading.Event()
    go_on = threading.Event()

    def second() -> None:
        with lock:
            inside.set()
            assert go_on.wait(PATIENCE)
            assert lock.held
            assert not free("a", on)

    with lock as mine:
        mine.release()
        other = Herd(second)
        assert inside.wait(PATIENCE)
    go_on.set()
    assert other.join() == [None]
    assert free("a", on)


def test_the_end_of_a_task_s_block_that_was_released_takes_nothing_from_the_next(on: str) -> None:
    """If a task released its lock early, the end of its block does not release the lock of the next task."""
    lock = Lock("a", on=on, wait=PATIENCE)

    async def main() -> None:
        inside, go_on = asyncio.Event(), asyncio.Event()

        async def second() -> None:
            async with lock:
                inside.set()
                await go_on.wait()
                assert lock.held
                assert not free("a", on)

        async with lock as mine:
            await mine.arelease()
            other = asyncio.create_task(second())
            await asyncio.wait_for(inside.wait(), PATIENCE)
        go_on.set()
        await other

    asyncio.run(main())
    assert free("a", on)


def test_a_refused_block_that_ends_in_another_thread(on: str) -> None:
    """A refused block may end in another thread. Its end does not release the holder's lock."""
    lock = try_lock("a", on=on)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:  # their threads live on
        with lock as mine:
            refused = _kept(lock)
            assert one.submit(next, refused).result(PATIENCE) is False
            assert two.submit(next, refused, None).result(PATIENCE) is None
            assert mine.held
            assert not free("a", on)
        granted = _kept(lock)
        assert one.submit(next, granted).result(PATIENCE) is True
        assert not free("a", on)
        assert two.submit(next, granted, None).result(PATIENCE) is None
        assert free("a", on)


def test_a_refused_block_that_ends_in_another_task(on: str) -> None:
    """A refused block may end in another task. Its end does not release the holder's lock."""
    lock = try_lock("a", on=on)

    async def kept() -> Any:
        async with lock as mine:
            yield bool(mine)

    async def step(steps: Any) -> bool | None:
        return await anext(steps, None)

    async def main() -> None:
        async with lock as mine:
            refused = kept()
            assert await asyncio.create_task(step(refused)) is False
            assert await asyncio.create_task(step(refused)) is None
            assert mine.held
            assert not free("a", on)
        granted = kept()
        assert await asyncio.create_task(step(granted)) is True
        assert await asyncio.create_task(step(granted)) is None
        assert free("a", on)

    asyncio.run(main())


def test_an_exit_stack_takes_nothing_from_a_block(on: str) -> None:
    """An exit stack with a refused lock may be closed in another thread. That does not release the holder's lock."""
    lock, stack = try_lock("a", on=on), ExitStack()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        with lock as mine:
            assert not one.submit(lambda: bool(stack.enter_context(lock))).result(PATIENCE)
            two.submit(stack.close).result(PATIENCE)
            assert mine.held
        got = two.submit(lambda: stack.enter_context(lock)).result(PATIENCE)
        one.submit(got.release).result(PATIENCE)  # by another thread
        assert free("a", on)


def test_a_block_of_no_task_outlives_the_loop_it_was_entered_in(on: str) -> None:
    """A generator whose plain block was entered in an event loop keeps the lock after that loop."""
    lock = Lock("a", on=on)
    rows = _kept(lock)

    async def first() -> bool:
        return next(rows)

    assert asyncio.run(first()) is True
    assert lock.token is not None
    assert not free("a", on)
    assert next(rows, None) is None
    assert free("a", on)


def test_a_task_s_block_that_goes_on_after_its_loop(on: str) -> None:
    """The close of an event loop gives back its locks. A block that goes on after that gets LockLost."""
    lock, told = Lock("a", on=on), []

    @types.coroutine
    def pause() -> Iterator[str]:
        yield "paused"

    async def block() -> None:
        async with lock:
            await pause()
            told.append(lock.lost)

    async def main() -> None:
        await _driven(steps)

    steps = block()
    asyncio.run(main())
    assert lock._last is not None and lock._last.hold is not None
    keeper.look_at(lock._last.hold, time.monotonic())  # as if a third of its lease had passed
    with Lock("a", on=on, wait=PATIENCE):
        pass
    with pytest.raises(LockLost, match="'a' ended before its block did"):
        steps.send(None)
    assert told == [True]


@types.coroutine
def _driven(steps: Any) -> Iterator[Any]:
    """Run the steps until they pause, as part of a task."""
    while (awaited := steps.send(None)) != "paused":
        yield awaited


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_lock_is_not_copied(act: Callable[[object], object]) -> None:
    """A lock can't be copied or pickled: two objects would release what one of them took."""
    for lock in (Lock("a", on="memory://"), try_lock("a", on="memory://")):
        with pytest.raises(TypeError, match="can't be copied or pickled"):
            act(lock)


def test_a_wrong_call_of_a_lock_is_told_in_its_own_name() -> None:
    """The error of a wrong call names `Lock` or `try_lock`, and no internal class."""
    for kind in (Lock, try_lock):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}.__init__\(\) takes 2"):
            kind("a", 10)  # type: ignore[call-arg]
