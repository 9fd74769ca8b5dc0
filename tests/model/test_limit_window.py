"""The window of a limit, compared with one that keeps every start. The time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.model.limit_window import (
    NOTHING,
    PAIRS,
    WIDTH,
    bytes_of,
    ends,
    give_back,
    penalize,
    slack,
    take,
    used,
    window_of,
)

PER = 800_000
SPAN = PER + slack(PER)


@dataclass
class Naive:
    """All starts, each with its own moment. It checks every window."""

    starts: list[tuple[int, int]] = field(default_factory=list)

    def fits(self, at: int, most: int, span: int, cost: int) -> bool:
        all_of = [*self.starts, (at, cost)]
        ends = [each for each, _ in all_of if at <= each < at + span]
        return all(sum(c for when, c in all_of if end - span < when <= end) <= most for end in ends)


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_no_window_has_more_than_is_allowed(seed: int) -> None:
    """No window has more starts than allowed. The random history is long, because a short one seldom fills a limit."""
    dice, window, naive, now = Random(seed), NOTHING, Naive(), 0
    most = dice.randint(3, 12)
    for _ in range(60):
        now += _step(dice)
        cost, ahead = dice.randint(1, 3), dice.choice([0, SPAN // 3, 5 * SPAN])
        window, delay, at = take(window, now, most, PER, cost, ahead)
        assert (at is not None) == (delay <= ahead)
        if at is not None:
            assert at == now + delay
            assert naive.fits(at, most, SPAN, cost)
            if dice.random() < 0.2:
                window = give_back(window, at, cost)
            else:
                naive.starts.append((at, cost))
        window = window_of(bytes_of(window))
        assert len(window.booked) <= PAIRS


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_clocks_that_step_back_and_rates_that_change_let_nobody_past(seed: int) -> None:
    """If clocks step back and rates change, each start still keeps its rate by a clock that never steps."""
    dice, window, naive, clock, true = Random(seed), NOTHING, Naive(), 10 * SPAN, 0
    asked, since = -PER, 0  # a rate that is not asked for during a whole `per` is forgotten
    for _ in range(60):
        step = -dice.randint(0, 3 * SPAN) if dice.random() < 0.2 else _step(dice)
        clock, true = clock + step, true + max(step, 0)
        cost, most, per = dice.randint(1, 3), dice.randint(3, 9), dice.choice([PER, PER // 4])
        window, delay, at = take(window, clock, most, per, cost, 0)
        if at is not None:
            assert delay == 0
            if per == PER:
                asked, since = true, since if true - asked < PER else true
            before = sum(c for when, c in naive.starts if when > true - per and when >= since)
            assert before + cost <= most
            naive.starts.append((true, cost))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("most, workers, late", [(10, 30, 0.1), (100, 250, 0.1), (4, 30, 1.0)])
def test_callers_that_wake_late_keep_their_turns(most: int, workers: int, late: float, seed: int) -> None:
    """Callers sleep until their starts, and some wake up to 30 ms late, as with a blocked loop. A late caller keeps its
    turn, hardly any start is lost, and no window has too many."""
    dice, window, now, end, per = Random(seed), NOTHING, 1, 30_000_000, 500_000
    starts, waited = list[int](), list[int]()
    due = [(1 + worker, worker, 0, 1 + worker) for worker in range(workers)]  # next request, who, booking, came
    while now < end:
        now, who, was, came = heappop(due)
        window, delay, at = take(window, now, most, per, 1, 10 * end, was)
        assert at is not None
        if delay:
            lateness = dice.randint(0, 30_000) if dice.random() < late else 60
            heappush(due, (now + delay + lateness, who, at, came))
        else:
            starts.append(now)
            waited.append(now - came)
            heappush(due, (now + 1, who, 0, now + 1))
    assert all(last - first >= per for first, last in zip(starts, starts[most:], strict=False))
    assert len(starts) >= (0.97 if late < 1 else 0.92) * most * end / per
    assert max(waited) <= (workers / most + 2) * per * 1.1


def test_a_start_that_is_late_shifts_no_more_than_it_has_to() -> None:
    """A late start shifts the plans behind it no more than it has to. Otherwise one start would be too many."""
    window, _, first = take(NOTHING, 1, 1, PER, 1, 0)
    window, _, second = take(window, 2, 1, PER, 1, 9 * SPAN)
    window, _, third = take(window, 3, 1, PER, 1, 9 * SPAN)
    assert first == 1 and second == 1 + SPAN and third == 1 + 2 * SPAN
    window, delay, at = take(window, second + slack(PER), 1, PER, 1, 0, second)
    assert (delay, at) == (0, second)
    window, delay, at = take(window, second + 100_000, 1, PER, 1, 0, second)
    assert (delay, at) == (0, second + 100_000 - slack(PER))
    window, delay, at = take(window, third, 1, PER, 1, 9 * SPAN, third)
    assert third + delay == at == second + 100_000 + PER


def test_who_asks_early_moves_up_into_a_place_that_was_given_back() -> None:
    """A caller that asks early moves up to a moment that another one gave back."""
    window = NOTHING
    moments = list[int]()
    for now in range(1, 5):
        window, _, at = take(window, now, 1, PER, 1, 9 * SPAN)
        assert at is not None
        moments.append(at)
    window = give_back(window, moments[1], 1)
    window, _, at = take(window, 10, 1, PER, 1, 9 * SPAN, moments[3])
    assert at == moments[1]
    window, _, at = take(window, 11, 1, PER, 1, 0, moments[2])  # its caller waits no longer: its booking is removed
    assert at is None
    assert take(window, 12, 1, PER, 1, 9 * SPAN)[2] == moments[2]


@settings(max_examples=100)
@given(st.integers(0, 1 << 32))
def test_nobody_is_overtaken_and_no_start_gets_later(seed: int) -> None:
    """Callers that ask again before their time keep their order, and their starts do not get later."""
    dice, window, now = Random(seed), NOTHING, 1
    most, per, gap = dice.randint(1, 8), dice.choice([100_000, 300_000, 2_000_000]), dice.choice([0, 2_000, 30_000])
    due, order = list[tuple[int, int, int]](), list[int]()  # next request, who, booking
    for who in range(60):
        now += dice.randint(0, gap)
        heappush(due, (now, who, 0))
    while due:
        now, who, was = heappop(due)
        window, delay, at = take(window, now, most, per, 1, 100 * per, was)
        # A caller that is in time may have to wait for the end of its pair: the order inside a pair is not stored.
        assert at is not None and (not was or at <= was + (per // WIDTH if was <= now else 0))
        if not delay:
            order.append(who)
        else:
            heappush(due, (now + (delay // 2 if delay > 1_000_000 or dice.random() < 0.1 else delay), who, at))
    assert order == sorted(order)


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_no_start_gets_later_by_asking(seed: int) -> None:
    """A start never gets later if its caller asks again, whatever it costs and whatever others book or give back."""
    dice, window, now, mine = Random(seed), NOTHING, 1, list[tuple[int, int]]()
    most = dice.randint(3, 12)
    for _ in range(150):
        now += dice.randint(0, SPAN // 50)
        mine = [each for each in mine if each[0] > now]
        what, was, cost = dice.random(), 0, dice.randint(1, 3)
        if what < 0.6 and mine:
            was, cost = mine.pop(dice.randrange(len(mine)))
        if what < 0.2:
            window = give_back(window, was, cost)
            continue
        window, _, at = take(window, now, most, PER, cost, 60 * SPAN, was)
        assert at is not None and (at <= was or not was)
        mine.append((at, cost))


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_the_first_moment_that_is_free_is_found(seed: int) -> None:
    """A start gets the first moment that is free, even if that was given back."""
    dice, window, now, naive, per = Random(seed), NOTHING, 1, Naive(), 100  # no pair is wider than a moment
    most, span = dice.randint(2, 6), per + slack(per)
    for _ in range(40):
        now += dice.randint(0, span // 5)
        if naive.starts and dice.random() < 0.3:
            at, cost = naive.starts.pop(dice.randrange(len(naive.starts)))
            window = give_back(window, at, cost)
        naive.starts = [each for each in naive.starts if each[0] + span > now]
        cost = dice.randint(1, 2)
        window, _, at = take(window, now, most, per, cost, 60 * SPAN)
        assert at == min(
            each for each in [now, *(at + span for at, _ in naive.starts)] if naive.fits(each, most, span, cost)
        )
        naive.starts.append((at, cost))


def _step(dice: Random) -> int:
    kind = dice.random()
    if kind < 0.4:
        return dice.randint(0, 5_000)
    return dice.randint(0, SPAN // 2) if kind < 0.8 else dice.randint(SPAN, 3 * SPAN)


@pytest.mark.parametrize("most, cost", [(5, 1), (100, 3), (2000, 1)])
def test_nearly_all_of_it_is_used(most: int, cost: int) -> None:
    """Nearly all of a limit can be used. The test asks for twice as much as allowed, at odd moments."""
    window, now, made, longest = NOTHING, 0, 0, 0
    for turn in range(5_000):
        window, delay, at = take(window, now, most, PER, cost, 0)
        made += cost if at is not None else 0
        now += delay if delay else (turn * 7919) % (PER * cost // most)
        longest = max(longest, len(window.booked))
    assert made >= 0.99 * (most // cost * cost) * (now // SPAN)
    assert longest <= 2 * WIDTH + 2
    assert turn > most


def test_it_says_which_start_can_never_be() -> None:
    """A start with a larger cost than the whole limit is refused. Otherwise its caller would wait for ever."""
    with pytest.raises(ValueError, match="a start of cost 6 can never be made: at most 5"):
        take(NOTHING, 0, 5, PER, 6, 0)


def test_a_penalty_stands_until_its_end_and_no_shorter_one_ends_it() -> None:
    """A penalty lasts until its end. A shorter one does not end it, and earlier starts still count."""
    window, _, _ = take(NOTHING, 0, 5, PER, 2, 0)
    window = penalize(penalize(window, 10, 5, PER, 9_000_000), 20, 5, PER, 1_000)
    assert used(window, 1_010) == (2, 0, 8_999_000)
    assert take(window, 1_010, 5, PER, 1, 0)[1:] == (8_999_000, None)
    assert take(window, 1_010, 5, PER, 1, 9_000_000)[2] == 9_000_010
    assert ends(window) >= 8_999_000


def test_what_is_given_back_can_be_had_again() -> None:
    """A start that was given back can be booked again."""
    window, _, _ = take(NOTHING, 0, 3, PER, 2, 0)
    window, _, at = take(window, 10, 3, PER, 1, 0)
    assert at == 10 and take(window, 20, 3, PER, 1, 0)[2] is None
    window = give_back(window, at, 1)
    assert take(window, 20, 3, PER, 1, 0)[2] == 20
    assert take(window, 20, 3, PER, 2, 0)[2] is None
    assert give_back(give_back(window, 0, 2), 0, 2).booked == ()


@pytest.mark.parametrize("back", [500_000, 3_600_000_000])
def test_a_clock_that_is_set_back_stalls_nobody(back: int) -> None:
    """If a clock is set back, callers do not wait until it shows its old time again."""
    window, _, _ = take(NOTHING, 2 * back, 1, PER, 1, 0)
    window, _, refused = take(window, back, 1, PER, 1, 0)
    assert refused is None
    assert take(window, back + 500_000 + SPAN, 1, PER, 1, 0)[2] is not None


def test_asking_books_nothing_and_foreign_bytes_are_nothing() -> None:
    """A look books nothing. Bytes that are no valid window count as an empty one."""
    assert take(NOTHING, 5, 5, PER, 1, -1) == (NOTHING, 0, None)
    for data in (None, b"", b"2 1 1", b"x", b"1 5 800000 816000 0 0 5 1 2"):
        assert window_of(data) == NOTHING
