"""The verbs of a cache, written once: each is one item of the server, changed by its CAS number.

A miss is two commands: `mg` that leaves a stub where nothing was, and `ms` over just that stub. Every other change
reads the item and writes it back by CAS; the holder's token in it says whose lease it is, whatever the number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import random
from typing import Any, TypeVar

from stampede import record
from stampede.colour import Colour, run_blocking
from stampede.engines.looking import Costs, pause
from stampede.engines.memcached import items, meta
from stampede.engines.memcached.generations import Generations, KnownGenerations
from stampede.engines.memcached.holds import TRIES, Line, Link, OwnLease, OwnLeases, alias, is_alias, taken
from stampede.engines.memcached.items import PLAIN, Body
from stampede.engines.memcached.servers import NoRoom
from stampede.engines.whereabouts import here
from stampede.entry import Entry, Verdict
from stampede.errors import EngineError, TooLarge
from stampede.ports import Ask, Busy, Found, Granted, Reply, Shown, Versioned
from stampede.record import NOTHING, Change, Keeps, Lease, Record

__all__ = ["Keys", "changed"]

T = TypeVar("T")

ROOM = 1024
"""Bytes of an item that are kept free for what the server and we write beside the value."""

AT_ONCE = 200
"""Commands of a batch that are under way together."""


class Keys(Generations, Versioned):
    """Claims and Store of one colour.

    `later` takes leases to be signed in a moment, with the connections that won them; where it won't, or there is none,
    that is done at once.
    """

    def __init__(
        self,
        line: Line,
        owned: OwnLeases,
        generations: KnownGenerations,
        costs: Costs[bytes],
        colour: Colour,
        later: Callable[[OwnLease, Link], bool] | None = None,
    ) -> None:
        self._line = line
        self._owned = owned
        self._generations = generations
        self._costs = costs
        self._colour = colour
        self._later = later

    # -- claim --------------------------------------------------------------------------------------------------

    async def look(self, key: str) -> Found | None:
        name = items.name_of(key)
        link = await self._line.take(name)
        try:  # `taken` would cost each hit a little
            reply = (await link.ask(meta.look(name), twice=True))[0]
        finally:
            self._line.give(link)
        found = record.hit(items.read_plain(reply), _ANY, 0.0) if reply.flags == PLAIN else None
        if found is not None:
            self._costs.learn(name, found.entry)
        return found

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        name = items.name_of(key)
        link = await self._line.take(name)
        given = False  # to the lease, until it is signed
        try:
            for _ in range(TRIES):
                sent = time.monotonic()
                reply = (await link.ask(meta.claim(name), twice=True))[0]
                if reply.flags == PLAIN:
                    found = record.hit(items.read_plain(reply), ask, 0.0)
                    if found is not None:
                        self._costs.learn(name, found.entry)
                        return found
                if reply.won and self._later is not None:
                    given = True
                    if self._later(self._won(link, name, token, ask, reply, sent), link):
                        return Granted()
                    given = False
                if reply.won or _is_stub(reply):
                    verdict = await self._vivid(link, name, token, ask, reply, sent)
                else:
                    verdict = await self._decided(link, name, token, ask, reply)
                if verdict is not None:
                    return verdict
            raise EngineError("others change this key faster than it can be claimed")
        except EngineError:
            raise
        except BaseException:
            if given:
                self._owned.pop(name, token)  # nobody signs it over a connection that others have
            given = False
            raise
        finally:
            if not given:
                self._line.give(link)

    def _won(self, link: Link, name: bytes, token: bytes, ask: Ask, reply: meta.Reply, sent: float) -> OwnLease:
        """A lease that has just been granted, as a stub without a signature."""
        hold = OwnLease(name, token, ask.lease)
        hold.vivid(reply.cas, max(sent, link.born + 1e-6))  # the question may have been sent again, over a new one
        self._owned.put(hold.name, hold.token, hold)
        return hold

    async def _vivid(
        self, link: Link, name: bytes, token: bytes, ask: Ask, reply: meta.Reply, sent: float
    ) -> Reply | None:
        """There is a stub without a signature: just won, or somebody's, which may be this very caller."""
        hold = self._owned.get(name, token)
        if reply.won:
            self._won(link, name, token, ask, reply, sent)
        elif hold is not None and hold.link is not None:
            hold.lease = ask.lease
            return Granted(fence=int(hold.cas)) if self.sign(hold) else None
        elif not ask.force and not (hold is not None and hold.cas == reply.cas and hold.known_to(link)):
            return Busy(alias(reply.cas), items.left_of(reply.left))
        return await self._lease(link, NOTHING, name, token, ask, reply.cas)

    async def _decided(self, link: Link, name: bytes, token: bytes, ask: Ask, reply: meta.Reply) -> Reply | None:
        was = items.read(reply)
        if was.kept is not None:
            self._costs.learn(name, was.kept.entry)
        verdict = items.answer(was, token, ask)
        return verdict if verdict is not None else await self._lease(link, was, name, token, ask, reply.cas)

    async def _lease(self, link: Link, was: Record, name: bytes, token: bytes, ask: Ask, cas: bytes) -> Granted | None:
        """Write the lease over what is there. None: it is not there any more."""
        hold = self._owned.get(name, token) or OwnLease(name, token, ask.lease)
        hold.lease = ask.lease
        self._owned.put(hold.name, hold.token, hold)
        if not await self._sign(link, hold, was, cas):
            self._owned.pop(name, token)
            return None
        return Granted(record.served(was.kept, 0.0), int(hold.cas))

    async def _sign(self, link: Link, hold: OwnLease, was: Record, cas: bytes) -> bool:
        """Let a lease stand from now on, in its holder's name."""
        sent = time.monotonic()
        reply = (await link.ask(self._signature(hold, was, cas)))[0]
        if reply.code == b"HD":
            self._signed(hold, was, reply, sent)
        return reply.code == b"HD"

    def _signature(self, hold: OwnLease, was: Record, cas: bytes) -> bytes:
        lease = Lease(hold.token, items.standing(hold.lease), holder=here())
        return meta.put(hold.name, *items.write(Record(was.kept, lease, was.past)), cas)

    def _signed(self, hold: OwnLease, was: Record, reply: meta.Reply, sent: float) -> None:
        hold.stands(reply.cas, sent, items.standing(hold.lease) - 1)
        hold.signed, hold.bare = True, items.bare(was)

    # -- the end of a lease -------------------------------------------------------------------------------------

    async def _way(self, hold: OwnLease | None, name: bytes) -> Link:
        """The connection that knows the lease, where it has none of its own any more: any."""
        link = (hold.take_link() if hold is not None else None) or await self._line.take(name)
        if hold is not None and hold.witness is not None and not hold.known_to(link) and not self._colour.suspending:
            self.sign(hold)  # as it was an event loop's, which has ended: by its name it is known to all
        return link

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        name, body = items.name_of(key), items.plain(entry)
        hold = self._owned.get(name, token)
        link, ended = await self._way(hold, name), True
        try:
            _fits(link, name, body)
            self._costs.learn(name, entry)
            if hold is not None and hold.known_to(link):
                try:
                    reply = (await link.ask(meta.put(name, *body, hold.cas)))[0]
                except EngineError as error:
                    if not isinstance(error.__cause__, ConnectionError):
                        raise
                    # The connection is lost, and so is a lease without a signature, unless the value has come
                    # through. Whether the server is lost too is for the next question to find out.
                    self._line.give(link)
                    link = await self._line.take(name)
                    return await self._over(link, name, token, entry)
                if reply.code == b"HD":
                    return True
                if reply.code == b"NF":
                    return False
            return await self._over(link, name, token, entry)
        except (TooLarge, NoRoom) as refusal:
            if hold is not None:
                self._owned.put(hold.name, hold.token, hold)
                hold.lost = True
            raise TooLarge(str(refusal)) from refusal
        except EngineError:
            raise
        except BaseException:  # interrupted, perhaps before it was sent: the lease is given back by what we know of it
            ended = False
            raise
        finally:
            if ended and (hold is None or not hold.lost):
                self._owned.pop(name, token)
            self._line.give(link)

    async def _over(self, link: Link, name: bytes, token: bytes, entry: Entry[Any]) -> bool:
        """Store if the lease in the item is ours: somebody has changed the item, or the connection is a new one."""
        return await changed(link, name, lambda was, _: record.fill(was, token, entry, 0.0))

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        name = items.name_of(key)
        hold = self._owned.pop(name, token)
        link = await self._way(hold, name)

        def ended(was: Record, seen: meta.Reply) -> Change[bool]:
            if not self._ours(link, hold, token, seen, was):
                return was, False, None
            for called in [*(hold.aliases if hold is not None else ()), token]:
                was = Record(was.kept, Lease(called, 1.0), was.past)
                was, _, _ = record.abandon(was, called, verdict, items.standing(rest) if rest > 0 else 0.0, 0.0)
            return was, True, None

        try:
            return await changed(link, name, ended)
        finally:
            self._line.give(link)

    def _ours(self, link: Link, hold: OwnLease | None, token: bytes, seen: meta.Reply, was: Record) -> bool:
        """Whether the lease that stands has this token, also where that isn't written in the item."""
        if record.standing(was.lease, token, 0.0):
            return True
        if hold is None or not hold.known_to(link):
            return False
        if seen.code == b"EN":
            return hold.lost
        return not hold.signed and seen.cas == hold.cas

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        name = items.name_of(key)
        hold = self._owned.get(name, token) or OwnLease(name, token, lease)
        hold.lease = lease
        if not hold.signed and (hold.link or hold.witness) is not None and self.sign(hold):
            return True
        async with taken(self._line, name) as link:
            return await self._renewed(link, hold)

    async def _renewed(self, link: Link, hold: OwnLease) -> bool:
        if hold.bare and hold.known_to(link) and await self._sign(link, hold, NOTHING, hold.cas):
            return True
        for _ in range(TRIES):
            seen = (await link.ask(meta.look(hold.name), twice=True))[0]
            was = items.read(seen)
            if not record.standing(was.lease, hold.token, 0.0):
                return False
            if await self._sign(link, hold, was, seen.cas):
                return True
        return False

    def sign(self, hold: OwnLease) -> bool:
        """Put the holder's token into the stub, and let go of the connection. Of the blocking colour."""
        with hold.lock:
            link, hold.link = hold.link, None
            signer = link or hold.witness
            if signer is None or hold.signed:
                return hold.signed
            try:
                return run_blocking(self._sign(signer, hold, NOTHING, hold.cas))
            except EngineError:
                return False  # its fill will see
            finally:
                if link is not None:
                    self._line.give(link)

    # -- wait ---------------------------------------------------------------------------------------------------

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        """Looks that begin soon and become rarer; one is aimed at the computation's end, where its cost is known."""
        name, began = items.name_of(key), time.monotonic()
        cost, awaited = self._costs.get(name, 0.0), busy.token
        with self._line.servers.pausing() as closing:
            while True:
                waited = time.monotonic() - began
                if waited >= timeout:
                    return None
                await self._colour.park(closing, min(pause(waited, cost, random()), timeout - waited))
                async with taken(self._line, name) as link:
                    reply = (await link.ask(meta.look(name), twice=True))[0]
                there = _there(reply)
                if there.lease is not None and is_alias(awaited) and not is_alias(there.lease.token):
                    awaited = there.lease.token  # it has been signed
                if there.lease is not None and there.lease.token == awaited:
                    continue
                return self._news(name, there.kept, busy, time.monotonic() - began)

    def _news(self, name: bytes, kept: Keeps | None, busy: Busy, waited: float) -> Found | None:
        if kept is None:
            return None
        self._costs.learn(name, kept.entry)
        return record.hit(kept, Ask(0.0, since=waited, seen=busy.entry.id if busy.entry is not None else None), 0.0)

    # -- store --------------------------------------------------------------------------------------------------

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        names = [items.name_of(key) for key in keys]
        replies = await self._asked(names, meta.look)
        return [record.served(items.read(reply).kept, 0.0) for reply in replies]

    async def show(self, key: str) -> Shown:
        name = items.name_of(key)
        (reply,) = await self._asked([name], meta.look)
        there = _there(reply)
        entry, lease = record.served(there.kept, 0.0), there.lease
        if lease is None:
            return Shown(entry, b"")
        return Shown(entry, lease.token, items.left_of(lease.end), lease.holder)

    async def _asked(self, names: Sequence[bytes], command: Callable[[bytes], bytes]) -> list[meta.Reply]:
        """One command for each name, one round trip per server and `AT_ONCE` of them."""
        replies: dict[int, meta.Reply] = {}
        for group in self._line.servers.groups(names):
            async with taken(self._line, names[group[0]]) as link:
                for start in range(0, len(group), AT_ONCE):
                    some = group[start : start + AT_ONCE]
                    answers = await link.ask(b"".join([command(names[at]) for at in some]), len(some), twice=True)
                    replies.update(zip(some, answers, strict=True))
        return [replies[at] for at in range(len(names))]

    async def set(self, key: str, entry: Entry[Any]) -> None:
        name, body = items.name_of(key), items.plain(entry)
        try:
            async with taken(self._line, name) as link:
                _fits(link, name, body)
                await link.ask(meta.put(name, *body), twice=True)
        except NoRoom as full:
            raise TooLarge(str(full)) from full

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        name = items.name_of(key)
        try:
            async with taken(self._line, name) as link:
                _fits(link, name, items.plain(entry))
                return await changed(link, name, lambda was, _: record.replace(was, seen, entry, 0.0))
        except NoRoom as full:
            raise TooLarge(str(full)) from full

    async def expire(self, key: str) -> bool:
        name = items.name_of(key)
        async with taken(self._line, name) as link:
            return await changed(link, name, lambda was, _: record.expire(was, 0.0))

    async def invalidate(self, key: str) -> bool:
        name = items.name_of(key)
        async with taken(self._line, name) as link:
            seen, _ = await link.ask(meta.look(name) + meta.delete(name), 2, twice=True)
        return record.invalidate(items.read(seen), 0.0)[1]


