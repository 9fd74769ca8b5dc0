"""A codec gives back an equal value with the same types and attributes, or refuses to store it."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network, IPv6Interface, ip_address
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stampede import Cache, CodecError
from stampede.codecs import make_codec
from stampede.codecs.equality import alike
from stampede.model.entry import Entry

KEY, ID = "k", b"12345678"
CODECS = ["sealed", "msgpack", "json"]


class Kind(enum.IntEnum):
    A = 1


class Text(str):
    """A subclass of str."""


class Point(NamedTuple):
    x: int
    tag: str = ""


class Sub(Point):
    """A subclass of Point, with room for attributes."""


@dataclass
class Page:
    n: Any
    items: list[Any] = field(default_factory=list)
    made: int = field(init=False, default=0)

    @cached_property
    def lazy(self) -> int:
        return 7


@dataclass
class Slots:
    __slots__ = ("beside", "n")
    n: int


@dataclass
class Row:
    n: int
    text: str
    part: float | None
    tags: list[str]
    counts: dict[str, int]
    made: datetime
    by: UUID
    more: Any = None


@dataclass
class Doubled:
    n: int

    def __post_init__(self) -> None:
        self.n *= 2


class Doubles:
    """A descriptor that doubles what is assigned to it."""

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return vars(owner)["n"]

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)["n"] = 2 * value


@dataclass
class Meddled:
    n: int


Meddled.n = Doubles()  # type: ignore[assignment]


@attrs.define(slots=False)
class Attrs:
    n: Any


class Model(pydantic.BaseModel):
    n: int = 1
    late: str = "x"
    _private: int = 3


class Open(pydantic.BaseModel, extra="allow"):
    n: int = 1


class Struct(msgspec.Struct):
    n: int


def through(codec: Any, value: Any) -> Any:
    return codec.decode(KEY, codec.encode(KEY, Entry(value, ID))).value


def facts(value: Any) -> Any:
    """All that can be seen of a value, as plain tuples. It uses none of the code that is tested here."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return kind, value.name
    if kind in (dict, OrderedDict, Counter, defaultdict):
        inner: Any = [(facts(key), facts(each)) for key, each in value.items()]
    elif kind in (set, frozenset):
        inner = sorted(map(repr, map(facts, value)))
    elif isinstance(value, (list, tuple, deque)):
        inner = [*map(facts, value)]
    elif kind in (Page, Row, Doubled, Slots, Attrs, Struct):
        names = ("n", "items", "made", "text", "part", "tags", "counts", "by", "more")
        inner = [facts(getattr(value, name)) for name in names if hasattr(value, name)]
    elif isinstance(value, pydantic.BaseModel):
        inner = [facts(value.__dict__), facts(value.__pydantic_extra__), facts(value.__pydantic_private__)]
    else:
        inner = [repr(value), str(getattr(value, "tzinfo", ""))]
    held = {name: each for name, each in getattr(value, "__dict__", {}).items() if name in ("extra", "beside")}
    return kind, inner, sorted(held.items()), getattr(value, "beside", None), getattr(value, "maxlen", None)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
zones = st.sampled_from([None, UTC, timezone(timedelta(hours=1)), ZoneInfo("UTC"), ZoneInfo("Europe/Zurich")])
moments = st.datetimes(timezones=zones, allow_imaginary=False)
atoms = (
    plain
    | moments
    | st.dates()
    | st.times(timezones=zones)
    | st.timedeltas()
    | st.decimals()
    | st.fractions()
    | st.builds(UUID, int=st.integers(0, 2**128 - 1))
    | st.complex_numbers()
    | st.ip_addresses()
    | st.sampled_from(
        [Kind.A, Text("x"), range(3), range(True, 3), 10**30, PurePosixPath("/a"), IPv4Network("10.0.0.0/8")]
    )
    | st.builds(Point, st.integers())
    | st.builds(Sub, st.integers())
)


