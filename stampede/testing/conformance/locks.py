"""The suite for locks."""

from __future__ import annotations

import unittest
from math import inf
from time import monotonic
from typing import Any

from stampede.errors import LockLost
from stampede.locks.lock import Lock
from stampede.model.entry import new_id
from stampede.model.ports import Busy, Granted, Handover, Holds, Locks
from stampede.testing.conformance.suite import HERD, KEYS, LONG, SOON, Suite, is_granted, require, soon

__all__ = ["LocksSuite"]

TURN = 0.15
"""Seconds for which an engine reserves a lock that came free for the next waiter, at least."""


class LocksSuite(Suite):
    """The suite for locks: the verbs of the port `Locks`, and of `Holds` and `Handover` if the engine has them.

    >>> from stampede.engines.memory import MemoryEngine  # yours
    >>> from stampede.testing import LocksSuite
    >>> class TestMine(LocksSuite):  # by pytest, and once more with suspending = True
    ...     def make_engine(self):
    ...         return MemoryEngine()
    """

    @property
    def locks(self) -> Locks:
        return require(self.side(self.engine).locks)

    @property
    def far_locks(self) -> Locks:
        return require(self.side(self.peer).locks)

    @property
    def holds(self) -> Holds:
        self.declared(self.engine.lock_engine.blocking.holds is not None, "listing the holders of a lock")
        return require(self.side(self.peer.lock_engine).holds)

    @property
    def handover(self) -> Handover:
        self.declared(self.engine.lock_engine.blocking.handover is not None, "handing locks over")
        return require(self.side(self.engine.lock_engine).handover)

    async def held(self, name: str = "l", lease: float = LONG) -> bytes:
        """Return a new token that has just acquired the lock."""
        token = new_id()
        assert isinstance(await self.locks.acquire(name, token, lease), Granted)
        return token

    async def held_briefly(self) -> bytes | None:
        """Return a new token that has acquired the lock with a short lease. None: an earlier lease is still valid."""
        token = new_id()
        if isinstance(await self.locks.acquire("l", token, self.short), Granted):
            return token
        await self.lapse(self.short / 4)
        return None

    async def acquired(self, lock: Lock) -> bool:
        """Acquire a `Lock`, as users do, and return whether that succeeded."""
        return bool(await lock.aacquire() if self.suspending else lock.acquire())

    async def released(self, lock: Lock) -> bool:
        """Release a `Lock`, and return whether it was held until then."""
        try:
            await lock.arelease() if self.suspending else lock.release()
        except LockLost:
            return False
        return True

    async def entered(self, room: float, port: Locks | None = None, lease: float = LONG) -> bytes:
        """Return a new token that has entered, with room for so many holders."""
        token = new_id()
        assert isinstance(await (port or self.locks).acquire("l", token, lease, room=room), Granted)
        return token

    async def refused(self, name: str = "l", room: float = 1) -> Busy:
        """Try to acquire the lock on the peer, which must refuse, and return the reply."""
        if room == 1:
            reply = await self.far_locks.acquire(name, new_id(), LONG)
        else:
            reply = await self.far_locks.acquire(name, new_id(), LONG, room=room)
        assert isinstance(reply, Busy), reply
        return reply

    async def check_turn_of(self, token: bytes, since: float, **terms: Any) -> None:
        """Check that the free lock is reserved for this token, unless it asked so long ago that its turn is over."""
        passer = new_id()
        reply = await self.far_locks.acquire("l", passer, LONG, **terms)
        if monotonic() - since < TURN:
            assert isinstance(reply, Busy) and reply.token == token
        elif isinstance(reply, Granted):
            await self.far_locks.release("l", passer)

    async def get_in(self, token: bytes) -> None:
        """Wait until this token gets the lock: at once, or after the turns of others."""
        with soon():
            while isinstance(busy := await self.locks.acquire("l", token, LONG, waits=True), Busy):
                await self.locks.wait("l", busy, LONG)

    async def short_and_busy(self) -> Busy | None:
        """Return a Busy reply on a short lease. None: the lease had ended already."""
        holder = new_id()
        await self.until(lambda: self.locks.acquire("l", holder, self.short), is_granted)
        reply = await self.far_locks.acquire("l", new_id(), self.short)
        return reply if isinstance(reply, Busy) else None

    async def test_locks_have_names(self) -> None:
        """Each name must be its own lock; otherwise independent locks would block each other."""
        tokens = [await self.held(name) for name in KEYS]
        for name, token in zip(KEYS, tokens, strict=True):
            await self.refused(name)
            assert await self.locks.release(name, token) is True

    async def test_released_is_free(self) -> None:
        """A released lock must be free, and fences must grow; otherwise a lock could be acquired only once, or a
        resource could not refuse a holder that has lost its lock."""
        fences = []
        for _ in range(4):
            token = new_id()
            fences.append(await self._fence(token, self.locks))
            assert await self.locks.release("l", token) is True
        assert fences == sorted(set(fences))

    async def test_own_token_takes_it_again(self) -> None:
        """A lock must be granted to its own token again; otherwise a lost reply would lock its caller out."""
        token = await self.held()
        assert isinstance(await self.locks.acquire("l", token, LONG), Granted)
        await self.refused()
        assert await self.locks.release("l", token) is True
        await self.held()

    async def test_release_needs_the_token(self) -> None:
        """Only the holder's token may renew or release; otherwise a slow holder could end or extend another lock."""
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
        """A lock must end by itself; otherwise a dead holder would keep it for ever, or a late one would believe that
        it still has it."""
        token, other = await self.held(lease=self.short), new_id()
        await self.until(lambda: self.far_locks.acquire("l", other, LONG), is_granted)
        assert not await self.locks.renew("l", token, LONG)
        assert await self.locks.release("l", token) is False
        assert await self.far_locks.release("l", other) is True

    async def test_an_end_nobody_noticed_is_an_end(self) -> None:
        """A lock that has ended must be lost, even if no other caller asked for it; otherwise its holder could renew it
        although another holder came and went."""
        token = await self.held(lease=self.short)
        await self.lapse(self.beyond)
        assert not await self.locks.renew("l", token, LONG)
        assert await self.locks.release("l", token) is False

    async def test_who_lost_it_knows_before_the_next_is_in(self) -> None:
        """`lost` must be true before another caller gets the lock, without waiting for a renewal or its answer;
        otherwise two holders would each believe that they are alone."""
        if self.clock is not None:
            raise unittest.SkipTest("a holder reads the real clock, which this engine does not")
        first = Lock("l", self.engine, lease=self.short, max_hold=self.short / 100, wait=SOON)
        second = Lock("l", self.peer, lease=LONG, wait=SOON)
        try:
            assert await self.acquired(first) or first.lost  # so short a lease may have ended before the answer came
            assert await self.acquired(second)
            assert (first.lost, first.held) == (True, False)
        finally:
            stood = [await self.released(each) for each in (second, first)]
        assert stood == [True, False]  # the release reports the loss, too

    async def test_renewing_a_lock_moves_its_end(self) -> None:
        """`renew` must extend a lock; otherwise long work would lose its lock."""
        token = await self.in_time(self.held_briefly, lambda token: self.locks.renew("l", token, LONG))
        await self.refused()  # a refused caller must not undo the renewal
        await self.lapse(self.beyond)
        await self.refused()
        assert await self.locks.release("l", token) is True

    async def test_holders_are_shown(self) -> None:
        """`holder` and `held` must show the holders, and change nothing; otherwise users could not see why they wait,
        or looking would extend a lock."""
        holds = self.holds
        assert await holds.holder("l") == []
        tokens = {name: await self.held(name) for name in KEYS}
        for name, token in tokens.items():
            ((token_shown, left),) = await holds.holder(name)
            assert token_shown == token and 0 < left <= 2 * LONG  # a server's clock may count whole seconds only
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

    async def test_all_who_share_it_are_shown(self) -> None:
        """All holders of a shared lock must be shown, and no waiters; otherwise users would see wrong holders."""
        self.declared(self.engine.rooms, "rooms")
        holds, inside = self.holds, {await self.entered(inf) for _ in range(2)}
        assert isinstance(await self.locks.acquire("l", new_id(), LONG, waits=True), Busy)
        assert {token for token, _ in await holds.holder("l")} == inside
        listed = await holds.held("l")
        assert listed is None or [each.name for each in listed] == ["l", "l"]

    async def test_it_is_handed_over(self) -> None:
        """A lock must survive being handed over; otherwise it would end with the process that took it, or be lost on
        the way to the next one."""
        handover = self.handover
        token = await self.in_time(self.held_briefly, lambda token: handover.hand_over("l", token, LONG))
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
        """A release must wake all waiters; otherwise they would sleep until the lease ends."""
        token = await self.held()
        busy = await self.refused()
        with soon():
            waiters = [
                self.beside(self.locks.wait("l", busy, LONG)),
                self.beside(self.far_locks.wait("l", busy, LONG)),
            ]
            await self.pause(0.02)  # usually they sleep by now; if not, they must not miss the wake-up either
            assert await self.locks.release("l", token) is True
            await self.locks.wait("l", busy, LONG)
            acquired = 0
            for waiter in waiters:
                await waiter
                acquired += isinstance(await self.locks.acquire("l", new_id(), LONG), Granted)
            assert acquired == 1

    async def test_who_has_waited_longest_is_next(self) -> None:
        """The longest waiter must be next; otherwise callers with lucky timing would overtake it for ever."""
        self.declared(self.engine.fair, "fairness")
        holder, waiters = await self.held(), [new_id() for _ in range(5)]
        for token in waiters:
            assert isinstance(await self.locks.acquire("l", token, LONG, waits=True), Busy)
        for token in waiters[::-1]:  # asking again must not change the order
            assert isinstance(await self.locks.acquire("l", token, LONG, waits=True), Busy)
        for token in waiters:
            at = monotonic()
            assert isinstance(await self.locks.acquire("l", token, LONG, waits=True), Busy)
            assert await self.locks.release("l", holder) is True
            await self.check_turn_of(token, at)
            await self.get_in(token)
            holder = token

    async def test_a_turn_wakes_its_waiter(self) -> None:
        """A turn must wake the waiter whose turn it is; otherwise the lock would be idle while all waiters sleep."""
        holder, first, second = await self.held(), new_id(), new_id()
        replies = [await self.locks.acquire("l", token, LONG, waits=True) for token in (first, second)]
        assert all(isinstance(reply, Busy) for reply in replies)
        with soon():
            woken = self.beside(self.locks.wait("l", replies[0], LONG))  # type: ignore[arg-type]
            await self.pause(0.02)  # usually it sleeps by now; if not, it must not miss the wake-up either
            assert await self.locks.release("l", holder) is True
            await woken
            await self.get_in(first)

    async def test_a_waiter_that_left_is_skipped(self) -> None:
        """A waiter that gave up must lose its place; otherwise the lock would be reserved for it, and idle."""
        holder, gone, named, last = await self.held(), new_id(), new_id(), new_id()
        at = monotonic()
        for token in (gone, named, last):
            assert isinstance(await self.locks.acquire("l", token, LONG, waits=True), Busy)
        assert await self.locks.release("l", gone) is False
        assert await self.locks.release("l", holder) is True
        if self.engine.fair:
            await self.check_turn_of(named, at)
        assert await self.locks.release("l", named) is False  # it leaves although its turn may have come
        await self.get_in(last)

    async def test_readers_share_and_a_writer_is_alone(self) -> None:
        """Readers must share, and a writer must be alone; otherwise readers would block each other, or read while a
        writer writes."""
        self.declared(self.engine.rooms, "rooms")
        readers = [await self.entered(inf, port) for port in (self.locks, self.far_locks, self.locks)]
        assert (await self.refused()).token in readers
        assert (await self.refused(room=2)).token in readers
        assert isinstance(await self.far_locks.acquire("l", readers[0], LONG, room=inf), Granted)  # a lost reply
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

    async def test_room_is_limited(self) -> None:
        """No more holders may enter than the smallest room among them allows; otherwise a bulkhead would be overrun."""
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
        """Readers must not overtake a waiting writer; otherwise it would wait for ever while readers come and go."""
        self.declared(self.engine.rooms and self.engine.fair, "rooms, or fairness")
        first, second = await self.entered(inf), await self.entered(inf, self.far_locks)
        writer, reader = new_id(), new_id()
        assert isinstance(await self.locks.acquire("l", writer, LONG, waits=True), Busy)
        refused = await self.far_locks.acquire("l", reader, LONG, waits=True, room=inf)
        assert isinstance(refused, Busy)
        await self.refused(room=inf)  # nor by a reader that doesn't wait
        assert await self.locks.release("l", first) is True
        at = monotonic()
        assert await self.locks.release("l", second) is True
        await self.check_turn_of(writer, at, room=inf)
        await self.get_in(writer)
        with soon():
            woken = self.beside(self.far_locks.wait("l", refused, LONG))
            await self.pause(0.02)  # usually it sleeps by now; if not, it must not miss the wake-up either
            assert await self.locks.release("l", writer) is True
            await woken
        assert isinstance(await self.far_locks.acquire("l", reader, LONG, waits=True, room=inf), Granted)
        await self.entered(inf)

    async def test_a_dead_reader_s_place_ends(self) -> None:
        """A dead reader's place must end, and only that; otherwise a writer would wait for ever, or other readers would
        lose their places."""
        self.declared(self.engine.rooms, "rooms")
        dead, alive, next_one = await self.entered(inf, lease=self.short), await self.entered(inf), new_id()
        await self.lapse(self.beyond)
        assert not await self.locks.renew("l", dead, LONG)
        assert await self.far_locks.release("l", dead) is False
        assert (await self.refused()).token == alive
        assert await self.far_locks.release("l", alive) is True
        await self.until(lambda: self.locks.acquire("l", next_one, LONG), is_granted)

    async def test_a_failed_try_disturbs_nobody(self) -> None:
        """A refused try must change nothing; otherwise it would end or shorten the holder's lock, or another one."""
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
        """A released token must be useless; otherwise its former holder could extend or end the next holder's lock."""
        old = await self.held()
        assert await self.locks.release("l", old) is True
        token = await self.held()
        for port in (self.locks, self.far_locks):
            assert not await port.renew("l", old, LONG)
            assert await port.release("l", old) is False
        assert await self.locks.release("l", token) is True

    async def test_a_wait_for_a_lock_ends_with_the_lease(self) -> None:
        """A wait must end with the lease; otherwise waiters for a dead holder would sleep on."""
        busy = await self.in_time(self.short_and_busy)
        with soon():
            await self.locks.wait("l", busy, LONG)

    async def test_a_wait_for_a_lock_ends_with_its_timeout(self) -> None:
        """A wait must end with its timeout; otherwise the option `wait` would have no effect."""
        await self.held()
        busy = await self.refused()
        for timeout in (0.0, 0.05):
            with soon():
                await self.locks.wait("l", busy, timeout)

    async def test_one_of_many_takes_it(self) -> None:
        """Only one of many concurrent callers may get the lock; otherwise two would be inside."""
        ports = [self.locks, self.far_locks] * (HERD // 2)
        herd = [self.beside(port.acquire("l", new_id(), LONG)) for port in ports]
        replies = [await one for one in herd]
        assert sum(isinstance(reply, Granted) for reply in replies) == 1

    async def test_everybody_gets_in_one_by_one(self) -> None:
        """All waiters must get the lock, one at a time; otherwise two would be inside, or one would never get in."""
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
    """Return a name as an engine may show it: characters that can't be encoded are escaped."""
    return name.encode("utf-8", "surrogatepass").decode("utf-8", "backslashreplace")
