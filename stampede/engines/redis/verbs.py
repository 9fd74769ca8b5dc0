"""The verbs, written once: each is one script, sent by the line of its colour."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from hashlib import blake2b
from math import inf
from random import uniform
from typing import Any, NamedTuple, Protocol

from stampede.engines.kit.generations import KNOWN, MOST, PushedGenerations, new_generation
from stampede.engines.kit.many_at_once import PutAside, together
from stampede.engines.kit.pool import SentOnce
from stampede.engines.redis.clients import is_about_rights, is_silence
from stampede.engines.redis.news import RedisNews
from stampede.engines.redis.scripts import Command, Scripts
from stampede.engines.redis.wire import (
    FOREVER,
    HEAD,
    RedisNames,
    claim_args,
    expiry,
    fresh_of,
    kept,
    key_of,
    ms,
    names,
    news_of,
    pack,
    pattern,
    reply_of,
    shown,
    token_of,
    verdict_string,
)
from stampede.errors import EngineError, TooLarge
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Asked, Busy, Found, Reply, Shown, Ticket
from stampede.runtime.colour import Colour, run_blocking, settled

__all__ = ["RedisKeys", "RedisLine"]

VERDICT = 5.0
"""Seconds for which a verdict is told to those who waited for its lease."""

SMALL = 4096
"""Bytes of an entry that is sent along with the news of it."""

SAFETY = 1.0
"""Seconds between two looks of a waiter that nobody woke: no push is durable."""

LOOK = 0.1
"""The same where there are no news, or not yet."""

NOTED = 2 * KNOWN
"""Seconds for which an ended generation is noted: somebody may believe in it yet, and changes go there, too."""

PAGE = 1000
"""Keys that are looked at for one page of a list."""

MANY = 4096
"""Entries of which a process remembers the end."""

LARGE = 1 << 16
"""Bytes from which on it may be the value that the server does not take."""


class RedisLine(Protocol):
    """How one colour asks. EngineError if there is no answer, or a refusal."""

    async def ask(self, command: Command) -> Any: ...
    async def ask_all(self, commands: Sequence[Command]) -> tuple[list[Any], int]: ...


class _Aside:
    """A line whose questions wait for those of other verbs."""

    async def ask(self, command: Command) -> Any:
        return (await self.ask_all([command]))[0][0]

    async def ask_all(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        answer: tuple[list[Any], int] = await PutAside(commands)
        return answer


class KnownEnd(NamedTuple):
    """When an entry ends, as this process was told. Two that look alike up to here are one: their ids are."""

    head: bytes  # its string begins so
    end: float  # of its key, on our own clock
    until: float  # after this somebody may have refreshed it


class RedisKeys:
    """Claims and Store of one colour."""

    def __init__(
        self, line: RedisLine, scripts: Scripts, news: RedisNews, generations: PushedGenerations, colour: Colour
    ) -> None:
        self._line = line
        self._scripts = scripts
        self._news = news
        self._generations = generations
        self._colour = colour
        self._ends: dict[bytes, KnownEnd] = {}

    # -- claims -------------------------------------------------------------------------------------------------

    async def look(self, key: str) -> Found | None:
        its, news, at = names(key), self._news, time.monotonic()
        if news.tracks:
            news.follow()
        slot, known = its.slot, self._ends.get(its.entry)
        if known is not None and at >= known.until:
            known = None  # somebody may have refreshed it
        stamp = news.stamps[slot]  # before the question is sent: see News
        try:
            replies, told = await self._line.ask_all(self._looking(its, known))
        except EngineError as error:
            if not is_about_rights(error):
                raise
            return None  # a script may do what we may not
        entry = self._seen(its, known, replies, at)
        if entry is None:
            # Another one stands there by now, of which only its end is missing; or nothing that is good.
            return await self.look(key) if known is not None and replies[0] is not None else None
        return Found(entry, news.ticket(slot, stamp) if told and told == news.told else None)

    def _looking(self, its: RedisNames, known: KnownEnd | None) -> list[Command]:
        """What `claim.lua` would find, by plain commands. One of them is refused by a server that is not the master any
        more. It must not be the one that is to be followed: CLIENT TRACKING remembers nothing of what GETEX reads. The
        end of an entry that still stands as it did needn't be asked for again."""
        left: list[Command] = [(b"PTTL", its.entry)] if known is None else []
        if self._news.tracks:
            return [*left, (b"GET", its.entry), (b"GETEX", its.lease)]
        return [*left, (b"GETEX", its.entry)]

    def _seen(self, its: RedisNames, known: KnownEnd | None, replies: Sequence[Any], at: float) -> Entry[Any] | None:
        """The entry in what was said to that, if it is fresh; when it ends is known from here on."""
        if known is not None:
            string = replies[0]
            if string is not None and string.startswith(known.head):
                return fresh_of(1000 * (known.end - at), string)
            self._ends.pop(its.entry, None)
            return None
        left, string = replies[:2]
        entry = fresh_of(left, string)
        if entry is not None:
            until = at + entry.fresh - min(2 * entry.margin, entry.ttl / 2)
            if len(self._ends) >= MANY:
                self._ends.clear()
            self._ends[its.entry] = KnownEnd(string[:HEAD], inf if left < 0 else at + left / 1000, until)
        return entry

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        its, news = names(key), self._news
        if news.tracks:
            news.follow()
        slot = its.slot
        stamp = news.stamps[slot]  # before the question is sent: see News
        args = claim_args(token, ask, its.channel)
        (answer,), told = await self._line.ask_all([self._scripts.claim(self._named(its), *args)])
        return reply_of(answer, news.ticket(slot, stamp) if told and told == news.told else None)

    def _named(self, its: RedisNames) -> Sequence[bytes]:
        """A claim's keys as they are named: all in a cluster, where they may be moving; else what is to be followed."""
        return its[:1] if self._news.tracks and not self._scripts.sharded else its[:4]

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> Ticket | bool:
        its, news = names(key), self._news
        stamp, told, ticket = news.stamps[its.slot], news.told, None
        until, string = _packed(entry)
        keys = its[:1] if told and not self._scripts.sharded else its[:4]  # as in claims
        terms = token, entry.id, until, string, its.channel, b"%d" % SMALL
        command = self._scripts.fill(keys, *terms, *([b"follow"] if told else []))
        try:
            (done,), teller = await self._line.ask_all([command])
            if done == 1 and told and told == teller == news.told:
                ticket = news.stored(its.slot, stamp)
        except EngineError as error:
            await self._judge(error, command)
            raise
        finally:
            self._ends.pop(its.entry, None)
            if ticket is None:
                news.void(its.slot)
        return ticket or bool(done)

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        its, told = names(key), b"" if verdict is None else verdict_string(verdict)
        terms = token, told, ms(VERDICT), ms(rest) if rest > 0 else b"0", told or verdict_string(Verdict("failed"))
        return bool(await self._line.ask(self._scripts.abandon(its[1:4], *terms, its.channel)))

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        return bool(await self._line.ask(self._scripts.prolong([names(key).lease], token, ms(lease))))

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        """What all verbs ask next goes out together."""
        aside = self._aside()
        return together([getattr(aside, verb)(*args) for verb, args in asked], self._answered)

    def _aside(self) -> RedisKeys:
        """The same verbs, whose questions wait for those of others."""
        aside = copy(self)
        aside._line = _Aside()
        return aside

    def _answered(self, questions: dict[int, Sequence[Command]]) -> dict[int, Any]:
        try:
            replies, told = run_blocking(self._line.ask_all([each for asked in questions.values() for each in asked]))
        except EngineError as error:
            if is_about_rights(error) and len(questions) > 1:  # looks are refused, and claims perhaps not
                return {each: self._answered({each: asked})[each] for each, asked in questions.items()}
            return dict.fromkeys(questions, error)
        its = iter(replies)
        return {number: ([next(its) for _ in asked], told) for number, asked in questions.items()}

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        its, end = names(key), time.monotonic() + min(timeout, busy.lease)
        with self._news.listen(its.channel) as listener:
            ready = await self._colour.park(listener.ready, min(timeout, LOOK))
            # What fell before we listened was told to nobody here.
            if token_of(await self._line.ask((b"GETEX", its.lease))) == busy.token:
                longest = (SAFETY if ready and listener.hears else LOOK) * uniform(0.9, 1.1)
                await self._colour.park(listener.bell, min(end - time.monotonic(), longest))
        entry = news_of(listener.message, busy.token)
        return None if entry is None else Found(entry)

    # -- store --------------------------------------------------------------------------------------------------

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        answers, _ = await self._line.ask_all([self._scripts.get([names(key).entry]) for key in keys])
        return [kept(answer) for answer in answers]

    async def show(self, key: str) -> Shown:
        its = names(key)
        commands = [self._scripts.get([its.entry]), (b"GET", its.lease), (b"PTTL", its.lease)]
        return shown(*(await self._line.ask_all(commands))[0])

    async def page(self, prefix: str, cursor: Any = None) -> tuple[list[str], Any]:
        command = (b"SCAN", cursor or b"0", b"MATCH", pattern(prefix), b"COUNT", b"%d" % PAGE)
        after, found = await self._line.ask(command)
        return list(dict.fromkeys(map(key_of, found))), None if after == b"0" else after

    async def set(self, key: str, entry: Entry[Any]) -> None:
        its, (until, string) = names(key), _packed(entry)
        await self._changed(its, self._scripts.set(its[:4], until, string, its.channel))

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        its, (until, string) = names(key), _packed(entry)
        terms = until, string, its.channel, seen or b"", entry.id
        return await self._changed(its, SentOnce(self._scripts.replace(its[:4], *terms)))

    async def expire(self, key: str) -> bool:
        its = names(key)
        return await self._changed(its, self._scripts.expire([its.entry, its.lease], b"%d" % FOREVER, its.channel))

    async def invalidate(self, key: str) -> bool:
        its = names(key)
        return await self._changed(its, self._scripts.invalidate(its[:4], its.channel))

    async def change(self, asked: Sequence[Asked], scopes: Sequence[str]) -> tuple[list[Any], list[Sequence[str]]]:
        """All in one round trip, as one turn of an event loop asks what its callers ask."""
        keys = self if self._colour.suspending else self._aside()
        work = [getattr(keys, verb)(*args) for verb, args in asked] + [keys.generations(scope) for scope in scopes]
        answers: list[Any] = await settled(work) if self._colour.suspending else together(work, self._answered)
        try:
            for each in answers:
                if isinstance(each, BaseException):
                    raise each
            return answers[: len(asked)], answers[len(asked) :]
        finally:
            del answers  # an error in it refers to this frame

    async def _changed(self, its: RedisNames, command: Command) -> bool:
        """The reply; what was read here before it is true no more, at once: the news may still be on their way."""
        try:
            return bool(await self._line.ask(command))
        except EngineError as error:
            await self._judge(error, command)
            raise
        finally:
            self._void(its)

    def _void(self, its: RedisNames) -> None:
        self._ends.pop(its.entry, None)
        self._news.void(its.slot)

    async def _judge(self, error: EngineError, command: Command) -> None:
        """Raise TooLarge if the server did not take this large value, but answers other questions."""
        size = max(map(len, command))
        if size > LARGE and is_silence(error) and await self._answers():
            why = f"{size} bytes are more than this server takes, but it answers: {error}"
            raise TooLarge(f"{why}; store less, or on a slow link give a larger socket_timeout") from error

    async def _answers(self) -> bool:
        try:
            await self._line.ask((b"PING",))
        except EngineError:
            return False
        return True

    # -- generations --------------------------------------------------------------------------------------------

    async def generation(self, scope: str) -> str:
        return await self._generations.today(scope, self._colour, self._generation)

    async def _generation(self, scope: str) -> str:
        return (await self._asked_for(scope, noted=False))[0]

    async def generations(self, scope: str) -> list[str]:
        return await self._asked_for(scope, noted=True)

    async def _asked_for(self, scope: str, *, noted: bool) -> list[str]:
        now, sample = time.monotonic(), self._generations.sample()
        self._news.follow()
        (reply,), told = await self._line.ask_all([self._asking(scope, noted=noted)])
        return self._heard(scope, reply, sample, told, now)

    def _asking(self, scope: str, *, noted: bool) -> Command:
        """For today's, and perhaps for those that are noted."""
        own = _scope_key(scope)
        notes = [_note(_ALL), _note(own)] if noted else []
        return self._scripts.generation([_ALL, own, _RUN, *notes], *_new(2))

    def _heard(self, scope: str, reply: list[bytes], sample: tuple[int, int], told: int, now: float) -> list[str]:
        whole, own, *ended = reply
        name = _name_of(whole, own)
        self._generations.put(scope, name, sample, told, now)
        if not any(ended):
            return [name]
        wholes, owns = [whole, *_noted(ended[0])], [own, *_noted(ended[1])]
        return [_name_of(each, other) for each in wholes for other in owns]

    async def soften(self, scope: str) -> None:
        key = _scope_key(scope) if scope else _ALL
        try:
            await self._line.ask(self._scripts.soften([key], *_new(2)))
        finally:
            self._generations.forget()

    async def bump(self, scope: str) -> None:
        key = _scope_key(scope) if scope else _ALL
        try:
            await self._line.ask(self._scripts.bump([key, _note(key)], *_new(1), ms(NOTED), b"%d" % MOST))
        finally:
            self._generations.forget()