def grown(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers() | st.just(Text("k"))
    return (
        st.lists(values, max_size=3)
        | st.lists(values, max_size=3).map(tuple)
        | st.dictionaries(keys, values, max_size=3)
        | st.dictionaries(keys, values, max_size=3).map(OrderedDict)
        | st.sets(plain, max_size=3)
        | st.builds(Page, values)
        | st.builds(Attrs, values)
        | st.lists(values, max_size=3).map(deque)
    )


@pytest.mark.parametrize("returns", [None, Any, "exact"], ids=str)
@pytest.mark.parametrize("name", CODECS)
@given(value=st.recursive(atoms, grown, max_leaves=5))
def test_what_comes_back_is_what_went_in(name: str, returns: Any, value: Any) -> None:
    """A decoded value equals the original in all its facts, so the first caller and all others get the same value."""
    returns = (Page | Attrs | Point | Sub | Kind | Any) if returns == "exact" and name == "sealed" else returns
    returns = type(value) if returns == "exact" else returns
    try:
        codec = make_codec(name, returns=returns)
        blob = codec.encode(KEY, Entry(value, ID))
    except (CodecError, ValueError):
        return  # refused, or the type has no decoder
    assert facts(codec.decode(KEY, blob).value) == facts(value)


ODD: list[tuple[str, Any]] = [
    ("n", True), ("n", Kind.A), ("n", 1.0), ("n", None), ("text", Text("x")), ("text", b"x"), ("part", 1),
    ("part", math.nan), ("part", math.inf), ("part", -0.0), ("tags", ("x",)), ("tags", [Text("x")]), ("tags", [None]),
    ("counts", {Text("x"): 1}), ("counts", OrderedDict()), ("counts", {"x": True}),
    ("made", datetime(2026, 1, 1, fold=1)), ("made", datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC"))),
    ("made", datetime(1, 1, 1, tzinfo=UTC)), ("made", date(2026, 1, 1)),
    ("more", {1: 2}), ("more", {"x": (1,)}), ("more", [b"x"]), ("more", [bytearray(b"x")]), ("more", [1, [math.nan]]),
    ("more", 2**64), ("extra", 9), ("__class__", type("Row", (Row,), {})),
]  # fmt: skip


@pytest.mark.parametrize("name, value", ODD, ids=repr)
@pytest.mark.parametrize("form", ["msgpack", "json"])
def test_rows_come_back_as_they_went_in(form: str, name: str, value: Any) -> None:
    """A list of dataclasses with an odd field is refused, or all its rows come back unchanged."""
    codec = make_codec(form, returns=list[Row])
    rows = [Row(n, "x", 0.5, ["x"], {"x": 1}, datetime(2026, 1, 1), UUID(int=n)) for n in (1, 2**63)]
    assert facts(through(codec, rows)) == facts(rows)
    setattr(rows[-1], name, value)
    try:
        blob = codec.encode(KEY, Entry(rows, ID))
    except CodecError:
        return
    assert facts(codec.decode(KEY, blob).value) == facts(rows)


def changed(value: Any, name: str = "extra") -> Any:
    object.__setattr__(value, name, 9)
    return value


LOSSY: list[tuple[Any, Callable[[], Any], list[str]]] = [
    (Page, lambda: changed(Page(1)), CODECS),
    (Attrs, lambda: changed(Attrs(1)), CODECS),
    (Doubled, lambda: Doubled(1), ["msgpack", "json"]),
    (Meddled, lambda: Meddled(1), ["msgpack", "json"]),
    (Slots, lambda: changed(Slots(1), "beside"), CODECS),
    (list[Page], lambda: [Page(0)] * 2000 + [changed(Page(1))], CODECS),
    (Point, lambda: Sub(1), CODECS),
    (Sub, lambda: changed(Sub(1)), CODECS),
    (Model, lambda: changed(Model()), CODECS),
    (Model, lambda: changed(Model(), "_private"), ["msgpack", "json"]),
    (datetime, lambda: datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Zurich")), ["msgpack", "json"]),
    (datetime, lambda: datetime(2026, 1, 1, fold=1), ["msgpack", "json"]),
    (list[int], lambda: [Kind.A], ["msgpack", "json"]),
    (list[float], lambda: [1], ["msgpack", "json"]),
    (Annotated[int, msgspec.Meta(gt=5)], lambda: 3, ["msgpack", "json"]),
    (Annotated[list[int], msgspec.Meta(max_length=1)], lambda: [1, 2], ["msgpack", "json"]),
    (Annotated[dict[str, int], msgspec.Meta(max_length=0)], lambda: {"x": 1}, ["msgpack", "json"]),
]


@pytest.mark.parametrize(
    "name, returns, make",
    [(name, returns, make) for returns, make, names in LOSSY for name in names],
)
def test_what_would_be_lost_is_refused(name: str, returns: Any, make: Callable[[], Any]) -> None:
    """A value is refused if it would come back without an attribute, a time zone or its class, or not at all."""
    with pytest.raises(CodecError):
        make_codec(name, returns=returns).encode(KEY, Entry(make(), ID))


@pytest.mark.parametrize(
    "returns, value",
    [
        (Any, UUID(int=1)),
        (Any, range(True, 5)),
        (Any, IPv6Interface("fe80::1%eth0/64")),
        (Any, datetime(2026, 1, 1, fold=1, tzinfo=ZoneInfo("Europe/Zurich"))),
        (Any, -0.0),
        (Any, Decimal("1.00")),
        (Model, Model(n=2)),
        (Open, Open(n=2, more=3)),
        (Page, Page([Page(1)])),
    ],
    ids=repr,
)
def test_what_the_default_codec_keeps(returns: Any, value: Any) -> None:
    """The default codec keeps these details. A refused value would be computed at every call."""
    again = through(make_codec(returns=returns), value)
    assert facts(again) == facts(value)
    if isinstance(value, pydantic.BaseModel):
        assert again.model_fields_set == value.model_fields_set


def test_what_was_lazily_computed_may_go() -> None:
    """An object is stored without its cached properties, so it can be stored after such a property was read."""
    page = Page(1)
    assert page.lazy == 7
    for name in CODECS:
        assert through(make_codec(name, returns=Page), page) == page


DIFFERENT = [
    *(None, False, 0, 0.0, -0.0, math.nan, "", b"", bytearray(b""), (), [], {}, set(), frozenset()),
    *(1, 1.0, True, Decimal(1), Decimal("1.0"), Fraction(1), Kind.A, "1", (1,), [1], {1}, (1.0,), [True]),
    *({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1.0, "b": 2}, OrderedDict(a=1, b=2)),
    *(datetime(2026, 1, 1), datetime(2026, 1, 1, fold=1), datetime(2026, 1, 1, tzinfo=UTC), date(2026, 1, 1)),
    *(datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")), time(1), time(1, fold=1), timedelta(1), timedelta(2)),
    *(UUID(int=1), UUID(int=2), Point(1), Sub(1), (1, ""), changed(Sub(1))),
    *(Page(1), Page(1.0), Page(Page(1)), changed(Page(1)), Attrs(1), Attrs(2), Slots(1), changed(Slots(1), "beside")),
    *(Model(), Model(n=2), changed(Model(), "_private"), Open(), Open(x=1), Struct(1), Struct(2)),
    *(ip_address("10.0.0.1"), IPv4Address("10.0.0.2"), range(3), range(0, 3, 2), {Point(1)}, {(1, "")}, {Sub(1)}),
]


def test_alike_is_exact() -> None:
    """`alike` tells different values apart. Otherwise a value that comes back changed would be stored."""
    for number, one in enumerate(DIFFERENT):
        for other_number, other in enumerate(DIFFERENT):
            assert alike(one, other) is (number == other_number), (one, other)


@pytest.fixture
def caches(tmp_path: Any) -> Iterator[list[Cache]]:
    with Cache() as memory, Cache(f"disk://{tmp_path}") as disk:
        yield [memory, disk]


class Gone(LookupError):
    def __init__(self, number: int) -> None:
        super().__init__(f"{number} is gone")
        self.number = number


class Local(LookupError):
    """An exception that can be made only once."""

    made = 0

    def __new__(cls, *args: object) -> Local:
        cls.made += 1
        assert cls.made == 1
        return super().__new__(cls, *args)


class Moved(LookupError):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@pytest.mark.parametrize(
    "error, kept",
    [(Moved(3), True), (LookupError(1), True), (Gone(3), True), (changed(LookupError(1)), True), (Local(), False)],
    ids=repr,
)
def test_an_exception_comes_back_whole_or_is_not_kept(caches: list[Cache], error: Exception, kept: bool) -> None:
    """An exception of `raises` comes back with all its attributes, or is not stored."""
    for cache in caches:
        calls: list[int] = []

        def fails(calls: list[int] = calls) -> None:
            calls.append(1)
            raise error

        for _ in range(2):
            with pytest.raises(LookupError) as raised:
                cache.get_or_compute("k", fails, raises=LookupError)
            assert type(raised.value) is type(error)
            assert (raised.value.args, vars(raised.value)) == (error.args, vars(error))
        assert len(calls) == (1 if kept else 2)
