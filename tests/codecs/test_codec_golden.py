"""Golden files: bytes that older releases wrote stay readable, under every Python version.

A new file, when the layout gains something (it never overwrites one):
    python -c "import sys; sys.path.insert(0, 'tests/codecs'); import test_codec_golden as t; t.write('NAME')"
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from ipaddress import ip_address, ip_interface, ip_network
from math import inf
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest

from stampede.codecs import HEADER, Codec, make_codec
from stampede.errors import CodecError
from stampede.model.entry import Entry

GOLDEN = Path(__file__).parent / "golden"
KEY = "shop.report:(42,)"


class Colour(Enum):
    RED = "r"
    BLUE = "b"


class Rights(Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: float


@dataclass(frozen=True, slots=True)
class Line:
    sku: str
    price: Decimal
    at: datetime


@dataclass
class Order:
    id: int
    colour: Colour
    rights: Rights
    where: Point
    lines: list[Line] = field(default_factory=list)
    parent: Order | None = None


LINE = Line("a-1", Decimal("1.00"), datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC))
ORDER = Order(
    1, Colour.BLUE, Rights.READ | Rights.WRITE, Point(1, 2.5), [LINE], Order(0, Colour.RED, Rights(0), Point(0, 0.0))
)
PLAIN: dict[Any, Any] = {
    "none": None, "bools": [True, False], "ints": (0, -1, 255, 65536, 2**31, -(2**70)), "floats": [0.5, -0.0, inf],
    "text": "grüße \U0001f40e",
    "bytes": b"\x00\xff", "bytearray": bytearray(b"ab"), (1, "k"): {1, 2}, 3: frozenset({4}),
    "empty": [(), [], {}, set(), frozenset(), "", b""],
}  # fmt: skip
STANDARD: list[Any] = [
    1 + 2j, range(1, 9, 2), date(2026, 2, 28), time(1, 2, 3, 4, tzinfo=UTC, fold=1), datetime(2026, 1, 2, 3, 4, 5, 6),
    timedelta(-1, 2, 3), timezone(timedelta(hours=-3), "here"), timezone(timedelta(hours=2)), Decimal("1.00"),
    Decimal("-Infinity"), Fraction(-1, 3), UUID(int=7), PurePosixPath("/a/b"), PureWindowsPath("c:\\x"),
    ip_address("10.0.0.1"), ip_address("::1"), ip_network("10.0.0.0/8"), ip_network("fe80::/10"),
    ip_interface("10.0.0.1/24"), ip_interface("::1/64"), OrderedDict(b=1, a=2), Counter("abca"),
    defaultdict(list, {"a": [1]}), deque([1, 2], 5),
]  # fmt: skip

try:
    BERLIN = ZoneInfo("Europe/Berlin")
except ZoneInfoNotFoundError:  # a system without tzdata
    BERLIN = None


def _order() -> Codec:
    return make_codec(returns=dict[str, Order])


CASES: dict[str, tuple[Callable[[], Codec], Any, bool]] = {
    "sealed-plain": (make_codec, PLAIN, False),
    "sealed-standard": (make_codec, STANDARD, False),
    "sealed-zone": (make_codec, [BERLIN, datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1)], False),
    "sealed-order": (_order, {"a": ORDER}, False),
    "sealed-raised": (make_codec, ("KeyError", ("missing", 7)), True),
    "sealed-compressed": (lambda: make_codec(compress=100), ["all the same"] * 100 + [date(2026, 1, 1)], False),
    "sealed-signed": (lambda: make_codec(signing_key="golden"), {"a": 1}, False),
    "msgpack-order": (lambda: make_codec("msgpack", returns=dict[str, list[Line]]), {"a": [LINE]}, False),
    "json-order": (lambda: make_codec("json", returns=dict[str, list[Line]]), {"a": [LINE]}, False),
    "pickle-signed": (lambda: make_codec("pickle", signing_key="golden"), [Fraction(1, 2), range(3)], False),
}


def _entry(value: Any, raised: bool) -> Entry[Any]:
    return Entry(value, b"golden-8", 0.25, 0.5, 60.0, 60.0, inf, raised)


def write(name: str) -> None:
    make, value, raised = CASES[name]
    with open(GOLDEN / f"{name}.bin", "xb") as file:
        file.write(make().encode(KEY, _entry(value, raised)))


UNBOUNDED = {name: CASES[name] for name in ("sealed-signed", "pickle-signed")}
"""Signed by a release that signed no moment: `NAME-1.bin`."""


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_was_signed_without_a_moment_is_a_miss(name: str) -> None:
    """Broken if such bytes could be put back for ever."""
    with pytest.raises(CodecError, match="another layout"):
        UNBOUNDED[name][0]().decode(KEY, (GOLDEN / f"{name}-1.bin").read_bytes())


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_older_releases_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken if a deploy of a new release, or of another Python version, turned every stored entry into a miss."""
    monkeypatch.setattr("stampede.codecs.envelope._clock", float)  # not long ago
    if name == "sealed-zone" and BERLIN is None:
        pytest.skip("needs tzdata")
    make, value, raised = CASES[name]
    read = make().decode(KEY, (GOLDEN / f"{name}.bin").read_bytes())
    assert read == _entry(value, raised)
    assert repr(read) == repr(_entry(value, raised))


def test_every_golden_file_has_its_case() -> None:
    """Broken if a file were forgotten when its case is renamed: it would no longer be read by any test."""
    assert {path.stem for path in GOLDEN.glob("*.bin")} == {*CASES, *(f"{name}-1" for name in UNBOUNDED)}


def test_the_header_stands_where_the_engines_scripts_expect_it() -> None:
    """Broken if a field moved: scripts inside an engine read id and durations by their offsets."""
    blob = (GOLDEN / "sealed-plain.bin").read_bytes()
    assert blob[:16].hex() == "53470101000000" + "00" + b"golden-8".hex()
    assert blob[16:24].hex() == "3fd0000000000000"  # cost, 0.25
    assert blob[40:48].hex() == "404e000000000000"  # fresh, 60.0
    assert blob[48:56].hex() == "7ff0000000000000"  # keep, for ever
    id, cost, _, ttl, fresh, keep, _ = HEADER.unpack_from(blob)[4:]
    assert (id, cost, ttl, fresh, keep) == (b"golden-8", 0.25, 60.0, 60.0, inf)
