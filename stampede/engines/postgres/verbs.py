"""Claims and Store, written once for both colours: each verb is one statement, sent over the line of its colour."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stampede.engines.kit.generations import MOST, NOTED, PushedGenerations, names_of, new_generation
from stampede.engines.kit.pool import SentOnce
from stampede.engines.kit.whereabouts import here
from stampede.engines.postgres.line import PostgresLine
from stampede.engines.postgres.news import SLOTS, PostgresNews
from stampede.engines.postgres.sweep import Sweeper
from stampede.engines.postgres.talk import Command, Row
from stampede.engines.postgres.tell import Teller
from stampede.engines.postgres.wire import (
    PostgresNames,
    entry_of,
    fresh_of,
    is_whole,
    key_of,
    message_of,
    names,
    news_of,
    reply_of,
    row_of,
    verdict_string,
)
from stampede.errors import EngineError
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Asked, Busy, Found, Looked, Reply, Shown, Ticket
from stampede.model.record import VERDICT
from stampede.runtime.chance import uniform
from stampede.runtime.colour import Colour, run_blocking

__all__ = ["LOOK", "SAFETY", "PostgresKeys", "slot_of_scope"]

SAFETY = 1.0  # seconds between two looks of a waiter that was not woken: a notification may get lost

LOOK = 0.1
"""Seconds between two looks if there are no notifications, or if the holder's connection is its sign of life: no
notification says that a connection has ended."""

PAGE = 1000  # keys that are read for one page of a list

_SEEN = "entry, fresh - {0}, keep - {0}, cost, margin, ttl, raised, value"
_NOW = "stampede.clock()"
_AT_MOST = f"greatest({_NOW}, stored)"  # if the clock was set back, no entry gets more time than it was given

SEEN = f"SELECT {_SEEN.format(_NOW)} FROM stampede.entries WHERE id = $1"
ALL_SEEN = f"SELECT id, {_SEEN.format(_NOW)} FROM stampede.entries WHERE id = ANY ($1)"
KEPT = f"SELECT id, {_SEEN.format(_AT_MOST)} FROM stampede.entries WHERE id = ANY ($1) AND keep > {_NOW}"
KEPT_ONE = f"SELECT {_SEEN.format(_AT_MOST)} FROM stampede.entries WHERE id = $1 AND keep > {_NOW}"
VALUE = "SELECT value FROM stampede.entries WHERE id = $1 AND entry = $2"
LEASE = f"SELECT token, ends - {_NOW}, holder FROM stampede.leases WHERE id = $1 AND ends > {_NOW}"
NAMED = "SELECT id, name, keep > stampede.clock() FROM stampede.entries WHERE id > $1 ORDER BY id LIMIT $2"
AWAIT = "SELECT stampede.await($1, $2, $3)"
RENEW = f"""UPDATE stampede.leases SET written = {_NOW}, ends = {_NOW} + $3, pid = $4, started = $5
    WHERE id = $1 AND token = $2 AND ends > {_NOW} RETURNING true"""


def _called(function: str, count: int) -> str:
    return f"SELECT * FROM stampede.{function}({', '.join(f'${n}' for n in range(1, count + 1))})"


CLAIM, ABANDON, EXPIRE, INVALIDATE, GENERATIONS, BUMP = (
    _called(*each)
    for each in [
        ("claim", 13), ("abandon", 7), ("expire", 2), ("invalidate", 2),
        ("generations", 3), ("bump", 4),
    ]
)  # fmt: skip
_STORED = "ROW($1, $2, $3, $4, $5, $6, 0, $7, $8, $9, $10, $11)::stampede.entries, $12"
FILL = f"SELECT * FROM stampede.fill({_STORED}, $13, $14)"
REPLACE = f"SELECT * FROM stampede.replace({_STORED}, $13)"
SET = f"SELECT * FROM stampede.set({_STORED})"


def _changing(verb: str) -> Any:
    async def asked(self: PostgresKeys, key: str, *terms: Any) -> bool:
        return await self.changed(Asked(verb, (key, *terms)))

    return asked


class PostgresKeys:
    """Claims and Store of one colour."""

    replace, expire, invalidate = map(_changing, ("replace", "expire", "invalidate"))

    def __init__(
        self,
        line: PostgresLine,
        news: PostgresNews,
        teller: Teller,
        sweeper: Sweeper,
        generations: PushedGenerations,
        colour: Colour,
    ) -> None:
        self._line = line
        self._sweeper = sweeper
        self._news = news
        self._teller = teller
        self._generations = generations
        self._colour = colour

    def _command(self, asked: Asked) -> Command:
        """Return the command of a verb that changes a key."""
        key, *terms = asked.args
        ids = names(key)
        match asked.verb, *terms:
            case "claim", token, ask:
                how = ask.lease, ask.draw, ask.since, ask.seen, ask.awaited, ask.force
                return CLAIM, (ids.id, ids.lock, ids.raw, token, *how, here(), *self._news.life)
            case "fill", token, entry, *same_as:
                if same_as:  # the value stays where it is
                    return FILL, (*row_of(ids, replace(entry, value=b"")), ids.lock, token, *same_as)
                return FILL, (*row_of(ids, entry), ids.lock, token, None)
            case "set", entry:
                return SET, (*row_of(ids, entry), ids.lock)
            case "replace", seen, entry:
                return SentOnce((REPLACE, (*row_of(ids, entry), ids.lock, seen)))
            case "renew", token, lease:
                return RENEW, (ids.id, token, float(lease), *self._news.life)
            case "abandon", token, *how:
                return self._abandoned(ids, token, *how)
        return EXPIRE if asked.verb == "expire" else INVALIDATE, (ids.id, ids.lock)

    def _abandoned(
        self, ids: PostgresNames, token: bytes, verdict: Verdict | None = None, rest: float = 0.0
    ) -> Command:
        reason = None if verdict is None else verdict_string(verdict)
        why = reason or verdict_string(Verdict("failed"))
        return ABANDON, (ids.id, ids.lock, token, reason, VERDICT, float(rest), why)

    # -- claims -------------------------------------------------------------------------------------------------

    async def look(self, key: str) -> Found | None:
        ids, news = names(key), self._news
        news.follow()
        stamp, reporter = news.stamps[ids.slot], news.reporter  # before the question is sent: see `PostgresNews`
        rows = await self._line.ask((SEEN, (ids.id,)))
        entry = fresh_of(rows[0]) if rows else None
        return None if entry is None else Found(entry, self._ticket(ids, stamp, reporter))

    async def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        ids, news, now = [names(key) for key in keys], self._news, time.monotonic()
        news.follow()
        if scopes:
            news.start()
        stamps, reporter = [news.stamps[each.slot] for each in ids], news.reporter
        samples = [self._generations.sample(scope) for scope in scopes]
        looking = [(ALL_SEEN, ([each.id for each in ids],))] if keys else []
        rows = await self._line.ask_all([*looking, *map(_asking, scopes)])
        seen = {row[0]: fresh_of(row[1:]) for row in rows[0]} if keys else {}
        found = {
            key: None if (entry := seen.get(each.id)) is None else Found(entry, self._ticket(each, stamp, reporter))
            for key, each, stamp in zip(keys, ids, stamps, strict=True)
        }
        heard = zip(scopes, rows[len(looking) :], samples, strict=True)
        return found, [self._heard(scope, some, sample, now)[0] for scope, some, sample in heard]

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        ids, news, asked = names(key), self._news, Asked("claim", (key, token, ask))
        news.start()
        if news.home_backend is None:
            await news.at_home(self._colour)
        while True:
            stamp, reporter = news.stamps[ids.slot], news.reporter
            (row,) = await self._line.ask(self._command(asked))
            whole = row if is_whole(row) else await self._whole(ids, row)
            if whole is not None:
                return self._replied(ids, whole, stamp, reporter)

    async def _whole(self, ids: PostgresNames, row: Row) -> Row | None:
        """Return the row of a claim with its large value, which `claim` left out. If the entry has been replaced since,
        return the row without it, or None if the entry was the answer: then claim again."""
        values = await self._line.ask((VALUE, (ids.id, row[1])))
        if values:
            return *row[:8], values[0][0], *row[9:]
        return None if row[0] == 0 else (row[0], None, *row[2:])

    def _ticket(self, ids: PostgresNames, stamp: int, reporter: int) -> Ticket | None:
        return self._news.ticket(ids.slot, stamp) if reporter and reporter == self._news.reporter else None

    def _replied(self, ids: PostgresNames, row: Row, stamp: int, reporter: int) -> Reply:
        if row[13]:
            self._teller.tell(row[13], ids.channel, b"")
        return reply_of(row, self._ticket(ids, stamp, reporter))

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> Ticket | bool:
        if entry.same_as is not None:
            stored = await self._fill(key, token, entry, entry.same_as)
            if stored:
                return stored
        return await self._fill(key, token, entry)

    async def _fill(self, key: str, token: bytes, entry: Entry[Any], *same_as: bytes) -> Ticket | bool:
        ids, news, asked = names(key), self._news, Asked("fill", (key, token, entry, *same_as))
        stamp, reporter, ticket = news.stamps[ids.slot], news.reporter, None
        try:
            done: bool = self._done(asked, await self._line.ask(self._command(asked)))
            if done and reporter and reporter == news.reporter:
                ticket = news.stored(ids.slot, stamp)
        finally:
            if ticket is None:
                news.void(ids.slot)
        return ticket or done

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        return bool(await self.changed(Asked("abandon", (key, token, verdict, rest))))

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        return bool(await self._line.ask(self._command(Asked("renew", (key, token, lease)))))

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        """Ask all in one round trip, and return the answers. Each may be an EngineError."""
        try:
            return run_blocking(self._asked_many(asked))
        except EngineError as error:
            return [error] * len(asked)

    async def _asked_many(self, asked: Sequence[Asked]) -> list[Any]:
        self._news.follow()
        ids = [names(each.args[0]) for each in asked]
        before = [(self._news.stamps[each.slot], self._news.reporter) for each in ids]
        looks = [name.id for name, each in zip(ids, asked, strict=True) if each.verb == "look"]
        commands = [self._command(each) for each in asked if each.verb != "look"]
        try:
            seen, *others = await self._line.ask_all([(ALL_SEEN, (looks,)), *commands])
        finally:
            self._void(each for each in asked if each.verb != "look")
        found, rows = {row[0]: fresh_of(row[1:]) for row in seen}, iter(others)
        answers: list[Any] = []
        for name, each, (stamp, reporter) in zip(ids, asked, before, strict=True):
            if each.verb == "look":
                entry = found.get(name.id)
                answers.append(None if entry is None else Found(entry, self._ticket(name, stamp, reporter)))
            elif each.verb == "claim":
                (row,) = next(rows)
                whole = row if is_whole(row) else await self._whole(name, row)
                answers.append(self._replied(name, whole, stamp, reporter) if whole else await self.claim(*each.args))
            else:
                answers.append(self._done(each, next(rows)))
        return answers

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        ids, end = names(key), time.monotonic() + min(timeout, busy.lease)
        with self._news.listen(ids.channel) as listener:
            ready = await self._colour.park(listener.ready, min(timeout, LOOK))
            hears = ready and listener.hears
            home = self._news.home if hears else None
            look = SAFETY if hears and not self._news.bound else LOOK
            # If the lease ended before `await` noted this process, no notification comes. The loop also checks whether
            # the holder still lives.
            while (await self._line.ask((AWAIT, (ids.id, busy.token, home))))[0][0]:
                left = end - time.monotonic()
                if left <= 0 or await self._colour.park(listener.bell, min(left, look * uniform(0.9, 1.1))):
                    break
                if hears and not listener.hears:
                    break
        entry = news_of(listener.message, busy.token)
        return None if entry is None else Found(entry)

    # -- store --------------------------------------------------------------------------------------------------

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        ids = [names(key).id for key in keys]
        if len(ids) == 1:
            rows = await self._line.ask((KEPT_ONE, ids))
            return [entry_of(rows[0]) if rows else None]
        kept = {row[0]: entry_of(row[1:]) for row in await self._line.ask((KEPT, (ids,)))}
        return [kept.get(id) for id in ids]

    async def show(self, key: str) -> Shown:
        id = names(key).id
        kept, lease = await self._line.ask_all([(KEPT, ([id],)), (LEASE, (id,))])
        token, left, holder = lease[0] if lease else (b"", 0.0, "")
        return Shown(entry_of(kept[0][1:]) if kept else None, token, left, holder or "")

    async def page(self, prefix: str, cursor: Any = None) -> tuple[list[str], Any]:
        rows = await self._line.ask((NAMED, (cursor or b"", PAGE)))
        keys = [key_of(name) for _, name, kept in rows if kept]
        return [key for key in keys if key.startswith(prefix)], rows[-1][0] if len(rows) == PAGE else None

    async def set(self, key: str, entry: Entry[Any]) -> None:
        await self.changed(Asked("set", (key, entry)))

    async def change(self, asked: Sequence[Asked], scopes: Sequence[str]) -> tuple[list[Any], list[Sequence[str]]]:
        """Send all changes, and ask for the generations of the scopes, in one round trip."""
        now, samples = time.monotonic(), [self._generations.sample(scope) for scope in scopes]
        commands = [self._command(each) for each in asked]
        try:
            rows = await self._line.ask_all([*commands, *map(_asking, scopes)])
        finally:
            self._void(asked)
        answers = [self._done(*each) for each in zip(asked, rows[: len(asked)], strict=True)]
        heard = zip(scopes, rows[len(asked) :], samples, strict=True)
        return answers, [self._heard(scope, some, sample, now) for scope, some, sample in heard]

    async def changed(self, asked: Asked) -> bool:
        """Send a change. It also voids what this process has read before: the notification may still be on its way."""
        try:
            rows = await self._line.ask(self._command(asked))
        finally:
            self._void([asked])
        done: bool = self._done(asked, rows)
        return done

    def _done(self, asked: Asked, rows: Sequence[Row]) -> Any:
        """Return the answer of a change, and notify the processes that wait for a lease that it ended."""
        if asked.verb == "renew":
            return bool(rows)
        if asked.verb in _STORES:
            self._sweeper.wrote()
        done, homes = rows[0][0], rows[0][-1]
        if homes:
            entry = asked.args[2] if asked.verb == "fill" else None
            self._teller.tell(homes, names(asked.args[0]).channel, message_of(entry))
        return None if asked.verb == "set" else done

    def _void(self, asked: Any) -> None:
        for each in asked:
            if each.verb not in _KEEPS:
                self._news.void(names(each.args[0]).slot)

    # -- generations --------------------------------------------------------------------------------------------

    def generation_at_hand(self, scope: str) -> str | None:
        return self._generations.generation_at_hand(scope)

    def ticket_of_generation(self, scope: str) -> Ticket | None:
        return self._generations.ticket_of_generation(scope)

    async def generations(self, scope: str) -> Sequence[str]:
        now, sample = time.monotonic(), self._generations.sample(scope)
        self._news.start()
        return self._heard(scope, await self._line.ask(_asking(scope)), sample, now)

    def _heard(self, scope: str, rows: Sequence[Row], sample: tuple[int, int], now: float) -> Sequence[str]:
        (whole, wholes), (own, owns) = rows
        pairs = [([whole, *wholes], [own, *owns])]
        if not scope:  # the same row twice, read at one moment: combine each generation only with itself
            pairs = [([each], [each]) for each in pairs[0][0]]
        known = [name for each in pairs for name in names_of(*each)]
        self._generations.put(scope, known[0], sample, self._news.listens, now)
        return known

    async def soften(self, scope: str) -> None:
        await self.bump(scope, new_generation())

    async def bump(self, scope: str, softer: str | None = None) -> None:
        try:
            await self._line.ask((BUMP, (_scope(scope), new_generation(), softer, MOST)))
        finally:
            self._generations.forget(scope)


_STORES = frozenset({"fill", "set", "replace"})
_KEEPS = frozenset({"claim", "abandon", "renew"})


def _scope(scope: str) -> bytes:
    """Return the id of a scope in the table. It is empty only for "", which means all scopes."""
    return names(scope, b"scope").id if scope else b""


def slot_of_scope(scope: str) -> int:
    """Return the slot of a scope's generation. The server names it by the first byte of the scope's id."""
    return SLOTS + (_scope(scope)[0] if scope else 0)


def _asking(scope: str) -> Command:
    """Return the command that asks for the current and recent generations of all scopes, and of this one."""
    new = [new_generation() for _ in range(2)]
    return GENERATIONS, ([b"", _scope(scope)], new, NOTED)
