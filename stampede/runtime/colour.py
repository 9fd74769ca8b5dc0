"""The boundary between blocking and suspending code. The algorithm is written once, as coroutines: `BLOCKING` gives
them means that never suspend, so that one `send` runs them to their end; `SUSPENDING` gives them asyncio's."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar
from weakref import ref

from stampede.errors import CodecError
from stampede.runtime import greenlets, process_lock
from stampede.runtime.event_loops import Loop, PerLoop

__all__ = [
    "BLOCKING",
    "PROMPT",
    "SUSPENDING",
    "Bell",
    "Callers",
    "Colour",
    "Loop",
    "Stopped",
    "after_commit",
    "called",
    "ended",
    "hold_task",
    "lasting",
    "run_blocking",
    "running_loop",
    "settled",
    "soon",
]

T = TypeVar("T")


def running_loop() -> Loop | None:
    """Return the event loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine whose ports never suspend."""
    try:
        if threading.Lock is not greenlets.known:
            greenlets.adapt()
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except Stopped as stopped:
        own = stopped.end
    except BaseException:
        del coroutine  # or it would not be destroyed while somebody keeps the traceback
        raise
    else:
        coroutine.close()
        raise RuntimeError("a port of the blocking colour suspended")
    try:
        raise own
    finally:
        del own  # it would refer to itself through this frame


class Stopped(RuntimeError):
    """A function's StopIteration on its way through coroutines, none of which lets one pass. In this very form it comes
    out of those that somebody awaits, as Python has it; `run_blocking` and `ended` give the function's own."""

    def __init__(self, end: StopIteration) -> None:
        super().__init__("coroutine raised StopIteration")
        self.__cause__ = self.end = end


async def ended(work: Awaitable[T]) -> tuple[T | None, BaseException | None]:
    """Return what it gave, or what it raised. An error is caught here, in a frame that refers to nothing: through a
    frame with the caller or its flight it would refer to itself, until the collector came."""
    try:
        return await work, None
    except GeneratorExit:
        raise
    except BaseException as failure:
        return None, failure.end if isinstance(failure, Stopped) else failure


def called(function: Callable[[], T]) -> T:
    """Its value, inside a coroutine."""
    try:
        return function()
    except StopIteration as end:
        raise Stopped(end) from end


class Bell:
    """Rings once, for listeners of both colours, in any thread. Ringing takes no lock: a finalizer or a signal handler
    may ring or listen in the middle of it."""

    __slots__ = ("_listeners", "rung")

    def __init__(self) -> None:
        self.rung = False
        self._listeners: list[Callable[[], object]] | None = None  # until there are any, which most bells never see

    def ring(self) -> None:
        """Call every listener. A bell that is rung twice calls a listener twice, until that forgets it."""
        self.rung = True
        if self._listeners:
            for listener in self._listeners[:]:
                listener()

    def listen(self, listener: Callable[[], object]) -> bool:
        """Have `listener` called at the ring. False: it has rung already, and `listener` needn't wait."""
        if self._listeners is None:
            with process_lock.lock:
                if self._listeners is None:
                    self._listeners = []
        self._listeners.append(listener)
        if not self.rung:  # asked behind the line above: a ring from now on finds the listener
            return True
        self.forget(listener)
        return False

    def forget(self, listener: Callable[[], object]) -> None:
        try:
            if self._listeners:
                self._listeners.remove(listener)
        except ValueError:
            pass  # it was forgotten before


def lasting(value: T) -> T:
    """The value, if it can be had more than once; a CodecError says what to return instead."""
    if type(value) in _LASTING:  # the others are asked for their abstract classes, which takes a microsecond
        return value
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # it will never be awaited, and needn't warn of that
        raise CodecError(
            f"the value is an awaitable ({type(value).__name__}), which can be awaited once: "
            "make the function an async def, and return what it awaited"
        )
    if isinstance(value, (Iterator, AsyncIterator)):
        raise CodecError(
            f"the value is an iterator ({type(value).__name__}), which can be had only once: return a list or a tuple"
        )
    return value


_LASTING = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict, set, frozenset})


class Callers(Protocol):
    """The callers of one computation, as the colour that runs it sees them."""

    cancel: Callable[[], object] | None

    def leave(self) -> bool:
        """One caller less. True: it was the last, and the computation was cancelled."""

    def led_by(self, work: Coroutine[Any, Any, Any]) -> None:
        """The computation goes on without its caller."""

    def over(self) -> None:
        """The computation's task has ended: perhaps it was cancelled before its first step."""


