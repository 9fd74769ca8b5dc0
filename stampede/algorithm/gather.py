"""Many questions in one round trip, for blocking callers. Each coroutine's question is put aside until all coroutines
wait for an answer; then all are asked at once. In an event loop this is not needed: what is asked in one turn of the
loop is sent together."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from stampede.engines.kit.many_at_once import PutAside, together
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Asked, Busy, Claims, Found, Looks, Reply

__all__ = ["Gathering", "run_together"]

T = TypeVar("T")


class Gathering(Claims, Looks):
    """`Claims`, and some verbs of `Store`, that wait until `run_together` asks them."""

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        reply: Reply = await PutAside(Asked("claim", (key, token, ask)))
        return reply

    async def look(self, key: str) -> Found | None:
        found: Found | None = await PutAside(Asked("look", (key,)))
        return found

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        stored: bool = await PutAside(Asked("fill", (key, token, entry)))
        return stored

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        stood: bool = await PutAside(Asked("abandon", (key, token, verdict, rest)))
        return stood

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        return None  # a call for many keys waits for none of them

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        renewed: bool = await PutAside(Asked("renew", (key, token, lease)))
        return renewed

    async def set(self, key: str, entry: Entry[Any]) -> None:
        await PutAside(Asked("set", (key, entry)))

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        replaced: bool = await PutAside(Asked("replace", (key, seen, entry)))
        return replaced


def run_together(
    work: Sequence[Coroutine[Any, Any, T]], ask: Callable[[Sequence[Asked]], list[Any]]
) -> list[T | BaseException]:
    """Run the coroutines, and return what each returned or raised. `ask` sends many questions, and returns a result or
    an error for each."""

    def answered(questions: dict[int, Any]) -> dict[int, Any]:
        return _in_place(questions, iter(ask([*_each(questions)])))

    return together(work, answered, BaseException)


def _each(questions: dict[int, Any]) -> Iterator[Asked]:
    """Return the questions, also those of a coroutine that runs others (`asked_together`)."""
    for asked in questions.values():
        if isinstance(asked, dict):
            yield from _each(asked)
        else:
            yield asked


def _in_place(questions: dict[int, Any], answers: Iterator[Any]) -> dict[int, Any]:
    return {
        number: _in_place(asked, answers) if isinstance(asked, dict) else next(answers)
        for number, asked in questions.items()
    }
