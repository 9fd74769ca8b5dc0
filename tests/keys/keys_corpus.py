"""Values that all differ. Run as a script, this prints their texts, to compare between processes and Python
versions."""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag, IntEnum, IntFlag, StrEnum
from fractions import Fraction
from io import BytesIO
from pathlib import PurePosixPath, PureWindowsPath
from time import gmtime
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo


class Colour(Enum):
    RED = 1
    GREEN = 2


class Other(Enum):
    RED = 1


class Number(IntEnum):
    ONE = 1


class Word(StrEnum):
    ONE = "1"


class Perm(Flag):
    R = 1
    W = 2


class IntPerm(IntFlag):
    R = 1
    W = 2


Odd = Enum("Odd", {"a.b": 1, "it's": 2})


class Text(str):
    pass


class Tagged(str):
    tag: str


class Slotted(dict):  # type: ignore[type-arg]
    __slots__ = ("extra",)


class Integer(int):
    pass


class Point(NamedTuple):
    x: int
    y: int


Twin = namedtuple("Twin", ["x", "y"])


@dataclass
class Order:
    number: Any
    lines: Any = ()


@dataclass(frozen=True, slots=True)
class Frozen:
    number: Any
    lines: Any = ()


class Grown(Frozen):
    def __init__(self, number: Any, tenant: str) -> None:
        super().__init__(number)
        object.__setattr__(self, "tenant", tenant)


class Keyed:
    def __init__(self, key: Any) -> None:
        self.key = key

    def __stampede_key__(self) -> Any:
        return self.key


class Shifted(tzinfo):
    """A user's own time zone, which follows the protocol that the standard library documents for pickling zones."""

    def __init__(self, hours: int = 0) -> None:
        self.hours = hours

    def __getinitargs__(self) -> tuple[int]:
        return (self.hours,)

    def utcoffset(self, moment: datetime | None) -> timedelta:
        return timedelta(hours=self.hours)

    def tzname(self, moment: datetime | None) -> str:
        return "same"

    def dst(self, moment: datetime | None) -> None:
        return None


class Listed(Shifted):
    """A zone like those of pytz: it is pickled by name, and refers to itself."""

    def __init__(self, name: str) -> None:
        super().__init__(1)
        self.name = name
        self.all = [self]

    def __reduce__(self) -> tuple[type[Listed], tuple[str]]:
        return (Listed, (self.name,))


class Moment(datetime):
    pass


class Nanoseconds(datetime):
    """A class like pandas' Timestamp: more exact than its base class, and pickled in its own way."""

    nanoseconds = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (Nanoseconds.at, (self.timestamp(), self.nanoseconds))

    @classmethod
    def at(cls, timestamp: float, nanoseconds: int) -> Nanoseconds:
        made = cls.fromtimestamp(timestamp, UTC)
        made.__dict__.clear()
        made.nanoseconds = nanoseconds
        return made


def zone(key: str | None) -> ZoneInfo:
    """Make a zone of that name, one hour ahead of UTC. This works without a zone database."""
    header = b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 0, 1, 4)
    return ZoneInfo.from_file(BytesIO(header + struct.pack(">lbB", 3600, 0, 0) + b"CET\0"), key)


def tagged(text: str, tag: str) -> Tagged:
    made = Tagged(text)
    made.tag = tag
    return made


def moment(source: str) -> Moment:
    made = Moment(2026, 7, 1, 12)
    made.source = source  # type: ignore[attr-defined]
    return made


def slotted(extra: int) -> Slotted:
    made = Slotted(a=1)
    made.extra = extra
    return made


NOON = datetime(2026, 7, 1, 12)
BERLIN, PARIS, ZULU = zone("Europe/Berlin"), zone("Europe/Paris"), zone("UTC")

