"""Leases that may be ours and that nobody holds, since the reply to their claim was lost: on their way back.

They are given back together, by a thread of their own, as soon as their engine can be asked: in nobody's time, however
many they are, and also when nobody calls any more.

Where their question was given up without an answer, what isn't there may come yet: a closed connection takes nothing
back of what lies in a slow link or in the buffers of a server that stands still, and in what order a server reads what
has come to it is its own affair. So it is asked for again for a while.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from typing import Any, Protocol

from stampede import forks
from stampede.colour import run_blocking
from stampede.errors import EngineClosed, EngineError
from stampede.ports import Asked, Engine
from stampede.threads import begun

__all__ = ["PAUSE", "LockReturns", "Returns", "at_exit", "end_all"]

_log = logging.getLogger("stampede")

PAUSE = 1.0
"""Seconds between two tries."""

AGAIN = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Seconds behind each of which what wasn't there, and may come yet, is asked for again. A server that stood still reads
it in a moment; a link that has lost it sends it again within as long as it was gone."""

MOST = 10_000
"""Leases to be given back: in an outage of hours the oldest have ended by themselves."""

AT_EXIT = 0.5
"""Seconds that the end of the program waits for the next answer of an engine; beyond, what is owed ends by itself. On a
busy machine tenths are soon gone."""

MOST_AGAIN = 1000
"""Those of them that are asked for again: one by one, of a server that has just come back."""

_clock = time.monotonic


class Health(Protocol):
    """What is known of the engine, and is told of it."""

    @property
    def down(self) -> bool: ...
    def may_ask(self) -> bool: ...
    def failed(self, error: EngineError) -> None: ...
    def answered(self) -> None: ...


class _Debt:
    """One that may stand."""

    __slots__ = ("due", "key", "late", "tries")

    def __init__(self, key: str, late: bool) -> None:
        self.key = key
        self.late = late  # its question may come to the server behind us
        self.tries = 0
        self.due = 0.0  # when it is asked for again


