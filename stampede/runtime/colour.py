"""The boundary between blocking and suspending code. The algorithm is written once, as coroutines. `BLOCKING` gives
them operations that never suspend, so that one `send` runs them to their end. `SUSPENDING` gives them the operations of
asyncio."""

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
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        if threading.Lock is not greenlets.known:
            greenlets.adapt()
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except Stopped as stopped:
        own = stopped.end
    except BaseException:
        del coroutine  # otherwise it would live as long as the traceback
        raise
    else:
        coroutine.close()
        raise RuntimeError("a port of the blocking colour suspended")
    try:
        raise own
    finally:
        del own  # avoid a reference cycle through this frame


class Stopped(RuntimeError):
    """A function's StopIteration on its way through coroutines, which can't raise StopIteration. A caller that awaits
    such a coroutine gets this error, as Python itself would raise it. `run_blocking` and `ended` turn it back into the
    StopIteration."""

    def __init__(self, end: StopIteration) -> None:
        super().__init__("coroutine raised StopIteration")
        self.__cause__ = self.end = end


async def ended(work: Awaitable[T]) -> tuple[T | None, BaseException | None]:
    """Await `work`, and return (its result, None) or (None, its error). The error is caught in this frame because the
    frame refers to nothing else. A frame with the caller or its flight would make a reference cycle, which lives until
    the garbage collector runs."""
    try:
        return await work, None
    except GeneratorExit:
        raise
    except BaseException as failure:
        return None, failure.end if isinstance(failure, Stopped) else failure


def called(function: Callable[[], T]) -> T:
    """Call a function inside a coroutine, and return its value. A StopIteration becomes `Stopped`."""
    try:
        return function()
    except StopIteration as end:
        raise Stopped(end) from end


class Bell:
    """A one-time signal for listeners of both colours, in any thread. Ringing takes no lock, because a finalizer or a
    signal handler may ring or listen in the middle of it."""

    __slots__ = ("_listeners", "rung")

    def __init__(self) -> None:
        self.rung = False
        self._listeners: list[Callable[[], object]] | None = None  # most bells never have a listener, and make no list

    def ring(self) -> None:
        """Call every listener. If the bell rings twice, a listener that was not forgotten is called twice."""
        self.rung = True
        if self._listeners:
            for listener in self._listeners[:]:
                listener()

    def listen(self, listener: Callable[[], object]) -> bool:
        """Have `listener` called when the bell rings. Return False if it has rung already, so that there is no wait."""
        if self._listeners is None:
            with process_lock.lock:
                if self._listeners is None:
                    self._listeners = []
        self._listeners.append(listener)
        if not self.rung:  # checked after the line above, so that no ring is missed: a later one finds the listener
            return True
        self.forget(listener)
        return False

    def forget(self, listener: Callable[[], object]) -> None:
        try:
            if self._listeners:
                self._listeners.remove(listener)
        except ValueError:
            pass  # forgotten before


def lasting(value: T) -> T:
    """Return the value if it can be used more than once. Otherwise raise a CodecError that says what to return."""
    if type(value) in _LASTING:  # for other types the checks of abstract classes take a microsecond
        return value
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # so that it does not warn that it was never awaited
        raise CodecError(
            f"the value is an awaitable ({type(value).__name__}), which can be awaited once: "
            "make the function an async def, and return what it awaited"
        )
    if isinstance(value, (Iterator, AsyncIterator)):
        raise CodecError(
            f"the value is an iterator ({type(value).__name__}), which can be read only once: return a list or a tuple"
        )
    return value


_LASTING = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict, set, frozenset})


class Callers(Protocol):
    """The callers of one computation, as the colour that runs it uses them."""

    cancel: Callable[[], object] | None

    def leave(self) -> bool:
        """Remove one caller. Return True if it was the last one, and the computation was cancelled."""

    def led_by(self, work: Coroutine[Any, Any, Any]) -> None:
        """Take note that `work` leads the computation from now on, and not its caller, which may leave."""

    def over(self) -> None:
        """Take note that the computation's task has ended. It may have been cancelled before its first step."""


