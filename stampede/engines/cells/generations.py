"""Generations in cells: one of each scope, and one of all; a bump notes in it what it has ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from stampede.engines.cells.ages import KnownAge
from stampede.engines.cells.protocol import Faster
from stampede.engines.cells.records import TRIES, CellRecords
from stampede.engines.kit.generations import MOST, NOTED, Beliefs, names_of, new_generation
from stampede.engines.kit.naming import name_of
from stampede.errors import EngineError

__all__ = ["CellGenerations"]


class _Scope(NamedTuple):
    hard: str = ""  # nothing is there
    soft: str = ""
    ended: tuple[tuple[str, float], ...] = ()  # those that ended, the last one first, and when

    @property
    def today(self) -> str:
        return f"{self.hard}~{self.soft}"


class CellGenerations(Beliefs):
    """What this process knows of generations, for both colours, and how it asks for what it doesn't."""

    async def ask(self, records: CellRecords, scope: str) -> list[str]:
        """Today's, and behind it those that others may still believe in."""
        asked = records.clock()
        wholes, owns = ([each.today, *(hard for hard, _ in each.ended)] for each in await self._of(records, scope))
        generations = names_of(wholes, owns)
        self.learn(scope, generations[0], asked)
        return generations

    async def _of(self, records: CellRecords, scope: str) -> list[_Scope]:
        names = [_ALL, _scope_name(scope)]
        found = [_scope_of(known, records.clock()) for known in await records.known(names)]
        return [
            each if each.hard else await _changed(records, name, _begun)
            for name, each in zip(names, found, strict=True)
        ]

    async def change(self, records: CellRecords, scope: str, *, soft: bool) -> None:
        """A new generation, or a softer part of the one that is, of a scope or of all."""
        now = records.clock()

        def softened(it: _Scope) -> _Scope:
            return _begun(it)._replace(soft=new_generation())

        def bumped(it: _Scope) -> _Scope:
            return _Scope(new_generation(), "", ((it.hard, now), *it.ended)[:MOST] if it.hard else ())

        try:
            await _changed(records, _scope_name(scope) if scope else _ALL, softened if soft else bumped)
        finally:
            self.clear()


def _begun(it: _Scope) -> _Scope:
    return it if it.hard else it._replace(hard=new_generation())


async def _changed(records: CellRecords, name: str, change: Callable[[_Scope], _Scope]) -> _Scope:
    for tried in range(TRIES):
        (known,) = await records.known([name])
        now = records.clock()
        old = _scope_of(known, now)
        new = change(old)
        if new is old:
            return old
        body = json.dumps([new.hard, new.soft, [[hard, now - end] for hard, end in new.ended]])
        if not isinstance(await records.swap(name, known.version, b"\x00" + body.encode(), float("inf")), Faster):
            return new
        await records.pause(tried)
    raise EngineError("others begin generations faster than this one can")


def _scope_of(known: KnownAge, now: float) -> _Scope:
    """What is there; of what is none of ours, nothing."""
    try:
        hard, soft, ended = json.loads(bytes(known.body or b"")[1:])
        # By what is known for sure: one that is forgotten too early may get no news of a change.
        noted = tuple((str(each), known.stood - float(ago)) for each, ago in ended if known.stood - ago > now - NOTED)
        return _Scope(str(hard), str(soft), noted[:MOST])
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return _Scope()


_ALL = "g*"


def _scope_name(scope: str) -> str:
    return name_of(scope, b"g").decode()
