"""The generation of a function's keys: a part of each key, which an invalidation of all of them changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import TypeAlias, cast

from stampede.algorithm.call import Marks
from stampede.algorithm.core import Core
from stampede.errors import EngineClosed, EngineError
from stampede.keys import generation, quoted
from stampede.local_tier.pulses import ScopePulse
from stampede.model.entry import new_id
from stampede.model.ports import Changes, Looked, Pulse, Recalls, Store, Ticket
from stampede.model.result import own_copy
from stampede.runtime.colour import Bell, Colour, Loop, running_loop

__all__ = ["Generations"]

_clock = time.monotonic

KNOWN_EVERYWHERE = 2.0
"""Seconds after which every process knows of a new generation."""


SAFETY = 1.0
"""Seconds to wait for the answer to another caller's question, before asking by oneself."""


Where: TypeAlias = tuple[int, Loop | None]
"""The process and the event loop of a question."""

Keys: TypeAlias = Callable[[], Sequence[str]]
"""Returns the keys to look for."""


class _Asking:
    """A question for the generations that several callers share."""

    __slots__ = ("bell", "current", "error", "sent")

    def __init__(self, sent: float) -> None:
        self.bell = Bell()
        self.sent = sent
        self.current: tuple[str, str] | None = None
        self.error: EngineError | None = None


