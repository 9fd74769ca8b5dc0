"""Each refusal advises what works for that value: these tests follow the advice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from math import nan
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
from django.utils.safestring import SafeString
from markupsafe import Markup

from stampede import CodecError
from stampede.codecs import make_codec
from stampede.codecs.equality import alike
from stampede.model.entry import Entry

KEY, ID = "k", b"12345678"


@dataclass
class Price:
    amount: int
    tags: list[Any] = field(default_factory=list)


class Struct(msgspec.Struct):
    a: int


class Plain:
    def __init__(self) -> None:
        self.a = 1

    def __eq__(self, other: object) -> bool:
        return type(other) is Plain and vars(self) == vars(other)

    __hash__ = object.__hash__


class Text(str):
    def __init__(self, text: str) -> None:
        self.more = 1


class Session:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Quiet(str):
    def __new__(cls, text: str) -> Quiet:
        made.append(text)
        return super().__new__(cls, text)


made: list[str] = []


class Noted(str):
    def __str__(self) -> str:
        return self


def noted() -> Noted:
    text = Noted("a")
    text.note = "b"  # type: ignore[attr-defined]
    return text


class Odd(float):
    pass


def extra() -> Price:
    price = Price(1)
    price.more = 2  # type: ignore[attr-defined]
    return price


BERLIN = datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))
Make = Callable[[], Any]
Options = dict[str, Any]

# The value and the options of the codec; what the message names; and the ways that it advises, which must work.
REFUSED: dict[str, tuple[Make, Options, list[str], list[tuple[Make, Options]]]] = {
    "a model": (
        lambda: Price(1), {}, ["trust=[Price], or in the return annotation of the @cached function"],
        [(lambda: Price(1), {"returns": Price}), (lambda: Price(1), {"trust": [Price]})],
    ),
    "a model, annotated as another": (
        lambda: Price(1), {"returns": object}, ["trust=[Price]"], [(lambda: Price(1), {"trust": [Price]})],
    ),
    "a class that is annotated": (
        Plain, {"returns": Plain}, ["plain values", "signing_key"], [(Plain, {"name": "pickle", "signing_key": b"k"})],
    ),
    "a struct": (lambda: Struct(1), {}, ["msgpack"], [(lambda: Struct(1), {"name": "msgpack", "returns": Struct})]),
    "a text of one's own": (
        lambda: Quiet("a"), {}, ["trust=[Quiet]", "return annotation"],
        [(lambda: Quiet("a"), {"trust": [Quiet]}), (lambda: [Quiet("a")], {"returns": list[Quiet]})],
    ),
    "a text of one's own, by msgpack": (
        lambda: Quiet("a"), {"name": "msgpack", "returns": Quiet}, ["use codec='sealed'", "trust=[Quiet]"],
        [(lambda: Quiet("a"), {"trust": [Quiet]}), (lambda: Quiet("a"), {"returns": Quiet})],
    ),
    "a text with an attribute": (
        lambda: Text("a"), {}, ["'more' of its own", "return str.__str__(it)"],
        [(lambda: str.__str__(Text("a")), {}), (lambda: str(Text("a")), {})],
    ),
    "a text with an attribute, whose str() is itself": (
        noted, {"returns": Noted}, ["'note' of its own", "return str.__str__(it)"],
        [(lambda: str.__str__(noted()), {"returns": Noted})],
    ),
    "safe HTML, by msgpack": (
        lambda: SafeString("<b>"), {"name": "msgpack"}, ["use codec='sealed'"], [(lambda: SafeString("<b>"), {})],
    ),
    "a number of one's own": (lambda: Odd(1), {}, ["return float(it)"], [(lambda: float(Odd(1)), {})]),
    "what nobody can make again": (Session, {}, ["plain values"], []),
    "a generator": (lambda: (n for n in [1]), {}, ["list"], [(lambda: [1], {})]),
    "code": (lambda: len, {}, ["plain values"], []),
    "a tuple, by msgpack": (
        lambda: {"a": [(1, 2)]}, {"name": "msgpack"}, ["its ['a'][0], of type tuple", "tuple[...]", "sealed"],
        [(lambda: {"a": [(1, 2)]}, {"name": "msgpack", "returns": dict[str, list[tuple[int, int]]]}),
         (lambda: {"a": [(1, 2)]}, {})],
    ),
    "a number for a key, by JSON": (
        lambda: {1: 2}, {"name": "json"}, ["key", "annotation"],
        [(lambda: {1: 2}, {"name": "json", "returns": dict[int, int]}), (lambda: {1: 2}, {})],
    ),
    "a model, by JSON": (
        lambda: [Price(1)], {"name": "json"}, ["Price", "annotation", "trust=[Price]"],
        [(lambda: [Price(1)], {"name": "json", "returns": list[Price]}), (lambda: [Price(1)], {"trust": [Price]})],
    ),
    "nan, by JSON": (lambda: [nan], {"name": "json", "returns": list[float]}, ["msgpack"],
        [(lambda: [nan], {"name": "msgpack"}), (lambda: [nan], {})],
    ),
    "a named zone, by msgpack": (
        lambda: BERLIN, {"name": "msgpack", "returns": datetime}, ["codec='sealed'"], [(lambda: BERLIN, {})],
    ),
    "an attribute that is no field, by msgpack": (
        extra, {"name": "msgpack", "returns": Price}, ["'more'", "declare it as a field"], [],
    ),
    "another type than is annotated": (
        lambda: "x", {"name": "msgpack", "returns": int}, ["not what the function's return annotation says"],
        [(lambda: "x", {"name": "msgpack", "returns": str}), (lambda: "x", {"returns": int})],
    ),
    "nothing, where something is annotated": (
        lambda: None, {"name": "json", "returns": int}, ["not what the function's return annotation says"],
        [(lambda: None, {"name": "json", "returns": int | None})],
    ),
    "a view": (lambda: memoryview(b"x"), {}, ["return bytes(it)"], [(lambda: bytes(memoryview(b"x")), {})]),
    "an object": (object, {"name": "msgpack"}, ["plain values"], []),
    "a large number": (
        lambda: 1 << 70, {"name": "msgpack"}, ["use codec='sealed'"], [(lambda: 1 << 70, {})],
    ),
    "a range, by msgpack": (lambda: range(3), {"name": "msgpack"}, ["codec='sealed'"], [(lambda: range(3), {})]),
    "an ordered dict": (
        lambda: OrderedDict(a=1), {"name": "msgpack"}, ["OrderedDict", "sealed"], [(lambda: OrderedDict(a=1), {})],
    ),
    "an array, by msgpack": (
        lambda: {"a": np.arange(2)}, {"name": "msgpack", "returns": dict[str, np.ndarray]}, ["codec='sealed'"],
        [(lambda: {"a": np.arange(2)}, {})],
    ),
    "a number of numpy's, by msgpack": (
        lambda: np.float64(1), {"name": "msgpack"}, [".item()", "numpy.float64"],
        [(lambda: np.float64(1).item(), {"name": "msgpack"}),
         (lambda: np.float64(1), {"name": "msgpack", "returns": np.float64})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_names_what_works(what: str) -> None:
    """A value that is stored as the refusal advises is not refused again."""
    make, options, names, ways = REFUSED[what]
    with pytest.raises(CodecError) as refused:
        make_codec(**options).encode(KEY, Entry(make(), ID))
    for name in names:
        assert name in str(refused.value), str(refused.value)
    for works, with_options in ways:
        codec, value = make_codec(**with_options), works()
        assert alike(value, codec.decode(KEY, codec.encode(KEY, Entry(value, ID))).value)


def test_nobody_is_sent_to_where_it_is_refused_again() -> None:
    """If a refusal advises only another codec, that codec stores the value."""
    for make, options, _, _ in REFUSED.values():
        with pytest.raises(CodecError) as refused:
            make_codec(**options).encode(KEY, Entry(make(), ID))
        told = str(refused.value)
        if "use codec='sealed'" in told and "trust=" not in told:
            make_codec().encode(KEY, Entry(make(), ID))
        if "use codec='msgpack'" in told and "annotation" not in told:
            make_codec("msgpack").encode(KEY, Entry(make(), ID))


@pytest.mark.parametrize("name", ["msgpack", "json"])
@pytest.mark.parametrize("text", [SafeString("<b>"), Markup("<b>")], ids=["django", "markupsafe"])
def test_the_advice_for_safe_html_is_no_longer_than_it_must_be(text: str, name: str) -> None:
    """The advice for safe HTML names only codec='sealed', because safe HTML needs no trust=."""
    with pytest.raises(CodecError, match=r"use codec='sealed', which can store it$"):
        make_codec(name).encode(KEY, Entry(text, ID))


@pytest.mark.parametrize("text", [SafeString("<b>"), Markup("<b>")], ids=["django", "markupsafe"])
def test_safe_html_is_a_value(text: str) -> None:
    """Safe HTML comes back with its type. A template would escape a plain str again."""
    codec = make_codec(returns=str)
    value = [text, {text: text}, text + text]
    read = codec.decode("k", codec.encode("k", Entry(value, b"12345678"))).value
    assert read == value
    assert {type(each) for each in (read[0], *read[1], *read[1].values(), read[2])} == {type(text)}