DIFFERENT: list[Any] = [
    *[None, True, False, 0, 1, -1, 10**30, 10**700, 10**5000, -(10**5000), 2**20000],
    *[0.0, -0.0, 1.0, 1e16, 1e-7, 0.1, 0.1 + 0.2, float("inf"), float("-inf"), float("nan")],
    *[1j, complex(1, 0), complex(0.0, -0.0), complex(-0.0, 0.0), complex(0, 1e300)],
    *[
        "",
        "1",
        "None",
        "True",
        "1.0",
        "a",
        "A",
        "é",
        "e\u0301",
        "1,2",
        "'",
        "\\",
        "\\'",
        "'1'",
        "\n",
        "\\n",
        "\x00",
        " ",
    ],
    *["\ud800", "\\ud800", "\udfff", "\u2028", "\x85", "日本", "🐘", "<default>", "(1,)", "b'1'", "x" * 500, "x" * 501],
    *[b"", b"1", b"'", b'"', b"\xff", bytearray(b"1"), bytearray()],
    *[(), (1,), (True,), (1.0,), ("1",), ((1,),), (1, 2), (1, (2,)), ((1, 2),), ("1,2",), ("1", "2"), ("1','2",)],
    *[[], [1], [True], [[1]], [1, 2], [2, 1], [(1, 2)], ["1,2"]],
    *[{}, {1: 2}, {True: 2}, {1: 2.0}, {"1": 2}, {1: {2: 3}}, {1: 2, 3: 4}, {(1, 2): 3}, {"1:2,3": 4}, {2: 1}],
    *[set(), {1}, {True}, {1, 2}, {"1,2"}, {(1, 2)}, frozenset(), frozenset({1}), frozenset({frozenset({1})})],
    *[OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), Counter("ab"), defaultdict(int, a=1), defaultdict(list, a=1)],
    *[MappingProxyType({1: 2}), MappingProxyType({})],
    *[Colour.RED, Colour.GREEN, Other.RED, Number.ONE, Word.ONE, *Odd],
    *[Perm.R, Perm.R | Perm.W, Perm(0), IntPerm.R, IntPerm.R | IntPerm.W],
    *[Text("1"), Text("a"), tagged("a", "x"), tagged("a", "y"), slotted(1), slotted(2), Integer(1)],
    *[Point(1, 2), Twin(1, 2), Point(1, True), gmtime(0)],
    *[Order(1), Order(True), Order(1, [1]), Order(1, (1,)), Order("1"), Frozen(1), Frozen(Order(1)), Order],
    *[Grown(1, "a"), Grown(1, "b"), Keyed(1), Keyed("1"), Keyed((1,)), Keyed(Keyed(1))],
    *[date(2026, 7, 1), NOON, NOON.replace(fold=1), NOON.replace(microsecond=1), NOON.replace(microsecond=100_000)],
    *[NOON.replace(tzinfo=zone) for zone in (UTC, ZULU, BERLIN, PARIS)],
    *[NOON.replace(tzinfo=timezone(timedelta(hours=h), n)) for h, n in [(1, "CET"), (1, "X"), (2, "X")]],
    *[
        NOON.replace(tzinfo=timezone(timedelta(hours=1))),
        NOON.replace(tzinfo=Shifted(1)),
        NOON.replace(tzinfo=Shifted(2)),
    ],
    *[NOON.replace(tzinfo=BERLIN, fold=1), datetime(2026, 7, 1, 10, tzinfo=UTC), Moment(2026, 7, 1, 12)],
    *[NOON.replace(tzinfo=Listed("a")), NOON.replace(tzinfo=Listed("b")), moment("a"), moment("b")],
    *[Nanoseconds.at(0, 1), Nanoseconds.at(0, 2), Moment(2026, 7, 1, 12, tzinfo=BERLIN)],
    *[
        time(12),
        time(12, fold=1),
        time(12, tzinfo=UTC),
        time(12, 0, 0, 1),
        timedelta(1),
        timedelta(0, 1),
        timedelta(0, 0, 1),
    ],
    *[UTC, BERLIN, PARIS, timezone(timedelta(hours=1))],
    *[UUID(int=1), UUID(int=2), str(UUID(int=1))],
    *[
        Decimal(text)
        for text in ("1", "1.0", "1.00", "1E+3", "1000", "NaN", "sNaN", "-NaN", "NaN1", "-0", "0", "Infinity")
    ],
    *[Fraction(1), Fraction(1, 2), range(3), range(0, 3, 2), range(0, 4, 2), range(1, 3), ...],
    *[
        PurePosixPath("/a"),
        PureWindowsPath("/a"),
        PurePosixPath("/A"),
        PurePosixPath("a/it's"),
        int,
        str,
        Colour,
        BERLIN.key,
    ],
]


if __name__ == "__main__":
    from stampede.keys import canonical

    json.dump([canonical(value) for value in DIFFERENT], sys.stdout)
