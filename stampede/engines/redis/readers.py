"""Watches connections whose reads the server follows. A thread that always runs notices when one ends. The connection's
own thread or loop may be busy or idle, and would not notice. After its end, changes of what it had read are not
reported any more."""

from __future__ import annotations

import select
from typing import Any

__all__ = ["Readers"]

_END = getattr(select, "EPOLLRDHUP", 0) | getattr(select, "EPOLLONESHOT", 0)  # errors and hang-ups are always reported


class Readers:
    """The watched connections, by file descriptor. A descriptor closed by this process is forgotten by itself, and may
    be used again."""

    def __init__(self) -> None:
        # Without epoll, `ended` polls them from time to time.
        self._epoll: Any = select.epoll() if hasattr(select, "epoll") else None
        self._poll: Any = select.poll() if self._epoll is None and hasattr(select, "poll") else None

    @property
    def wakes(self) -> Any:
        """What a selector can wait for: readable when a connection has ended. None if the platform has no epoll."""
        return self._epoll

    def watch(self, sock: Any) -> bool:
        """Watch this socket, from any thread. Return False if that is impossible, or if it has ended already."""
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
        """Return whether a connection has ended since the last call."""
        if self._epoll is not None:
            return bool(self._epoll.poll(0))
        ended = [number for number, _ in self._poll.poll(0)] if self._poll is not None else []
        for number in ended:
            self._poll.unregister(number)
        return bool(ended)

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
