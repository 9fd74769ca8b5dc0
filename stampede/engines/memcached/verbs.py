"""Claims and Store, written once for both colours: a key is one item of the server, replaced under its CAS number.

A lease is an item with its holder's token. The holder's process remembers the CAS number that memcached gave the item,
and its fill replaces only this item: a miss takes an `ms` that adds the lease, and an `ms` over it. If the number is
not known (the lease was renewed, or the connection is new), the token in the item identifies the holder."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from stampede.engines.kit.expiring import Ending
from stampede.engines.kit.many_at_once import PutAside, together
from stampede.engines.kit.polling import Costs, pause
from stampede.engines.kit.whereabouts import here
from stampede.engines.memcached import items, meta
from stampede.engines.memcached.blocking import BlockingLine
from stampede.engines.memcached.generations import KnownGenerations, MemcachedGenerations, asked_of
from stampede.engines.memcached.items import PLAIN
from stampede.engines.memcached.servers import TRIES, MemcachedLine, MemcachedNode, NoRoom, Servers, accepted
from stampede.errors import EngineError, TooLarge
from stampede.model import record
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Asked, Busy, Found, Granted, Looked, Many, Reply, Shown
from stampede.model.record import Change, Lease, Record
from stampede.runtime.chance import random
from stampede.runtime.colour import Bell, Colour, settled

__all__ = ["MemcachedBatch", "MemcachedKeys", "Number", "Numbers", "changed"]

T = TypeVar("T")

ROOM = 1024
"""Bytes of an item that are left for what the server and the engine store beside the value."""

LOOKED = 1000
"""Names whose last look is remembered, at most."""


class Number(NamedTuple):
    """The CAS number of a lease or a lock of this process."""

    cas: bytes
    at: float  # a moment before it was asked for
    end: float  # when the lease ends


Numbers: TypeAlias = Ending[tuple[bytes, bytes], Number]


class MemcachedKeys(MemcachedGenerations):
    """Claims and Store of one colour."""

    def __init__(
        self, line: MemcachedLine, numbers: Numbers, generations: KnownGenerations, costs: Costs[bytes], colour: Colour
    ) -> None:
        self._line = line
        self._numbers = numbers
        self._generations = generations
        self._costs = costs
        self._colour = colour
        self._looked: dict[bytes, bool] = {}  # whether the last look found an item: what the claim after it tries first

    # -- claim --------------------------------------------------------------------------------------------------

    async def look(self, key: str) -> Found | None:
        name = items.name_of(key)
        (reply,), _ = await self._line.ask(self._line.servers.of(name), meta.look(name))
        return self._found(name, reply)

    def _found(self, name: bytes, reply: meta.MetaReply) -> Found | None:
        if reply.flags == PLAIN:
            kept = items.read_plain(reply)
            self._costs.learn(name, kept.entry)
            found = record.hit(kept, _ANY, 0.0)
            if found is not None:
                return found
        if len(self._looked) < LOOKED:
            self._looked[name] = reply.code == b"VA"
        return None

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        name, seconds = items.name_of(key), items.whole_seconds(ask.lease)
        server, line = self._line.servers.of(name), self._line
        look, add = meta.look(name), meta.add(name, *items.leased(token, seconds))
        there = self._looked.pop(name, None)
        asked = [look, add] if there is None else [look] if there else [add]
        for _ in range(TRIES):
            replies, at = await line.ask(server, *asked)
            if replies[-1].code == b"HD":
                return self._granted(name, token, replies[-1].cas, at, seconds)
            seen, asked = replies[0], [look, add]
            if seen.code != b"VA":
                continue  # another client was faster
            was = items.read(seen)
            if was.kept is not None:
                self._costs.learn(name, was.kept.entry)
            reply = items.answer(was, token, ask)
            if reply is not None:
                return reply
            after = Record(was.kept, Lease(token, seconds, holder=here()), was.past)
            (put,), at = await line.ask(server, meta.put(name, *items.write(after), seen.cas), since=at)
            if put.code == b"HD":
                return self._granted(name, token, put.cas, at, seconds, record.served(was.kept, 0.0))
        raise EngineError("other clients keep changing this key faster than this one can claim it: try again later")

    def _granted(
        self, name: bytes, token: bytes, cas: bytes, at: float, seconds: int, entry: Entry[bytes] | None = None
    ) -> Granted:
        self._numbers.put((name, token), Number(cas, at, at + seconds), at)
        return Granted(entry)

    # -- the end of a lease -------------------------------------------------------------------------------------

    async def fill(self, key: str, token: bytes, entry: Entry[bytes]) -> bool:
        name, body = items.name_of(key), items.plain(entry)
        server, number = self._line.servers.of(name), self._numbers.pop((name, token), None)
        self._costs.learn(name, entry)
        _fits(server, name, body)
        try:
            if number is not None:
                put = meta.put(name, *body, number.cas)
                (reply,), _ = await self._line.ask(server, put, since=number.at)
                if reply.code != b"EX":
                    return reply.code == b"HD"
            return await changed(self._line, name, lambda was: record.fill(was, token, entry, 0.0))
        except NoRoom as full:
            raise TooLarge(str(full)) from full

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        name = items.name_of(key)
        self._numbers.pop((name, token), None)
        seconds = items.whole_seconds(rest) if rest > 0 else 0.0
        return await changed(self._line, name, lambda was: record.abandon(was, token, verdict, seconds, 0.0))

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        name = items.name_of(key)
        self._numbers.pop((name, token), None)  # the item gets another number
        return await changed(self._line, name, lambda was: record.renew(was, token, items.whole_seconds(lease), 0.0))

    # -- wait ---------------------------------------------------------------------------------------------------

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        """Poll: soon at first, then less often. If the key's cost is known, aim one look at the computation's end."""
        name, began = items.name_of(key), time.monotonic()
        server, cost = self._line.servers.of(name), self._costs.get(name, 0.0)
        while True:
            waited = time.monotonic() - began
            if waited >= timeout:
                return None
            await self._colour.park(Bell(), min(pause(waited, cost, random()), timeout - waited))
            (reply,), _ = await self._line.ask(server, meta.look(name))
            there = items.read(reply)
            if not record.standing(there.lease, busy.token, 0.0):
                break
        if there.kept is None:
            return None
        self._costs.learn(name, there.kept.entry)
        seen = busy.entry.id if busy.entry is not None else None
        return record.hit(there.kept, Ask(0.0, since=time.monotonic() - began, seen=seen), 0.0)

    # -- store --------------------------------------------------------------------------------------------------

    async def get(self, keys: Sequence[str]) -> list[Entry[bytes] | None]:
        names = [items.name_of(key) for key in keys]
        entries: list[Entry[bytes] | None] = [None] * len(names)
        for server, group in self._line.servers.groups(names).items():
            replies, _ = await self._line.ask(server, *[meta.look(names[at]) for at in group])
            for at, reply in zip(group, replies, strict=True):
                entries[at] = record.served(items.read(reply).kept, 0.0)
        return entries

    async def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        """Return what `look` finds, and the generations. Each server is asked once. If one of several servers is down
        while generations are asked for, its keys are left out, and the claim finds out why."""
        now, names, ids = time.monotonic(), [items.name_of(key) for key in keys], [asked_of(scope) for scope in scopes]
        wanted: defaultdict[MemcachedNode, dict[bytes, None]] = defaultdict(dict)
        for name in names:
            wanted[self._line.servers.of(name)][name] = None
        for some in ids:
            wanted[self._line.servers.of(some[1])] |= dict.fromkeys(some)
        seen: dict[tuple[MemcachedNode, bytes], meta.MetaReply] = {}

        async def ask(server: MemcachedNode, some: Sequence[bytes]) -> None:
            try:
                replies, _ = await self._line.ask(server, *map(meta.look, some))
            except EngineError as error:
                if not error.partial or not scopes:
                    raise
            else:
                seen.update(zip([(server, name) for name in some], replies, strict=True))

        questions = [partial(ask, server, list(some)) for server, some in wanted.items()]
        if self._colour.suspending and len(questions) > 1:
            failed = [each for each in await settled([each() for each in questions]) if isinstance(each, BaseException)]
            try:
                if failed:
                    raise failed[0]
            finally:
                del failed  # an error in it refers to this frame
        else:
            for question in questions:
                await question()
        found = {
            key: self._found(name, reply)
            for key, name in zip(keys, names, strict=True)
            if (reply := seen.get((self._line.servers.of(name), name))) is not None
        }
        generations = []
        for scope, some in zip(scopes, ids, strict=True):
            server = self._line.servers.of(some[1])
            both = [seen[server, name] for name in some if (server, name) in seen]
            generations.append(await self.current(scope, both, now))
        return found, generations

    async def show(self, key: str) -> Shown:
        name = items.name_of(key)
        (reply,), _ = await self._line.ask(self._line.servers.of(name), meta.look(name))
        there = items.read(reply)
        entry, lease = record.served(there.kept, 0.0), there.lease
        if lease is None:
            return Shown(entry, b"")
        return Shown(entry, lease.token, items.left_of(lease.end), lease.holder)

    async def set(self, key: str, entry: Entry[bytes]) -> None:
        name, body = items.name_of(key), items.plain(entry)
        server = self._line.servers.of(name)
        _fits(server, name, body)
        try:
            await self._line.ask(server, meta.put(name, *body))
        except NoRoom as full:
            raise TooLarge(str(full)) from full

    async def replace(self, key: str, seen: bytes | None, entry: Entry[bytes]) -> bool:
        name = items.name_of(key)
        _fits(self._line.servers.of(name), name, items.plain(entry))
        try:
            return await changed(self._line, name, lambda was: record.replace(was, seen, entry, 0.0))
        except NoRoom as full:
            raise TooLarge(str(full)) from full

    async def expire(self, key: str) -> bool:
        return await changed(self._line, items.name_of(key), lambda was: record.expire(was, 0.0))

    async def invalidate(self, key: str) -> bool:
        name = items.name_of(key)
        (seen, _), _ = await self._line.ask(self._line.servers.of(name), meta.look(name), meta.delete(name))
        return record.invalidate(items.read(seen), 0.0)[1]


class _DeferredLine:
    """A line whose commands wait for those of other verbs, and are sent together with them."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    async def ask(
        self, server: MemcachedNode, *commands: bytes, since: float | None = None
    ) -> tuple[list[meta.MetaReply], float]:
        replies, at = await PutAside((server, commands, since))
        return accepted(server, replies), at


