"""How many starts a limit allows in any window of time. Pure: it takes the time, in whole microseconds, as an argument.

A sliding window, exact: a start is booked at the first moment at which no window of `per` that it lies in has more
than `most`. A booking is a plan: when its moment comes, its caller asks again (`take` with `was`), and starts if those
before it leave room; plans behind it give way. So a late start shifts the plans that it has to shift, and no more.

Starts that lie within a 128th of `per` are one pair, as wide as they lie apart: it is taken for all that
it may be, so that there is never more than `most`, and the state stays small, for at most one hundredth less.

Whole microseconds, as the engines that decide in their servers write this a second time, in numbers of their own, and
are held to it.
"""

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
"""As many are remembered; who would be one more is told to come again nearer to its time."""

LONGEST = 2 * 10**15
"""Some sixty years: twice as many microseconds behind today are still a whole number in every server's own numbers."""


class Booking(NamedTuple):
    """Starts of so much cost in all, each of which lies between these moments."""

    first: int
    last: int
    cost: int


class Window(NamedTuple):
    """What is known of one limit."""

    most: int = 0  # as last asked, for people
    per: int = 0
    long: int = 0  # how long a start is remembered: for the longest `per` that is in use,
    until: int = 0  # as it is until then
    rest: int = 0  # nothing starts before
    seen: int = 0  # the last time that it was asked: clocks may step back
    booked: tuple[Booking, ...] = ()  # in order, and none reaches into the next


NOTHING = Window()


class Starts(NamedTuple):
    """What is used of a limit."""

    now: int  # in the window that ends now
    ahead: int  # booked for later
    rest: int  # microseconds for which it is penalized


def micros(seconds: float) -> int:
    """The same in whole microseconds, of sixty years at most."""
    return LONGEST if seconds == inf else min(round(seconds * SECOND), LONGEST)


def slack(per: int) -> int:
    """How late a start may be without shifting what is planned behind it: its window is longer by so much."""
    return min(max(per // 50, 2_000), 100_000)


def checked(cost: int, most: int) -> None:
    """ValueError if a start of this cost could never be made."""
    if not 0 < cost <= most:
        raise ValueError(f"a start of cost {cost} can never be made: at most {most} are allowed at once")


def take(
    window: Window, now: int, most: int, per: int, cost: int, ahead: int, was: int = 0
) -> tuple[Window, int, int | None]:
    """Return the microseconds until a start of this cost may be made (0: it is made now), and its moment if booked.

    It is booked if that is at most `ahead` from now. `was` is the moment that an earlier answer has booked for this
    start (0: none). It is kept if it lies ahead and no earlier moment is free, exchanged for the new one otherwise, and
    given back if the start is too far away.
    """
    checked(cost, most)
    span = per + slack(per)
    today = _today(window, now, span)
    others = give_back(today, was, cost) if was else today
    # A start whose moment has come counts as late as the slack allows, so that it shifts the others least; and plans
    # that lie ahead shut nothing to it, as they ask again themselves.
    due = 0 < was <= today.seen
    earliest = max(was, today.seen - slack(per)) if due else today.seen
    earliest = today.rest if today.rest > today.seen else earliest
    at = _first_free(others, most, span, cost, earliest, today.seen if due else LONGEST)
    # Starts that came near to it since may have made a wide pair of its own, in which there is no room to be had again.
    kept = today.seen < was <= at and today.rest <= was and others is not today
    at = was if kept else at
    delay = max(at - today.seen, 0)
    if delay > ahead:
        # A step of the clock is kept: else each who is refused would see it anew, and no time would ever have passed.
        return others if was or window.seen - now > SECOND else window, delay, None
    booked = today.booked if kept else _with(others, at, cost, per // WIDTH, span)
    if booked is None:
        return window, delay, None
    return today._replace(most=most, per=per, booked=booked), delay, at


def note(window: Window, now: int, most: int, per: int, cost: int, at: int) -> Window:
    """The same with a start that somebody else has allowed, whatever we would have said."""
    span = per + slack(per)
    today = _today(window, now, span)
    booked = _with(today, max(at, today.seen - span), cost, per // WIDTH, span)
    return today if booked is None else today._replace(most=most, per=per, booked=booked)


def give_back(window: Window, at: int, cost: int) -> Window:
    """The same without a start that was booked, and isn't made."""
    for number, each in enumerate(window.booked):
        if each.first <= at <= each.last and each.cost >= cost:
            left = (each._replace(cost=each.cost - cost),) if each.cost > cost else ()
            return window._replace(booked=(*window.booked[:number], *left, *window.booked[number + 1 :]))
    return window


def penalize(window: Window, now: int, most: int, per: int, seconds: int) -> Window:
    """No start before so many microseconds have passed; what was booked before stays."""
    today = _today(window, now, per + slack(per))
    return today._replace(most=most, per=per, rest=max(today.rest, today.seen + seconds))


def used(window: Window, now: int) -> Starts:
    """What lies in the window that ends now, what is to come, and how long it is penalized."""
    today = _today(window, now, window.long)
    made = sum(each.cost for each in today.booked if today.seen - window.per < each.last <= today.seen)
    ahead = sum(each.cost for each in today.booked if each.last > today.seen)
    return Starts(made, ahead, max(today.rest - today.seen, 0))


def ends(window: Window) -> int:
    """Microseconds, from when it was last asked, until nothing of it matters any more."""
    last = window.booked[-1].last if window.booked else window.seen
    return max(last, window.rest, window.seen) + window.long - window.seen


# -- how ----------------------------------------------------------------------------------------------------------


def _today(window: Window, now: int, span: int) -> Window:
    """Return the same without what nobody asks for any more. Where a clock has stepped back a little, time stands
    still; where it has by more than a second, everything is moved along, as if no time had passed."""
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
    """The first moment from `at` on with room for it. Each pair with enough others less than a `span` before it shuts
    an interval: from one `span` before it to one behind the last of those others. They come in order, and so do both
    their ends. What begins behind both `until` and that moment shuts nothing."""
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
    """The bookings and this one: in the pair in which it lies, or near to whose beginning or end, or else its own."""
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
        # The two that are the oldest are one from now on: they matter to those only who asked for a longer `per`.
        oldest = Booking(booked[0].first, booked[1].last, booked[0].cost + booked[1].cost)
        booked, place = (oldest, *booked[2:]), place - 1
    return (*booked[:place], Booking(at, at, cost), *booked[place:])


# -- as bytes -----------------------------------------------------------------------------------------------------


def bytes_of(window: Window) -> bytes:
    """Decimals, which every server's own language reads: `1 most per long until rest seen`, and three of each pair:
    from the beginning of the one before (from `seen`) to its own, from there to its end, and its cost."""
    seen = window.seen
    head = 1, window.most, window.per, window.long, max(window.until - seen, 0), max(window.rest - seen, 0), seen
    numbers, before = [*head], seen
    for first, last, cost in window.booked:
        numbers += first - before, last - first, cost
        before = first
    return b" ".join(b"%d" % each for each in numbers)


def window_of(data: bytes | None) -> Window:
    """What is in these bytes; of what is none of ours, nothing."""
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
