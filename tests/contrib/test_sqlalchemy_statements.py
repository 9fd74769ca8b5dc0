"""Statements of SQLAlchemy's ORM that are answered from a cache, and what a commit invalidates."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from herd import until
from postgres_server import shared_postgres
from servers import shared_redis
from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Engine,
    ForeignKey,
    Numeric,
    Table,
    bindparam,
    cast,
    create_engine,
    delete,
    event,
    func,
    insert,
    inspect,
    select,
    text,
    type_coerce,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.ext.mutable import MutableDict
from sqlalchemy.orm import (
    Bundle,
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    joinedload,
    lazyload,
    load_only,
    mapped_column,
    relationship,
    selectinload,
    sessionmaker,
    with_loader_criteria,
    with_polymorphic,
)
from sqlalchemy.pool import NullPool
from sqlalchemy.types import String, TypeDecorator

from stampede import Cache, KeyingError, OptionError
from stampede.contrib.sqlalchemy import FromCache, StatementCache


class Base(DeclarativeBase):
    pass


followed = Table(
    "followed",
    Base.metadata,
    Column("member_id", ForeignKey("member.id"), primary_key=True),
    Column("topic_id", ForeignKey("topic.id"), primary_key=True),
)


class Topic(Base):
    __tablename__ = "topic"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Team(Base):
    __tablename__ = "team"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    members: Mapped[list[Member]] = relationship(back_populates="team", order_by="Member.id")
    badges: Mapped[list[Badge]] = relationship(cascade="all, delete-orphan", passive_deletes=True)


class Badge(Base):
    __tablename__ = "badge"
    id: Mapped[int] = mapped_column(primary_key=True)
    team_id: Mapped[int] = mapped_column(ForeignKey("team.id", ondelete="CASCADE"))


class Member(Base):
    __tablename__ = "member"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "member"}  # noqa: RUF012
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    name: Mapped[str]
    born: Mapped[date | None]
    notes: Mapped[dict[str, Any]] = mapped_column(MutableDict.as_mutable(JSON), default=dict)
    team_id: Mapped[int | None] = mapped_column(ForeignKey("team.id"))
    team: Mapped[Team | None] = relationship(back_populates="members")
    topics: Mapped[set[Topic]] = relationship(secondary=followed)


class Boss(Member):
    __tablename__ = "boss"
    __mapper_args__ = {"polymorphic_identity": "boss"}  # noqa: RUF012
    id: Mapped[int] = mapped_column(ForeignKey("member.id"), primary_key=True)
    car: Mapped[str]


class Reverse(TypeDecorator[str]):
    impl = String
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return value[::-1]


class Shop:
    """A database with a cache: sessions, and the SQL that they run."""

    def __init__(self, database: Engine, url: str) -> None:
        Base.metadata.create_all(database)
        self.database = database
        self.cache = Cache(url, ttl=600, trust=[sys.modules[__name__]])
        self.cache.clear()
        self.statements = StatementCache(self.cache)
        self.sessions = sessionmaker(database)
        self.statements.listen(self.sessions)
        self.asked: list[str] = []
        with Session(database) as session:
            red = Team(id=1, name="red", badges=[Badge(id=1)])
            session.add(Member(id=1, name="bob", team=red, notes={"a": 1}, topics={Topic(id=1, name="tea")}))
            session.add(Member(id=2, name="eve", team=red, born=date(2001, 2, 3)))
            session.add_all([Boss(id=3, name="ann", car="bus"), Team(id=2, name="blue"), Topic(id=2, name="sea")])
            session.commit()
        event.listen(database, "before_cursor_execute", lambda *args: self.asked.append(args[2]))

    def run(self, work: Callable[[Session], Any]) -> tuple[Any, int]:
        """Return what the work returns in a new session, and how many statements the database was asked."""
        before = len(self.asked)
        with self.sessions() as session:
            result = work(session)
        return result, len(self.asked) - before

    def asks(self, work: Callable[[Session], Any], session: Session) -> bool:
        """Return whether the work asks the database for rows."""
        before = len(self.asked)
        work(session)
        return any(each.startswith("SELECT") for each in self.asked[before:])

    def commit(self, work: Callable[[Session], Any]) -> None:
        with self.sessions.begin() as session:
            work(session)

    def names(self, *options: Any) -> tuple[Any, int]:
        """Return the names of all members, and how many statements the database was asked."""
        statement = select(Member).order_by(Member.id).options(FromCache(), *options)
        return self.run(lambda session: [member.name for member in session.scalars(statement)])


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    made = create_engine(f"sqlite:///{tmp_path}/shop.db", poolclass=NullPool)
    event.listen(made, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys=ON"))
    yield made
    made.dispose()


@pytest.fixture(params=["memory", "disk"])
def shop(request: pytest.FixtureRequest, database: Engine, tmp_path: Path) -> Iterator[Shop]:
    """With the memory engine, all callers share the stored objects; with the disk engine they are decoded."""
    shop = Shop(database, {"memory": "memory://", "disk": f"disk://{tmp_path}/cache"}[request.param])
    yield shop
    shop.cache.close()


@pytest.fixture
def near(database: Engine) -> Iterator[Shop]:
    shop = Shop(database, "memory://")
    yield shop
    shop.cache.close()


# -- answers ------------------------------------------------------------------------------------------------------


def test_a_result_comes_from_the_cache(shop: Shop) -> None:
    """The second session gets objects of its own, and the database is not asked."""
    assert shop.names() == (["bob", "eve", "ann"], 1)
    assert shop.names() == (["bob", "eve", "ann"], 0)

    def whole(session: Session) -> Any:
        found = session.scalars(select(Member).order_by(Member.id).options(FromCache())).all()
        assert all(each in session for each in found) and session.get(Member, 1) is found[0]
        return type(found[2]), found[1].born, found[0].notes

    assert shop.run(whole) == ((Boss, date(2001, 2, 3), {"a": 1}), 0)


def test_rows_of_columns_and_single_values(shop: Shop) -> None:
    """A row has the names, the order and the columns that the statement selects."""
    both = select(Member, Team.name.label("team"), Member.notes).join(Member.team).order_by(Member.id)

    def rows(session: Session) -> Any:
        found = session.execute(both.options(FromCache())).all()
        first = found[0]
        assert first.Member.name == "bob" and first._mapping[Member] is first.Member and first._fields[1] == "team"
        return [(row.Member.id, row.team, row[2]) for row in found], first._mapping[Member.notes]

    expected = [(1, "red", {"a": 1}), (2, "red", {})], {"a": 1}
    assert [shop.run(rows), shop.run(rows)] == [(expected, 1), (expected, 0)]
    number = select(func.count(Member.id)).options(FromCache())
    assert [shop.run(lambda session: session.scalar(number)) for _ in range(2)] == [(3, 1), (3, 0)]
    nothing = select(Member).where(Member.id == 9).options(FromCache())
    assert [shop.run(lambda session: session.scalars(nothing).all()) for _ in range(2)] == [([], 1), ([], 0)]


def test_columns_without_a_name(shop: Shop) -> None:
    both = with_polymorphic(Member, [Boss])
    statement = select(both, both.id + 1).order_by(both.id).options(FromCache())
    read = lambda session: [(type(row[0]).__name__, row[1]) for row in session.execute(statement)]  # noqa: E731
    expected = [("Member", 2), ("Member", 3), ("Boss", 4)]
    assert [shop.run(read), shop.run(read)] == [(expected, 1), (expected, 0)]
    alone = select(both).order_by(both.id).options(FromCache())
    assert shop.run(lambda session: session.scalars(alone).first().id) == (1, 1)  # type: ignore[union-attr]


def test_get_and_relationships(shop: Shop) -> None:
    """`Session.get` takes the option, too. Loaded relationships are stored; others load from the database."""

    def get(session: Session) -> Any:
        member = session.get_one(Member, 1, options=[FromCache(), joinedload(Member.team), selectinload(Member.topics)])
        assert inspect(member).unloaded == {"team"} - set(vars(member))
        return member.team and member.team.name, {each.name for each in member.topics}

    assert [shop.run(get), shop.run(get)] == [(("red", {"tea"}), 2), (("red", {"tea"}), 0)]

    def lazily(session: Session) -> Any:
        member = session.get_one(Member, 1, options=[FromCache()])
        return [topic.name for topic in member.topics]

    assert [shop.run(lazily), shop.run(lazily)] == [(["tea"], 2), (["tea"], 1)]


def test_a_joined_collection_needs_unique_as_ever(shop: Shop) -> None:
    statement = select(Team).options(joinedload(Team.members), FromCache()).order_by(Team.id)

    def counts(session: Session) -> Any:
        return [len(team.members) for team in session.scalars(statement).unique()]

    assert [shop.run(counts), shop.run(counts)] == [([2, 0], 1), ([2, 0], 0)]

    def back(session: Session) -> Any:
        team = session.scalars(statement).unique().first()
        assert team is not None
        return team.members[0].team is team

    assert shop.run(back) == (True, 0)


def test_classes_without_a_hash(near: Shop) -> None:
    """Mapped dataclasses have none. SQLAlchemy tells such objects apart by their identity."""

    class Model(MappedAsDataclass, DeclarativeBase):
        pass

    class Page(Model):
        __tablename__ = "page"
        id: Mapped[int] = mapped_column(primary_key=True)

    Model.metadata.create_all(near.database)
    near.commit(lambda session: session.add(Page(id=1)))
    statement = select(Page).join(Topic, Page.id == 1).options(FromCache())
    read = lambda session: [page.id for page in session.scalars(statement).unique()]  # noqa: E731
    assert [near.run(read), near.run(read)] == [([1], 1), ([1], 0)]


def test_options_for_what_objects_load_later(shop: Shop) -> None:
    """Criteria of a statement, such as those of a tenant, hold for what its objects load later, as without a cache."""
    visible = with_loader_criteria(Member, Member.name != "eve")
    statement = select(Team).where(Team.id == 1).options(visible, selectinload(Team.badges))

    def lazily(*options: Any) -> Callable[[Session], Any]:
        return lambda session: [each.name for each in session.scalars(statement.options(*options)).one().members]

    assert [shop.run(lazily())[0], shop.run(lazily(FromCache()))[0]] == [["bob"]] * 2
    assert shop.run(lazily(FromCache())) == (["bob"], 1)
    of_members = select(Member).options(selectinload(Member.team), FromCache()).where(Member.id == 1)

    def related(session: Session) -> Any:
        member = session.scalars(of_members.options(visible)).one()
        return member.team and [each.name for each in member.team.members]

    assert [shop.run(related)[0], shop.run(related)[0]] == [["bob"]] * 2


def test_a_condition_of_a_lazy_load(near: Shop) -> None:
    lazily = lazyload(Team.members.and_(Member.name != "eve"))
    statement = select(Team).where(Team.id == 1).options(FromCache(), lazily)
    read = lambda session: [each.name for each in session.scalars(statement).one().members]  # noqa: E731
    assert [near.run(read), near.run(read)] == [(["bob"], 2)] * 2


def test_a_statement_without_the_option_keeps_its_own_options(near: Shop) -> None:
    """SQLAlchemy caches compiled statements. The option must not shift the other options of the same statement."""
    visible = with_loader_criteria(Member, Member.name != "eve")

    def lazily(*options: Any) -> Any:
        return near.run(
            lambda session: [each.name for each in session.scalars(select(Team).options(*options)).one().members]
        )

    near.commit(lambda session: session.delete(session.get_one(Team, 2)))
    assert [lazily(FromCache(), visible)[0], lazily(visible)[0]] == [["bob"]] * 2


def test_objects_that_the_session_has_are_not_changed(shop: Shop) -> None:
    """As with any query: what is loaded stays; what is not is loaded. A pending change is not lost."""
    statement = select(Member).where(Member.id == 1).options(FromCache(), selectinload(Member.team))
    shop.run(lambda session: session.scalars(statement).one())
    with shop.database.begin() as connection:
        connection.execute(text("UPDATE member SET name = 'rob' WHERE id = 1"))  # nobody tells the cache

    def mixed(session: Session) -> Any:
        mine = session.get_one(Member, 1)
        assert session.scalars(statement).one() is mine and "team" in vars(mine)
        return mine.name

    assert shop.run(mixed) == ("rob", 1)

    def expired(session: Session) -> Any:
        mine = session.get_one(Member, 1)
        session.rollback()
        assert session.scalars(statement).one() is mine
        return mine.name

    assert shop.run(expired) == ("bob", 1)

    def pending(session: Session) -> Any:
        session.get_one(Team, 1).name = "pink"
        found = session.scalars(statement).one()
        return found.team and found.team.name

    assert shop.run(pending)[0] == "pink"


def test_what_the_database_gives_now_is_stored(shop: Shop) -> None:
    """A session that loaded a row earlier does not store its old attributes."""
    with shop.sessions() as session:
        old = session.get_one(Member, 1)
        shop.commit(lambda other: setattr(other.get_one(Member, 1), "name", "rob"))
        session.scalars(select(Member).order_by(Member.id).options(FromCache())).all()
        assert old.name == "bob"
    assert shop.names() == (["rob", "eve", "ann"], 0)


def test_changes_of_a_value_stay_in_the_session(shop: Shop) -> None:
    """A mutable column is tracked in the session, and copied: the stored value does not change."""

    def note(session: Session) -> None:
        member = session.scalars(select(Member).order_by(Member.id).options(FromCache())).first()
        assert member is not None and member.notes == {"a": 1}
        member.notes["b"] = 2
        assert session.is_modified(member)

    for _ in range(3):
        shop.run(note)


# -- keys ---------------------------------------------------------------------------------------------------------


def test_keys_are_exact(near: Shop) -> None:
    """Statements that differ in anything that the result depends on have different keys."""
    option, member = FromCache(), select(Member)
    statements = [
        member,
        select(Boss),
        select(Member.id),
        select(Bundle("b", Member.id)),
        select(Member.name),
        select(type_coerce(Member.name, Reverse)),
        select(Member.name.label("label")),
        member.options(selectinload(Member.team)),
        member.options(joinedload(Member.team)),
        member.options(selectinload(Member.team.and_(Team.name == "red"))),
        member.options(selectinload(Member.team.and_(Team.name == "blue"))),
        member.options(with_loader_criteria(Team, Team.name == "red")),
        member.options(with_loader_criteria(Team, lambda cls: cls.name != "red")),
        member.options(load_only(Member.name)),
        member.where(Member.id == 1),
        member.where(Member.id == True),  # noqa: E712
        member.where(Member.name == "1"),
        member.where(Member.id.in_([1, 2])),
        member.where(Member.id.in_([12])),
        member.where(Member.born == date(2001, 2, 3)),
        member.where(Member.born == datetime(2001, 2, 3)),
        member.where(Member.team == Team(id=1)),
        member.where(Member.team == Team(id=2)),
        member.limit(1),
        member.order_by(Member.id.desc()),
        member.where(text("id = 1")),
        member.from_statement(text("SELECT * FROM member")),
        member.execution_options(schema_translate_map={None: "other"}),
    ]
    other = create_engine("sqlite://")
    with near.sessions() as session, Session(other) as elsewhere:
        keys = [near.statements.key(session, each.options(option)) for each in statements]
        assert len({*keys}) == len(keys)
        assert keys == [near.statements.key(session, each.options(option)) for each in statements]
        assert keys == [near.statements.key(session, each) for each in statements]  # the option may be missing
        assert near.statements.key(elsewhere, member.options(option)) not in keys
        by_name = member.where(Member.name == bindparam("who"))
        found = {near.statements.key(session, by_name, {"who": who}) for who in ("bob", "eve", b"bob")}
        assert len(found) == 3
        row = near.statements.key(session, member.options(option), by_primary_key=True)
        assert row not in keys and row.startswith("select:Member:")
    other.dispose()


def some_keys() -> list[str]:
    statements: list[Any] = [
        select(Member).options(selectinload(Member.team.and_(Team.name == "red"))),
        select(func.count(Member.id), cast(Member.id, Numeric(10, 2))).where(Member.team.has(name="a")),
    ]
    with Session(create_engine("postgresql+psycopg://u:secret@db/shop")) as session, Cache() as cache:
        return [StatementCache(cache).key(session, each) for each in statements]


def test_keys_are_the_same_in_every_process() -> None:
    code = "from test_sqlalchemy_statements import *; print(*some_keys(), sep='\\n')"
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "1"}
    command, here = [sys.executable, "-c", code], Path(__file__).parent
    done = subprocess.run(command, cwd=here, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == some_keys()


def test_operators_of_a_database(near: Shop) -> None:
    """Operators that SQLAlchemy does not know, such as those of Postgres for JSON, are parts of the key."""
    statements = [
        select(Member).where(Member.name.op(sign, is_comparison=True)("b*")).options(FromCache())
        for sign in ("GLOB", "LIKE")
    ]
    assert [len(near.run(lambda session: session.scalars(each).all())[0]) for each in statements] == [1, 0]


def test_schemas_of_a_connection(near: Shop, tmp_path: Path) -> None:
    """The option `schema_translate_map` of a session's connection is a part of the key, as that of its engine is."""

    class Model(DeclarativeBase):
        pass

    class Thing(Model):
        __tablename__ = "thing"
        __table_args__ = {"schema": "tenant"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)

    def attach(connection: Any, _: object) -> None:
        for name in ("a", "b"):
            connection.execute(f"ATTACH '{tmp_path}/{name}.db' AS {name}")

    event.listen(near.database, "connect", attach)

    def things(tenant: str) -> Any:
        with near.sessions() as session:
            session.connection(execution_options={"schema_translate_map": {"tenant": tenant}})
            return session.scalars(select(Thing.id).options(FromCache())).all()

    for number, tenant in enumerate(("a", "b")):
        Model.metadata.create_all(near.database.execution_options(schema_translate_map={"tenant": tenant}))
        with near.database.begin() as connection:
            connection.exec_driver_sql(f"INSERT INTO {tenant}.thing VALUES ({number})")
    assert [things("a"), things("b"), things("a")] == [[0], [1], [0]]


