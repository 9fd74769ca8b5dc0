"""Promise 10: keys are exact, readable, and the same in every process, every run and every Python version."""

from __future__ import annotations

import enum
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal, localcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs
import keys_corpus
import msgspec
import pydantic
import pytest
from keys_corpus import DIFFERENT, Colour, Frozen, Keyed, Order, Point

from stampede.errors import KeyingError
from stampede.keys import canonical, key_maker, name_of
from stampede.keys.names import module_of

# -- exactness ------------------------------------------------------------------------------------------------


def test_no_two_values_share_a_text() -> None:
    """Broken: a caller gets the value that was computed for another argument."""
    texts: dict[str, object] = {}
    for value in DIFFERENT:
        text = canonical(value)
        assert text not in texts, f"{value!r} and {texts[text]!r} share {text}"
        texts[text] = value


@pytest.mark.parametrize(
    "wrap", [lambda v: (v,), lambda v: [v], lambda v: {"k": v}, lambda v: Order(v), lambda v: Keyed(v)]
)
def test_no_two_values_share_a_text_inside_containers(wrap: Any) -> None:
    """Broken: values are told apart only outside of containers, as with lru_cache(typed=True)."""
    assert len({canonical(wrap(value)) for value in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize(
    "value, text",
    [
        (42, "42"),
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        ("Zürich, 8001", "'Zürich, 8001'"),
        ("it's", r"'it\'s'"),
        ("a\nb\ud800", r"'a\u000ab\ud800'"),
        (b"\x00", r"b'\x00'"),
        ((1, "a"), "(1,'a')"),
        ([1, (2,)], "[1,(2,)]"),
        ({"b": 1, "a": {2}}, "{'a':{2},'b':1}"),
        (frozenset("ba"), "frozenset('a','b')"),
        (OrderedDict(b=1, a=2), "OrderedDict('b':1,'a':2)"),
        (Decimal("1.00"), "Decimal(1.00)"),
        (datetime(2026, 1, 2, 3), "datetime(2026-01-02T03:00:00)"),
        (
            datetime(2026, 1, 2, fold=1, tzinfo=keys_corpus.BERLIN),
            "datetime(2026-01-02T00:00:00,ZoneInfo('Europe/Berlin'),fold=1)",
        ),
        (Colour.RED, "keys_corpus:Colour.RED"),
        (Point(1, 2), "keys_corpus:Point((1,2))"),
        (Order(1), "keys_corpus:Order(number=1,lines=())"),
        (Keyed("k"), "keys_corpus:Keyed('k')"),
        (Order, "<keys_corpus:Order>"),
    ],
)
def test_texts_are_readable_and_never_change(value: object, text: str) -> None:
    """Broken: an upgrade of the library empties every cache, or keys in redis-cli are unreadable."""
    assert canonical(value) == text


def test_equal_instants_in_two_zones_differ() -> None:
    """Broken: a report for a day in Berlin is served for the day in UTC."""
    here = datetime(2026, 7, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    assert here == here.astimezone(UTC)
    assert canonical(here) != canonical(here.astimezone(UTC))


def test_a_decimal_does_not_depend_on_the_context() -> None:
    """Broken: one thread's decimal context changes its keys."""
    with localcontext() as context:
        context.capitals = 0
        lower = canonical(Decimal("1E+3"))
    assert lower == canonical(Decimal("1E+3"))


def test_order_of_sets_and_dicts_is_irrelevant() -> None:
    """Broken: equal filters from two requests are computed twice."""
    assert canonical({"a": 1, "b": {3, 1, 2}}) == canonical({"b": {2, 3, 1}, "a": 1})


class Liar(str):
    def __str__(self) -> str:
        return "x"

    __repr__ = __str__


class Empty(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        return ()


def test_subclasses_cannot_disguise_their_content() -> None:
    """Broken: a subclass can override its methods to get the key of another value."""
    assert canonical(Liar("a")).endswith("Liar('a')")
    assert canonical(Empty(a=1)).endswith("Empty({'a':1})")


def test_attributes_beside_the_content_count() -> None:
    """Broken: two strings with different tags share a key, or two subclass instances with different attributes do."""
    assert canonical(keys_corpus.tagged("a", "x")).endswith("Tagged('a',tag='x')")
    assert canonical(keys_corpus.Grown(1, "bob")).endswith("Grown(number=1,lines=(),tenant='bob')")


class Lazy(Frozen):
    @cached_property
    def total(self) -> int:
        return 7


def test_what_was_cached_on_an_instance_does_not_count() -> None:
    """Broken: the key of a value changes when a cached property of it is first read."""
    lazy = Lazy(1)
    before = canonical(lazy)
    assert lazy.total == 7
    assert canonical(lazy) == before


# -- models ---------------------------------------------------------------------------------------------------


@attrs.define
class AttrsOrder:
    number: int
    _secret: int = 0


class PydanticOrder(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    number: int
    lines: list[int] = []


class MsgspecOrder(msgspec.Struct):
    number: int


@dataclass
class Half:
    there: int
    missing: int = field(init=False)


@pytest.mark.parametrize(
    "value, text",
    [
        (AttrsOrder(1), "test_keys:AttrsOrder(number=1,_secret=0)"),
        (PydanticOrder(number=1, lines=[2]), "test_keys:PydanticOrder(number=1,lines=[2])"),
        (
            PydanticOrder.model_validate({"number": 1, "z": 1, "b c": 2}),
            "test_keys:PydanticOrder(number=1,lines=[],'b c'=2,z=1)",
        ),
        (MsgspecOrder(1), "test_keys:MsgspecOrder(number=1)"),
        (Half(1), "test_keys:Half(there=1)"),
    ],
)
def test_models_are_keyed_by_their_fields(value: object, text: str) -> None:
    """Broken: an attrs, pydantic or msgspec argument is refused, or two different ones share a key."""
    assert canonical(value) == text


def test_no_optional_package_is_imported() -> None:
    """Broken: a program without pydantic does not start, or a program with it starts a second later."""
    code = (
        "import sys; from stampede.keys import canonical\n"
        "try: canonical(object())\n"
        "except TypeError: pass\n"
        "assert not {'attr', 'attrs', 'pydantic', 'msgspec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment(), timeout=30)


# -- what has no key ------------------------------------------------------------------------------------------


class Plain:
    pass


@pytest.mark.parametrize(
    "value, named",
    [
        (object(), "builtins:object"),
        (Plain(), "test_keys:Plain"),
        (lambda: 1, "builtins:function"),
        (len, "builtins:builtin_function_or_method"),
        (iter([1]), "builtins:list_iterator"),
        ((n for n in [1]), "builtins:generator"),
        (sys, "builtins:module"),
        (sys.stdin, None),
        (memoryview(b""), "builtins:memoryview"),
        (keys_corpus.zone(None), "ZoneInfo"),
        (ValueError("x"), "builtins:ValueError"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [{"k": (v,)}], lambda v: Order(v)])
def test_a_value_without_identity_is_an_error_that_names_class_and_remedies(
    value: object, named: str | None, wrap: Any
) -> None:
    """Broken: a key contains an address, so its value is never found again, or is found for another object."""
    with pytest.raises(KeyingError) as caught:
        canonical(wrap(value))
    assert (named or "no stable identity") in str(caught.value)
    for remedy in ("__stampede_key__", "ignore=", "key="):
        assert remedy in str(caught.value)


def _cyclic_list() -> Any:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


def _cyclic_dict() -> Any:
    cycle: dict[str, Any] = {}
    cycle["self"] = [cycle]
    return cycle


def _cyclic_order() -> Any:
    order = Order(1)
    order.lines = (order,)
    return order


def _cyclic_keyed() -> Any:
    keyed = Keyed(None)
    keyed.key = keyed
    return keyed


def _deep() -> Any:
    value: Any = ()
    for _ in range(100_000):
        value = (value,)
    return value


@pytest.mark.parametrize("make", [_cyclic_list, _cyclic_dict, _cyclic_order, _cyclic_keyed, _deep])
def test_cycles_and_absurd_depth_are_keying_errors(make: Any) -> None:
    """Broken: a request with deeply nested JSON ends in RecursionError, or crashes the interpreter."""
    with pytest.raises(KeyingError, match="nested too deeply"):
        canonical(make())


def test_a_stack_that_is_nearly_full_is_a_keying_error() -> None:
    """Broken: in a deep call stack the same value raises another class of error."""

    def descend(value: Any) -> str:
        try:
            return descend(value)
        except RecursionError:
            return canonical(value)

    nested: Any = 1
    for _ in range(40):
        nested = Keyed([nested])
    assert canonical(nested)
    with pytest.raises(KeyingError):
        descend(nested)


# -- the same everywhere --------------------------------------------------------------------------------------

CORPUS = Path(keys_corpus.__file__)


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(CORPUS.parents[2]), "PYTHONDONTWRITEBYTECODE": "1", **more}


def _texts(python: str, **more: str) -> list[str]:
    done = subprocess.run([python, str(CORPUS)], check=True, capture_output=True, env=_environment(**more), timeout=60)
    texts: list[str] = json.loads(done.stdout)
    return texts


def _pythons() -> Iterator[str]:
    """Yield interpreters of the other supported versions that this machine has."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in (11, 12, 13):
        if minor == sys.version_info.minor:
            continue
        candidates = [*map(str, sorted(versions.glob(f"3.{minor}.*/bin/python"))), shutil.which(f"python3.{minor}")]
        working = [c for c in candidates if c and subprocess.run([c, "-c", ""], capture_output=True).returncode == 0]
        yield from working[:1]


@pytest.mark.parametrize("seed", ["0", "1"])
def test_texts_are_the_same_in_another_process(seed: str) -> None:
    """Broken: two processes never share a value. The classes of a script are named after its file, not `__main__`."""
    assert _texts(sys.executable, PYTHONHASHSEED=seed, PYTHONINTMAXSTRDIGITS="640") == [canonical(v) for v in DIFFERENT]


def test_texts_are_the_same_in_other_versions_of_python() -> None:
    """Broken: while a fleet moves to the next Python version, old and new processes do not share values."""
    pythons = list(_pythons())
    if not pythons:
        pytest.skip("no other Python from 3.11 to 3.13 on this machine")
    expected = [canonical(value) for value in DIFFERENT]
    for python in pythons:
        assert _texts(python) == expected, python


def test_names_hold_module_and_qualname() -> None:
    """Broken: two classes of the same name in two modules share keys."""
    assert name_of(Plain) == "test_keys:Plain"
    assert name_of(Plain.__init__) == "builtins:object.__init__"
    assert name_of(test_names_hold_module_and_qualname) == "test_keys:test_names_hold_module_and_qualname"


@pytest.mark.parametrize(
    "main, name",
    [
        ({"__spec__": None, "__file__": "/srv/app/nightly.py"}, "nightly"),
        ({"__spec__": types.SimpleNamespace(name="app.__main__"), "__file__": "/srv/app/__main__.py"}, "app.__main__"),
        ({"__spec__": None}, "__mp_main__"),
    ],
)
def test_a_script_goes_by_its_own_name(monkeypatch: pytest.MonkeyPatch, main: dict[str, Any], name: str) -> None:
    """Broken: two scripts share keys under `__main__`, or a spawned worker does not share keys with its parent."""
    module = types.ModuleType("__mp_main__")
    vars(module).update(main)
    if "__file__" not in main:
        vars(module).pop("__file__", None)
    monkeypatch.setitem(sys.modules, "__mp_main__", module)
    assert module_of(types.SimpleNamespace(__module__="__mp_main__")) == name


odd = enum.Enum("odd", {"a.b": 1, "é": 2})


def test_odd_names_of_members_are_quoted() -> None:
    """Broken: a member named "a.b" could be mistaken for a member of a nested class."""
    assert [re.sub(r".*:odd", "", canonical(member)) for member in odd] == ["['a.b']", "['é']"]


# -- false names and false classes ----------------------------------------------------------------------------


T = TypeVar("T")


class Box(pydantic.BaseModel, Generic[T]):
    it: T


one, two = namedtuple("X", "a"), namedtuple("X", "b")


def local() -> tuple[Any, ...]:
    @dataclass
    class Data:
        n: int

    class Kind(enum.Enum):
        A = 1

    class Text(str):
        pass

    class Model(pydantic.BaseModel):
        n: int = 1

    class Day(datetime):
        pass

    return Data(1), Kind.A, Text("x"), Model(), Day(2026, 1, 1), Data, [Data(1)], Box[Model](it=Model())


@pytest.mark.parametrize("value", [one(1), two(1), *local()], ids=lambda value: type(value).__qualname__)
def test_a_class_that_its_name_does_not_lead_to_is_refused(value: Any) -> None:
    """Broken: if two classes have the same name, a caller with one gets the value of the other."""
    with pytest.raises(KeyingError, match="can't be found under this name in its module"):
        canonical(value)


class Tenant(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    text: str = "x"
    _tenant: str = pydantic.PrivateAttr("")
    _late: str = pydantic.PrivateAttr()


def test_private_attributes_of_a_model_are_part_of_its_key() -> None:
    """Broken: one tenant gets the value of another. pydantic's `==` tells the two apart."""
    first, other, extra = Tenant(), Tenant(), Tenant(_tenant_="a")  # type: ignore[arg-type]
    first._tenant, other._tenant = "a", "b"
    assert first != other
    assert canonical(first) == "test_keys:Tenant(text='x',**{'_tenant':'a'})"
    assert len({*map(canonical, (first, other, extra, Tenant()))}) == 4


class Same(type):
    def __eq__(cls, other: object) -> bool:
        return True

    def __hash__(cls) -> int:
        return hash(int)


class Thing(metaclass=Same):
    """An object whose class claims to equal int."""


class Disguised:
    """An object that claims to be a class, a member or a tuple."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.kind


@pytest.mark.parametrize(
    "value",
    [Thing(), [Thing()], Disguised(type), Disguised(Colour), Disguised(tuple)],
    ids=["int", "list", "class", "member", "tuple"],
)
def test_nobody_is_what_it_says_of_itself(value: Any) -> None:
    """Broken: an object that claims another class gets an address as its key, or the key of another value."""
    with pytest.raises(KeyingError, match="no stable identity"):
        canonical(value)
    with pytest.raises(KeyingError, match=r"parameter 'x'.*no stable identity"):
        key_maker(lambda x: x, prefix="")(value)
    assert key_maker(lambda x: x, prefix="")(1) == "(1)"
