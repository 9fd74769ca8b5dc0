"""The ports of a cluster: each verb goes to the shard of its key, and many keys of one shard are asked together."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from stampede.engines.redis.clients import RedisAddress
from stampede.engines.redis.locks import tag_of
from stampede.engines.redis.shard import Ports
from stampede.engines.redis.verbs import RedisKeys
from stampede.engines.redis.wire import names
from stampede.errors import EngineError
from stampede.model.entry import Entry
from stampede.model.ports import Asked, Held, Looked, Usage
from stampede.runtime.colour import Colour, run_blocking, settled

__all__ = ["GENERATIONS", "SLOTS", "RoutedPorts", "Verb", "reason", "slot_of"]

T = TypeVar("T")

SLOTS = 1 << 14


Verb = Callable[[Ports], Awaitable[T]]


def _slot(tag: bytes) -> int:
    """Return the slot of all keys with this tag (without its braces)."""
    return crc_hqx(tag, 0) % SLOTS


def slot_of(name: str, *, lock: bool = False) -> int:
    """Return the slot of a key, or with `lock` of a lock or a limit."""
    return _slot(tag_of(name) if lock else names(name).lease[1:25])


GENERATIONS = _slot(b"stampede")


def _routed(port: str, verb: str, *, always: bool = False) -> Any:
    """Return a method that runs a verb of one key, lock or limit on its shard."""

    async def asked(self: _Routed, name: str, *terms: Any, **more: Any) -> Any:
        def ask(ports: Ports) -> Any:
            return getattr(getattr(ports, port), verb)(name, *terms, **more)

        return await self._at(name, ask, always=always)

    return asked


def _where_generations_are(verb: str) -> Any:
    async def asked(self: RoutedKeys, scope: str) -> Any:
        return await self.of_generations(lambda keys: getattr(keys, verb)(scope))

    return asked


class Ways(Protocol):
    """The access to each shard of a cluster (`cluster.py`)."""

    async def of_key(self, slot: int, colour: Colour, verb: Verb[T], *, always: bool = False) -> T: ...
    async def at(self, slot: int, colour: Colour, verb: Verb[T], *, always: bool = False) -> T: ...
    async def owners(self, slots: Sequence[int], colour: Colour) -> list[RedisAddress | None]: ...


class _Routed:
    """Locks, or limits, of one colour."""

    def __init__(self, ways: Ways, colour: Colour) -> None:
        self._ways = ways
        self._colour = colour

    async def _at(self, name: str, verb: Verb[T], *, always: bool = False) -> T:
        return await self._ways.at(slot_of(name, lock=True), self._colour, verb, always=always)

    async def _masters(self) -> list[int]:
        """Return one slot of each master."""
        owners = await self._ways.owners(range(SLOTS), self._colour)
        return list({owner: slot for slot, owner in enumerate(owners)}.values())

    async def _of_all(self, verb: Verb[list[T]]) -> list[T]:
        """Return the answers of all masters, asked one after the other."""
        slots = await self._masters()
        return [each for slot in slots for each in await self._ways.at(slot, self._colour, verb)]


class RoutedLocks(_Routed):
    """Locks of one colour."""

    acquire, renew, hand_over = (_routed("locks", verb) for verb in ("acquire", "renew", "hand_over"))
    holder, release = _routed("locks", "holder"), _routed("locks", "release", always=True)
    wait = _routed("locks", "wait", always=True)

    async def held(self, prefix: str = "") -> list[Held]:
        return await self._of_all(lambda ports: ports.locks.held(prefix))


class RoutedLimits(_Routed):
    """Limits of one colour."""

    take, give_back = _routed("limits", "take"), _routed("limits", "give_back")
    penalize, used = _routed("limits", "penalize"), _routed("limits", "used")

    async def listed(self) -> list[tuple[str, Usage]]:
        return sorted(await self._of_all(lambda ports: ports.limits.listed()))


class RoutedKeys(_Routed):
    """Claims and Store of one colour."""

    claim, look, abandon, renew = (_routed("keys", verb) for verb in ("claim", "look", "abandon", "renew"))
    set, replace = _routed("keys", "set"), _routed("keys", "replace")
    expire, invalidate = _routed("keys", "expire"), _routed("keys", "invalidate")
    fill, show, wait = (_routed("keys", verb, always=True) for verb in ("fill", "show", "wait"))
    generation, generations = map(_where_generations_are, ("generation", "generations"))
    bump, soften = map(_where_generations_are, ("bump", "soften"))

    async def _at(self, name: str, verb: Verb[T], *, always: bool = False) -> T:
        return await self._ways.of_key(slot_of(name), self._colour, verb, always=always)

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        """Return the answers of many verbs, with one round trip for each shard."""

        async def ask(keys: RedisKeys, some: Sequence[Asked]) -> list[Any]:
            answers = keys.ask_many(some)
            for answer in answers:
                if isinstance(answer, EngineError) and not answer.partial:  # a partial error is one key's answer
                    raise answer
            return answers

        always = any(question.verb == "fill" for question in asked)
        return run_blocking(self._many(asked, lambda question: question.args[0], ask, always=always))

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        """Return the stored entries. Keys of a shard that is down count as missing, as long as another shard
        answers."""
        answers = await self._many(keys, lambda key: key, lambda port, some: port.get(some))
        lost = [isinstance(answer, EngineError) and answer.partial for answer in answers]
        if not all(lost):
            answers = [None if gone else answer for answer, gone in zip(answers, lost, strict=True)]
        return _whole(answers)

    async def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        """Return what `look` finds, and the generations. The shards of the keys are asked first. If one of them is
        down, its keys are left out: the claim finds out why."""

        async def look(port: RedisKeys, some: Sequence[str]) -> list[Any]:
            found, _ = await port.look_too(some, ())
            return [{key: found[key]} if key in found else {} for key in some]

        answers = await self._many(keys, lambda key: key, look)
        answers = _whole([{} if isinstance(each, EngineError) and each.partial else each for each in answers])
        found = {key: each for answer in answers for key, each in answer.items()}
        return found, (await self.of_generations(lambda keys: keys.look_too((), scopes)))[1] if scopes else []

    async def page(self, prefix: str, cursor: Any = None) -> tuple[list[str], Any]:
        """Return a page of keys. The masters come one after the other, each found by one of its slots."""
        if cursor is None:
            cursor = await self._masters(), None
        (slot, *more), at = cursor
        found, at = await self._ways.at(slot, self._colour, lambda ports: ports.keys.page(prefix, at), always=True)
        if at is not None:
            return found, ([slot, *more], at)
        return found, (more, None) if more else None

    async def change(self, asked: Sequence[Asked], scopes: Sequence[str]) -> tuple[list[Any], list[Sequence[str]]]:
        """Make the changes with one round trip to each shard."""

        async def change(keys: RedisKeys, some: Sequence[Asked]) -> list[Any]:
            return (await keys.change(some, []))[0]

        changed = _whole(await self._many(asked, lambda each: each.args[0], change))
        return changed, (await self.of_generations(lambda keys: keys.change([], scopes)))[1] if scopes else []

    async def of_generations(self, verb: Callable[[RedisKeys], Awaitable[T]]) -> T:
        try:
            return await self._ways.at(GENERATIONS, self._colour, lambda ports: verb(ports.keys))
        except EngineError as error:
            error.partial = False  # without generations, no key can be asked for
            raise

    async def _many(
        self,
        items: Sequence[T],
        key: Callable[[T], str],
        verb: Callable[[RedisKeys, Sequence[T]], Awaitable[list[Any]]],
        *,
        always: bool = False,
    ) -> list[Any]:
        """Return an answer, or an EngineError, for each item. Items of one shard are asked together; an event loop asks
        the shards in parallel."""
        slots = [slot_of(key(item)) for item in items]
        parts: dict[RedisAddress | None, list[int]] = {}
        try:
            owners = await self._ways.owners(slots, self._colour) if slots else []
        except EngineError as error:
            return [error] * len(items)
        for number, owner in enumerate(owners):
            parts.setdefault(owner, []).append(number)

        async def part(numbers: list[int]) -> list[Any]:
            slot, some = slots[numbers[0]], [items[number] for number in numbers]
            try:
                return await self._ways.of_key(slot, self._colour, lambda ports: verb(ports.keys, some), always=always)
            except EngineError as error:
                if len(some) == 1 or not _is_about_one(error):
                    return [error] * len(some)
            return [answer for number in numbers for answer in await part([number])]

        if self._colour.suspending:
            found = await settled(map(part, parts.values()))
        else:
            found = [await part(numbers) for numbers in parts.values()]
        answers: list[Any] = [None] * len(items)
        for numbers, some in zip(parts.values(), found, strict=True):
            if isinstance(some, BaseException):
                raise some
            for number, answer in zip(numbers, some, strict=True):
                answers[number] = answer
        return answers


class RoutedPorts:
    """The ports of a cluster in one colour."""

    def __init__(self, ways: Ways, colour: Colour) -> None:
        self.keys, self.locks, self.limits = (
            RoutedKeys(ways, colour),
            RoutedLocks(ways, colour),
            RoutedLimits(ways, colour),
        )


def _is_about_one(error: EngineError) -> bool:
    """Return whether the error is about one of many slots, which has moved or is about to. The others have answers."""
    from redis import exceptions

    return isinstance(reason(error), (exceptions.AskError, exceptions.TryAgainError))


def _whole(answers: list[Any]) -> list[Any]:
    """Return the answers, or raise the first error among them."""
    for answer in answers:
        if isinstance(answer, EngineError):
            raise answer
    return answers


def reason(error: EngineError) -> BaseException | None:
    """Return the library's error behind this one. None if the cause is in this process."""
    cause = error.__cause__
    return reason(cause) if isinstance(cause, EngineError) else cause
