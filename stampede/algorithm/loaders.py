"""How the values of many keys are computed: by one call of one function."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from stampede.algorithm.admission import load_at_origin
from stampede.algorithm.call import Call
from stampede.algorithm.context import Context, EachContext, Inside, running
from stampede.algorithm.flight import Flight
from stampede.algorithm.patience import own_wait_left
from stampede.model.entry import Entry
from stampede.model.result import LeftOut
from stampede.runtime.colour import Colour, ended, lasting, run_blocking

_log = logging.getLogger("stampede")

__all__ = ["BatchFunction", "Computed", "WantedKey", "mapped"]


@dataclass(slots=True)
class WantedKey:
    """A key that this batch may compute, and what is stored for it meanwhile."""

    key: str
    call: Call
    flight: Flight
    existing: Entry[Any] | None = None
    begin: Callable[[], object] = lambda: None  # called when its computation begins

    @property
    def own_wait_left(self) -> float:
        """Seconds for which the caller waits for this key, if it is computed in the background."""
        return own_wait_left(self.call, self.existing)


class Computed(NamedTuple):
    """The outcome of one key's computation."""

    value: Any
    error: BaseException | None
    cost: float


class BatchFunction:
    """A user's function of many keys, called for at most `chunk` keys at once. `names` maps our keys to those that the
    function knows."""

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
        """Return a function that computes this key alone. It raises LeftOut if there is no value."""
        one = partial(self._one, key)
        return one if self._colour.suspending else lambda: run_blocking(one())

    async def _one(self, key: str) -> Any:
        context = running()
        assert isinstance(context, Context)
        return self._picked(await self._values([key], [context]), key)

    def parts(self, wanted: list[WantedKey]) -> Iterable[list[WantedKey]]:
        """Split the keys into parts that are loaded one after the other."""
        size = self._chunk or len(wanted) or 1
        return [wanted[start : start + size] for start in range(0, len(wanted), size)]

    async def load(self, wanted: list[WantedKey]) -> Mapping[str, Computed]:
        """Call the function for these keys, and return the outcome of each."""
        keys = [each.key for each in wanted]
        first = wanted[0]
        contexts = [each.call.context_of_computation() for each in wanted]
        begin = lambda: [each.begin() for each in wanted]  # noqa: E731
        work = load_at_origin(first.call, first.existing, begin, self._values(keys, contexts))
        answer = await _timed(first.call.resources.clock, work)
        try:
            if answer.error is not None:
                return dict.fromkeys(keys, answer)
            return {key: _computed(partial(self._picked, answer.value, key), answer.cost) for key in keys}
        finally:
            del answer  # its error refers to this frame

    async def _values(self, keys: list[str], contexts: list[Context]) -> Mapping[Any, Any]:
        names = [self._names[key] for key in keys]
        each = EachContext(dict(zip(names, contexts, strict=True)))
        with Inside(each):
            values = await self._colour.call(lambda: self._function([*names]))  # a copy, which the function may change
        return mapped(values, names)

    def _picked(self, values: Mapping[Any, Any], key: str) -> Any:
        name = self._names[key]
        if name not in values:
            raise self._nothing(name)
        return lasting(values[name])


def mapped(values: Any, asked: Sequence[Any]) -> Mapping[Any, Any]:
    """Return the result of a function of many keys if it is a mapping. Raise TypeError otherwise."""
    if not isinstance(values, Mapping):
        raise TypeError(
            f"the function of many keys returned {type(values).__name__}: return a mapping of keys to values"
        )
    if values and not any(each in values for each in asked):
        given, kinds = next(iter(values)), {type(each) for each in asked}
        if type(given) not in kinds:  # often ids are integers in query rows and strings in URLs
            _log.warning(
                "a function of many keys was asked for %r, but returned a value for %r: no value is stored; "
                "return a mapping whose keys are those that it was given",
                asked[0],
                given,
            )
    return values


async def _timed(clock: Callable[[], float], work: Awaitable[Any]) -> Computed:
    began = clock()
    return Computed(*await ended(work), clock() - began)


def _computed(get: Callable[[], Any], cost: float) -> Computed:
    """Return one key's value, or its error, which does not affect the other keys."""
    try:
        return Computed(get(), None, cost)
    except LeftOut as nothing:
        return Computed(None, nothing.with_traceback(None), cost)
    except Exception as error:  # raised by the user's mapping
        return Computed(None, error, cost)
