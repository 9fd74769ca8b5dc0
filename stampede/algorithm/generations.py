"""The generations of a function's keys: the part of each key that an invalidation of all of them changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b

from stampede.algorithm.call import Marks
from stampede.algorithm.core import Core
from stampede.errors import EngineClosed, EngineError
from stampede.keys import generation, quoted
from stampede.model.entry import new_id
from stampede.model.ports import Store

__all__ = ["Generations"]

_clock = time.monotonic

HEARD = 2.0
"""Seconds after which every process has heard of a new generation."""


class Generations(Marks):
    """The prefix of a function's keys, as this process knows it, for both colours. The engine has the last word."""

    def __init__(self, core: Core, namespace: str, name: str) -> None:
        self.core = core
        self.name = name  # of its generation
        self.namespace = quoted(namespace)
        self._nested = bool(namespace) and self.namespace != name  # `clear` of the namespace ends its generations, too
        self.scopes = [name, self.namespace] if self._nested else [name]
        # The generation, as this process knows it, and the epoch in which it was asked for. At first, and until it can
        # be asked for, one of this scope's own: no other's values are to be found in it.
        self._own = new_id().hex()
        self.known = -1, generation(name, self._own, ""), "", ""
        self.older: list[str] = []  # prefixes known before, whose residents may still be at home
        # The engine's of these, as their two generations, and when this process heard of a newer one.
        self._recent: list[tuple[str, str, float]] = []
        self.recall()  # and no question: a loop may wait for this, or for who makes it under a lock

    @property
    def prefix(self) -> str:
        return self.known[1]

    async def learn(self, store: Store) -> str:
        """Ask for today's generation, as far as the engine can be asked, and return the prefix of each key."""
        outage, epoch = self.core.outage, self.core.epoch
        probed = outage if self.core.is_down() else None
        if probed is not None and not probed.may_ask():
            return self._unsure()
        # Who probes asks this first, and the engine itself: what is known may have ended during the outage.
        ask = self._generations if probed is None else self._current_generations
        try:
            told = await ask(store)
        except EngineClosed:
            raise
        except EngineError as error:
            if outage is not None:
                outage.failed(error, probing=probed is not None)
            return self._unsure()
        if probed is not None:
            probed.answered()
        return self._keep_prefix(epoch, *told)

    async def _current_generations(self, store: Store) -> tuple[str, str]:
        """Those of today, as the engine itself says."""
        own = (await store.generations(self.name))[0]
        return own, (await store.generations(self.namespace))[0] if self._nested else ""

    async def _generations(self, store: Store) -> tuple[str, str]:
        return await store.generation(self.name), await store.generation(self.namespace) if self._nested else ""

    def _unsure(self) -> str:
        """The prefix that is known, while the engine can't say it: unless this process has ended that generation. The
        engine may be back before we know, and would be asked for what was cleared."""
        ended = max(self.core.ended.get(self.name, 0), self.core.ended.get(None, 0))
        known = self.known[0]
        return self._keep_prefix(ended, f"{self._own}.{ended}", "") if known < ended else self.prefix

    async def learn_surely(self, store: Store) -> tuple[str, list[str]]:
        """Ask for today's generation without a doubt. Return the prefix of each key, and those under which other
        processes may look for it for a moment yet."""
        epoch = self.core.epoch
        return self.adopt(epoch, [await store.generations(scope) for scope in self.scopes])

    def adopt(self, epoch: int, generations: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
        """What the generations of its scopes, as they were said to be since that epoch, make of a prefix."""
        owns, wholes = (*generations, [""])[:2]
        today = self._keep_prefix(epoch, owns[0], wholes[0])
        if not self._recent and len(owns) == len(wholes) == 1:
            return today, []
        # What this process knew a moment ago, too: of what an emptied server can't tell any more. Each process asks for
        # both generations at moments of its own, so it may know of a newer one, and believe in the older other.
        left = [known for known in self._recent.copy() if _clock() - known[2] < HEARD]
        owns = [*owns, *[own for own, _, _ in left]]
        wholes = [*wholes, *[whole for _, whole, _ in left]]
        prefixes = {self._prefix_of(own, whole) for whole in wholes for own in owns}
        return today, list(prefixes - {today})

    def recall(self) -> str | None:
        """The same, where the engine knows it at once: without the price of coroutines. Not of one that is down, which
        is asked for this first."""
        recalls, outage = self.core.engine.recalls, self.core.outage
        if recalls is None or (outage is not None and outage.breaker.since is not None):
            return None
        known, epoch, own = self.known, self.core.epoch, recalls.generation_at_hand(self.name)
        whole = recalls.generation_at_hand(self.namespace) if self._nested else ""
        if known[2] == own and known[3] == whole and known[0] == epoch:
            return known[1]
        return None if own is None or whole is None else self._keep_prefix(epoch, own, whole)

    def at_hand(self) -> str:
        """The prefix as it is known here. A change asks the engine itself, and would pay twice for one that hangs."""
        return self.recall() or self.prefix

    def _keep_prefix(self, epoch: int, own: str, whole: str) -> str:
        known = self.known
        if known[0] == epoch and known[2] == own and known[3] == whole:
            return known[1]
        prefix = self._prefix_of(own, whole)
        self.mark = _mark_of(own, whole)
        if prefix != known[1] and known[0] >= 0:  # or nobody has asked for anything yet
            self.older.append(known[1])  # before anybody can see the new one
            del self.older[:-8]
            if self.is_of_engine(known):
                self._recent.append((known[2], known[3], _clock()))
                del self._recent[:-8]
        self.known = epoch, prefix, own, whole
        return prefix

    def _prefix_of(self, own: str, whole: str) -> str:
        """By the parts of the generations that are of keys: what stands behind is of their entries."""
        return generation(self.name, own.partition("~")[0], whole.partition("~")[0])

    def is_of_engine(self, known: tuple[int, str, str, str]) -> bool:
        return bool(known[2]) and not known[2].startswith(self._own)


def _mark_of(own: str, whole: str) -> bytes:
    """How the ids begin of what is begun in this generation: as any, as long as nothing was made stale as a whole."""
    softer = own.partition("~")[2], whole.partition("~")[2]
    return blake2b("|".join(softer).encode(), digest_size=3).digest() if any(softer) else b""
