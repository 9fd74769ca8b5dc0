"""Promise 10 by search: hypothesis looks for two values with the same key, and for one value with two keys."""

from __future__ import annotations

import datetime as dt
import math
import struct
from decimal import Decimal
from random import Random
from typing import Any

import keys_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from keys_corpus import Colour, Keyed, Number, Order, Text, Word

from stampede.keys import canonical, key_maker

# Strings of the characters that structure a key: with them a value might imitate another one.
FORGERIES = st.text(alphabet="'\\\",:=()[]{}<>*#1a \n\x00é\ud800", max_size=6)
LEAVES = st.one_of(
    *[st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.complex_numbers()],
    *[FORGERIES, st.text(max_size=4), st.binary(max_size=3), FORGERIES.map(Text)],
    *[st.decimals().filter(lambda d: not d.is_snan()), st.fractions(), st.uuids(), st.timedeltas(), st.dates()],
    st.datetimes(timezones=st.sampled_from([None, dt.UTC, keys_corpus.BERLIN, keys_corpus.PARIS])),
    st.times(),
    st.sampled_from([*Colour, *Number, *Word]),
)
# A few leaves that are easily confused, so that two drawn values are often equal or nearly equal.
CONFUSABLE = st.sampled_from(
    [0, 1, True, 1.0, -0.0, 0.0, "1", "", "1,1", b"1", None, Decimal(1), Decimal("1.0"), Number.ONE]
)


def hashable(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=4
    )


def anything(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = hashable(leaves)
    return st.recursive(
        keys,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.sets(keys, max_size=3),
            st.builds(Order, inner, inner),
            st.builds(Keyed, inner),
        ),
        max_leaves=6,
    )


HASHABLE, VALUES, NEAR = hashable(LEAVES), anything(LEAVES), anything(CONFUSABLE)


def identity(value: Any) -> Any:
    """Return what distinguishes a value, to compare with `==`: a slow rule that is independent of `canonical`."""
    cls = type(value)
    if cls is float:
        return cls, "nan" if math.isnan(value) else struct.pack("d", value)
    if cls is complex:
        return cls, identity(value.real), identity(value.imag)
    if cls is Decimal:
        return cls, value.as_tuple()
    if cls in (dt.datetime, dt.time):
        return cls, value.replace(tzinfo=None, fold=0), value.fold, id(value.tzinfo)
    if cls in (tuple, list):
        return cls, tuple(identity(item) for item in value)
    if cls in (set, frozenset):
        return cls, _bag(identity(item) for item in value)
    if cls is dict:
        return cls, _bag((identity(key), identity(item)) for key, item in value.items())
    if cls is Order:
        return cls, identity(value.number), identity(value.lines)
    if cls is Keyed:
        return cls, identity(value.key)
    return cls, value


def _bag(items: Any) -> Any:
    """Return the items in a fixed order. `repr` only sorts them."""
    return tuple(sorted(items, key=repr))


def twist(value: Any, random: Random) -> Any:
    """Return a slightly different value: of another type, sign, structure or content, at the top or further inside."""
    cls = type(value)
    if cls in (list, tuple, dict) and value and random.random() < 0.6:
        keys = list(value) if cls is dict else range(len(value))
        where = random.choice(keys)
        inside = [(key, twist(value[key], random) if key is where else value[key]) for key in keys]
        return dict(inside) if cls is dict else cls(each for _, each in inside)
    if cls is Order:
        return Order(value.number, twist(value.lines, random))
    if cls is Keyed:
        return Keyed(twist(value.key, random)) if random.random() < 0.8 else value.key
    return random.choice([lambda it: (it,), *_TWISTS.get(cls, [str])])(value)


_TWISTS: dict[type, list[Any]] = {
    bool: [int, str, float],
    int: [bool, str, Decimal, lambda it: -it, lambda it: float(it) if abs(it) < 2**53 else it],
    float: [lambda it: -it, str, lambda it: complex(it, 0.0)],
    complex: [lambda it: complex(it.real, -it.imag), lambda it: it.real],
    str: [lambda it: it.encode("latin1", "replace"), lambda it: it + "'", lambda it: it.replace("\\", ""), Text],
    Text: [lambda it: str.__str__(it)],
    bytes: [lambda it: it.decode("latin1"), bytearray],
    Decimal: [lambda it: it.normalize() if it.is_finite() else it, lambda it: it.copy_negate(), str],
    dt.datetime: [lambda it: it.replace(fold=1 - it.fold), lambda it: it.replace(tzinfo=None), dt.datetime.date],
    dt.time: [lambda it: it.replace(fold=1 - it.fold)],
    dt.timedelta: [lambda it: -it if abs(it.days) < 10**8 else it],
    list: [tuple, lambda it: it[:-1]],
    tuple: [list, lambda it: it[:-1], lambda it: it[0] if it else None],
    set: [frozenset, list],
    frozenset: [set, list],
    dict: [lambda it: list(it.items()), lambda it: set(it)],
}


@settings(max_examples=120, deadline=None)
@given(NEAR | VALUES, st.integers(0, 2**32))
def test_one_text_means_one_value(a: Any, seed: int) -> None:
    """Broken: two different values share a key, or one value has two."""
    random = Random(seed)
    for b in (twist(a, random) for _ in range(3)):
        assert (canonical(a) == canonical(b)) == (identity(a) == identity(b))
        assert (canonical([a, b]) == canonical([b, a])) == (identity(a) == identity(b))


@settings(max_examples=120, deadline=None)
@given(st.lists(FORGERIES, max_size=4), st.lists(FORGERIES, max_size=4), st.booleans())
def test_no_text_forges_structure(a: list[str], b: list[str], as_dict: bool) -> None:
    """Broken: a crafted string in one argument ends its quotes and looks like several arguments."""
    key = key_maker(lambda *args, **kwargs: None, prefix="p:")
    one, other = (key(**dict.fromkeys(a, 1)), key(**dict.fromkeys(b, 1))) if as_dict else (key(*a), key(*b))
    assert (one == other) == ((set(a) == set(b)) if as_dict else (a == b))


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(HASHABLE, VALUES, max_size=6), st.randoms(use_true_random=False))
def test_order_is_irrelevant(value: dict[Any, Any], random: Any) -> None:
    """Broken: equal dicts or sets that were filled in another order have different keys."""
    items = list(value.items())
    random.shuffle(items)
    assert canonical(dict(items)) == canonical(value)
    assert canonical({key for key, _ in items}) == canonical(set(value))


@settings(max_examples=120, deadline=None)
@given(VALUES)
def test_generated_code_writes_what_canonical_writes(value: Any) -> None:
    """Broken: generated code and `canonical` write different texts for a value, so one call has two keys."""
    key = key_maker(lambda a, *, b=None: None, prefix="")(value, b=value)
    text = canonical(value)
    assert key == f"({text},b={text})" or (key.startswith("#") and 2 * len(text) > 190)


@settings(max_examples=120, deadline=None)
@given(VALUES)
def test_every_text_can_be_sent(value: Any) -> None:
    """Broken: a key contains a control character or half a surrogate pair, and an engine's client fails."""
    text = canonical(value)
    text.encode()
    assert not {character for character in text if ord(character) < 32 or 127 <= ord(character) < 160}