_ANY = Ask(0.0)


def _is_stub(reply: meta.Reply) -> bool:
    """A lease that is not signed. (Other clients' values have no flags either.)"""
    return reply.flags == b"0" and not reply.value


def _there(reply: meta.Reply) -> Record:
    """What an item holds, a lease that is not signed too."""
    return Record(lease=Lease(alias(reply.cas), reply.left)) if _is_stub(reply) else items.read(reply)


def _fits(link: Link, name: bytes, body: Body) -> None:
    """TooLarge where the server would refuse; it would throw away what is there, too, with the lease in it."""
    if len(body.data) + len(name) + ROOM > link.longest:
        raise TooLarge(f"{len(body.data)} bytes are more than memcached keeps in one item: {link.longest} (its -I)")


async def changed(link: Link, name: bytes, ask: Callable[[Record, meta.Reply], Change[T]]) -> T:
    """The answer to a question. By then what it has made of the item is there, over just that which it has seen."""
    for _ in range(TRIES):
        seen = (await link.ask(meta.look(name), twice=True))[0]
        was = _there(seen)
        after, answer, _ = ask(was, seen)
        if after is was or await _becomes(link, name, after, seen):
            return answer
    raise EngineError("others change this key faster than we can")


async def _becomes(link: Link, name: bytes, after: Record, seen: meta.Reply) -> bool:
    """Leave this in the place of what was seen. False: something else is there by now."""
    missing = seen.code == b"EN"
    if after.lease is None and items.bare(after):
        return missing or (await link.ask(meta.delete(name, seen.cas)))[0].code == b"HD"
    body = items.write(after)
    command = meta.add(name, *body) if missing else meta.put(name, *body, seen.cas)
    return (await link.ask(command))[0].code == b"HD"