def _packed(entry: Entry[Any]) -> tuple[bytes, bytes]:
    """Ms until the entry's key ends, if it does, and the entry as a string."""
    end = expiry(entry)
    return b"" if end is None else b"%d" % end, pack(entry, end)


_ALL, _RUN = b"{stampede}g", b"{stampede}r"


def _scope_key(scope: str) -> bytes:
    return b"{stampede}g:" + scope.encode("utf-8", "surrogatepass")


def _note(key: bytes) -> bytes:
    """Where the generations are noted that ended a moment ago."""
    return b"{stampede}p" + key.removeprefix(_ALL)


def _new(count: int) -> list[bytes]:
    """New generations, of which the server takes as many as it needs."""
    return [new_generation().encode() for _ in range(count)]


def _noted(string: bytes) -> list[bytes]:
    return [each.partition(b"@")[0] for each in string.split()]


def _name_of(whole: bytes, own: bytes) -> str:
    """Of all scopes' own id and a scope's own, each with what stands behind a `~`."""
    (whole, _, softer), (own, _, softest) = whole.partition(b"~"), own.partition(b"~")
    name = blake2b(b"|".join((whole, own)), digest_size=6).hexdigest()
    if not softer and not softest:
        return name
    return f"{name}~{blake2b(b'|'.join((softer, softest)), digest_size=6).hexdigest()}"
