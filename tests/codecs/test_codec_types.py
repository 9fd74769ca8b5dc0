"""Classes of an application: those in an annotation can be stored, and a deploy that changes one causes a miss."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from datetime import datetime
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar, Union

import attrs
import pydantic
import pytest

from stampede.codecs import Codec, make_codec, returns_of
from stampede.codecs.annotations import fingerprint_of
from stampede.errors import CodecError
from stampede.model.entry import Entry

KEY, ID = "k", b"12345678"
T = TypeVar("T")


class Size(IntEnum):
    S = 1
    L = 2


class Kind(StrEnum):
    A = "a"


class Mark(Enum):
    X = object()


class Pair(NamedTuple):
    left: int
    right: Kind


@dataclass(frozen=True)
class Frozen:
    at: datetime | None = None
    key: str = "k"


@dataclass(slots=True)
class Slotted:
    one: int


@dataclass
class Page(Generic[T]):
    items: list[T]
    next: Page[T] | None = None
    made: int = field(init=False, default=0)

    @cached_property
    def total(self) -> int:
        return len(self.items)


@dataclass
class Strict:
    value: int

    def __post_init__(self) -> None:
        raise AssertionError("an entry is not constructed anew")


@attrs.define
class Attrs:
    a: int
    b: list[Frozen]


@attrs.frozen(slots=False)
class FrozenAttrs:
    a: int


class Model(pydantic.BaseModel):
    a: int
    when: datetime | None = None
    inner: Frozen | None = None
    _hidden: int = pydantic.PrivateAttr(default=3)


class Open(pydantic.BaseModel, extra="allow"):
    a: int


class Shape(TypedDict):
    name: str
    frozen: Frozen


Customer = NewType("Customer", Frozen)


def through(codec: Codec, value: Any) -> Any:
    return codec.decode(KEY, codec.encode(KEY, Entry(value, ID))).value


NOW = datetime(2026, 1, 2, 3, 4, 5)
REACHED: list[tuple[Any, Any]] = [
    (list[Pair], [Pair(1, Kind.A)]),
    (Frozen | None, Frozen(NOW)),
    (Union[Frozen, Slotted], Slotted(1)),  # noqa: UP007
    (dict[str, tuple[Slotted, ...]], {"a": (Slotted(1), Slotted(2))}),
    (dict[Frozen, set[Frozen]], {Frozen(NOW): {Frozen(key="b")}}),
    (frozenset[Pair], frozenset({Pair(1, Kind.A)})),
    (Annotated[Slotted, "a note"], Slotted(3)),
    (Customer, Frozen(NOW)),
    (Page[Frozen], Page([Frozen()], Page([]))),
    (Literal[Size.S, "x"], Size.S),
    (Mark, Mark.X),
    (Shape, {"name": "a", "frozen": Frozen()}),
    (Sequence[Attrs], [Attrs(1, [Frozen()])]),
    (FrozenAttrs, FrozenAttrs(1)),
    (Mapping[str, Model], {"a": Model(a=1, when=NOW, inner=Frozen())}),
    (Open, Open(a=1, b=[2])),  # type: ignore[call-arg]
    (list[list[Slotted | int]], [[Slotted(1), 2]]),
]


@pytest.mark.parametrize("returns, value", REACHED, ids=lambda x: str(x)[:40])
def test_what_the_annotation_reaches_travels(returns: Any, value: Any) -> None:
    """Types that the return annotation names, also indirectly, need no trust=."""
    again = through(make_codec(returns=returns), value)
    assert again == value
    assert type(again) is type(value) and repr(again) == repr(value)
    with pytest.raises(CodecError, match="annotation"):
        make_codec().encode(KEY, Entry(value, ID))


def test_trust_is_an_annotation_for_those_who_have_none() -> None:
    """Broken if a type named in trust, or one of its fields, could not be stored."""
    codec = make_codec(trust=[Attrs, Size])
    assert through(codec, [Attrs(1, [Frozen()]), Size.L]) == [Attrs(1, [Frozen()]), Size.L]
    with pytest.raises(CodecError, match="another return type"):
        codec.decode(KEY, make_codec().encode(KEY, Entry(1, ID)))


def test_values_are_rebuilt_and_not_constructed() -> None:
    """Broken if reading a hit ran `__init__`, `__post_init__` or validators again."""
    strict = object.__new__(Strict)
    strict.value = 5
    assert through(make_codec(returns=Strict), strict).value == 5


def test_pydantic_models_keep_what_was_set_and_what_is_private() -> None:
    """Broken if a model came back with other fields set, without its private attributes, or without its extra ones."""
    model = Model(a=1)
    model._hidden = 9
    again = through(make_codec(returns=Model), model)
    assert (again, again.model_fields_set, again._hidden) == (model, {"a"}, 9)
    opened = Open(a=1, b=2)  # type: ignore[call-arg]
    assert through(make_codec(returns=Open), opened).model_dump() == {"a": 1, "b": 2}


def test_an_attribute_that_is_no_field_is_not_lost_in_silence() -> None:
    """An attribute that is no field is refused, and not lost. A cached property may be left out."""
    page = Page([1])
    assert page.total == 1
    again = through(make_codec(returns=Page[int]), page)
    assert again == page and "total" not in vars(again)
    page.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(CodecError, match="'extra' of its own"):
        make_codec(returns=Page[int]).encode(KEY, Entry(page, ID))


def test_a_subclass_is_foreign() -> None:
    """Broken if a subclass of what the annotation names came back as its base."""

    class Child(Frozen):
        pass

    with pytest.raises(CodecError, match="Child"):
        make_codec(returns=Frozen).encode(KEY, Entry(Child(), ID))


def test_a_deploy_that_changes_a_type_is_a_miss() -> None:
    """Broken if an old entry came back as an object without its new field, also where the type is nested."""
    old = make_dataclass("Report", [("a", int)])
    new = make_dataclass("Report", [("a", int), ("b", int, 0)])
    retyped = make_dataclass("Report", [("a", str)])
    for wrap in (lambda kind: kind, lambda kind: list[kind], lambda kind: make_dataclass("Outer", [("inner", kind)])):
        blob = make_codec(returns=wrap(old)).encode(KEY, Entry(1, ID))
        assert make_codec(returns=wrap(old)).decode(KEY, blob).value == 1
        for kind in (new, retyped):
            with pytest.raises(CodecError, match="return type"):
                make_codec(returns=wrap(kind)).decode(KEY, blob)


def test_a_fingerprint_is_the_same_everywhere() -> None:
    """Broken if processes, runs or Python versions disagreed about a type: they would never share an entry."""
    assert fingerprint_of() == 0
    assert fingerprint_of(int | None) == fingerprint_of(Union[int, None])  # noqa: UP007
    assert fingerprint_of(dict[str, list[Page[Frozen]]]) == 4662941514255661679
    program = "import test_codec_types as t; print(t.fingerprint_of(dict[str, list[t.Page[t.Frozen]]]))"
    here = Path(__file__).parent
    out = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, check=True, text=True).stdout
    assert int(out) == fingerprint_of(dict[str, list[Page[Frozen]]])


def test_the_annotation_of_what_is_wrapped_by_another_module() -> None:
    """Broken if a decorator of another module, below @cached, left the annotation's names unknown."""
    elsewhere: dict[str, Any] = {"functools": functools, "__name__": "elsewhere"}
    exec("def shout(function):\n    return functools.wraps(function)(lambda *args: function(*args))", elsewhere)

    @elsewhere["shout"]  # type: ignore[untyped-decorator]
    def wrapped() -> Frozen: ...

    assert wrapped.__globals__ is elsewhere and returns_of(wrapped) is Frozen
    wrapped.__wrapped__ = wrapped
    assert returns_of(wrapped) is None