class Colour(Protocol):
    """The operations of one colour: calling functions, waiting, and finishing what must be finished."""

    suspending: bool

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function and return its value. An awaitable is awaited; in blocking code it raises CodecError."""

    async def park(self, bell: Bell, timeout: float | None) -> bool:
        """Wait for the bell. Return False after `timeout` seconds; None is for ever."""

    async def shielded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, even if the caller is cancelled meanwhile. Raise the cancellation afterwards."""

    async def aside(self, work: Coroutine[Any, Any, T], crowd: Callers) -> T:
        """Run a computation. If its caller is cancelled, it continues for the other callers in the crowd, if any."""


class _Blocking:
    suspending = False

    async def call(self, function: Callable[[], Any]) -> Any:
        try:  # a copy of `called`, so that a recursive function uses one frame less for each call
            value = function()
        except StopIteration as end:
            raise Stopped(end) from end
        return value if type(value) in _LASTING else lasting(value)  # usually saves a call

    async def park(self, bell: Bell, timeout: float | None) -> bool:
        gate = threading.Lock()
        gate.acquire()

        def let_through() -> None:
            try:
                gate.release()
            except RuntimeError:
                pass  # the bell rang twice

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
        future: asyncio.Future[bool] = loop.create_future()

        forever = timeout is None or timeout == inf
        # With a timeout, the loop's timer keeps the future alive, and the bell refers to it weakly: a closed loop is
        # freed even if the bell lives on. Without a timeout, only the bell can keep the future alive.
        listener = partial(_rung, (lambda: future) if forever else ref(future))
        if not bell.listen(listener):
            return True
        timer = None if forever else loop.call_later(max(timeout or 0.0, 0.0), _settle, future, False)
        try:
            return await future
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
        if not task.done():  # an eager task may be done already
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


def _settle(future: asyncio.Future[bool], rung: bool) -> None:
    if not future.done():
        future.set_result(rung)


def _rung(refer: Callable[[], asyncio.Future[bool] | None]) -> None:
    future = refer()
    if future is None:
        return
    loop = future.get_loop()
    # A thousand waiters in the leader's own loop do not need a thousand wake-ups. But code that runs there outside a
    # task may be a signal handler while the loop sleeps. Then only `call_soon_threadsafe` wakes the loop.
    if running_loop() is loop and asyncio.current_task(loop) is not None:
        _settle(future, True)
    else:
        soon(loop, _settle, future, True)


class _Prompt(_Suspending):
    async def shielded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await coroutine


def _task_of(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return a task for a coroutine. If the loop can't make one, close the coroutine, and raise the loop's error."""
    try:
        return asyncio.get_running_loop().create_task(work)
    except BaseException:
        work.close()
        raise


def soon(loop: Loop, action: Callable[..., object], *args: Any) -> None:
    """Call `action` in an event loop, from any thread. Do nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(action, *args)
    except RuntimeError:
        pass  # the loop was closed: no task waits there any more


async def _to_the_end(work: asyncio.Future[T]) -> T:
    """Await `work` to its end. If the caller is cancelled meanwhile, raise the cancellation afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # mark it as retrieved: the cancellation is more important
        try:
            raise cancelled
        finally:
            del cancelled  # avoid a reference cycle through this frame
    try:
        return work.result()
    finally:
        del work  # its error refers to this frame


def hold_task(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """Refer to a task until its end, because loops refer to their tasks only weakly. Return the task."""
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
    """Do work that was postponed until a database's commit. With `suspending`, return its task if a loop is running.
    After a commit it is too late to fail. So an expected error is passed to `complain`. In an event loop the work is a
    task, so that a server that hangs does not block the loop."""

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


_held: PerLoop[set[asyncio.Task[Any]]] = PerLoop()  # tasks by loop: those of a closed loop are freed with it

BLOCKING: Colour = _Blocking()
SUSPENDING: Colour = _Suspending()
PROMPT: Colour = _Prompt()
"""The suspending colour for an engine that never suspends. No caller can be cancelled while it asks such an engine, so
shielding needs no task."""


async def settled(work: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    """Start all awaitables at once. Return what each returned or raised."""
    return await asyncio.gather(*work, return_exceptions=True)
