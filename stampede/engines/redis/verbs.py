"""The verbs of keys, written once: each is one script, sent by the line of its colour."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from hashlib import blake2b
from math import inf
from typing import Any, NamedTuple, Protocol

from stampede.engines.kit.generations import KNOWN, MOST, PushedGenerations, new_generation
from stampede.engines.kit.many_at_once import PutAside, together
from stampede.engines.kit.pool import SentOnce
from stampede.engines.redis.clients import is_about_rights, is_silence
from stampede.engines.redis.news import ALL, RedisNews, key_of_scope
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
from stampede.model.ports import Ask, Asked, Busy, Found, Looked, Reply, Shown, Ticket
from stampede.runtime.chance import uniform
from stampede.runtime.colour import Colour, run_blocking, settled

__all__ = ["RedisKeys", "RedisLine"]

VERDICT = 5.0
"""Seconds for which a verdict is stored for those who waited for its lease."""

SMALL = 4096
"""Largest entry in bytes that is sent along with the news of its fill."""

SAFETY = 1.0
"""Seconds between two looks of a waiter that was not woken: a push can get lost."""

LOOK = 0.1
"""Seconds between two looks while there are no news."""

NOTED = 2 * KNOWN
"""Seconds for which an ended generation is noted. Another process may still believe it, so changes are made there
too."""

PAGE = 1000
"""Keys that the server looks at for one page of a list."""

MANY = 4096
"""Highest number of entries whose ends a process remembers."""

LARGE = 1 << 16
"""Size in bytes from which on the value may be what the server did not accept."""


class RedisLine(Protocol):
    """The way in which one colour asks. It raises EngineError if there is no answer, or a refusal."""

    async def ask(self, command: Command) -> Any: ...
    async def ask_all(self, commands: Sequence[Command]) -> tuple[list[Any], int]: ...


class _Aside:
    """A line that sets questions aside, so that they are asked together with those of other verbs."""

    async def ask(self, command: Command) -> Any:
        return (await self.ask_all([command]))[0][0]

    async def ask_all(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        answer: tuple[list[Any], int] = await PutAside(commands)
        return answer


class KnownEnd(NamedTuple):
    """The end of an entry, as the server reported it. An entry that begins with the same head is the same one: the head
    holds its id."""

    head: bytes  # the first bytes of the entry's string
    end: float  # when its key ends, on this process's clock
    until: float  # after this, another process may have refreshed it


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
        key_names, news, at = names(key), self._news, time.monotonic()
        if news.tracks:
            news.follow()
        slot, known = key_names.slot, self._ends.get(key_names.entry)
        if known is not None and at >= known.until:
            known = None  # another process may have refreshed it
        stamp = news.stamps[slot]  # before the question is sent: see RedisNews
        try:
            replies, reporter = await self._line.ask_all(self._looking(key_names, known))
        except EngineError as error:
            if not is_about_rights(error):
                raise
            return None  # a script may be allowed where a command is not
        entry = self._seen(key_names, known, replies, at)
        if entry is None:
            # Either another entry is stored by now, and only its end is missing; or there is nothing good.
            return await self.look(key) if known is not None and replies[0] is not None else None
        return Found(entry, news.ticket(slot, stamp) if reporter and reporter == news.reporter else None)

    async def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        news, at = self._news, time.monotonic()
        if news.tracks:
            news.follow()
        samples, questions = [], []
        for scope in scopes:
            samples.append(self._generations.sample(scope))
            questions.append(self._question(scope, noted=False))
        asked: list[tuple[RedisNames, KnownEnd | None, int, list[Command]]] = []
        for key in keys:
            key_names = names(key)
            known = self._ends.get(key_names.entry)
            if known is not None and at >= known.until:
                known = None
            commands = self._looking(key_names, known)
            if news.tracks and len(asked) + 1 < len(keys):
                del commands[-1]  # the last one shows for all of them whether the server is still the master
            asked.append((key_names, known, news.stamps[key_names.slot], commands))
        try:
            looking = [each for *_, commands in asked for each in commands]
            replies, reporter = await self._line.ask_all([*looking, *questions])
        except EngineError as error:
            if not keys or not is_about_rights(error):
                raise
            return {}, (await self.look_too((), scopes))[1] if scopes else []
        found: dict[str, Found | None] = {}
        start, follows = 0, reporter and reporter == news.reporter
        for key, (key_names, known, stamp, commands) in zip(keys, asked, strict=True):
            some, start = replies[start : start + len(commands)], start + len(commands)
            entry = self._seen(key_names, known, some, at)
            string = some[1 if known is None else 0]
            if entry is not None or string is None:
                ticket = news.ticket(key_names.slot, stamp) if follows else None
                found[key] = None if entry is None else Found(entry, ticket)
            elif known is not None and (again := await self.look(key)) is not None:
                found[key] = again
        heard = zip(scopes, replies[start:], samples, strict=True)
        return found, [self._take_reply(scope, some, sample, reporter, at)[0] for scope, some, sample in heard]

    def _looking(self, key_names: RedisNames, known: KnownEnd | None) -> list[Command]:
        """Return plain commands that find what `claim.lua` would find. One of them counts as a write, so that a server
        that is no longer the master refuses it. It must not be the one that is to be followed: CLIENT TRACKING ignores
        what GETEX reads. If the entry's end is known and the entry is unchanged, its end is not asked for again."""
        left: list[Command] = [(b"PTTL", key_names.entry)] if known is None else []
        if self._news.tracks:
            return [*left, (b"GET", key_names.entry), (b"GETEX", key_names.lease)]
        return [*left, (b"GETEX", key_names.entry)]

    def _seen(
        self, key_names: RedisNames, known: KnownEnd | None, replies: Sequence[Any], at: float
    ) -> Entry[Any] | None:
        """Return the entry in the replies to `_looking`, if it is fresh, and remember its end."""
        if known is not None:
            string = replies[0]
            if string is not None and string.startswith(known.head):
                return fresh_of(1000 * (known.end - at), string)
            self._ends.pop(key_names.entry, None)
            return None
        left, string = replies[:2]
        entry = fresh_of(left, string)
        if entry is not None:
            until = at + entry.fresh - min(2 * entry.margin, entry.ttl / 2)
            if len(self._ends) >= MANY:
                self._ends.clear()
            self._ends[key_names.entry] = KnownEnd(string[:HEAD], inf if left < 0 else at + left / 1000, until)
        return entry

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        key_names, news = names(key), self._news
        if news.tracks:
            news.follow()
        slot = key_names.slot
        stamp = news.stamps[slot]  # before the question is sent: see RedisNews
        args = claim_args(token, ask, key_names.channel)
        (answer,), reporter = await self._line.ask_all([self._scripts.claim(self._claim_keys(key_names), *args)])
        return reply_of(answer, news.ticket(slot, stamp) if reporter and reporter == news.reporter else None)

    def _claim_keys(self, key_names: RedisNames) -> Sequence[bytes]:
        """Return the keys that a claim names: all in a cluster, where they may be moving; else only what is to be
        followed."""
        return key_names[:1] if self._news.tracks and not self._scripts.sharded else key_names[:4]

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> Ticket | bool:
        if entry.same_as is not None:
            stored = await self._fill(key, token, replace(entry, value=b""), entry.same_as)
            if stored:
                return stored
        return await self._fill(key, token, entry)

    async def _fill(self, key: str, token: bytes, entry: Entry[Any], same_as: bytes | None = None) -> Ticket | bool:
        key_names, news = names(key), self._news
        stamp, reporter, ticket = news.stamps[key_names.slot], news.reporter, None
        until, string = _packed(entry)
        keys = key_names[:1] if reporter and not self._scripts.sharded else key_names[:4]  # as in claims
        terms = token, entry.id, until, string, key_names.channel, b"%d" % SMALL
        follow = [b"follow"] if reporter else [b""] if same_as is not None else []
        command = self._scripts.fill(keys, *terms, *follow, *([] if same_as is None else [same_as]))
        try:
            (done,), followed_by = await self._line.ask_all([command])
            if done == 1 and reporter and reporter == followed_by == news.reporter:
                ticket = news.stored(key_names.slot, stamp)
        except EngineError as error:
            await self._judge(error, command)
            raise
        finally:
            self._ends.pop(key_names.entry, None)
            if ticket is None:
                news.void(key_names.slot)
        return ticket or bool(done)

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        key_names, reason = names(key), b"" if verdict is None else verdict_string(verdict)
        terms = token, reason, ms(VERDICT), ms(rest) if rest > 0 else b"0", reason or verdict_string(Verdict("failed"))
        return bool(await self._line.ask(self._scripts.abandon(key_names[1:4], *terms, key_names.channel)))

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        return bool(await self._line.ask(self._scripts.prolong([names(key).lease], token, ms(lease))))

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        """Return the answers of all verbs. What they ask next is sent together."""
        aside = self._aside()
        return together([getattr(aside, verb)(*args) for verb, args in asked], self._answered)

    def _aside(self) -> RedisKeys:
        """Return a copy whose questions are set aside, so that they are asked together with those of others."""
        aside = copy(self)
        aside._line = _Aside()
        return aside

    def _answered(self, questions: dict[int, Sequence[Command]]) -> dict[int, Any]:
        try:
            replies, reporter = run_blocking(
                self._line.ask_all([each for asked in questions.values() for each in asked])
            )
        except EngineError as error:
            if is_about_rights(error) and len(questions) > 1:  # plain reads are refused, claims perhaps not
                return {each: self._answered({each: asked})[each] for each, asked in questions.items()}
            return dict.fromkeys(questions, error)
        remaining = iter(replies)
        return {number: ([next(remaining) for _ in asked], reporter) for number, asked in questions.items()}

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        key_names, end = names(key), time.monotonic() + min(timeout, busy.lease)
        with self._news.listen(key_names.channel) as listener:
            ready = await self._colour.park(listener.ready, min(timeout, LOOK))
            # Changes before we listened were not announced here.
            if token_of(await self._line.ask((b"GETEX", key_names.lease))) == busy.token:
                longest = (SAFETY if ready and listener.hears else LOOK) * uniform(0.9, 1.1)
                await self._colour.park(listener.bell, min(end - time.monotonic(), longest))
        entry = news_of(listener.message, busy.token)
        return None if entry is None else Found(entry)

    # -- store --------------------------------------------------------------------------------------------------

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        answers, _ = await self._line.ask_all([self._scripts.get([names(key).entry]) for key in keys])
        return [kept(answer) for answer in answers]

    async def show(self, key: str) -> Shown:
        key_names = names(key)
        commands = [self._scripts.get([key_names.entry]), (b"GET", key_names.lease), (b"PTTL", key_names.lease)]
        return shown(*(await self._line.ask_all(commands))[0])

    async def page(self, prefix: str, cursor: Any = None) -> tuple[list[str], Any]:
        command = (b"SCAN", cursor or b"0", b"MATCH", pattern(prefix), b"COUNT", b"%d" % PAGE)
        after, found = await self._line.ask(command)
        return list(dict.fromkeys(map(key_of, found))), None if after == b"0" else after

    async def set(self, key: str, entry: Entry[Any]) -> None:
        key_names, (until, string) = names(key), _packed(entry)
        await self._changed(key_names, self._scripts.set(key_names[:4], until, string, key_names.channel))

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        key_names, (until, string) = names(key), _packed(entry)
        terms = until, string, key_names.channel, seen or b"", entry.id
        return await self._changed(key_names, SentOnce(self._scripts.replace(key_names[:4], *terms)))

    async def expire(self, key: str) -> bool:
        key_names = names(key)
        return await self._changed(
            key_names, self._scripts.expire([key_names.entry, key_names.lease], b"%d" % FOREVER, key_names.channel)
        )

    async def invalidate(self, key: str) -> bool:
        key_names = names(key)
        return await self._changed(key_names, self._scripts.invalidate(key_names[:4], key_names.channel))

    async def change(self, asked: Sequence[Asked], scopes: Sequence[str]) -> tuple[list[Any], list[Sequence[str]]]:
        """Make all changes in one round trip."""
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

    async def _changed(self, key_names: RedisNames, command: Command) -> bool:
        """Send the command and return its reply. What was read here before is invalid at once: the news may still be on
        their way."""
        try:
            return bool(await self._line.ask(command))
        except EngineError as error:
            await self._judge(error, command)
            raise
        finally:
            self._void(key_names)

    def _void(self, key_names: RedisNames) -> None:
        self._ends.pop(key_names.entry, None)
        self._news.void(key_names.slot)

    async def _judge(self, error: EngineError, command: Command) -> None:
        """Raise TooLarge if the server did not accept this large value, but answers other questions."""
        size = max(map(len, command))
        if size > LARGE and is_silence(error) and await self._answers():
            why = f"the server did not accept {size} bytes, but answers other commands: {error}"
            raise TooLarge(f"{why}; store less, or on a slow link give a larger socket_timeout") from error

    async def _answers(self) -> bool:
        try:
            await self._line.ask((b"PING",))
        except EngineError:
            return False
        return True

    # -- generations --------------------------------------------------------------------------------------------

    async def generations(self, scope: str) -> list[str]:
        now, sample = time.monotonic(), self._generations.sample(scope)
        self._news.follow()
        (reply,), reporter = await self._line.ask_all([self._question(scope, noted=True)])
        return self._take_reply(scope, reply, sample, reporter, now)

    def _question(self, scope: str, *, noted: bool) -> Command:
        """Return the command that asks for the current generation, and with `noted` for those that ended a moment
        ago."""
        own = key_of_scope(scope)
        notes = [_note(ALL), _note(own)] if noted else []
        return self._scripts.generation([ALL, own, _RUN, *notes], *_new(2))

    def _take_reply(
        self, scope: str, reply: list[bytes], sample: tuple[int, int], reporter: int, now: float
    ) -> list[str]:
        """Note the current generation from the reply. Return its name, and those of noted ones."""
        whole, own, *ended = reply
        name = _name_of(whole, own)
        self._generations.put(scope, name, sample, reporter, now)
        if not any(ended):
            return [name]
        wholes, owns = [whole, *_noted(ended[0])], [own, *_noted(ended[1])]
        return [_name_of(each, other) for each in wholes for other in owns]

    async def soften(self, scope: str) -> None:
        key = key_of_scope(scope) if scope else ALL
        try:
            await self._line.ask(self._scripts.soften([key], *_new(2)))
        finally:
            self._generations.forget(scope)

    async def bump(self, scope: str) -> None:
        key = key_of_scope(scope) if scope else ALL
        try:
            await self._line.ask(self._scripts.bump([key, _note(key)], *_new(1), ms(NOTED), b"%d" % MOST))
        finally:
            self._generations.forget(scope)


def _packed(entry: Entry[Any]) -> tuple[bytes, bytes]:
    """Return the ms until the entry's key ends (empty: never), and the entry as a string."""
    end = expiry(entry)
    return b"" if end is None else b"%d" % end, pack(entry, end)


_RUN = b"{stampede}r"


def _note(key: bytes) -> bytes:
    """Return the key that notes generations which ended a moment ago."""
    return b"{stampede}p" + key.removeprefix(ALL)


def _new(count: int) -> list[bytes]:
    """Return ids for new generations. The server uses as many as it needs."""
    return [new_generation().encode() for _ in range(count)]


def _noted(string: bytes) -> list[bytes]:
    return [each.partition(b"@")[0] for each in string.split()]


def _name_of(whole: bytes, own: bytes) -> str:
    """Return a name made of the id of all scopes and the scope's own id, each with what follows a `~`."""
    (whole, _, softer), (own, _, softest) = whole.partition(b"~"), own.partition(b"~")
    name = blake2b(b"|".join((whole, own)), digest_size=6).hexdigest()
    if not softer and not softest:
        return name
    return f"{name}~{blake2b(b'|'.join((softer, softest)), digest_size=6).hexdigest()}"
