"""An engine that is down is not an outage: calls go on in this process, over a refuge of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stampede import events
from stampede.errors import EngineClosed, EngineError
from stampede.model.breaker import Breaker
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Busy, Claims, Engine, Found, Granted, Looks, Reply, Store, Ticket
from stampede.runtime import process_lock
from stampede.runtime.colour import run_blocking

__all__ = ["GuardedClaims", "Outage"]

_log = logging.getLogger("stampede")

REMINDER = 60.0
"""Seconds between two log lines, or events, about an outage that lasts."""

REFUGE_TTL = 5.0
"""Seconds that a value which the engine could not take is kept in this process."""

BRIEFLY = 1.0
"""The same where the engine refused it, and answers: somebody may invalidate it there, of which nobody tells us."""


class Outage:
    """What a cache knows about its engine's health, for both colours and all functions."""

    def __init__(
        self,
        name: str,
        refuge: Engine,
        tell: Callable[[events.Event], object],
        give_back: Callable[[str, bytes], object],
        *,
        strict: bool,
    ) -> None:
        """`give_back` has a lease of the engine given back, once, by a thread beside the caller."""
        self.engine = name
        self.refuge = refuge  # inside this process
        self.strict = strict  # on_engine_error="raise"
        self.refuge_leases: dict[
            bytes, float
        ] = {}  # tokens of leases that the refuge granted, and for how long it keeps
        self.used = False  # the refuge may have something
        self.give_back = give_back
        self.last = ""  # what the engine's last failure said: the error itself would keep alive what was under way
        self.closed = False  # by us, for good: that is no outage
        self._remind_at = 0.0
        self._tell = tell
        self.breaker = Breaker()

    @property
    def down(self) -> bool:
        return self.breaker.since is not None

    @property
    def lasts(self) -> float:
        """Seconds for which the engine has been down; 0 if it is not."""
        since = self.breaker.since
        return 0.0 if since is None else time.monotonic() - since

    def may_ask(self) -> bool:
        return self.breaker.allow(time.monotonic())

    def failed(self, error: EngineError, *, probing: bool = False) -> None:
        """`probing`: it counted as down when it was asked."""
        self.last, now = str(error), time.monotonic()
        with process_lock.lock:
            before = self.breaker.since
            if not error.partial:
                self.breaker.failed(now)
            reminds = now >= self._remind_at
            if reminds or (before is None and not error.partial):
                self._remind_at = now + REMINDER
        if before is None and (reminds or not error.partial):
            self._tell(events.EngineDown("", "", self.engine, error, self.strict))
        elif before is not None and reminds:
            kind, seconds = type(error).__qualname__, now - before
            _log.warning("%s is still down after %.0f s: %s: %s", self.engine, seconds, kind, error)
        if error.partial and probing:
            self.answered()  # the rest is up

    @property
    def _store(self) -> Store:
        store = self.refuge.blocking.store
        assert store is not None
        return store

    def forget(self, key: str) -> None:
        """What the refuge keeps of this key is not to be served any more."""
        if self.used:
            run_blocking(self._store.invalidate(key))

    def forget_all(self) -> None:
        """The same for all keys."""
        if self.used:
            run_blocking(self._store.bump(""))

    def outlived(self, key: str) -> None:
        """The engine answers for this key: by the next time that it does not, what was kept here may be too old."""
        if self.refuge.tier.get(key) is not None:
            run_blocking(self._store.invalidate(key))

    def trouble(self) -> EngineError:
        """What a caller is told that wants to know."""
        return EngineError(f"{self.engine} can't be asked: {self.last}")

    def answered(self) -> None:
        if not self.breaker.open:
            return
        with process_lock.lock:
            was_open, seconds = self.breaker.open, self.breaker.succeeded(time.monotonic())
        if was_open:
            run_blocking(self._store.bump(""))
            self._tell(events.EngineUp("", "", self.engine, seconds))


