"""What every engine has to do: one suite for each port, for the tests of engines everywhere.

    class TestMine(ClaimsSuite, StoreSuite, LocksSuite):
        def make_engine(self):
            return MyEngine("mine://localhost")        # new and empty, for every test

    class TestMineAsync(TestMine):
        suspending = True

pytest and unittest both collect such classes. A case that an engine declares not to keep is skipped.
"""

from __future__ import annotations

import asyncio
import threading
import time
import unittest
from collections.abc import Awaitable, Callable, Coroutine, Generator
from math import inf
from typing import Any, ClassVar, TypeVar

from stampede.colour import run_blocking
from stampede.entry import GRACE, Entry, Verdict, new_id
from stampede.ports import Ask, Busy, Claims, Engine, Failed, Found, Granted, Locks, Store, Versioned
from stampede.testing.clock import FakeClock

__all__ = ["ClaimsSuite", "LocksSuite", "StoreSuite"]

T = TypeVar("T")
Scenario = Callable[[Any], Coroutine[Any, Any, None]]

LONG = 60.0  # a lease, or a timeout, that no test sits out
SOON = 10.0  # what has not happened by then won't
HERD = 16

KEYS = [
    "", " ", "a", "A", "a ", " a", "a\n", "a\r\n", "a\tb", "a\x00", "a\x00b", "\x00", "\x7f", "{a}", "}a{", "a:b",
    "a/b", "../a", ".", "..", "a%00", "a%20b", "*", "?", "'", '"', "\\", "é", "e\u0301", "K", "\u212a", "ß", "SS",
    "\U0001f40e", "\ufeff", "\uffff", "k" * 10_000, "k" * 9_999 + "l", "\U0001f40e" * 1_000,
]  # fmt: skip
"""Keys that are easily taken for each other, or for something else. (Lone surrogates are no text; keys have none.)"""

VALUES = [b"", b"\x00", b"0", b"END\r\n", b"\r\n", bytes(range(256)), "é".encode(), b"\xff" * 3, b"x" * 1_000_000]


def case(scenario: Scenario) -> Callable[[Any], None]:
    """A scenario as a test method: run in the suite's colour, over an engine of its own, and cleaned up."""

    def test(self: Any) -> None:
        self.engine = self.make_engine()
        try:
            self.peer = self.make_peer(self.engine)
            try:
                self._run(scenario(self))
            finally:
                if self.peer is not self.engine:
                    self.drop_engine(self.peer)
        finally:
            self.drop_engine(self.engine)

    # not functools.wraps: pytest would look through it, and take scenarios for what they are not
    test.__name__, test.__qualname__, test.__doc__ = scenario.__name__, scenario.__qualname__, scenario.__doc__
    return test


class _Suite:
    """What the suites have in common: an engine, a colour, and time."""

    suspending: ClassVar[bool] = False
    short: ClassVar[float] = 0.2  # the shortest lease that the engine tells from none, in seconds
    clock: FakeClock | None = None  # the one that `make_engine` gave its engine, if it did

    engine: Engine
    peer: Engine

    def make_engine(self) -> Engine:
        """A new engine with nothing in it."""
        raise NotImplementedError

    def make_peer(self, engine: Engine) -> Engine:
        """Another client of the same store, as another process would have; or the engine itself."""
        return engine

    def drop_engine(self, engine: Engine) -> None:
        engine.close()

    @case
    async def test_it_declares_what_it_can(self) -> None:
        """A cache could not tell what to rely on."""
        assert isinstance(self.engine, Engine)
        flags = (self.engine.shared, self.engine.fenced, self.engine.pushes, self.engine.coherent)
        assert all(flag is True or flag is False for flag in flags)
        assert 0 <= self.engine.ping() < SOON

    # -- colour

    def _run(self, scenario: Coroutine[Any, Any, None]) -> None:
        if self.suspending:
            asyncio.run(scenario)
        else:
            run_blocking(scenario)

    def beside(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Have a coroutine run beside this one, in a task or in a thread. Await what this returns."""
        return asyncio.ensure_future(work) if self.suspending else _Thread(work)

    async def pause(self, seconds: float) -> None:
        """Real time, for those who run beside us to get ahead, or for a server's clock."""
        if self.suspending:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)

    # -- time

    async def lapse(self, seconds: float) -> None:
        """Let so much of the engine's time pass."""
        if self.clock is not None:
            self.clock.advance(seconds)
        else:
            await self.pause(seconds)

    async def until(self, ask: Callable[[], Awaitable[T]], good: Callable[[T], bool], within: float = SOON) -> T:
        """The first good answer, asked for again and again as the engine's time passes."""
        step = self.short / 8
        for _ in range(int(within / step) + 1):
            answer = await ask()
            if good(answer):
                return answer
            await self.lapse(step)
        raise AssertionError(f"after {within} s it is still {answer!r}")

    async def in_time(
        self, begin: Callable[[], Awaitable[T | None]], go_on: Callable[[T], Awaitable[bool]] | None = None
    ) -> T:
        """Begin with a short lease, and go on while it stands; begin again if this machine was too slow for that."""
        for _ in range(20):
            begun = await begin()
            if begun is not None and (go_on is None or await go_on(begun)):
                return begun
        raise AssertionError("the lease has always ended before its time")

    def declared(self, what: bool, name: str) -> None:
        if not what:
            raise unittest.SkipTest(f"{self.engine.scheme}:// declares that it is not {name}")


