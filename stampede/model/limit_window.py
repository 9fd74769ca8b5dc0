"""The starts that a rate limit allows in any window of time. Pure: the time, in whole microseconds, is an argument.

This is an exact sliding window. A start is booked at the first moment at which no window of `per` that contains it has
more than `most`. A booking is a plan. When its moment comes, its caller asks again (`take` with `was`), and starts if
earlier starts leave room; later plans give way. So a late start shifts only the plans that it has to shift.

Starts within a 128th of `per` are stored as one pair, a first and a last moment. Its whole cost counts wherever one of
its starts may lie. So there are never more than `most`, the state stays small, and at most one hundredth of the limit
is lost.

Times are whole microseconds, because engines that decide in their servers implement these rules in their own number
types, and tests compare the results."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

__all__ = [
    "NOTHING", "PAIRS", "SECOND", "WIDTH",
    "Booking", "Starts", "Window", "bytes_of", "checked", "ends", "give_back", "micros", "note", "penalize", "slack",
    "take", "used", "window_of",
]  # fmt: skip

SECOND = 1_000_000
WIDTH = 128
PAIRS = 512
"""The most pairs that are stored. A caller whose start would need another one has to ask again nearer to its time."""

LONGEST = 2 * 10**15
"""The longest time, some sixty years. Now plus twice this is still exact in the number type of every server."""


class Booking(NamedTuple):
    """Starts between two moments, with their cost in total."""

    first: int
    last: int
    cost: int


class Window(NamedTuple):
    """The state of one limit."""

    most: int = 0  # as it was last asked for, to show to people
    per: int = 0
    long: int = 0  # how long a start is stored: for the longest `per` in use
    until: int = 0  # the moment until which `long` is valid
    rest: int = 0  # nothing starts before this moment
    seen: int = 0  # the time of the last question, because clocks may step back
    booked: tuple[Booking, ...] = ()  # in order, without overlaps


NOTHING = Window()


class Starts(NamedTuple):
    """How much of a limit is used."""

    now: int  # in the window that ends now
    ahead: int  # booked for later
    rest: int  # microseconds that a penalty still lasts


def micros(seconds: float) -> int:
    """Return the seconds as whole microseconds, at most `LONGEST`."""
    return LONGEST if seconds == inf else min(round(seconds * SECOND), LONGEST)


def slack(per: int) -> int:
    """Return how late a start may be without shifting later plans. Windows are longer than `per` by this."""
    return min(max(per // 50, 2_000), 100_000)


def checked(cost: int, most: int) -> None:
    """Raise ValueError if a start of this cost could never be made."""
    if not 0 < cost <= most:
        raise ValueError(f"a start of cost {cost} can never be made: at most {most} are allowed at once")


def take(
    window: Window, now: int, most: int, per: int, cost: int, ahead: int, was: int = 0
) -> tuple[Window, int, int | None]:
    """Return the new state, the microseconds until a start of this cost (0: it is made now), and its moment if booked.
    The start is booked if it is at most `ahead` from now. `was` is the moment that an earlier answer has booked for it,
    or 0. That booking remains if it lies in the future and no earlier moment is free. Otherwise the new one replaces
    it. It is given back if the start is too far away."""
    checked(cost, most)
    span = per + slack(per)
    today = _today(window, now, span)
    others = give_back(today, was, cost) if was else today
    # A start whose moment has come counts from that moment, or as early as the slack allows, so that it shifts the
    # others least. Plans in the future do not keep it out, because their callers ask again.
    due = 0 < was <= today.seen
    earliest = max(was, today.seen - slack(per)) if due else today.seen
    earliest = today.rest if today.rest > today.seen else earliest
    at = _first_free(others, most, span, cost, earliest, today.seen if due else LONGEST)
    # Later starts may have widened the pair of this booking. Once given back, there would be no room for it.
    unchanged = today.seen < was <= at and today.rest <= was and others is not today
    at = was if unchanged else at
    delay = max(at - today.seen, 0)
    if delay > ahead:
        # A step of the clock is stored. Otherwise each refused caller would see it again, and time would never advance.
        return others if was or window.seen - now > SECOND else window, delay, None
    booked = today.booked if unchanged else _with(others, at, cost, per // WIDTH, span)
    if booked is None:
        return window, delay, None
    return today._replace(most=most, per=per, booked=booked), delay, at


def note(window: Window, now: int, most: int, per: int, cost: int, at: int) -> Window:
    """Return the state with a start that another server has allowed, even if these rules would not allow it."""
    span = per + slack(per)
    today = _today(window, now, span)
    booked = _with(today, max(at, today.seen - span), cost, per // WIDTH, span)
    return today if booked is None else today._replace(most=most, per=per, booked=booked)


def give_back(window: Window, at: int, cost: int) -> Window:
    """Return the state without a start that was booked for `at`, and is not made."""
    for number, each in enumerate(window.booked):
        if each.first <= at <= each.last and each.cost >= cost:
            left = (each._replace(cost=each.cost - cost),) if each.cost > cost else ()
            return window._replace(booked=(*window.booked[:number], *left, *window.booked[number + 1 :]))
    return window


def penalize(window: Window, now: int, most: int, per: int, seconds: int) -> Window:
    """Return the state with no start before so many microseconds have passed. Existing bookings remain."""
    today = _today(window, now, per + slack(per))
    return today._replace(most=most, per=per, rest=max(today.rest, today.seen + seconds))


def used(window: Window, now: int) -> Starts:
    """Return the cost of starts in the window that ends now, of later bookings, and the rest of the penalty."""
    today = _today(window, now, window.long)
    made = sum(each.cost for each in today.booked if today.seen - window.per < each.last <= today.seen)
    ahead = sum(each.cost for each in today.booked if each.last > today.seen)
    return Starts(made, ahead, max(today.rest - today.seen, 0))


def ends(window: Window) -> int:
    """Return the microseconds from the last question until the state may be dropped."""
    last = window.booked[-1].last if window.booked else window.seen
    return max(last, window.rest, window.seen) + window.long - window.seen


# -- implementation -----------------------------------------------------------------------------------------------


def _today(window: Window, now: int, span: int) -> Window:
    """Return the state at `now`, without bookings that are too old to matter. If the clock has stepped back by up to a
    second, time stands still. If it has stepped back further, all moments are moved by the step, as if no time had
    passed."""
    back = window.seen - now
    if back > SECOND:
        moved = tuple(Booking(each.first - back, each.last - back, each.cost) for each in window.booked)
        window = window._replace(until=window.until - back, rest=window.rest - back, booked=moved)
    elif back > 0:
        now = window.seen
    long, until = window.long, window.until
    if span >= long or now >= until:
        long, until = span, now + span
    booked = window.booked
    if booked and booked[0].last + long <= now:
        booked = tuple(each for each in booked if each.last + long > now)
    return window._replace(long=long, until=until, seen=now, booked=booked)


def _first_free(window: Window, most: int, span: int, cost: int, at: int, until: int) -> int:
    """Return the first moment from `at` with room for a start of this cost. If a pair and those less than a `span`
    before it leave no room for this cost, it closes the interval from a `span` before itself to a `span` after the last
    of them that has to leave the window. The intervals are in order of both their ends. Pairs that begin after `until`
    and after `at` close nothing."""
    booked, low, total = window.booked, 0, 0
    for high in booked:
        if high.first > max(at, until):
            break
        total += high.cost
        while total - booked[low].cost + cost > most:
            total -= booked[low].cost
            low += 1
        if total + cost > most and high.first - span < at < booked[low].last + span > high.first:
            at = booked[low].last + span
    return at


def _with(window: Window, at: int, cost: int, width: int, span: int) -> tuple[Booking, ...] | None:
    """Return the bookings with a new one, in a pair that contains it or is near enough, or else in a pair of its own.
    None means that there are too many pairs."""
    booked = window.booked
    place = len(booked)
    while place and booked[place - 1].first > at:
        place -= 1
    if place:
        near = booked[place - 1]
        if at <= max(near.last, near.first + width):
            both = Booking(near.first, max(near.last, at), near.cost + cost)
            return (*booked[: place - 1], both, *booked[place:])
    if place < len(booked):
        near = booked[place]
        if near.last - at <= width:
            return (*booked[:place], Booking(at, near.last, near.cost + cost), *booked[place + 1 :])
    if len(booked) >= PAIRS:
        if not place or booked[1].last + span > window.seen:
            return None
        # Join the two oldest pairs: only callers with a longer `per` still count them.
        oldest = Booking(booked[0].first, booked[1].last, booked[0].cost + booked[1].cost)
        booked, place = (oldest, *booked[2:]), place - 1
    return (*booked[:place], Booking(at, at, cost), *booked[place:])


# -- as bytes -----------------------------------------------------------------------------------------------------


def bytes_of(window: Window) -> bytes:
    """Return the state as decimal numbers, which the language of every server can read. They are `1 most per long until
    rest seen`, and three numbers for each pair: the distance from the beginning of the previous pair (or from `seen`)
    to its own, the distance from there to its end, and its cost."""
    seen = window.seen
    head = 1, window.most, window.per, window.long, max(window.until - seen, 0), max(window.rest - seen, 0), seen
    numbers, before = [*head], seen
    for first, last, cost in window.booked:
        numbers += first - before, last - first, cost
        before = first
    return b" ".join(b"%d" % each for each in numbers)


def window_of(data: bytes | None) -> Window:
    """Return the state in these bytes, or `NOTHING` if they are not from `bytes_of`."""
    try:
        numbers = [int(each) for each in (data or b"").split()]
    except ValueError:
        return NOTHING
    if len(numbers) < 7 or (len(numbers) - 7) % 3 or numbers[0] != 1:
        return NOTHING
    _, most, per, long, until, rest, seen = numbers[:7]
    return Window(most, per, long, seen + until, seen + rest, seen, tuple(_pairs(numbers[7:], seen)))


def _pairs(numbers: Sequence[int], before: int) -> list[Booking]:
    pairs = []
    for number in range(0, len(numbers), 3):
        before += numbers[number]
        pairs.append(Booking(before, before + numbers[number + 1], numbers[number + 2]))
    return pairs
