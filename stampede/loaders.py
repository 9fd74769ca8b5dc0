"""How the values of many keys are had: by one call of one function, or by one call for each."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

from stampede import decisions
from stampede.admission import capped
from stampede.call import Call
from stampede.colour import Bell, Colour, ended, lasting, run_blocking, running_loop, until_one_fails
from stampede.entry import Entry, new_id
from stampede.errors import WAY_OUT, RecursiveComputation
from stampede.flight import Flight
from stampede.land import covered, served
from stampede.outcome import Landing, LeftOut, own_copy
from stampede.patience import alone
from stampede.threads import begun, with_signals_of_caller

_log = logging.getLogger("stampede")

__all__ = ["Answer", "Loader", "OneByOne", "Together", "Wanted", "mapped"]


@dataclass(slots=True)
class Wanted:
    """One key that is ours to compute, and what is kept of it meanwhile."""

    key: str
    call: Call
    flight: Flight
    kept: Entry[Any] | None
    begin: Callable[[], object] = lambda: None  # its computation does, now


class Answer(NamedTuple):
    """What came of one key's computation."""

    value: Any
    error: BaseException | None
    cost: float


class Loader(Protocol):
    def origin(self, key: str) -> Callable[[], Any]:
        """How a key is computed by itself; LeftOut: there is nothing to be had."""
        ...

    def parts(self, wanted: list[Wanted]) -> Iterable[list[Wanted]]:
        """How many of them are loaded at once; a failure that nothing covers ends it."""
        ...

    async def load(self, wanted: list[Wanted]) -> Mapping[str, Answer]:
        """What came of each; of those that are missing, nobody has asked."""
        ...


class Together:
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
        one = partial(self._one, key)
        return one if self._colour.suspending else lambda: run_blocking(one())

    async def _one(self, key: str) -> Any:
        return self._picked(await self._values([key]), key)

    def parts(self, wanted: list[Wanted]) -> Iterable[list[Wanted]]:
        size = self._chunk or len(wanted) or 1
        return [wanted[start : start + size] for start in range(0, len(wanted), size)]

    async def load(self, wanted: list[Wanted]) -> Mapping[str, Answer]:
        keys = [each.key for each in wanted]
        first = wanted[0]
        work = capped(first.call, first.kept, lambda: [each.begin() for each in wanted], self._values(keys))
        answer = await _had(first.call.resources.clock, work)
        try:
            if answer.error is not None:
                return dict.fromkeys(keys, answer)
            return {key: _answer(partial(self._picked, answer.value, key), answer.cost) for key in keys}
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


async def _had(clock: Callable[[], float], work: Awaitable[Any]) -> Answer:
    began = clock()
    return Answer(*await ended(work), clock() - began)


def _answer(get: Callable[[], Any], cost: float) -> Answer:
    """One key's value, or what is wrong with it: its neighbours are kept all the same."""
    try:
        return Answer(get(), None, cost)
    except LeftOut as nothing:
        return Answer(None, nothing.with_traceback(None), cost)
    except Exception as error:  # the mapping is the user's own
        return Answer(None, error, cost)


class OneByOne:
    """A function of one key for each; all at once, where the colour can, or by so many threads. A failure that nothing
    covers ends it.

    While it is at work, its caller leads the flights of all its keys. A computation that asks for another one of them
    gets it from here: to follow that flight would be to wait for oneself.
    """

    def __init__(self, origin: Callable[[str], Callable[[], Any]], workers: int = 1) -> None:
        self.origin = origin
        self._workers = workers

    def parts(self, wanted: list[Wanted]) -> Iterable[list[Wanted]]:
        return [wanted] if wanted else []

    async def load(self, wanted: list[Wanted]) -> Mapping[str, Answer]:
        run = _Run(wanted[0].call.resources.colour, min(self._workers, len(wanted)))
        works = [_Work(run, each, self.origin(each.key)) for each in wanted]
        try:
            if run.colour.suspending:
                await run.all_at_once(works)
            elif run.workers > 1:
                run.side_by_side(works)
            else:
                await run.in_turn(works)
        except GeneratorExit:
            raise
        except BaseException as error:  # the caller's own cancellation
            if all(work.answer is not None for work in works):
                raise  # it came too late for any of them
            _fail(works, error)
        try:
            return {work.wanted.key: work.answer for work in works if work.answer is not None}
        finally:
            works.clear()  # the errors in them refer to this frame


def _fail(works: list[_Work], error: BaseException) -> None:
    for work in works:
        work.answer = work.answer or Answer(None, error, 0.0)