def test_a_hook_that_is_registered_late_is_not_skipped(near: Shop) -> None:
    """A hook that selects the rows that a caller may see runs for each statement, also if it is one session's own."""

    def visible(number: int) -> Any:
        with near.sessions() as session:
            rows = with_loader_criteria(Member, Member.id == number)
            event.listen(
                session, "do_orm_execute", lambda state: setattr(state, "statement", state.statement.options(rows))
            )
            return session.scalars(select(Member.name).options(FromCache())).all()

    assert [visible(1), visible(2), visible(1)] == [["bob"], ["eve"], ["bob"]]


def test_what_has_no_key_says_so(near: Shop) -> None:
    class NoKey(TypeDecorator[str]):
        impl = String
        cache_ok = False

    with pytest.raises(KeyingError, match="cache_ok"):
        near.run(lambda session: session.execute(select(type_coerce(Member.name, NoKey)).options(FromCache())))
    with pytest.raises(TypeError, match="'background'"):
        FromCache(background=True)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="ttl"):
        near.run(lambda session: session.execute(select(Member).options(FromCache(ttl=-1))))


# -- what a commit ends -------------------------------------------------------------------------------------------


def _rename(session: Session) -> None:
    session.get_one(Member, 1).name = "rob"


def _follow(session: Session) -> None:
    member = session.get_one(Member, 1)
    member.topics.add(session.get_one(Topic, 2))