class _Thread:
    """A coroutine of the blocking colour, in a thread of its own; awaiting it joins the thread."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        try:
            self._result = run_blocking(self._work)
        except BaseException as error:
            self._error = error

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._end().__await__()

    async def _end(self) -> Any:
        self._thread.join(2 * LONG)
        assert not self._thread.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._result


def some(value: Any = b"value", *, fresh: float = LONG, keep: float | None = None, **known: Any) -> Entry[Any]:
    """An entry, fresh for a minute unless told otherwise."""
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh if keep is None else keep, **known)


def is_granted(reply: object) -> bool:
    return isinstance(reply, Granted)


class _Keyed(_Suite):
    """The ports of an engine with values."""

    @property
    def claims(self) -> Claims:
        return _there(self.engine.aclaims if self.suspending else self.engine.claims)

    @property
    def store(self) -> Store:
        return _there(self.engine.astore if self.suspending else self.engine.store)

    @property
    def far_claims(self) -> Claims:
        """The same of the peer."""
        return _there(self.peer.aclaims if self.suspending else self.peer.claims)

    @property
    def far_store(self) -> Store:
        return _there(self.peer.astore if self.suspending else self.peer.store)

    async def granted(self, key: str = "k", **terms: Any) -> bytes:
        """A new token that has just been granted the key."""
        token = new_id()
        reply = await self.claims.claim(key, token, Ask(terms.pop("lease", LONG), **terms))
        assert isinstance(reply, Granted), reply
        return token

    async def busy(self, key: str = "k", **terms: Any) -> Busy:
        """What a passer-by is told, who must not be granted the key."""
        reply = await self.far_claims.claim(key, new_id(), Ask(LONG, **terms))
        assert isinstance(reply, Busy), reply
        return reply

    async def found(self, key: str = "k", **terms: Any) -> Entry[Any]:
        reply = await self.far_claims.claim(key, new_id(), Ask(LONG, **terms))
        assert isinstance(reply, Found), reply
        return reply.entry

    async def kept(self, key: str = "k") -> Entry[Any] | None:
        return (await self.store.get([key]))[0]


def _there(port: T | None) -> T:
    if port is None:
        raise unittest.SkipTest("the engine has no such port")
    return port


class ClaimsSuite(_Keyed):
    """The verbs of the algorithm."""

    # -- claim

    @case
    async def test_missing_is_granted(self) -> None:
        """A cold key would never be computed."""
        reply = await self.claims.claim("k", new_id(), Ask(LONG))
        assert isinstance(reply, Granted)
        assert reply.entry is None

    @case
    async def test_filled_is_found_as_it_was(self) -> None:
        """A value, or what is known of its computation, would change on its way through the engine."""
        entry = some(b"v", fresh=50.0, keep=LONG, cost=0.25, margin=1.5, raised=True)
        assert await self.claims.fill("k", await self.granted(), entry)
        found = await self.found()
        assert (found.value, found.id, found.cost, found.margin) == (b"v", entry.id, 0.25, 1.5)
        assert found.ttl == 50.0
        assert found.raised is True
        assert 50.0 - SOON < found.fresh <= 50.0
        assert LONG - SOON < found.keep <= LONG

    @case
    async def test_for_ever_stays_for_ever(self) -> None:
        """A value without an end would end, or its durations would turn into nonsense."""
        assert await self.claims.fill("k", await self.granted(), some(fresh=inf))
        found = await self.found()
        assert (found.ttl, found.fresh, found.keep) == (inf, inf, inf)

    @case
    async def test_years_are_kept(self) -> None:
        """A long duration would be taken for a date, or overflow."""
        for days in (31, 3_650, 36_500):
            seconds = days * 86_400.0
            await self.far_store.set("k", some(fresh=seconds))
            assert seconds - SOON < (await self.found()).fresh <= seconds

    @case
    async def test_one_lease_at_a_time(self) -> None:
        """Two would compute; and those who wait wouldn't know for whom, or how long."""
        token = await self.granted()
        busy = await self.busy()
        assert busy.token == token
        assert LONG - SOON < busy.lease <= LONG
        assert busy.entry is None

    @case
    async def test_leases_of_two_keys_are_two(self) -> None:
        """One computation would hold up all others."""
        await self.granted("k")
        await self.granted("l")

    @case
    async def test_own_token_is_granted_again(self) -> None:
        """A reply lost on the wire would lock its caller out by its own lease."""
        token = await self.granted()
        for _ in range(3):
            assert isinstance(await self.claims.claim("k", token, Ask(LONG)), Granted)
        assert (await self.busy()).token == token
        assert await self.claims.fill("k", token, some())

    @case
    async def test_own_token_is_granted_again_by_force(self) -> None:
        """The same of a refresh whose reply was lost."""
        token = await self.granted(force=True)
        assert isinstance(await self.claims.claim("k", token, Ask(LONG, force=True)), Granted)
        assert await self.claims.fill("k", token, some())

    @case
    async def test_granted_again_stands_from_then_on(self) -> None:
        """The second grant would be worth less than it says."""
        token = await self.granted(lease=self.short)
        assert isinstance(await self.claims.claim("k", token, Ask(LONG)), Granted)
        assert (await self.busy()).lease > LONG - SOON

    @case
    async def test_a_lease_ends(self) -> None:
        """A dead holder would block its key for ever."""
        await self.granted(lease=self.short)
        other = new_id()
        await self.until(lambda: self.far_claims.claim("k", other, Ask(LONG)), is_granted)

    @case
    async def test_a_value_ends(self) -> None:
        """An old value would be given out as fresh."""
        await self.store.set("k", some(fresh=self.short))
        token = new_id()
        reply = await self.until(lambda: self.claims.claim("k", token, Ask(LONG)), is_granted)
        assert isinstance(reply, Granted)
        assert reply.entry is None

    @case
    async def test_stale_goes_with_the_grant(self) -> None:
        """What may be served if the computation fails would be lost."""
        entry = some(fresh=0.0, keep=LONG)
        await self.store.set("k", entry)
        reply = await self.claims.claim("k", new_id(), Ask(LONG))
        assert isinstance(reply, Granted)
        assert reply.entry is not None
        assert reply.entry.id == entry.id
        assert reply.entry.fresh <= 0

    @case
    async def test_stale_is_handed_out_while_busy(self) -> None:
        """Everybody would wait although there is something to serve."""
        entry = some(b"old", fresh=0.0, keep=LONG)
        await self.store.set("k", entry)
        await self.granted()
        kept = (await self.busy()).entry
        assert kept is not None
        assert (kept.id, kept.value) == (entry.id, b"old")
        assert kept.fresh <= 0

    @case
    async def test_kept_has_an_end_too(self) -> None:
        """Stale values would be served long after they should be gone."""
        await self.store.set("k", some(fresh=0.0, keep=self.short))
        await self.until(self.kept, lambda entry: entry is None)
        reply = await self.claims.claim("k", new_id(), Ask(LONG))
        assert isinstance(reply, Granted)
        assert reply.entry is None

    @case
    async def test_good_for_those_who_waited(self) -> None:
        """With a short ttl, waiters would come too late for the value and compute in turn."""
        entry = some(fresh=0.0)
        assert await self.claims.fill("k", await self.granted(), entry)
        assert (await self.found(since=SOON)).id == entry.id

    @case
    async def test_grace_is_not_stale(self) -> None:
        """What is kept a moment longer for waiters would be served to everybody."""
        await self.store.set("k", some(fresh=0.0))
        assert await self.kept() is None
        reply = await self.claims.claim("k", new_id(), Ask(LONG))
        assert isinstance(reply, Granted)
        assert reply.entry is None
        assert (await self.busy()).entry is None

    @case
    async def test_seen_is_not_good_enough(self) -> None:
        """An early refresh would find the value that it is to replace."""
        entry = some()
        await self.store.set("k", entry)
        reply = await self.claims.claim("k", new_id(), Ask(LONG, seen=entry.id))
        assert isinstance(reply, Granted)
        assert reply.entry is not None
        assert reply.entry.id == entry.id
        assert reply.entry.fresh > 0
        busy = await self.busy(seen=entry.id)
        assert busy.entry is not None
        assert busy.entry.id == entry.id
        assert (await self.found()).id == entry.id  # of which nobody else takes notice

    @case
    async def test_another_than_seen_is_found(self) -> None:
        """The second of two early refreshes would compute what the first has just stored."""
        entry = some()
        await self.store.set("k", entry)
        assert (await self.found(seen=new_id())).id == entry.id

    @case
    async def test_draws_never_hide_a_value(self) -> None:
        """A due entry would be neither found nor served meanwhile."""
        entry = some(cost=1.0, margin=1.0)
        await self.store.set("k", entry)
        assert (await self.found(draw=0.0)).id == entry.id
        first = await self.claims.claim("k", new_id(), Ask(LONG, draw=1e9))
        second = await self.claims.claim("k", new_id(), Ask(LONG, draw=1e9))
        assert isinstance(first, (Found, Granted))
        assert isinstance(second, (Found, Busy))
        for reply in (first, second):
            assert reply.entry is not None
            assert reply.entry.id == entry.id

    @case
    async def test_force_is_granted_over_a_fresh_value(self) -> None:
        """`refresh` would return what is there."""
        old, new = some(b"old"), some(b"new")
        await self.store.set("k", old)
        token = new_id()
        reply = await self.claims.claim("k", token, Ask(LONG, force=True))
        assert isinstance(reply, Granted)
        assert reply.entry is not None
        assert reply.entry.id == old.id
        assert await self.claims.fill("k", token, new)
        assert (await self.found()).value == b"new"

    @case
    async def test_force_kills_the_standing_lease(self) -> None:
        """`refresh` would join an older computation, or be overwritten by it."""
        self.declared(self.engine.fenced, "fenced")
        older = await self.granted()
        newer = await self.granted(force=True)
        assert (await self.busy()).token == newer
        assert not await self.claims.fill("k", older, some(b"older"))
        assert await self.claims.fill("k", newer, some(b"newer"))
        assert (await self.found()).value == b"newer"

    @case
    async def test_force_kills_it_over_a_value_too(self) -> None:
        """The same where something is kept, which stays there meanwhile."""
        self.declared(self.engine.fenced, "fenced")
        await self.store.set("k", some(b"stale", fresh=0.0, keep=LONG))
        older = await self.granted()
        newer = await self.granted(force=True)
        assert not await self.claims.fill("k", older, some(b"older"))
        kept = (await self.busy()).entry
        assert kept is not None
        assert kept.value == b"stale"
        assert await self.claims.fill("k", newer, some(b"newer"))
        assert (await self.found()).value == b"newer"

    @case
    async def test_one_of_many_is_granted(self) -> None:
        """The stampede."""
        claims = [self.far_claims, self.claims] * (HERD // 2)
        herd = [self.beside(port.claim("k", new_id(), Ask(LONG))) for port in claims]
        replies = [await one for one in herd]
        assert sum(isinstance(reply, Granted) for reply in replies) == 1
        assert sum(isinstance(reply, Busy) for reply in replies) == HERD - 1

    @case
    async def test_one_of_many_is_granted_what_ended(self) -> None:
        """The same when a holder has died: its lease would be handed to several."""
        await self.granted(lease=self.short)
        tokens = [new_id() for _ in range(HERD)]

        async def persist(token: bytes) -> object:
            return await self.until(
                lambda: self.claims.claim("k", token, Ask(LONG)),
                lambda reply: isinstance(reply, Granted) or (isinstance(reply, Busy) and reply.token in tokens),
            )

        replies = [await one for one in [self.beside(persist(token)) for token in tokens]]
        assert sum(isinstance(reply, Granted) for reply in replies) == 1

    # -- fill

    @case
    async def test_fill_drops_the_lease(self) -> None:
        """The next computation would have to wait for a lease that nobody holds."""
        token, entry = await self.granted(), some()
        assert await self.claims.fill("k", token, entry)
        await self.granted(seen=entry.id)
        assert not await self.claims.renew("k", token, LONG)

    @case
    async def test_fill_over_what_has_ended_meanwhile(self) -> None:
        """A computation that outlasts the stale value it is to replace would not be stored."""
        await self.store.set("k", some(b"old", fresh=0.0, keep=self.short))
        token = await self.granted()
        await self.until(self.kept, lambda entry: entry is None)
        if self.clock is not None:
            self.clock.advance(GRACE + self.short)
        assert await self.claims.renew("k", token, LONG)
        assert await self.claims.fill("k", token, some(b"new"))
        assert (await self.found()).value == b"new"

    @case
    async def test_fill_twice_changes_nothing(self) -> None:
        """A fill that was sent again would undo what happened in between."""
        token, entry = await self.granted(), some(b"first")
        assert await self.claims.fill("k", token, entry)
        await self.claims.fill("k", token, entry)
        assert (await self.found()).id == entry.id
        await self.store.set("k", some(b"second"))
        assert not await self.claims.fill("k", token, entry)
        assert (await self.found()).value == b"second"

    @case
    async def test_fill_without_a_lease_is_refused(self) -> None:
        """Anybody could store anything."""
        assert not await self.claims.fill("k", new_id(), some())
        assert await self.kept() is None
        token = await self.granted()
        assert not await self.claims.fill("k", new_id(), some())
        assert (await self.busy()).token == token

    @case
    async def test_fill_after_the_lease_is_refused(self) -> None:
        """A holder that was frozen would store what is out of date."""
        token = await self.granted(lease=self.short)
        other = new_id()
        await self.until(lambda: self.far_claims.claim("k", other, Ask(LONG)), is_granted)
        assert not await self.claims.fill("k", token, some(b"late"))
        assert await self.kept() is None
        assert await self.far_claims.fill("k", other, some(b"in time"))
        assert not await self.claims.fill("k", token, some(b"later"))
        assert (await self.found()).value == b"in time"

    @case
    async def test_fill_after_an_end_nobody_noticed_is_refused(self) -> None:
        """The same where nobody has claimed since."""
        token = await self.granted(lease=self.short)
        await self.lapse(1.5 * self.short)
        assert not await self.claims.fill("k", token, some(b"late"))
        assert await self.kept() is None

    @case
    async def test_fill_after_invalidate_is_refused(self) -> None:
        """A value computed before the invalidation would live on after it."""
        self.declared(self.engine.fenced, "fenced")
        token = await self.granted()
        await self.far_store.invalidate("k")
        assert not await self.claims.fill("k", token, some(b"old"))
        assert await self.kept() is None
        newer = await self.granted()
        assert not await self.claims.fill("k", token, some(b"old"))
        assert await self.claims.fill("k", newer, some(b"new"))
        assert (await self.found()).value == b"new"

    @case
    async def test_refresh_of_a_value_after_invalidate_is_refused(self) -> None:
        """The same of an early refresh."""
        self.declared(self.engine.fenced, "fenced")
        entry = some()
        await self.store.set("k", entry)
        token = await self.granted(seen=entry.id)
        assert await self.far_store.invalidate("k")
        assert not await self.claims.fill("k", token, some(b"old"))
        assert await self.kept() is None

    @case
    async def test_fill_after_set_is_refused(self) -> None:
        """What somebody has set would be overwritten by an older computation."""
        self.declared(self.engine.fenced, "fenced")
        token = await self.granted()
        await self.far_store.set("k", some(b"set"))
        assert not await self.claims.fill("k", token, some(b"old"))
        assert (await self.found()).value == b"set"

    # -- abandon

    @case
    async def test_abandon_lets_the_next_one_try(self) -> None:
        """One error would block the key for a lease."""
        token = await self.granted()
        await self.claims.abandon("k", token)
        await self.granted()
        assert not await self.claims.fill("k", token, some())

    @case
    async def test_abandoning_another_token_is_harmless(self) -> None:
        """A caller whose outcome is unknown would rob the holder, or leave a verdict on it."""
        await self.claims.abandon("k", new_id(), Verdict("failed"), rest=LONG)
        token, stranger = await self.granted(), new_id()
        await self.claims.abandon("k", stranger, Verdict("failed"), rest=LONG)
        assert (await self.busy()).token == token
        assert (await self.busy(awaited=stranger)).token == token
        assert await self.claims.fill("k", token, some())

    @case
    async def test_verdict_answers_those_who_waited(self) -> None:
        """Waiters would try a failing origin one after another."""
        token = await self.granted()
        verdict = Verdict("failed", "app.errors.Böse", "no\x00 such\n table: 'x' \U0001f40e")
        await self.claims.abandon("k", token, verdict)
        for _ in range(3):
            reply = await self.far_claims.claim("k", new_id(), Ask(LONG, awaited=token))
            assert isinstance(reply, Failed)
            assert reply.verdict == verdict
            assert reply.entry is None
            assert reply.rest <= 0
        await self.granted(awaited=new_id())

    @case
    async def test_verdict_outlives_the_next_lease(self) -> None:
        """A waiter that is slow to wake would wait once more, for the next one's failure."""
        first = await self.granted()
        await self.claims.abandon("k", first, Verdict("failed", "First"))
        await self.granted()
        reply = await self.far_claims.claim("k", new_id(), Ask(LONG, awaited=first))
        assert isinstance(reply, Failed)
        assert reply.verdict.type_name == "First"

    @case
    async def test_verdict_comes_with_what_is_kept(self) -> None:
        """An error would be raised although something could be served."""
        entry = some(fresh=0.0, keep=LONG)
        await self.store.set("k", entry)
        token = await self.granted()
        await self.claims.abandon("k", token, Verdict("failed"))
        reply = await self.far_claims.claim("k", new_id(), Ask(LONG, awaited=token))
        assert isinstance(reply, Failed)
        assert reply.entry is not None
        assert reply.entry.id == entry.id

    @case
    async def test_a_value_goes_before_a_verdict(self) -> None:
        """Waiters would be told of a failure although the next one has succeeded."""
        first = await self.granted()
        await self.claims.abandon("k", first, Verdict("failed"))
        assert await self.claims.fill("k", await self.granted(), some(b"after all"))
        assert (await self.found(awaited=first)).value == b"after all"

    @case
    async def test_without_a_verdict_waiters_claim(self) -> None:
        """A cancelled computation would be taken for a failed one."""
        token = await self.granted()
        await self.claims.abandon("k", token)
        await self.granted(awaited=token)

    @case
    async def test_a_resting_key_is_granted_to_nobody(self) -> None:
        """`retry_after` would not keep anybody from hammering the origin."""
        verdict = Verdict("failed", "ValueError", "no")
        await self.claims.abandon("k", await self.granted(), verdict, rest=LONG)
        reply = await self.far_claims.claim("k", new_id(), Ask(LONG))
        assert isinstance(reply, Failed)
        assert reply.verdict == verdict
        assert reply.entry is None
        assert LONG - SOON < reply.rest <= LONG

    @case
    async def test_a_rest_comes_with_what_is_kept(self) -> None:
        """What may be served meanwhile would be lost."""
        entry = some()
        await self.store.set("k", entry)
        await self.claims.abandon("k", await self.granted(seen=entry.id), Verdict("failed"), rest=LONG)
        assert (await self.found()).id == entry.id
        reply = await self.claims.claim("k", new_id(), Ask(LONG, seen=entry.id))
        assert isinstance(reply, Failed)
        assert reply.entry is not None
        assert reply.entry.id == entry.id

    @case
    async def test_force_wakes_a_resting_key(self) -> None:
        """`refresh` could not be used to see whether the origin is well again."""
        await self.claims.abandon("k", await self.granted(), Verdict("failed"), rest=LONG)
        assert await self.claims.fill("k", await self.granted(force=True), some(b"well"))
        assert (await self.found()).value == b"well"

    @case
    async def test_a_rest_ends(self) -> None:
        """One failure would be the last try."""
        await self.claims.abandon("k", await self.granted(), Verdict("failed"), rest=self.short)
        token = new_id()
        await self.until(lambda: self.claims.claim("k", token, Ask(LONG)), is_granted)

    @case
    async def test_invalidate_ends_verdict_and_rest(self) -> None:
        """After the cause was mended and the key invalidated, callers would still be told of the failure."""
        token = await self.granted()
        await self.claims.abandon("k", token, Verdict("failed"), rest=LONG)
        await self.far_store.invalidate("k")
        await self.granted(awaited=token)

    # -- renew

    @case
    async def test_renew_moves_the_end(self) -> None:
        """A computation longer than its lease would be done twice."""
        token = await self.in_time(
            lambda: self.granted(lease=self.short, force=True), lambda token: self.claims.renew("k", token, LONG)
        )
        assert (await self.busy()).lease > LONG - SOON
        await self.lapse(1.5 * self.short)
        assert (await self.busy()).token == token
        assert await self.claims.fill("k", token, some())

    @case
    async def test_renew_counts_from_now(self) -> None:
        """A holder that died after a renewal would block its key for more than a lease."""
        token = await self.granted()
        assert await self.claims.renew("k", token, self.short)
        other = new_id()
        await self.until(lambda: self.far_claims.claim("k", other, Ask(LONG)), is_granted)

    @case
    async def test_a_lost_lease_is_not_renewed(self) -> None:
        """Its holder would believe that it still had it; or have it again."""
        assert not await self.claims.renew("k", new_id(), LONG)
        ended = await self.granted(lease=self.short)
        await self.lapse(1.5 * self.short)
        assert not await self.claims.renew("k", ended, LONG)
        standing = await self.granted()
        assert not await self.claims.renew("k", ended, LONG)
        assert (await self.busy()).token == standing
        await self.claims.abandon("k", standing)
        assert not await self.claims.renew("k", standing, LONG)

    @case
    async def test_a_killed_lease_is_not_renewed(self) -> None:
        """A computation that can't be stored any more would keep others from theirs."""
        self.declared(self.engine.fenced, "fenced")
        token = await self.granted()
        await self.far_store.invalidate("k")
        assert not await self.claims.renew("k", token, LONG)
        await self.granted()

    # -- wait

    async def short_and_busy(self) -> Busy | None:
        await self.granted(lease=self.short, force=True)
        reply = await self.far_claims.claim("k", new_id(), Ask(self.short))
        return reply if isinstance(reply, Busy) else None

    async def woken(self, act: Callable[[bytes], Awaitable[object]]) -> None:
        """Have two wait for a lease; `act` must wake both, and a third one that comes too late to hear it."""
        token = await self.granted()
        busy, other = await self.busy(), await self.busy()
        start = time.monotonic()
        waiters = [
            self.beside(self.claims.wait("k", busy, LONG)),
            self.beside(self.far_claims.wait("k", other, LONG)),
        ]
        await self.pause(0.02)  # most likely they sleep by then; if not, they must not miss it either
        await act(token)
        await self.claims.wait("k", busy, LONG)
        for waiter in waiters:
            await waiter
        assert time.monotonic() - start < SOON

    @case
    async def test_fill_wakes(self) -> None:
        """The herd would sleep until the lease ends."""
        await self.woken(lambda token: self.claims.fill("k", token, some()))

    @case
    async def test_abandon_wakes(self) -> None:
        """The same after a failure."""
        await self.woken(lambda token: self.claims.abandon("k", token, Verdict("failed")))

    @case
    async def test_invalidate_wakes(self) -> None:
        """Waiters would go on waiting for a value that will be refused."""
        self.declared(self.engine.fenced, "fenced")
        await self.woken(lambda _: self.far_store.invalidate("k"))

    @case
    async def test_set_wakes(self) -> None:
        """Waiters would sleep although the value is there."""
        self.declared(self.engine.fenced, "fenced")
        await self.woken(lambda _: self.far_store.set("k", some()))

    @case
    async def test_force_wakes(self) -> None:
        """Waiters would sleep for a lease that is dead."""
        self.declared(self.engine.fenced, "fenced")
        await self.woken(lambda _: self.far_claims.claim("k", new_id(), Ask(LONG, force=True)))

    @case
    async def test_wait_is_over_with_the_lease(self) -> None:
        """Those who wait for a dead holder would sleep on."""
        busy = await self.in_time(self.short_and_busy)
        start = time.monotonic()
        await self.claims.wait("k", busy, LONG)
        assert time.monotonic() - start < SOON

    @case
    async def test_wait_is_over_with_its_time(self) -> None:
        """`wait` would not be kept."""
        await self.granted()
        busy = await self.busy()
        for timeout in (0.0, 0.05):
            start = time.monotonic()
            assert await self.claims.wait("k", busy, timeout) is None
            assert time.monotonic() - start < SOON

    @case
    async def test_news_may_bring_only_the_truth(self) -> None:
        """A waiter would be handed another value than the one that was stored."""
        token, entry = await self.granted(), some(b"news")
        busy = await self.busy()
        waiter = self.beside(self.claims.wait("k", busy, LONG))
        await self.pause(0.02)
        assert await self.claims.fill("k", token, entry)
        news = await waiter
        assert news is None or (news.entry.id, news.entry.value) == (entry.id, b"news")
        assert (await self.found(awaited=token, since=1.0)).id == entry.id

    @case
    async def test_a_herd_is_woken(self) -> None:
        """Some of many waiters would be forgotten."""
        token = await self.granted()
        busy = await self.busy()
        start = time.monotonic()
        herd = [self.beside(self.claims.wait("k", busy, LONG)) for _ in range(HERD)]
        await self.pause(0.02)
        await self.far_claims.fill("k", token, some())
        for one in herd:
            await one
        assert time.monotonic() - start < SOON

    @case
    async def test_the_colours_wake_each_other(self) -> None:
        """Sync callers would sleep through what async callers do, or the other way round."""
        blocking, suspending = _there(self.engine.claims), _there(self.engine.aclaims)

        async def scenario() -> None:
            for first, second in ((blocking, suspending), (suspending, blocking)):
                token = new_id()
                assert isinstance(await first.claim("c", token, Ask(LONG)), Granted)
                busy = await blocking.claim("c", new_id(), Ask(LONG))
                assert isinstance(busy, Busy)
                start = time.monotonic()
                asleep = asyncio.ensure_future(suspending.wait("c", busy, LONG))
                thread = _Thread(blocking.wait("c", busy, LONG))
                await asyncio.sleep(0.02)
                await second.abandon("c", token)
                await asleep
                await thread
                assert time.monotonic() - start < SOON

        if self.suspending:
            await scenario()
        else:
            asyncio.run(scenario())

    # -- keys and values

    @case
    async def test_keys_are_exact(self) -> None:
        """Two callers with different arguments would get one value."""
        for number, key in enumerate(KEYS):
            assert await self.claims.fill(key, await self.granted(key), some(b"%d" % number)), key
        for number, key in enumerate(KEYS):
            assert (await self.found(key)).value == b"%d" % number, key

    @case
    async def test_values_are_exact(self) -> None:
        """A value would come back as another, or not at all."""
        for value in VALUES:
            token = await self.granted(force=True)
            assert await self.claims.fill("k", token, some(value))
            assert (await self.found()).value == value


class StoreSuite(_Keyed):
    """The verbs that are no part of a computation."""

    @case
    async def test_set_is_kept(self) -> None:
        """`set` would not set."""
        entry = some(b"v", fresh=50.0, keep=LONG, cost=0.25, margin=1.5, raised=True)
        await self.store.set("k", entry)
        (found,) = await self.far_store.get(["k"])
        assert found is not None
        assert (found.value, found.id, found.cost, found.margin) == (b"v", entry.id, 0.25, 1.5)
        assert (found.ttl, found.raised) == (50.0, True)
        assert 50.0 - SOON < found.fresh <= 50.0
        assert LONG - SOON < found.keep <= LONG

    @case
    async def test_set_replaces(self) -> None:
        """The first value would stay."""
        await self.store.set("k", some(b"one"))
        await self.far_store.set("k", some(b"two"))
        entry = await self.kept()
        assert entry is not None
        assert entry.value == b"two"

    @case
    async def test_get_of_many_is_in_order(self) -> None:
        """Values would be given to the wrong keys."""
        for name in ("a", "b", "d"):
            await self.store.set(name, some(name.encode()))
        answers = await self.store.get(["d", "c", "a", "b", "a"])
        assert [None if one is None else one.value for one in answers] == [b"d", None, b"a", b"b", b"a"]
        assert await self.store.get([]) == []

    @case
    async def test_get_of_very_many(self) -> None:
        """A batch would run into a limit of the engine's protocol."""
        names = [f"key {number}" for number in range(2_000)]
        await self.store.set(names[-1], some(b"last"))
        answers = await self.store.get(names)
        assert len(answers) == len(names)
        assert answers[:-1] == [None] * (len(names) - 1)
        assert answers[-1] is not None

    @case
    async def test_get_gives_no_leave_to_compute(self) -> None:
        """Looking would keep others from computing."""
        assert await self.kept() is None
        if self.engine.claims is not None:
            await self.granted()

    @case
    async def test_get_gives_what_is_stale(self) -> None:
        """`peek` would not see what calls are served."""
        entry = some(fresh=0.0, keep=LONG)
        await self.store.set("k", entry)
        kept = await self.kept()
        assert kept is not None
        assert kept.id == entry.id
        assert kept.fresh <= 0

    @case
    async def test_expired_is_stale_and_kept(self) -> None:
        """`expire` would remove, or do nothing."""
        entry = some(b"v", fresh=50.0, keep=LONG)
        await self.store.set("k", entry)
        assert await self.far_store.expire("k") is True
        kept = await self.kept()
        assert kept is not None
        assert (kept.id, kept.value) == (entry.id, b"v")
        assert kept.fresh <= 0
        assert LONG - SOON < kept.keep <= LONG

    @case
    async def test_expired_without_stale_is_kept_too(self) -> None:
        """`expire` would be `invalidate` where `stale` is 0."""
        for fresh in (LONG, inf):
            await self.store.set("k", some(fresh=fresh))
            assert await self.store.expire("k") is True
            kept = await self.kept()
            assert kept is not None
            assert kept.fresh <= 0
            assert kept.keep > LONG - SOON

    @case
    async def test_expire_says_whether_there_was_something_fresh(self) -> None:
        """Its caller couldn't tell."""
        assert await self.store.expire("k") is False
        await self.store.set("k", some(fresh=0.0, keep=LONG))
        assert await self.store.expire("k") is False
        await self.store.set("k", some())
        assert await self.store.expire("k") is True
        assert await self.store.expire("k") is False

    @case
    async def test_invalidated_is_gone(self) -> None:
        """`invalidate` would leave something to be served."""
        for keep in (LONG, 2 * LONG):
            await self.store.set("k", some(keep=keep))
            assert await self.far_store.invalidate("k") is True
            assert await self.kept() is None

    @case
    async def test_invalidated_is_gone_for_waiters_too(self) -> None:
        """Those who have been waiting would get what was invalidated meanwhile."""
        await self.store.set("k", some(fresh=0.0))
        await self.store.invalidate("k")
        if self.engine.claims is not None:
            await self.granted(since=SOON)

    @case
    async def test_invalidate_says_whether_there_was_a_value(self) -> None:
        """Its caller couldn't tell."""
        assert await self.store.invalidate("k") is False
        await self.store.set("k", some(fresh=0.0, keep=LONG))
        assert await self.store.invalidate("k") is True
        assert await self.store.invalidate("k") is False

    @case
    async def test_invalidate_leaves_other_keys_alone(self) -> None:
        """One invalidation would empty more than its key."""
        for key in KEYS:
            await self.store.set(key, some())
        for key in KEYS[::2]:
            assert await self.store.invalidate(key) is True
        answers = await self.store.get(KEYS)
        assert [one is not None for one in answers] == [number % 2 == 1 for number in range(len(KEYS))]

    @case
    async def test_set_after_invalidate_stays(self) -> None:
        """What guards against late fills would keep new values out."""
        for value in (b"one", b"two"):
            await self.store.invalidate("k")
            await self.store.set("k", some(value))
            kept = await self.kept()
            assert kept is not None
            assert kept.value == value

    @case
    async def test_generations_change_by_bump_alone(self) -> None:
        """Everything would be lost at every look; or nothing at `invalidate_all`."""
        before = await self.store.generation("f")
        assert isinstance(before, str)
        assert await self.store.generation("f") == before
        await self.store.bump("f")
        after = await self.store.generation("f")
        assert after != before
        assert await self.store.generation("f") == after

    @case
    async def test_a_bump_reaches_others(self) -> None:
        """`invalidate_all` would hold in one process only."""
        before = await self.far_store.generation("f")
        await self.store.bump("f")
        await self.until(lambda: self.far_store.generation("f"), lambda now: now != before, within=2.0)
        assert await self.far_store.generation("f") == await self.store.generation("f")

    @case
    async def test_a_bump_leaves_other_scopes_alone(self) -> None:
        """`f.invalidate_all` would empty g."""
        before = [await self.store.generation(scope) for scope in ("f", "g", "F", "")]
        await self.store.bump("f")
        after = [await self.store.generation(scope) for scope in ("f", "g", "F", "")]
        assert [one == two for one, two in zip(before, after, strict=True)] == [False, True, True, True]

    @case
    async def test_the_bump_of_all_reaches_all(self) -> None:
        """`clear` would leave functions out: those never bumped, or those never heard of."""
        await self.store.bump("f")
        scopes = ["f", "g", "", "never asked for"]
        before = [await self.store.generation(scope) for scope in scopes[:3]]
        await self.store.bump("")
        after = [await self.store.generation(scope) for scope in scopes]
        assert not set(before) & set(after)

    @case
    async def test_generations_never_come_back(self) -> None:
        """What was invalidated twice would be there again."""
        met = set()
        for step in ("f", "", "f", "f", "", "", "f"):
            now = await self.store.generation("f")
            assert now not in met
            met.add(now)
            await self.store.bump(step)
        assert await self.store.generation("f") not in met

    @case
    async def test_none_is_a_value(self) -> None:
        """Functions that return None would be computed at every call."""
        self.declared(not self.engine.shared, "one that holds objects")
        for value in (None, False, 0, "", (), object()):
            await self.store.set("k", some(value))
            kept = await self.kept()
            assert kept is not None
            assert kept.value is value

    @case
    async def test_replace_only_what_was_seen(self) -> None:
        """`Paired` would overwrite what somebody else has stored meanwhile."""
        store, far = self.store, self.far_store
        if not isinstance(store, Versioned) or not isinstance(far, Versioned):
            raise unittest.SkipTest("the store is not versioned")
        first, second, third = some(b"1"), some(b"2", fresh=0.0, keep=LONG), some(b"3")
        assert not await store.replace("k", new_id(), first)
        assert await store.replace("k", None, first)
        assert not await far.replace("k", None, second)
        assert not await far.replace("k", new_id(), second)
        assert await far.replace("k", first.id, second)
        assert not await store.replace("k", None, third)  # stale is kept too
        assert await store.replace("k", second.id, third)
        kept = await self.kept()
        assert kept is not None
        assert kept.id == third.id
        await store.invalidate("k")
        assert not await store.replace("k", third.id, first)
        await store.set("k", some(fresh=0.0))
        assert await store.replace("k", None, first)  # and grace is not

    @case
    async def test_one_of_many_replaces(self) -> None:
        """Two would both believe that theirs was stored."""
        store = self.store
        if not isinstance(store, Versioned):
            raise unittest.SkipTest("the store is not versioned")
        herd = [self.beside(store.replace("k", None, some())) for _ in range(HERD)]
        assert [await one for one in herd].count(True) == 1


class LocksSuite(_Suite):
    """The verbs of a lock that is no cache."""

    @property
    def locks(self) -> Locks:
        return _there(self.engine.alocks if self.suspending else self.engine.locks)

    @property
    def far_locks(self) -> Locks:
        return _there(self.peer.alocks if self.suspending else self.peer.locks)

    async def held(self, name: str = "l", lease: float = LONG) -> bytes:
        """A new token that has just taken the lock."""
        token = new_id()
        assert isinstance(await self.locks.acquire(name, token, lease), Granted)
        return token

    async def refused(self, name: str = "l") -> Busy:
        reply = await self.far_locks.acquire(name, new_id(), LONG)
        assert isinstance(reply, Busy), reply
        return reply

    async def short_and_busy(self) -> Busy | None:
        holder = new_id()
        await self.until(lambda: self.locks.acquire("l", holder, self.short), is_granted)
        reply = await self.far_locks.acquire("l", new_id(), self.short)
        return reply if isinstance(reply, Busy) else None

    @case
    async def test_a_lock_excludes(self) -> None:
        """Two would be inside."""
        await self.held()
        busy = await self.refused()
        assert 0 < busy.lease <= LONG
        assert busy.entry is None

    @case
    async def test_locks_have_names(self) -> None:
        """All locks would be one."""
        tokens = [await self.held(name) for name in KEYS]
        for name, token in zip(KEYS, tokens, strict=True):
            await self.refused(name)
            assert await self.locks.release(name, token) is True

    @case
    async def test_released_is_free(self) -> None:
        """A lock could be taken once."""
        for _ in range(3):
            assert await self.locks.release("l", await self.held()) is True

    @case
    async def test_own_token_takes_it_again(self) -> None:
        """A reply lost on the wire would lock its caller out by its own lock."""
        token = await self.held()
        assert isinstance(await self.locks.acquire("l", token, LONG), Granted)
        await self.refused()
        assert await self.locks.release("l", token) is True
        await self.held()

    @case
    async def test_release_needs_the_token(self) -> None:
        """A holder that was too slow would rob the next one."""
        token = await self.held()
        assert await self.far_locks.release("l", new_id()) is False
        await self.refused()
        assert await self.locks.release("l", token) is True
        assert await self.locks.release("l", token) is False
        assert await self.locks.release("never", new_id()) is False

    @case
    async def test_fences_grow(self) -> None:
        """A resource couldn't refuse a holder that has lost its lock."""
        fences = []
        for _ in range(4):
            token = new_id()
            reply = await self.locks.acquire("l", token, LONG)
            assert isinstance(reply, Granted)
            fences.append(reply.fence)
            await self.locks.release("l", token)
        assert fences == sorted(set(fences))

    @case
    async def test_a_lock_ends(self) -> None:
        """A dead holder would keep it for ever; and a late one would think that it still had it."""
        token, other = await self.held(lease=self.short), new_id()
        await self.until(lambda: self.far_locks.acquire("l", other, LONG), is_granted)
        assert not await self.locks.renew("l", token, LONG)
        assert await self.locks.release("l", token) is False
        assert await self.far_locks.release("l", other) is True

    @case
    async def test_an_end_nobody_noticed_is_an_end(self) -> None:
        """The same where nobody wanted it since: somebody may have been inside and gone."""
        token = await self.held(lease=self.short)
        await self.lapse(1.5 * self.short)
        assert not await self.locks.renew("l", token, LONG)
        assert await self.locks.release("l", token) is False

    @case
    async def test_renew_moves_the_end(self) -> None:
        """Long work would lose its lock."""
        token = await self.in_time(
            lambda: self.held(lease=self.short), lambda token: self.locks.renew("l", token, LONG)
        )
        await self.lapse(1.5 * self.short)
        await self.refused()
        assert await self.locks.release("l", token) is True

    @case
    async def test_renew_needs_the_token(self) -> None:
        """Somebody else's lock would be kept alive, or stolen."""
        assert not await self.locks.renew("l", new_id(), LONG)
        token = await self.held()
        assert not await self.far_locks.renew("l", new_id(), LONG)
        assert await self.locks.release("l", token) is True
        assert not await self.locks.renew("l", token, LONG)

    @case
    async def test_release_wakes(self) -> None:
        """Those who wait would sleep until the lease ends."""
        token = await self.held()
        busy = await self.refused()
        start = time.monotonic()
        waiters = [
            self.beside(self.locks.wait("l", busy, LONG)),
            self.beside(self.far_locks.wait("l", busy, LONG)),
        ]
        await self.pause(0.02)  # most likely they sleep by then; if not, they must not miss it either
        assert await self.locks.release("l", token) is True
        await self.locks.wait("l", busy, LONG)
        taken = 0
        for waiter in waiters:
            await waiter
            taken += isinstance(await self.locks.acquire("l", new_id(), LONG), Granted)
        assert taken == 1
        assert time.monotonic() - start < SOON

    @case
    async def test_wait_is_over_with_the_lease(self) -> None:
        """Those who wait for a dead holder would sleep on."""
        busy = await self.in_time(self.short_and_busy)
        start = time.monotonic()
        await self.locks.wait("l", busy, LONG)
        assert time.monotonic() - start < SOON

    @case
    async def test_wait_is_over_with_its_time(self) -> None:
        """`wait` would not be kept."""
        await self.held()
        busy = await self.refused()
        for timeout in (0.0, 0.05):
            start = time.monotonic()
            await self.locks.wait("l", busy, timeout)
            assert time.monotonic() - start < SOON

    @case
    async def test_one_of_many_takes_it(self) -> None:
        """Two would be inside, when many come at once."""
        ports = [self.locks, self.far_locks] * (HERD // 2)
        herd = [self.beside(port.acquire("l", new_id(), LONG)) for port in ports]
        replies = [await one for one in herd]
        assert sum(isinstance(reply, Granted) for reply in replies) == 1

    @case
    async def test_everybody_gets_in_one_by_one(self) -> None:
        """Of those who wait in turn, some would be inside together, or never."""
        inside, entered = 0, 0

        async def visit() -> None:
            nonlocal inside, entered
            for _ in range(5):
                token = new_id()
                while isinstance(reply := await self.locks.acquire("l", token, LONG), Busy):
                    await self.locks.wait("l", reply, LONG)
                inside += 1
                assert inside == 1
                await self.pause(0.0)
                entered += 1
                inside -= 1
                assert await self.locks.release("l", token) is True

        for visitor in [self.beside(visit()) for _ in range(8)]:
            await visitor
        assert entered == 40
