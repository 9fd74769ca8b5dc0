"""Generations in cells: one cell for each scope, and one for all. A bump notes there which generation it has ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stampede.engines.cells.ages import KnownAge
from stampede.engines.cells.protocol import Faster
from stampede.engines.cells.records import TRIES, CellRecords, written_of
from stampede.engines.kit.generations import MOST, NOTED, Beliefs, names_of, new_generation
from stampede.engines.kit.naming import name_of
from stampede.errors import EngineError
from stampede.model.record import Record

__all__ = ["CellGenerations"]


class _Scope(NamedTuple):
    hard: str = ""  # "": nothing is stored
    soft: str = ""
    ended: tuple[tuple[str, float], ...] = ()  # earlier generations and when each ended, the last one first

    @property
    def current(self) -> str:
        return f"{self.hard}~{self.soft}"


class CellGenerations(Beliefs):
    """The generations that this process knows, for both colours; unknown ones are read from their cells."""

    async def ask(
        self, records: CellRecords, scopes: Sequence[str], names: Sequence[str] = ()
    ) -> tuple[list[Record], list[list[str]]]:
        """Return the records of these names, and the generations of these scopes: of each the current one, followed by
        those that other processes may still use. All are read at once."""
        asked, cells = records.clock(), [_ALL, *map(_scope_name, scopes)] if scopes else []
        different = list(dict.fromkeys([*names, *cells]))
        found = dict(zip(different, await records.known(different), strict=True))
        ids = [await _ids_of(records, cell, found[cell]) for cell in cells]
        generations = [names_of(ids[0], own) for own in ids[1:]]
        for scope, (current, *_) in zip(scopes, generations, strict=True):
            self.learn(scope, current, asked)
        return [written_of(found[name]).record for name in names], generations

    async def change(self, records: CellRecords, scope: str, *, soft: bool) -> None:
        """Begin a new generation of a scope, or of all scopes with "". `soft`: change its soft part only."""
        now = records.clock()

        def softened(old: _Scope) -> _Scope:
            return _begun(old)._replace(soft=new_generation())

        def bumped(old: _Scope) -> _Scope:
            return _Scope(new_generation(), "", ((old.hard, now), *old.ended)[:MOST] if old.hard else ())

        try:
            await _changed(records, _scope_name(scope) if scope else _ALL, softened if soft else bumped)
        finally:
            self.clear()


async def _ids_of(records: CellRecords, name: str, known: KnownAge) -> list[str]:
    """Return the id of the scope in this cell, followed by its earlier ids. If nothing is stored, begin with a new
    one."""
    scope = _scope_of(known, records.clock())
    if not scope.hard:
        scope = await _changed(records, name, _begun)
    return [scope.current, *(hard for hard, _ in scope.ended)]


def _begun(old: _Scope) -> _Scope:
    return old if old.hard else old._replace(hard=new_generation())


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
    raise EngineError("other processes begin new generations faster than this one: try again")


def _scope_of(known: KnownAge, now: float) -> _Scope:
    """Return what the cell says, or an empty scope if nothing is stored, or bytes that another program has written."""
    try:
        hard, soft, ended = json.loads(bytes(known.body or b"")[1:])
        # Count from the latest possible time of the write: if a generation is dropped here too early, a process that
        # still uses it does not see a change.
        noted = tuple((str(each), known.latest - float(ago)) for each, ago in ended if known.latest - ago > now - NOTED)
        return _Scope(str(hard), str(soft), noted[:MOST])
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return _Scope()


_ALL = "g*"


def _scope_name(scope: str) -> str:
    return name_of(scope, b"g").decode()
