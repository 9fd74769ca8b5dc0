"""The leases of this process: what it needs to know to end them with one command.

A lease that `mg`'s vivify has won is a stub without a name on it: only the CAS number tells it from others, and that
begins anew with the server. So until the lease is signed, its connection is kept for it, and what becomes of the
connection becomes of the lease. Short computations never need the signature; all others are signed after a moment.

The connection of an event loop, or of a batch, is not to be kept for one lease: for those a witness
(`witnesses.py`) signs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from stampede.engines.kit.owned import Owned
from stampede.engines.memcached.meta import VIVID, Reply
from stampede.engines.memcached.servers import Server, Servers
from stampede.threads import begun

__all__ = ["TRIES", "Line", "Link", "OwnLease", "OwnLeases", "Signer", "alias", "is_alias", "taken"]


TRIES = 100
"""How often a change is tried again because somebody else was faster."""


class Link(Protocol):
    """One connection."""

    longest: int  # bytes of an item that the server takes

    @property
    def born(self) -> float: ...  # when it stood

    async def ask(self, commands: bytes, count: int = 1, *, twice: bool = False) -> list[Reply]:
        """The replies, in order, of what goes out together. EngineError if there are none, or a refusal.

        `twice`: it may be sent again, over a new connection, where the old one turns out to have been closed. Not so
        with a CAS number, which the server may have forgotten and given anew meanwhile.
        """
        ...


class Line(Protocol):
    """How one colour comes to a connection with the server of a name."""

    servers: Servers

    async def take(self, name: bytes) -> Link: ...
    async def reach(self, server: Server) -> Link: ...
    def give(self, link: Link) -> None: ...


class taken:
    """One connection with the server of a name, for as long as the block takes."""

    __slots__ = ("_line", "_link", "_name")

    def __init__(self, line: Line, name: bytes) -> None:
        self._line = line
        self._name = name

    async def __aenter__(self) -> Link:
        self._link = await self._line.take(self._name)
        return self._link

    async def __aexit__(self, *exc: object) -> None:
        self._line.give(self._link)


class OwnLease:
    """One lease of ours.

    Its signature and its fill never overlap: who signs holds the lock meanwhile, and who fills takes `link` under it.
    With a witness they may, as nothing waits for a thread in an event loop: CAS and token decide which comes first.
    """

    __slots__ = (
        "aliases", "bare", "cas", "ended", "lease", "link", "lock", "lost", "name", "sent", "signed", "token", "until",
        "witness",
    )  # fmt: skip

    def __init__(self, name: bytes, token: bytes, lease: float) -> None:
        self.name, self.token, self.lease = name, token, lease
        self.lock = threading.Lock()
        self.link: Link | None = None  # kept for it until it is signed
        self.witness: Link | None = None  # or what may sign it from any thread
        self.signed = False
        self.ended = False
        self.bare = True  # nothing but a lease is in the item
        self.lost = False  # the server has thrown the item away, with our lease in it
        self.cas = b""
        self.sent = self.until = 0.0
        self.aliases: list[bytes] = []  # what those know it by who came before it was signed

    def stands(self, cas: bytes, sent: float, seconds: float) -> None:
        """The server has told so: `sent` is a moment before it was asked."""
        self.cas, self.sent, self.until = cas, sent, sent + seconds

    def vivid(self, cas: bytes, sent: float) -> None:
        """The same of a stub without a signature."""
        self.stands(cas, sent, VIVID - 1)
        self.aliases.append(alias(cas))

    def take_link(self) -> Link | None:
        """The connection that was kept for it, which is the caller's from now on. It is waited for while in use."""
        if self.signed or self.witness is not None:
            return None
        with self.lock:
            link, self.link = self.link, None
        return link

    def known_to(self, link: Link) -> bool:
        """Whether this connection leads to the server that has given the CAS number, and not to its successor.

        It stood before we asked, and a server's end is the end of its connections.
        """
        return link.born < self.sent and time.monotonic() < self.until


class OwnLeases(Owned[bytes, OwnLease]):
    def __init__(self) -> None:
        super().__init__(lambda own: own.until + 60 < time.monotonic())

    def pop(self, name: bytes, token: bytes) -> OwnLease | None:
        own = super().pop(name, token)
        if own is not None:
            own.ended = True
        return own


class Signer:
    """Signs what is still being computed a moment after its claim: one thread, that sleeps while there is nothing."""

    def __init__(self, after: float, sign: Callable[[OwnLease], object]) -> None:
        self.after = after
        self._sign = sign
        self.start_again()

    def start_again(self) -> None:
        """In a forked child: thread and leases are the parent's."""
        self._lock = threading.RLock()  # a finalizer, or a signal, may claim in the middle of this
        self._changed = threading.Condition(self._lock)  # to be entered by the lock: it can be interrupted, half in
        self._due: deque[tuple[float, OwnLease]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, hold: OwnLease) -> bool:
        """False: there is no thread to be had."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = begun("stampede-memcached", self._run)
            if self._thread is None:
                return False
            self._due.append((hold.sent + self.after, hold))
            if len(self._due) == 1:
                self._changed.notify_all()
        return True

    def keep(self, hold: OwnLease, link: Link) -> bool:
        """The same; until then the connection is the lease's."""
        hold.link = link
        return self.add(hold)

    def close(self) -> None:
        """What is due is signed, or found to be closed; then the thread ends."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._due:
                    if self._closed:
                        self._thread = None
                        return
                    self._changed.wait()
                due, hold = self._due.popleft()
            if not hold.ended:
                time.sleep(max(due - time.monotonic(), 0.0))
            if not hold.ended:
                self._sign(hold)
            del hold


def alias(cas: bytes) -> bytes:
    """What a stub without a signature is called."""
    return b"cas " + cas


def is_alias(token: bytes) -> bool:
    """Such a name, and no holder's token."""
    return token.startswith(b"cas ")
