"""The Postgres engine does what every engine has to do; its peer is another engine on the same server."""

from __future__ import annotations

import pytest

pytest.importorskip("psycopg")

from postgres_server import shared_postgres

from stampede.colour import run_blocking
from stampede.engines.postgres import PostgresEngine
from stampede.entry import new_id
from stampede.ports import Ask, Engine
from stampede.testing.conformance import ClaimsSuite, LocksSuite, StoreSuite


class TestPostgres(ClaimsSuite, StoreSuite, LocksSuite):
    short = 0.1

    def make_engine(self) -> Engine:
        shared_postgres().prepare()
        return PostgresEngine(shared_postgres().postgres_url)

    def make_peer(self, engine: Engine) -> Engine:
        return PostgresEngine(shared_postgres().postgres_url)


class TestPostgresAsync(TestPostgres):
    suspending = True


def test_the_first_claim_has_a_sign_of_life() -> None:
    """A process that is killed as it computes its first value would block that for a whole lease."""
    shared_postgres().prepare()
    engine = PostgresEngine(shared_postgres().postgres_url)
    try:
        assert engine.blocking.claims is not None
        run_blocking(engine.blocking.claims.claim("k", new_id(), Ask(60.0)))
        assert shared_postgres().ask("SELECT stampede.lives(pid, started), pid IS NULL FROM stampede.leases") == [
            (True, False)
        ]
    finally:
        engine.close()
