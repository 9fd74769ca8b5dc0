"""Locks of a majority: servers that know nothing of each other, of which the smaller part may be lost.

All members are asked at once. In an event loop each question is a task of it; of the blocking colour, a job of a few
threads that its member has for itself, as one that hangs would keep all those that others need. Nobody waits for a
member that hangs as long as the others can make a majority; what it answers in the end is put right behind its caller.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from random import uniform
from time import monotonic
from typing import Any, TypeVar

from stampede import forks, stalls
from stampede.colour import BLOCKING, SUSPENDING, Bell, Colour, hold_task, run_blocking
from stampede.engines import check_url as check_member
from stampede.engines import open_engine
from stampede.engines.kit.errands import Errands
from stampede.engines.url import parts_of, safe_url
from stampede.entry import new_id
from stampede.errors import EngineClosed, EngineError, OptionError
from stampede.ports import Busy, Engine, Granted, Held, Locks
from stampede.threads import Crew

__all__ = ["Quorum", "check_url", "from_url"]

T = TypeVar("T")
Work = Callable[["_Member", bool], Coroutine[Any, Any, Any]]  # in the suspending colour, or not
Heard = Callable[["_Member", Any], object]

PATIENCE = 0.5
"""Seconds at most that a member has for its answer; of a short lease a third."""

DRIFT, TICK = 0.01, 0.002
"""By how much longer than its holder a member keeps a lock: a part of the lease, and seconds beyond. Their clocks need
not tick alike."""

SPLIT = 2.0
"""Seconds for which several who have each a part of the votes try again, until one of them has a majority."""

STANDS = 0.1
"""Seconds after which a part of the votes, which has not been given back, is taken for a majority, if it may be one."""

LOOK = 2.0
"""Seconds after which one who waits looks for himself."""

REST = 0.02
"""Seconds within which one rests whom nothing has kept."""

THREADS, WAITERS = 8, 64
"""Of each member: for questions, and for those who wait."""

OWED = 1000
"""Locks that are given back to a member that hangs: those beyond end with their leases."""

PORTS = {
    "redis": 6379, "rediss": 6379, "memcached": 11211, "etcd": 2379, "zookeeper": 2181, "postgres": 5432,
    "postgresql": 5432,
}  # fmt: skip


class Quorum(Engine):
    """A lock is whose most of these servers say it is: `Lock("nightly", on=Quorum("redis://a", "redis://b", "redis://c"))`.

    Any lock engines, three at least, by their URLs or opened. They must not know of each other: a server and its
    replica are one. Any of them may be down, also when this is made, and the locks go on as long as most are well.
    There is no fence, as each counts for itself, and no order among those who wait.
    """

    scheme = "quorum"
    fences = False

    def __init__(self, *members: str | Engine, patience: float = PATIENCE) -> None:
        _check(members)
        if not patience > 0:
            raise OptionError(f"patience is {patience!r}: give a number of seconds, more than 0")
        self._members = [_Member(open_engine(each) if isinstance(each, str) else each) for each in members]
        engines = [each.engine.lock_engine for each in self._members]
        self.shared = all(each.shared for each in engines)
        self.pushes = all(each.pushes for each in engines)
        self.breaks = all(each.breaks for each in engines)
        ours = _Ours()
        blocking, suspending = (_Locks(self._members, colour, patience, ours) for colour in (BLOCKING, SUSPENDING))
        self.locks, self.alocks = blocking, suspending
        if all(each.holds is not None for each in engines):
            self.holds, self.aholds = blocking, suspending
        if all(each.hands is not None for each in engines):
            self.hands, self.ahands = blocking, suspending

    @property
    def called(self) -> str:
        return self.url or f"the quorum of {', '.join(each.called for each in self._members)}"

    def ping(self) -> float:
        assert isinstance(self.locks, _Locks)
        return run_blocking(self.locks.ping())

    def advice(self) -> Sequence[str]:
        found = []
        for each in self._members:
            with suppress(EngineError):
                found += [f"{each.called}: {advice}" for advice in each.engine.advice()]
        return found

    def close(self) -> None:
        for each in self._members:
            each.engine.close()


def from_url(url: str, **options: Any) -> Quorum:
    """`quorum+redis://a,b,c`: of servers that are asked alike."""
    return Quorum(*[open_engine(each, **options) for each in _checked(url)])


def check_url(url: str) -> None:
    for each in _checked(url):
        check_member(each)


def _checked(url: str) -> list[str]:
    scheme, _, rest = url.partition("://")
    kind = scheme.partition("+")[2]
    if not kind:
        raise OptionError(f"{safe_url(url)!r} names no engine: write quorum+redis://a,b,c")
    named = re.match(r"(?:([^/?#]*)@)?([^/?#]*)(.*)", rest, re.DOTALL)
    assert named is not None
    user, hosts, tail = named.groups()
    urls = [f"{kind}://{'' if user is None else user + '@'}{host}{tail}" for host in hosts.split(",")]
    _check(urls)
    return urls


def _check(members: Sequence[str | Engine]) -> None:
    if len(members) < 3:
        raise OptionError(f"a quorum has {len(members)} members: give three, or more, as one of two is no majority")
    places = Counter(_place(each) for each in members)
    place, count = places.most_common(1)[0]
    if count > 1:
        raise OptionError(f"{place} is in the quorum {count} times, and would have as many votes: name each once")
    for each in members:
        if isinstance(each, Engine) and each.locks is None:
            raise OptionError(f"{each.scheme}:// has no locks: it can't be of a quorum")


def _place(member: str | Engine) -> Hashable:
    """What dies as one: a server, whatever is asked of it."""
    url = member if isinstance(member, str) else member.url
    if not url or (isinstance(member, Engine) and url.partition("://")[2][:1] in ("", "?")):
        return member
    parts = parts_of(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:  # several of them
        host, port = parts.netloc, None
    if not host:
        return f"{parts.scheme}://{parts.path}"
    family = parts.scheme.partition("+")[0]
    return f"{family}://{'127.0.0.1' if host == 'localhost' else host}:{port or PORTS.get(family, '')}"


# -- one member ---------------------------------------------------------------------------------------------------


class _Member:
    """One server's engine, and what is under way there."""

    def __init__(self, engine: Engine) -> None:
        if engine.locks is None:
            raise OptionError(f"{engine.scheme}:// has no locks: it can't be of a quorum")
        self.engine = engine
        self.called = engine.called
        lock_engine = engine.lock_engine
        aside = Errands()
        self.ports: tuple[Locks, Locks] = engine.locks, engine.alocks or aside.face(engine.locks)
        self.holds: Any = lock_engine.holds, lock_engine.aholds or aside.face(lock_engine.holds)
        self.hands: Any = lock_engine.hands, lock_engine.ahands or aside.face(lock_engine.hands)
        self.questions, self.waits = Crew(THREADS, "stampede-quorum"), Crew(WAITERS, "stampede-quorum-wait")
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self.hangs = False  # it has not answered in time, and not since
        self._lock = threading.RLock()
        self._asked: dict[bytes, list[_Question]] = {}  # by token: what is under way, and what is to come behind it

    def ask(self, question: _Question) -> bool:
        """Have it asked, behind what is under way of its token: what is given back must not be what was taken since.
        False: it isn't asked."""
        token = question.token
        if token is None:
            question.start()
            return True
        with self._lock:
            before = self._standing(token)
            if self.hangs and (len(self._asked) > OWED if question.verb == "release" else before):
                return False
            if before and before[-1].verb == question.verb == "release":
                return False
            self._asked[token] = [*before, question]
            renews = question.verb == "renew" and all(each.started and each.verb != "release" for each in before)
            question.started = renews or not before
        if question.started:
            question.start()
        return True

    def _standing(self, token: bytes) -> list[_Question]:
        return [each for each in self._asked.get(token, ()) if not each.gone]

    @property
    def is_asked(self) -> bool:
        with self._lock:
            return any(self._standing(token) for token in self._asked)

    def ended(self, question: _Question) -> None:
        """What came behind it is asked now."""
        if question.error is None:
            self.hangs = False
        if question.token is None:
            return
        with self._lock:
            left = self._standing(question.token)
            if left:
                self._asked[question.token] = left
            else:
                self._asked.pop(question.token, None)
            due = left[0] if left and not left[0].started else None
            if due is not None:
                due.started, due.suspending = True, False  # its loop may be closed by now
        if due is not None:
            due.start()


