"""An engine that is down is not an outage: calls go on in this process, over a refuge of its own."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeVar

from stampede import events, forks
from stampede.breaker import Breaker
from stampede.colour import run_blocking
from stampede.entry import Entry, Verdict
from stampede.errors import EngineClosed, EngineError
from stampede.guarded import Guarded, Questions, or_late
from stampede.ports import Ask, Busy, Claims, Engine, Found, Granted, Reply, Ticket
from stampede.returns import Returns
from stampede.workers import Late, Told

__all__ = ["GuardedClaims", "Outage"]

T = TypeVar("T")

_log = logging.getLogger("stampede")
_DIGITS = re.compile(r"[\d.]+")  # ports and seconds, which make no other reason

REMINDER = 60.0
"""Seconds between two log lines about an outage that lasts, with the same reason."""

REFUGE_TTL = 5.0
"""Seconds that a value which the engine could not take is kept in this process."""

BRIEFLY = 1.0
"""The same where the engine refused it, and answers: somebody may invalidate it there, of which nobody tells us."""

QUIET = 10.0
"""Seconds without a refusal after which an engine that was full, and grants again, is so no more."""

PARTLY = 60.0
"""Seconds between two events of an engine that is down in part: its recovery can't be told from its other part's."""


class _Lease:
    """One that the engine granted."""

    __slots__ = ("late", "patience")

    def __init__(self, patience: float, *, late: bool = False) -> None:
        self.patience = patience  # for which its caller waits for the engine yet
        self.late = late  # or may do so yet: who asked was interrupted


class Outage(Questions):
    """What a cache knows about its engine's health, for both colours and all functions."""

    def __init__(
        self, name: str, engine: Engine, refuge: Engine, tell: Callable[[events.Event], object], *, strict: bool
    ) -> None:
        super().__init__(engine.silence)
        self.engine = name
        self.server_of = engine.server_of
        self.refuge = refuge  # inside this process
        self.strict = strict  # on_engine_error="raise"
        self.refugees: dict[bytes, float] = {}  # tokens of leases that the refuge granted, and for how long it keeps
        self.granted: dict[bytes, _Lease] = {}  # by their tokens
        self.used = False  # the refuge may have something
        self.unknown = Returns(engine, self)  # leases that may stand, to be given back
        self.last: EngineError | None = None
        self.closed = False  # by us, for good: that is no outage
        self.partly_since: float | None = None  # a part of the engine was down then
        self.full_since: float | None = None  # it answers, and takes nothing new
        self._refused_at = 0.0
        self._reasons: set[str] = set()  # of this outage, as far as they were logged
        self._remind_at = 0.0
        self._tell = tell
        self.breaker = Breaker()
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        """In a forked child: the threads that were inside are not here."""
        self._lock = threading.RLock()  # a finalizer, or a signal, may ask in the middle of this

    @property
    def down(self) -> bool:
        return self.breaker.outage is not None

    @property
    def lasts(self) -> float:
        """Seconds for which the engine has been down, or has taken nothing new, if it is so now; else 0."""
        outage = self.breaker.outage
        if self.full_since is not None:
            return time.monotonic() - self.full_since
        return 0.0 if outage is None else time.monotonic() - outage.since

    def may_ask(self) -> bool:
        return self.breaker.allow(time.monotonic())

    def failed(self, error: EngineError, *, probing: bool = False) -> None:
        """`probing`: it counted as down when it was asked."""
        if error.interrupted:
            return
        self.last = error
        if error.partial:
            self._failed_partly(error)
            if probing:
                self.answered()  # the rest is up
            return
        now, reason = time.monotonic(), _DIGITS.sub("", str(error))
        with self._lock:
            outage, again = self.breaker.outage, False
            self.breaker.failed(now)
            if outage is None:
                self._reasons, self._remind_at = {reason}, now + REMINDER
            elif reason not in self._reasons or now >= self._remind_at:
                again, self._remind_at = True, now + REMINDER
                self._reasons.add(reason)
        if outage is None:
            self._tell(events.EngineDown("", "", self.engine, error, self.strict))
        elif again:
            kind, seconds = type(error).__qualname__, now - outage.since
            _log.warning("%s is still down after %.0f s: %s: %s", self.engine, seconds, kind, error)

    def _failed_partly(self, error: EngineError) -> None:
        """This key is the refuge's for now; what the engine has of others is as good as ever."""
        now = time.monotonic()
        with self._lock:
            if error.refused:
                news, self._refused_at = self.full_since is None, now
                self.full_since = now if news else self.full_since
            else:
                news = self.partly_since is None or now - self.partly_since > PARTLY
                if news:
                    self.partly_since = now
        if news:
            self._tell(events.EngineDown("", "", self.engine, error, self.strict))

    def takes_again(self) -> None:
        """It has granted a lease, after it was full."""
        now = time.monotonic()
        with self._lock:
            since = self.full_since
            if since is None or now - self._refused_at < QUIET:  # of several servers, another one may be full
                return
            self.full_since = None
        self._tell(events.EngineUp("", "", self.engine, now - since))

    def forget(self, key: str) -> None:
        """What the refuge keeps of this key is not to be served any more."""
        if self.used:
            assert self.refuge.store is not None
            run_blocking(self.refuge.store.invalidate(key))

    def forget_all(self) -> None:
        """The same for all keys."""
        if self.used:
            assert self.refuge.store is not None
            run_blocking(self.refuge.store.bump(""))

    def outlived(self, key: str) -> None:
        """The engine answers for this key: by the next time that it does not, what was kept here may be too old."""
        assert self.refuge.store is not None
        if self.refuge.tier.get(key) is not None:
            run_blocking(self.refuge.store.invalidate(key))

    def owe(self, key: str, token: bytes) -> bool:
        """Have a lease given back, with others, and in nobody's time. False: it isn't the engine's."""
        if token in self.refugees:
            return False
        self.unknown.add(key, token)
        return True

    def claimed(self, key: str, token: bytes, probing: bool, reply: Any, error: BaseException | None) -> None:
        """A claim that was given up has an answer: what it was granted is nobody's."""
        if error is None and probing:
            self.answered()
        if error is not None:
            self.unknown.add(key, token, late=True)
        elif isinstance(reply, Granted):
            self.unknown.add(key, token)
            self.unknown.hurry()
        else:
            self.unknown.forget(token)

    def filled(self, key: str, token: bytes, _: Any, error: BaseException | None) -> None:
        """So has the end of a lease."""
        if error is not None:
            self.unknown.add(key, token)

    def trouble(self) -> EngineError:
        """What a caller is told that wants to know."""
        why = "no answer so far" if self.last is None or not self.down else self.last
        return EngineError(f"{self.engine} can't be asked: {why}")

    def answered(self) -> None:
        if not self.breaker.open:
            return
        with self._lock:
            was_open, now = self.breaker.open, time.monotonic()
            seconds = self.breaker.succeeded(now)
            if was_open and self.full_since is not None:  # before it was down: that is one outage
                seconds, self.full_since = now - self.full_since, None
        if was_open:
            self.unknown.hurry()
            assert self.refuge.store is not None
            run_blocking(self.refuge.store.bump(""))
            self._tell(events.EngineUp("", "", self.engine, seconds))


