"""The verbs of a lock that is no cache."""

from __future__ import annotations

import unittest
from math import inf
from time import monotonic

from stampede.errors import LockLost
from stampede.locks.lock import Lock
from stampede.model.entry import new_id
from stampede.model.ports import Busy, Granted, Handover, Holds, Locks
from stampede.testing.conformance.suite import HERD, KEYS, LONG, SOON, Suite, is_granted, soon, there

__all__ = ["LocksSuite"]

TURN = 0.15
"""Seconds for which a lock that came free is kept for the one whose turn it is, at least."""


class LocksSuite(Suite):
    """The verbs of a lock that is no cache.

    >>> from stampede.engines.memory import MemoryEngine  # yours
    >>> from stampede.testing import LocksSuite
    >>> class TestMine(LocksSuite):  # by pytest, and once more with suspending = True
    ...     def make_engine(self):
    ...         return MemoryEngine()
    """

    @property
    def locks(self) -> Locks:
        return there(self.side(self.engine).locks)

    @property
    def far_locks(self) -> Locks:
        return there(self.side(self.peer).locks)

    @property
    def holds(self) -> Holds:
        self.declared(self.engine.lock_engine.blocking.holds is not None, "one that says who has its locks")
        return there(self.side(self.peer.lock_engine).holds)

    @property
    def handover(self) -> Handover:
        self.declared(self.engine.lock_engine.blocking.handover is not None, "one whose locks go from hand to hand")
        return there(self.side(self.engine.lock_engine).handover)

    async def held(self, name: str = "l", lease: float = LONG) -> bytes:
        """A new token that has just taken the lock."""
        token = new_id()
        assert isinstance(await self.locks.acquire(name, token, lease), Granted)
        return token

    async def briefly(self) -> bytes | None:
        """The same with a short lease. None: one that was taken before stands yet."""
        token = new_id()
        if isinstance(await self.locks.acquire("l", token, self.short), Granted):
            return token
        await self.lapse(self.short / 4)
        return None

    async def taken(self, lock: Lock) -> bool:
        """The user's face of the same."""
        return bool(await lock.aacquire() if self.suspending else lock.acquire())

    async def given_back(self, lock: Lock) -> bool:
        """Whether it stood until then."""
        try:
            await lock.arelease() if self.suspending else lock.release()
        except LockLost:
            return False
        return True

    async def entered(self, room: float, port: Locks | None = None, lease: float = LONG) -> bytes:
        """A new token that is inside, with room for so many."""
        token = new_id()
        assert isinstance(await (port or self.locks).acquire("l", token, lease, room=room), Granted)
        return token

    async def refused(self, name: str = "l", room: float = 1) -> Busy:
        if room == 1:
            reply = await self.far_locks.acquire(name, new_id(), LONG)
        else:
            reply = await self.far_locks.acquire(name, new_id(), LONG, room=room)
        assert isinstance(reply, Busy), reply
        return reply

    async def kept_for(self, token: bytes, since: float) -> None:
        """It is this one's turn, which has asked since then: unless that was so long ago that it has missed it."""
        passer = new_id()
        reply = await self.far_locks.acquire("l", passer, LONG)
        if monotonic() - since < TURN:
            assert isinstance(reply, Busy) and reply.token == token
        elif isinstance(reply, Granted):
            await self.far_locks.release("l", passer)

    async def comes_in(self, token: bytes) -> None:
        """It gets the lock: now, or when those have had their turns to whom it went meanwhile."""
        with soon():
            while isinstance(busy := await self.locks.acquire("l", token, LONG, waits=True), Busy):
                await self.locks.wait("l", busy, LONG)

    async def short_and_busy(self) -> Busy | None:
        holder = new_id()
        await self.until(lambda: self.locks.acquire("l", holder, self.short), is_granted)
        reply = await self.far_locks.acquire("l", new_id(), self.short)
        return reply if isinstance(reply, Busy) else None

    async def test_locks_have_names(self) -> None:
        """All locks would be one."""
        tokens = [await self.held(name) for name in KEYS]
        for name, token in zip(KEYS, tokens, strict=True):
            await self.refused(name)
            assert await self.locks.release(name, token) is True

    async def test_released_is_free(self) -> None:
        """A lock could be taken once; or a resource couldn't refuse a holder that has lost its lock."""
        fences = []
        for _ in range(4):
            token = new_id()
            fences.append(await self._fence(token, self.locks))
            assert await self.locks.release("l", token) is True
        assert fences == sorted(set(fences))

    async def test_own_token_takes_it_again(self) -> None:
        """A reply lost on the wire would lock its caller out by its own lock."""
        token = await self.held()
        assert isinstance(await self.locks.acquire("l", token, LONG), Granted)
        await self.refused()
        assert await self.locks.release("l", token) is True
        await self.held()

    async def test_release_needs_the_token(self) -> None:
        """A holder that was too slow would rob the next one, or keep its lock alive."""
        assert not await self.locks.renew("l", new_id(), LONG)
        token = await self.held()
        assert not await self.far_locks.renew("l", new_id(), LONG)
        assert await self.far_locks.release("l", new_id()) is False
        await self.refused()
        assert await self.locks.release("l", token) is True
        assert not await self.locks.renew("l", token, LONG)
        assert await self.locks.release("l", token) is False
        assert await self.locks.release("never", new_id()) is False

    async def test_a_lock_ends(self) -> None:
        """A dead holder would keep it for ever; and a late one would think that it still had it."""
        token, other = await self.held(lease=self.short), new_id()
        await self.until(lambda: self.far_locks.acquire("l", other, LONG), is_granted)
        assert not await self.locks.renew("l", token, LONG)
        assert await self.locks.release("l", token) is False
        assert await self.far_locks.release("l", other) is True

    async def test_an_end_nobody_noticed_is_an_end(self) -> None:
        """The same where nobody wanted it since: somebody may have been inside and gone."""
        token = await self.held(lease=self.short)
        await self.lapse(self.beyond)
        assert not await self.locks.renew("l", token, LONG)
        assert await self.locks.release("l", token) is False

    async def test_who_lost_it_knows_before_the_next_is_in(self) -> None:
        """Two would be inside, each sure to be alone: `lost` must not wait for a renewal, or for an answer to it."""
        if self.clock is not None:
            raise unittest.SkipTest("a holder goes by its own clock")
        first = Lock("l", self.engine, lease=self.short, max_hold=self.short / 100, wait=SOON)
        second = Lock("l", self.peer, lease=LONG, wait=SOON)
        try:
            assert await self.taken(first) or first.lost  # the answer may come after the end of so short a lease
            assert await self.taken(second)
            assert (first.lost, first.held) == (True, False)
        finally:
            stood = [await self.given_back(each) for each in (second, first)]
        assert stood == [True, False]  # it is told by its release, too

    async def test_renewing_a_lock_moves_its_end(self) -> None:
        """Long work would lose its lock."""
        token = await self.in_time(self.briefly, lambda token: self.locks.renew("l", token, LONG))
        await self.refused()  # nor does it end by who looks meanwhile
        await self.lapse(self.beyond)
        await self.refused()
        assert await self.locks.release("l", token) is True

    async def test_who_has_it_is_told(self) -> None:
        """Nobody could see why he waits; or it would be taken, or stand longer, for being looked at."""
        holds = self.holds
        assert await holds.holder("l") == []
        tokens = {name: await self.held(name) for name in KEYS}
        for name, token in tokens.items():
            ((told, left),) = await holds.holder(name)
            assert told == token and 0 < left <= 2 * LONG  # a server's clock may know whole seconds only
        listed = await holds.held()
        if listed is not None:
            assert len(listed) == len(KEYS)
            assert all(0 < each.lease <= 2 * LONG for each in listed)
            for name in (each for each in KEYS if len(each) < 100):
                assert _shown(name) in [_shown(each.name) for each in await holds.held(name[:3]) or ()]
            assert await holds.held("there is no such lock") == []
        for name, token in tokens.items():
            assert await self.locks.release(name, token) is True
            assert await holds.holder(name) == []
        assert not await holds.held()

    async def test_all_who_share_it_are_told(self) -> None:
        """Of some inside one would be shown, or of the queue those who wait."""
        self.declared(self.engine.rooms, "rooms")
        holds, inside = self.holds, {await self.entered(inf) for _ in range(2)}
        assert isinstance(await self.locks.acquire("l", new_id(), LONG, waits=True), Busy)
        assert {token for token, _ in await holds.holder("l")} == inside
        listed = await holds.held("l")
        assert listed is None or [each.name for each in listed] == ["l", "l"]

    async def test_it_is_handed_over(self) -> None:
        """A lock would end with the process that took it, though another goes on; or be lost on the way."""
        handover = self.handover
        token = await self.in_time(self.briefly, lambda token: handover.hand_over("l", token, LONG))
        assert not await handover.hand_over("l", new_id(), LONG)
        fence = await self._fence(token, self.locks)
        assert await handover.hand_over("l", token, LONG)
        await self.refused()
        await self.lapse(self.beyond)
        await self.refused()
        assert await self._fence(token, self.far_locks) >= fence
        await self.refused()
        assert await self.far_locks.renew("l", token, LONG)
        assert await self.far_locks.release("l", token) is True
        await self.held()

    async def _fence(self, token: bytes, locks: Locks) -> int:
        reply = await locks.acquire("l", token, LONG)
        assert isinstance(reply, Granted), reply
        return reply.fence

    async def test_release_wakes(self) -> None:
        """Those who wait would sleep until the lease ends."""
        token = await self.held()
        busy = await self.refused()
        with soon():
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

    async def test_who_has_waited_longest_is_next(self) -> None:
        """Who comes at the right moment would go first, again and again, and somebody wait for ever."""
        self.declared(self.engine.fair, "fair")
        holder, waiters = await self.held(), [new_id() for _ in range(5)]
        for token in waiters:
            assert isinstance(await self.locks.acquire("l", token, LONG, waits=True), Busy)
        for token in waiters[::-1]:  # however often the others ask
            assert isinstance(await self.locks.acquire("l", token, LONG, waits=True), Busy)
        for token in waiters:
            at = monotonic()
            assert isinstance(await self.locks.acquire("l", token, LONG, waits=True), Busy)
            assert await self.locks.release("l", holder) is True
            await self.kept_for(token, at)
            await self.comes_in(token)
            holder = token

    async def test_a_turn_wakes_the_one_whose_it_is(self) -> None:
        """It would be told to somebody else, or to nobody, and the lock lie idle."""
        holder, first, second = await self.held(), new_id(), new_id()
        replies = [await self.locks.acquire("l", token, LONG, waits=True) for token in (first, second)]
        assert all(isinstance(reply, Busy) for reply in replies)
        with soon():
            woken = self.beside(self.locks.wait("l", replies[0], LONG))  # type: ignore[arg-type]
            await self.pause(0.02)  # most likely it sleeps by then; if not, it must not miss it either
            assert await self.locks.release("l", holder) is True
            await woken
            assert isinstance(await self.locks.acquire("l", first, LONG, waits=True), Granted)

    async def test_who_has_gone_is_not_waited_for(self) -> None:
        """After somebody's `wait` ran out, the lock would be kept for it, and from all others."""
        holder, gone, named, last = await self.held(), new_id(), new_id(), new_id()
        at = monotonic()
        for token in (gone, named, last):
            assert isinstance(await self.locks.acquire("l", token, LONG, waits=True), Busy)
        assert await self.locks.release("l", gone) is False
        assert await self.locks.release("l", holder) is True
        if self.engine.fair:
            await self.kept_for(named, at)
        assert await self.locks.release("l", named) is False  # it goes when its turn has come already
        await self.comes_in(last)

    async def test_readers_share_and_a_writer_is_alone(self) -> None:
        """Readers would wait for each other, or somebody write what they read."""
        self.declared(self.engine.rooms, "rooms")
        readers = [await self.entered(inf, port) for port in (self.locks, self.far_locks, self.locks)]
        assert (await self.refused()).token in readers
        assert (await self.refused(room=2)).token in readers
        assert isinstance(await self.far_locks.acquire("l", readers[0], LONG, room=inf), Granted)  # its reply was lost
        assert await self.locks.renew("l", readers[0], LONG)
        for reader in readers:
            await self.refused()
            assert await self.locks.release("l", reader) is True
            assert await self.locks.release("l", reader) is False
            assert not await self.locks.renew("l", reader, LONG)
        writer = await self.held()
        assert (await self.refused(room=inf)).token == writer
        assert await self.locks.release("l", writer) is True
        await self.entered(inf)

    async def test_places_are_so_many(self) -> None:
        """More would be inside than the one who wants fewest of them has said."""
        self.declared(self.engine.rooms, "rooms")
        inside = [await self.entered(3, port) for port in (self.locks, self.far_locks, self.locks)]
        await self.refused(room=3)
        await self.refused(room=inf)
        assert await self.locks.release("l", inside.pop()) is True
        await self.refused(room=2)
        inside.append(await self.entered(inf))
        for token in inside:
            assert await self.far_locks.release("l", token) is True
        await self.held()

    async def test_a_writer_who_waits_is_not_passed(self) -> None:
        """While readers come and go, he would wait for ever."""
        self.declared(self.engine.rooms and self.engine.fair, "rooms, or fair")
        first, second = await self.entered(inf), await self.entered(inf, self.far_locks)
        writer, reader = new_id(), new_id()
        assert isinstance(await self.locks.acquire("l", writer, LONG, waits=True), Busy)
        refused = await self.far_locks.acquire("l", reader, LONG, waits=True, room=inf)
        assert isinstance(refused, Busy)
        await self.refused(room=inf)  # nor by one who doesn't wait
        assert await self.locks.release("l", first) is True
        assert await self.locks.release("l", second) is True
        assert (await self.refused(room=inf)).token == writer
        assert isinstance(await self.locks.acquire("l", writer, LONG, waits=True), Granted)
        with soon():
            woken = self.beside(self.far_locks.wait("l", refused, LONG))
            await self.pause(0.02)  # most likely it sleeps by then; if not, it must not miss it either
            assert await self.locks.release("l", writer) is True
            await woken
        assert isinstance(await self.far_locks.acquire("l", reader, LONG, waits=True, room=inf), Granted)
        await self.entered(inf)

    async def test_a_dead_reader_s_place_ends(self) -> None:
        """A writer would be kept out for ever; or the readers beside it lose theirs."""
        self.declared(self.engine.rooms, "rooms")
        dead, alive, next_one = await self.entered(inf, lease=self.short), await self.entered(inf), new_id()
        await self.lapse(self.beyond)
        assert not await self.locks.renew("l", dead, LONG)
        assert await self.far_locks.release("l", dead) is False
        assert (await self.refused()).token == alive
        assert await self.far_locks.release("l", alive) is True
        await self.until(lambda: self.locks.acquire("l", next_one, LONG), is_granted)

    async def test_a_failed_try_disturbs_nobody(self) -> None:
        """Who is refused would end, or shorten, what the holder has; or what somebody has by another name."""
        own, another = await self.held(), await self.held("another")
        for port in (self.locks, self.far_locks):
            token = new_id()
            assert isinstance(await port.acquire("l", token, self.short), Busy)
            assert await port.release("l", token) is False
        for name, token in (("l", own), ("another", another)):
            assert (await self.refused(name)).lease > LONG / 2
            assert await self.locks.renew(name, token, LONG)
            assert await self.locks.release(name, token) is True

    async def test_what_was_given_back_is_of_no_use(self) -> None:
        """Who goes on with it would have, or end, what is somebody else's by now."""
        old = await self.held()
        assert await self.locks.release("l", old) is True
        token = await self.held()
        for port in (self.locks, self.far_locks):
            assert not await port.renew("l", old, LONG)
            assert await port.release("l", old) is False
        assert await self.locks.release("l", token) is True

    async def test_who_waits_for_a_lock_waits_no_longer_than_its_lease(self) -> None:
        """Those who wait for a dead holder would sleep on."""
        busy = await self.in_time(self.short_and_busy)
        with soon():
            await self.locks.wait("l", busy, LONG)

    async def test_who_waits_for_a_lock_waits_no_longer_than_his_time(self) -> None:
        """`wait` would not be kept."""
        await self.held()
        busy = await self.refused()
        for timeout in (0.0, 0.05):
            with soon():
                await self.locks.wait("l", busy, timeout)

    async def test_one_of_many_takes_it(self) -> None:
        """Two would be inside, when many come at once."""
        ports = [self.locks, self.far_locks] * (HERD // 2)
        herd = [self.beside(port.acquire("l", new_id(), LONG)) for port in ports]
        replies = [await one for one in herd]
        assert sum(isinstance(reply, Granted) for reply in replies) == 1

    async def test_everybody_gets_in_one_by_one(self) -> None:
        """Of those who wait in turn, some would be inside together, or never."""
        inside, entered = 0, 0

        async def visit() -> None:
            nonlocal inside, entered
            for _ in range(3):
                token = new_id()
                while isinstance(reply := await self.locks.acquire("l", token, LONG), Busy):
                    await self.locks.wait("l", reply, LONG)
                inside += 1
                assert inside == 1
                await self.pause(0.0)
                entered += 1
                inside -= 1
                assert await self.locks.release("l", token) is True

        for visitor in [self.beside(visit()) for _ in range(6)]:
            await visitor
        assert entered == 18


def _shown(name: str) -> str:
    """As people may be told it: what is no text is escaped."""
    return name.encode("utf-8", "surrogatepass").decode("utf-8", "backslashreplace")