class _Question:
    """What one member is asked; it may be answered when nobody waits for it any more."""

    def __init__(
        self, member: _Member, verb: str, token: bytes | None, work: Work, heard: Heard, *, suspending: bool
    ) -> None:
        self.member, self.verb, self.token = member, verb, token
        self.suspending = suspending
        self.started = self.over = False
        self.error: BaseException | None = None
        self._work, self._heard = work, heard
        self._crew = member.waits if verb == "wait" else member.questions
        self._task: asyncio.Task[Any] | None = None

    @property
    def gone(self) -> bool:
        return self.over or (self._task is not None and self._task.get_loop().is_closed())

    def start(self) -> None:
        if not self.suspending:
            self._crew.do(self._do)
            return
        self._task = hold_task(asyncio.get_running_loop().create_task(self._work(self.member, True)))
        self._task.add_done_callback(self._done)

    def leave(self) -> None:
        """Nobody wants the answer: of one who waits."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._crew.take_back(self._do)

    def _do(self) -> None:
        result = None
        try:
            result = run_blocking(self._work(self.member, False))
        except BaseException as error:
            self.error = error
        self._end(result)

    def _done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            self.error = task.exception()
        elif self.verb == "release":  # its loop ends: a thread goes on
            self.suspending, self._task = False, None
            self.start()
            return
        else:
            self.error = asyncio.CancelledError()
        self._end(task.result() if self.error is None else None)

    def _end(self, result: Any) -> None:
        self.over = True
        self.member.ended(self)
        self._heard(self.member, result if self.error is None else self.error)
        self._heard = _nobody


def _nobody(member: _Member, answer: Any) -> None:
    return


# -- what they say ------------------------------------------------------------------------------------------------


class _Vote:
    """One question to all members, and their answers as they come."""

    def __init__(self, members: Sequence[_Member], most: int) -> None:
        self.most = most
        self.members = members
        self.answers: dict[_Member, Any] = {}  # an error is one, too
        self.questions: list[_Question] = []
        self.awaited: set[_Member] = set()
        self._bell = Bell()

    def heard(self, member: _Member, answer: Any) -> None:
        self.answers[member] = answer
        bell, self._bell = self._bell, Bell()  # behind the answer: who reads the new one has seen it
        bell.ring()

    async def until(self, decided: Callable[[], bool], colour: Colour, seconds: float) -> None:
        """Whoever is awaited, and has given no answer by then, hangs."""
        end, late = monotonic() + seconds, False
        while True:
            bell = self._bell
            if decided() or not self.open:
                return
            left = end - monotonic()
            if left <= 0:
                if late:
                    break
                late, left = True, stalls.given_back(-left, seconds)  # we may not have run meanwhile
                end = monotonic() + left
            await colour.park(bell, left)
        for member in self.open:
            member.hangs = True

    @property
    def open(self) -> set[_Member]:
        """Who is awaited."""
        return self.awaited - self.answers.keys()

    @property
    def said(self) -> list[Any]:
        """The answers that are none of trouble."""
        return [each for each in list(self.answers.values()) if not isinstance(each, BaseException)]

    @property
    def granted(self) -> int:
        return sum(isinstance(each, Granted) for each in self.said)

    @property
    def yes(self) -> int:
        return sum(each is True for each in self.said)

    def is_granted(self) -> bool:
        return self.granted >= self.most

    def trouble(self) -> EngineError:
        """Why there is no majority; raises what is none of an engine's."""
        told = []
        for member in self.members:
            answer = self.answers.get(member)
            if isinstance(answer, EngineClosed):
                return answer
            if isinstance(answer, Exception) and not isinstance(answer, EngineError):
                raise answer
            if isinstance(answer, BaseException):
                told.append(_of(member.called, str(answer)))
            elif member not in self.answers:
                told.append(f"no answer from {member.called}")
        return EngineError(f"no majority of {len(self.members)} servers can be asked: {'; '.join(told)}")

    def leave(self) -> None:
        for each in self.questions:
            each.leave()


