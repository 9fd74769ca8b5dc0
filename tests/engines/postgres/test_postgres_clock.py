"""A Postgres server whose clock is changed: no time that was given becomes longer, and no caller waits longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("psycopg")

from postgres_server import MovedClock, shared_postgres

from stampede.engines.postgres import PostgresEngine
from stampede.model.entry import Entry, Verdict, new_id
from stampede.model.ports import Ask, Busy, Failed, Found, Granted
from stampede.runtime.colour import run_blocking as run

GIVEN = 10.0
YEAR = 365 * 86400.0


@pytest.fixture
def clock() -> Iterator[MovedClock]:
    with shared_postgres().database() as database:
        yield MovedClock(shared_postgres(), database)


@pytest.fixture
def engine(clock: MovedClock) -> Iterator[PostgresEngine]:
    engine = PostgresEngine(clock.url)
    yield engine
    engine.close()


def some() -> Entry[Any]:
    return Entry(b"value", new_id(), ttl=GIVEN, fresh=GIVEN, keep=2 * GIVEN)


def claimed(engine: PostgresEngine, token: bytes | None = None, **terms: Any) -> Any:
    return run(engine.blocking.claims.claim("k", token or new_id(), Ask(GIVEN, **terms)))


def test_an_entry_is_kept_no_longer_than_it_was_given(clock: MovedClock, engine: PostgresEngine) -> None:
    """Promise 14: if the clock is set back by a year, a value must not be kept for a year."""
    run(engine.blocking.store.set("k", some()))
    clock.step(-YEAR)
    assert run(engine.blocking.claims.look("k")) is None  # only a claim can judge the time left
    (kept,) = run(engine.blocking.store.get(["k"]))
    assert kept is not None
    assert kept.fresh <= GIVEN + 1
    found = claimed(engine)
    assert isinstance(found, Found)
    assert found.entry.fresh <= GIVEN
    assert found.entry.keep <= 2 * GIVEN
    assert run(engine.blocking.claims.look("k")) is not None  # the claim has corrected the times
    clock.step(-YEAR + GIVEN)
    assert isinstance(claimed(engine), Granted)


def test_a_dead_holders_lease_is_no_longer_than_it_was(clock: MovedClock, engine: PostgresEngine) -> None:
    """Promise 3: if the clock is set back by a year, the lease of a dead process must not block its key for a year."""
    token = new_id()
    assert isinstance(claimed(engine, token), Granted)
    clock.step(-YEAR)
    busy = claimed(engine)
    assert isinstance(busy, Busy)
    assert busy.lease <= GIVEN
    clock.step(-YEAR + GIVEN / 2)
    assert run(engine.blocking.claims.renew("k", token, GIVEN))
    clock.step(-YEAR + GIVEN + 1)
    assert isinstance(claimed(engine), Busy)
    clock.step(-YEAR + 2 * GIVEN)
    assert isinstance(claimed(engine), Granted)


def test_a_rest_is_no_longer_than_it_was(clock: MovedClock, engine: PostgresEngine) -> None:
    """Promise 6: if the clock is set back by a year, one failure of the origin must not be reported for a year."""
    token = new_id()
    claimed(engine, token)
    run(engine.blocking.claims.abandon("k", token, Verdict("failed"), GIVEN))
    clock.step(-YEAR)
    failed = claimed(engine)
    assert isinstance(failed, Failed)
    assert failed.rest <= GIVEN
    clock.step(-YEAR + GIVEN)
    assert isinstance(claimed(engine), Granted)


CHANGES: dict[str, Callable[[PostgresEngine], object]] = {
    "expire": lambda engine: run(engine.blocking.store.expire("k")),
    "invalidate": lambda engine: run(engine.blocking.store.invalidate("k")),
    "set": lambda engine: run(engine.blocking.store.set("k", some())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_holds_whatever_the_clock_says(clock: MovedClock, engine: PostgresEngine, change: str) -> None:
    """Promise 4: a value that was ended or replaced must not be fresh again because the clock is set back."""
    run(engine.blocking.store.set("k", old := some()))
    clock.step(-YEAR)
    CHANGES[change](engine)
    for moved in -YEAR, -YEAR - 3, -2 * YEAR:
        clock.step(moved)
        found = claimed(engine)
        assert not (isinstance(found, Found) and found.entry.id == old.id)


def test_a_clock_that_is_set_forward_ends_things_early(clock: MovedClock, engine: PostgresEngine) -> None:
    """Promise 14: an entry that has expired by the server's clock has expired, whatever the caller's clock says."""
    run(engine.blocking.store.set("k", some()))
    clock.step(GIVEN + 1)
    assert run(engine.blocking.claims.look("k")) is None
    granted = claimed(engine)
    assert isinstance(granted, Granted)
    assert granted.entry is not None
