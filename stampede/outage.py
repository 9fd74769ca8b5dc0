"""An engine that is down is not an outage: calls go on in this process, over a refuge of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stampede import events, forks
from stampede.breaker import Breaker
from stampede.colour import run_blocking
from stampede.entry import Entry, Verdict
from stampede.errors import EngineClosed, EngineError
from stampede.ports import Ask, Busy, Claims, Engine, Found, Granted, Reply
from stampede.returns import Returns

__all__ = ["GuardedClaims", "Outage"]

REFUGE_TTL = 5.0
"""Seconds that a value which the engine could not take is kept in this process."""

BRIEFLY = 1.0
"""The same where the engine refused it, and answers: somebody may invalidate it there, of which nobody tells us."""

PARTLY = 60.0
"""Seconds between two events of an engine that is down in part: its recovery can't be told from its other part's."""


class Outage:
    """What a cache knows about its engine's health, for both colours and all functions."""

    def __init__(
        self, name: str, engine: Engine, refuge: Engine, tell: Callable[[events.Event], object], *, strict: bool
    ) -> None:
        self.engine = name
        self.refuge = refuge  # inside this process
        self.strict = strict  # on_engine_error="raise"
        self.refugees: dict[bytes, float] = {}  # tokens of leases that the refuge granted, and for how long it keeps
        self.granted: dict[bytes, str] = {}  # keys by the tokens of those that the engine granted, unless invalidated
        self.unknown = Returns(engine, self)  # leases that may stand, to be given back
        self.last: EngineError | None = None
        self.closed = False  # by us, for good: that is no outage
        self.partly_since: float | None = None  # a part of the engine was down then
        self._tell = tell
        self._breaker = Breaker()
        self._lock = threading.Lock()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._lock = threading.Lock()  # a thread that was inside is not here to open it

    @property
    def down(self) -> bool:
        return self._breaker.open

    def may_ask(self) -> bool:
        return self._breaker.allow(time.monotonic())

    def failed(self, error: EngineError) -> None:
        self.last = error
        if error.partial:
            self._failed_partly(error)
            return
        with self._lock:
            news = not self._breaker.open
            self._breaker.failed(time.monotonic())
        if news:
            self._tell(events.EngineDown("", "", self.engine, error))

    def _failed_partly(self, error: EngineError) -> None:
        """This key is the refuge's for now; what the engine has of others is as good as ever."""
        now = time.monotonic()
        with self._lock:
            news = self.partly_since is None or now - self.partly_since > PARTLY
            if news:
                self.partly_since = now
        if news:
            self._tell(events.EngineDown("", "", self.engine, error))

    def forget(self, key: str) -> None:
        """What the refuge keeps of this key is not to be served any more, nor what is being computed."""
        for token, under_way in list(self.granted.items()):
            if under_way == key:
                self.granted.pop(token, None)
        if self.refugees or self.down or self.partly_since is not None:
            assert self.refuge.store is not None
            run_blocking(self.refuge.store.invalidate(key))

    def forget_all(self) -> None:
        """The same for all keys."""
        self.granted.clear()
        if self.refugees or self.down or self.partly_since is not None:
            assert self.refuge.store is not None
            run_blocking(self.refuge.store.bump(""))

    def answered(self) -> None:
        if not self._breaker.open:
            return
        with self._lock:
            was_open = self._breaker.open
            seconds = self._breaker.succeeded(time.monotonic())
        if was_open:
            self.unknown.hurry()
            assert self.refuge.store is not None
            run_blocking(self.refuge.store.bump(""))
            self._tell(events.EngineUp("", "", self.engine, seconds))


class GuardedClaims:
    """`Claims` that never fail: what the engine can't do is done by the refuge, one computation per key and process."""

    def __init__(self, port: Claims, refuge: Claims, outage: Outage) -> None:
        self._port = port
        self._refuge = refuge
        self._outage = outage

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        outage, keeps = self._outage, REFUGE_TTL
        if outage.closed:
            raise EngineClosed(outage.engine)
        probing = outage.down
        if not probing or outage.may_ask():
            try:
                reply = await self._port.claim(key, token, ask)
            except EngineClosed:
                outage.closed = True
                raise
            except EngineError as error:
                outage.failed(error)
                if probing and error.partial:
                    outage.answered()  # the rest is up
                if error.refused:
                    keeps = BRIEFLY
                else:
                    outage.unknown.add(key, token)
            else:
                if probing:  # or it was asked before the trouble, and its answer says nothing of that
                    outage.answered()
                if isinstance(reply, Granted):
                    outage.granted[token] = key
                return reply
        if outage.strict:
            raise EngineError(f"{outage.engine} can't be asked: {outage.last}") from outage.last
        reply = await self._refuge.claim(key, token, ask)
        if isinstance(reply, Granted):
            outage.refugees[token] = keeps
        return reply

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        outage = self._outage
        keeps = outage.refugees.pop(token, None)
        if keeps is None:
            keeps = REFUGE_TTL
            try:
                stored = await self._port.fill(key, token, entry)
            except EngineClosed:
                return False
            except EngineError as error:
                outage.failed(error)
                outage.unknown.add(key, token)
                if outage.strict:
                    outage.granted.pop(token, None)
                    raise
            else:
                outage.granted.pop(token, None)
                return stored
            if outage.granted.pop(token, None) is None:
                return False  # invalidated since: it must not outlive that here
            await self._refuge.claim(key, token, Ask(lease=REFUGE_TTL, force=True))
        brief = min(entry.fresh, keeps)
        return await self._refuge.fill(key, token, replace(entry, fresh=brief, keep=brief))

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> None:
        outage = self._outage
        if outage.refugees.pop(token, None) is not None:
            await self._refuge.abandon(key, token, verdict, rest)
            return
        outage.granted.pop(token, None)
        try:
            if not outage.down:
                await self._port.abandon(key, token, verdict, rest)
                return
        except EngineClosed:
            return
        except EngineError as error:
            outage.failed(error)
        outage.unknown.add(key, token)  # it goes when the engine is back

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        outage = self._outage
        if busy.token in outage.refugees:
            return await self._refuge.wait(key, busy, timeout)
        try:
            return await self._port.wait(key, busy, timeout)
        except EngineClosed:
            return None  # the next claim says so
        except EngineError as error:
            outage.failed(error)
            return None  # the next claim decides

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        if token in self._outage.refugees:
            return await self._refuge.renew(key, token, lease)
        return await self._port.renew(key, token, lease)