class GuardedClaims:
    """`Claims` that never fail: what the engine can't do is done by the refuge, one computation per key and process."""

    def __init__(
        self,
        port: Claims,
        refuge: Claims,
        outage: Outage,
        kept: Callable[[str], Entry[Any] | None],
        looks: Looks | None = None,
        decoded: Callable[[str, Entry[Any]], Entry[Any] | None] = lambda key, entry: entry,
    ) -> None:
        """`kept`: what the local tier has of a key. `looks` is the engine's own, of bytes that `decoded` reads."""
        self._kept = kept
        self._looks = looks
        self._decoded = decoded
        self._port = port
        self._refuge = refuge
        self._outage = outage

    async def look(self, key: str) -> Found | None:
        """Return what is there and fresh. None, too, if the engine is down: what is to be done then is the claim's.

        All in one step, and not a layer each for codec and outage, as it is a hit.
        """
        outage = self._outage
        if outage.closed or outage.breaker.since is not None or self._looks is None:
            return None
        try:
            found = await self._looks.look(key)
        except EngineClosed:
            return None
        except EngineError as error:
            outage.failed(error)
            return None
        if found is None:
            return None
        entry = self._decoded(key, found.entry)
        if entry is None or entry.fresh <= 0:
            return None
        if outage.used:
            outage.outlived(key)
        found.entry = entry
        return found

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        outage, keeps = self._outage, REFUGE_TTL
        if outage.closed:
            raise EngineClosed(outage.engine)
        probing = outage.down
        # Else to ask for its generation has just been the try: by an older one it would find what was cleared since.
        if not probing or (ask.since and outage.may_ask()):
            try:
                reply = await self._port.claim(key, token, ask)
            except EngineClosed:
                outage.closed = True
                raise
            except EngineError as error:
                outage.failed(error, probing=probing)
                if error.refused:
                    keeps = BRIEFLY
                else:
                    outage.give_back(key, token)  # it may have been granted
            else:
                if probing:  # or it was asked before the trouble, and its answer says nothing of that
                    outage.answered()
                if outage.used:
                    outage.outlived(key)
                return reply
        if outage.strict:
            raise outage.trouble()
        outage.used = True
        reply = await self._refuge.claim(key, token, ask)
        if isinstance(reply, Granted):
            outage.refuge_leases[token] = keeps
        elif isinstance(reply, Found):
            reply.own = True
        if reply.entry is None and not ask.force:
            reply.entry = self._kept(key)  # also for a key that rests: its caller computes nothing that could fail
        return reply

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> Ticket | bool | None:
        """None: it was begun under a lease of the engine, which can't say whether that stood to the end. Somebody may
        have invalidated the key there since, of which nobody tells us: so it isn't kept here, either."""
        outage = self._outage
        keeps = outage.refuge_leases.pop(token, None)
        if keeps is not None:
            brief = min(entry.fresh, keeps)
            return await self._refuge.fill(key, token, replace(entry, fresh=brief, keep=brief))
        try:
            return await self._port.fill(key, token, entry)
        except EngineClosed:
            return False
        except EngineError as error:
            outage.failed(error)
            outage.give_back(key, token)
        if outage.strict:
            raise outage.trouble()
        return None

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        outage = self._outage
        if outage.refuge_leases.pop(token, None) is not None:
            return await self._refuge.abandon(key, token, verdict, rest)
        if outage.down:
            return False  # it ends by itself
        try:
            return await self._port.abandon(key, token, verdict, rest)
        except EngineClosed:
            return True
        except EngineError as error:
            outage.failed(error)
            return False

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        outage = self._outage
        if busy.token in outage.refuge_leases:
            return await self._refuge.wait(key, busy, timeout)
        try:
            return await self._port.wait(key, busy, timeout)
        except EngineClosed:
            return None  # the next claim says so
        except EngineError as error:
            outage.failed(error)
            return None  # the next claim decides

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        port = self._refuge if token in self._outage.refuge_leases else self._port
        return await port.renew(key, token, lease)