class GuardedClaims:
    """`Claims` that never fail: what the engine can't do is done by the refuge, one computation per key and process."""

    def __init__(
        self,
        port: Claims,
        refuge: Claims,
        outage: Outage,
        guarded: Guarded | None,
        kept: Callable[[str], Entry[Any] | None],
    ) -> None:
        """`guarded`: nobody waits for longer than its patience. `kept`: what the local tier has of a key."""
        self._kept = kept
        self._port = port
        self._refuge = refuge
        self._outage = outage
        self._guarded = guarded

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        outage, guarded, keeps, began = self._outage, self._guarded, REFUGE_TTL, 0.0
        if outage.closed:
            raise EngineClosed(outage.engine)
        probing = outage.down
        # Else to ask for its generation has just been the try: by an older one it would find what was cleared since.
        if not probing or (ask.since and outage.may_ask()):
            try:
                reply: Reply | Late
                if guarded is None:
                    reply = await or_late(self._port.claim(key, token, ask))
                elif ask.patience == inf:
                    reply = await self._port.claim(key, token, ask)
                else:
                    began, server = time.monotonic(), outage.server_of(key)
                    work, late = (
                        partial(self._port.claim, key, token, ask),
                        partial(outage.claimed, key, token, probing),
                    )
                    reply = await guarded.ask(work, ask.patience, late, server=server)
            except EngineClosed:
                outage.closed = True
                raise
            except EngineError as error:
                if error.interrupted:
                    return await self.claim(key, token, ask)  # what was granted to this token is granted again
                outage.failed(error, probing=probing)
                if error.refused:
                    keeps = BRIEFLY
                else:
                    outage.unknown.add(key, token, late=True)
            except BaseException:  # interrupted: what may have been granted is given back, and no more patiently
                outage.granted[token] = _Lease(ask.patience, late=True)
                raise
            else:
                if type(reply) is not Late:
                    if probing:  # or it was asked before the trouble, and its answer says nothing of that
                        outage.answered()
                    if outage.used:
                        outage.outlived(key)
                    if isinstance(reply, Granted):
                        if outage.full_since is not None:
                            outage.takes_again()
                        left = ask.patience if not began else ask.patience - (time.monotonic() - began)
                        outage.granted[token] = _Lease(left)
                    return reply
                if reply is Late.LATE:
                    outage.unknown.add(key, token, late=True)  # now, too: its loop may rest when it is answered
                keeps = BRIEFLY  # it may be well
        if outage.strict:
            raise outage.trouble() from outage.last
        outage.used = True
        reply = await self._refuge.claim(key, token, ask)
        if isinstance(reply, Granted):
            outage.refugees[token] = keeps
        elif isinstance(reply, Found):
            reply.own = True
        if reply.entry is None and not ask.force:
            reply.entry = self._kept(key)  # also for a key that rests: its caller computes nothing that could fail
        return reply

    async def _asked(self, key: str, token: bytes, work: Callable[[], Coroutine[Any, Any, T]], late: Told) -> T | Late:
        """By who has the lease: within what is left of its patience, of which this is a part."""
        lease = self._outage.granted.get(token)
        if self._guarded is None:
            return await or_late(work())
        if lease is None or lease.patience == inf:
            return await work()
        began = time.monotonic()
        try:
            return await self._guarded.ask(work, lease.patience, late, server=self._outage.server_of(key))
        finally:
            lease.patience -= time.monotonic() - began

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> Ticket | bool | None:
        """None: it was begun under a lease of the engine, which can't say whether that stood to the end. Somebody may
        have invalidated the key there since, of which nobody tells us: so it isn't kept here, either."""
        outage = self._outage
        keeps = outage.refugees.pop(token, None)
        if keeps is not None:
            brief = min(entry.fresh, keeps)
            return await self._refuge.fill(key, token, replace(entry, fresh=brief, keep=brief))
        stored: Ticket | bool | Late | None = Late.LATE
        try:
            work, late = partial(self._port.fill, key, token, entry), partial(outage.filled, key, token)
            stored = await self._asked(key, token, work, late)
        except EngineClosed:
            return False
        except EngineError as error:
            outage.failed(error)
            outage.unknown.add(key, token)
            if error.interrupted:
                stored = False
        outage.granted.pop(token, None)
        if not isinstance(stored, Late):
            return stored
        if stored is Late.UNASKED:
            outage.unknown.add(key, token)  # or it would stand to its end, and nobody has it
        if outage.strict:
            raise outage.trouble() from outage.last
        return None

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        outage = self._outage
        if outage.refugees.pop(token, None) is not None:
            return await self._refuge.abandon(key, token, verdict, rest)
        lease, stood = outage.granted.get(token), await self._abandoned(key, token, verdict, rest)
        late = lease is not None and lease.late
        if stood is None or (late and not stood):
            outage.unknown.add(key, token, late=late)  # it goes when the engine is back, or when it comes
        outage.granted.pop(token, None)  # and not before: if this is interrupted it is done again, no more patiently
        return bool(stood)

    async def _abandoned(self, key: str, token: bytes, verdict: Verdict | None, rest: float) -> bool | None:
        """Whether it stood; None: the engine can't say."""
        outage = self._outage
        if outage.down:
            return None
        try:
            work, late = partial(self._port.abandon, key, token, verdict, rest), partial(outage.filled, key, token)
            stood = await self._asked(key, token, work, late)
        except EngineClosed:
            return True
        except EngineError as error:
            outage.failed(error)
            return None
        return None if isinstance(stood, Late) else stood

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        outage = self._outage
        if busy.token in outage.refugees:
            return await self._refuge.wait(key, busy, timeout)
        guarded = self._guarded
        try:
            if guarded is None:
                return await self._port.wait(key, busy, timeout)
            news = await guarded.wait(lambda left: self._port.wait(key, busy, left), timeout)
            return None if isinstance(news, Late) else news
        except EngineClosed:
            return None  # the next claim says so
        except EngineError as error:
            outage.failed(error)
            return None  # the next claim decides

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        if token in self._outage.refugees:
            return await self._refuge.renew(key, token, lease)
        renewed = await self._asked(key, token, partial(self._port.renew, key, token, lease), _unheard)
        if isinstance(renewed, Late):
            raise self._outage.trouble()
        return renewed


def _unheard(result: object, error: BaseException | None) -> None:
    """Whether a lease stood is nothing to who has gone on."""
