"""Leases of the server, to which keys are attached. A key is removed when its lease ends. Leases are reused, so that
taking a lock is mostly one round trip: a lock that is released leaves its lease to the next lock of this process, as
long as enough of it remains. The server's lease is a little longer than the lock's own."""

from __future__ import annotations

import time
from collections import deque
from math import ceil, inf, log

from stampede.engines.etcd.gateway import Gateway, Gone

__all__ = ["EtcdLease", "Leases"]

BEYOND = 0.1
"""By what part of a lock's lease the server's lease is longer."""

SPARE = 64
"""The most unused leases of one length that are kept for later locks."""

STEP = 1.5
"""The factor between two lengths of the leases that values share: fewer lengths need fewer leases."""

FOREVER = 1e9
"""Seconds from which on a value never expires."""


class EtcdLease:
    """A lease of the server. It does not end before `ttl` seconds after `renewed`, by this process's clock."""

    __slots__ = ("id", "renewed", "ttl")

    def __init__(self, number: int, ttl: float, renewed: float) -> None:
        self.id, self.ttl, self.renewed = number, ttl, renewed

    @property
    def left(self) -> float:
        return self.renewed + self.ttl - time.monotonic()


class Leases:
    """The leases of one process."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.start_again()

    def start_again(self) -> None:
        """Begin with no leases; also in a forked child, where the known ones are the parent's."""
        self._spare: dict[int, deque[EtcdLease]] = {}
        self._ends: dict[int, EtcdLease] = {}

    # -- for locks ------------------------------------------------------------------------------------------------

    def take(self, seconds: float, *, new: bool = False) -> EtcdLease:
        """Return a lease without keys that remains for at least so many seconds. `new`: do not reuse one."""
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
        """Keep a lease for a later lock. No key may be attached to it, and no request under way may attach one."""
        spare = self._spare.setdefault(_ttl(seconds), deque(maxlen=SPARE))
        if lease.left >= seconds:
            spare.append(lease)

    def grant(self, ttl: int) -> EtcdLease:
        """Ask the server for a new lease."""
        asked = time.monotonic()
        reply = self._gateway.ask("/v3/lease/grant", {"TTL": str(ttl)})
        return EtcdLease(int(reply["ID"]), int(reply["TTL"]), asked)  # the server may grant a longer one

    def renew(self, lease: EtcdLease) -> bool:
        """Renew a lease, in one request. False: it has ended, and its keys are removed."""
        asked = time.monotonic()
        reply = self._gateway.ask("/v3/lease/keepalive", {"ID": str(lease.id)}).get("result", {})
        ttl = int(reply.get("TTL", 0))
        if ttl <= 0:
            return False
        lease.ttl, lease.renewed = ttl, asked
        return True

    def revoke(self, lease: int) -> bool:
        """End a lease and remove its keys; requests under way that would attach one fail. False: it had ended."""
        try:
            self._gateway.ask("/v3/lease/revoke", {"ID": str(lease)})
        except Gone:
            return False
        return True

    def left(self, lease: int) -> float:
        """Ask the server how many seconds remain of any lease, of this process or another one."""
        reply = self._gateway.ask("/v3/lease/timetolive", {"ID": str(lease)})
        return max(float(reply.get("TTL", 0)), 0.0)

    # -- for values -----------------------------------------------------------------------------------------------

    def end_after(self, seconds: float) -> int:
        """Return the id of a shared lease that ends some time after so many seconds, but not before. 0: no lease, since
        the value never expires."""
        if seconds >= FOREVER:
            return 0
        step = max(ceil(log(max(seconds, 1.0), STEP)), 0)
        lease = self._ends.get(step)
        if lease is None or lease.left <= seconds:
            lease = self._ends[step] = self.grant(ceil(2 * STEP**step) + 1)
        return lease.id

    def forget(self, number: int) -> None:
        """Forget a shared lease that the server does not know (any more)."""
        self._ends = {step: lease for step, lease in self._ends.copy().items() if lease.id != number}


def _ttl(seconds: float) -> int:
    """Return the ttl for the server, which counts whole seconds."""
    return ceil(min(seconds * (1 + BEYOND), inf if seconds < FOREVER else FOREVER))