class _Owed(ABC):
    """What is to be given back to one engine."""

    locks = False  # what there is

    def __init__(self) -> None:
        self.answers = 0  # so far
        self._last: _LastTry | None = None  # for the thread, as the interpreter ends
        self._start_again()
        _all.add(self)
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        """In a forked child: they are the parent's."""
        # By their tokens; another one each time.
        self._due: dict[bytes, _Debt] = {}
        self._again: dict[bytes, _Debt] = {}  # wasn't there, and may have come since
        self._lock = threading.RLock()  # a finalizer may add one in the middle of this
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._due) + len(self._again)

    def add(self, key: str, token: bytes, *, late: bool = False) -> None:
        """Have it given back; it may not be there at all. `late`: or not yet, as its question has had no answer."""
        with self._lock:
            self._again.pop(token, None)
            self._due[token] = _Debt(key, late)
            self._begin()
            if self._thread is None:
                # If there is none to be had, the next one tries again, or the end of the interpreter.
                self._thread = begun("stampede-returns", _tend, weakref.ref(self), self._hurry)

    def forget(self, token: bytes) -> None:
        """Its question has had an answer after all, and nothing came of it."""
        with self._lock:
            self._due.pop(token, None)
            self._again.pop(token, None)

    def end(self) -> None:
        """There is nobody to give them back to any more."""
        with self._lock:
            self._due.clear()
            self._again.clear()
        self._hurry.set()

    def hurry(self) -> None:
        """The engine can be asked, as somebody has just seen."""
        if self._due:
            self._hurry.set()

    def give_back(self, held: Iterable[tuple[str, bytes]], patience: float) -> None:
        """These, and what is owed already, before the engine is closed: within so many seconds, whatever it does."""
        with self._lock:
            self._due |= {token: _Debt(key, False) for key, token in held}
        if self:
            thread = begun("stampede-closing", lambda: _quietly(self, last=True))
            if thread is not None:
                thread.join(patience)

    def hand(self, last: _LastTry) -> bool:
        """Have our thread make it. False: there is none."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                return False
            self._last = last
        self._hurry.set()
        return True

    def try_all(self, *, last: bool = False) -> bool:
        """Give back what can be given back now, unless the engine has just been found down; the last time even then.
        False: it is down, as has been seen."""
        due = self._now_due(_clock(), last)
        if not due or not (self._may_ask() or last):
            return True
        trouble = False
        answers = self._given_back([(token, debt.key) for token, debt in due])
        now = _clock()
        for (token, debt), answer in zip(due, answers, strict=True):
            if isinstance(answer, EngineClosed):
                self.end()
                return True
            if not isinstance(answer, EngineError):
                self._given(token, debt, now, there=answer is not False)
            elif not answer.partial and not trouble:
                trouble = True
                if not last:  # then nobody needs to hear any more
                    self._failed(answer)
        if not trouble and not last:
            self._answered()
        return not trouble

    def _now_due(self, now: float, last: bool) -> list[tuple[bytes, _Debt]]:
        with self._lock:
            for token, debt in [*self._again.items()]:
                if last or debt.due <= now:
                    self._again.pop(token, None)
                    self._due[token] = debt
            for some, most in () if last else ((self._due, MOST), (self._again, MOST_AGAIN)):
                for token in [*some][:-most]:
                    some.pop(token, None)
            return [*self._due.items()]

    def _given(self, token: bytes, debt: _Debt, now: float, *, there: bool) -> None:
        with self._lock:
            if self._due.get(token) is not debt:
                return  # it was granted behind this, and is owed again
            self._due.pop(token, None)
            if debt.late and not there and debt.tries < len(AGAIN):
                debt.due = now + AGAIN[debt.tries]
                debt.tries += 1
                self._again[token] = debt

    def pause(self) -> float:
        """Seconds until the next try."""
        now = _clock()
        return max(min([PAUSE, *[debt.due - now for debt in [*self._again.values()]]]), 0.0)

    def _one_by_one(
        self, due: list[tuple[bytes, str]], give_back: Callable[[str, bytes], Coroutine[Any, Any, object]]
    ) -> list[object]:
        answers: list[object] = []
        engine, down = self.engine(), dict[Hashable, EngineError]()
        for token, name in due:
            server = None if engine is None else engine.server_of(name, lock=self.locks)
            if server in down:
                answers.append(down[server])
                continue
            try:
                answers.append(run_blocking(give_back(name, token)))
                self.answers += 1
            except EngineError as error:
                if not error.partial:
                    return answers + [error] * (len(due) - len(answers))
                answers.append(error)
                if server is not None:  # the next question to it would take as long
                    down[server] = error
        return answers

    @abstractmethod
    def engine(self) -> Engine | None:
        """Where they are. None: that was closed."""

    @abstractmethod
    def _given_back(self, due: list[tuple[bytes, str]]) -> list[object]:
        """For each what came of it: an EngineError, False if it wasn't there, or anything else."""

    def _may_ask(self) -> bool:
        return True

    def _failed(self, error: EngineError) -> None:
        return

    def _answered(self) -> None:
        return

    def _begin(self) -> None:
        """There is something, from now on."""
        return

    def _end(self) -> None:
        """There is nothing any more."""
        return

    def ended(self) -> bool:
        """Whether the thread may go, as there is nothing left."""
        with self._lock:
            if not self:
                self._thread = None
                self._end()
            return not self


class Returns(_Owed):
    """The leases of one cache."""

    def __init__(self, engine: Engine, health: Health) -> None:
        super().__init__()
        self._engine = engine
        self._health = weakref.ref(health)

    def engine(self) -> Engine:
        return self._engine

    def _may_ask(self) -> bool:
        health = self._health()
        return health is not None and (not health.down or health.may_ask())

    def _failed(self, error: EngineError) -> None:
        health = self._health()
        if health is not None:
            health.failed(error)

    def _answered(self) -> None:
        health = self._health()
        if health is not None:
            health.answered()

    def _given_back(self, due: list[tuple[bytes, str]]) -> list[object]:
        many, claims = self._engine.many, self._engine.claims
        if many is not None:
            return many.ask_many([Asked("abandon", (key, token)) for token, key in due])
        assert claims is not None
        return self._one_by_one(due, claims.abandon)


