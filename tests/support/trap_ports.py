"""Trap ports: an engine and a colour that stop before and after each of their effects.

A scheduler (the explorer) decides which of them continues, and which faults happen.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Generator, Sequence
from math import inf
from typing import Any, Protocol, TypeVar

from model import Listener, Model

from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Busy, Failed, Found, Granted, Looked, Reply
from stampede.runtime.colour import Bell, Callers, Colour

__all__ = ["TRAPPING", "Fibre", "Shield", "Spawn", "Trap", "TrapHold", "TrapPort"]

T = TypeVar("T")


class Trap:
    """A point at which a fibre stops. `kind` decides which faults may happen, `words` describe its next step."""

    __slots__ = ("kind", "listener", "ready", "timeout", "until", "words")

    def __init__(
        self,
        kind: str,
        words: str,
        *,
        ready: Callable[[], bool] | None = None,  # None: it may continue at any time
        timeout: float | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.kind = kind
        self.words = words
        self.ready = ready
        self.timeout = timeout
        self.until = inf  # set by the scheduler
        self.listener = listener

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)


class Spawn(Trap):
    """Start a fibre beside this one, and return it."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        super().__init__("spawn", "a fibre is started")
        self.work = work


class Shield(Trap):
    """Begin or end a section in which cancellations are delayed."""

    def __init__(self, up: bool) -> None:
        super().__init__("shield", "up" if up else "down")
        self.up = up


class Fibre(Protocol):
    """The result of `Spawn`: a coroutine under the scheduler."""

    done: bool

    def cancel(self) -> object: ...
    def result(self) -> Any: ...


class _Trapping:
    """A colour in which every suspension is a trap, and every task is a fibre."""

    suspending = True

    async def call(self, function: Callable[[], Any]) -> Any:
        value = function()
        return await value if hasattr(value, "__await__") else value

    async def park(self, bell: Bell, timeout: float | None) -> bool:
        await Trap("park", "goes on after the bell of its flight", ready=lambda: bell.rung, timeout=timeout)
        return bell.rung

    async def shielded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            await Shield(True)
        except GeneratorExit:
            coroutine.close()
            raise
        try:
            value = await coroutine
        except GeneratorExit:  # the trial is over: the scheduler handles no more traps
            raise
        except BaseException:
            await Shield(False)
            raise
        await Shield(False)
        return value

    async def aside(self, work: Coroutine[Any, Any, T], crowd: Callers) -> T:
        fibre: Fibre = await Spawn(work)
        crowd.cancel = fibre.cancel
        try:
            await Trap("join", "sees its computation ended", ready=lambda: fibre.done)
        except CancelledError:
            if crowd.leave():
                await Shield(True)
                await Trap("join", "sees its computation ended", ready=lambda: fibre.done)
                await Shield(False)
            raise
        result: T = fibre.result()
        return result


TRAPPING: Colour = _Trapping()


# -- the model as a port ------------------------------------------------------------------------------------------

Watch = Callable[[str, str, bytes | None, Any], object]
"""A function that gets the verb, key, token and reply of every effect, in the order of the effects."""


class TrapPort:
    """`Claims`, and the verbs of `Store` that the algorithm uses, over a model, with a trap before and after each."""

    def __init__(self, model: Model, watch: Watch) -> None:
        self.model = model
        self._watch = watch

    async def _verb(self, verb: str, key: str, token: bytes | None, effect: Callable[[], T], last: str = "reply") -> T:
        await Trap("effect", f"{verb} {key!r}")
        reply = effect()
        self._watch(verb, key, token, reply)
        await Trap(last, f"hears of its {verb}: {told(reply)}")
        return reply

    async def look(self, key: str, ask: Ask | None = None) -> Found | None:
        return await self._verb("look", key, None, lambda: self.model.look(key))

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        ask.since = round(ask.since, 3)  # without tiny clock steps
        return await self._verb("claim", key, token, lambda: self.model.claim(key, token, ask))

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        return await self._verb("fill", key, token, lambda: self.model.fill(key, token, entry))

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        return await self._verb("abandon", key, token, lambda: self.model.abandon(key, token, verdict, round(rest, 3)))

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        await Trap("effect", f"wait for {key!r}")
        listener = self.model.listen(key, busy.token)

        def woken() -> bool:
            return not listener.deaf and (listener.heard or self.model.stands(key) != busy.token)

        words = f"is woken for {key!r}"
        await Trap("wait", words, ready=woken, timeout=min(timeout, self.model.poll), listener=listener)
        return Found(listener.news) if listener.news is not None else None

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        return self.model.renew(key, token, lease)

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        return [await self._verb("get", key, None, lambda key=key: self.model.kept(key)) for key in keys]  # type: ignore[misc]

    async def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        return {key: await self.look(key) for key in keys}, [""] * len(scopes)

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        return await self._verb("replace", key, seen, lambda: self.model.replace(key, seen, entry))

    async def set(self, key: str, entry: Entry[Any]) -> None:
        def effect() -> object:
            self.model.put(key, entry)
            return entry.value

        await self._verb("set", key, None, effect, "return")

    async def expire(self, key: str) -> bool:
        return await self._verb("expire", key, None, lambda: self.model.expire(key), "return")

    async def invalidate(self, key: str) -> bool:
        return await self._verb("invalidate", key, None, lambda: self.model.invalidate(key), "return")


class TrapHold:
    """A lease with a keeper that never fails: the lease is valid for as long as its holder may hold it."""

    foreign = False
    overruled = False

    def __init__(self, model: Model, key: str, token: bytes, lease: float, max_hold: float) -> None:
        self._model, self._key, self._token = model, key, token
        self._lease, self._max_hold = lease, max_hold

    def __enter__(self) -> TrapHold:
        self._model.renew(self._key, self._token, self._max_hold + self._lease)
        return self

    def bound(self, seconds: float) -> None:
        self._model.renew(self._key, self._token, seconds + self._lease)

    def __exit__(self, *exc: object) -> None:
        self._model.renew(self._key, self._token, self._lease)


def told(reply: object) -> str:
    """A reply in words."""
    match reply:
        case Found(entry):
            return f"found {entry.value}"
        case None:
            return "nothing"
        case Granted(entry):
            return "granted" if entry is None else f"granted, with {entry.value}"
        case Busy(token, _, entry):
            return f"busy, {token.decode()} computes" + ("" if entry is None else f", with {entry.value}")
        case Failed(verdict, entry):
            return f"failed, {verdict.kind} {verdict.message}" + ("" if entry is None else f", with {entry.value}")
        case _:
            return repr(reply)
