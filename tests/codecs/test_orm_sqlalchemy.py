"""SQLAlchemy's models as values: what was loaded is stored, detached. Other values are refused with advice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest
from sqlalchemy import JSON, ForeignKey, create_engine, event, func, select
from sqlalchemy.ext.mutable import MutableDict
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    attribute_keyed_dict,
    composite,
    joinedload,
    load_only,
    mapped_column,
    relationship,
    selectinload,
)
from sqlalchemy.orm.exc import DetachedInstanceError
from sqlalchemy.pool import StaticPool

from stampede import CodecError, KeyingError, cached
from stampede.codecs import make_codec
from stampede.contrib.sqlalchemy import detach, detached, merge
from stampede.model.entry import Entry
from stampede.testing import isolated

KEY, ID = "k", b"12345678"


class Base(DeclarativeBase):
    pass


class Status(Enum):
    OPEN = "open"
    SHUT = "shut"


@dataclass
class Point:
    x: int
    y: int


class Team(Base):
    __tablename__ = "team"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    members: Mapped[list[Member]] = relationship(back_populates="team", order_by="Member.id")
    by_name: Mapped[dict[str, Member]] = relationship(viewonly=True, collection_class=attribute_keyed_dict("name"))
    as_set: Mapped[set[Member]] = relationship(viewonly=True)


class Member(Base):
    __tablename__ = "member"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "member"}  # noqa: RUF012
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    name: Mapped[str]
    biography: Mapped[str] = mapped_column(deferred=True, default="long")
    status: Mapped[Status] = mapped_column(default=Status.OPEN)
    pay: Mapped[Decimal] = mapped_column(default=Decimal("9.50"))
    notes: Mapped[dict[str, Any]] = mapped_column(MutableDict.as_mutable(JSON), default=dict)
    x: Mapped[int] = mapped_column(default=1)
    y: Mapped[int] = mapped_column(default=2)
    at: Mapped[Point] = composite("x", "y")
    team_id: Mapped[int | None] = mapped_column(ForeignKey("team.id"))
    team: Mapped[Team | None] = relationship(back_populates="members")


class Boss(Member):
    __mapper_args__ = {"polymorphic_identity": "boss"}  # noqa: RUF012


class Thing(MappedAsDataclass, Base):
    __tablename__ = "thing"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


@pytest.fixture
def engine() -> Iterator[Any]:
    made = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    Base.metadata.create_all(made)
    with Session(made) as session:
        red = Team(id=1, name="red")
        session.add_all([Member(id=1, name="bob", team=red, notes={"a": 1}), Boss(id=2, name="eve", team=red)])
        session.add(Thing(id=1, name="lamp"))
        session.commit()
    yield made
    made.dispose()


@pytest.fixture(autouse=True)
def _caches() -> Iterator[None]:
    with isolated(url="memory://?codec=sealed"):
        yield


def statements(engine: Any) -> list[str]:
    """The SQL statements that are executed from now on."""
    seen: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    return seen


def test_a_model_that_is_annotated_is_a_value(engine: Any) -> None:
    """A model that the return annotation names is computed once and stored."""

    @cached
    def member(member_id: int) -> Member | None:
        with Session(engine) as session:
            return session.get(Member, member_id)

    first, again = member(1), member(1)
    assert first is not again and type(again) is Member and member.stats().computations == 1
    assert (again.name, again.status, again.pay, again.notes) == ("bob", Status.OPEN, Decimal("9.50"), {"a": 1})
    assert again.at == Point(1, 2)
    for each in (first, again):
        with pytest.raises(DetachedInstanceError):
            each.biography  # noqa: B018
        with pytest.raises(DetachedInstanceError):
            each.team  # noqa: B018
    assert type(member(2)) is Boss is type(member(2))  # the annotation names its base class
    assert member(3) is None is member(3)


def test_it_comes_back_into_a_session(engine: Any) -> None:
    """`merge` attaches a cached model to a session without a query. It can then load more attributes and be changed."""

    @cached
    def member(member_id: int) -> Member:
        with Session(engine) as session:
            return session.get_one(Member, member_id)

    member(1)
    asked = statements(engine)
    with Session(engine) as session:
        mine = merge(session, member(1))
        assert not asked and mine in session and mine not in session.dirty
        assert mine.team.name == "red" and mine.biography == "long" and len(asked) == 2
        mine.name = "rob"
        mine.notes["b"] = 2
        session.commit()
        assert session.scalar(select(Member.name).where(Member.id == 1)) == "rob"
        assert session.scalar(select(Member.notes).where(Member.id == 1)) == {"a": 1, "b": 2}


def test_relationships_that_were_loaded_come_along(engine: Any) -> None:
    """Relationships that were loaded are stored with the model. Others raise DetachedInstanceError."""

    @cached
    def members() -> list[Member]:
        with Session(engine) as session:
            return [*session.scalars(select(Member).options(joinedload(Member.team)).order_by(Member.id))]

    @cached
    def team() -> Team:
        with Session(engine) as session:
            return session.scalars(select(Team).options(selectinload(Team.members))).one()

    for _ in range(2):
        bob, eve = members()
        assert bob.team is eve.team is not None and bob.team.name == "red"
        with pytest.raises(DetachedInstanceError):
            bob.team.members  # noqa: B018
        assert [each.name for each in team().members] == ["bob", "eve"]
    assert members.stats().computations == team.stats().computations == 1


def test_collections_of_all_kinds(engine: Any) -> None:
    """A relationship that is a dict or a set comes back as a dict or a set."""
    with Session(engine) as session:
        loaded = select(Team).options(selectinload(Team.by_name), selectinload(Team.as_set))
        attached = session.scalars(loaded).one()
        mine = detach(attached)
    for team in (there_and_back(attached, returns=Team), mine, there_and_back(mine, returns=Team)):
        assert sorted(team.by_name) == ["bob", "eve"] and team.by_name["bob"].id == 1
        assert {each.name for each in team.as_set} == {"bob", "eve"} and isinstance(team.as_set, set)
        assert team.by_name["bob"] in team.as_set


def test_columns_that_were_left_out_are_left_out(engine: Any) -> None:
    """Columns that the query left out are not stored, and do not come back as None."""

    @cached
    def names() -> list[Member]:
        with Session(engine) as session:
            return [*session.scalars(select(Member).options(load_only(Member.name)))]

    for _ in range(2):
        assert {each.name for each in names()} == {"bob", "eve"}
        with pytest.raises(DetachedInstanceError):
            names()[0].pay  # noqa: B018


def test_a_mapped_dataclass_is_a_row(engine: Any) -> None:
    """A mapped dataclass is stored as a row with its identity, so it can be merged into a session."""

    @cached
    def thing() -> Thing:
        with Session(engine) as session:
            return session.get_one(Thing, 1)

    assert thing() == thing() and thing.stats().computations == 1
    with Session(engine) as session:
        assert merge(session, thing()) in session


def test_detached_below_cached(engine: Any) -> None:
    """@detached returns objects outside of the session, so they can be shared and do not expire at a commit."""

    @cached(ignore=["session"])
    @detached
    def member(session: Session, member_id: int) -> Member:
        """Somebody."""
        return session.get_one(Member, member_id)

    with Session(engine) as session:
        first = member(session, 1)
        assert first not in session and session.get(Member, 1) is not first
        session.commit()
        assert first.name == "bob" == member(session, 1).name
        assert merge(session, first) is session.get(Member, 1)
    assert member.stats().computations == 1 and member.__doc__ == "Somebody."


def test_detached_suspends() -> None:
    """@detached also works on async functions."""

    @cached
    @detached
    async def numbers() -> list[int]:
        return [1]

    assert asyncio.run(numbers()) == [1]


def test_detach_leaves_the_way_back_unloaded(engine: Any) -> None:
    """`detach` leaves back references unloaded. Otherwise objects that refer to each other could not be stored."""
    with Session(engine) as session:
        team = session.get_one(Team, 1)
        assert all(each.team is team for each in team.members)
        mine, (bob, eve) = detach((team, {"all": team.members}))[0], detach(team.members)
        assert [each.name for each in mine.members] == ["bob", "eve"] and mine not in session
        assert bob.team is eve.team and bob.team.name == "red" and type(eve) is Boss
        for one, name in ((mine.members[0], "team"), (bob.team, "members")):
            with pytest.raises(DetachedInstanceError):
                getattr(one, name)
        assert team in session and team.members[0] in session
    read = there_and_back([mine, bob, eve], returns=list[Team | Member])
    assert [each.name for each in read[0].members] == ["bob", "eve"] and read[1].team is read[2].team


def there_and_back(value: Any, **options: Any) -> Any:
    made = make_codec(**options)
    return made.decode(KEY, made.encode(KEY, Entry(value, ID))).value


def test_objects_that_are_trusted_and_not_annotated(engine: Any) -> None:
    """Without an annotation, a model is stored if trust= names its class. msgpack and json refuse models."""
    with Session(engine) as session:
        found, thing = session.get(Member, 1), session.get(Thing, 1)
    with pytest.raises(CodecError, match=r"trust=\[Member\], or in the return annotation"):
        there_and_back({"m": found})
    assert there_and_back({"m": found}, trust=[Member])["m"].name == "bob"
    assert there_and_back({"m": found}, name="pickle", signing_key=b"k")["m"].name == "bob"
    for codec in ("msgpack", "json"):
        with pytest.raises(CodecError, match="use codec='sealed', and name it"):
            there_and_back(found, name=codec, returns=Member)
        for value, returns in ((thing, Thing), ([thing], list[Thing])):
            with pytest.raises(CodecError, match=r"Thing can't be stored .* use codec='sealed', and name it"):
                there_and_back(value, name=codec, returns=returns)


REFUSED = {
    "of an open session": ("@detached", lambda session: session.get(Member, 1)),
    "not in the database": ("not in the database yet", lambda session: Member(id=9, name="new")),
    "changed": ("commit them first", lambda session: setattr(one := session.get(Member, 1), "name", "x") or one),
    "expired": ("expire_on_commit=False", lambda session: (one := session.get(Member, 1), session.commit()) and one),
    "with more": ("'more'", lambda session: setattr(one := session.get(Member, 1), "more", 1) or one),
    "in a circle": ("contains itself", lambda session: (t := session.get(Team, 1), t.members[0].team) and t),
    "a result": (r"return it\.all\(\)", lambda session: session.execute(select(Member))),
    "results": (r"return it\.all\(\)", lambda session: session.scalars(select(Member))),
    "rows": (r"tuple\(it\)", lambda session: session.execute(select(Member.id, Member.name)).all()),
    "a mapping": (r"dict\(it\)", lambda session: session.execute(select(Member.id)).mappings().all()),
    "a statement": ("not queried", lambda session: select(func.count(Member.id))),
    "a relationship's list": (r"list\(it\)", lambda session: session.get(Team, 1).members),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_name_what_works(engine: Any, what: str) -> None:
    """Values that can't be stored, such as changed models or those of an open session, are refused with advice."""
    advice, make = REFUSED[what]
    with Session(engine) as session:
        value = make(session)
        if what != "of an open session":
            session.expunge_all()
        with pytest.raises(CodecError, match=advice):
            there_and_back(value, returns=list[Member | Team])


