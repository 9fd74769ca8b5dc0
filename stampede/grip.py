"""One time of holding a lock, as a thing that ends with what it belongs to.

No `finally` covers every moment: what a signal's handler raises, or an error for want of stack, may come between any
two of our steps, also before the first one of `__exit__`. So a grip belongs to something that the interpreter lets go
of in any case, and as soon as its frame is left, also where a traceback goes on keeping the frames: the end of the
`with` statement, which lies on that frame's stack for as long as the block lasts, or the coroutine that takes the lock
or gives it back. A weak reference hears of it.
"""

from __future__ import annotations

import os
from functools import partial
from itertools import count
from typing import Any, TypeVar
from weakref import ReferenceType, ref

from stampede.colour import run_blocking, running_loop
from stampede.entry import new_id
from stampede.guarded_locks import GuardedLocks, PlainLocks
from stampede.keeper import Hold, keeper
from stampede.land import quietly
from stampede.loops import Loop, heed, on_close
from stampede.ports import Engine

__all__ = ["Grip"]

OWNER = TypeVar("OWNER")

_numbers = count()


class Grip:
    """From the moment it is asked for until it has been given back, it may be that the lock is to be given back."""

    def __init__(self, lock: object, engine: Engine, locks: PlainLocks, name: str, token: bytes | None = None) -> None:
        self.token = token or new_id()
        self.lone = token is None  # nobody else has this token, now or later
        self.number = next(_numbers)  # grows, in this process
        self.fence = 0
        self.hold: Hold | None = None  # kept standing by the keeper; None: it isn't granted yet
        self.asked = False
        self.answered = True  # each time that it was
        self.leaving = False  # it is being given back
        self.over = False  # it has been, or the keeper has been told to
        self.session: Any = None  # the connection that it is bound to
        self._owner: ReferenceType[Any] | None = None  # None: the lock's object, which somebody keeps
        self._loop: ReferenceType[Loop] | None = None  # of the task whose block it is
        self._lock = ref(lock)
        self._engine = engine  # which closes itself when nobody has it any more
        self._locks = locks
        self.name = name
        self._pid = os.getpid()

    def belongs_to(self, owner: OWNER) -> OWNER:
        """It ends with this, which is returned, so that nobody needs a variable: a traceback would keep that."""
        self._owner = ref(owner, self._left)
        return owner

    def ends_with(self, loop: Loop) -> None:
        """Its block is in a task of this loop, and never left if that is closed."""
        self._loop = ref(loop)
        heed(loop)
        on_close(self)

    def end_orphans(self) -> None:
        if self.forsaken:
            self.let_go()

    def belongs_to_its_lock(self) -> None:
        self._owner = None

    @property
    def owned(self) -> bool:
        return self._owner is not None

    def _left(self, _: object) -> None:
        self.let_go()

    @property
    def forsaken(self) -> bool:
        """Has its owner ended? Whoever asks needs no word of the weak reference, which can be lost."""
        refer = self._owner
        if refer is None:
            return False
        loop = self._loop() if self._loop is not None else None
        if loop is not None and loop.is_closed():
            return True
        return refer() is None or getattr(refer(), "cr_frame", refer) is None  # in no variable, again

    @property
    def stands(self) -> bool:
        """It is somebody's, as far as this process knows."""
        return self.hold is not None and not self.over and not self.leaving and not self.forsaken

    @property
    def held(self) -> bool:
        return self.hold is not None and self.stands and not self.hold.lost

    @property
    def lapsed(self) -> bool:
        """It was given back, and nobody who has it said so: as its block's loop was closed."""
        ended = self.over or (self._loop is not None and self.forsaken)
        return ended and not self.leaving and self.hold is not None

    @property
    def lapsed_inside(self) -> bool:
        """The same, and its block goes on."""
        refer = self._owner
        return self._loop is not None and refer is not None and refer() is not None and self.lapsed

    @property
    def foreign(self) -> bool:
        """We are a forked child, and it is its parent's; or the interpreter ends."""
        return self._pid != os.getpid() or (self.hold is not None and self.hold.foreign)

    def grant(self, fence: int, lease: float, max_hold: float, asked: float) -> None:
        self.fence = fence
        self.hold = self._hold(lease, max_hold, asked)
        keeper.add(self.hold)

    def _hold(self, lease: float, max_hold: float, since: float | None = None) -> Hold:
        locks = self._locks
        return Hold(
            keeper,
            locks.port,
            self.name,
            self.token,
            lease,
            max_hold,
            self.drop,
            alive=self._alive,
            since=since,
            owe=partial(locks.owe, self.name, self.token) if isinstance(locks, GuardedLocks) else None,
        )

    def _alive(self) -> bool:
        """Of its keeper, who gives it back if not."""
        return self._lock() is not None and not self.forsaken

    def drop(self) -> None:
        """Give it back, blocking; but for a moment only, unless the interpreter ends. In a loop it is done beside."""
        if (not self.lone and not keeper.over) or (running_loop() is not None and not keeper.over):
            self.let_go()
        elif keeper.over:
            run_blocking(quietly(self._locks.port.release, self.name, self.token))
        else:
            run_blocking(self._locks.withdraw(self.name, self.token, late=not self.answered))

    def let_go(self) -> None:
        """Have it given back, and soon, as nobody has it any more. From a finalizer: nothing is asked here.

        Somebody else may come to have it, if its token is not ours alone: then its lease ends it.
        """
        if self.over or not self.asked or self.foreign:
            return
        if self.lone:  # another one: the first may be under way, to an engine that hangs
            keeper.let_go(self._hold(1.0, 0.0))
        if self.hold is not None:
            self.hold.end()
        self.over = True

    def end(self) -> None:
        """It has been given back."""
        self.over = True
        self._owner = None
        session, self.session = self.session, None
        sessions = self._engine.lock_engine.sessions
        if session is not None and sessions is not None and not self.foreign:
            sessions.close(session)