class MemcachedBatch(Many):
    """Many verbs at once, for blocking callers: the next commands of all verbs go out together, to each server."""

    def __init__(self, keys: MemcachedKeys, line: BlockingLine) -> None:
        self._line, self._keys = line, copy(keys)
        self._keys._line = _DeferredLine(line.servers)

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        return together([getattr(self._keys, verb)(*args) for verb, args in asked], self._answered)

    def _answered(self, questions: dict[int, Any]) -> dict[int, Any]:
        groups: defaultdict[tuple[MemcachedNode, bool], list[int]] = defaultdict(list)
        for number, (server, _, since) in questions.items():
            groups[server, since is None].append(number)
        answers: dict[int, Any] = {}
        for (server, _), group in groups.items():
            commands = [command for number in group for command in questions[number][1]]
            since = min((since for number in group if (since := questions[number][2]) is not None), default=None)
            try:
                replies, at = self._line.send(server, commands, since)
            except EngineError as error:
                answers |= dict.fromkeys(group, error)
                continue
            remaining = iter(replies)
            answers |= {number: ([next(remaining) for _ in questions[number][1]], at) for number in group}
        return answers


_ANY = Ask(0.0)


def _fits(server: MemcachedNode, name: bytes, body: items.ItemBody) -> None:
    """Raise TooLarge if the server would refuse the item. Then it would also delete the present item, and its lease."""
    if server.longest and len(body.data) + len(name) + ROOM > server.longest:
        raise TooLarge(f"{len(body.data)} bytes are too many for one item of memcached: {server.longest} (its -I)")


async def changed(line: MemcachedLine, name: bytes, change: Callable[[Record], Change[T]]) -> T:
    """Apply `change` to the record of an item, and return its answer. The new record is stored only over the one that
    `change` has seen; if another client was faster, `change` is applied again."""
    server = line.servers.of(name)
    for _ in range(TRIES):
        (seen,), at = await line.ask(server, meta.look(name))
        was, missing = items.read(seen), seen.code == b"EN"
        after, answer, _ = change(was)
        if after is was:
            return answer
        if after.lease is None and items.bare(after):
            if missing:
                return answer
            command = meta.delete(name, seen.cas)
        else:
            body = items.write(after)
            command = meta.add(name, *body) if missing else meta.put(name, *body, seen.cas)
        (reply,), _ = await line.ask(server, command, since=at)
        if reply.code == b"HD":
            return answer
    raise EngineError("other clients keep changing this key faster than this one can: try again later")
