"""The oracle checks a history: values, concurrent computations, errors, and the duration of calls.

Every finding is a broken promise of the docs. The oracle may miss some, but never reports a correct history. While a
fault has effects (from its start until a documented time after its end), other processes may compute for themselves
and return old values, as the docs say. Even then, a process must see its own changes at once, no call may exceed its
bound, and callers may get only the documented errors. After all faults, everything must work as if there had been none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from chaos.engines import World
from chaos.history import Call, Grip, History, Making
from chaos.plan import LOCK_LEASE, all_keys, kind_of

__all__ = ["Finding", "judged"]

NOISE = 1.0
"""Seconds that a busy machine may add to any duration, besides the stalls that a process notices itself."""

# After these, no caller may see an older value.
_ENDS = {"invalidate", "set", "set_many", "clear", "end_all", "end_tag"}
_ALLOWS = _ENDS | {"refresh", "expire", "expire_tag"}  # after these, a second computation may start while one runs
_COMPUTES = {"compute", "call", "many", "refresh", "cancel"}
_LOCKS = {"lock", "try_lock"}
_READS = {"get", "get_many", "peek"}  # these verbs work without the engine
_LINGERS = 6.0
"""Seconds in which a change of unknown outcome may still take effect."""


@dataclass
class Finding:
    """One broken promise, with its key and time."""

    what: str
    key: str
    start: float
    end: float


@dataclass(frozen=True)
class _Change:
    call: Call
    began: float
    ended: float

    @property
    def of_all(self) -> bool:
        return self.call.verb in ("clear", "end_all")


def judged(
    history: History,
    world: World,
    local: dict[str, bool],
    phases: list[tuple[float, float]],
    *,
    interrupted: bool = False,
) -> list[Finding]:
    """All findings. `local`: which processes have a local tier. `phases`: the two phases of healing."""
    judge = _Judge(history, world, local, phases, interrupted)
    return [
        *judge.values(), *judge.computations(), *judge.errors(), *judge.times(), *judge.locks(), *judge.healing(),
        *judge.rests(),
    ]  # fmt: skip


class _Judge:
    def __init__(
        self,
        history: History,
        world: World,
        local: dict[str, bool],
        phases: list[tuple[float, float]],
        interrupted: bool,
    ) -> None:
        self.interrupted = interrupted
        self.history = history
        self.world = world
        self.local = local
        self.phases = phases
        self.calls = sorted(history.calls.values(), key=lambda call: call.began)
        self.changes: dict[str, list[_Change]] = defaultdict(list)  # changes that have returned
        self.allows: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.bumps: dict[str, list[tuple[float, float]]] = defaultdict(list)  # when all keys of its scope were ended
        self.first: dict[tuple[str, str], float] = {}  # start of the first call of each process in each scope
        for call in self.calls:
            self._note(call)

    def _note(self, call: Call) -> None:
        for key in call.keys:
            self.first.setdefault((call.worker, _scope(key)), call.began)
        if call.verb not in _ALLOWS:
            return
        sure = call.ok and not self._forgotten(call)
        ended = call.ended if call.ok else min(call.ended, call.began + 60) + _LINGERS
        if call.verb in ("clear", "end_all"):
            ended += max(self.world.lag_of_all.values())
        for key in self._concerned(call):
            if call.verb in _ENDS and sure:
                self.changes[key].append(_Change(call, call.began, call.ended))
            self.allows[key].append((call.began, ended))
            if call.verb in ("clear", "end_all"):
                self.bumps[key].append((call.began, ended))

    def _concerned(self, call: Call) -> list[str]:
        if call.verb == "clear":
            return all_keys()
        if call.verb == "end_all":
            prefix = call.keys[0].rpartition("/")[0]
            return [key for key in all_keys(prefix.split("/")[0]) if key.startswith(prefix + "/")]
        return call.keys

    def _forgotten(self, call: Call) -> bool:
        """A server acknowledged the change, but its successor may not have received it."""
        return any(
            fault.effect.forgets and fault.began - 1.5 <= call.ended <= fault.until for fault in self.history.faults
        )

    # -- values -----------------------------------------------------------------------------------------------------

    def values(self) -> Iterator[Finding]:
        for call in self.calls:
            if call.verb == "many" and call.ok and set(call.values) != set(call.keys):
                yield self._found(f"{_of(call)} was given {len(call.values)} of {len(call.keys)}", call.keys[0], call)
            for key, maker in call.values.items():
                if isinstance(maker, dict):
                    yield self._found(f"{_of(call)} was given what nobody has made: {maker['wrong']}", key, call)
                elif maker is not None:
                    yield from self._value(call, key, maker)

    def _value(self, call: Call, key: str, maker: str) -> Iterator[Finding]:
        making, by = self.history.makings.get(maker), self.history.calls.get(maker)
        source = making or by
        if source is None or key not in source.keys:
            yield self._found(f"{_of(call)} was given a value of {maker}, which made none for it", key, call)
            return
        if making is not None:
            born, ended = making.born, making.ended
            if call.verb == "refresh" and born < call.began:
                yield self._found(f"{_of(call)} joined an older computation ({maker})", key, call, born)
        else:
            assert by is not None
            # The value may have been stored as late as this. If the call failed, the moment is unknown.
            born = ended = by.ended if by.ok else inf
        yield from self._older(call, key, maker, born, source)
        yield from self._aged(call, key, maker, ended)

    def _older(self, call: Call, key: str, maker: str, born: float, source: Making | Call) -> Iterator[Finding]:
        """Promise 4: no value is older than a change that had returned when the call began."""
        for change in self.changes[key]:
            if change.began <= born or change.ended >= call.began:
                continue
            if change.call.pid != call.pid:
                if not self.world.shared:
                    continue
                has_tier = self.local.get(call.worker, False)
                lag = (self.world.lag_of_all if change.of_all else self.world.lag)[has_tier]
                if lag:
                    lag += NOISE + 2 * self.history.stalled(call.worker, change.ended, call.began)
                if call.began - change.ended <= lag or self._out_of_touch(call, source, has_tier, change.ended):
                    continue
                if self._elsewhere(call, key, has_tier, change):
                    continue
            yield self._found(
                f"{_of(call)} was given {maker}, begun {change.began - born:.3f} s before {_of(change.call)}, "
                f"which had returned {call.began - change.ended:.3f} s before",
                key, call, born,
            )  # fmt: skip
            return

    def _out_of_touch(self, call: Call, source: Making | Call, has_tier: bool, since: float) -> bool:
        """Because of a fault, the process may have missed changes of others since this moment, as the docs allow."""
        felt = [fault for fault in self.history.at(call.worker, since, call.ended) if fault.effect.hides]
        if any(fault.effect.forgets for fault in felt):
            return True  # the engine may have lost the change itself
        if has_tier and any(fault.effect.silent for fault in felt):
            return True  # messages come late or never, and the process notices it within seconds
        if any(call.began <= fault.ended + fault.effect.unseen + NOISE / 2 for fault in felt if fault.effect.unseen):
            return True
        # A process that reads the engine at each call is up to date, unless it works without the engine, with its own
        # values. Either it believes the engine to be down (a failed part or a full engine is reported only once a
        # minute), or its `wait` ran out, which is not reported.
        if not felt or source.worker != call.worker:
            return False
        without = self.world.parted or self.history.believed_down(call.worker, since - NOISE, call.ended)
        without = without or any(fault.kind == "full" for fault in felt)
        return without or self._was_short_of_time(source)

    def _elsewhere(self, call: Call, key: str, has_tier: bool, change: _Change) -> bool:
        """For a second, the call may read an old generation, in which the change was not made: its process has not
        heard that the generation ended, the changing process never knew it, and the server has lost it."""
        lag = self.world.lag_of_all[has_tier] + NOISE
        for fault in self.history.faults:
            if fault.effect.keeps or fault.began > change.ended:
                continue
            known = self.first.get((change.call.worker, _scope(key)), inf)
            if (fault.effect.again or known > fault.began) and call.began < fault.ended + lag:
                return True
            if any(began < fault.ended and fault.began < ended and call.began < ended + NOISE
                   for began, ended in self.bumps[key]):  # fmt: skip
                return True
        return False

    def _was_short_of_time(self, made: Making | Call) -> bool:
        """The call that computed the value had a `wait`, so it did not wait for the engine to the end."""
        by = made if isinstance(made, Call) else self.history.calls.get(made.call)
        return by is not None and by.wait is not None

    def _ran_out_of_time(self, making: Making) -> bool:
        """The computation began after the caller's `wait` was over. Promise 1 allows that, with any engine."""
        by = self.history.calls.get(making.call)
        return by is not None and by.wait is not None and making.born > by.began + by.wait

    def _aged(self, call: Call, key: str, maker: str, ended: float) -> Iterator[Finding]:
        """No caller gets a value after its time is over."""
        kind = kind_of(key)
        allowed = float(kind.options["ttl"]) if call.verb in ("get", "get_many") else kind.age
        # If a server's clock is set back, a value gets its whole time again: once for each step.
        allowed *= 1 + sum(fault.effect.step and ended <= fault.until for fault in self.history.faults)
        over = call.began - ended - allowed
        if over > 2 + NOISE + self.history.stalled(call.worker, ended, call.began):
            yield self._found(f"{_of(call)} was given {maker}, {over:.1f} s after its end", key, call, ended)

    # -- computations -----------------------------------------------------------------------------------------------

    def computations(self) -> Iterator[Finding]:
        """Promise 1: one computation of a key at a time, unless a caller requested a second one."""
        by_key: dict[str, list[Making]] = defaultdict(list)
        for making in sorted(self.history.makings.values(), key=lambda making: making.born):
            for key in making.keys:
                by_key[key].append(making)
        for key, makings in by_key.items():
            standing: list[Making] = []
            for making in makings:
                standing = [each for each in standing if each.ended > making.born]
                for each in standing:
                    if not self._may_overlap(key, each, making):
                        yield Finding(
                            f"{making.id} began for {_name(self.history, making)} while {each.id} was under way "
                            f"for {_name(self.history, each)}, since {making.born - each.born:.3f} s",
                            key, each.born, making.born,
                        )  # fmt: skip
                standing.append(making)

    def _may_overlap(self, key: str, first: Making, second: Making) -> bool:
        history = self.history
        calls = [history.calls[each.call] for each in (first, second) if each.call in history.calls]
        start = min([first.born, *(call.began for call in calls)])
        if any(began < second.born and ended > start for began, ended in self.allows[key]):
            return True
        for each in (first, second):  # a stalled process has not read yet that its generation ended
            for began, ended in self.bumps[key]:
                if began < each.born and start <= ended + history.stalled(each.worker, began, each.born):
                    return True
        if second.born - first.born >= kind_of(key).hold or not (first.pid == second.pid or self.world.shared):
            return True
        if any(self._on_its_own(each, key, start, second.born) for each in (first, second)):
            return True
        # A lease is renewed after a third of its time, so at least half of it always remains.
        return history.stalled(first.worker, first.born, second.born) > kind_of(key).lease / 2

    def _on_its_own(self, making: Making, key: str, start: float, end: float) -> bool:
        """The process may compute although others do, or its lease may have ended or been lost."""
        if self._ran_out_of_time(making):
            return True
        felt = [fault for fault in self.history.at(making.worker, start, end) if fault.effect.hides]
        if not felt:
            return False
        half = kind_of(key).lease / 2
        if self.world.parted or any(not each.effect.keeps or each.ended - each.began >= half for each in felt):
            return True
        return self._was_short_of_time(making) or self.history.believed_down(making.worker, start - NOISE, end)

    # -- errors -----------------------------------------------------------------------------------------------------

    def errors(self) -> Iterator[Finding]:
        for call in self.calls:
            if not call.ok and not self._may_fail(call):
                yield self._found(f"{_of(call)} ended with {call.outcome}: {call.text}", call.keys[0], call)

    def _may_fail(self, call: Call) -> bool:
        blurred = self.history.blurred(call.worker, call.began, call.ended)
        match call.outcome:
            case "Broken" | "ComputationFailed":
                return call.verb in _COMPUTES and any(kind_of(key).fails > 0 for key in call.keys)
            case "WaitTimeout":
                return call.wait is not None and call.verb in _COMPUTES
            case "CancelledError":
                return call.verb == "cancel"
            case "EngineError":
                return call.verb not in _COMPUTES | _READS and blurred
            case "LockTimeout":
                return call.verb in _LOCKS
            case "LockLost":
                return call.verb in _LOCKS and (
                    blurred or self.history.stalled(call.worker, call.began, call.ended) > LOCK_LEASE / 2
                )
            case "Interrupted":
                return self.interrupted
            case "never ended":
                return call.worker in self.history.deaths
        return False

    # -- times ------------------------------------------------------------------------------------------------------

    def times(self) -> Iterator[Finding]:
        for call in self.calls:
            if call.ended == inf or call.worker in self.history.deaths:
                continue
            for what, start, end, bound in self._bounds(call):
                bound += NOISE + 2 * self.history.stalled(call.worker, start, end)
                if end - start > bound:
                    yield self._found(f"{what} took {end - start:.2f} s, and may take {bound:.2f}", call.keys[0], call)

    def _bounds(self, call: Call) -> Iterator[tuple[str, float, float, float]]:
        """Each part of the call that has a bound: its name, start, end, and the bound in seconds."""
        trouble = 6.0 if self.history.blurred(call.worker, call.began, call.ended) else 0.0
        if call.verb == "fork":
            return
        if call.verb in _LOCKS:
            grip = self.history.grips.get(call.id)
            wait = call.wait or 0.0
            if grip is None:
                yield _of(call), call.began, call.ended, wait + trouble
            else:
                yield f"the way into {_of(call)}", grip.asked, grip.got, wait + trouble
                yield f"the way out of {_of(call)}", grip.left, call.ended, trouble
        elif call.verb in _COMPUTES:
            longest = sum(kind_of(key).longest for key in call.keys)
            if call.wait is not None and len(call.keys) == 1:
                # An engine that hangs costs its client's time-out once. A second time-out must exceed the bound.
                longest, trouble = call.wait + call.nap - NOISE / 2, min(trouble, self.world.time_out)
                if call.outcome == "Interrupted":  # perhaps between two bytecodes where only one applies the `wait`
                    trouble += 1.5
            yield _of(call), call.began, call.ended, longest + trouble
        else:
            yield _of(call), call.began, call.ended, trouble * len(call.keys)

    # -- locks ------------------------------------------------------------------------------------------------------

    def locks(self) -> Iterator[Finding]:
        by_name: dict[str, list[Grip]] = defaultdict(list)
        for grip in sorted(self.history.grips.values(), key=lambda grip: grip.got):
            by_name[grip.name].append(grip)
        for grips in by_name.values():
            for at, second in enumerate(grips):
                for first in grips[max(0, at - 20) : at]:
                    if self.world.shared or first.pid == second.pid:
                        yield from self._two(first, second)

    def _two(self, first: Grip, second: Grip) -> Iterator[Finding]:
        losses = [
            fault for fault in self.history.faults
            if not fault.effect.keeps and fault.began <= second.left and fault.until >= first.asked
        ]  # fmt: skip
        wrong = [moment for moment in first.inside if second.got < moment < second.left]
        if wrong and not losses:
            yield Finding(
                f"{first.id} believed to have {first.name} {wrong[0] - second.got:.3f} s after {second.id} had got it",
                first.name, first.asked, wrong[0],
            )  # fmt: skip
        survives = not losses if not self.world.fences_last else not any(fault.effect.step for fault in losses)
        if second.asked > first.got and second.fence <= first.fence and survives:
            yield Finding(
                f"{second.id} got {first.name} with fence {second.fence} after {first.id} had {first.fence}",
                first.name, first.asked, second.got,
            )  # fmt: skip

    # -- afterwards -------------------------------------------------------------------------------------------------

    def healing(self) -> Iterator[Finding]:
        """After the faults, there are no errors (see `errors`), one computation of each key, and one value."""
        for number, (start, end) in enumerate(self.phases):
            calls = [call for call in self.calls if start <= call.began <= end]
            firm = [key for key in all_keys() if kind_of(key).options["ttl"] == 600]
            made = Counter(key for making in self.history.makings.values() if start <= making.born <= end
                           for key in making.keys)  # fmt: skip
            for key in firm:
                if made[key] > 1 - number:
                    yield Finding(f"computed {made[key]} times in phase {number + 1} of healing", key, start, end)
                given = {call.values[key] for call in calls if key in call.values and call.ok}
                if number and len(given) != 1:  # phase 1 may still return stale values
                    yield Finding(f"the processes don't agree after healing: {given}", key, start, end)

    def rests(self) -> Iterator[Finding]:
        for each in self.history.hangs:
            yield Finding(each, "", 0.0, inf)
        for worker, left in self.history.left.items():
            if left:
                yield Finding(f"{worker} has left behind when its cache was closed: {left}", "", 0.0, inf)

    def _found(self, what: str, key: str, call: Call, since: float = inf) -> Finding:
        return Finding(what, key, min(call.began, since), min(call.ended, call.began + 60))


def _scope(key: str) -> str:
    """The scope of the key's generation: its cache, or its function."""
    return "cache" if key.startswith("cache/") else key.rpartition("/")[0]


def _of(call: Call) -> str:
    return f"{call.colour} {call.verb} {call.id}"


def _name(history: History, making: Making) -> str:
    call = history.calls.get(making.call)
    return _of(call) if call is not None else making.call
