"""The null engine: keeps nothing and excludes nobody, for tests and for switching caching off."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from stampede.engines.kit.url import options_of
from stampede.model.entry import Entry
from stampede.model.ports import Ask, Booked, Busy, Engine, Granted, Held, Reply, Side, Usage

__all__ = ["NullEngine", "from_url"]


class NullEngine(Engine):
    """Grants every claim and every lock, and forgets what it is given: each flight computes."""

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
    """`null://`"""
    options_of(url, options, {})
    return NullEngine()


def check_url(url: str) -> None:
    options_of(url, {}, {})


def _says(answer: object) -> Any:
    """A verb that has but one answer."""

    async def asked(*asked: object, **terms: object) -> object:
        return answer

    return asked


class _Nothing:
    """Claims and Store of nothing, in both colours: no verb suspends."""

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        return Granted()

    fill, abandon, renew, replace = _says(True), _says(True), _says(True), _says(True)
    wait, set, bump = _says(None), _says(None), _says(None)
    expire, invalidate = _says(False), _says(False)
    generation, generations = _says(""), _says(("",))

    async def page(self, prefix: str, cursor: Any = None) -> tuple[list[str], Any]:
        return [], None

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        return [None] * len(keys)


class _NoLock:
    """Locks that lock nothing; their fences grow all the same."""

    def __init__(self) -> None:
        self._fences = count(1)

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        return Granted(fence=next(self._fences))

    renew, release, wait = _says(True), _says(True), _says(None)
    hand_over = _says(True)

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return []

    async def held(self, prefix: str = "") -> list[Held]:
        return []


class _NoLimit:
    """Everything may start at once."""

    take = _says(Booked(0.0, True))
    give_back = penalize = _says(None)
    used = _says(Usage(None))

    async def listed(self) -> list[tuple[str, Usage]]:
        return []