@pytest.mark.parametrize("what", ["not in the database", "changed", "expired"])
def test_what_can_not_be_detached_is_told_why(engine: Any, what: str) -> None:
    """A model that can't be detached is refused with the reason, and not with the advice to use @detached."""
    advice, make = REFUSED[what]
    with Session(engine) as session:
        value = make(session)
        session.add(value)
        with pytest.raises(CodecError, match=advice):
            there_and_back(detach(value), returns=Member)


def test_a_column_more_is_a_miss(engine: Any) -> None:
    """If a class has a new column, entries of its older version are refused."""

    def made(**more: Any) -> Any:
        class Own(DeclarativeBase):
            pass

        table = {"__tablename__": "team", "id": mapped_column(primary_key=True, type_=Team.id.type), **more}
        return type("Row", (Own,), {"__module__": __name__, "__qualname__": "Row", **table})

    older, newer = made(), made(name=mapped_column(Team.name.type))
    with Session(engine) as session:
        blob = make_codec(trust=[older]).encode(KEY, entry_of(session, older))
    assert make_codec(trust=[older]).decode(KEY, blob).value.id == 1
    with pytest.raises(CodecError, match="columns"):
        make_codec(trust=[newer]).decode(KEY, blob)


def entry_of(session: Session, kind: Any) -> Any:
    found = session.get(kind, 1)
    session.expunge_all()
    return Entry(found, ID)


