"""Tags between the algorithm and an engine: what is read together with an entry, and what an entry's tags say about it
(`model/tags.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

from stampede.algorithm.gather import Gathering, run_together
from stampede.engines.kit.many_at_once import asked_together
from stampede.errors import EngineClosed, EngineError
from stampede.model.entry import Entry
from stampede.model.ports import Ask, Claims, Engine, Found, Granted, Looked, Looks, Reply, Store, Ticket
from stampede.model.tags import (
    LASTING,
    SIZE,
    Tag,
    Tags,
    TagsOfCall,
    judge,
    keep_of,
    key_of_tag,
    name_of_tag,
    names_in,
    outlasting,
)
from stampede.outages.outage import Outage
from stampede.runtime.colour import Colour, settled
from stampede.settings.options import Policy

__all__ = ["TagPorts", "TaggedClaims", "ticket_of"]

T = TypeVar("T")
Known = dict[bytes, Tag]

TRIES = 16
"""How many times a claim is made again because an entry's tags have ended, or a tag because other callers were
faster."""

MOST_HINTS = 10_000
"""The most keys whose tags are remembered, so that they are read together with the entry."""


class TagPorts:
    """How the tags of one cache are read and written, for callers of one colour."""

    def __init__(
        self,
        namespace: str,
        engine: Engine,
        outage: Outage | None,
        colour: Colour,
        hints: dict[str, tuple[bytes, ...]],
        *,
        of_many: bool,
        ended_here: Callable[[Iterable[bytes], float], bool] = lambda names, at: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`of_many`: the caller runs many of these at once, by `run_together`. `ended_here` returns whether this
        process has invalidated one of these tags since a moment."""
        side, many = engine.side(colour), engine.many
        assert side.store is not None
        self._namespace = namespace
        self._outage = outage
        self.hints = hints  # the tags of keys' last entries, as far as their functions do not name them
        self._exact: Store = side.store
        self._store: Any = side.store
        self._near = engine.near
        self._looks: Any = side.claims if engine.looks else None
        self._tick = inf if engine.timeless else engine.tick
        self._clock = clock
        self._ended_here = ended_here
        self._at_once = colour.suspending and engine.shared and engine.near is None
        self.of_many = of_many
        self._ask = None if colour.suspending or many is None else many.ask_many
        if self._ask is not None:  # blocking callers put their questions aside, so that they are asked together
            self._store = aside = Gathering()
            self._looks = aside if engine.looks else None

    @property
    def aside(self) -> bool:
        """Whether questions are put aside. Work with them needs `run`."""
        return self._ask is not None

    def names(self, tags: Sequence[str]) -> tuple[bytes, ...]:
        return tuple([name_of_tag(self._namespace, tag) for tag in tags])

    def of_call(self, tags: Sequence[str], policy: Policy) -> TagsOfCall:
        """Return the tags of a call with these options."""
        ttl = None if callable(policy.ttl) else policy.ttl
        return TagsOfCall(self.names(tags), keep_of(ttl, policy.stale))

    def names_for(self, key: str, names: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return the tags to read together with the key's entry, if a call names these."""
        hinted = self.hints.get(key, ())
        return tuple(dict.fromkeys((*names, *hinted))) if names and hinted else names or hinted

    def hint(self, key: str, names: Iterable[bytes], known: Sequence[bytes] = ()) -> None:
        """Remember the tags of the key's entry, unless all of them are `known` without that."""
        some = tuple(names)
        if set(some).issubset(known):
            return
        if len(self.hints) >= MOST_HINTS:
            self.hints.clear()
        self.hints[key] = some

    async def ask(self, work: Coroutine[Any, Any, T], otherwise: T) -> T:
        """Return what the work returns, or `otherwise` while the engine is down."""
        outage = self._outage
        if outage is not None and (outage.down or outage.closed):
            work.close()
            return otherwise
        try:
            return await self.run(work)
        except EngineError as error:
            if outage is None or outage.strict:
                raise
            if not isinstance(error, EngineClosed):
                outage.failed(error)
            return otherwise

    async def look_all(self, key: str, names: Sequence[bytes]) -> tuple[Found | None, Known]:
        """Return the entry if it is fresh, and these tags, which are read with it. This is no work for `run`."""
        found, _ = await self._exact.look_too([key, *map(key_of_tag, names)], ())
        return found.get(key), _tags_of(names, found)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what the work returns. Its questions may be put aside."""
        if self._ask is None or self.of_many:
            return await work
        (result,) = run_together([work], self._ask)
        try:
            if isinstance(result, BaseException):
                raise result
            return result
        finally:
            del result  # an error refers to this frame

    # -- work for `run` -------------------------------------------------------------------------------------------

    async def along(self, names: Sequence[bytes], work: Coroutine[Any, Any, T]) -> tuple[T, Known]:
        """Return what the work returns, and these tags, asked for in the same round trip."""
        if not names:
            return await work, {}
        answer: Any
        answer, known = await self._all([work, self.current(names)])
        return answer, known

    async def current(self, names: Sequence[bytes]) -> Known:
        """Return the tags, with tickets where the engine has some. Those that are not stored are left out."""
        keys = [key_of_tag(name) for name in names]
        found: Looked
        if self._near is not None:
            found = {key: self._near.look(key) for key in keys}
        elif not self.of_many and not self.aside:
            found, _ = await self._exact.look_too(keys, ())
        elif self._looks is not None:
            found = dict(zip(keys, await self._all([self._looks.look(key) for key in keys]), strict=True))
        else:
            return await self._read(names)
        return _tags_of(names, found)

    def are_current(self, found: Found, entry: Entry[Any]) -> bool:
        """Return whether the tags of an entry that `Near` has found are current, and give it a ticket for them, too."""
        assert self._near is not None
        names = list(names_in(entry.tags))
        known = _tags_of(names, {(key := key_of_tag(name)): self._near.look(key) for name in names})
        found.ticket = ticket_of(entry, found.ticket, known)
        return bool(judge(entry, known))

    async def _read(self, names: Sequence[bytes]) -> Known:
        """Return the tags, with their exact ages."""
        entries = await self._exact.get([key_of_tag(name) for name in names])
        found = zip(names, entries, strict=True)
        return {name: tag for name, entry in found if (tag := Tag.of(entry)) is not None}

    async def created(
        self, names: Sequence[bytes], known: Known, keep: float, read: Callable[[Sequence[bytes]], Any]
    ) -> Known:
        """Return the tags, after storing those that are not known. `read` returns those that others have stored."""
        known, missing = dict(known), [name for name in names if name not in known]
        for attempt in range(TRIES):
            if not missing:
                return known
            if attempt == TRIES - 1:  # damaged bytes, which can only be overwritten
                known |= await self._changed(missing)
                return known
            new = {name: Tag.new(keep, changed=False) for name in missing}
            work = [self._store.replace(key_of_tag(name), None, tag.entry) for name, tag in new.items()]
            done = dict(zip(missing, await self._all(work), strict=True))
            known |= {name: tag for name, tag in new.items() if done[name]}
            lost = [name for name in missing if not done[name]]
            known |= await read(lost) if lost else {}
            missing = [name for name in lost if name not in known]
        return known

    async def end(self, names: Sequence[bytes]) -> None:
        """Invalidate the tags: what carries them is gone, and what is being computed for them is not stored."""
        await self._changed(names)

    async def soften(self, names: Sequence[bytes]) -> None:
        """Make stale what carries these tags, and what is being computed for them."""
        left = list(names)
        for _ in range(TRIES):
            known = await self._read(left)
            new = {name: tag.softened() for name, tag in known.items()}
            new |= {name: Tag.new(LASTING, changed=True) for name in left if name not in known}
            seen = [known[name].id if name in known else None for name in left]
            work = [
                self._store.replace(key_of_tag(name), id, new[name].entry) for name, id in zip(left, seen, strict=True)
            ]
            left = [name for name, done in zip(left, await self._all(work), strict=True) if not done]
            if not left:
                return
        await self._changed(left)

    async def _changed(self, names: Sequence[bytes]) -> Known:
        new = {name: Tag.new(LASTING, changed=True) for name in names}
        await self._all([self._store.set(key_of_tag(name), tag.entry) for name, tag in new.items()])
        return new

    async def noted(self, names: Sequence[bytes], call: TagsOfCall, asked: float, keep: float) -> Known | None:
        """Return the tags that an entry is to carry, as they were before its computation began. Have them stored for as
        long as the entry. `asked` is the moment before the claim. None: one of them, which only the computation has
        named, may have been invalidated since."""
        noted, unknown = call.noted, [name for name in names if name not in call.noted]
        if unknown:
            found = await self.created(unknown, await self._read(unknown), 2 * keep, self._read)
            gone = self._clock() - asked
            if self._ended_here(unknown, asked):  # even if the engine has evicted them since
                return None
            for tag in found.values():
                # One that was only created was not invalidated for as long as that is remembered.
                if gone > LASTING / 2 or (tag.changed and not tag.age > gone + self._tick):
                    return None
            noted = {**noted, **found}
        await self.last({name: noted[name] for name in names}, keep + self._clock() - asked)
        return noted

    async def noted_now(self, names: Sequence[bytes], keep: float) -> Known:
        """Return the tags for an entry that is stored now for `keep` seconds."""
        known = await self.created(names, await self.current(names), 2 * keep, self.current)
        await self.last(known, keep)
        return known

    async def last(self, known: Tags, keep: float) -> None:
        """Have the tags stored for as long as an entry that is stored for `keep` seconds."""
        short = outlasting(known, keep)
        if short:
            work = [self._store.replace(key_of_tag(name), tag.id, tag.entry) for name, tag in short.items()]
            await self._all(work)  # one that has changed meanwhile stays as it is: the entry is not good then

    async def judged(self, entries: Sequence[Entry[Any] | None]) -> list[Entry[Any] | None]:
        """Return the entries; None for one whose tags have ended, and a stale one if they were softened."""
        names = {name for entry in entries if entry is not None and entry.tags for name in names_in(entry.tags)}
        if not names:
            return [*entries]
        known = await self.run(self.current([*names]))
        return [None if entry is None or judge(entry, known) is None else entry for entry in entries]

    async def _all(self, work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Return what each coroutine returns, in as few round trips as possible. Raise the first error."""
        if self._ask is not None:
            results = await asked_together(work, BaseException)
        elif self._at_once and len(work) > 1:
            results = await settled(work)
        else:
            try:
                return [await each for each in work]
            finally:
                for each in work:
                    each.close()
        try:
            for each in results:
                if isinstance(each, BaseException):
                    raise each
            return results
        finally:
            del results  # an error in it refers to this frame


def _tags_of(names: Sequence[bytes], found: Looked) -> Known:
    return {
        name: tag
        for name in names
        if (each := found.get(key_of_tag(name))) is not None and (tag := Tag.of(each.entry, each.ticket)) is not None
    }


def ticket_of(entry: Entry[Any], ticket: Ticket | None, tags: Known) -> Ticket | None:
    """Return the entry's ticket together with those of its tags, or None if one of them has none."""
    tickets = [tags[name].ticket for name in names_in(entry.tags) if name in tags]
    if ticket is None or None in tickets or len(tickets) * SIZE != len(entry.tags):
        return None
    return ticket._replace(tags=tuple(tickets))


class TaggedClaims:
    """`Claims` of entries with tags. An entry whose tags have ended is no answer to a claim."""

    def __init__(
        self,
        port: Claims,
        aside: Claims,
        looks: Looks | None,
        decoded: Callable[[str, Entry[Any]], Entry[Any] | None],
        tags: TagPorts,
    ) -> None:
        """`port` has claims of entries; `aside` and `looks` have the same for work that is run by `tags.run`. `looks`
        finds bytes, for `decoded`."""
        self._port = port
        self._aside = aside
        self._looks = looks
        self._decoded = decoded
        self.tags = tags
        self.hints = tags.hints
        self.fill, self.abandon, self.wait, self.renew = port.fill, port.abandon, port.wait, port.renew

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        tags = self.tags
        if ask.tags is None and key not in tags.hints:
            reply = await self._port.claim(key, token, ask)
            if reply.entry is None or not reply.entry.tags:
                return reply
            tags.hint(key, names_in(reply.entry.tags))  # ask again, together with them
        return await tags.run(self._claim(key, token, ask))

    async def _claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        tags, call = self.tags, ask.tags
        if call is None:
            call = ask.tags = TagsOfCall()
        for _ in range(TRIES):
            names = self.names_for(key, call)
            reply, known = await tags.along(names, self._aside.claim(key, token, ask))
            entry, good = reply.entry, True
            if entry is not None and entry.tags:
                others = [name for name in names_in(entry.tags) if name not in names]
                if others:
                    tags.hint(key, names_in(entry.tags))
                    known |= await tags.current(others)
                verdict = judge(entry, known)
                good = bool(verdict)
                if verdict is None and not isinstance(reply, Found):
                    reply.entry = None
            call.noted = known
            if isinstance(reply, Granted):
                call.noted = await tags.created(call.names, known, call.keep, tags.current)
            if not isinstance(reply, Found):
                return reply
            if good:
                reply.ticket = ticket_of(reply.entry, reply.ticket, known) if reply.entry.tags else reply.ticket
                return reply
            ask = replace(ask, seen=reply.entry.id)
        changing = EngineError(f"the tags of {key!r} change faster than it can be claimed")
        changing.partial = True
        raise changing

    def names_for(self, key: str, call: TagsOfCall | None) -> tuple[bytes, ...]:
        """Return the tags to read together with the key's entry."""
        return self.tags.names_for(key, () if call is None else call.names)

    async def look(self, key: str, names: Sequence[bytes], looked: Looked | None = None) -> Found | None:
        """Return the entry if it is fresh, and its tags, which are read with it, are current. With `looked`, they have
        been read already, or not at all."""
        if looked is not None:
            complete = looked.keys() >= {key, *map(key_of_tag, names)}
            found, known = looked[key] if complete else None, _tags_of(names, looked)
        elif self.tags.of_many:
            assert self._looks is not None
            found, known = await self.tags.along(names, self._looks.look(key))
        else:
            found, known = await self.tags.look_all(key, names)
        entry = None if found is None else self._decoded(key, found.entry)
        if found is None or entry is None or entry.fresh <= 0:
            return None
        if entry.tags:
            others = [name for name in names_in(entry.tags) if name not in names]
            if others:
                self.tags.hint(key, names_in(entry.tags))
                return None  # the claim asks for all of them together
            if not judge(entry, known):
                return None
            found.ticket = ticket_of(entry, found.ticket, known)
        found.entry = entry
        return found
