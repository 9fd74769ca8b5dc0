"""The memcached engine passes the suites for every engine. Its peer is another engine on the same servers."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("pymemcache")

from memcached_server import MemcachedServer, shared_memcached
from servers import clock_of_its_own, forget_clock

from stampede.engines.memcached import MemcachedEngine
from stampede.model.ports import Engine
from stampede.testing.conformance import ClaimsSuite, LocksSuite, StoreSuite
from stampede.testing.conformance.suite import Suite


class HastyServer(MemcachedServer):
    """A server whose clock runs four times as fast as ours."""

    pace = 4

    def __init__(self) -> None:
        self.environment = clock_of_its_own(FAKETIME=f"+0 x{self.pace}")
        super().__init__()

    def stop(self) -> None:
        pid = self._process.pid if self._process is not None else 0
        super().stop()
        forget_clock(pid)


hasty = cache(HastyServer)


class OnMemcached:
    short = 1.0  # its clock ticks in seconds
    server = staticmethod(shared_memcached)

    def make_engine(self) -> Engine:
        self.server().empty()
        return MemcachedEngine(self.server().address)

    def make_peer(self, engine: Engine) -> Engine:
        return MemcachedEngine(self.server().address)


class InHaste(OnMemcached, Suite):
    """Leases and values end by the server's clock, which is faster here to make the tests shorter."""

    server = staticmethod(hasty)

    async def lapse(self, seconds: float) -> None:
        await self.pause(seconds / HastyServer.pace)


class TestMemcached(InHaste, ClaimsSuite):
    slack = 0.7


class TestMemcachedStore(OnMemcached, StoreSuite):
    pass


class TestMemcachedStoreAsync(TestMemcachedStore):
    suspending = True


class TestMemcachedLocks(InHaste, LocksSuite):
    slack = 1.7  # the clock skips a second now and then

    def test_who_lost_it_knows_before_the_next_is_in(self) -> None:
        """A holder uses its own clock, so the server's clock must run at the same speed here."""
        self.server = shared_memcached
        super().test_who_lost_it_knows_before_the_next_is_in()


class TestMemcachedLocksAsync(TestMemcachedLocks):
    suspending = True
    test_an_end_nobody_noticed_is_an_end = test_a_lock_ends = None  # as below


class TestMemcachedAsync(TestMemcached):
    suspending = True

    # Leases and values end after seconds, for both colours alike: only those ends are tested that a waiter sleeps for.
    test_a_value_ends = test_kept_has_an_end_too = test_a_rest_ends = None
    test_fill_after_the_lease_is_refused = None
    test_a_lease_that_has_ended_is_not_shown = None
    test_one_of_many_is_granted_what_ended = test_fill_over_what_has_ended_meanwhile = None
    test_a_lost_lease_is_not_renewed = None