@pytest.mark.parametrize(
    "parts",
    [
        (0, {"id": 1}, {}),
        ("layout", {}, {}),
        ("layout", {"id": 1, "__class__": 2}, {}),
        ("layout", {"id": 1, "members": []}, {}),
        ("layout", {"id": 1}, {"members": 3}),
        ("layout", {"id": 1}),
        ("layout", [], []),
    ],
)
def test_hostile_bytes_are_a_miss(parts: tuple[Any, ...]) -> None:
    """Hostile bytes are refused: they can't make an object that no query returns."""
    from stampede.codecs.sqlalchemy import facts_of, row_shape

    shape = row_shape(Team, "t")
    with pytest.raises(Exception):  # noqa: B017  the envelope makes any a CodecError
        shape.rebuild(*(facts_of(Team).layout if part == "layout" else part for part in parts))


def test_threads_of_one_flight_share_nothing_of_a_session(engine: Any) -> None:
    """Threads that share a computation get objects outside of any session. Otherwise they would share one."""
    ready = threading.Barrier(4)

    @cached(ignore=["session"])
    @detached
    def team(session: Session) -> Team:
        return session.get_one(Team, 1)

    seen: list[Team] = []

    def work() -> None:
        with Session(engine) as session:
            ready.wait(10)
            found = team(session)
            assert found not in session
            seen.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [each.name for each in seen] == ["red"] * 4 and team.stats().computations == 1


def test_a_row_is_no_key_and_the_refusal_says_what_is() -> None:
    """A model is refused as an argument. The advice is its primary key, and not ignore=, which would mix up owners."""

    @cached
    def cart(owner: Any) -> int:
        return 1

    for owner in [Team(id=1, name="red")]:
        with pytest.raises(KeyingError, match=r"'owner'.*pass its primary key") as refused:
            cart(owner)
        assert "ignore" not in str(refused.value)
    with pytest.raises(KeyingError, match="ignore="):
        cart(object())