def test_annotations_that_can_not_be_resolved_break_nothing() -> None:
    """A forward reference, or a type that only type checkers know, does not prevent decoration."""

    @dataclass
    class Local:
        a: int

    def local() -> list[Local]:
        return [Local(1)]

    def unknown() -> Nowhere:  # type: ignore[name-defined]  # noqa: F821
        ...

    def parameter(x: Nowhere) -> Frozen:  # type: ignore[name-defined]  # noqa: F821
        ...

    def bare():  # type: ignore[no-untyped-def]
        ...

    assert returns_of(local) == list[Local]
    assert through(make_codec(returns=returns_of(local)), [Local(1)]) == [Local(1)]
    assert returns_of(unknown) is None and returns_of(bare) is None and returns_of(len) is None
    assert returns_of(parameter) is Frozen
    assert through(make_codec(returns="Nowhere"), {"a": 1}) == {"a": 1}
    assert through(make_codec(returns=list["Nowhere"]), [1]) == [1]  # type: ignore[name-defined]  # noqa: F821

    @dataclass
    class Half:
        a: Nowhere  # type: ignore[name-defined]  # noqa: F821
        b: Frozen

    assert through(make_codec(returns=Half), Half(1, Frozen())) == Half(1, Frozen())


@pytest.mark.parametrize("name", ["msgpack", "json"])
def test_msgspec_decodes_to_the_annotation(name: str) -> None:
    """Broken if msgpack or json gave dicts and lists for the types that the annotation names."""
    for returns, value in [
        (list[Pair], [Pair(1, Kind.A)]),
        (dict[str, tuple[int, ...]], {"a": (1, 2)}),
        (Frozen | None, Frozen(NOW)),
        (set[int], {1, 2}),
        (list[Attrs], [Attrs(1, [Frozen()])]),
        (list[Model], [Model(a=1, when=NOW)]),
        (Page[Frozen], Page([Frozen()], Page([]))),
        (dict[int, Size], {1: Size.L}),
    ]:
        again = through(make_codec(name, returns=returns), value)
        assert again == value and type(again) is type(value)


