"""Random histories of transactions: what a cache answers is what the database would."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from postgres_server import shared_postgres
from sqlalchemy import Engine, create_engine, delete, event, func, insert, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, joinedload, selectinload
from sqlalchemy.pool import NullPool
from test_sqlalchemy_statements import Badge, Boss, Member, Shop, Team, Topic, followed

from stampede.contrib.sqlalchemy import FromCache

IDS = (1, 2, 3, 4)
Read = Callable[[Session, list[Any]], Any]


def _shown(member: Member | None) -> Any:
    return member and (type(member).__name__, member.id, member.name, dict(member.notes), member.team_id)


def _members(session: Session, options: list[Any]) -> Any:
    loads = selectinload(Member.topics), joinedload(Member.team)
    found = session.scalars(select(Member).order_by(Member.id).options(*loads, *options))
    return [(_shown(each), each.team and each.team.name, sorted(topic.name for topic in each.topics)) for each in found]


def _bosses(session: Session, options: list[Any]) -> Any:
    return [(_shown(each), each.car) for each in session.scalars(select(Boss).order_by(Boss.id).options(*options))]


def _teams(session: Session, options: list[Any]) -> Any:
    loads = selectinload(Team.members), joinedload(Team.badges)
    found = session.scalars(select(Team).order_by(Team.id).options(*loads, *options)).unique()
    return [(each.name, [*map(_shown, each.members)], len(each.badges)) for each in found]


def _numbers(session: Session, options: list[Any]) -> Any:
    number = select(Team.name, func.count(Member.id)).join(Team.members).group_by(Team.name).order_by(Team.name)
    return [tuple(row) for row in session.execute(number.options(*options))]


def _drinkers(session: Session, options: list[Any]) -> Any:
    found = select(Member.id).where(Member.topics.any(Topic.name == "tea")).order_by(Member.id)
    return session.scalars(found.options(*options)).all()


def _by_key(session: Session, options: list[Any]) -> Any:
    by_key = [FromCache(by_primary_key=True)] if options else []
    loads = [joinedload(Member.team), *by_key], [selectinload(Team.members), *by_key]
    members = [session.get(Member, each, options=loads[0]) for each in IDS]
    teams = [session.get(Team, each, options=loads[1]) for each in IDS]
    return [
        [(_shown(each), each and each.team and each.team.name) for each in members],
        [each and [*map(_shown, each.members)] for each in teams],
    ]


def _lazily(session: Session, options: list[Any]) -> Any:
    """The relationships of these come from the cache, if the session listens."""
    found = [session.get(Member, each) for each in IDS]
    return [
        each and (each.team and [one.name for one in each.team.members], sorted(topic.id for topic in each.topics))
        for each in found
    ]


READS: list[Read] = [_members, _bosses, _teams, _numbers, _drinkers, _by_key, _lazily]


class _History:
    """Random transactions in one process."""

    def __init__(self, seed: int, shop: Shop) -> None:
        self.random = random.Random(seed)
        self.shop = shop
        self.hits = 0

    def transaction(self) -> None:
        with self.shop.sessions() as session:
            try:
                for _ in range(self.random.choice([0, 1, 2, 4])):
                    self._step(session)
                if self.random.random() < 0.8:
                    session.commit()
            except IntegrityError:
                session.rollback()

    def _step(self, session: Session) -> None:
        chance = self.random.random()
        if chance < 0.3:
            read = self.random.choice(READS)
            session.flush()  # otherwise the first read would flush in the middle
            assert read(session, [FromCache()]) == read(session, [])
        elif chance < 0.4:
            savepoint = session.begin_nested()
            self._write(session)
            savepoint.commit() if self.random.random() < 0.5 else savepoint.rollback()
        else:
            self._write(session)

    def _write(self, session: Session) -> None:
        kind: Any = self.random.choice([Member, Member, Team, Topic, Boss])
        one, team, topic = (session.get(each, self.random.choice(IDS)) for each in (kind, Team, Topic))
        member = one if isinstance(one, Member) else None
        name = self.random.choice("abcdef")
        way = self.random.randrange(12)
        if way == 0:
            session.execute(update(kind).where(text(f"{kind.__tablename__}.id = 1")).values(**_field(kind, name)))
        elif way == 1:
            session.execute(delete(followed).where(followed.c.topic_id == self.random.choice(IDS)))
        elif way == 2:
            session.execute(insert(Badge), [{"team_id": 1}])
        elif way == 3 and one is not None:
            session.delete(one)
        elif way == 4 and one is None:
            session.add(kind(id=self.random.choice(IDS), name=name, **({"car": name} if kind is Boss else {})))
        elif way == 5 and member is not None:
            member.team = team
        elif way == 6 and team is not None and team.members:
            team.members.pop()
        elif way == 7 and team is not None:
            team.badges = [] if team.badges else [Badge()]
        elif way in (8, 9) and member is not None and topic is not None:
            (member.topics.remove if topic in member.topics else member.topics.add)(topic)
        elif way == 10 and member is not None:
            member.notes[name] = self.random.random()
        elif one is not None:
            setattr(one, *_field(kind, name).popitem())

    def check(self) -> None:
        """Read in a new session, and compare."""
        for read in self.random.sample(READS, 3):
            before = len(self.shop.asked)
            with self.shop.sessions() as session:
                found = read(session, [FromCache()])
            self.hits += len(self.shop.asked) == before
            with Session(self.shop.database) as session:
                assert found == read(session, []), read.__name__


def _field(kind: Any, name: str) -> dict[str, str]:
    return {"car": name} if kind is Boss else {"name": name}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    """A database whose savepoints work: Python's driver does not send BEGIN before one."""
    made = create_engine(f"sqlite:///{tmp_path}/shop.db", poolclass=NullPool, connect_args={"isolation_level": None})
    event.listen(made, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys=ON"))
    event.listen(made, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    yield made
    made.dispose()


@pytest.mark.parametrize("seed", range(4))
def test_random_transactions(seed: int, database: Engine, tmp_path: Path) -> None:
    """Whatever transactions do, a later session reads from the cache what it would read from the database."""
    shop = Shop(database, "memory://" if seed % 2 else f"disk://{tmp_path}/cache")
    shop.statements.lazy_loads(Member.team, option=FromCache(by_primary_key=True))
    shop.statements.lazy_loads(Team.members, Member.topics, option=FromCache())
    history = _History(seed, shop)
    for _ in range(30):
        history.transaction()
        history.check()
    assert history.hits > 10
    shop.cache.close()


@pytest.mark.postgres
def test_writers_read_what_they_have_committed() -> None:
    """Three threads change rows of one table, and read it. Each sees at once what it has committed itself."""
    server = shared_postgres()
    with server.database() as name:
        url = f"postgresql+psycopg://root@127.0.0.1:{server.port}/{name}?sslmode=disable"
        database = create_engine(url)
        shop = Shop(database, "memory://")

        def write(row: int) -> None:
            for number in range(15):
                with shop.sessions.begin() as session:
                    session.get_one(Member, row).name = f"{number}"
                with shop.sessions() as session:
                    found = {each.id: each.name for each in session.scalars(select(Member).options(FromCache()))}
                with shop.sessions() as session:
                    alone = session.get_one(Member, row, options=[FromCache(by_primary_key=True)])
                    assert found[row] == f"{number}" == alone.name

        with ThreadPoolExecutor(3) as threads:
            assert [*threads.map(write, (1, 2, 3))] == [None] * 3
        shop.cache.close()
        database.dispose()
