"""The null engine: stores nothing and excludes no caller. For tests, and for switching caching off."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from stampede.engines.kit.url import options_of
from stampede.model.entry import Entry
from stampede.model.ports import Ask, Booked, Busy, Engine, Granted, Held, Looked, Reply, Side, Usage

__all__ = ["NullEngine", "from_url"]


class NullEngine(Engine):
    """An engine that grants every claim and every lock, and stores no value. So each flight computes."""

    scheme = "null"
    rooms = True
    shared = False
    pushes = True

    def __init__(self) -> None:
        keys, locks = _Nothing(), _NoLock()
        self.blocking = self.suspending = Side(keys, keys, locks, _NoLimit(), lists=keys, holds=locks, handover=locks)

    def ping(self) -> float:
        return 0.0

    def close(self) -> None: ...


def from_url(url: str, **options: Any) -> NullEngine:
    """Return the engine of `null://`."""
    options_of(url, options, {})
    return NullEngine()


def check_url(url: str) -> None:
    """Raise OptionError if `from_url` would refuse this URL."""
    options_of(url, {}, {})


def _always(answer: object) -> Any:
    """Return a verb that always gives this answer."""

    async def asked(*asked: object, **terms: object) -> object:
        return answer

    return asked


class _Nothing:
    """Claims and Store without entries. One object serves both colours, because no verb suspends."""

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        return Granted()

    fill, abandon, renew, replace = _always(True), _always(True), _always(True), _always(True)
    wait, set, bump = _always(None), _always(None), _always(None)
    expire, invalidate = _always(False), _always(False)
    generations = _always(("",))

    async def page(self, prefix: str, cursor: Any = None) -> tuple[list[str], Any]:
        return [], None

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        return [None] * len(keys)

    async def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        return dict.fromkeys(keys), [""] * len(scopes)


class _NoLock:
    """Locks that exclude no caller. Their fences grow nevertheless."""

    def __init__(self) -> None:
        self._fences = count(1)

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        return Granted(fence=next(self._fences))

    renew, release, wait = _always(True), _always(True), _always(None)
    hand_over = _always(True)

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return []

    async def held(self, prefix: str = "") -> list[Held]:
        return []


class _NoLimit:
    """Limits that let everything start at once."""

    take = _always(Booked(0.0, True))
    give_back = penalize = _always(None)
    used = _always(Usage(None))

    async def listed(self) -> list[tuple[str, Usage]]:
        return []
