"""The server's leases, on which keys stand: had in advance where that can be, so that taking a lock is one round trip.

A lease stands a little longer than what it is for. Who gives back his lock leaves its lease to the next one of this
process, which needs no new one while it has long enough to go.
"""

from __future__ import annotations

import time
from collections import deque
from math import ceil, inf, log

from stampede.engines.etcd.gateway import Gateway, Gone

__all__ = ["EtcdLease", "Leases"]

BEYOND = 0.1
"""Parts of a lease by which the server's stands longer."""

SPARE = 64
"""Leases of one length that are kept for the next ones."""

STEP = 1.5
"""Ends of values go by lengths that differ by this factor: each costs a lease now and then."""

FOREVER = 1e9
"""Seconds that are no end."""


class EtcdLease:
    """One of the server's. It ends by itself `ttl` seconds after it was renewed, as we know it: not before."""

    __slots__ = ("id", "renewed", "ttl")

    def __init__(self, number: int, ttl: float, renewed: float) -> None:
        self.id, self.ttl, self.renewed = number, ttl, renewed

    @property
    def left(self) -> float:
        return self.renewed + self.ttl - time.monotonic()


class Leases:
    """Those of one process."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.start_again()

    def start_again(self) -> None:
        """Also in a forked child: they are the parent's."""
        self._spare: dict[int, deque[EtcdLease]] = {}
        self._ends: dict[int, EtcdLease] = {}

    # -- of locks -------------------------------------------------------------------------------------------------

    def take(self, seconds: float, *, new: bool = False) -> EtcdLease:
        """One on which nothing stands, for at least so long from now."""
        ttl = _ttl(seconds)
        spare = self._spare.get(ttl)
        while spare and not new:
            try:
                lease = spare.pop()
            except IndexError:
                break
            if lease.left >= seconds:
                return lease
        return self.grant(ttl)

    def give_back(self, lease: EtcdLease, seconds: float) -> None:
        """Nothing stands on it any more, and nothing is under way that could."""
        spare = self._spare.setdefault(_ttl(seconds), deque(maxlen=SPARE))
        if lease.left >= seconds:
            spare.append(lease)

    def grant(self, ttl: int) -> EtcdLease:
        asked = time.monotonic()
        told = self._gateway.ask("/v3/lease/grant", {"TTL": str(ttl)})
        return EtcdLease(int(told["ID"]), int(told["TTL"]), asked)  # the server may give more than was asked for

    def renew(self, lease: EtcdLease) -> bool:
        """One question. False: it has ended, and what stood on it is gone."""
        asked = time.monotonic()
        told = self._gateway.ask("/v3/lease/keepalive", {"ID": str(lease.id)}).get("result", {})
        ttl = int(told.get("TTL", 0))
        if ttl <= 0:
            return False
        lease.ttl, lease.renewed = ttl, asked
        return True

    def revoke(self, lease: int) -> bool:
        """End it, with what stands on it, and what is under way to it. False: it had ended."""
        try:
            self._gateway.ask("/v3/lease/revoke", {"ID": str(lease)})
        except Gone:
            return False
        return True

    def left(self, lease: int) -> float:
        """Seconds, as the server says; for anybody's."""
        told = self._gateway.ask("/v3/lease/timetolive", {"ID": str(lease)})
        return max(float(told.get("TTL", 0)), 0.0)

    # -- of values ------------------------------------------------------------------------------------------------

    def end_after(self, seconds: float) -> int:
        """A lease on which much may stand, and that ends some time after this, never before. 0: none does."""
        if seconds >= FOREVER:
            return 0
        step = max(ceil(log(max(seconds, 1.0), STEP)), 0)
        lease = self._ends.get(step)
        if lease is None or lease.left <= seconds:
            lease = self._ends[step] = self.grant(ceil(2 * STEP**step) + 1)
        return lease.id

    def forget(self, number: int) -> None:
        """The server doesn't know it."""
        self._ends = {step: lease for step, lease in self._ends.copy().items() if lease.id != number}


def _ttl(seconds: float) -> int:
    """What is asked of the server, which knows whole seconds."""
    return ceil(min(seconds * (1 + BEYOND), inf if seconds < FOREVER else FOREVER))
