"""A codec in front of a shared engine: entries on this side, bytes on the engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, cast

from stampede.codecs.envelope import AnotherVersion
from stampede.errors import CodecError, EngineError
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Asked, Busy, Changes, Claims, Failed, Found, Granted, Looked, Reply, Store, Ticket

__all__ = ["EncodedClaims", "EncodedStore", "SideKeys"]

BadBytes = Callable[[str, bytes, CodecError], object]


class Coder(Protocol):
    @property
    def signed(self) -> bool: ...
    def encode(self, key: str, entry: Entry[Any]) -> bytes: ...
    def decode(self, key: str, blob: bytes) -> Entry[Any]: ...
    def tags(self, key: str, blob: bytes) -> bytes: ...


class _Coded:
    def __init__(self, codec: Coder, report_bad: BadBytes) -> None:
        self._codec = codec
        self._report_bad = report_bad

    def encoded(self, key: str, entry: Entry[Any]) -> Entry[Any]:
        return entry.holding(self._codec.encode(key, entry))

    def decoded(self, key: str, sealed: Entry[Any] | None, lease: bytes | None = None) -> Entry[Any] | None:
        """Decode the entry, with the time left that the engine reports. Return None if the bytes cannot be trusted.
        With `lease`, the entry is accepted only if it was computed under that lease, so that its id is that token."""
        if sealed is None:
            return None
        try:
            entry = self._codec.decode(key, sealed.value)
            if lease is not None and entry.id != lease:
                raise CodecError("it carries the id of another computation")
        except AnotherVersion:
            return None
        except CodecError as error:
            self._report_bad(key, sealed.id, error)
            return None
        entry.id = sealed.id
        # The engine's durations are in no seal, and its clock may be set back: they can only shorten the entry's life.
        # (Written so that NaN ends it.)
        if not sealed.fresh >= entry.fresh:
            entry.fresh = sealed.fresh
        if not sealed.keep >= entry.keep:
            entry.keep = sealed.keep
        return entry


SideKeys = dict[tuple[str, bytes], str]
"""By key and token of a lease: the side key that the lease is for, if another version's entry has the key. The holders
of these leases may be here or in other processes. The token alone is not enough: on memcached, the leases of several
keys may have the same one."""

MOST_BESIDE = 10_000
"""The largest number of such leases that one function remembers. The oldest is dropped; if it was valid, it is lost."""

LEFT_ALONE = 3600.0
"""Seconds for which an entry of another version of the application is left alone. After that it is replaced."""


class EncodedClaims(_Coded):
    """`Claims` of entries, on top of an engine's `Claims` of bytes. During a deploy, two versions of an application
    share a key, and one cannot read the other's entry. The second version stores its own entry under a side key, made
    from the id of the first one's entry. An invalidation by either version ends both."""

    def __init__(self, port: Claims, codec: Coder, report_bad: BadBytes, store: Store, side_keys: SideKeys) -> None:
        """Create the port. All ports of a scope share `side_keys`."""
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
                    # Both entries end when the key changes.
                    return Found(entry, reply.ticket if physical is key else ticket)
                case Found(sealed) if physical is key and self._is_left_alone(key, sealed):
                    physical, ticket = _side_key(key, sealed.id), reply.ticket
                case Found(sealed):
                    ask = replace(ask, seen=sealed.id)  # a miss: claim the right to replace just these bytes
                case Granted(fence=fence):
                    self._note(token, key, physical)
                    return Granted(entry, fence)
                case Busy(token=holder, lease=lease):
                    self._note(holder, key, physical)
                    return Busy(holder, lease, entry)
                case Failed(verdict=verdict, rest=rest):
                    return Failed(verdict, entry, rest)
        unreadable = EngineError(
            f"the engine has unreadable bytes for {key!r}, and different ones each time it is asked"
        )
        unreadable.partial = True  # other keys may be readable
        raise unreadable

    def _is_left_alone(self, key: str, sealed: Entry[Any]) -> bool:
        try:
            self._codec.decode(key, sealed.value)
        except AnotherVersion as other:
            # An entry without an end is not left alone, as its age is unknown.
            return other.ttl - sealed.fresh < LEFT_ALONE
        except CodecError:
            pass
        return False

    def _note(self, token: bytes, key: str, physical: str) -> None:
        if physical is not key:
            if len(self._side_keys) >= MOST_BESIDE:
                with suppress(StopIteration, RuntimeError):  # another thread may make room at the same time
                    self._side_keys.pop(next(iter(self._side_keys)), None)
            self._side_keys[key, token] = physical

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> Ticket | bool | None:
        physical = self._side_keys.get((key, token), key)
        sealed = self.encoded(physical, entry)
        if not self._codec.signed:  # a signature also says when it was made
            sealed.same_as = entry.same_as
        stored = await self._port.fill(physical, token, sealed)
        self._side_keys.pop((key, token), None)
        if stored and physical is not key:
            (first,) = await self._store.get([key])
            return first is not None and _side_key(key, first.id) == physical  # False if the key was changed meanwhile
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
        # A pushed entry's id is the token of the lease. One that was read (memcached) may have another id.
        entry = self.decoded(key, news.entry, busy.token if news.entry.id == busy.token else None)
        return Found(entry, news.ticket) if entry is not None else None

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        return await self._port.renew(self._side_keys.get((key, token), key), token, lease)


def _side_key(key: str, id: bytes) -> str:
    return f"{key}#{id.hex()}"


class EncodedStore(_Coded):
    """`Store` of entries, on top of an engine's `Store` of bytes."""

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
        """Return the id of the stored bytes if they are damaged. Readers see nothing there."""
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
        return await cast("Changes", self._port).change(self.sealed(asked), scopes)  # the caller has checked

    async def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        return await self._port.look_too(keys, scopes)  # what is found is not decoded

    def sealed(self, asked: Sequence[Asked]) -> list[Asked]:
        """Encode all entries before the first question is sent: if one value is refused, nothing has changed."""
        return [
            Asked(verb, (key, *[self.encoded(key, each) if isinstance(each, Entry) else each for each in args]))
            for verb, (key, *args) in asked
        ]

    async def generations(self, scope: str) -> Sequence[str]:
        return await self._port.generations(scope)

    async def bump(self, scope: str) -> None:
        await self._port.bump(scope)