def _leave(session: Session) -> None:
    team = session.get_one(Team, 1)
    team.members.pop()


def _take_badge(session: Session) -> None:
    team = session.get_one(Team, 1)
    team.badges.clear()


def _delete_team(session: Session) -> None:
    session.delete(session.get_one(Team, 2))


CHANGES: dict[str, tuple[Callable[[Session], Any], set[str]]] = {
    "update": (_rename, {"members", "topics", "bosses"}),
    "insert": (lambda session: session.add(Member(id=7, name="new")), {"members", "topics", "bosses"}),
    "delete": (lambda session: session.delete(session.get_one(Member, 2)), {"members", "topics", "bosses"}),
    "subclass": (lambda session: setattr(session.get_one(Boss, 3), "car", "cab"), {"bosses"}),
    "link": (_follow, {"topics"}),
    "one to many": (_leave, {"members", "topics", "bosses"}),
    "orphan": (_take_badge, {"badges"}),
    "delete a team": (_delete_team, {"teams", "badges"}),
    "cascade": (lambda session: session.execute(delete(Team).where(Team.id == 2)), {"teams", "badges"}),
    "orm update": (lambda session: session.execute(update(Member).values(name="x")), {"members", "topics", "bosses"}),
    "orm insert": (
        lambda session: session.execute(insert(Topic), [{"id": 8, "name": "a"}, {"id": 9, "name": "b"}]),
        {"topics"},
    ),
    "core": (lambda session: session.execute(delete(followed)), {"topics"}),
    "connection": (lambda session: session.connection().execute(update(Topic).values(name="x")), {"topics"}),
    "bulk": (lambda session: session.bulk_insert_mappings(Badge, [{"team_id": 1}]), {"badges"}),
    "nothing": (lambda session: setattr(session.get_one(Member, 1), "name", "bob"), set()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_commit_ends_what_depends_on_it(near: Shop, change: str) -> None:
    """The tables that are changed decide, also those that link objects, or that the database itself changes. Before the
    commit, the session itself reads them from the database."""
    reads: dict[str, Callable[[Session], Any]] = {
        "members": lambda session: [each.name for each in session.scalars(select(Member).options(FromCache()))],
        "bosses": lambda session: [each.car for each in session.scalars(select(Boss).options(FromCache()))],
        "topics": lambda session: [
            sorted(topic.name for topic in each.topics)
            for each in session.scalars(
                select(Member).order_by(Member.id).options(FromCache(), selectinload(Member.topics))
            )
        ],
        "teams": lambda session: [each.name for each in session.scalars(select(Team).options(FromCache()))],
        "badges": lambda session: session.scalars(select(Badge.id).options(FromCache())).all(),
    }
    for read in reads.values():
        near.run(read)
    work, ended = CHANGES[change]
    with near.sessions() as session:
        work(session)
        session.flush()
        assert {name for name, read in reads.items() if near.asks(read, session)} == ended
        session.commit()
    assert {name for name, read in reads.items() if near.run(read)[1]} == ended


def test_a_rollback_ends_nothing(near: Shop) -> None:
    near.names()
    with near.sessions() as session:
        _rename(session)
        session.flush()
        session.rollback()
        session.execute(update(Team).values(name="x"))
        session.commit()
    assert near.names()[1] == 0
    with near.sessions() as session:
        _rename(session)
        session.flush()
    assert near.names()[1] == 0


def test_savepoints(near: Shop) -> None:
    """What a savepoint has changed counts at the commit of the whole transaction, and not before."""
    near.names()
    with near.sessions() as session:
        with session.begin_nested():
            _rename(session)
        assert near.names() == (["bob", "eve", "ann"], 0)
        session.commit()
    assert near.names() == (["rob", "eve", "ann"], 1)


def test_a_commit_with_an_open_savepoint(near: Shop) -> None:
    near.names()
    with near.sessions.begin() as session:
        session.begin_nested()
        _rename(session)
    assert near.names() == (["rob", "eve", "ann"], 1)


@pytest.mark.parametrize("by_engine", [True, False])
def test_what_an_autocommit_session_flushes_is_committed(near: Shop, by_engine: bool) -> None:
    near.names()
    database = create_engine(near.database.url, isolation_level="AUTOCOMMIT") if by_engine else near.database
    with near.sessions(bind=database) as session:
        session.connection(execution_options={} if by_engine else {"isolation_level": "AUTOCOMMIT"})
        _rename(session)
        session.flush()
        session.rollback()
    assert near.names() == (["rob", "eve", "ann"], 1)
    database.dispose()


def test_orphans_of_a_many_to_one_relationship(near: Shop) -> None:
    """The session deletes an object that it has not been told to delete."""

    class Model(DeclarativeBase):
        pass

    class Locker(Model):
        __tablename__ = "locker"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Pupil(Model):
        __tablename__ = "pupil"
        id: Mapped[int] = mapped_column(primary_key=True)
        locker_id: Mapped[int | None] = mapped_column(ForeignKey(Locker.id))
        locker: Mapped[Any] = relationship(Locker, cascade="all, delete-orphan", single_parent=True)

    Model.metadata.create_all(near.database)
    near.commit(lambda session: session.add(Pupil(id=1, locker=Locker(id=1))))
    lockers = select(Locker.id).options(FromCache())
    assert near.run(lambda session: session.scalars(lockers).all())[0] == [1]
    alone = lambda session: session.get(Locker, 1, options=[FromCache(by_primary_key=True)])  # noqa: E731
    assert near.run(alone)[0] is not None
    near.commit(lambda session: setattr(session.get_one(Pupil, 1), "locker", None))
    assert near.run(lambda session: session.scalars(lockers).all())[0] == []
    assert near.run(alone)[0] is None


def test_a_hook_that_changes_another_table(near: Shop) -> None:
    """A mapper's hook uses the connection while the session flushes."""
    read = lambda session: session.get_one(Topic, 1, options=[FromCache(by_primary_key=True)]).name  # noqa: E731
    assert [near.run(read), near.run(read)] == [("tea", 1), ("tea", 0)]

    def hook(mapper: Any, connection: Connection, team: Team) -> None:
        connection.execute(update(Topic).values(name=team.name))

    event.listen(Team, "after_insert", hook)
    near.commit(lambda session: session.add(Team(id=9, name="new")))
    event.remove(Team, "after_insert", hook)
    assert near.run(read)[0] == "new"


def test_a_commit_that_fails_may_have_been_made(near: Shop) -> None:
    """If the connection breaks during COMMIT, nobody knows whether the rows are changed."""
    near.names()

    def broken(connection: Connection) -> None:
        raise ConnectionError

    with near.sessions() as session:
        _rename(session)
        session.flush()
        event.listen(near.database, "commit", broken)
        with pytest.raises(ConnectionError):
            session.commit()
    event.remove(near.database, "commit", broken)
    assert near.names()[1] == 1


def test_an_error_is_raised_as_without_a_cache(near: Shop) -> None:
    with near.sessions() as session:
        session.add(Member(id=1, name="again"))
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        assert session.scalars(select(Member.name).where(Member.id == 1).options(FromCache())).all() == ["bob"]


def test_own_changes_are_seen_by_their_session_only(shop: Shop) -> None:
    """A transaction that has changed a table reads that table from the database, and stores nothing of it."""
    statement = select(Member).order_by(Member.id).options(FromCache(), selectinload(Member.team))

    def read(session: Session) -> Any:
        return [(member.name, member.team.name) for member in session.scalars(statement) if member.team]

    with shop.sessions() as session:
        session.get_one(Team, 1).name = "pink"  # not flushed yet
        assert read(session) == [("bob", "pink"), ("eve", "pink")]
        assert shop.run(read) == ([("bob", "red"), ("eve", "red")], 2)
        assert read(session)[0] == ("bob", "pink")
        assert shop.run(read) == ([("bob", "red"), ("eve", "red")], 0)
        session.execute(update(Member).where(Member.id == 1).values(name="rob"))
        assert read(session)[0] == ("rob", "pink")
        number = select(func.count(Topic.id)).options(FromCache())
        assert session.scalar(number) == 2  # another table
        session.commit()
        assert read(session)[0] == ("rob", "pink")
    assert shop.run(read) == ([("rob", "pink"), ("eve", "pink")], 0)


UNCOMMITTED: dict[str, Callable[[Session], Any]] = {
    "connection": lambda session: session.connection().execute(update(Member).values(name="x")),
    "bulk": lambda session: session.bulk_update_mappings(Member, [{"id": 1, "name": "x", "kind": "member"}]),
    "text": lambda session: session.execute(text("UPDATE member SET name = 'x'")),
    "driver": lambda session: session.connection().exec_driver_sql("UPDATE member SET name = 'x'"),
}


@pytest.mark.parametrize("change", UNCOMMITTED)
def test_uncommitted_rows_are_not_stored(near: Shop, change: str) -> None:
    """Whatever has changed the rows: if the changes are rolled back, nobody else has seen them."""
    statement = select(Member.name).where(Member.id == 1).options(FromCache())
    with near.sessions() as session:
        UNCOMMITTED[change](session)
        assert session.scalar(statement) == "x"
        assert session.scalar(statement) == "x"
    assert near.run(lambda session: session.scalar(statement)) == ("bob", 1)


def test_the_connection_of_a_caller_is_left_as_it_was(near: Shop) -> None:
    """A session that is bound to a connection leaves no hooks on it."""
    with near.database.connect() as connection:
        for _ in range(3):
            with near.sessions(bind=connection) as session:
                _rename(session)
                session.commit()
        assert not [*connection.dispatch.before_cursor_execute][1:]  # the first one is of the engine


def test_changes_made_elsewhere(near: Shop) -> None:
    near.names()
    with near.database.begin() as connection:
        connection.execute(text("UPDATE member SET name = 'rob' WHERE id = 1"))
    assert near.names() == (["bob", "eve", "ann"], 0)
    hooks: list[Any] = []
    near.statements.invalidate(Member, followed, via=hooks.append)
    assert near.names()[1] == 0
    hooks[0]()
    assert near.names() == (["rob", "eve", "ann"], 1)
    asyncio.run(near.statements.ainvalidate(Boss))
    assert near.names()[1] == 1


def test_tags_and_ttl_of_a_statement(near: Shop) -> None:
    statement = select(Team.name).options(FromCache(tags=["mine"], ttl=50))
    read = lambda session: session.scalars(statement).all()  # noqa: E731
    assert [near.run(read)[1] for _ in range(2)] == [1, 0]
    with near.sessions() as session:
        entry = near.cache.peek(near.statements.key(session, statement))
    assert entry is not None and entry.ttl == 50
    near.cache.invalidate_tags("mine")
    assert near.run(read)[1] == 1


# -- by primary key -----------------------------------------------------------------------------------------------


def test_a_row_ends_with_its_own_changes(near: Shop) -> None:
    """With `by_primary_key`, other rows of the table may change; statements that change several rows end it."""

    def read(session: Session) -> Any:
        member = session.get(Member, 1, options=[FromCache(by_primary_key=True), joinedload(Member.team)])
        return member and (member.name, member.team and member.team.name)

    assert [near.run(read), near.run(read)] == [(("bob", "red"), 1), (("bob", "red"), 0)]
    near.commit(lambda session: setattr(session.get_one(Member, 2), "name", "other"))
    near.commit(lambda session: session.add(Team(id=5, name="new")))
    assert near.run(read)[1] == 0
    near.commit(_rename)
    assert near.run(read)[0] == ("rob", "red")
    until(lambda: near.run(read)[1] == 0)
    near.commit(lambda session: setattr(session.get_one(Team, 1), "name", "pink"))
    assert near.run(read)[0] == ("rob", "pink")
    until(lambda: near.run(read)[1] == 0)
    near.commit(lambda session: session.execute(update(Member).values(name="all")))
    assert near.run(read)[0] == ("all", "pink")
    until(lambda: near.run(read)[1] == 0)
    near.commit(lambda session: session.delete(session.get_one(Member, 1)))
    assert near.run(read)[0] is None


def test_a_row_that_is_missing_ends_when_one_is_inserted(near: Shop) -> None:
    read = lambda session: session.get(Topic, 7, options=[FromCache(by_primary_key=True)])  # noqa: E731
    assert [near.run(read), near.run(read)] == [(None, 1), (None, 0)]
    near.commit(lambda session: session.add(Topic(id=7, name="new")))
    assert near.run(read)[0].name == "new"


def test_a_row_with_a_collection_ends_when_one_joins(near: Shop) -> None:
    def read(session: Session) -> Any:
        team = session.get_one(Team, 1, options=[FromCache(by_primary_key=True), selectinload(Team.members)])
        return len(team.members)

    assert [near.run(read), near.run(read)] == [(2, 2), (2, 0)]
    near.commit(lambda session: session.add(Member(id=8, name="new", team_id=1)))
    assert near.run(read)[0] == 3


def test_many_rows_end_as_their_table(near: Shop) -> None:
    read = lambda session: session.get_one(Topic, 1, options=[FromCache(by_primary_key=True)]).name  # noqa: E731
    assert [near.run(read), near.run(read)] == [("tea", 1), ("tea", 0)]
    near.commit(lambda session: session.add_all(Topic(id=100 + number, name="n") for number in range(150)))
    assert near.run(read) == ("tea", 1)


# -- relationships that load lazily -------------------------------------------------------------------------------


def test_lazy_loads(shop: Shop) -> None:
    shop.statements.lazy_loads(Member.team, option=FromCache(by_primary_key=True))
    shop.statements.lazy_loads(Team.members, Member.topics, option=FromCache())

    def read(session: Session) -> Any:
        member = session.get_one(Member, 1)
        return member.team and [len(each.topics) for each in member.team.members]

    assert [shop.run(read), shop.run(read)] == [([1, 0], 5), ([1, 0], 1)]

    def of_a_boss(session: Session) -> Any:
        boss = session.get_one(Boss, 3)
        return boss.team, len(boss.topics)

    assert [shop.run(of_a_boss), shop.run(of_a_boss)] == [((None, 0), 2), ((None, 0), 1)]
    shop.commit(_follow)
    assert shop.run(read)[0] == [2, 0]


# -- what goes straight to the database ---------------------------------------------------------------------------


def _number(statement: Any, session: Session) -> int:
    return len(session.scalars(statement).all())


def test_what_is_not_for_a_cache(near: Shop) -> None:
    """These statements run as usual, whatever option they have."""
    statement = select(Member).order_by(Member.id).options(FromCache())
    near.names()
    for each in (
        statement.with_for_update(),
        statement.execution_options(populate_existing=True),
        statement.execution_options(yield_per=10),
    ):
        many = partial(_number, each)
        assert [near.run(many), near.run(many)] == [(3, 1), (3, 1)]
    old = lambda session: session.query(Member).options(FromCache()).all()[0].name  # noqa: E731
    assert [near.run(old), near.run(old)] == [("bob", 1), ("bob", 1)]
    with near.database.connect() as connection, near.sessions(bind=connection) as session:
        asked = len(near.asked)
        assert len(session.scalars(statement).all()) == 3 and len(near.asked) == asked + 1
        with pytest.raises(KeyingError, match="Engine"):
            near.statements.key(session, statement)

    def refreshed(session: Session) -> Any:
        member = session.scalars(statement).first()
        session.refresh(member)
        return member and member.name

    assert near.run(refreshed) == ("bob", 1)


# -- many callers, and trouble ------------------------------------------------------------------------------------


@pytest.mark.redis
def test_a_herd_asks_once(database: Engine) -> None:
    """Twenty threads with a session each: one of them asks the database."""
    shop = Shop(database, shared_redis().url)
    ready = threading.Barrier(20)

    def read(_: int) -> Any:
        with shop.sessions() as session:
            ready.wait(30)
            return [each.name for each in session.scalars(select(Member).order_by(Member.id).options(FromCache()))]

    with ThreadPoolExecutor(20) as threads:
        assert [*threads.map(read, range(20))] == [["bob", "eve", "ann"]] * 20
    assert len(shop.asked) == 1
    shop.cache.close()


@pytest.mark.redis
def test_a_cache_that_is_down_breaks_no_commit(database: Engine) -> None:
    """The rows are committed: the invalidation is repeated later, and no error is raised."""
    shop = Shop(database, "memory://")
    down = StatementCache(Cache("redis://127.0.0.1:1", trust=[sys.modules[__name__]]))
    sessions = sessionmaker(database)
    down.listen(sessions)
    with sessions() as session:
        assert len(session.scalars(select(Member).options(FromCache())).all()) == 3
        _rename(session)
        session.commit()
        assert session.get_one(Member, 1).name == "rob"
    assert down.cache.postponed
    down.cache.close()
    shop.cache.close()


@pytest.fixture
def postgres() -> Iterator[str]:
    server = shared_postgres()
    with server.database() as name:
        yield f"postgresql+psycopg://root@127.0.0.1:{server.port}/{name}?sslmode=disable"


@pytest.mark.postgres
def test_an_old_snapshot_is_not_stored(postgres: str) -> None:
    """A REPEATABLE READ transaction sees the rows as they were when it began. Others must not get them."""
    database = create_engine(postgres, poolclass=NullPool)
    shop = Shop(database, "memory://")
    old = sessionmaker(database.execution_options(isolation_level="REPEATABLE READ"))
    shop.statements.listen(old)
    with old() as session:
        session.scalar(select(func.count(Team.id)))  # takes the snapshot
        shop.commit(_rename)
        statement = select(Member).order_by(Member.id).options(FromCache())
        assert session.scalars(statement).first().name == "bob"  # type: ignore[union-attr]
        assert shop.names() == (["rob", "eve", "ann"], 1)
    with shop.sessions() as session:  # READ COMMITTED sees what is committed
        session.scalar(select(func.count(Team.id)))
        shop.commit(lambda other: setattr(other.get_one(Member, 1), "name", "zed"))
        assert session.scalars(statement).first().name == "zed"  # type: ignore[union-attr]
    assert shop.names() == (["zed", "eve", "ann"], 0)
    shop.cache.close()
    database.dispose()


# -- asyncio ------------------------------------------------------------------------------------------------------


class AsyncShop:
    def __init__(self, url: str, database: Engine, cache: str = "memory://") -> None:
        self.before = Shop(database, cache)  # makes the tables
        self.database = create_async_engine(url, poolclass=NullPool)
        self.statements = StatementCache(self.before.cache)
        self.sessions = async_sessionmaker(self.database)
        self.statements.listen(self.sessions)
        self.asked: list[str] = []
        event.listen(self.database.sync_engine, "before_cursor_execute", lambda *args: self.asked.append(args[2]))

    async def names(self, session: AsyncSession | None = None) -> Any:
        if session is None:
            async with self.sessions() as session:
                return await self.names(session)
        statement = select(Member).order_by(Member.id).options(FromCache(), joinedload(Member.team))
        found = (await session.scalars(statement)).all()
        return [(each.name, each.team and each.team.name) for each in found]

    async def close(self) -> None:
        await self.database.dispose()
        await self.before.cache.aclose()


OLD = [("bob", "red"), ("eve", "red"), ("ann", None)]


@pytest.mark.postgres
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_async_sessions(kind: str, request: pytest.FixtureRequest, database: Engine) -> None:
    """Twenty tasks ask once, a commit ends the result, and the loop is not blocked."""
    if kind == "postgres":
        url = request.getfixturevalue("postgres")
        database = create_engine(url, poolclass=NullPool)
    else:
        pytest.importorskip("aiosqlite")
        url = str(database.url).replace("sqlite:", "sqlite+aiosqlite:")

    async def main() -> None:
        shop = AsyncShop(url, database)
        assert await asyncio.gather(*[shop.names() for _ in range(20)]) == [OLD] * 20
        assert len(shop.asked) == 1
        async with shop.sessions() as session:
            (await session.get_one(Member, 1)).name = "rob"
            assert (await shop.names(session))[0] == ("rob", "red")
            assert await shop.names() == OLD
            await session.commit()
        shop.asked.clear()
        assert (await shop.names())[0] == ("rob", "red") == (await shop.names())[0]
        assert len(shop.asked) == 1
        async with shop.sessions() as session, session.begin():
            await session.execute(update(Member).values(name="all"))
        assert (await shop.names())[0] == ("all", "red")
        await shop.close()

    asyncio.run(main())
    database.dispose()


@pytest.mark.postgres
def test_a_cancelled_caller_leaves_its_session_alone(postgres: str) -> None:
    """A cancelled caller closes its session. Its query ends before that, and another caller asks instead."""
    database = create_engine(postgres, poolclass=NullPool)

    async def main() -> None:
        shop = AsyncShop(postgres, database)
        with database.connect() as locking:
            locking.execute(text("LOCK TABLE member IN ACCESS EXCLUSIVE MODE"))
            leader = asyncio.ensure_future(shop.names())
            waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            while not locking.scalar(waits):  # until the leader's query waits for the table
                await asyncio.sleep(0.01)
            follower = asyncio.ensure_future(shop.names())
            await asyncio.sleep(0)
            leader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leader
            locking.rollback()
        assert await follower == OLD
        await shop.close()

    asyncio.run(main())
    database.dispose()


WITHOUT_GREENLET = """
import sys
sys.modules["greenlet"] = None
from sqlalchemy import Column, Integer, create_engine, select
from sqlalchemy.orm import declarative_base, sessionmaker
from stampede import Cache
from stampede.contrib.sqlalchemy import FromCache, StatementCache
Base = declarative_base()
class Thing(Base):
    __tablename__ = "thing"
    id = Column(Integer, primary_key=True)
engine, cache = create_engine("sqlite://"), Cache()
Base.metadata.create_all(engine)
sessions = sessionmaker(engine)
StatementCache(cache).listen(sessions)
with sessions() as session:
    print(session.scalars(select(Thing).options(FromCache())).all(), cache.stats().computations)
"""


def test_without_greenlet() -> None:
    """Since SQLAlchemy 2.1, greenlet is installed for asyncio only."""
    command = [sys.executable, "-c", WITHOUT_GREENLET]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout == "[] 1\n"
