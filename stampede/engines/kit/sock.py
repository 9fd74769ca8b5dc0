"""A connection of the blocking colour, for one question at a time, with its bytes read and written by us.

A server that says nothing for too long is called hung; what moves, in either direction, is alive. Who waits in vain is
told by the first thread whose time has run out.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable
from math import inf
from typing import Any

from stampede.engines.kit.progress import LARGE, comes, send
from stampede.engines.kit.vigil import NOT_TO_OTHERS, Vigil
from stampede.interruptions import pass_on

__all__ = ["Sock", "cut_all"]

SIZE = 1 << 16
"""Bytes that are read at once."""

LOOK = 0.05
"""Seconds until a thread that looks, as it waits for a reply, has heard that it does so in vain."""

BRIEF = 1 << 12
"""Bytes that the system takes at once, where nothing else is on its way."""


class Sock:
    """What a thread asks over. One that `looks` keeps its socket when it is cut: what the server says yet is of use."""

    __slots__ = ("_cut", "_looks", "_patience", "_pause", "_vigil", "_watch", "asking", "sends", "since", "sock")

    def __init__(self, vigil: Vigil, *, looks: bool = False) -> None:
        self._vigil = vigil
        self._looks = looks
        self._cut = 0.0
        self.forget()

    def forget(self) -> None:
        """It leads nowhere."""
        self.sock: Any = None
        self._watch: select.poll | None = None
        # With a question under way; or left with one, since even hanging up took a deeper stack than there was.
        self.asking = False
        self.since = inf  # when it began to wait for what it waits for
        self.sends = False  # it isn't waiting yet: what it sends is large

    def stand(self, sock: Any, patience: float | None) -> None:
        """It leads there. A reply may take so long from its last byte on."""
        self._patience = patience
        self._pause = min(LOOK, patience) if self._looks and patience is not None else patience
        sock.settimeout(self._pause)
        self._watch = None if hasattr(sock, "pending") else watch_of(sock)  # TLS sends what is no reply, too
        self.sock = sock

    def speaks(self, watch: select.poll | None = None) -> bool:
        """Whether there is something to read before anything was asked: its end, or a reply too many, which would be
        taken for the one to the next question. Who hasn't taken the connection looks with a `watch` of his own."""
        if self._watch is None:
            return bool(self.sock.pending())
        return bool((watch or self._watch).poll(0))

    def send(self, data: bytes) -> None:
        brief = len(data) <= BRIEF or self._pause == self._patience
        self.sends = len(data) > LARGE
        if not brief:
            self.sock.settimeout(self._patience)
        send(self.sock, data)
        if not brief:
            self.sock.settimeout(self._pause)
        self.sends = False

    def received(self) -> bytes:
        """Some bytes, as soon as there are any."""
        self.since = time.monotonic()
        try:
            data: bytes = self.sock.recv(SIZE)
        except TimeoutError as hung:
            pass_on(hung)
            data = self._late()
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._vigil.heard = time.monotonic()
        return data

    def _late(self) -> bytes:
        """The same, or TimeoutError; looking now and then whether another knows already that it is in vain."""
        patience = self._patience
        assert patience is not None
        while self._looks and time.monotonic() - self.since < patience:
            if self.is_cut():
                raise TimeoutError(NOT_TO_OTHERS)
            try:
                return bytes(self.sock.recv(SIZE))
            except TimeoutError as hung:
                pass_on(hung)
        if not comes(self.sock, self.since, patience):
            raise TimeoutError("timed out")
        return bytes(self.sock.recv(SIZE))

    def cut(self) -> None:
        """By another thread: it waits in vain."""
        self._cut = self.since

    def is_cut(self) -> bool:
        """Whether that was done, and in this very wait."""
        return self._cut == self.since


def watch_of(sock: Any) -> select.poll:
    """What looks at a socket, for one thread at a time."""
    watch = select.poll()
    watch.register(sock, select.POLLIN)
    return watch


def cut_all(socks: Iterable[Sock], before: float) -> None:
    """All that wait for a server that has hung since then; unless something large is on its way there."""
    waiting = [each for each in socks if each.asking]
    if not any(each.sends for each in waiting):
        for each in waiting:
            if each.since < before:
                each.cut()