class Colour(Protocol):
    """How one colour calls, waits and finishes what must be finished."""

    suspending: bool

    async def call(self, function: Callable[[], Any]) -> Any:
        """The function's value; an awaitable is awaited, or refused."""

    async def park(self, bell: Bell, timeout: float | None) -> bool:
        """Wait for the bell. False: the time ran out."""

    async def shielded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to the end, also when the caller is cancelled meanwhile (which it learns afterwards)."""

    async def aside(self, work: Coroutine[Any, Any, T], crowd: Callers) -> T:
        """Run a computation; a caller that is cancelled leaves it to the rest of the crowd, if there is one."""


class _Blocking:
    suspending = False

    async def call(self, function: Callable[[], Any]) -> Any:
        try:  # as `called` does it: a function that calls itself has a frame less for each of its calls
            value = function()
        except StopIteration as end:
            raise Stopped(end) from end
        return value if type(value) in _LASTING else lasting(value)  # a call less, mostly

    async def park(self, bell: Bell, timeout: float | None) -> bool:
        gate = threading.Lock()
        gate.acquire()

        def let_through() -> None:
            try:
                gate.release()
            except RuntimeError:
                pass  # it is rung again

        if not bell.listen(let_through):
            return True
        try:
            return gate.acquire(timeout=-1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX))
        finally:
            bell.forget(let_through)

    def shielded(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return coroutine

    def aside(self, work: Coroutine[Any, Any, T], crowd: Callers) -> Coroutine[Any, Any, T]:
        return work


class _Suspending:
    suspending = True

    async def call(self, function: Callable[[], Any]) -> Any:
        value = called(function)
        return lasting(await value if inspect.isawaitable(value) else value)

    async def park(self, bell: Bell, timeout: float | None) -> bool:
        loop = asyncio.get_running_loop()
        heard: asyncio.Future[bool] = loop.create_future()

        forever = timeout is None or timeout == inf
        # Who waits for a time is kept by the loop's timer, and goes with a loop that is closed: a bell may hang for
        # long. Who waits for ever may be kept by nobody else.
        listener = partial(_rung, (lambda: heard) if forever else ref(heard))
        if not bell.listen(listener):
            return True
        timer = None if forever else loop.call_later(max(timeout or 0.0, 0.0), _settle, heard, False)
        try:
            return await heard
        finally:
            bell.forget(listener)
            if timer is not None:
                timer.cancel()

    async def shielded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await _to_the_end(_task_of(coroutine))

    async def aside(self, work: Coroutine[Any, Any, T], crowd: Callers) -> T:
        loop = asyncio.get_running_loop()
        crowd.led_by(work)
        task = hold_task(_task_of(work))
        if not task.done():  # as an eager one may be
            crowd.cancel = lambda: soon(loop, task.cancel)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            if crowd.leave():
                await _to_the_end(task)
            raise
        finally:
            if task.done():
                crowd.over()
        return task.result()


def _settle(heard: asyncio.Future[bool], rung: bool) -> None:
    if not heard.done():
        heard.set_result(rung)


def _rung(refer: Callable[[], asyncio.Future[bool] | None]) -> None:
    heard = refer()
    if heard is None:
        return
    loop = heard.get_loop()
    # A thousand waiters of the leader's own loop need no thousand wake-ups. But what runs there in no task may be a
    # signal's handler, while the loop sleeps: it doesn't look for what has come.
    if running_loop() is loop and asyncio.current_task(loop) is not None:
        _settle(heard, True)
    else:
        soon(loop, _settle, heard, True)


class _Prompt(_Suspending):
    async def shielded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await coroutine


def _task_of(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task, or the error of a loop that makes none: then the work is closed, and nobody need."""
    try:
        return asyncio.get_running_loop().create_task(work)
    except BaseException:
        work.close()
        raise


def soon(loop: Loop, action: Callable[..., object], *args: Any) -> None:
    """From whichever thread."""
    try:
        loop.call_soon_threadsafe(action, *args)
    except RuntimeError:
        pass  # the loop was closed: nobody waits there any more


async def _to_the_end(work: asyncio.Future[T]) -> T:
    """Await `work` whatever happens; a cancellation that came meanwhile is raised when it has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # seen: the cancellation goes first
        try:
            raise cancelled
        finally:
            del cancelled  # it would refer to itself through this frame
    try:
        return work.result()
    finally:
        del work  # it has its error, which refers to this frame


def hold_task(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """Keep a task from being collected before its end: loops refer to theirs weakly."""
    loop = task.get_loop()
    held = _held.get(loop)
    if held is None:
        held = _held.put(loop, set())
    held.add(task)
    task.add_done_callback(held.discard)
    return task


def after_commit(
    work: Callable[[Colour], Coroutine[Any, Any, object]],
    complain: Callable[[object], None],
    *,
    suspending: bool,
    expected: type[Exception] | tuple[type[Exception], ...],
) -> asyncio.Task[None] | None:
    """Do work that was postponed to a database's commit. It is too late to fail then: `complain` is told of an expected
    error. In a running event loop the work is a task, so that a server that hangs does not stop the loop.
    """

    async def tried(colour: Colour) -> None:
        try:
            await work(colour)
        except expected as error:
            complain(error)

    loop = running_loop() if suspending else None
    if loop is None:
        return run_blocking(tried(BLOCKING))
    task = hold_task(loop.create_task(tried(SUSPENDING)))
    task.add_done_callback(lambda task: complain("its task was cancelled") if task.cancelled() else None)
    return task


_held: PerLoop[set[asyncio.Task[Any]]] = PerLoop()  # by their loops: what is left in a closed one goes with it

BLOCKING: Colour = _Blocking()
SUSPENDING: Colour = _Suspending()
PROMPT: Colour = _Prompt()
"""Suspending, before an engine that never is: nobody can be cancelled while it is asked, so that needs no task."""


async def settled(work: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    """What each returned or raised, all started at once."""
    return await asyncio.gather(*work, return_exceptions=True)
