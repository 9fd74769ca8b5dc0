"""The generation of a function's keys: a part of each key, which an invalidation of all of them changes."""

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

KNOWN_EVERYWHERE = 2.0
"""Seconds after which every process knows of a new generation."""


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
        self.recall()  # do not ask the engine here: an event loop may be waiting for this

    @property
    def prefix(self) -> str:
        return self.known[1]

    async def learn(self, store: Store) -> str:
        """Ask for the current generation and return its prefix; the known prefix if the engine cannot be asked."""
        outage, epoch = self.core.outage, self.core.epoch
        probed = outage if self.core.is_down() else None
        if probed is not None and not probed.may_ask():
            return self._unsure()
        # A probe asks the engine itself for the generation, as what is remembered may have ended during the outage.
        ask = self._generations if probed is None else self._current_generations
        try:
            current = await ask(store)
        except EngineClosed:
            raise
        except EngineError as error:
            if outage is not None:
                outage.failed(error, probing=probed is not None)
            return self._unsure()
        if probed is not None:
            probed.answered()
        return self._keep_prefix(epoch, *current)

    async def _current_generations(self, store: Store) -> tuple[str, str]:
        """Return both current generations, as the engine itself has them."""
        own = (await store.generations(self.name))[0]
        return own, (await store.generations(self.namespace))[0] if self._nested else ""

    async def _generations(self, store: Store) -> tuple[str, str]:
        return await store.generation(self.name), await store.generation(self.namespace) if self._nested else ""

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
