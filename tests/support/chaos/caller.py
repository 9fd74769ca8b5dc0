"""A caller is one thread or one task. It takes the steps of its part, and records what it gets."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from chaos.journal import Journal
from chaos.plan import KINDS, LOCK_LEASE, Kind, Step, Whim, kind_of, tags_of
from stampede import Cache, LockTimeout, current

__all__ = ["Broken", "Caller", "Functions", "Interrupted"]

_CHILD_SECONDS = 60


class Broken(Exception):
    """The exception that an origin raises."""


class Interrupted(BaseException):
    """An exception that reaches a thread at any bytecode, like Ctrl-C and the time limits of job queues."""


_asking: ContextVar[tuple[str, Whim]] = ContextVar("asking")
"""The call that caused a computation of a cached function, and its whim."""


class Origin:
    """Computes values. It records when it begins and when it ends, and each value names its computation."""

    def __init__(self, journal: Journal, keys: list[str], call: str, whim: Whim) -> None:
        self._journal = journal
        self._keys = keys
        self._call = call
        self._whim = whim

    def _begin(self, keys: list[str]) -> tuple[str, float]:
        me, born = self._journal.new(), time.monotonic()
        self._journal.write("make", me, self._call, keys, born)
        return me, born

    def _end(self, me: str, error: BaseException | None) -> None:
        self._journal.write("made", me, time.monotonic(), type(error).__name__ if error else "ok")

    def _nap(self) -> float:
        return self._whim.nap + self._whim.hangs

    def _values(self, me: str, born: float, keys: list[str]) -> dict[str, Any]:
        if self._whim.fails:
            raise Broken(me)
        return {key: (key, me, born, b"x" * kind_of(key).size) for key in keys}

    def __call__(self, keys: list[str] | None = None) -> Any:
        """Return the one value, or the values by key."""
        with self._computed(keys) as values:
            time.sleep(self._nap())
            return values()

    async def suspending(self, keys: list[str] | None = None) -> Any:
        with self._computed(keys) as values:
            await asyncio.sleep(self._nap())
            return values()

    @contextmanager
    def _computed(self, keys: list[str] | None) -> Iterator[Callable[[], Any]]:
        """Record when the computation begins and how it ends."""
        me, born = self._begin(keys or self._keys)
        for key in keys or self._keys:
            context = current() if keys is None else current()[key]
            context.tag(tags_of(key)[1])
        error: BaseException | None = None

        def values() -> Any:
            made = self._values(me, born, keys or self._keys)
            return made if keys is not None else made[self._keys[0]]

        try:
            yield values
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._end(me, error)


class Functions:
    """The cached functions of a process: by colour and kind."""

    def __init__(self, cache: Cache, journal: Journal) -> None:
        self.of = {
            face: {kind: self._made(cache, journal, face, kind, KINDS[kind]) for kind in ("firm", "stale", "frail")}
            for face in ("sync", "async")
        }

    @staticmethod
    def _made(cache: Cache, journal: Journal, face: str, name: str, kind: Kind) -> Any:
        def asked(n: int) -> Any:
            return Origin(journal, [f"{face}/{name}/{n}"], *_asking.get())()

        async def asked_async(n: int) -> Any:
            return await Origin(journal, [f"{face}/{name}/{n}"], *_asking.get()).suspending()

        function: Any = asked if face == "sync" else asked_async
        function.__qualname__ = f"{face}_{name}"  # its own name, which is the same in every process
        return cache.cached(version="1", tags=[tags_of(f"{face}/{name}")[0]], **kind.options)(function)


class Caller:
    """`act` takes one step; in a thread it never suspends."""

    def __init__(self, cache: Cache, functions: Functions, journal: Journal, *, suspending: bool) -> None:
        self._cache = cache
        self._functions = functions.of["async" if suspending else "sync"]
        self._journal = journal
        self._suspending = suspending
        self._colour = "async" if suspending else "sync"
        self.call = ""  # the last call
        self.exposed = False  # it may be interrupted

    async def act(self, step: Step) -> None:
        if step.verb == "fork" and not self._suspending:
            self._fork(step)
        elif step.verb in ("lock", "try_lock"):
            await self._lock(step)
        else:
            await self._call(step)

    # -- values ---------------------------------------------------------------------------------------------------

    async def _call(self, step: Step) -> None:
        self.call = me = self._journal.new()
        verb = "compute" if step.verb == "fork" else step.verb
        whim = [round(step.whim.nap, 3), step.whim.hangs]
        self._journal.write("call", me, verb, step.keys, time.monotonic(), self._colour, step.wait, whim)
        values: dict[str, Any] = {}
        error: BaseException | None = None
        try:
            self.exposed = True
            ask = self._ask_cache if step.face == "cache" else self._ask_function
            values = await ask(me, step) or {}
        except (Exception, asyncio.CancelledError) as failure:
            error = failure
        finally:
            self.exposed = False
        now = time.monotonic()
        outcome = type(error).__name__ if error is not None else "ok"
        self._journal.write("done", me, now, outcome, _short(values), str(error)[:200] if error else "")

    async def _ask_cache(self, me: str, step: Step) -> dict[str, Any] | None:
        key, kind = step.keys[0], kind_of(step.keys[0])
        origin = Origin(self._journal, step.keys, me, step.whim)
        function = origin.suspending if self._suspending else origin
        tags = tags_of(key)
        terms = {**kind.options, "tags": tags[:1]} | ({} if step.wait is None else {"wait": step.wait})
        match step.verb:
            case "compute" | "fork":
                return {key: await self._cached("get_or_compute", key, function, **terms)}
            case "cancel":
                return {key: await self._cancelled(step, key, function, terms)}
            case "get":
                return {key: await self._cached("get", key)}
            case "peek":
                entry = await self._cached("peek", key)
                return {key: entry.value if entry is not None and not entry.raised else None}
            case "get_many":
                return dict(await self._cached("get_many", step.keys))
            case "many":
                return dict(await self._cached("get_or_compute_many", step.keys, function, **terms))
            case "set":
                await self._cached("set", key, (key, me, 0.0, b""), tags=tags, **kind.options)
            case "set_many":
                values = {key: (key, me, 0.0, b"") for key in step.keys}
                await self._cached("set_many", values, tags=tags, **kind.options)
            case "expire" | "invalidate":
                await self._cached(step.verb, key)
            case "end_tag" | "expire_tag":
                verb = "invalidate_tags" if step.verb == "end_tag" else "expire_tags"
                await self._cached(verb, tags[step.chance < 0.5])
            case "clear":
                await self._cached("clear")
        return None

    async def _cached(self, verb: str, *args: Any, **options: Any) -> Any:
        if self._suspending:
            return await getattr(self._cache, f"a{verb}")(*args, **options)
        return getattr(self._cache, verb)(*args, **options)

    async def _cancelled(self, step: Step, key: str, function: Any, terms: dict[str, Any]) -> Any:
        """Make a call that is cancelled after a moment, if it has no result by then."""
        if not self._suspending:
            return await self._cached("get_or_compute", key, function, **terms)
        task = asyncio.ensure_future(self._cached("get_or_compute", key, function, **terms))
        done, _ = await asyncio.wait([task], timeout=step.chance * 0.05)
        if not done:
            task.cancel()
        return await task

    async def _ask_function(self, me: str, step: Step) -> dict[str, Any] | None:
        key = step.keys[0]
        name, numbers = key.split("/")[1], [int(each.split("/")[2]) for each in step.keys]
        function = self._functions[name]
        _asking.set((me, step.whim))
        match step.verb:
            case "call":
                return {key: await self._answer(function(numbers[0]))}
            case "refresh":
                return {key: await self._answer(function.refresh(numbers[0]))}
            case "many":
                values = await self._answer(function.many([(n,) for n in numbers]))
                return dict(zip(step.keys, values, strict=True))
            case "peek":
                entry = await self._answer(function.peek(numbers[0]))
                return {key: entry.value if entry is not None and not entry.raised else None}
            case "set":
                await self._answer(function.set((key, me, 0.0, b""), numbers[0]))
            case "expire" | "invalidate":
                await self._answer(getattr(function, step.verb)(numbers[0]))
            case "end_all":
                await self._answer(function.invalidate_all())
        return None

    async def _answer(self, answer: Any) -> Any:
        return await answer if self._suspending else answer

    # -- locks ----------------------------------------------------------------------------------------------------

    async def _lock(self, step: Step) -> None:
        """Hold the lock for a moment, and check several times whether it still counts as held."""
        self.call = me = self._journal.new()
        name = f"lock{len(step.keys[0]) % 2}"
        wait = 0.0 if step.verb == "try_lock" else 0.3 + step.chance
        lock = self._cache.lock(name, lease=LOCK_LEASE, wait=wait, max_hold=10)
        self._journal.write("call", me, step.verb, [name], time.monotonic(), self._colour, wait, [0, 0])
        outcome, text = "ok", ""
        try:
            await self._held(me, step, lock, wait)
        except LockTimeout:
            outcome = "LockTimeout"
        except (Exception, asyncio.CancelledError) as error:
            outcome, text = type(error).__name__, str(error)[:200]
        self._journal.write("done", me, time.monotonic(), outcome, {}, text)

    async def _held(self, me: str, step: Step, lock: Any, wait: float) -> None:
        before = time.monotonic()
        if not (await lock.aacquire(wait) if self._suspending else lock.acquire(wait)):
            raise LockTimeout
        self._journal.write("locked", me, lock.name, before, time.monotonic(), lock.fence)
        try:
            for _ in range(4):
                looked = time.monotonic()
                if lock.held and not lock.lost:
                    self._journal.write("inside", me, looked)
                nap = step.whim.nap + (step.chance > 0.9) * LOCK_LEASE / 4  # some outlast the lease
                await asyncio.sleep(nap) if self._suspending else time.sleep(nap)
        finally:
            self._journal.write("leaving", me, time.monotonic())
            await lock.arelease() if self._suspending else lock.release()

    # -- forks ----------------------------------------------------------------------------------------------------

    def _fork(self, step: Step) -> None:
        """Fork a child that goes on with its parent's cache."""
        me = self._journal.new()
        self._journal.write("call", me, "fork", [], time.monotonic(), self._colour, None, [0, 0])
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(_CHILD_SECONDS)  # ends the child even if its parent is killed
                self._live_on(step)
            finally:
                os._exit(0)
        end = time.monotonic() + _CHILD_SECONDS
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(child, signal.SIGABRT)  # faulthandler prints its stacks
                os.waitpid(child, 0)
                self._journal.write("hang", f"a forked child never ended ({me})")
                break
            time.sleep(0.01)
        self._journal.write("done", me, time.monotonic(), "ok", {}, "")

    def _live_on(self, step: Step) -> None:
        for verb in ("compute", "get", "lock", "invalidate" if step.chance < 0.3 else "compute"):
            try:
                self.act(step._replace(verb=verb)).send(None)
            except StopIteration:
                pass


def _short(values: dict[str, Any]) -> dict[str, Any]:
    """Return the maker of each value. A value that no maker of ours made is returned as it is, as a text."""
    told: dict[str, Any] = {}
    for key, value in values.items():
        good = isinstance(value, tuple) and len(value) == 4 and value[0] == key and value[3] in (b"", _pad(key))
        told[key] = value[1] if good else None if value is None else {"wrong": repr(value)[:300]}
    return told


def _pad(key: str) -> bytes:
    return b"x" * kind_of(key).size
