"""Many keys at once: a flight and a lease for each, one call of the function for what is missing."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from stampede.call import Call
from stampede.colour import Colour, kept_whole, run_blocking, until_one_fails
from stampede.core import Scope
from stampede.entry import Entry
from stampede.errors import CodecError, EngineError, WaitTimeout
from stampede.fill import claim, land, quietly
from stampede.flight import Flight
from stampede.outcome import Landing
from stampede.policy import Policy
from stampede.ports import Granted

__all__ = ["fetch_many", "one_by_one"]

Loader = Callable[[list[str]], Any]


@dataclass(slots=True)
class _Grant:
    """One key that is ours to compute."""

    key: str
    call: Call
    flight: Flight
    kept: Entry[Any] | None


async def fetch_many(
    scope: Scope, colour: Colour, keys: Iterable[str], loader: Loader, policy: Policy
) -> dict[str, Landing]:
    """What is there, what others compute, and what `loader` gives for the rest; keys that it leaves out are left out.

    Nothing is waited for while a lease is held: two batches in opposite order can't block each other.
    """
    landings: dict[str, Landing] = {}
    granted, others, trouble = await _ask_all(scope, colour, keys, policy, landings)
    if trouble is not None:
        await _let_go(scope, colour, granted)
        raise trouble
    if granted:
        landings |= await _compute(scope, colour, granted, loader)
    for key in others:
        landing = await scope.fetch(colour, key, _origin(colour, key, loader), policy)
        if not isinstance(landing.error, _LeftOut):
            landings[key] = landing
    return landings


async def _ask_all(
    scope: Scope, colour: Colour, keys: Iterable[str], policy: Policy, landings: dict[str, Landing]
) -> tuple[list[_Grant], list[str], BaseException | None]:
    """Claim all at once: what is ours to compute, what others compute, an error; what is there goes to `landings`."""
    granted: list[_Grant] = []
    others: list[str] = []
    trouble: BaseException | None = None
    led: list[tuple[str, Call, Flight]] = []
    impatient = policy.with_options(wait=0)
    try:
        for key in keys:
            call = await scope.of_many(colour, key, impatient)
            flight, leading = call.means.flights.join(call.key, call.loop)
            if leading:
                call.flight = flight
                led.append((key, call, flight))
            else:
                flight.leave()
                others.append(key)
        answers = await scope.at_once(colour, [_claimed(call) for _, call, _ in led])
    except GeneratorExit:
        for _, call, flight in led:
            call.means.drop(call)
            call.means.flights.end(flight, None)
        raise
    except BaseException:  # some may have been granted by now
        await colour.whole(_let_go(scope, colour, [_Grant(key, call, flight, None) for key, call, flight in led]))
        raise
    for (key, call, flight), answer in zip(led, answers, strict=True):
        if isinstance(answer, Granted):
            granted.append(_Grant(key, call, flight, answer.entry))
            continue
        call.means.flights.end(flight, answer if isinstance(answer, Landing) else None)
        if isinstance(answer, Landing):
            landings[key] = answer
        elif isinstance(answer, BaseException):
            trouble = answer
        else:
            others.append(key)
    return granted, others, trouble


async def _claimed(call: Call) -> Landing | Granted | None:
    """A value, a lease, or None: somebody else computes it."""
    try:
        return await claim(call)
    except WaitTimeout:
        return None
    except EngineError as error:
        return Landing(error=error, as_of=call.now)


async def _compute(scope: Scope, colour: Colour, granted: list[_Grant], loader: Loader) -> dict[str, Landing]:
    """One call of the loader under all the leases; then each key lands by itself."""
    landings: dict[str, Landing] = {}
    clock = granted[0].call.means.clock
    began = clock()
    try:
        with ExitStack() as stack:
            holds = [stack.enter_context(grant.call.means.hold(grant.call, _longest(grant))) for grant in granted]
            for grant in granted:
                stack.enter_context(grant.flight.inside())
            values, error = await _loaded(colour, [grant.key for grant in granted], loader)
            cost = clock() - began
            landed: list[tuple[_Grant, Coroutine[Any, Any, Landing]]] = []
            for grant, hold in zip(granted, holds, strict=True):
                if error is not None or grant.key in values:
                    value, wrong = (None, error) if error is not None else _whole(values[grant.key])
                    landed.append((grant, land(grant.call, grant.kept, hold, value, wrong, cost)))
            left_out = [grant for grant in granted if error is None and grant.key not in values]
            answers = await scope.at_once(colour, [landing for _, landing in landed])
            for (grant, _), answer in zip(landed, answers, strict=True):
                if isinstance(answer, BaseException):
                    raise answer
                landings[grant.key] = answer
            await _let_go(scope, colour, left_out)
            for grant in left_out:
                granted.remove(grant)
    except BaseException:
        for grant in granted:
            if grant.key not in landings:
                grant.call.means.drop(grant.call)
        raise
    finally:
        for grant in granted:
            grant.call.means.flights.end(grant.flight, landings.get(grant.key))
    return landings


def _longest(grant: _Grant) -> float:
    return grant.call.policy.hold_of(grant.kept.cost if grant.kept is not None else 0.0)


async def _loaded(colour: Colour, keys: list[str], loader: Loader) -> tuple[Mapping[str, Any], BaseException | None]:
    try:
        return await _load(colour, keys, loader), None
    except GeneratorExit:
        raise
    except BaseException as error:
        return {}, error


async def _load(colour: Colour, keys: list[str], loader: Loader) -> Mapping[str, Any]:
    values = await colour.call(lambda: loader(keys))
    if not isinstance(values, Mapping):
        raise TypeError(f"the function of many keys returned {type(values).__name__}: it must map keys to values")
    return values


def one_by_one(colour: Colour, origins: Mapping[str, Callable[[], Any]]) -> Loader:
    """A loader that calls a function for each key; all at once, where the colour can, and until one fails."""
    each = partial(_each, colour, origins)
    return each if colour.suspending else lambda keys: run_blocking(each(keys))


async def _each(colour: Colour, origins: Mapping[str, Callable[[], Any]], keys: list[str]) -> dict[str, Any]:
    """What is computed until one fails is kept; what isn't begun or ended then is left out."""
    if colour.suspending:
        ended = await until_one_fails([colour.call(origins[key]) for key in keys])
        return {keys[n]: _Failure(v) if isinstance(v, BaseException) else v for n, v in ended.items()}
    answers: dict[str, Any] = {}
    for key in keys:
        try:
            answers[key] = await colour.call(origins[key])
        except Exception as error:
            answers[key] = _Failure(error)
            break
    return answers


class _Failure:
    """What a key has instead of a value."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _whole(value: Any) -> tuple[Any, BaseException | None]:
    """One key's value, or what is wrong with it: its neighbours are kept all the same."""
    if isinstance(value, _Failure):
        return None, value.error
    try:
        return kept_whole(value), None
    except CodecError as refusal:
        return None, refusal


def _origin(colour: Colour, key: str, loader: Loader) -> Callable[[], Any]:
    one = partial(_one, colour, key, loader)
    return one if colour.suspending else lambda: run_blocking(one())


async def _one(colour: Colour, key: str, loader: Loader) -> Any:
    values = await _load(colour, [key], loader)
    if key not in values:
        raise _LeftOut
    if isinstance(values[key], _Failure):
        raise values[key].error
    return values[key]


class _LeftOut(Exception):
    """The loader has no value for the key that it was asked for."""


async def _let_go(scope: Scope, colour: Colour, grants: list[_Grant]) -> None:
    """Give leases back without a word: who waited for one tries by itself."""
    try:
        calls = [grant.call for grant in grants]
        await scope.at_once(colour, [quietly(call.means.port.abandon, call.key, call.token) for call in calls])
    finally:
        for grant in grants:
            grant.call.means.flights.end(grant.flight, None)
