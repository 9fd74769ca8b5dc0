"""The watches of one process. Each has its own connection, and a thread that reads from it."""

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

OnEvents: TypeAlias = Callable[[Sequence[Any] | None], object]
"""A callback for etcd's events, in their order. None: the watch has ended, and no more events follow."""

Span: TypeAlias = tuple[bytes, bytes]
"""A range of keys: its first key, and the key after its last one. If the second is empty: the first key alone."""


class KeyWatch:
    """A watch of a range of keys, until it is closed or its connection ends."""

    def __init__(self, watches: set[KeyWatch], member: Address, stream: Stream, on_events: OnEvents) -> None:
        self.member = member
        self._watches, self._stream, self._on_events = watches, stream, on_events

    @property
    def active(self) -> bool:
        return self in self._watches

    def close(self) -> None:
        try:
            self._watches.remove(self)
        except KeyError:  # another thread has closed it
            return
        hang_up(self._stream.sock)
        self._on_events(None)

    def read(self) -> None:
        """Read events until the stream ends; the main function of the watch's thread."""
        try:
            for line in self._stream.lines:
                result = json.loads(line)["result"]
                if result.get("canceled") or not self.active:
                    break
                self._on_events([each for each in result.get("events", ()) if each["kv"]["key"]])
        except (HTTPError, OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # the connection has ended, or sends what etcd never sends
        self.close()
        self._stream.reply.close()

    def disown(self) -> None:
        """Detach from the parent's socket in a forked child. The reply can't be closed, because the parent's thread may
        have held its locks."""
        if (number := self._stream.sock.fileno()) >= 0:
            disown_number(number)


class Watches:
    """The watches of one engine, for listeners of both colours."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        gateway.leaving = self.left
        self.start_again()

    def start_again(self) -> None:
        """Begin with no watches; also in a forked child, where the open ones are the parent's."""
        self._parents = getattr(self, "_watches", set[KeyWatch]())
        for watch in self._parents:
            watch.disown()
        self._watches: set[KeyWatch] = set()

    def watch(self, span: Span, on_events: OnEvents, revision: int = 0) -> KeyWatch | None:
        """Call `on_events` for each change from this revision on; without one, for each change after this has returned.
        This blocks until the server has begun the watch. None: there are too many watches already."""
        if len(self._watches) >= MOST:
            return None
        key, end = span
        terms = {"key": b64(key), "range_end": b64(end), "start_revision": str(revision)}
        member, stream = self._gateway.stream("/v3/watch", {"create_request": terms})
        watch = KeyWatch(self._watches, member, stream, on_events)
        self._watches.add(watch)
        full = len(self._watches) > MOST or self._gateway.closed
        if full or begun("stampede-etcd-watch", watch.read) is None:
            watch.close()
            stream.reply.close()
        return watch

    def left(self, member: Address) -> None:
        """Close the watches of a member that does not reply: it does not report events, either."""
        for watch in [each for each in self._watches.copy() if each.member == member]:
            watch.close()

    def close(self) -> None:
        for watch in self._watches.copy():
            watch.close()
