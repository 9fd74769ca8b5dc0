"""The verbs that change a key, as they are sent: each is a call of its script."""

from __future__ import annotations

from typing import Any

from stampede.engines.kit.pool import Once
from stampede.engines.redis.scripts import Command, Scripts
from stampede.engines.redis.wire import FOREVER, expiry, ms, names, pack, verdict_string
from stampede.entry import Entry, Verdict
from stampede.ports import Asked

__all__ = ["Commands"]

VERDICT = 5.0
"""Seconds for which a verdict is told to those who waited for its lease."""

SMALL = 4096
"""Bytes of an entry that is sent along with the news of it."""


class Commands:
    """By the names of the verbs, with their terms."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    def of(self, asked: Asked) -> Command:
        command: Command = getattr(self, asked.verb)(*asked.args)
        return command

    def fill(self, key: str, token: bytes, entry: Entry[Any], *, follow: bool = False) -> Command:
        its, (until, string) = names(key), _packed(entry)
        keys = its[:1] if follow and not self._scripts.sharded else its[:4]  # as in claims
        terms = token, entry.id, until, string, its.channel, b"%d" % SMALL
        return self._scripts.fill(keys, *terms, *[b"follow"] * follow)

    def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> Command:
        its = names(key)
        told = b"" if verdict is None else verdict_string(verdict)
        why = told or verdict_string(Verdict("failed"))
        resting = ms(rest) if rest > 0 else b"0"
        return self._scripts.abandon(its[1:4], token, told, ms(VERDICT), resting, why, its.channel)

    def renew(self, key: str, token: bytes, lease: float) -> Command:
        return self._scripts.prolong([names(key).lease], token, ms(lease))

    def set(self, key: str, entry: Entry[Any]) -> Command:
        its, (until, string) = names(key), _packed(entry)
        return self._scripts.set(its[:4], until, string, its.channel)

    def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> Command:
        its, (until, string) = names(key), _packed(entry)
        return Once(self._scripts.replace(its[:4], until, string, its.channel, seen or b"", entry.id))

    def expire(self, key: str) -> Command:
        its = names(key)
        return self._scripts.expire([its.entry, its.lease], b"%d" % FOREVER, its.channel)

    def invalidate(self, key: str) -> Command:
        its = names(key)
        return self._scripts.invalidate(its[:4], its.channel)


def _packed(entry: Entry[Any]) -> tuple[bytes, bytes]:
    """Ms until the entry's key ends, if it does, and the entry as a string."""
    end = expiry(entry)
    return b"" if end is None else b"%d" % end, pack(entry, end)
