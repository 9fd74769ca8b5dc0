"""The codec: a value comes back as it was, or not at all."""

from __future__ import annotations

import math
import struct
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from math import inf
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.codecs import HEADER, Codec, TooLarge, make_codec
from stampede.errors import CodecError, MissingExtra, OptionError
from stampede.model.entry import Entry

KEY = "shop.report:(1,)"
ID = b"12345678"


def through(codec: Codec, value: Any, raised: bool = False) -> Any:
    return codec.decode(KEY, codec.encode(KEY, Entry(value, ID, raised=raised))).value


def checksum(head: bytes, body: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(body, zlib.crc32(head, zlib.crc32(KEY.encode()))))


def same(value: Any, other: Any) -> bool:
    """Whether two values are equal and of equal types, also inside. NaN equals itself."""
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return same([*value], [*other]) and same([*value.values()], [*other.values()])
    if isinstance(value, (list, tuple, deque)):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, (set, frozenset)):
        return value == other and Counter(map(type, value)) == Counter(map(type, other))
    if isinstance(value, float):
        return math.isnan(value) == math.isnan(other) and (value != value or repr(value) == repr(other))
    return bool(value == other and repr(value) == repr(other))


ZONES = st.sampled_from([None, UTC, timezone(timedelta(hours=5, minutes=45)), timezone(timedelta(1) / 2, "x")])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), st.dates(),
    st.timedeltas(), st.datetimes(timezones=ZONES), st.times(), st.decimals(allow_nan=False),
    st.fractions(), st.uuids(),
    st.ip_addresses(), st.complex_numbers(allow_nan=False),
)  # fmt: skip
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
VALUES = st.recursive(
    HASHABLE | st.floats(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.sets(HASHABLE, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(), st.text()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


class Late:
    """A codec that is made when it is used, because `make next` imports this file without msgspec."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(make_codec(self._name), name)


SEALED = make_codec()
PACKED: Any = Late("msgpack")
JSON: Any = Late("json")


@given(VALUES)
def test_sealed_gives_back_what_it_was_given(value: Any) -> None:
    """Broken if the default codec changed any value, or any type inside it."""
    assert same(through(SEALED, value), value)


@given(PLAIN | VALUES)
def test_msgspec_gives_back_what_it_was_given_or_refuses(value: Any) -> None:
    """Broken if msgpack or json, without a return annotation, gave a list for a tuple or text for a date."""
    for codec in (PACKED, JSON):
        try:
            blob = codec.encode(KEY, Entry(value, ID))
        except CodecError:
            continue
        assert same(codec.decode(KEY, blob).value, value)


@given(PLAIN)
def test_msgpack_refuses_nothing_plain(value: Any) -> None:
    """Broken if the check for types that change refused values that don't."""
    assert same(through(PACKED, value), value)


@given(st.binary(max_size=200))
def test_any_bytes_behind_a_good_seal_are_a_value_or_a_codec_error(body: bytes) -> None:
    """Any body with a valid checksum is decoded or raises CodecError, which a cache treats as a miss."""
    head = SEALED.encode(KEY, Entry(1, ID))[: HEADER.size]
    try:
        SEALED.decode(KEY, head + checksum(head, body) + body)
    except CodecError:
        pass


def test_an_entry_keeps_all_that_is_known_about_it() -> None:
    """An encoded entry keeps its id, its durations, also infinite ones, and whether it is an exception."""
    for entry in (
        Entry(None, ID),
        Entry(0, b"\x00" * 8, 1.5, 2.5, 60.0, 59.5, inf),
        Entry(("KeyError", ("x", 1)), ID, raised=True),
    ):
        for codec in (SEALED, PACKED, make_codec("pickle", signing_key="k"), make_codec(compress=0)):
            assert codec.decode(KEY, codec.encode(KEY, entry)) == entry
    assert HEADER.unpack_from(SEALED.encode(KEY, Entry(1, ID, fresh=3.0)))[8] == 3.0


def test_what_is_shared_or_holds_itself_stays_so() -> None:
    """A list that is used twice, or that contains itself, comes back with the same structure."""
    day = date(2026, 1, 1)
    shared = [day]
    again = through(SEALED, [shared, shared, {"k": shared}])
    assert again[0] is again[1] is again[2]["k"] and again[0] == [day]
    ring: list[Any] = [day]
    ring.append((ring, day))
    again = through(SEALED, ring)
    assert again[1][0] is again and again[0] is again[1][1]


CODECS: dict[str, Codec] = {
    "sealed": SEALED,
    "sealed, a date": make_codec(),
    "compressed": make_codec(compress=0),
    "signed": make_codec(signing_key="k1"),
    "signed, compressed": make_codec(signing_key="k1", compress=0),
    "msgpack": PACKED,
    "json": JSON,
    "pickle": make_codec("pickle", signing_key="k1"),
}


@pytest.mark.parametrize("name", CODECS)
def test_every_cut_and_every_flipped_bit_is_noticed(name: str) -> None:
    """An entry with a flipped bit or a wrong length is refused, wherever the damage is."""
    codec = CODECS[name]
    value = date(2026, 1, 1) if "date" in name else {"a": ["text" * 3, 1, None]}
    blob = codec.encode(KEY, Entry(value, ID, 1.0, 1.0, 60.0, 60.0, 60.0))
    for length in range(len(blob)):
        with pytest.raises(CodecError):
            codec.decode(KEY, blob[:length])
    with pytest.raises(CodecError):
        codec.decode(KEY, blob + b"\x00")
    for bit in range(len(blob) * 8):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CodecError):
            codec.decode(KEY, bytes(damaged))


@pytest.mark.parametrize("name", CODECS)
def test_an_entry_of_another_key_or_codec_is_refused(name: str) -> None:
    """An entry of another key is refused. Otherwise a mixed-up reply could give one customer another's report."""
    blob = CODECS[name].encode(KEY, Entry(1, ID))
    for other in ("shop.report:(2,)", KEY + " ", KEY[:-1], ""):
        with pytest.raises(CodecError):
            CODECS[name].decode(other, blob)
    for codec in (make_codec(signing_key="k2"), make_codec("msgpack", signing_key="k1"), make_codec(returns=int)):
        with pytest.raises(CodecError):
            codec.decode(KEY, blob)


def test_signing_keys_rotate() -> None:
    """Entries remain readable while processes move to a new signing key. The old key can't read new entries."""
    old, new = make_codec(signing_key="old"), make_codec(signing_key=["new", b"old"])
    assert new.decode(KEY, old.encode(KEY, Entry(1, ID))).value == 1
    with pytest.raises(CodecError, match="seal"):
        old.decode(KEY, new.encode(KEY, Entry(1, ID)))
    with pytest.raises(CodecError, match="not signed"):
        new.decode(KEY, SEALED.encode(KEY, Entry(1, ID)))
    with pytest.raises(CodecError, match="no signing_key"):
        SEALED.decode(KEY, old.encode(KEY, Entry(1, ID)))


def test_compression_shrinks_and_its_bombs_are_refused() -> None:
    """compress= shrinks large values only, and an entry that inflates beyond max_bytes is refused."""
    text = "all the same " * 10_000
    blob = make_codec(compress=1000).encode(KEY, Entry(text, ID))
    assert len(blob) < 2000
    assert through(make_codec(compress=1000), "short") == "short"
    small = make_codec(compress=1000).encode(KEY, Entry("short", ID))
    assert small == SEALED.encode(KEY, Entry("short", ID))
    with pytest.raises(CodecError, match="inflates"):
        make_codec(max_bytes=10_000).decode(KEY, blob)
    head, packed = blob[: HEADER.size], blob[HEADER.size + 4 :]
    for body in (packed[:-1], packed + b"x", packed[:20]):
        with pytest.raises(CodecError, match="cut short, or followed by other bytes"):
            SEALED.decode(KEY, head + checksum(head, body) + body)


def test_max_bytes_holds_both_ways() -> None:
    """A value larger than max_bytes is neither stored nor read."""
    small = make_codec(max_bytes=100)
    assert through(small, "x" * 50) == "x" * 50
    with pytest.raises(TooLarge, match="max_bytes"):
        small.encode(KEY, Entry("x" * 101, ID))
    with pytest.raises(CodecError, match="max_bytes"):
        small.decode(KEY, SEALED.encode(KEY, Entry("x" * 101, ID)))


class Text(str):
    pass


class Foreign:
    pass


def _generator() -> Any:
    yield 1


async def _coroutine() -> None: ...


@pytest.mark.parametrize(
    "value, words",
    [
        (Foreign(), ["test_codec.Foreign", "plain values", "signing_key"]),
        ([{"deep": (Foreign(),)}], ["test_codec.Foreign"]),
        (Text("x"), ["test_codec.Text"]),
        (_generator(), ["generator", "list"]),
        (iter([1]), ["list_iterator", "list"]),
        (map(str, [1]), ["map", "list"]),
        (len, ["builtin_function_or_method"]),
        (same, ["function"]),
        (Foreign, ["type"]),
        (math, ["module"]),
        (ValueError("x"), ["ValueError"]),
        (defaultdict(lambda: 1), ["defaultdict", "dict(value)"]),
        (memoryview(b"x"), ["memoryview"]),
        (..., ["ellipsis"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_foreign_value_is_refused_by_name_and_remedy(value: Any, words: list[str]) -> None:
    """A value that can't be stored is refused. The message names its type and a remedy."""
    with pytest.raises(CodecError) as caught:
        SEALED.encode(KEY, Entry(value, ID))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_coroutine_is_refused() -> None:
    """A coroutine is refused, because it can be awaited only once."""
    coroutine = _coroutine()
    with pytest.raises(CodecError, match="coroutine"):
        SEALED.encode(KEY, Entry(coroutine, ID))
    coroutine.close()


def test_a_value_nested_too_deeply_is_an_error_of_ours() -> None:
    """A value that is nested too deeply raises CodecError, and not RecursionError."""
    deep: list[Any] = []
    for _ in range(200_000):
        deep = [deep]
    with pytest.raises(CodecError, match="deep"):
        SEALED.encode(KEY, Entry(deep, ID))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"name": "seeled"}, ["codec", "'sealed'"]),
        ({"name": "pickle"}, ["pickle", "signing_key", "sealed"]),
        ({"trust": [int]}, ["trust", "int", "yours"]),
        ({"trust": ["os.system"]}, ["trust", "os.system"]),
        ({"name": "msgpack", "trust": [Foreign]}, ["trust", "sealed"]),
        ({"name": "msgpack", "returns": int | date | datetime | str}, ["msgpack", "sealed"]),
    ],
    ids=str,
)
def test_a_wrong_option_is_named_with_its_remedy(options: dict[str, Any], words: list[str]) -> None:
    """A wrong option is refused when the codec is made. The message names the option and a remedy."""
    with pytest.raises(OptionError) as caught:
        make_codec(**options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", ["msgpack", "json"])
def test_a_missing_extra_prints_its_pip_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken if a machine without msgspec got a bare ImportError instead of what to install."""
    monkeypatch.setitem(sys.modules, f"msgspec.{name}", None)
    with pytest.raises(MissingExtra, match=r"pip install 'stampede-guard\[msgpack\]'"):
        make_codec(name)


def test_raised_exceptions_travel_with_every_codec() -> None:
    """Broken if an exception declared in `raises` came back with other arguments, or was read as a value."""
    answer = ("LookupError", ("no such customer", 7))
    for name, returns in (("sealed", int), ("msgpack", int), ("json", int), ("msgpack", None)):
        assert through(make_codec(name, returns=returns), answer, raised=True) == answer
    with pytest.raises(CodecError):
        PACKED.encode(KEY, Entry(("LookupError", ((1, 2),)), ID, raised=True))


@settings(max_examples=30)
@given(st.lists(st.one_of(st.dates(), st.times(), st.decimals(allow_nan=False), st.uuids(), st.timedeltas())))
def test_standard_types_are_not_pickles_of_themselves(values: list[date | time | Decimal | UUID | timedelta]) -> None:
    """Standard types are encoded without Python's own names for them, which differ between Python versions."""
    blob = SEALED.encode(KEY, Entry([*values, Fraction(1, 3)], ID))
    for word in (b"datetime\n", b"_decimal", b"fractions", b"stampede", b"builtins"):
        assert word not in blob
