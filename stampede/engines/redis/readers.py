"""Connections whose reads the server follows, watched for their end by a thread that always runs.

Whose thread is busy, or whose loop rests, notices nothing; and of what it has read, nobody is told any more.
"""

from __future__ import annotations

import select
from typing import Any

__all__ = ["Readers"]

_END = getattr(select, "EPOLLRDHUP", 0) | getattr(select, "EPOLLONESHOT", 0)  # errors and hang-ups are told always


class Readers:
    """By their sockets' numbers. One that is closed here is forgotten by itself, and its number may come again."""

    def __init__(self) -> None:
        # Where there is no epoll, they are looked at once in a while.
        self._epoll: Any = select.epoll() if hasattr(select, "epoll") else None
        self._poll: Any = select.poll() if self._epoll is None and hasattr(select, "poll") else None

    @property
    def wakes(self) -> Any:
        """What a selector can wait for: readable when one has ended. None if there is no such thing here."""
        return self._epoll

    def watch(self, sock: Any) -> bool:
        """Watch this one, from any thread. False: it can't be, or has ended already."""
        try:
            if self._epoll is None:
                self._poll.register(sock.fileno(), select.POLLHUP)
                return True
            try:
                self._epoll.register(sock.fileno(), _END)
            except FileExistsError:
                self._epoll.modify(sock.fileno(), _END)
        except (AttributeError, OSError, ValueError):
            return False
        return True

    def ended(self) -> bool:
        """Whether any has, since the last look."""
        if self._epoll is not None:
            return bool(self._epoll.poll(0))
        ended = [number for number, _ in self._poll.poll(0)] if self._poll is not None else []
        for number in ended:
            self._poll.unregister(number)
        return bool(ended)

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
