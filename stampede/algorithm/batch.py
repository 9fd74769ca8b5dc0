"""Many keys at once: each has a flight and a lease, and one function loads all that are missing. `fill.py` decides what
happens to each key, as for a single one: what is served meanwhile, what is served after a failure, and what is
stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf
from time import monotonic
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar
from weakref import ref

from stampede.algorithm.admission import drop_place, leave_origin
from stampede.algorithm.background import BackgroundPlace
from stampede.algorithm.call import Once
from stampede.algorithm.fill import fill
from stampede.algorithm.finish import finish, quietly, served
from stampede.algorithm.flight import Computing, nested
from stampede.algorithm.loaders import BatchFunction, Computed, WantedKey
from stampede.algorithm.patience import Delivery, deadline_error
from stampede.algorithm.scope import ScopeSide, later
from stampede.algorithm.stored import Ahead
from stampede.errors import WaitTimeout
from stampede.leases.keeper import Hold
from stampede.model.entry import Entry
from stampede.model.result import MayCompute, Result, empty, values_of
from stampede.settings.options import Policy

__all__ = ["value_of_each"]

T = TypeVar("T")
OwnOf: TypeAlias = Callable[[str], Mapping[str, Any]]
"""Returns the options of a key that differ from the policy."""


async def value_of_each(
    scope: ScopeSide,
    keys: Collection[str],
    loader: BatchFunction,
    policy: Policy,
    once: Once | None = None,
    own_of: OwnOf = lambda key: {},
) -> dict[str, Any]:
    """Return the value of each key: stored, computed by another caller, or loaded by `loader`. Keys that the loader
    leaves out are left out."""
    look = scope.at_hand if once is None else partial(scope.at_hand_of, once)
    values = {key: found.value for key in keys if (found := look(key)) is not None}
    missing = [key for key in keys if key not in values]
    return values | values_of(await _fetch(scope, missing, loader, policy, once, own_of), policy)


async def _fetch(
    scope: ScopeSide,
    keys: Iterable[str],
    loader: BatchFunction,
    policy: Policy,
    once: Once | None,
    own_of: OwnOf,
    seen: Mapping[str, Entry[Any]] = MappingProxyType({}),
) -> dict[str, Result]:
    """Return the result of each key, without waiting for another lease while holding one. So two batches that have the
    same keys in opposite order cannot block each other."""
    if not keys:
        return {}
    results: dict[str, Result] = {}
    others: Iterable[str] = keys
    start, waited, count = monotonic(), 0.0, 1
    while True:
        batch = _Batch(scope, loader, policy.after(waited, monotonic() - start), once, own_of, seen)
        results |= await batch.claim(others)
        waited += batch.asked
        if not batch.others:
            break
        # A caller that computes one of these keys usually computes several. When the first one is there, the others are
        # too, or can be claimed together. Wait for twice as many keys each time: if a thousand keys ended one by one, a
        # claim after each of them would ask for all that remain a thousand times.
        for key in batch.others[:count]:
            began = monotonic()
            left = policy.after(waited, began - start).with_options(**own_of(key))
            results[key] = await scope.fetch(key, loader.origin(key), left, once=once)
            if not results[key].stored:  # False also if it was computed here after all
                waited += monotonic() - began
        others, count = batch.others[count:], 2 * count
        if not others:
            break
    return {key: result for key, result in results.items() if not result.is_nothing}


class _Batch:
    """One caller's keys. `others` are the keys that other callers compute."""

    def __init__(
        self,
        scope: ScopeSide,
        loader: BatchFunction,
        policy: Policy,
        once: Once | None,
        own_of: OwnOf,
        seen: Mapping[str, Entry[Any]],
    ) -> None:
        self._scope = scope
        self._colour = scope.colour
        self._loader = loader
        self._policy = policy
        self._once = once
        self._own_of = own_of
        self._seen = seen  # entries that are due for refresh
        self._led: dict[str, WantedKey] = {}  # the keys whose flights this batch leads
        self._work: Callable[[], Any]  # returns the coroutine that leads all these flights
        self.others: list[str] = []
        self.asked = 0.0  # seconds spent on asking the engine

    def claim(self, keys: Iterable[str]) -> Coroutine[Any, Any, dict[str, Result]]:
        """Claim the keys, and compute those that are granted. Return the results of both."""
        work = self._claim(keys)
        self._work = ref(work)
        return work

    async def _claim(self, keys: Iterable[str]) -> dict[str, Result]:
        results: dict[str, Result] = {}
        place = BackgroundPlace(self._colour, self._policy) if self._policy.beside else None
        try:
            if place is not None and self._policy.background:
                place.reserve()
            there, granted = await self._ask(keys, place)
            results |= there
            if place is not None and any(each.own_wait_left < inf for each in granted) and place.reserve():
                results |= await self._compute_in_background(place, granted)
            else:
                results |= await self._compute(granted)
        finally:
            if place is not None:
                place.free()
            for key, led in self._led.items() if self._once is not None else ():
                led.call.settle(stored=key in results and results[key].stored)
        await self._scope.keep([(self._led[key].call, result) for key, result in results.items()])
        return results

    # -- the claims -----------------------------------------------------------------------------------------------

    async def _ask(
        self, keys: Iterable[str], place: BackgroundPlace | None
    ) -> tuple[dict[str, Result], list[WantedKey]]:
        """Claim all keys together. Return the results that are known, and the keys that were granted."""
        results: dict[str, Result] = {}
        granted: list[WantedKey] = []
        trouble: BaseException | None = None
        began = monotonic()
        try:
            policies = {key: self._policy.with_options(**self._own_of(key)) for key in keys}
            looks = self._once is None and not self._seen
            ahead = await self._scope.look_ahead({key: each.tags for key, each in policies.items()} if looks else {})
            self.asked = monotonic() - began
            for key, policy in policies.items():
                self._lead(ahead, key, policy, began)
            for key, led in self._led.items():
                call = led.call
                if call.seen is not None and place is not None and not place.reserve():
                    results[key] = later(call.seen)
                    call.may_hold_lease = False
                    call.resources.flights.end(led.flight, None)
            asking = [led for key, led in self._led.items() if key not in results]
            answers = deque(await self._at_once([fill(each.call) for each in asking]))
        except GeneratorExit:
            raise  # nothing can be awaited now: `Flights.end` gives back what was granted
        except BaseException:  # some keys may have been granted by now
            await self._release(self._led.values())
            raise
        answer: Result | BaseException | None = None
        for each in asking:
            answer = answers.popleft()  # popped, because an error in the list would refer to this frame
            if isinstance(answer, MayCompute):
                each.existing = answer.entry
                granted.append(each)
            elif isinstance(answer, Result):
                results[each.key] = answer
            elif isinstance(answer, WaitTimeout):
                self.others.append(each.key)
            else:
                trouble = answer
        del answer
        if trouble is not None:
            try:
                await self._release(granted)
                raise trouble
            finally:
                del trouble
        return results, granted

    async def _at_once(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        """Run each piece of work, and return what it gave. The engine is asked for all of them together."""
        began = monotonic()
        try:
            return await self._scope.at_once(work)
        finally:
            self.asked += monotonic() - began

    def _lead(self, ahead: Ahead, key: str, policy: Policy, began: float) -> None:
        """Lead the key's flight, or add the key to `others` if another caller leads it."""
        call = self._scope.of_many(ahead, key, self._loader.origin(key), policy, began, self._once)
        call.answered_by(self._work())  # without a local variable: a traceback may keep this frame for long
        flight, leading = call.resources.flights.join(call.key, call.loop, anew=call.anew, leader=call)
        if leading:
            self._led[key] = WantedKey(key, call, flight)
            call.seen = None if call.force else self._seen.get(key) or self._scope.core.local_tier.take_due(call.key)
        else:
            flight.leave(call)
            self.others.append(key)

    async def _release(self, held: Iterable[WantedKey]) -> None:
        """Give leases back without a verdict, so that their waiters try by themselves."""
        await self._colour.shielded(self._release_all(list(held)))

    async def _release_all(self, held: Sequence[WantedKey]) -> None:
        try:
            calls = [each.call for each in held]
            abandoned = [quietly(call.resources.port.abandon, call.key, call.token) for call in calls]
            await self._at_once(abandoned)
            for call in calls:
                call.may_hold_lease = False
        finally:
            for each in held:
                each.call.resources.flights.end(each.flight, None)

    # -- the computations -----------------------------------------------------------------------------------------

    async def _compute_in_background(self, place: BackgroundPlace, granted: list[WantedKey]) -> dict[str, Result]:
        """Compute all granted keys in the background, while the caller waits as long as its most patient key allows."""
        delivery: Delivery[dict[str, Result] | BaseException] = Delivery()
        waits = any(each.own_wait_left > 0 or each.existing is None for each in granted)
        longest = max(each.call.policy.hold_of(each.existing.cost if each.existing else 0.0) for each in granted)
        await self._release(granted)  # the background work claims them anew
        work = self._refresh({each.key: each.existing for each in granted}, delivery)
        cancel = place.begin(work, delivery.bell, longest, waits=waits)
        seconds = max(each.own_wait_left for each in granted)
        if seconds > 0:
            await self._wait(delivery, None if seconds == inf else seconds, cancel)
        given = delivery.take() if waits else None
        if isinstance(given, BaseException):
            try:
                raise given
            finally:
                del given
        return given if given is not None else {each.key: _serve_late(each) for each in granted}

    async def _wait(
        self,
        delivery: Delivery[dict[str, Result] | BaseException],
        seconds: float | None,
        cancel: Callable[[], object] | None,
    ) -> None:
        try:
            await self._colour.park(delivery.bell, seconds)
        except GeneratorExit:
            raise
        except BaseException:
            if cancel is not None:
                cancel()
                await self._colour.shielded(self._colour.park(delivery.bell, None))
            raise

    async def _refresh(
        self, existing: dict[str, Entry[Any] | None], delivery: Delivery[dict[str, Result] | BaseException]
    ) -> None:
        """Run a batch of its own in the background, and deliver its results."""
        results: dict[str, Result] = {}
        policy = self._policy.with_options(background=False, patience=None, deadline=None)
        seen = {key: entry for key, entry in existing.items() if entry is not None and entry.fresh > 0}
        try:
            results = await _fetch(self._scope, existing, self._loader, policy, self._once, self._own_of, seen)
            delivery.put({key: result.for_followers() for key, result in results.items()})
        except GeneratorExit:
            raise
        except BaseException as error:  # the caller raises it, if it still waits
            delivery.put(error)
        finally:
            empty(results)
            delivery.bell.ring()

    async def _compute(self, granted: list[WantedKey]) -> dict[str, Result]:
        """Load the keys under their leases, part by part. A part with a failure that nothing covers is the last one."""
        results: dict[str, Result] = {}
        answers: Mapping[str, Computed] = {}
        result: Result | BaseException | None = None
        try:
            with ExitStack() as stack:
                hold, parts, capped = {}, list(self._loader.parts(granted)), self._policy.origin is not None
                for number, part in enumerate(parts, 1):  # later parts are held for longer
                    for each in part:
                        longest = number * each.call.policy.hold_of(
                            each.existing.cost if each.existing is not None else 0.0
                        )
                        held = each.call.resources.hold(each.call, inf if capped else longest)
                        hold[each.key] = stack.enter_context(held)
                        each.call.existing = each.existing
                        if capped:
                            each.begin, each.call.nested = partial(_begin, each, hold[each.key], longest), nested()
                        else:
                            each.flight.computes(each.call.label, each.call.policy.lease, longest)
                stack.enter_context(Computing(*[each.flight for each in granted]))
                for part in parts:
                    answers = await self._loader.load(part)
                    endings = [finish(each.call, each.existing, hold[each.key], *answers[each.key]) for each in part]
                    failed = False
                    for each, result in zip(part, await self._at_once(endings), strict=True):
                        if isinstance(result, BaseException):
                            raise result
                        results[each.key] = result
                        failed = failed or (result.error is not None and not result.is_nothing)
                    await self._leave_origins(part)
                    for each in part:  # waiters for these need not wait for the other parts
                        each.call.resources.flights.end(each.flight, results[each.key])
                    if failed:
                        break
                await self._release([each for each in granted if each.key not in results])
        except BaseException:
            for each in granted:
                drop_place(each.call)
            raise
        finally:
            for each in granted:
                each.call.resources.flights.end(each.flight, results.get(each.key))
            del answers, result  # errors inside them refer to this frame
        return results  # the caller that raises one of the errors drops the others

    async def _leave_origins(self, part: list[WantedKey]) -> None:
        for each in part:
            if each.call.place is not None:
                await leave_origin(each.call)


def _begin(wanted: WantedKey, hold: Hold, longest: float) -> None:
    hold.bound(longest)
    wanted.flight.computes(wanted.call.label, wanted.call.policy.lease, longest)


def _serve_late(wanted: WantedKey) -> Result:
    """Return the stored value because the caller no longer waits. Raise WaitTimeout if there is none."""
    if wanted.existing is None:
        raise deadline_error(wanted.call)
    return served(wanted.call, wanted.existing, "computing", until=wanted.call.policy.lease)
