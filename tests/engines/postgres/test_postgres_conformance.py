"""The Postgres engine passes the suites for every engine. Its peer is another engine on the same server."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("psycopg")

from postgres_server import shared_postgres

from stampede.engines.postgres import PostgresEngine
from stampede.model.entry import new_id
from stampede.model.ports import Ask, Engine
from stampede.runtime.colour import run_blocking
from stampede.testing.conformance import ClaimsSuite, LocksSuite, StoreSuite


@cache
def _engines() -> tuple[Engine, Engine]:
    return PostgresEngine(shared_postgres().postgres_url), PostgresEngine(shared_postgres().postgres_url)


class TestPostgres(ClaimsSuite, StoreSuite, LocksSuite):
    short = 0.1

    def make_engine(self) -> Engine:
        shared_postgres().prepare()
        return _engines()[0]

    def make_peer(self, engine: Engine) -> Engine:
        return _engines()[1]

    def drop_engine(self, engine: Engine) -> None:
        """Leave the engine open. For each new connection the server compiles its functions, which takes long."""


class TestPostgresAsync(TestPostgres):
    suspending = True


def test_the_first_claim_has_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first claim has a sign of life already. Without it, a killed process would block the key for its lease."""
    monkeypatch.setattr("stampede.engines.postgres.news.AT_FIRST", 60.0)
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
