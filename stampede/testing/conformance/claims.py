"""The suite for claims: the verbs that the algorithm uses for one computation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf

from stampede.engines.kit.whereabouts import here
from stampede.model.entry import GRACE, Verdict, new_id
from stampede.model.ports import Ask, Busy, Failed, Found, Granted, Shown
from stampede.testing.conformance.suite import (
    HERD,
    KEYS,
    LONG,
    SOON,
    VALUES,
    Beside,
    KeyedSuite,
    is_granted,
    not_none,
    require,
    some,
    soon,
)  # fmt: skip

__all__ = ["ClaimsSuite"]


class ClaimsSuite(KeyedSuite):
    """The suite for claims: the verbs that the algorithm uses for one computation.

    >>> from stampede.engines.memory import MemoryEngine  # yours
    >>> from stampede.testing import ClaimsSuite
    >>> class TestMine(ClaimsSuite):  # by pytest, and once more with suspending = True
    ...     def make_engine(self):
    ...         return MemoryEngine()
    """

    # -- claim

    async def test_filled_is_found_as_it_was(self) -> None:
        """A filled entry must be found with all its fields; otherwise values or their metadata would be changed."""
        entry = some(b"v", fresh=50.0, keep=LONG, cost=0.25, margin=1.5, raised=True)
        assert await self.claims.fill("k", await self.granted(), entry)
        found = await self.found()
        assert (found.value, found.id, found.cost, found.margin) == (b"v", entry.id, 0.25, 1.5)
        assert found.ttl == 50.0
        assert found.raised is True
        assert 50.0 - SOON < found.fresh <= 50.0
        assert LONG - SOON < found.keep <= LONG

    async def test_long_times_are_kept(self) -> None:
        """Long durations must be kept; otherwise they would overflow or be read as dates, and endless values end."""
        for days in (31, 3_650, 36_500, inf):
            seconds = days * 86_400.0
            assert await self.claims.fill("k", await self.granted(force=True), some(fresh=seconds))
            found = await self.found()
            assert found.ttl == seconds
            assert all(seconds - SOON <= left <= seconds for left in (found.fresh, found.keep))

    async def test_one_lease_at_a_time(self) -> None:
        """A valid lease must refuse other claims; otherwise two callers would compute. Busy must have the lease's token
        and time left; otherwise waiters would not know which lease to wait for, or how long."""
        token = await self.granted()
        busy = await self.busy()
        assert busy.token == token
        assert LONG - SOON < busy.lease <= LONG
        assert busy.entry is None

    async def test_own_token_is_granted_again(self) -> None:
        """A claim must be granted to its own token again, for a whole lease; otherwise a lost reply would lock its
        caller out, or the second grant would end too early."""
        token = await self.granted(lease=self.short)
        for _ in range(3):
            await self.expect(Granted, port=self.claims, token=token)
        busy = await self.busy()
        assert (busy.token, busy.lease > LONG - SOON) == (token, True)
        assert await self.claims.fill("k", token, some())

    async def test_a_lease_ends(self) -> None:
        """A lease must end by itself; otherwise a dead holder would block its key for ever."""
        await self.granted(lease=self.short)
        other = new_id()
        await self.until(lambda: self.far_claims.claim("k", other, Ask(LONG)), is_granted)

    async def test_a_value_ends(self) -> None:
        """A value must end with its ttl; otherwise an old value would be served as fresh."""
        await self.store.set("k", some(fresh=self.short))
        token = new_id()
        reply = await self.until(lambda: self.claims.claim("k", token, Ask(LONG)), is_granted)
        assert isinstance(reply, Granted)
        assert reply.entry is None

    async def test_kept_has_an_end_too(self) -> None:
        """A stale entry must end, too; otherwise stale values would be served long after they should be gone."""
        await self.store.set("k", some(fresh=0.0, keep=self.short))
        await self.until(self.peek, lambda entry: entry is None)
        await self.lapse(self.slack + 0.1)  # two reads may tell an age by two clocks, and a slow one by less
        assert (await self.expect(Granted, port=self.claims)).entry is None

    async def test_good_for_those_who_waited(self) -> None:
        """Waiters must get a value that expired while they waited; otherwise, with a short ttl, each would compute."""

        async def filled() -> bytes:
            entry = some(fresh=0.0)
            assert await self.claims.fill("k", await self.granted(), entry)
            return entry.id

        async def is_good(id: bytes) -> bool:
            token = new_id()
            reply = await self.far_claims.claim("k", token, Ask(LONG, since=SOON))
            if isinstance(reply, Found):
                assert reply.entry.id == id
                return True
            await self.far_claims.abandon("k", token)
            return False

        await self.in_time(filled, is_good)

    async def test_grace_is_not_stale(self) -> None:
        """An entry in its grace is for waiters only; otherwise an expired value would be served to all callers."""
        await self.store.set("k", some(fresh=0.0))
        assert await self.peek() is None
        assert (await self.expect(Granted, port=self.claims)).entry is None
        assert (await self.busy()).entry is None

    async def test_seen_is_not_good_enough(self) -> None:
        """A claim must not find the entry it has `seen`; otherwise an early refresh would find the old value."""
        entry = some()
        await self.store.set("k", entry)
        kept = not_none((await self.expect(Granted, port=self.claims, seen=entry.id)).entry)
        assert (kept.id, kept.fresh > 0) == (entry.id, True)
        assert not_none((await self.busy(seen=entry.id)).entry).id == entry.id
        assert (await self.found()).id == entry.id  # other callers still find it

    async def test_draws_never_hide_a_value(self) -> None:
        """A due entry must still be returned; otherwise callers would have no value during an early refresh."""
        entry = some(cost=1.0, margin=1.0)
        await self.store.set("k", entry)
        assert (await self.found(draw=0.0)).id == entry.id
        first = await self.claims.claim("k", new_id(), Ask(LONG, draw=1e9))
        second = await self.claims.claim("k", new_id(), Ask(LONG, draw=1e9))
        assert isinstance(first, (Found, Granted))
        assert isinstance(second, (Found, Busy))
        assert [not_none(reply.entry).id for reply in (first, second)] == [entry.id] * 2

    async def test_force_kills_the_standing_lease(self) -> None:
        """A forced claim must end the older lease; otherwise an older computation would overwrite a `refresh`."""
        older = await self.granted()
        newer = await self.granted(force=True)
        assert (await self.busy()).token == newer
        assert not await self.claims.fill("k", older, some(b"older"))
        assert await self.claims.fill("k", newer, some(b"newer"))
        assert (await self.found()).value == b"newer"

    async def test_one_of_many_is_granted(self) -> None:
        """Only one of many concurrent claims may be granted; otherwise several callers would compute: the stampede."""
        claims = [self.far_claims, self.claims] * (HERD // 2)
        herd = [self.beside(port.claim("k", new_id(), Ask(LONG))) for port in claims]
        replies = [await one for one in herd]
        assert sum(isinstance(reply, Granted) for reply in replies) == 1
        assert sum(isinstance(reply, Busy) for reply in replies) == HERD - 1

    async def test_one_of_many_is_granted_what_ended(self) -> None:
        """Only one of many claims may get a lease that has ended; otherwise a holder's death would start a stampede."""
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

    async def test_fill_over_what_has_ended_meanwhile(self) -> None:
        """A fill must succeed after the stale entry has expired; otherwise a long computation would not be stored."""
        await self.store.set("k", some(b"old", fresh=0.0, keep=self.short))
        token = await self.granted()
        await self.until(self.peek, lambda entry: entry is None)
        if self.clock is not None:
            self.clock.advance(GRACE + self.short)
        assert await self.claims.renew("k", token, LONG)
        assert await self.claims.fill("k", token, some(b"new"))
        assert (await self.found()).value == b"new"

    async def test_fill_with_the_bytes_that_are_stored(self) -> None:
        """A fill may name the stored entry that has the same bytes. The bytes must remain, with the new id and times;
        otherwise a value that was confirmed would be lost."""
        first = some(b"v" * 1000, fresh=0.0, keep=LONG)
        await self.store.set("k", first)
        token = await self.granted()
        again = some(first.value, fresh=50.0, keep=LONG)
        again.same_as = first.id
        assert await self.claims.fill("k", token, again)
        found = await self.found()
        assert (found.value, found.id, found.ttl) == (first.value, again.id, 50.0)
        assert 50.0 - SOON < found.fresh <= 50.0

    async def test_fill_with_bytes_that_are_stored_no_more(self) -> None:
        """If another entry is stored by now, the fill must store its own bytes; otherwise its value would be another
        one."""
        for there in (None, some(b"other", fresh=0.0, keep=LONG)):
            if there is not None:
                await self.store.set("k", there)
            token, entry = await self.granted(force=True), some(b"mine")
            entry.same_as = new_id()
            assert await self.claims.fill("k", token, entry)
            assert (await self.found()).value == b"mine"
            await self.store.invalidate("k")

    async def test_fill_without_a_lease_is_refused(self) -> None:
        """A fill without a lease must be refused; otherwise any caller could overwrite any value."""
        assert not await self.claims.fill("k", new_id(), some())
        assert await self.peek() is None
        token = await self.granted()
        assert not await self.claims.fill("k", new_id(), some())
        assert (await self.busy()).token == token

    async def test_fill_after_the_lease_is_refused(self) -> None:
        """A fill after the end of its lease must be refused; otherwise a frozen holder would store an old value."""
        token = await self.granted(lease=self.short)
        other = new_id()
        await self.until(lambda: self.far_claims.claim("k", other, Ask(LONG)), is_granted)
        assert not await self.claims.fill("k", token, some(b"late"))
        assert await self.peek() is None
        assert await self.far_claims.fill("k", other, some(b"in time"))
        assert not await self.claims.fill("k", token, some(b"later"))
        assert (await self.found()).value == b"in time"

    async def test_fill_after_invalidate_is_refused(self) -> None:
        """`invalidate` must end the lease; otherwise an older value would be served after the invalidation."""
        token = await self.granted()
        await self.far_store.invalidate("k")
        assert not await self.claims.fill("k", token, some(b"old"))
        assert await self.peek() is None
        newer = await self.granted()
        assert not await self.claims.fill("k", token, some(b"old"))
        assert await self.claims.fill("k", newer, some(b"new"))
        assert (await self.found()).value == b"new"

    async def test_fill_after_expire_is_refused(self) -> None:
        """`expire` must end the lease; otherwise a value computed from outdated data would be fresh for a whole ttl."""
        token = await self.granted()
        assert await self.far_store.expire("k") is False
        assert not await self.claims.fill("k", token, some(b"old"))
        await self.store.set("k", some(b"kept", keep=LONG))
        token = await self.granted(seen=(await self.stored()).id)
        assert await self.far_store.expire("k") is True
        assert not await self.claims.fill("k", token, some(b"old"))
        kept = await self.stored()
        assert (kept.value, kept.fresh <= 0) == (b"kept", True)

    async def test_fill_after_set_is_refused(self) -> None:
        """`set` must end the lease; otherwise an older computation would overwrite the value that was set."""
        token = await self.granted()
        await self.far_store.set("k", some(b"set"))
        assert not await self.claims.fill("k", token, some(b"old"))
        assert (await self.found()).value == b"set"

    # -- abandon

    async def test_abandon_lets_the_next_one_try(self) -> None:
        """`abandon` must free the key; otherwise one error would block it for a whole lease."""
        token = await self.granted()
        assert await self.claims.abandon("k", token)
        await self.granted()
        assert not await self.claims.fill("k", token, some())

    async def test_abandoning_another_token_is_harmless(self) -> None:
        """`abandon` must leave another token's lease alone; otherwise a caller that doesn't know whether it was granted
        would end the holder's lease, or leave a verdict."""
        assert not await self.claims.abandon("k", new_id(), Verdict("failed"), rest=LONG)
        token, stranger = await self.granted(), new_id()
        assert not await self.claims.abandon("k", stranger, Verdict("failed"), rest=LONG)
        assert (await self.busy()).token == token
        assert (await self.busy(awaited=stranger)).token == token
        assert await self.claims.fill("k", token, some())

    async def test_verdict_answers_those_who_waited(self) -> None:
        """A verdict must reach those who waited for that token; otherwise they would try a failing origin in turn."""
        token = await self.granted()
        verdict = Verdict("failed", "app.errors.Böse", "no\x00 such\n table: 'x' \U0001f40e")
        await self.claims.abandon("k", token, verdict)
        for _ in range(3):
            failed = await self.expect(Failed, awaited=token)
            assert (failed.verdict, failed.entry, failed.rest <= 0) == (verdict, None, True)
        await self.granted(awaited=new_id())

    async def test_a_failure_comes_with_what_is_kept(self) -> None:
        """Failed must include a stored entry; otherwise an error would be raised instead of serving a value."""
        stale, fresh = some(fresh=0.0, keep=LONG), some()
        await self.store.set("k", stale)
        token = await self.granted()
        await self.claims.abandon("k", token, Verdict("failed"))
        assert not_none((await self.expect(Failed, awaited=token)).entry).id == stale.id
        await self.store.set("k", fresh)
        await self.claims.abandon("k", await self.granted(seen=fresh.id), Verdict("failed"), rest=LONG)
        assert (await self.found()).id == fresh.id
        assert not_none((await self.expect(Failed, port=self.claims, seen=fresh.id)).entry).id == fresh.id

    async def test_a_value_goes_before_a_verdict(self) -> None:
        """A value must take precedence over a verdict; otherwise waiters would fail although the next try succeeded."""
        first = await self.granted()
        await self.claims.abandon("k", first, Verdict("failed"))
        assert await self.claims.fill("k", await self.granted(), some(b"after all"))
        assert (await self.found(awaited=first)).value == b"after all"

    async def test_a_claim_that_was_cancelled_leaves_the_key_free(self) -> None:
        """A cancelled claim must not block its key; otherwise a user who closes a page would delay all others."""
        if not self.suspending:
            return
        await self.granted("warm")  # opens a connection
        for turns in range(6):
            key, token = f"k{turns}", new_id()
            claim = asyncio.ensure_future(self.claims.claim(key, token, Ask(LONG)))
            for _ in range(turns):
                await asyncio.sleep(0)
            claim.cancel()
            await asyncio.wait([claim])
            await self.claims.abandon(key, token)
            await self.granted(key)

    async def test_a_resting_key_is_granted_to_nobody(self) -> None:
        """A resting key must refuse all claims; otherwise `retry_after` would not protect the origin."""
        verdict = Verdict("failed", "ValueError", "no")
        await self.claims.abandon("k", await self.granted(), verdict, rest=LONG)
        failed = await self.expect(Failed)
        assert (failed.verdict, failed.entry) == (verdict, None)
        assert LONG - SOON < failed.rest <= LONG

    async def test_a_rest_ends(self) -> None:
        """A rest must end by itself; otherwise no caller would try again after one failure."""
        await self.claims.abandon("k", await self.granted(), Verdict("failed"), rest=self.short)
        token = new_id()
        await self.until(lambda: self.claims.claim("k", token, Ask(LONG)), is_granted)

    # -- renew

    async def test_renew_moves_the_end(self) -> None:
        """`renew` must extend the lease; otherwise a long computation would be done twice."""
        token = await self.in_time(
            lambda: self.granted(lease=self.short, force=True), lambda token: self.claims.renew("k", token, LONG)
        )
        assert (await self.busy()).lease > LONG - SOON
        await self.lapse(self.beyond)
        assert (await self.busy()).token == token
        assert await self.claims.fill("k", token, some())

    async def test_a_lost_lease_is_not_renewed(self) -> None:
        """`renew` must fail for a lost lease; otherwise its holder would go on as if it had it, or get it back."""
        assert not await self.claims.renew("k", new_id(), LONG)
        ended = await self.granted(lease=self.short)
        await self.lapse(self.beyond)
        assert not await self.claims.renew("k", ended, LONG)
        standing = await self.granted()
        assert not await self.claims.renew("k", ended, LONG)
        assert (await self.busy()).token == standing
        await self.claims.abandon("k", standing)
        assert not await self.claims.renew("k", standing, LONG)

    # -- wait

    async def short_and_busy(self) -> Busy | None:
        """Return a Busy reply on a short lease. None: the lease had ended already."""
        await self.granted(lease=self.short, force=True)
        token = new_id()
        reply = await self.far_claims.claim("k", token, Ask(self.short))
        if isinstance(reply, Busy):
            return reply
        await self.far_claims.abandon("k", token)  # some engines can't take a lease from its holder by force
        return None

    async def woken(self, key: str, act: Callable[[str, bytes], Awaitable[object]]) -> None:
        """Let a herd wait for a lease. `act` must wake the whole herd, and a waiter that comes just too late."""
        token = await self.granted(key)
        busy, other = await self.busy(key), await self.busy(key)
        with soon():
            near = [self.beside(self.claims.wait(key, busy, LONG)) for _ in range(HERD // 2)]
            far = [self.beside(self.far_claims.wait(key, other, LONG)) for _ in range(HERD // 2)]
            await self.pause(0.02)  # usually they sleep by now; if not, they must not miss the wake-up either
            await act(key, token)
            await self.claims.wait(key, busy, LONG)
            for waiter in near + far:
                await waiter

    async def test_an_outcome_wakes(self) -> None:
        """A fill and an abandon must wake all waiters; otherwise some would sleep until the lease ends."""
        await self.woken("filled", lambda key, token: self.claims.fill(key, token, some()))
        await self.woken("failed", lambda key, token: self.claims.abandon(key, token, Verdict("failed")))

    async def test_a_change_wakes(self) -> None:
        """A change must wake all waiters; otherwise they would wait for a fill that will be refused."""
        await self.woken("invalidated", lambda key, _: self.far_store.invalidate(key))
        await self.woken("expired", lambda key, _: self.far_store.expire(key))
        await self.woken("set", lambda key, _: self.far_store.set(key, some()))
        await self.woken("forced", lambda key, _: self.far_claims.claim(key, new_id(), Ask(LONG, force=True)))

    async def test_wait_is_over_with_the_lease(self) -> None:
        """A wait must end with the lease; otherwise waiters for a dead holder would sleep on."""
        busy = await self.in_time(self.short_and_busy)
        with soon():
            await self.claims.wait("k", busy, LONG)

    async def test_wait_is_over_with_its_time(self) -> None:
        """A wait must end with its timeout; otherwise the option `wait` would have no effect."""
        await self.granted()
        busy = await self.busy()
        for timeout in (0.0, 0.05):
            with soon():
                assert await self.claims.wait("k", busy, timeout) is None

    async def test_news_may_bring_only_the_truth(self) -> None:
        """`wait` may return only the stored value, or None; otherwise a waiter would get a wrong value."""
        token, entry = await self.granted(), some(b"news")
        busy = await self.busy()
        waiter = self.beside(self.claims.wait("k", busy, LONG))
        await self.pause(0.02)
        assert await self.claims.fill("k", token, entry)
        news = await waiter
        assert news is None or (news.entry.id, news.entry.value) == (entry.id, b"news")
        assert (await self.found(awaited=token, since=1.0)).id == entry.id

    async def test_the_colours_wake_each_other(self) -> None:
        """Each colour must wake waiters of both; otherwise sync callers would sleep through changes by async ones."""
        blocking, suspending = require(self.engine.blocking.claims), require(self.engine.suspending.claims)

        async def scenario() -> None:
            for first, second in ((blocking, suspending), (suspending, blocking)):
                token = new_id()
                await self.expect(Granted, "c", first, token=token)
                busy = await self.expect(Busy, "c", blocking)
                with soon():
                    asleep = asyncio.ensure_future(suspending.wait("c", busy, LONG))
                    thread = Beside(blocking.wait("c", busy, LONG))
                    await asyncio.sleep(0.02)
                    await second.abandon("c", token)
                    await asleep
                    await thread

        if self.suspending:
            await scenario()
        else:
            asyncio.run(scenario())

    # -- keys and values

    async def test_keys_are_exact(self) -> None:
        """Similar keys must stay distinct; otherwise callers with different arguments would share a value."""
        for number, key in enumerate(KEYS):
            assert await self.claims.fill(key, await self.granted(key), some(b"%d" % number)), key
        for number, key in enumerate(KEYS):
            assert (await self.found(key)).value == b"%d" % number, key

    async def test_values_are_exact(self) -> None:
        """Every value must come back unchanged; otherwise values would be altered or lost."""
        for value in (each[: self.largest] for each in VALUES):
            token = await self.granted(force=True)
            assert await self.claims.fill("k", token, some(value))
            assert (await self.found()).value == value

    # -- what `status` shows

    async def test_who_computes_is_shown(self) -> None:
        """`show` must name the current holder, if there is one; otherwise `status` would show a past one, or none."""
        shows = self.far_shows
        assert await shows.show("k") == Shown(None, b"")
        token = await self.granted()
        shown = await shows.show("k")
        assert shown.entry is None
        assert shown.token
        assert 0 < shown.lease <= LONG + self.slack
        assert shown.holder in ("", here())  # both clients belong to this process
        await self.claims.fill("k", token, some(fresh=0.0, keep=LONG))
        shown = await shows.show("k")
        assert shown.token == b""
        assert shown.entry is not None
        await self.granted()
        shown = await shows.show("k")
        assert shown.token
        assert shown.holder in ("", here())
        assert not_none(shown.entry).value == b"value"
        await self.store.invalidate("k")
        assert await shows.show("k") == Shown(None, b"")

    async def test_a_renewed_lease_is_still_its_holders(self) -> None:
        """`show` must still name the holder after a renewal; otherwise `status` would not show it any more."""
        shows, token = self.far_shows, await self.granted(lease=LONG / 2)
        first = await shows.show("k")
        for seconds in (LONG / 2, LONG):
            assert await self.claims.renew("k", token, seconds)
            shown = await shows.show("k")
            assert shown.token == first.token or not first.holder  # a renewal may add the holder
            assert shown.holder == first.holder or not first.holder
        assert shown.lease > LONG / 2
        await self.expect(Granted, port=self.claims, token=token, lease=LONG / 2)
        assert (await shows.show("k")).holder == shown.holder

    async def test_a_lease_that_has_ended_is_not_shown(self) -> None:
        """A lease that has ended must not be shown; otherwise `status` would name a dead holder."""
        await self.granted(lease=self.short)
        await self.lapse(self.beyond)
        shown = await self.until(lambda: self.far_shows.show("k"), lambda shown: not shown.token)
        assert shown == Shown(None, b"")
