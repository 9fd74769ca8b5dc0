"""Dramatiq actors whose messages are queued once, and never processed twice at a time.

broker.add_middleware(Once())

@dramatiq.actor(once=True)
def send(report: int) -> None: ...

send.send(42); send.send(42)  # the second call raises AlreadyQueued, until the first message has been processed"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dramatiq import Actor, Broker, Message
from dramatiq.broker import MessageProxy
from dramatiq.middleware import Middleware, MiddlewareError, SkipMessage

from stampede.api.cache import Cache
from stampede.contrib import tasks
from stampede.contrib.tasks import OnceTasks, Run, key_of
from stampede.errors import StampedeError
from stampede.settings.options import Seconds

__all__ = ["AlreadyQueued", "NotNow", "Once", "OnceActor"]

OPTION = "stampede_once"
"""The option of a message that has the name of its lock. The arguments may arrive as other types."""


class AlreadyQueued(tasks.AlreadyQueued, MiddlewareError):
    """A message was not sent, because an equal one is queued or is being processed. `task_id` is the id of that one."""


class NotNow(StampedeError, MiddlewareError):
    """A message was not sent, or not processed, because its lock could not be taken. The cause says why."""


class Once(Middleware):
    """The middleware for actors with the option `once`: `broker.add_middleware(Once())`.

    While a message of such an actor is queued or processed, an equal one is not sent, and `send` raises AlreadyQueued.
    `once=True` compares all arguments; `once="report"` and `once=["report", "day"]` compare these. With the message's
    retries, the lock is kept until they have ended.

    - `cache`: the cache with the locks: its name in the settings, or a Cache. Its engine must be shared.
    - `lease`: seconds after which the lock of a killed worker ends.
    - `queued`: how long a message keeps its lock if no worker takes it, after its delay.

        >>> broker.add_middleware(Once())
        >>> @dramatiq.actor(once=True)
        ... def send(report: int) -> None: ...
        >>> send.send(42)
        >>> send.send(42)
        Traceback (most recent call last):
        stampede.contrib.dramatiq.AlreadyQueued: send:(42) is queued already, or runs: ...
    """

    def __init__(self, cache: str | Cache = "default", *, lease: Seconds = 30.0, queued: Seconds = "1h") -> None:
        self._tasks = OnceTasks(cache, lease=lease, queued=queued)
        self._keys: dict[str, Callable[..., str]] = {}
        self._runs: dict[str, Run] = {}
        self._twice: set[str] = set()  # messages that were delivered again while they are processed

    @property
    def actor_options(self) -> set[str]:
        return {"once"}

    def _key(self, actor: Actor[..., Any]) -> Callable[..., str]:
        name, unique_on = actor.actor_name, actor.options["once"]
        if name not in self._keys:
            self._keys[name] = key_of(name, actor.fn, None if unique_on is True else unique_on)
        return self._keys[name]

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Take the lock for a new message, or keep it for one that is sent again: a retry, or after its delay."""
        actor = broker.actors.get(message.actor_name)  # None: it is an actor of another program
        if actor is None or actor.options.get("once", False) is False:
            return
        new = OPTION not in message.options
        if not new and (run := self._runs.get(message.message_id)) is not None:  # Retries comes after this middleware
            run.retry((delay or 0) / 1000)
            return
        try:
            if new:
                message.options[OPTION] = self._key(actor)(*message.args, **message.kwargs)
            self._tasks.enter(message.options[OPTION], message.message_id, (delay or 0) / 1000)
        except tasks.AlreadyQueued as error:
            if new:
                raise AlreadyQueued(error.name, error.task_id) from None
        except StampedeError as error:
            raise NotNow(f"{message} was not sent: {error}") from error

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Take the lock over. If an equal message is being processed, this one is retried like one that fails."""
        name = message.options.get(OPTION)
        if name is None:
            return
        try:
            self._runs[message.message_id] = self._tasks.run(name, message.message_id)
        except tasks.AlreadyRunning as error:
            if error.twice:
                self._twice.add(message.message_id)
                raise SkipMessage(str(error)) from error
            raise NotNow(str(error)) from error
        except StampedeError as error:
            raise NotNow(f"{message} was not processed: {error}") from error

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Give the lock back. A retry, which is sent after this or before it, takes it with the same token."""
        name, run = message.options.get(OPTION), self._runs.pop(message.message_id, None)
        if run is not None:
            run.end()
        elif name is not None:  # it was not processed
            self._tasks.leave(name, message.message_id)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Give back the lock of a message that another middleware has discarded, such as one that is too old."""
        if message.message_id in self._twice:
            self._twice.discard(message.message_id)
        else:
            self.after_process_message(broker, message)


class OnceActor(Actor[Any, Any]):
    """An actor whose `send` returns the message that is queued already, instead of raising AlreadyQueued.

    >>> @dramatiq.actor(actor_class=OnceActor, once=True)
    ... def send(report: int) -> None: ...
    >>> send.send(42).message_id == send.send(42).message_id
    True
    """

    def send_with_options(self, *, args: Any = (), kwargs: Any = None, delay: Any = None, **options: Any) -> Any:
        try:
            return super().send_with_options(args=args, kwargs=kwargs, delay=delay, **options)
        except AlreadyQueued as error:
            if error.task_id is None:
                raise
            message = self.message_with_options(args=args, kwargs=kwargs, **options)
            return message.copy(message_id=error.task_id)
