"""One run of the application, whose response is buffered for all who wait, or passed to one client as it streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

__all__ = ["App", "Message", "Receive", "Run", "Scope", "Send"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Run:
    """One run of the application, in a task of its own: it outlives the client for which it began.

    Its response is buffered until it is complete. If `may_buffer` refuses the beginning of the response, or the body
    becomes longer than `longest`, the application waits until a client takes the response, or no client will."""

    def __init__(self, app: App, scope: Scope, may_buffer: Callable[[Message], bool], longest: int) -> None:
        self._app = app
        self._scope = scope
        self._may_buffer = may_buffer
        self._longest = longest
        self.messages: list[Message] = []
        self.status = 0
        self.passing = False  # the response is not buffered any more
        self.complete = False
        self.awaited = False  # a request waits for the end of the task, and gets its exception
        self._size = 0
        self._client: tuple[Receive, Send] | None = None
        self._asked = False
        self._decided = asyncio.Event()  # the response is complete or passing, or the application has failed
        self._taken = asyncio.Event()  # the response is complete, or a client has taken it, or none will
        self.task = asyncio.create_task(self._run())

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    async def decided(self) -> None:
        """Wait until the response is complete, or is to be passed. Raise what the application raised before that."""
        try:
            await self._decided.wait()
        except asyncio.CancelledError:
            self.task.cancel()
            raise
        if not self.complete and not self.passing:
            self.awaited = True
            await self.task

    def raise_error(self) -> None:
        """Raise what the application raised before its response was complete, if it did."""
        if self.task.done() and not self.task.cancelled() and not self.complete and not self.passing:
            self.task.result()

    async def pass_to(self, receive: Receive, send: Send, *, head: bool) -> None:
        """Pass the response to a client, and wait for the application's end. `head`: the client asked with HEAD, so it
        takes no body, and the application may be streaming without an end."""
        self.awaited = True
        try:
            if head:
                self.messages[1:] = [{"type": "http.response.body", "body": b""}]
            for message in self.messages:
                await send(message)
        except BaseException:
            self.abandon()
            raise
        self.messages = []
        self._client = None if head else (receive, send)
        self._taken.set()
        await self.task

    def abandon(self) -> None:
        """Let an application continue that waits for a client. If no client has taken the response, it is told
        `http.disconnect`, and cannot send a long body."""
        self._taken.set()

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
            if not self.complete and not self.passing:
                raise RuntimeError("the application returned without a complete response")
        finally:
            self._decided.set()

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._taken.wait()
        if self._client is None:
            return {"type": "http.disconnect"}
        receive, _ = self._client
        message = await receive()
        while message["type"] == "http.request":  # the application has had it
            message = await receive()
        return message

    async def _send(self, message: Message) -> None:
        if self.complete:
            raise RuntimeError(f"the application sent {message['type']!r} after its response was complete")
        self._size += len(message.get("body", b""))
        if not self.passing:
            self.messages.append(message)
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.passing = not self._may_buffer(message)
            else:
                self.passing = self._size > self._longest
                self.complete = not self.passing and not message.get("more_body", False)
            if self.complete:
                self._check_length()
            if self.passing or self.complete:
                self._decided.set()
            if self.complete:
                self._taken.set()
            elif self.passing:
                await self._taken.wait()
        elif self._client is not None:
            await self._client[1](message)
        elif self._size > self._longest:  # a short response to no client may end, with its background tasks
            raise OSError("no client takes this response")

    def _check_length(self) -> None:
        """Refuse a body that is not as long as the application has declared: the response is not complete."""
        declared = [value for name, value in self.messages[0]["headers"] if name.lower() == b"content-length"]
        if declared and self.status != 304 and declared[0] != b"%d" % self._size:
            self.complete = False
            raise RuntimeError(f"the application declared {declared[0]!r} bytes of body, and sent {self._size}")
