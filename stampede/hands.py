"""A lock's end in one's own hands: to put it off, to hand the lock over, to ask whether anybody has it."""

from __future__ import annotations

from hashlib import blake2b
from math import inf
from time import monotonic
from typing import Protocol

from stampede.colour import BLOCKING, Bell, Colour
from stampede.errors import OptionError
from stampede.keeper import Hold
from stampede.ports import Engine, Holds, Locks

__all__ = ["Gripped", "extended", "handed_over", "holds_of", "inside", "token_of"]

LENGTH = 8
"""Bytes of a token, as engines have them."""


class Gripped(Protocol):
    """A grip that was granted."""

    token: bytes
    key: str
    hold: Hold | None


def token_of(own: bytes | str | None) -> bytes | None:
    """What a lock is taken with, of what its user says: a token, its hexadecimal digits, or any words of his own."""
    if own is None:
        return None
    if not isinstance(own, (bytes, str)) or not own:
        raise OptionError(f"token is {own!r}: give a lock's `token`, its `.hex()`, or a text of your own")
    if isinstance(own, bytes) and len(own) == LENGTH:
        return own
    if isinstance(own, str) and len(own) == 2 * LENGTH:
        try:
            return bytes.fromhex(own)
        except ValueError:
            pass
    words = own if isinstance(own, bytes) else own.encode("utf-8", "surrogatepass")
    return blake2b(words, digest_size=LENGTH, person=b"stampede").digest()


async def extended(locks: Locks, grip: Gripped, seconds: float) -> bool:
    """Have it stand for so long at least, whether it is renewed or not. False: it is lost."""
    assert grip.hold is not None
    hold, asked = grip.hold, monotonic()
    lasts = max(seconds, hold.lease, hold.ends - asked)
    with hold.standing_until(asked + lasts):  # before we ask: the keeper may do so too, just now
        stood = await locks.renew(grip.key, grip.token, lasts)
    if stood:
        hold.ends = max(hold.ends, asked + lasts)
    else:
        hold.lose()
    return stood and not hold.lost


async def handed_over(engine: Engine, colour: Colour, grip: Gripped, seconds: float | None) -> bool:
    """Have it stand for so long without us, for whoever has its token. False: it is lost."""
    assert grip.hold is not None
    hands = engine.lock_engine.side(colour).hands
    if hands is None:
        raise OptionError(f"a lock of {engine.lock_engine.scheme}:// ends with its holder, and can't be handed over")
    hold, lasts = grip.hold, grip.hold.lease if seconds is None else seconds
    with hold.standing_until(monotonic() + lasts), hold.resting():
        while hold.under_way is not None and monotonic() < hold.ends:  # a renewal behind us would make it ours again
            await colour.park(Bell(), 0.005)
        stood = await hands.hand_over(grip.key, grip.token, lasts)
    hold.end()
    return stood and not hold.lost


async def inside(engine: Engine, colour: Colour, name: str) -> float:
    """How many have this lock. Infinitely many: nobody gets in just now, as its server knows nothing of some."""
    holds = holds_of(engine, colour)
    found = await holds.holder(name)
    return inf if any(not token for token, _ in found) else len(found)


def holds_of(engine: Engine, colour: Colour = BLOCKING) -> Holds:
    engine = engine.lock_engine
    holds = engine.side(colour).holds
    if holds is None:
        raise OptionError(f"{engine.called} can't say who has a lock")
    return holds
