"""Many keys at once: a flight and a lease for each, and one way to load what is missing.

What becomes of a key is decided in `fill.py`, as for a single one: what is served meanwhile, what covers a failure,
what is kept.
"""

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
from stampede.errors import WaitTimeout
from stampede.model.entry import Entry
from stampede.model.policy import Policy
from stampede.model.result import MayCompute, Result, empty, values_of
from stampede.outages.keeper import Hold

__all__ = ["value_of_each"]

T = TypeVar("T")
TtlOf: TypeAlias = Callable[[str], Callable[[Any], Any] | None]
"""How long a key's value is fresh, where that is not its policy's."""


async def value_of_each(
    scope: ScopeSide,
    keys: Collection[str],
    loader: BatchFunction,
    policy: Policy,
    once: Once | None = None,
    ttl_of: TtlOf = lambda key: None,
) -> dict[str, Any]:
    """What is there, what others compute, and what `loader` gives for the rest; what that leaves out is left out."""
    look = scope.at_hand if once is None else partial(scope.at_hand_of, once)
    values = {key: found.value for key in keys if (found := look(key)) is not None}
    missing = [key for key in keys if key not in values]
    return values | values_of(await _fetch(scope, missing, loader, policy, once, ttl_of), policy)


async def _fetch(
    scope: ScopeSide,
    keys: Iterable[str],
    loader: BatchFunction,
    policy: Policy,
    once: Once | None,
    ttl_of: TtlOf,
    seen: Mapping[str, Entry[Any]] = MappingProxyType({}),
) -> dict[str, Result]:
    """Nothing is waited for while a lease is held: two batches in opposite order can't block each other."""
    if not keys:
        return {}
    results: dict[str, Result] = {}
    others: Iterable[str] = keys
    start, waited, one_by_one = monotonic(), 0.0, 1
    while True:
        batch = _Batch(scope, loader, policy.after(waited, monotonic() - start), once, ttl_of, seen)
        results |= await batch.claim(others)
        waited += batch.asked
        if not batch.others:
            break
        # Who computes one of them computes more of them, mostly: when that one is there, the others are, too, or are to
        # be had by all at once. After twice as many each time, or a thousand others that end one by one would have
        # all that are left be asked for a thousand times.
        for key in batch.others[:one_by_one]:
            began = monotonic()
            left = _with(policy.after(waited, began - start), ttl_of(key))
            results[key] = await scope.fetch(key, loader.origin(key), left, once=once)
            if not results[key].stored:  # or it was computed here after all
                waited += monotonic() - began
        others, one_by_one = batch.others[one_by_one:], 2 * one_by_one
        if not others:
            break
    return {key: result for key, result in results.items() if not result.is_nothing}


def _with(policy: Policy, ttl: Callable[[Any], Any] | None) -> Policy:
    return policy if ttl is None else policy.with_options(ttl=ttl)


