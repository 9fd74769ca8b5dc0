"""Watches of one process: each has a connection of its own, and a thread that reads there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from urllib3.exceptions import HTTPError

from stampede.engines.etcd.gateway import MOST, Gateway, Stream, b64
from stampede.engines.kit.hang_detector import hang_up
from stampede.engines.kit.transport import disown_number
from stampede.engines.kit.url import Address
from stampede.runtime.threads import begun

__all__ = ["KeyWatch", "Span", "Watches"]

Told: TypeAlias = Callable[[Sequence[Any] | None], object]
"""Called with etcd's events, in their order. None: the watch has ended, and tells nothing more."""

Span: TypeAlias = tuple[bytes, bytes]
"""A key, and the one that ends the range behind it; none: that key alone."""


class KeyWatch:
    """A watch, until it is closed or its connection ends."""

    def __init__(self, watches: set[KeyWatch], member: Address, stream: Stream, told: Told) -> None:
        self.member = member
        self._watches, self._stream, self._told = watches, stream, told

    @property
    def hears(self) -> bool:
        return self in self._watches

    def close(self) -> None:
        try:
            self._watches.remove(self)
        except KeyError:  # another thread was faster
            return
        hang_up(self._stream.sock)
        self._told(None)

    def read(self) -> None:
        """Tell of what comes. A thread does this."""
        try:
            for line in self._stream.lines:
                result = json.loads(line)["result"]
                if result.get("canceled") or not self.hears:
                    break
                self._told([each for each in result.get("events", ()) if each["kv"]["key"]])
        except (HTTPError, OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # it has ended, or says what etcd does not
        self.close()
        self._stream.reply.close()

    def disown(self) -> None:
        """In a forked child, where the parent's thread has the locks of the reply: it can't be closed as usual."""
        if (number := self._stream.sock.fileno()) >= 0:
            disown_number(number)


class Watches:
    """The watches of one engine, for listeners of both colours."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        gateway.leaving = self.left
        self.start_again()

    def start_again(self) -> None:
        """Also in a forked child: watches are the parent's."""
        self._parents = getattr(self, "_watches", set[KeyWatch]())
        for watch in self._parents:
            watch.disown()
        self._watches: set[KeyWatch] = set()

    def watch(self, span: Span, told: Told, revision: int = 0) -> KeyWatch | None:
        """Have `told` called after each change from this revision on, or that comes after this has returned.

        It blocks until the server has begun to watch. None: there are too many watches.
        """
        if len(self._watches) >= MOST:
            return None
        key, end = span
        terms = {"key": b64(key), "range_end": b64(end), "start_revision": str(revision)}
        member, stream = self._gateway.stream("/v3/watch", {"create_request": terms})
        watch = KeyWatch(self._watches, member, stream, told)
        self._watches.add(watch)
        full = len(self._watches) > MOST or self._gateway.closed
        if full or begun("stampede-etcd-watch", watch.read) is None:
            watch.close()
            stream.reply.close()
        return watch

    def left(self, member: Address) -> None:
        """End the watches of a member that gives no answers: it tells nothing either."""
        for watch in [each for each in self._watches.copy() if each.member == member]:
            watch.close()

    def close(self) -> None:
        for watch in self._watches.copy():
            watch.close()