@pytest.mark.parametrize("name", ["msgpack", "json"])
@pytest.mark.parametrize(
    "returns, value",
    [
        (None, (1, 2)),
        (None, {"a": {1}}),
        (None, Frozen()),
        (None, [NOW]),
        (Any, {"a": (1,)}),
        (dict, {"a": (1,)}),
        (list[Any], [b"x", (1,)]),
        (Sequence[int], (1, 2)),
        (list[int], None),
        (list[int], ["x"]),
        (Frozen, Slotted(1)),
        (Fraction, Fraction(1, 2)),
        (object, 2**80),
    ],
    ids=str,
)
def test_msgspec_refuses_what_would_come_back_as_another_type(name: str, returns: Any, value: Any) -> None:
    """Broken if a round trip changed a type in silence, or a wrong annotation made every call a miss."""
    with pytest.raises(CodecError):
        make_codec(name, returns=returns).encode(KEY, Entry(value, ID))


def test_json_refuses_what_msgpack_holds() -> None:
    """Broken if integer keys came back as text, or NaN as null."""
    assert through(make_codec("msgpack"), {1: 2}) == {1: 2}
    for value in ({1: 2}, [float("nan")]):
        with pytest.raises(CodecError):
            make_codec("json").encode(KEY, Entry(value, ID))


class Whole:
    def __init__(self) -> None:
        self.a = 1


def test_pickle_holds_anything_that_is_signed() -> None:
    """The pickle codec stores any object that pickle accepts, and refuses others with a CodecError."""
    codec = make_codec("pickle", signing_key="k")
    assert through(codec, Whole()).a == 1
    with pytest.raises(CodecError, match="can't be stored"):
        codec.encode(KEY, Entry(lambda: 1, ID))
