"""A codec in front of a shared engine: entries above, bytes below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, cast

from stampede.codecs.envelope import AnotherVersion
from stampede.errors import CodecError, EngineError
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Asked, Busy, Changes, Claims, Failed, Found, Granted, Reply, Store, Ticket

__all__ = ["EncodedClaims", "EncodedStore", "SideKeys"]

BadBytes = Callable[[str, bytes, CodecError], object]


class Coder(Protocol):
    def encode(self, key: str, entry: Entry[Any]) -> bytes: ...
    def decode(self, key: str, blob: bytes) -> Entry[Any]: ...


class _Coded:
    def __init__(self, codec: Coder, report_bad: BadBytes) -> None:
        self._codec = codec
        self._report_bad = report_bad

    def encoded(self, key: str, entry: Entry[Any]) -> Entry[Any]:
        return entry.holding(self._codec.encode(key, entry))

    def decoded(self, key: str, sealed: Entry[Any] | None, lease: bytes | None = None) -> Entry[Any] | None:
        """Return the entry in the bytes, with the time left that the engine tells; None if they are not to be believed.
        With `lease`, only the entry that was computed under it: its id is then that token."""
        if sealed is None:
            return None
        try:
            entry = self._codec.decode(key, sealed.value)
            if lease is not None and entry.id != lease:
                raise CodecError("it was sent as another computation's")
        except AnotherVersion:
            return None
        except CodecError as error:
            self._report_bad(key, sealed.id, error)
            return None
        entry.id = sealed.id
        # What the engine says is in nobody's seal, and goes by a clock that may be set back: it can only take away.
        # (Written so that what is no number is the end.)
        if not sealed.fresh >= entry.fresh:
            entry.fresh = sealed.fresh
        if not sealed.keep >= entry.keep:
            entry.keep = sealed.keep
        return entry


SideKeys = dict[tuple[str, bytes], str]
"""By key and token: the keys of leases that stand beside another version's entry, of holders here and elsewhere. (A
token alone may be that of several keys, as memcached's are.)"""

MOST_BESIDE = 10_000
"""Such leases of which one function knows. The oldest is forgotten, and lost if it still stands."""

LEFT_ALONE = 3600.0
"""Seconds for which an entry of another version of the application is left alone. Then one's own takes its place."""


class EncodedClaims(_Coded):
    """`Claims` of entries over an engine's `Claims` of bytes.

    During a deploy, two versions of an application share a key, and one can't read the other's entry. The second
    version keeps its own entry under a key made from the first one's id: an invalidation by either version ends
    both.
    """

    def __init__(self, port: Claims, codec: Coder, report_bad: BadBytes, store: Store, side_keys: SideKeys) -> None:
        """`side_keys` is shared by all ports of a scope."""
        super().__init__(codec, report_bad)
        self._port = port
        self._store = store
        self._side_keys = side_keys

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        physical, ticket = key, None
        for _ in range(4):
            reply = await self._port.claim(physical, token, ask)
            entry = self.decoded(physical, reply.entry)
            match reply:
                case Found() if entry is not None:
                    return Found(entry, reply.ticket if physical is key else ticket)  # both end with the key's own
                case Found(sealed) if physical is key and self._is_left_alone(key, sealed):
                    physical, ticket = _side_key(key, sealed.id), reply.ticket
                case Found(sealed):
                    ask = replace(ask, seen=sealed.id)  # a miss: the right to replace just these bytes
                case Granted(fence=fence):
                    self._note(token, key, physical)
                    return Granted(entry, fence)
                case Busy(token=holder, lease=lease):
                    self._note(holder, key, physical)
                    return Busy(holder, lease, entry)
                case Failed(verdict=verdict, rest=rest):
                    return Failed(verdict, entry, rest)
        restless = EngineError(f"the engine has unreadable bytes for {key!r}, and new ones each time it is asked")
        restless.partial = True  # of all others it may have what is good
        raise restless

    def _is_left_alone(self, key: str, sealed: Entry[Any]) -> bool:
        try:
            self._codec.decode(key, sealed.value)
        except AnotherVersion as other:
            return other.ttl - sealed.fresh < LEFT_ALONE  # never true without an end: its age is not known
        except CodecError:
            pass
        return False

    def _note(self, token: bytes, key: str, physical: str) -> None:
        if physical is not key:
            if len(self._side_keys) >= MOST_BESIDE:
                with suppress(StopIteration, RuntimeError):  # another thread makes room, too
                    self._side_keys.pop(next(iter(self._side_keys)), None)
            self._side_keys[key, token] = physical

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> Ticket | bool | None:
        physical = self._side_keys.get((key, token), key)
        stored = await self._port.fill(physical, token, self.encoded(physical, entry))
        self._side_keys.pop((key, token), None)
        if stored and physical is not key:
            (first,) = await self._store.get([key])
            return first is not None and _side_key(key, first.id) == physical  # or the key was changed meanwhile
        return stored

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        stood = await self._port.abandon(self._side_keys.get((key, token), key), token, verdict, rest)
        self._side_keys.pop((key, token), None)
        return stood

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        key = self._side_keys.get((key, busy.token), key)
        news = await self._port.wait(key, busy, timeout)
        if news is None:
            return None
        # What was pushed has the lease's token for its id; what was read (memcached) need not.
        entry = self.decoded(key, news.entry, busy.token if news.entry.id == busy.token else None)
        return Found(entry, news.ticket) if entry is not None else None

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        return await self._port.renew(self._side_keys.get((key, token), key), token, lease)


def _side_key(key: str, id: bytes) -> str:
    return f"{key}#{id.hex()}"


class EncodedStore(_Coded):
    """`Store` of entries over an engine's `Store` of bytes."""

    def __init__(self, port: Store, codec: Coder, report_bad: BadBytes) -> None:
        super().__init__(codec, report_bad)
        self._port = port

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        found = await self._port.get(keys)
        return [self.decoded(key, sealed) for key, sealed in zip(keys, found, strict=True)]

    async def set(self, key: str, entry: Entry[Any]) -> None:
        await self._port.set(key, self.encoded(key, entry))

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        return await self._port.replace(key, seen, self.encoded(key, entry))

    async def damaged(self, key: str) -> bytes | None:
        """The id of what is kept, if it is damaged: to its readers it is nothing."""
        (sealed,) = await self._port.get([key])
        try:
            if sealed is not None:
                self._codec.decode(key, sealed.value)
        except AnotherVersion:
            pass
        except CodecError:
            return sealed.id if sealed is not None else None
        return None

    async def expire(self, key: str) -> bool:
        return await self._port.expire(key)

    async def invalidate(self, key: str) -> bool:
        return await self._port.invalidate(key)

    async def change(self, asked: Sequence[Asked], scopes: Sequence[str]) -> tuple[list[Any], list[Sequence[str]]]:
        return await cast("Changes", self._port).change(self.sealed(asked), scopes)  # who asks has made sure

    def sealed(self, asked: Sequence[Asked]) -> list[Asked]:
        """All, before the first is sent: a value that is refused leaves the others as they were."""
        return [
            Asked(verb, (key, *[self.encoded(key, each) if isinstance(each, Entry) else each for each in args]))
            for verb, (key, *args) in asked
        ]

    async def generation(self, scope: str) -> str:
        return await self._port.generation(scope)

    async def generations(self, scope: str) -> Sequence[str]:
        return await self._port.generations(scope)

    async def bump(self, scope: str) -> None:
        await self._port.bump(scope)
