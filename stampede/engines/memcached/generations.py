"""Generations on memcached: one for each scope, on the scope's server; one for all scopes, on every server; and a note
beside each of the generations that ended a moment ago."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from math import ceil
from typing import TypeAlias

from stampede.engines.kit.generations import MOST, NOTED, Beliefs, hard_part, names_of, new_generation
from stampede.engines.memcached import items, meta
from stampede.engines.memcached.servers import TRIES, MemcachedLine, MemcachedNode
from stampede.errors import EngineError
from stampede.model.ports import Store, Ticket

__all__ = ["KnownGenerations", "MemcachedGenerations", "asked_of"]


_Change: TypeAlias = Callable[[MemcachedLine, MemcachedNode, bytes], Awaitable[bool]]


class KnownGenerations(Beliefs):
    """The generations that this process knows, for both colours."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, str] = {}  # generations of this process alone, while a scope's server is down


class MemcachedGenerations(Store):
    """The verbs of `Store` for generations, of one colour."""

    _line: MemcachedLine
    _generations: KnownGenerations

    def generation_at_hand(self, scope: str) -> str | None:
        return self._generations.at_hand(scope)

    def ticket_of_generation(self, scope: str) -> Ticket | None:
        return None  # no server reports the next one

    async def current(self, scope: str, seen: Sequence[meta.MetaReply], now: float) -> str:
        """Return the current generation of a scope. `seen` is what its server has of `asked_of`, as it was read at
        `now`; empty if the server failed."""
        known, generation = self._generations, ""
        try:
            if seen:
                (generation,) = _names_in(seen) or await self._generations_of(scope, noted=False)
                known.own.pop(scope, None)
        except EngineError as error:
            if not error.partial:
                raise
        if not generation:
            # Values on the other servers may be out of date: go on with a generation of this process alone.
            generation = known.own.setdefault(scope, new_generation())
        known.learn(scope, generation, now)
        return generation

    async def generations(self, scope: str) -> list[str]:
        now = time.monotonic()
        generations = await self._generations_of(scope, noted=True)
        self._generations.own.pop(scope, None)
        self._generations.learn(scope, generations[0], now)
        return generations

    async def _generations_of(self, scope: str, *, noted: bool) -> list[str]:
        """Return the current generation of a scope, and with `noted` those that ended a moment ago."""
        names = asked_of(scope)
        server = self._line.servers.of(names[1])
        asked = [meta.look(name) for name in (*names, *(map(_note, names) if noted else ()))]
        for _ in range(TRIES):
            seen, _ = await self._line.ask(server, *asked)
            generations = _names_in(seen)
            if generations:
                return generations
            missing = [name for name, reply in zip(names, seen, strict=False) if reply.code != b"VA"]
            await self._line.ask(server, *[meta.add(name, *_body(new_generation())) for name in missing])
        raise EngineError("the server loses generations as soon as they are stored: is its memory (-m) full?")

    async def soften(self, scope: str) -> None:
        await self._changed(scope, _softened)

    async def bump(self, scope: str) -> None:
        await self._changed(scope, _bumped)

    async def _changed(self, scope: str, change: _Change) -> None:
        name = _scope_name(scope) if scope else _ALL
        servers = [self._line.servers.of(name)] if scope else self._line.servers.all
        failure: EngineError | None = None
        try:
            for server in servers:
                try:
                    await self._changed_on(server, name, change)
                except EngineError as error:
                    failure = error  # go on: clear as many servers as possible
            if failure is not None:
                raise failure
        finally:
            self._generations.clear()

    async def _changed_on(self, server: MemcachedNode, name: bytes, change: _Change) -> None:
        for _ in range(TRIES):
            if await change(self._line, server, name):
                return
        raise EngineError("other clients keep changing the generation faster than this one can: try again later")


async def _softened(line: MemcachedLine, server: MemcachedNode, name: bytes) -> bool:
    (old,), at = await line.ask(server, meta.look(name))
    soft = f"{hard_part(_text(old)) or new_generation()}~{new_generation()}"
    return await _put(line, server, name, soft, old, at)


async def _bumped(line: MemcachedLine, server: MemcachedNode, name: bytes) -> bool:
    note = _note(name)
    (old, ended), at = await line.ask(server, meta.look(name), meta.look(note))
    if old.code == b"VA":  # note it before it ends, so that a process that reads the new one also finds the old one
        last = hard_part(_text(old))
        ids = [last, *[id for id in _text(ended).split() if id != last]]
        if not await _put(line, server, note, " ".join(ids[:MOST]), ended, at, ceil(NOTED)):
            return False
    return await _put(line, server, name, new_generation(), old, at)


async def _put(
    line: MemcachedLine, server: MemcachedNode, name: bytes, text: str, seen: meta.MetaReply, at: float, ttl: int = 0
) -> bool:
    """Store a text if the item is still the one that was seen. Return whether it was."""
    body = _body(text, ttl)
    command = meta.put(name, *body, seen.cas) if seen.code == b"VA" else meta.add(name, *body)
    (reply,), _ = await line.ask(server, command, since=at)
    return reply.code == b"HD"


def _body(text: str, ttl: int = 0) -> items.ItemBody:
    return items.ItemBody(text.encode(), b"0", ttl)


def _text(reply: meta.MetaReply) -> str:
    return reply.value.decode("ascii", "replace")


def _names_in(seen: Sequence[meta.MetaReply]) -> list[str]:
    """Return the generations in the replies to `asked_of`, which the notes of ended ones may follow. Return nothing if
    an id is missing."""
    if not seen or any(reply.code != b"VA" for reply in seen[:2]):
        return []
    wholes, owns = [_text(seen[0])], [_text(seen[1])]
    for some, note in zip((wholes, owns), seen[2:], strict=False):
        some += _text(note).split()
    return names_of(wholes, owns)


_ALL = b"g*"


def asked_of(scope: str) -> tuple[bytes, bytes]:
    """Return the names of the ids that make up a scope's generation. Every server has the id of all scopes: so only the
    server of the scope's own id is asked for both."""
    return _ALL, _scope_name(scope)


def _scope_name(scope: str) -> bytes:
    return items.name_of(scope, b"g")


def _note(name: bytes) -> bytes:
    """Return the name of the item that notes the generations that ended a moment ago."""
    return b"p" + name[1:]
