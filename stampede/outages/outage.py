"""What answers while an engine is down: a refuge in this process, so that calls go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from stampede import events
from stampede.errors import EngineClosed, EngineError
from stampede.model.breaker import Breaker
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Busy, Claims, Engine, Found, Granted, Looked, Looks, Reply, Store, Ticket
from stampede.model.tags import TagsOfCall
from stampede.runtime import process_lock
from stampede.runtime.colour import run_blocking

__all__ = ["GuardedClaims", "Outage"]

_log = logging.getLogger("stampede")

REMINDER = 60.0
"""Seconds between two log lines, or events, about an outage that lasts."""

REFUGE_TTL = 5.0
"""Seconds for which this process keeps a value that the engine could not store."""

BRIEFLY = 1.0
"""Seconds for which this process keeps a value that a running engine refused, for example because it is full. This is
shorter, because the key may be invalidated there without this process knowing."""


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
        """Create the record of an engine that is up. `give_back` starts to give a lease back in another thread."""
        self.engine = name
        self.refuge = refuge  # the memory engine that answers instead
        self.strict = strict  # on_engine_error="raise"
        self.refuge_leases: dict[bytes, float] = {}  # by token: seconds for which its value is kept here
        self.used = False  # whether the refuge may have stored something
        self.give_back = give_back
        self.last = ""  # the text of the last failure; the error itself would keep frames alive
        self.closed = False  # closed by us, which is no outage
        self._remind_at = 0.0
        self._tell = tell
        self.breaker = Breaker()

    @property
    def down(self) -> bool:
        return self.breaker.since is not None

    @property
    def lasts(self) -> float:
        """Seconds for which the engine has been down, or 0 if it is up."""
        since = self.breaker.since
        return 0.0 if since is None else time.monotonic() - since

    def may_ask(self) -> bool:
        return self.breaker.allow(time.monotonic())

    def failed(self, error: EngineError, *, probing: bool = False) -> None:
        """Note that the engine failed to answer. `probing`: it counted as down when it was asked."""
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
            self.answered()  # the other parts of the engine are up

    @property
    def _store(self) -> Store:
        store = self.refuge.blocking.store
        assert store is not None
        return store

    def forget(self, key: str) -> None:
        """Stop serving what the refuge has stored for this key."""
        if self.used:
            run_blocking(self._store.invalidate(key))

    def forget_all(self) -> None:
        """Stop serving what the refuge has stored for any key."""
        if self.used:
            run_blocking(self._store.bump(""))

    def outlived(self, key: str) -> None:
        """Drop what the refuge has for a key that the engine answers for. It may be too old in the next outage."""
        if self.refuge.tier.get(key) is not None:
            run_blocking(self._store.invalidate(key))

    def trouble(self) -> EngineError:
        """Return the error to raise with on_engine_error="raise"."""
        return EngineError(f"{self.engine} cannot be used: {self.last}")

    def answered(self) -> None:
        if not self.breaker.open:
            return
        with process_lock.lock:
            was_open, seconds = self.breaker.open, self.breaker.succeeded(time.monotonic())
        if was_open:
            run_blocking(self._store.bump(""))
            self._tell(events.EngineUp("", "", self.engine, seconds))


class TaggedLooks(Protocol):
    """Reads of entries together with their tags (`algorithm/tags.py`)."""

    @property
    def hints(self) -> Mapping[str, Sequence[bytes]]:
        """Tags by key, as far as calls do not name them."""

    def names_for(self, key: str, call: TagsOfCall | None) -> Sequence[bytes]: ...
    async def look(self, key: str, names: Sequence[bytes], looked: Looked | None) -> Found | None: ...


class GuardedClaims:
    """`Claims` that never fail: if the engine fails, the refuge grants one computation per key and process."""

    def __init__(
        self,
        port: Claims,
        refuge: Claims,
        outage: Outage,
        kept: Callable[[str], Entry[Any] | None],
        looks: Looks | None = None,
        decoded: Callable[[str, Entry[Any]], Entry[Any] | None] = lambda key, entry: entry,
        tagged: TaggedLooks | None = None,
    ) -> None:
        """Create the port. `kept` returns what the local tier has; `looks` reads bytes of the engine for `decoded`;
        `tagged` is asked for entries with tags."""
        self._tagged = tagged
        self._kept = kept
        self._looks = looks
        self._decoded = decoded
        self._port = port
        self._refuge = refuge
        self._outage = outage

    async def look(self, key: str, ask: Ask) -> Found | None:
        """Return the stored entry if it is fresh. Return None also if the engine is down: the claim decides what to do.
        All is done in one step here, instead of a layer each for codec and outage, because this is the path of a
        hit."""
        outage = self._outage
        tagged, looked = self._tagged, ask.looked
        if outage.closed or outage.breaker.since is not None or (self._looks is None and looked is None):
            return None
        try:
            names: Sequence[bytes] = ()
            found: Found | None
            if tagged is not None and (ask.tags is not None or key in tagged.hints):
                names = tagged.names_for(key, ask.tags)
            if names and tagged is not None:
                found = await tagged.look(key, names, looked)
            elif looked is not None:
                found = looked.get(key)
            elif self._looks is not None:
                found = await self._looks.look(key)
            else:
                return None
        except EngineClosed:
            return None
        except EngineError as error:
            outage.failed(error)
            return None
        if found is None:
            return None
        entry = found.entry if names else self._decoded(key, found.entry)
        if entry is None or entry.fresh <= 0 or (entry.tags and not names):
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
        # A first claim is no probe: its call has just probed, by asking for the generation. Under an older generation
        # it would find what was cleared since.
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
                if probing:  # otherwise the question is older than the outage, and its answer says nothing about it
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
            # Also while the key rests: then nothing is computed that could replace a failed value.
            reply.entry = self._kept(key)
        return reply

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> Ticket | bool | None:
        """Store the value where the lease was granted: in the engine, or in the refuge. Return None if that is unknown.
        An engine that went down cannot say whether its lease is still valid. The key may have been invalidated there
        without this process knowing, so the value is not kept here, either."""
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
            return False  # the lease ends by itself
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
            return None  # the next claim raises it
        except EngineError as error:
            outage.failed(error)
            return None  # the next claim decides

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        port = self._refuge if token in self._outage.refuge_leases else self._port
        return await port.renew(key, token, lease)
