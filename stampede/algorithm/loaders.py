"""How the values of many keys are had: by one call of one function."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from stampede.algorithm.admission import load_at_origin
from stampede.algorithm.call import Call
from stampede.algorithm.flight import Flight
from stampede.algorithm.patience import own_wait_left
from stampede.model.entry import Entry
from stampede.model.result import LeftOut
from stampede.runtime.colour import Colour, ended, lasting, run_blocking

_log = logging.getLogger("stampede")

__all__ = ["BatchFunction", "Computed", "WantedKey", "mapped"]


@dataclass(slots=True)
class WantedKey:
    """One key that is ours to compute, and what is kept of it meanwhile."""

    key: str
    call: Call
    flight: Flight
    kept: Entry[Any] | None = None
    begin: Callable[[], object] = lambda: None  # its computation does, now

    @property
    def own_wait_left(self) -> float:
        """Seconds that its caller waits for it, if it is computed beside him."""
        return own_wait_left(self.call, self.kept)


class Computed(NamedTuple):
    """What came of one key's computation."""

    value: Any
    error: BaseException | None
    cost: float


class BatchFunction:
    """One function of many keys, for `chunk` of them at once at most. `names` are the keys as it knows them."""

    def __init__(
        self,
        colour: Colour,
        function: Callable[[list[Any]], Any],
        names: Mapping[str, Any],
        *,
        chunk: int | None = None,
        nothing: Callable[[Any], LeftOut] = LeftOut,
    ) -> None:
        self._colour = colour
        self._function = function
        self._names = names
        self._chunk = chunk
        self._nothing = nothing

    def origin(self, key: str) -> Callable[[], Any]:
        """How a key is computed by itself; LeftOut: there is nothing to be had."""
        one = partial(self._one, key)
        return one if self._colour.suspending else lambda: run_blocking(one())

    async def _one(self, key: str) -> Any:
        return self._picked(await self._values([key]), key)

    def parts(self, wanted: list[WantedKey]) -> Iterable[list[WantedKey]]:
        """How many of them are loaded at once; a failure that nothing covers ends it."""
        size = self._chunk or len(wanted) or 1
        return [wanted[start : start + size] for start in range(0, len(wanted), size)]

    async def load(self, wanted: list[WantedKey]) -> Mapping[str, Computed]:
        """What came of each."""
        keys = [each.key for each in wanted]
        first = wanted[0]
        work = load_at_origin(first.call, first.kept, lambda: [each.begin() for each in wanted], self._values(keys))
        answer = await _timed(first.call.resources.clock, work)
        try:
            if answer.error is not None:
                return dict.fromkeys(keys, answer)
            return {key: _computed(partial(self._picked, answer.value, key), answer.cost) for key in keys}
        finally:
            del answer  # its error refers to this frame

    async def _values(self, keys: list[str]) -> Mapping[Any, Any]:
        names = [self._names[key] for key in keys]
        values = await self._colour.call(lambda: self._function([*names]))  # which is the function's own
        return mapped(values, names)

    def _picked(self, values: Mapping[Any, Any], key: str) -> Any:
        name = self._names[key]
        if name not in values:
            raise self._nothing(name)
        return lasting(values[name])


def mapped(values: Any, asked: Sequence[Any]) -> Mapping[Any, Any]:
    """What a function of many keys has returned, if it is a mapping."""
    if not isinstance(values, Mapping):
        raise TypeError(f"the function of many keys returned {type(values).__name__}: it must map keys to values")
    if values and not any(each in values for each in asked):
        given, kinds = next(iter(values)), {type(each) for each in asked}
        if type(given) not in kinds:  # the ids of a query's rows are mostly of another type than those of a URL
            _log.warning(
                "a function of many keys was asked for %r, and has a value of %r: none is kept", asked[0], given
            )
    return values


async def _timed(clock: Callable[[], float], work: Awaitable[Any]) -> Computed:
    began = clock()
    return Computed(*await ended(work), clock() - began)


def _computed(get: Callable[[], Any], cost: float) -> Computed:
    """One key's value, or what is wrong with it: its neighbours are kept all the same."""
    try:
        return Computed(get(), None, cost)
    except LeftOut as nothing:
        return Computed(None, nothing.with_traceback(None), cost)
    except Exception as error:  # the mapping is the user's own
        return Computed(None, error, cost)