class Generations(Marks):
    """The prefix of a function's keys, as far as this process knows it. The engine has the last word."""

    def __init__(self, core: Core, namespace: str, name: str) -> None:
        self.core = core
        self.name = name  # the name of the scope
        self.namespace = quoted(namespace)
        self._nested = bool(namespace) and self.namespace != name  # `clear` of the namespace ends this generation, too
        self.scopes = [name, self.namespace] if self._nested else [name]
        # The epoch in which the generation was asked for, the prefix, and both generations. Until the engine can be
        # asked, it is one that no other scope has, so that no other values are found in it.
        self._own = new_id().hex()
        self.known = -1, generation(name, self._own, ""), "", ""
        self.older: list[str] = []  # earlier prefixes, whose residents may still be in the local tier
        # The engine's generations of earlier prefixes, and when this process learned that they had ended.
        self._recent: list[tuple[str, str, float]] = []
        self._asking: dict[Where, _Asking] = {}
        # The generation that residents' pulses are of, and these pulses by the pulse of the engine: in one object.
        self._pulses: tuple[tuple[str, ...], dict[Pulse, ScopePulse]] = (), {}
        self.recall()  # do not ask the engine here: an event loop may be waiting for this

    @property
    def prefix(self) -> str:
        return self.known[1]

    async def learn(self, store: Store, colour: Colour, keys: Keys) -> tuple[str, Looked | None]:
        """Ask for the current generation, and return its prefix; the known prefix if the engine cannot be asked. Return
        also what is found under these keys of the known prefix, if that is current and all was asked for together."""
        outage, epoch, before, looked = self.core.outage, self.core.epoch, self.prefix, None
        if not self.core.engine.changes and (prefix := self.recall()) is not None:
            return prefix, None  # an engine with `changes` is asked all the same, as its news may be late
        probed = outage if self.core.is_down() else None
        if probed is not None and not probed.may_ask():
            return self._unsure(), None
        try:
            # A probe asks the engine itself, as what is remembered may have ended during the outage.
            if probed is not None:
                current = await self._current_generations(store)
            else:
                current, looked = await self._together(store, colour, keys)
        except EngineClosed:
            raise
        except EngineError as error:
            if outage is not None:
                outage.failed(error, probing=probed is not None)
            return self._unsure(), None
        if probed is not None:
            probed.answered()
        prefix = self._keep_prefix(epoch, *current)
        return prefix, looked if prefix == before else None

    async def _current_generations(self, store: Store) -> tuple[str, str]:
        """Return both current generations, as the engine itself has them."""
        own = (await store.generations(self.name))[0]
        return own, (await store.generations(self.namespace))[0] if self._nested else ""

    async def _together(self, store: Store, colour: Colour, keys: Keys) -> tuple[tuple[str, str], Looked | None]:
        """Return both current generations, asked for in one round trip. Callers that come while a question is under way
        wait for its answer: without that, a herd would ask a thousand times."""
        where, began = (os.getpid(), running_loop() if colour.suspending else None), _clock()
        while True:
            mine = _Asking(_clock())
            asking = self._asking.setdefault(where, mine)
            if asking is mine:
                return await self._ask(store, mine, where, keys)
            if not await colour.park(asking.bell, SAFETY):  # whoever has asked is slow, or does not run any more
                if self._asking.get(where) is asking:
                    del self._asking[where]
                return await self._ask(store, _Asking(_clock()), where, keys)
            if asking.error is not None and not asking.error.partial:
                raise own_copy(asking.error)
            if self.recall() is not None:  # as it is believed now: a bump may have returned since that was asked
                return self.known[2:], None
            if asking.current is not None and asking.sent >= began:
                return asking.current, None

    async def _ask(
        self, store: Store, mine: _Asking, where: Where, keys: Keys
    ) -> tuple[tuple[str, str], Looked | None]:
        looks = keys() if self._is_looked_for else ()
        try:
            found, generations = await store.look_too(looks, self.scopes)
            mine.current = generations[0], generations[1] if self._nested else ""
        except EngineError as error:
            mine.error = error
            raise
        finally:
            if self._asking.get(where) is mine:
                del self._asking[where]
            mine.bell.ring()
        return mine.current, found if looks else None

    @property
    def _is_looked_for(self) -> bool:
        """Whether keys of the known prefix are likely to be current."""
        return self.core.engine.near is None and self.known[0] >= 0 and self.is_of_engine(self.known)

    def _unsure(self) -> str:
        """Return the known prefix, or a new one if this process has ended its generation during the outage. The engine
        may be back before this process notices, and would then be asked for what was cleared."""
        ended = max(self.core.ended.get(self.name, 0), self.core.ended.get(None, 0))
        known = self.known[0]
        return self._keep_prefix(ended, f"{self._own}.{ended}", "") if known < ended else self.prefix

    async def learn_surely(self, store: Store) -> tuple[str, list[str]]:
        """Ask the engine for the current generation. Return its prefix, and the prefixes that ended a moment ago. Other
        processes may still look for keys under those."""
        epoch = self.core.epoch
        if self.core.engine.changes:
            _, generations = await cast("Changes", store).change([], self.scopes)
            return self.adopt(epoch, generations)
        return self.adopt(epoch, [await store.generations(scope) for scope in self.scopes])

    def adopt(self, epoch: int, generations: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
        """Take over the generations that the engine named since that epoch. Return prefixes as `learn_surely` does."""
        owns, wholes = (*generations, [""])[:2]
        current_prefix = self._keep_prefix(epoch, owns[0], wholes[0])
        if not self._recent and len(owns) == len(wholes) == 1:
            return current_prefix, []
        # Add what this process knew a moment ago: a server that was emptied cannot name it any more. Combine all pairs:
        # a process asks for the two generations at different moments, and may know a newer one of only one of them.
        recent = [known for known in self._recent.copy() if _clock() - known[2] < KNOWN_EVERYWHERE]
        owns = [*owns, *[own for own, _, _ in recent]]
        wholes = [*wholes, *[whole for _, whole, _ in recent]]
        prefixes = {self._prefix_of(own, whole) for whole in wholes for own in owns}
        return current_prefix, list(prefixes - {current_prefix})

    def recall(self) -> str | None:
        """Return the prefix if the engine remembers the generations in this process, without the cost of coroutines.
        Return None if not, and while the engine is down, because a probe must ask it first."""
        recalls, outage = self.core.engine.recalls, self.core.outage
        if recalls is None or (outage is not None and outage.breaker.since is not None):
            return None
        known, epoch, own = self.known, self.core.epoch, recalls.generation_at_hand(self.name)
        whole = recalls.generation_at_hand(self.namespace) if self._nested else ""
        if known[2] == own and known[3] == whole and known[0] == epoch:
            return known[1]
        return None if own is None or whole is None else self._keep_prefix(epoch, own, whole)

    def guard(self, ticket: Ticket) -> Ticket:
        """Return the ticket, made to depend on the generation that this process knows."""
        known, recalls = self.known, self.core.engine.recalls
        if recalls is None:
            return ticket
        generations, pulses = self._pulses
        if generations != known[2:]:
            self._pulses = generations, pulses = known[2:], {}
        pulse = pulses.get(ticket.pulse)
        if pulse is None:
            pulse = pulses[ticket.pulse] = ScopePulse(ticket.pulse, partial(self._unchanged, recalls, *generations))
        pulse.holds(_clock())  # notes the proofs
        return ticket._replace(pulse=pulse)

    def _unchanged(self, recalls: Recalls, own: str, whole: str) -> list[Ticket] | None:
        """Return the proofs that these are the current generations, or None if they are not."""
        expected = {self.name: own, self.namespace: whole} if self._nested else {self.name: own}
        proofs = [recalls.ticket_of_generation(scope) for scope in expected]
        if any(recalls.generation_at_hand(scope) != generation for scope, generation in expected.items()):
            return None
        return None if None in proofs else proofs  # type: ignore[return-value]

    def at_hand(self) -> str:
        """Return the prefix as this process knows it. A change asks the engine itself. To ask here, too, would wait
        twice for an engine that hangs."""
        return self.recall() or self.prefix

    def _keep_prefix(self, epoch: int, own: str, whole: str) -> str:
        known = self.known
        if known[0] == epoch and known[2] == own and known[3] == whole:
            return known[1]
        prefix = self._prefix_of(own, whole)
        self.mark = _mark_of(own, whole)
        if prefix != known[1] and known[0] >= 0:  # -1: the known one was never used
            self.older.append(known[1])  # before the new prefix is visible
            del self.older[:-8]
            if self.is_of_engine(known):
                self._recent.append((known[2], known[3], _clock()))
                del self._recent[:-8]
        self.known = epoch, prefix, own, whole
        return prefix

    def _prefix_of(self, own: str, whole: str) -> str:
        """Return the prefix of keys. The parts of the generations behind a `~` concern ids of entries, not keys."""
        return generation(self.name, own.partition("~")[0], whole.partition("~")[0])

    def is_of_engine(self, known: tuple[int, str, str, str]) -> bool:
        return bool(known[2]) and not known[2].startswith(self._own)


def _mark_of(own: str, whole: str) -> bytes:
    """Return the bytes with which ids of this generation's entries begin; empty if it never had an `expire_all`."""
    softer = own.partition("~")[2], whole.partition("~")[2]
    return blake2b("|".join(softer).encode(), digest_size=3).digest() if any(softer) else b""
