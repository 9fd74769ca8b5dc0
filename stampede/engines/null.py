"""The null engine: keeps nothing and excludes nobody, for tests and for switching caching off."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from stampede.engines.url import options_of
from stampede.entry import Entry, Verdict
from stampede.ports import Ask, Busy, Engine, Found, Granted, Reply

__all__ = ["NullEngine", "from_url"]


class NullEngine(Engine):
    """Grants every claim and every lock, and forgets what it is given: each flight computes."""

    scheme = "null"
    shared = False
    fenced = True
    pushes = True
    coherent = False

    def __init__(self) -> None:
        self.claims = self.aclaims = self.store = self.astore = self.lists = self.alists = _Nothing()
        self.locks = self.alocks = _NoLock()

    def ping(self) -> float:
        return 0.0

    def close(self) -> None: ...


def from_url(url: str, **options: Any) -> NullEngine:
    """`null://`"""
    options_of(url, options, {})
    return NullEngine()


def check_url(url: str) -> None:
    options_of(url, {}, {})


class _Nothing:
    """Claims and Store of nothing, in both colours: no verb suspends."""

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        return Granted()

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        return True

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        return True

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        return None

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        return True

    async def page(self, prefix: str, cursor: Any = None) -> tuple[list[str], Any]:
        return [], None

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        return [None] * len(keys)

    async def set(self, key: str, entry: Entry[Any]) -> None: ...

    async def expire(self, key: str) -> bool:
        return False

    async def invalidate(self, key: str) -> bool:
        return False

    async def generation(self, scope: str) -> str:
        return ""

    async def generations(self, scope: str) -> Sequence[str]:
        return [await self.generation(scope)]

    async def bump(self, scope: str) -> None: ...


class _NoLock:
    """Locks that lock nothing; their fences grow all the same."""

    def __init__(self) -> None:
        self._fences = count(1)

    async def acquire(self, name: str, token: bytes, lease: float, *, waits: bool = False) -> Granted | Busy:
        return Granted(fence=next(self._fences))

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return True

    async def release(self, name: str, token: bytes) -> bool:
        return True

    async def wait(self, name: str, busy: Busy, timeout: float) -> None: ...