class _Ours:
    """What this process holds, for both colours."""

    def __init__(self) -> None:
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self.lock = threading.RLock()
        self.renewing: set[bytes] = set()  # tokens that have not been given back since
        self._votes: dict[bytes, tuple[frozenset[_Member], float]] = {}

    def note(self, token: bytes, vote: _Vote, ends: float) -> None:
        """Who has granted it, until then at least."""
        votes = frozenset(
            each for each, said in list(vote.answers.items()) if said is True or isinstance(said, Granted)
        )
        with self.lock:
            if len(self._votes) >= OWED:
                now = monotonic()
                self._votes = {each: its for each, its in self._votes.items() if its[1] > now}
            self._votes[token] = votes, ends

    def of_silent(self, token: bytes, vote: _Vote) -> int:
        """How many of those who say nothing now have granted it: as long as that stands, to nobody else."""
        votes, ends = self._votes.get(token, (frozenset(), 0.0))
        if monotonic() >= ends:
            return 0
        return sum(each not in vote.answers or isinstance(vote.answers[each], BaseException) for each in votes)

    def forget(self, token: bytes) -> None:
        with self.lock:
            self._votes.pop(token, None)


class _Locks:
    """`Locks`, `Holds` and `Hands` of one colour."""

    def __init__(self, members: Sequence[_Member], colour: Colour, patience: float, ours: _Ours) -> None:
        self._members = members
        self._most = len(members) // 2 + 1
        self._colour = colour
        self._patience = patience
        self._ours = ours

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        # Who asks with `waits` has no place: one that was first here and third there would keep all others out.
        end, pause, seen = monotonic() + min(SPLIT, lease / 2), TICK, _Seen()
        while True:
            asked = monotonic()
            vote = self._ask("acquire", token, lambda its, colour: its.ports[colour].acquire(name, token, _more(lease)))
            try:
                await vote.until(vote.is_granted, self._colour, self._seconds(lease))
            except BaseException:
                self._ask("release", token, _releasing(name, token), suspending=False)
                raise
            if vote.is_granted() and monotonic() - asked < lease:
                self._ours.note(token, vote, asked + lease)
                return Granted()
            await self._give_back(name, token, vote, lease)
            said = vote.said
            if len(said) < vote.most:
                raise vote.trouble()
            busy, votes = _rival(said)
            if votes >= vote.most or monotonic() + pause >= end:
                return busy
            if votes + len(self._members) - len(said) >= vote.most and seen.stands(busy, asked):
                return busy  # it has a majority with those that can't be asked
            await self._colour.park(Bell(), uniform(0.0, pause))
            pause = min(2 * max(pause, monotonic() - asked), 0.2)

    async def _give_back(self, name: str, token: bytes, vote: _Vote, lease: float) -> None:
        """All that may have been got of it, also what is not answered yet; who has answered is waited for."""
        got = {each for each, answer in list(vote.answers.items()) if isinstance(answer, Granted)}
        doubtful = {each for each in self._members if not isinstance(vote.answers.get(each), Busy)}
        asked = {each.member for each in vote.questions}
        back = self._ask("release", token, _releasing(name, token), among=doubtful & asked)
        back.awaited &= got
        await back.until(lambda: False, self._colour, self._seconds(lease))

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        ours, asked = self._ours, monotonic()
        with ours.lock:
            ours.renewing.add(token)
        vote = self._ask("renew", token, lambda its, colour: its.ports[colour].renew(name, token, _more(lease)))
        await vote.until(lambda: False, self._colour, self._seconds(lease))
        more: _Vote | None = None
        with ours.lock:
            # Who has forgotten it, or had somebody else's token when it was taken, has ours from now on; unless it is
            # being given back.
            if token in ours.renewing and vote.yes + ours.of_silent(token, vote) >= vote.most:
                without = {each for each, said in list(vote.answers.items()) if said is False}
                work: Work = lambda its, colour: its.ports[colour].acquire(name, token, _more(lease))  # noqa: E731
                more = self._ask("acquire", token, work, among=without, suspending=False)
            ours.renewing.discard(token)
        if more is not None and vote.yes < vote.most:
            await more.until(lambda: False, self._colour, self._seconds(lease))
            vote.answers.update({each: True for each, said in more.answers.items() if isinstance(said, Granted)})
        stands = self._told(vote)
        if stands:
            ours.note(token, vote, asked + lease)
        return stands

    async def release(self, name: str, token: bytes) -> bool:
        with self._ours.lock:
            self._ours.renewing.discard(token)
        vote = self._ask("release", token, _releasing(name, token))
        await vote.until(lambda: False, self._colour, self._patience)
        silent = self._ours.of_silent(token, vote)
        self._ours.forget(token)
        return True if vote.yes and vote.yes + silent >= vote.most else self._told(vote)

    async def hand_over(self, name: str, token: bytes, lease: float) -> bool:
        vote = self._ask("renew", token, lambda its, colour: its.hands[colour].hand_over(name, token, _more(lease)))
        await vote.until(lambda: False, self._colour, self._seconds(lease))
        return self._told(vote)

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        """Until so many say that it may be free that the others are no majority: one that was down, and knows nothing
        of the holder, says so all the time."""
        began, seconds = monotonic(), min(timeout, _more(busy.lease), LOOK)
        there = Busy(busy.token, seconds)
        vote = self._ask("wait", None, lambda its, colour: its.ports[colour].wait(name, there, seconds))
        try:
            await vote.until(
                lambda: len(vote.answers) > len(self._members) - vote.most, self._colour, max(seconds, 0.0)
            )
        finally:
            vote.leave()
        if monotonic() - began < TICK:
            await self._colour.park(Bell(), min(uniform(0.0, REST), max(timeout, 0.0)))

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        vote = self._ask("holder", None, lambda its, colour: its.holds[colour].holder(name))
        lefts: dict[bytes, list[float]] = {}
        for found in await self._all(vote):
            for token, left in found:
                lefts.setdefault(token, []).append(left)
        return [(token, _less(left)) for token, each in lefts.items() if (left := self._standing(each)) > 0]

    async def held(self, prefix: str = "") -> list[Held] | None:
        vote = self._ask("held", None, lambda its, colour: its.holds[colour].held(prefix))
        told: dict[Hashable, list[Held]] = {}
        for found in await self._all(vote):
            if found is None:
                return None
            for each in found:
                told.setdefault((each.name, each.host, each.pid), []).append(each)
        return [
            replace(each[0], fence=None, lease=_less(left))
            for each in told.values()
            if (left := self._standing([its.lease for its in each])) > 0
        ]

    async def ping(self) -> float:
        """Until a majority has answered."""
        began = monotonic()

        async def met(member: _Member, suspending: bool) -> float:
            return member.engine.ping()

        vote = self._ask("ping", None, met)
        await vote.until(lambda: len(vote.said) >= vote.most, self._colour, self._patience)
        if len(vote.said) < vote.most:
            raise vote.trouble()
        return monotonic() - began

    # -- their steps

    def _ask(
        self,
        verb: str,
        token: bytes | None,
        work: Work,
        among: set[_Member] | None = None,
        *,
        suspending: bool | None = None,
    ) -> _Vote:
        """Ask all; who is known to hang is awaited only if there is no majority without it, and has one question."""
        vote = _Vote(self._members, self._most)
        well = [each for each in self._members if not each.hangs]
        vote.awaited = set(well if len(well) >= self._most else self._members)
        for member in self._members if among is None else among:
            if member in vote.awaited or verb == "release" or not (verb == "wait" or member.is_asked):
                colour = self._colour.suspending if suspending is None else suspending
                question = _Question(member, verb, token, work, vote.heard, suspending=colour)
                if member.ask(question):
                    vote.questions.append(question)
        vote.awaited &= {each.member for each in vote.questions}
        return vote

    def _seconds(self, lease: float) -> float:
        return min(self._patience, lease / 3)

    def _told(self, vote: _Vote) -> bool:
        """Whether most say yes; EngineError if it can't be known."""
        if vote.yes >= vote.most:
            return True
        if len(vote.said) - vote.yes > len(self._members) - vote.most:
            return False
        raise vote.trouble()

    async def _all(self, vote: _Vote) -> list[Any]:
        await vote.until(lambda: False, self._colour, self._patience)
        said = vote.said
        if len(said) < vote.most:
            raise vote.trouble()
        return said

    def _standing(self, lefts: list[float]) -> float:
        """Seconds for which a majority has it; 0: it is none."""
        return sorted(lefts, reverse=True)[self._most - 1] if len(lefts) >= self._most else 0.0