class LockReturns(_Owed):
    """The locks of one engine, which closes itself when nobody has it any more: as long as there are any, this does."""

    locks = True

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._refer = weakref.ref(engine)
        self._keeps: Engine | None = None
        self._together = True

    def engine(self) -> Engine | None:
        return self._refer()

    def _begin(self) -> None:
        self._keeps = self._refer()

    def _end(self) -> None:
        self._keeps = None

    def _given_back(self, due: list[tuple[bytes, str]]) -> list[object]:
        engine = self._refer()
        if engine is None or engine.locks is None:
            return [None] * len(due)
        if engine.releases is None or not self._together:
            self._together = True
            return self._one_by_one(due, engine.locks.release)
        try:
            return engine.releases.release_many([(name, token) for token, name in due])
        except EngineError as error:
            self._together = False  # it may be about one of them: the next time that one fails alone
            return [error] * len(due)


def _tend(refer: Callable[[], _Owed | None], hurry: threading.Event) -> None:
    pause = PAUSE
    while True:
        hurry.wait(pause)
        hurry.clear()
        returns = refer()
        if returns is None:
            return
        if returns._last is not None:
            returns._last.make()
            return
        _quietly(returns)
        if returns.ended():
            return
        pause = returns.pause()
        del returns


def _quietly(returns: _Owed, *, last: bool = False) -> bool:
    try:
        return returns.try_all(last=last)
    except BaseException:  # an engine's own bug, or one that was thrown in: the next try may do
        _log.exception("leases could not be given back: it is tried again, or they end by themselves")
        return True


def end_all(engine: Engine) -> None:
    """What is owed to it ends with its time."""
    for owing in list(_all):
        if owing.engine() is engine:
            owing.end()


def _at_exit() -> None:
    _give_back_all(list(_all))


def _give_back_all(owing: Sequence[_Owed]) -> None:
    """For the last time: of all engines at once, and of one that is down once."""
    owed: dict[Engine, list[_Owed]] = {}
    for returns in owing:
        engine = returns.engine()
        if engine is not None and returns:
            owed.setdefault(engine, []).append(returns)
    tries = [_LastTry(its) for its in owed.values()]
    for each in tries:
        each.begin()
    for each in tries:
        each.wait()


class _LastTry:
    """To give back what is owed to one engine, as the interpreter ends: beside us, since the engine may hang."""

    def __init__(self, owing: Sequence[_Owed]) -> None:
        self._owing = owing
        self._ended = threading.Event()

    def begin(self) -> None:
        """By a thread of its own; or, where none can be begun by now (Python 3.12), by one that is there."""
        if begun("stampede-closing", self.make) is not None:
            return
        if not any(returns.hand(self) for returns in self._owing) and not any(lend(self.make) for lend in _lenders):
            self.make()  # as long as the engine takes

    def make(self) -> None:
        try:
            for returns in self._owing:
                if not _quietly(returns, last=True):
                    return
        finally:
            self._ended.set()

    def wait(self) -> None:
        """For as long as there are answers."""
        heard = self._answers
        while not self._ended.wait(AT_EXIT) and self._answers > heard:
            heard = self._answers

    @property
    def _answers(self) -> int:
        return sum(returns.answers for returns in self._owing)


def at_exit(gather: Callable[[], object], lend: Callable[[Callable[[], object]], bool]) -> None:
    """Have this called before what is owed by then is given back: who registers later runs sooner. `lend`: has a thread
    do something, if it has one that is free."""
    atexit.register(gather)
    _lenders.append(lend)


_lenders: list[Callable[[Callable[[], object]], bool]] = []

_all: weakref.WeakSet[_Owed] = weakref.WeakSet()
weakref.finalize(_all, int)  # the hook that closes engines at exit is there now: who registers later runs sooner
atexit.register(_at_exit)
