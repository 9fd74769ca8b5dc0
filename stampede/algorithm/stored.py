"""What is stored under a scope's keys: how it is read, listed and changed in the current generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

from stampede import events
from stampede.algorithm.call import Resources
from stampede.algorithm.core import Core
from stampede.algorithm.encoded import EncodedStore
from stampede.algorithm.flight import Flight
from stampede.algorithm.generations import Generations
from stampede.algorithm.tags import TagPorts
from stampede.errors import EngineClosed, EngineError, OptionError
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Asked, Changes, Lists, Looked, Shown, Side, Store, Ticket
from stampede.model.result import Result
from stampede.model.tags import Tags, judge, key_of_tag, names_in, packed
from stampede.runtime.colour import Colour, lasting, run_blocking, settled
from stampede.settings.options import Policy, checked_tags

__all__ = ["STAY", "Page", "Stored"]

Page: TypeAlias = tuple[str, Any]
"""The generation of a page of keys, and the engine's cursor for the next page."""


_clock = time.monotonic

STAY = object()
"""Returned by `make` to leave a value as it is."""

TRIES = 1000
"""How many times a value is made again because another writer was faster."""


class Ahead(NamedTuple):
    """What is known before keys are claimed."""

    prefix: str  # of the current generation
    looked: Looked | None  # what was found while that was asked for
    samples: Mapping[str, Ticket]  # of the local tier, by key, taken before that


Again: TypeAlias = "Callable[[Stored], Coroutine[Any, Any, object]]"
"""Makes an invalidation once more, for callers that block."""