class _Run:
    """One run over the keys of a batch, until one fails."""

    def __init__(self, colour: Colour, workers: int) -> None:
        self.colour = colour
        self.workers = workers
        self.loop = running_loop() if colour.suspending else None
        self.ended = False

    async def in_turn(self, works: list[_Work]) -> None:
        for work in works:
            try:
                if (await work.done()).error is not None and not work.covered:
                    return
            finally:
                del work  # its error refers to this frame

    def side_by_side(self, works: list[_Work]) -> None:
        """By threads, of which the caller's is one; each computation in a copy of the caller's context.

        They are begun in their order: before one that fails there is none that nobody has begun, and so the first
        failure of all is the one that there would be without threads.
        """
        left, context, over = deque(works), copy_context(), threading.Event()

        def take() -> BaseException | None:
            """What has interrupted this thread, and not just failed."""
            while left and not over.is_set():
                try:
                    work = left.popleft()
                except IndexError:
                    break  # another thread was faster
                if not work.take():
                    continue  # one that has asked for it is at it
                try:
                    context.copy().run(run_blocking, work.done())
                finally:
                    work.ring()  # or another thread would wait for its end, and its caller for that thread
                error = work.answer.error if work.answer is not None else None
                try:
                    if error is not None and not work.covered:
                        over.set()
                        return None if isinstance(error, Exception) else error
                finally:
                    del error, work  # it refers to this frame
            return None

        helping = with_signals_of_caller(take)
        threads = [thread for _ in range(self.workers - 1) if (thread := begun("stampede-many", helping)) is not None]
        interruption: BaseException | None = None
        try:
            interruption = take()
            _join(threads)
        except BaseException as error:
            interruption = error
            over.set()
            _join(threads)  # nobody is left behind, unless we are interrupted once more
        finally:
            over.set()
            if interruption is not None:  # and not what another one has failed with meanwhile
                for work in works:
                    if work.answer is None or work.answer.error is not None:
                        work.answer = Answer(None, interruption, 0.0)
            del interruption, threads, take, helping  # it refers to this frame

    async def all_at_once(self, works: list[_Work]) -> None:
        await until_one_fails([work.begin() for work in works], self._end)

    def _end(self) -> None:
        self.ended = True


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


class _Work:
    """One key's computation."""

    _asks: frozenset[_Work] = frozenset()  # of this batch, that it waits for

    def __init__(self, run: _Run, wanted: Wanted, origin: Callable[[], Any]) -> None:
        self.wanted = wanted
        self.answer: Answer | None = None
        self._run = run
        self._origin = origin
        self._begun = False
        self._bell = Bell()
        wanted.flight.answers = self.answers

    @property
    def covered(self) -> bool:
        """Its caller will not hear of its failure."""
        error = self.answer.error if self.answer is not None else None
        return error is not None and covered(self.wanted.call, self.wanted.kept, error)

    async def begin(self) -> None:
        """As one of many at once: raises what ends them all."""
        answer = None
        try:
            answer = await self.done()
            if answer.error is not None and not self.covered:
                raise answer.error
        finally:
            del self, answer  # the error refers to this frame

    def take(self) -> bool:
        """Whether it is the caller's to compute: nobody has begun it."""
        with decisions.lock:
            begun, self._begun = self._begun, True
        return not begun

    def ring(self) -> None:
        """Whoever waits for it is to look."""
        self._bell.ring()

    async def done(self) -> Answer:
        if self.answer is not None:
            return self.answer
        self._begun = True
        before = _inside.get()
        _inside.set(ref(self))
        try:
            wanted = self.wanted
            work = capped(wanted.call, wanted.kept, wanted.begin, self._run.colour.call(self._origin))
            answer = await _had(wanted.call.resources.clock, work)
        finally:
            _inside.set(before)  # no reset: one that is destroyed ends in another context
        try:
            if answer.error is not None and self._run.ended:  # cancelled, as another one has failed
                raise answer.error
            self.answer = answer
            self._bell.ring()
            return answer
        finally:
            del self, answer  # the error refers to this frame

    async def answers(self, call: Call) -> Landing:
        """For a computation of this very batch: the value as it is, or will be."""
        inside = _inside.get()
        asking = inside() if inside is not None else None
        if self.answer is None and asking is not None:
            with decisions.lock:  # two threads may ask for each other's
                circle = self._waits_for(asking)
                if not circle:
                    asking._asks |= {self}
            if circle:
                raise RecursiveComputation(f"the computation of {call.label!r} asked for its own key: {WAY_OUT}")
            try:
                await self._ended()
            finally:
                asking._asks -= {self}
        if self.answer is None:
            return await alone(call)
        value, error, _ = self.answer
        if self.covered:
            return served(call, self.wanted.kept, "failed")
        if error is not None:
            return Landing(error=own_copy(error))
        return Landing(Entry(value, new_id(), ttl=0.0, fresh=0.0, keep=0.0))

    def _waits_for(self, other: _Work) -> bool:
        return self is other or any(each._waits_for(other) for each in self._asks)

    async def _ended(self) -> None:
        """Have it computed, if it can be waited for here."""
        if self._run.loop is not None and self._run.loop is running_loop():
            await self._run.colour.park(self._bell, None)
        elif self._run.loop is None and self.take():
            await self.done()
        elif self._run.workers > 1:
            await self._run.colour.park(self._bell, None)


_inside: ContextVar[ref[_Work] | None] = ContextVar("stampede_batch", default=None)  # weakly, as a flight's own is
