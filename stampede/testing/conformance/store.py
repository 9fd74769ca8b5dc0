"""The suite for the verbs of a store, which are no part of a computation."""

from __future__ import annotations

from math import inf
from typing import cast

from stampede.model.entry import new_id
from stampede.model.ports import Ask, Asked, Found, Looks, Store
from stampede.testing.conformance.suite import HERD, KEYS, LONG, SOON, KeyedSuite, not_none, require, some

__all__ = ["StoreSuite"]


class StoreSuite(KeyedSuite):
    """The suite for the verbs of a store, which are no part of a computation.

    >>> from stampede.engines.memory import MemoryEngine  # yours
    >>> from stampede.testing import StoreSuite
    >>> class TestMine(StoreSuite):  # by pytest, and once more with suspending = True
    ...     def make_engine(self):
    ...         return MemoryEngine()
    """

    async def test_set_is_kept(self) -> None:
        """A set entry must be stored with all its fields; otherwise `set` would do nothing, or change the value."""
        entry = some(b"v", fresh=50.0, keep=LONG, cost=0.25, margin=1.5, raised=True)
        await self.store.set("k", entry)
        found = not_none(*await self.far_store.get(["k"]))
        assert (found.value, found.id, found.cost, found.margin) == (b"v", entry.id, 0.25, 1.5)
        assert (found.ttl, found.raised) == (50.0, True)
        assert 50.0 - SOON < found.fresh <= 50.0
        assert LONG - SOON < found.keep <= LONG

    async def test_get_of_many_is_in_order(self) -> None:
        """Each key must have its answer, in the same order; otherwise values would be given to the wrong keys."""
        for name in ("a", "b", "d"):
            await self.store.set(name, some(name.encode()))
        answers = await self.store.get(["d", "c", "a", "b", "a"])
        assert [None if one is None else one.value for one in answers] == [b"d", None, b"a", b"b", b"a"]
        assert await self.store.get([]) == []

    async def test_get_of_very_many(self) -> None:
        """`get` must accept very many keys; otherwise a batch would exceed a limit of the engine's protocol."""
        names = [f"key {number}" for number in range(2_000)]
        await self.store.set(names[-1], some(b"last"))
        answers = await self.store.get(names)
        assert len(answers) == len(names)
        assert answers[:-1] == [None] * (len(names) - 1)
        assert answers[-1] is not None

    async def test_changes_of_many_at_once(self) -> None:
        """A batch of changes must work like single ones; otherwise some would be lost, or end no computation."""
        many = require(self.engine.many)
        computes = self.engine.blocking.claims is not None
        tokens = {key: await self.granted(key) if computes else b"" for key in ("computed", "began")}
        await self.store.set("gone", some())
        await self.store.set("fresh", some())
        await self.store.set("stale", some(fresh=0.0, keep=LONG))
        asked = [Asked("set", (f"k{number}", some(b"%d" % number))) for number in range(300)]
        asked += [Asked("set", ("computed", some())), Asked("invalidate", ("gone",)), Asked("invalidate", ("never",))]
        asked += [Asked("expire", (key,)) for key in ("fresh", "stale", "began", "never")]
        *_, gone, never, fresh, stale, began, nothing = map(bool, many.ask_many(asked))
        assert (gone, never) == (True, False)
        assert (fresh, stale, began, nothing) == (True, False, False, False)
        left = await self.far_store.get(["k0", "k299", "gone", "began", "never"])
        assert [entry and entry.value for entry in left] == [b"0", b"299", None, None, None]
        assert [not_none(entry).fresh <= 0 for entry in await self.far_store.get(["fresh", "stale"])] == [True, True]
        if computes:
            for key, token in tokens.items():
                assert not await self.claims.fill(key, token, some(b"late"))

    async def test_expired_is_stale_and_kept(self) -> None:
        """An expired entry must be stale, but still stored; otherwise `expire` would do nothing, or invalidate."""
        assert await self.store.expire("k") is False
        for fresh, keep in ((50.0, LONG), (LONG, LONG), (inf, inf)):
            await self.store.set("k", some(b"v", fresh=fresh, keep=keep))
            assert await self.far_store.expire("k") is True
            kept = await self.stored()
            assert kept.value == b"v"
            assert kept.fresh <= 0
            assert LONG - SOON < kept.keep <= keep
            assert await self.store.expire("k") is False
        await self.store.set("k", some(fresh=0.0, keep=LONG))
        assert await self.store.expire("k") is False

    async def test_invalidated_is_gone(self) -> None:
        """An invalidated entry must be gone; otherwise it would be served. The reply says whether there was one."""
        for fresh, keep in ((LONG, LONG), (LONG, 2 * LONG), (0.0, LONG)):
            assert await self.store.invalidate("k") is False
            await self.store.set("k", some(fresh=fresh, keep=keep))
            assert await self.far_store.invalidate("k") is True
            assert await self.peek() is None
        assert await self.store.invalidate("k") is False

    async def test_invalidate_leaves_other_keys_alone(self) -> None:
        """Only the given key may be invalidated; otherwise one invalidation would remove other values, too."""
        for key in KEYS:
            await self.store.set(key, some())
        for key in KEYS[::2]:
            assert await self.store.invalidate(key) is True
        answers = await self.store.get(KEYS)
        assert [one is not None for one in answers] == [number % 2 == 1 for number in range(len(KEYS))]

    async def generation(self, scope: str, store: Store | None = None) -> str:
        """Return the current generation, as readers ask for it."""
        _, (generation,) = await (store or self.store).look_too((), [scope])
        return generation

    async def test_generations_change_by_bump_alone(self) -> None:
        """Only `bump` may change a generation; otherwise reads would lose all values, or `invalidate_all` none."""
        before = await self.generation("f")
        assert isinstance(before, str)
        assert await self.generation("f") == before
        await self.store.bump("f")
        after = await self.generation("f")
        assert after != before
        assert await self.generation("f") == after

    async def test_a_bump_reaches_others(self) -> None:
        """Other clients must see a bump; otherwise `invalidate_all` would take effect in one process only."""
        before = await self.generation("f", self.far_store)
        await self.store.bump("f")
        today, *ended = await self.far_store.generations("f")
        assert today == await self.generation("f") not in (before, *ended)
        assert before in ended or await self.generation("f", self.far_store) == today
        await self.until(lambda: self.generation("f", self.far_store), lambda now: now != before, within=2.0)
        assert await self.generation("f", self.far_store) == await self.generation("f")

    async def test_a_bump_leaves_other_scopes_alone(self) -> None:
        """A bump must change one scope only; otherwise `f.invalidate_all` would also empty g."""
        before = [await self.generation(scope) for scope in ("f", "g", "F", "")]
        await self.store.bump("f")
        after = [await self.generation(scope) for scope in ("f", "g", "F", "")]
        assert [one == two for one, two in zip(before, after, strict=True)] == [False, True, True, True]

    async def test_the_bump_of_all_reaches_all(self) -> None:
        """The bump of "" must reach every scope; otherwise `clear` would miss those never bumped, or never used."""
        await self.store.bump("f")
        scopes = ["f", "g", "", "never asked for"]
        before = [await self.generation(scope) for scope in scopes[:3]]
        await self.store.bump("")
        after = [await self.generation(scope) for scope in scopes]
        assert not set(before) & set(after)

    async def test_generations_never_come_back(self) -> None:
        """A generation must never return; otherwise values that were invalidated twice would be valid again."""
        met = set()
        for step in ("f", "", "f", "f", "", "", "f"):
            now = await self.generation("f")
            assert now not in met
            met.add(now)
            await self.store.bump(step)
        assert await self.generation("f") not in met

    async def test_a_look_sees_what_is_fresh(self) -> None:
        """A look may return only a fresh entry; otherwise hits would be stale, changed or deleted values."""
        far, claims = self.far_store, self.side(self.engine).claims

        async def look() -> Found | None:
            if self.engine.near is not None:
                return self.engine.near.look("k")
            return await cast("Looks", claims).look("k")

        self.declared(self.engine.looks or self.engine.near is not None, "looks")
        assert await look() is None
        for change in (far.expire, far.invalidate):
            for ends in (LONG, inf):
                entry = some(fresh=ends)
                await far.set("k", entry)
                found = await look()
                assert found is not None  # no change is under way that could make the entry doubtful
                assert (found.entry.id, found.entry.value) == (entry.id, b"value")
                assert ends - SOON <= found.entry.fresh <= ends
                await change("k")
                assert await look() is None
        await far.set("k", some(fresh=0.0, keep=LONG))
        assert await look() is None
        await far.set("k", some(fresh=0.0))
        assert await look() is None

    async def test_keys_and_generations_are_read_together(self) -> None:
        """`look_too` must find what is fresh, beside the current generations; otherwise a hit would be stale, or lost,
        or would be read under a key that is no longer in use."""
        fresh = some()
        await self.far_store.set("fresh", fresh)
        await self.far_store.set("stale", some(fresh=0.0, keep=LONG))
        for _ in range(2):
            await self.far_store.bump("f")
            keys = ["missing", "fresh", "stale", "fresh"]
            found, generations = await self.store.look_too(keys, ["f", "g", ""])
            seen = not_none(found["fresh"])
            assert (seen.entry.id, seen.entry.value) == (fresh.id, fresh.value)
            assert found["missing"] is None
            assert found.get("stale") is None  # it may have to be read in another way
            assert generations == [(await self.far_store.generations(scope))[0] for scope in ("f", "g", "")]
        await self.far_store.invalidate("fresh")
        assert await self.store.look_too(["fresh"], []) == ({"fresh": None}, [])
        assert (await self.store.look_too([], ["f"]))[1] == generations[:1]

    async def test_none_is_a_value(self) -> None:
        """None must be stored as a value; otherwise functions that return None would compute at every call."""
        self.declared(not self.engine.shared, "objects as values")
        for value in (None, False, 0, "", (), object()):
            await self.store.set("k", some(value))
            assert (await self.stored()).value is value

    async def test_replace_only_what_was_seen(self) -> None:
        """`replace` may replace only the version that was seen; otherwise `Paired` would overwrite newer values."""
        store, far = self.store, self.far_store
        first, second, third = some(b"1"), some(b"2", fresh=0.0, keep=LONG), some(b"3")
        assert not await store.replace("k", new_id(), first)
        assert await store.replace("k", None, first)
        assert not await far.replace("k", None, second)
        assert not await far.replace("k", new_id(), second)
        assert await far.replace("k", first.id, second)
        assert not await store.replace("k", None, third)  # a stale entry is still stored
        assert await store.replace("k", second.id, third)
        assert (await self.stored()).id == third.id
        await store.invalidate("k")
        assert not await store.replace("k", third.id, first)
        await store.set("k", some(fresh=0.0))
        assert await store.replace("k", None, first)  # an entry in its grace counts as none

    async def test_one_of_many_replaces(self) -> None:
        """Only one of many callers may replace a version; otherwise two would believe that their value was stored."""
        herd = [self.beside(self.store.replace("k", None, some())) for _ in range(HERD)]
        assert [await one for one in herd].count(True) == 1

    # -- a scope that is made stale

    async def test_a_scope_is_softened(self) -> None:
        """Softening must make one scope stale, for all clients; otherwise `expire_all` would do nothing, make other
        keys stale, or remove values."""
        softens = require(self.side(self.engine).softens)
        scopes = ("f", "g", "")
        before = [(await self.store.generations(scope))[0] for scope in scopes]
        seen = set(before)
        for _ in range(2):
            await softens.soften("f")
            after = await self.generation("f")
            assert after not in seen
            seen.add(after)
            assert after.partition("~")[0] == before[0]
            assert (await self.store.generations("f"))[0] == after
            await self.until(lambda: self.generation("f", self.far_store), after.__eq__, within=2.0)
        assert [await self.generation(scope) for scope in scopes[1:]] == before[1:]
        await softens.soften("")
        for scope, old in zip(scopes, before, strict=True):
            now = await self.generation(scope)
            assert now not in seen
            assert now.partition("~")[0] == old
        await self.store.bump("f")
        hard = (await self.generation("f")).partition("~")[0]
        assert hard != before[0]
        assert (await self.far_store.generations("f"))[0].partition("~")[0] == hard

    # -- lists

    async def test_keys_are_listed(self) -> None:
        """The list must contain exactly the stored keys; otherwise users would miss keys, or see keys never set."""
        assert await self.listed("") == []
        for key in KEYS:
            await self.store.set(key, some())
        assert sorted(await self.listed("")) == sorted(KEYS)
        for prefix in (*KEYS, "a:", "k" * 9_999, "no such"):
            assert sorted(await self.listed(prefix)) == sorted(key for key in KEYS if key.startswith(prefix)), prefix
        await self.store.invalidate("a")
        await self.store.expire("A")
        await self.store.set("stale", some(fresh=0.0, keep=LONG))
        assert sorted(await self.listed("")) == sorted({*KEYS, "stale"} - {"a"})

    async def test_very_many_keys_are_listed(self) -> None:
        """Paging must reach all keys; otherwise one page of them would be taken for all."""
        names = [f"key {number}" for number in range(2_500)]
        assert await self.listed("") == []
        for name in names:
            await self.store.set(name, some())
        entries = await self.store.get(names)
        kept = {
            name for name, entry in zip(names, entries, strict=True) if entry is not None
        }  # an engine may evict some for lack of room
        found = await self.listed("key ")
        assert set(found) == kept
        assert len(found) < 1.1 * len(kept)  # a server that resizes its table meanwhile may list a key twice
        assert set(await self.listed("key 24")) == {name for name in kept if name.startswith("key 24")}

    async def test_what_is_computed_is_not_listed(self) -> None:
        """A key without a value must not be listed; otherwise a lease would be taken for a value."""
        await self.claims.claim("k", new_id(), Ask(LONG))
        assert await self.listed("") == []