class Stored:
    """The verbs of one function's part of a cache that compute nothing, for callers of one colour."""

    core: Core
    colour: Colour
    generations: Generations
    policy: Policy
    resources: Resources
    store: Store
    tags: TagPorts
    called: str  # the name that its events show
    _coded: EncodedStore | None  # of the blocking side, for both colours

    @property
    def blocking(self) -> Stored:
        """The same verbs for callers that block."""
        raise NotImplementedError

    @property
    def prefix(self) -> str:
        return self.generations.prefix

    def label(self, physical: str) -> str:
        return physical.removeprefix(self.prefix)

    def open_store(self) -> Store:
        """Return the store. Raise EngineClosed if the cache was closed, even if its engine is still open."""
        outage = self.core.outage
        if outage is not None and outage.closed:
            raise EngineClosed(outage.engine)
        return self.store

    async def learn(self) -> str:
        """Ask for the current generation and return its prefix; the known prefix if the engine cannot be asked."""
        prefix, _ = await self.generations.learn(self.open_store(), self.colour, keys=tuple)
        return prefix

    async def learn_and_look(self, wanted: Mapping[str, Sequence[str]]) -> Ahead:
        """Do what `learn` does. If that takes a round trip, look in the same one for these keys, with the tags that are
        given for each and those of its last entry."""
        physical = [self.prefix + key for key in wanted]
        samples = {key: self.core.local_tier.sample(key) for key in physical}  # before the engine is asked

        def keys() -> list[str]:
            own = [self.tags.names(tags) for tags in wanted.values()]
            tags = [self.tags.names_for(key, names) for key, names in zip(physical, own, strict=True)]
            return [*physical, *{key_of_tag(name): None for names in tags for name in names}]

        prefix, looked = await self.generations.learn(self.open_store(), self.colour, keys)
        return Ahead(prefix, looked, samples)

    async def look_ahead(self, wanted: Mapping[str, Sequence[str]]) -> Ahead:
        """Do what `learn_and_look` does, unless the current prefix is known."""
        prefix = self.generations.recall()
        return await self.learn_and_look(wanted) if prefix is None else Ahead(prefix, None, {})

    async def current_prefix(self) -> str:
        """Return the prefix of the current generation, from memory if possible, or else by `learn`."""
        return self.generations.recall() or await self.learn()

    async def learn_surely(self) -> tuple[str, list[str]]:
        return await self.generations.learn_surely(self.open_store())

    @property
    def _engine_side(self) -> Side:
        return self.core.engine.side(self.colour)

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        """Return the fresh entry of each key, or None."""
        prefix, entries = await self._look_for(keys)
        left = [key for key in keys if key not in entries]
        for key, entry in zip(left, await self._found(left, prefix) if left else (), strict=True):
            self.resources.softened(entry)
            if entry is not None and entry.tags:
                self.tags.hint(prefix + key, names_in(entry.tags))  # the next question asks for them, too
            if entry is not None and entry.fresh > 0:
                entries[key] = entry
        return [entries.get(key) for key in keys]

    async def peek(self, key: str) -> Entry[Any] | None:
        """Return the stored entry, fresh or stale, or None."""
        return (await self._read([key]))[0]

    async def _read(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        return [self.resources.softened(entry) for entry in await self._found(keys)]

    async def _look_for(self, keys: Sequence[str]) -> tuple[str, dict[str, Entry[Any] | None]]:
        """Return the current prefix and the fresh entry of each key, or None, asked for together if that is possible.
        Keep the entries in the local tier, as a call does. Keys that have to be read in another way are left out."""
        resources, local_tier, at = self.resources, self.core.local_tier, _clock()
        if resources.look is None:
            return await self.learn(), {}
        wanted = dict.fromkeys(keys, ())  # each once: an entry that was found is decoded in its place
        prefix, looked, samples = await self.learn_and_look(wanted)
        entries: dict[str, Entry[Any] | None] = {}
        for key in wanted if looked is not None or len(wanted) == 1 else ():
            physical = prefix + key
            if looked is not None and physical in looked and looked[physical] is None:
                entries[key] = None
                continue
            found = await resources.look(physical, Ask(self.policy.lease, looked=looked))
            if found is None or found.entry.raised or resources.predates_mark(found.entry):
                continue
            entries[key] = found.entry
            if local_tier.residents is not None:
                result = Result(found.entry, ticket=found.ticket, at=at)
                sample = samples.get(physical)
                resident = local_tier.place(physical, self.called, result, sample, self.generations.guard)
                if (self.generations.recall() or prefix) != prefix:
                    local_tier.residents.drop(physical)
                elif resident is not None:
                    local_tier.open(resident, result, self.policy)
        return prefix, entries

    async def _found(self, keys: Sequence[str], prefix: str | None = None) -> list[Entry[Any] | None]:
        """Return the stored entry of each key; while the engine is down, those that this process has computed. `prefix`
        is the current one, if the caller has asked for it."""
        outage, prefix = self.core.outage, await self.learn() if prefix is None else prefix
        physical = [prefix + key for key in keys]
        if outage is None:
            return await self.tags.judged(await self.open_store().get(physical))
        if not outage.down:  # otherwise `learn` has just been this call's attempt to ask
            try:
                return await self.tags.judged(await self.open_store().get(physical))
            except EngineClosed:
                raise
            except EngineError as error:
                outage.failed(error)
        if outage.strict:
            raise outage.trouble()
        store = outage.refuge.side(self.colour).store
        assert store is not None
        return await store.get(physical) if outage.used else [None] * len(physical)

    async def show(self, key: str) -> tuple[Shown, Flight | None]:
        """Return the entry, the lease and the flight of a key, without changing anything."""
        outage, physical = self.core.outage, await self.learn() + key
        port = self._engine_side.shows
        if port is None or self.core.is_down():
            (entry,) = await self._read([key])
            return Shown(entry), self.core.flights.get(physical)
        try:
            shown = await port.show(physical)
        except EngineClosed:
            raise
        except EngineError as error:
            if outage is None:
                raise
            outage.failed(error)
            return await self.show(key) if self.core.is_down() else (Shown(), self.core.flights.get(physical))
        if self._coded is not None:
            shown.entry = self._coded.decoded(physical, shown.entry)
        (shown.entry,) = await self.tags.judged([self.resources.softened(shown.entry)])
        return shown, self.core.flights.get(physical)

    def lists(self) -> Lists:
        """Return the engine's port for listing keys. Raise OptionError if it has none."""
        engine = self.core.engine
        port = self._engine_side.lists
        if port is None:
            raise OptionError(f"{engine.scheme}:// cannot list its keys")
        return port

    async def page(self, prefix: str, cursor: Page | None = None) -> tuple[list[str], Page | None]:
        """Return some of the keys that begin with `prefix`, and the cursor for the next page, or None. If a new
        generation begins meanwhile, the listing starts again with the first page of that."""
        current_prefix, _ = await self.learn_surely()
        at = None if cursor is None or cursor[0] != current_prefix else cursor[1]
        found, after = await self.lists().page(current_prefix + prefix, at)
        return [key.removeprefix(current_prefix) for key in found], None if after is None else (current_prefix, after)

    async def put(self, key: str, value: Any, policy: Policy | None = None) -> None:
        entry = self.entry_for(key, value, policy or self.policy)
        await self._change_many("set", await self._with_tags({key: (entry, policy or self.policy)}))

    async def put_many(self, values: Mapping[str, Any], policy: Policy | Callable[[str], Policy]) -> None:
        """Store all values, in one round trip if the engine can."""
        policies = {key: policy(key) if callable(policy) else policy for key in values}
        entries = {key: (self.entry_for(key, value, policies[key]), policies[key]) for key, value in values.items()}
        await self._change_many("set", await self._with_tags(entries))

    async def _with_tags(self, entries: Mapping[str, tuple[Entry[Any], Policy]]) -> dict[str, tuple[Entry[Any]]]:
        """Give the entries their tags, as they are now."""
        self.open_store()  # raises if the cache was closed
        tagged = {key: self.tags.names(policy.tags) for key, (_, policy) in entries.items() if policy.tags}
        if tagged:
            for key in tagged:
                self.core.forget(self.prefix + key)  # first, so that it is gone here even if the engine fails
            names = tuple(dict.fromkeys(name for some in tagged.values() for name in some))
            longest = max(entries[key][0].keep for key in tagged)
            noted = await self.tags.run(self.tags.noted_now(names, longest))
            for key, some in tagged.items():
                entries[key][0].tags = packed(some, noted)
        return {key: (entry,) for key, (entry, _) in entries.items()}

    def entry_for(self, key: str, value: Any, policy: Policy) -> Entry[Any]:
        ttl = policy.ttl_of(lasting(value))
        known = self.core.local_tier.known(self.generations.at_hand() + key)
        # Without these, its end would come as a surprise.
        cost, margin = (known.cost, known.margin) if known is not None else (0.0, 0.0)
        entry = Entry(value, new_id(), cost, margin, ttl, ttl, ttl + policy.stale)
        if self.resources.trial is not None and policy.strict:
            self.resources.trial(key, entry)
        return entry

    async def compare_and_set(
        self,
        key: str,
        make: Callable[[Entry[Any] | None], Any],
        policy: Policy,
        *,
        touch: bool = False,
        in_place: bool = False,
    ) -> Entry[Any] | None:
        """Store a value made of the current one, without losing a change by another writer. None: it stays as it is.
        Read, make a value, and write it if what was read is still stored; otherwise try again. With `touch` it is the
        same value, with its tags. With `in_place` a new value has the tags of the current one, and ends when that
        would have ended."""
        names = () if touch else self.tags.names(policy.tags)
        for _ in range(TRIES):
            noted = {} if touch else await self._noted_now(names)
            seen, id, current = await self._stored_entry(key)
            value = make(seen)
            if value is STAY:
                return None
            entry = self.entry_for(key, value, policy)
            if touch and seen is not None:
                entry.etag, entry.modified = seen.etag, seen.modified
            tags, known = names, noted
            if seen is not None and (touch or (in_place and seen.fresh > 0)):
                tags, known = tuple(names_in(seen.tags)), current
                if in_place:
                    entry.ttl, entry.fresh, entry.keep = seen.ttl, seen.fresh, seen.keep
            if known:
                await self.tags.run(self.tags.last(known, entry.keep))
            entry.tags = packed(tags, known)
            if await self._replaced(key, id, entry):
                return entry
        raise EngineError(f"other writers change {key!r} faster than it can be read and written")

    async def _noted_now(self, names: Sequence[bytes]) -> Tags:
        return await self.tags.run(self.tags.noted_now(names, 0.0)) if names else {}

    async def _replaced(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        if await self._change(key, "replace", seen, entry):
            return True
        store = self.open_store()
        damaged = await store.damaged(self.prefix + key) if seen is None and isinstance(store, EncodedStore) else None
        return damaged is not None and bool(await self._change(key, "replace", damaged, entry))

    async def _stored_entry(self, key: str) -> tuple[Entry[Any] | None, bytes | None, Tags]:
        """Return what the engine itself has stored, in the current generation, its id, and its tags as they are now. An
        entry whose tags have ended has an id, and is none."""
        current_prefix, _ = await self.learn_surely()
        (found,) = await self.open_store().get([current_prefix + key])
        entry = self.resources.softened(found)
        names = [] if entry is None else list(names_in(entry.tags))
        current = await self.tags.run(self.tags.current(names)) if names else {}
        if entry is not None and judge(entry, current) is None:
            entry = None
        return entry, None if found is None else found.id, current

    async def expire(self, key: str, on_error: str | None = None) -> bool:
        return bool(await self.expire_many([key], on_error))

    async def invalidate(self, key: str, on_error: str | None = None) -> bool:
        return bool(await self.invalidate_many([key], on_error))

    async def invalidate_many(self, keys: Iterable[str], on_error: str | None = None) -> int:
        """Return how many keys had a value. This takes one round trip if the engine can."""
        return await self._end_many("invalidate", list(keys), on_error)

    async def expire_many(self, keys: Iterable[str], on_error: str | None = None) -> int:
        """Return how many keys had a fresh value. This takes one round trip if the engine can."""
        return await self._end_many("expire", list(keys), on_error)

    async def _end_many(self, verb: str, keys: Sequence[str], on_error: str | None) -> int:
        _check(on_error)
        try:
            return sum(map(bool, await self._change_many(verb, dict.fromkeys(keys, ()))))
        except EngineError as error:
            postponed = [self._postpones(verb, key, _again(verb, key), error, on_error) for key in keys]
            if not all(postponed):
                raise
            return 0

    def _postpones(
        self,
        verb: str,
        key: str,
        again: Again,
        error: EngineError,
        on_error: str | None,
        name: tuple[str, ...] | None = None,
    ) -> bool:
        """Have an invalidation repeated, if `on_error` says so. Return whether it will be. `name` tells it from others,
        if the key does not."""
        later = self.core.later if on_error is None else on_error == "later"
        if not later or isinstance(error, EngineClosed):
            return False
        blocking = self.blocking
        if not self.core.postponed.add((self.called, verb, name or key), lambda: run_blocking(again(blocking))):
            return False
        self.core.note(events.Postponed, self.called, key, verb, error)
        return True

    async def _change(self, key: str, verb: str, *args: Any) -> Any:
        (done,) = await self._change_many(verb, {key: args})
        return done

    async def _change_many(self, verb: str, changes: Mapping[str, tuple[Any, ...]]) -> list[Any]:
        """Change the keys. Return the engine's answer for each in the current generation, or raise the first error."""
        core, hard, was_down = self.core, verb != "expire", self.core.is_down()
        known = physical = self.generations.prefix
        for key in changes:
            core.forget(known + key, hard=hard)  # first, so that it is gone here even if the engine cannot be asked
        try:
            physical, done = await self._change_current(verb, changes)
            core.answered(was_down)
            if core.postponed:  # older invalidations: they must not remove what is stored now
                core.postponed.drop((self.called, each, key) for each in ("invalidate", "expire") for key in changes)
            return done
        finally:
            self._forget(known, physical, verb, changes)  # again, for callers that read the old value meanwhile

    async def _repeat(self, verb: str, key: str) -> None:
        """Make an invalidation that was postponed. What this process has computed since then stays until it is made."""
        known, was_down = self.generations.prefix, self.core.is_down()
        physical, _ = await self._change_current(verb, {key: ()})
        self.core.answered(was_down)
        self._forget(known, physical, verb, [key])

    def _forget(self, known: str, physical: str, verb: str, keys: Iterable[str]) -> None:
        """Forget what this process has of keys that were changed, and report the change."""
        core, hard = self.core, verb != "expire"
        # Another thread may have begun a new generation, and not yet reached the residents of these keys.
        older = self.generations.older
        before = {known, *older.copy()} - {physical} if older or known != physical else ()
        for key in keys:
            core.forget(physical + key, hard=hard)
            for prefix in before:
                core.drop_older(prefix + key)
            core.note(events.Invalidated, self.called, key, "set" if verb == "replace" else verb)

    async def _change_current(self, verb: str, changes: Mapping[str, tuple[Any, ...]]) -> tuple[str, list[Any]]:
        """Change the keys in the current generation and in recent ones. Return the current prefix and the answers.
        Another process may have begun a new generation, whose keys must change. A third process may not know of that,
        and would find a value from before this change in the older generation."""
        generations, done, epoch = self.generations, None, self.core.epoch
        believed, guess = generations.known, generations.at_hand() if self.core.engine.changes else ""
        if guess == believed[1] and generations.is_of_engine(believed):
            done, current = await self._changed(verb, guess, changes, generations.scopes)
            current_prefix, ended = generations.adopt(epoch, current)
            ended = [each for each in ended if each != guess]
            if generations.known[2:] != believed[2:]:  # perhaps only the mark is another one
                if verb == "replace" and current_prefix == guess and all(done):
                    # It is replaced, but stale under the new mark: write it again, in place of the first writing.
                    changes = {key: (entry.id, entry) for key, (_, entry) in changes.items()}
                    await self._changed(verb, current_prefix, changes)
                else:
                    done = None
        else:
            current_prefix, ended = await self.learn_surely()
        if done is None:
            done, _ = await self._changed(verb, current_prefix, changes)
        for older in {*ended} - {current_prefix}:
            await self._changed(verb, older, changes)
        return current_prefix, done

    async def _changed(
        self, verb: str, prefix: str, changes: Mapping[str, tuple[Any, ...]], scopes: Sequence[str] = ()
    ) -> tuple[list[Any], Sequence[Sequence[str]]]:
        """Return the answers for the keys under this prefix. An engine with `changes` adds the current generations."""
        store, many = self.open_store(), self.core.engine.many
        for args in changes.values():
            for each in args:
                if isinstance(each, Entry):
                    each.id = self.resources.id_of(each.id)
        together = self.core.engine.changes or (len(changes) > 1 and (self.colour.suspending or many is not None))
        if not together:
            return [await getattr(store, verb)(prefix + key, *args) for key, args in changes.items()], ()
        asked = [Asked(verb, (prefix + key, *args)) for key, args in changes.items()]
        if self.core.engine.changes:
            return await cast("Changes", store).change(asked, scopes)
        if self.colour.suspending or many is None:
            done = await settled([getattr(store, verb)(*each.args) for each in asked])
        else:
            coded = self._coded  # encode all first: if one value is refused, nothing has changed
            done = many.ask_many(coded.sealed(asked) if coded is not None else asked)
        try:
            for each in done:
                if isinstance(each, BaseException):
                    raise each
            return done, ()
        finally:
            del done  # an error inside it refers to this frame

    async def bump(self, on_error: str | None = None) -> None:
        """Begin a new generation of this scope, so that everything older is gone."""
        before = self.generations.at_hand()
        forget = partial(self.core.forget_all, f"{before}{self.generations.name}:", self.generations.name)
        change = lambda side: side.open_store().bump(self.generations.name)  # noqa: E731
        await self._change_all(change, forget, "invalidate_all", on_error)

    async def expire_all(self, scope: str | None = None, on_error: str | None = None) -> None:
        """Make everything stored for this scope stale, or for another scope (the namespace)."""
        if self._engine_side.softens is None:
            scheme = self.core.engine.scheme
            raise OptionError(f"{scheme}:// cannot expire all keys at once: expire them one by one")
        forget = partial(self.core.soften_all, self.called if scope is None else None)
        name = self.generations.name if scope is None else scope
        change = lambda side: side._engine_side.softens.soften(name)  # noqa: E731
        await self._change_all(change, forget, "expire_all", on_error, scope)

    async def end_tags(self, tags: Sequence[str], *, hard: bool, on_error: str | None = None) -> None:
        """Invalidate all that carries one of the tags; with `hard=False`, make it stale."""
        verb, given = ("invalidate_tags" if hard else "expire_tags"), checked_tags("tags", tags, of_entry=False)
        names = self.tags.names(given)
        if not names:
            return

        async def change(side: Stored) -> None:
            side.open_store()  # raises if the cache was closed
            await side.tags.run(side.tags.end(names) if hard else side.tags.soften(names))

        self.core.forget_tags(names)  # first, so that it is gone here even if the engine cannot be asked
        await self._change_all(change, partial(self.core.forget_tags, names), verb, on_error, tags=given)

    async def clear(self, on_error: str | None = None) -> None:
        """Begin a new generation of the whole namespace."""
        namespace = self.generations.namespace
        change = lambda side: side.open_store().bump(namespace)  # noqa: E731
        await self._change_all(change, self.core.forget_all, "clear", on_error, namespace)

    async def _change_all(
        self,
        change: Again,
        forget: Callable[[], object],
        verb: str,
        on_error: str | None,
        scope: str | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        """Make the change, and forget what this process has, whether or not the change succeeded."""
        _check(on_error)

        def forget_all() -> None:
            forget()
            self.core.note(events.Invalidated, self.called if scope is None else scope, ", ".join(tags), verb)

        async def once(side: Stored) -> None:
            was_down = self.core.is_down()
            await change(side)
            self.core.answered(was_down)

        async def again(side: Stored) -> None:
            await once(side)
            forget_all()

        try:
            await once(self)
        except EngineError as error:
            if not self._postpones(verb, ", ".join(tags), again, error, on_error, name=tags):
                raise
            return
        finally:
            forget_all()
        if not tags:
            await self.learn()


def _again(verb: str, key: str) -> Again:
    return lambda side: side._repeat(verb, key)


def _check(on_error: str | None) -> None:
    if on_error not in (None, "raise", "later"):
        raise OptionError(f"on_error is {on_error!r}: give 'raise' or 'later'")