class _Batch:
    """One caller's keys; `others` are those that somebody else computes."""

    def __init__(
        self,
        scope: ScopeSide,
        loader: BatchFunction,
        policy: Policy,
        once: Once | None,
        ttl_of: TtlOf,
        seen: Mapping[str, Entry[Any]],
    ) -> None:
        self._scope = scope
        self._colour = scope.colour
        self._loader = loader
        self._policy = policy
        self._once = once
        self._ttl_of = ttl_of
        self._seen = seen  # what is due
        self._led: dict[str, WantedKey] = {}  # their flights are ours
        self._work: Callable[[], Any]  # gives the coroutine that leads all these flights
        self.others: list[str] = []
        self.asked = 0.0  # for so many seconds

    def claim(self, keys: Iterable[str]) -> Coroutine[Any, Any, dict[str, Result]]:
        """What is there, and what is ours to compute."""
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
        """Claim all at once: what is there, and what we may compute."""
        results: dict[str, Result] = {}
        granted: list[WantedKey] = []
        trouble: BaseException | None = None
        began = monotonic()
        try:
            today = await self._scope.today()
            self.asked = monotonic() - began
            for key in keys:
                self._lead(today, key, began)
            for key, led in self._led.items():
                call = led.call
                if call.seen is not None and place is not None and not place.reserve():
                    results[key] = later(call.seen)
                    call.may_hold_lease = False
                    call.resources.flights.end(led.flight, None)
            asking = [led for key, led in self._led.items() if key not in results]
            answers = deque(await self._at_once([fill(each.call) for each in asking]))
        except GeneratorExit:
            raise  # nothing can be awaited: what they may owe is given back with their flights
        except BaseException:  # some may have been granted by now
            await self._release(self._led.values())
            raise
        answer: Result | BaseException | None = None
        for each in asking:
            answer = answers.popleft()  # an error refers to this frame: at the end it has none left
            if isinstance(answer, MayCompute):
                each.kept = answer.entry
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
        """Return what each piece of work gave. The engine is asked for all of them together."""
        began = monotonic()
        try:
            return await self._scope.at_once(work)
        finally:
            self.asked += monotonic() - began

    def _lead(self, today: str, key: str, began: float) -> None:
        """Lead the key's flight, unless somebody does."""
        local_tier = self._scope.core.local_tier
        policy = _with(self._policy, self._ttl_of(key))
        call = self._scope.of_many(today, key, self._loader.origin(key), policy, began, self._once)
        call.sample = local_tier.sample(call.key)
        call.answered_by(self._work())  # and no name for it here: frames may be kept for long
        flight, leading = call.resources.flights.join(call.key, call.loop, anew=call.anew, leader=call)
        if leading:
            self._led[key] = WantedKey(key, call, flight)
            call.seen = None if call.force else self._seen.get(key) or local_tier.take_due(call.key)
        else:
            flight.leave(call)
            self.others.append(key)

    async def _release(self, held: Iterable[WantedKey]) -> None:
        """Give leases back without a word: who waited for one tries by itself."""
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
        """Have all computed in that place, as long as their caller waits for the most patient of them."""
        delivery: Delivery[dict[str, Result] | BaseException] = Delivery()
        waits = any(each.own_wait_left > 0 or each.kept is None for each in granted)
        longest = max(each.call.policy.hold_of(each.kept.cost if each.kept else 0.0) for each in granted)
        await self._release(granted)  # who computes there claims them for himself
        work = self._refresh({each.key: each.kept for each in granted}, delivery)
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
        self, kept: dict[str, Entry[Any] | None], delivery: Delivery[dict[str, Result] | BaseException]
    ) -> None:
        """A batch of its own, whose caller waits for it."""
        results: dict[str, Result] = {}
        policy = self._policy.with_options(background=False, patience=None, deadline=None)
        seen = {key: entry for key, entry in kept.items() if entry is not None and entry.fresh > 0}
        try:
            results = await _fetch(self._scope, kept, self._loader, policy, self._once, self._ttl_of, seen)
            delivery.put({key: result.for_followers() for key, result in results.items()})
        except GeneratorExit:
            raise
        except BaseException as error:  # its caller hears of it, or nobody
            delivery.put(error)
        finally:
            empty(results)
            delivery.bell.ring()

    async def _compute(self, granted: list[WantedKey]) -> dict[str, Result]:
        """Load under all the leases; then each key lands by itself."""
        results: dict[str, Result] = {}
        answers: Mapping[str, Computed] = {}
        result: Result | BaseException | None = None
        try:
            with ExitStack() as stack:
                hold, parts, capped = {}, list(self._loader.parts(granted)), self._policy.origin is not None
                for number, part in enumerate(parts, 1):  # those that come later are held for as much longer
                    for each in part:
                        longest = number * each.call.policy.hold_of(each.kept.cost if each.kept is not None else 0.0)
                        held = each.call.resources.hold(each.call, inf if capped else longest)
                        hold[each.key] = stack.enter_context(held)
                        if capped:
                            each.begin, each.call.nested = partial(_begin, each, hold[each.key], longest), nested()
                        else:
                            each.flight.computes(each.call.label, each.call.policy.lease, longest)
                stack.enter_context(Computing(*[each.flight for each in granted]))
                for part in parts:
                    answers = await self._loader.load(part)
                    landed = [finish(each.call, each.kept, hold[each.key], *answers[each.key]) for each in part]
                    failed = False
                    for each, result in zip(part, await self._at_once(landed), strict=True):
                        if isinstance(result, BaseException):
                            raise result
                        results[each.key] = result
                        failed = failed or (result.error is not None and not result.is_nothing)
                    await self._leave_origins(part)
                    for each in part:  # who waits for these needn't wait for the other parts
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
            del answers, result  # their errors refer to this frame
        return results  # those in here are let go of by whoever raises one

    async def _leave_origins(self, part: list[WantedKey]) -> None:
        for each in part:
            if each.call.place is not None:
                await leave_origin(each.call)


def _begin(wanted: WantedKey, hold: Hold, longest: float) -> None:
    hold.bound(longest)
    wanted.flight.computes(wanted.call.label, wanted.call.policy.lease, longest)


def _serve_late(wanted: WantedKey) -> Result:
    """What is kept, as nobody waits any longer for what is computed."""
    if wanted.kept is None:
        raise deadline_error(wanted.call)
    return served(wanted.call, wanted.kept, "computing", until=wanted.call.policy.lease)