def _releasing(name: str, token: bytes) -> Work:
    return lambda its, colour: its.ports[colour].release(name, token)


class _Seen:
    """A part of the votes, as it was seen at first. Who hasn't got the others gives it back soon, and takes it anew."""

    def __init__(self) -> None:
        self._token, self._ends, self._since = b"", 0.0, 0.0

    def stands(self, busy: Busy, now: float) -> bool:
        """Whether it has, for so long that it is no try."""
        if busy.token != self._token or now + busy.lease > self._ends + REST:
            self._token, self._ends, self._since = busy.token, now + busy.lease, now
        return now - self._since >= STANDS


def _of(called: str, told: str) -> str:
    """What a member has told, and which: most say so themselves, in one form or another."""
    for each in called, called.partition("://")[2]:
        told = told.removeprefix(f"{each}: ")
    return told if called in told else f"{called}: {told}"


def _rival(said: Sequence[Granted | Busy]) -> tuple[Busy, int]:
    """Who has most of the votes, and how many."""
    replies = [each for each in said if isinstance(each, Busy)]
    if not replies:  # all was granted, too late
        return Busy(new_id(), TICK), 0
    ((token, votes),) = Counter(each.token for each in replies).most_common(1)
    its = [each for each in replies if each.token == token]
    return Busy(token, _less(max(each.lease for each in its)), grace=all(each.grace for each in its)), votes


def _more(lease: float) -> float:
    """What a member is asked for, that has a clock of its own."""
    return lease * (1 + DRIFT) + TICK


def _less(lease: float) -> float:
    return max((lease - TICK) / (1 + DRIFT), TICK)
