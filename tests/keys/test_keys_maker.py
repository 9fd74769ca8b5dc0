"""Promise 10 for calls: the keys that the arguments of a decorated function make."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import attrs
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keys_corpus import DIFFERENT, Colour

from stampede.errors import KeyingError, OptionError
from stampede.keys import FAST_TYPES, Parameters, key_maker

MISSING = object()


def report(customer: Any, *, year: Any = 2026) -> None: ...


def wide(a: Any, b: Any = 2, /, c: Any = 3, *rest: Any, d: Any, e: Any = None, **more: Any) -> None: ...


def make(fn: Callable[..., object], **options: Any) -> Callable[..., str]:
    return key_maker(fn, prefix="p:", **options)


# -- one key for one call -------------------------------------------------------------------------------------


def test_a_common_key_is_readable() -> None:
    """Broken: keys in redis-cli are unreadable, or an upgrade of the library empties every cache."""
    key = key_maker(report, prefix="shop:mod.report:")
    assert key(42) == "shop:mod.report:(42,year=2026)"
    assert key("a b", year=None) == "shop:mod.report:('a b',year=None)"
    assert make(lambda: None)() == "p:()"


def test_ways_to_say_the_same_call_are_one_key() -> None:
    """Broken: f(1) and f(1, b=2) are computed separately, although 2 is the default of b."""

    def f(a: Any, b: Any = 2) -> None: ...

    key = make(f)
    assert key(1) == key(1, 2) == key(1, b=2) == key(a=1) == key(b=2, a=1) == "p:(1,2)"


def test_every_kind_of_parameter_is_keyed() -> None:
    """Broken: a variadic or keyword-only argument is not in the key, or the order of keyword arguments matters."""
    key = make(wide)
    assert key(1, d=4) == "p:(1,2,3,*(),d=4,e=None,**{})"
    assert key(1, 2, 3, 4, "5", d=6, z=1, y=2) == key(1, 2, 3, 4, "5", y=2, z=1, d=6)
    assert key(1, 2, 3, 4, "5", d=6, z=1, a=2) == "p:(1,2,3,*(4,'5'),d=6,e=None,**{'a':2,'z':1})"


@pytest.mark.parametrize("fn", [report, lambda customer=None: None, lambda *customer: None])
def test_no_two_arguments_share_a_key(fn: Any) -> None:
    """Broken: the generated code makes less exact keys than `canonical`."""
    assert len({make(fn)(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_variadic_arguments_cannot_be_mistaken() -> None:
    """Broken: f(1, 2) and f((1, 2)), or f(x=1) and f({"x": 1}), share a key."""
    key = make(lambda *args, **kwargs: None)
    calls = [
        key(),
        key(1),
        key(1, 2),
        key((1, 2)),
        key(x=1),
        key({"x": 1}),
        key(**{"x=1,y": 1}),
        key(x=1, y=1),
        key("x=1"),
    ]
    assert len(set(calls)) == len(calls)


def test_a_mutable_default_is_keyed_as_it_is_at_the_call() -> None:
    """Broken: the key holds the default as it was at the decoration, and not what the function gets."""
    default = [1]

    def f(a: Any = default) -> None: ...

    key = make(f)
    assert key() == "p:([1])"
    default.append(2)
    assert key() == key([1, 2]) == "p:([1,2])"


def test_a_sentinel_stands_for_itself_as_a_default() -> None:
    """Broken: `timeout=MISSING` makes a function uncacheable, or any object() is taken for the sentinel."""

    def f(a: Any, timeout: Any = MISSING) -> None: ...

    key = make(f)
    assert key(1) == key(1, MISSING) == "p:(1,<default>)"
    assert key([1], timeout=3) == "p:([1],3)"
    assert key(10**5000) != key(10**5000, 1)
    with pytest.raises(KeyingError, match="'timeout'"):
        key(1, object())
    with pytest.raises(KeyingError, match="'a'"):
        key(MISSING)


ODD = [
    "self",
    "cls",
    "key",
    "canonical",
    "_",
    "now",
    "type",
    "str",
    "int",
    "len",
    "_t0",
    "_t0_",
    "_d1",
    "_d0_",
    "_key",
    "_key_",
]
ODD += [
    "_canonical",
    "_canonical_",
    "_prefix_",
    "_words_",
    "_make_",
    "__",
    "_type__",
    "é",
    "match",
    "print",
    "args",
    "kwargs",
]


@pytest.mark.parametrize(
    "shape", ["({0}, other=2)", "({0}=1, /, other=2)", "(other=2, *, {0}=1)", "(*{0}, other=2)", "(**{0})"]
)
def test_no_parameter_name_is_in_the_way(shape: str) -> None:
    """Broken: a parameter with the same name as a variable of the generated code makes wrong keys."""
    for name in ODD:
        _is_not_in_the_way(name, shape)


def _is_not_in_the_way(name: str, shape: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def f{shape.format(name)}: ...", namespace)
    fn = namespace["f"]
    key = make(fn)
    variadic = shape.startswith("(*")
    for value in (1, "x-y", "x", None, [1]):
        args, kwargs = ((value,), {}) if not variadic else ((), {name: value} if "**" in shape else {"other": value})
        if "other=2, *" in shape:
            args, kwargs = (), {name: value}
        assert f"{value!r}" in key(*args, **kwargs)
    with pytest.raises(KeyingError):
        key(**{name if "**" in shape else "other": object()}) if variadic else key(*(object(),))


def test_parameters_that_are_all_odd_at_once() -> None:
    """Broken: a variable is renamed because of one parameter, and then has the name of another."""
    namespace: dict[str, Any] = {}
    exec(f"def f({', '.join(f'{name}={number}' for number, name in enumerate(ODD))}): ...", namespace)
    assert make(namespace["f"])() == f"p:({','.join(str(number) for number in range(len(ODD)))})"


# -- wrong calls ----------------------------------------------------------------------------------------------


class Service:
    def method(self, a: int, /, *, b: int) -> None: ...


@pytest.mark.parametrize(
    "fn, args, kwargs",
    [
        (report, (), {}),
        (report, (1, 2), {}),
        (report, (1,), {"yaer": 1}),
        (report, (1,), {"customer": 1}),
        (wide, (1,), {}),
        (wide, (), {"a": 1, "d": 1}),
        (Service.method, (), {}),
        (Service.method, (1, 2), {"b": 1, "c": 2}),
        (Service.method, (1,), {"a": 2, "b": 1}),
    ],
)
def test_a_wrong_call_raises_what_the_function_itself_would(fn: Any, args: Any, kwargs: Any) -> None:
    """Broken: a wrong call is reported in terms of generated code, or not at all."""
    with pytest.raises(TypeError) as expected:
        fn(*args, **kwargs)
    with pytest.raises(TypeError) as caught:
        make(fn)(*args, **kwargs)
    assert str(caught.value) == str(expected.value)
    assert not isinstance(caught.value, KeyingError)


@pytest.mark.parametrize(
    "args, kwargs, name",
    [
        ((MISSING,), {"d": 1}, "a"),
        ((1, 2, 3, [{"x": MISSING}]), {"d": 1}, "rest"),
        ((1,), {"d": MISSING}, "d"),
        ((10**5000, "x"), {"d": 1, "z": MISSING}, "more"),
    ],
)
def test_a_keying_error_names_function_and_parameter(args: Any, kwargs: Any, name: str) -> None:
    """Broken: one argument of eight can't be keyed, and the error does not say which."""
    with pytest.raises(KeyingError, match=rf"^wide: parameter '{name}': builtins:object has no stable identity: "):
        make(wide)(*args, **kwargs)


def test_an_error_of_the_users_own_key_method_is_not_dressed_up() -> None:
    """Broken: an error in `__stampede_key__` is reported as another error, or not at all."""

    class Broken:
        def __stampede_key__(self) -> str:
            raise ValueError("not saved yet")

    def f(a: Any = Broken()) -> None: ...  # noqa: B008

    for key in (make(report), make(f)):
        with pytest.raises(ValueError, match="not saved yet"):
            key(Broken())


# -- ignore ---------------------------------------------------------------------------------------------------


def test_ignored_parameters_are_no_part_of_the_key() -> None:
    """Broken: a function with a database session as a parameter can't be cached."""

    def f(session: Any, customer: int, *, trace: Any = None) -> None: ...

    key = make(f, ignore={"session", "trace"})
    assert key(object(), 42, trace=object()) == key(None, customer=42) == "p:(customer=42)"
    assert make(f, ignore=["session"])(object(), 42) != key(object(), 42)
    assert make(f, ignore="session")(object(), 1) == "p:(customer=1,trace=None)"


def test_variadic_parameters_can_be_ignored_whole_or_by_name() -> None:
    """Broken: `ignore` has no effect on *args and **kwargs, or on a single name in **kwargs."""
    assert make(wide, ignore={"more", "rest"})(1, 2, 3, object(), d=4, x=object()) == "p:(1,2,3,d=4,e=None)"
    assert make(wide, ignore={"trace"})(1, d=4, trace=object(), x=1) == "p:(1,2,3,*(),d=4,e=None,**{'x':1})"


@pytest.mark.parametrize(
    "ignore, hint", [({"custmer"}, "did you mean 'customer'"), ({"zzz"}, "there are customer, year")]
)
def test_an_ignored_name_that_is_no_parameter_is_refused_at_decoration(ignore: Any, hint: str) -> None:
    """Broken: a typo in `ignore` keeps the parameter in the key, unnoticed."""
    with pytest.raises(OptionError, match=hint):
        make(report, ignore=ignore)


# -- key= -----------------------------------------------------------------------------------------------------


def test_a_key_function_gets_the_very_arguments() -> None:
    """Broken: `key=` does not get the arguments, or its results 1 and "1" make the same key."""
    assert make(report, key=lambda customer, year: f"{customer}/{year}")(7, year=8) == "p:7/8"
    assert make(report, key=lambda customer: customer)(1) == "p:(1)"
    assert make(report, key=lambda customer: customer)("1") == "p:1"
    assert make(report, key=lambda customer: (customer, 2))(1) == "p:((1,2))"
    with pytest.raises(KeyingError, match="builtins:object"):
        make(report, key=lambda customer: customer)(MISSING)


def test_a_format_string_is_filled_from_the_bound_arguments() -> None:
    """Broken: a format string can only use arguments that were passed by keyword, or no defaults."""
    key = make(report, key="user:{customer}:{year}")
    assert key(1) == key(customer=1, year=2026) == "p:user:1:2026"
    assert make(report, key="{customer.name}/{year:05d}/{customer!r:>20}")(Colour.RED).startswith("p:RED/02026/")
    assert make(report, key="{year:{customer}}")(6) == "p:  2026"
    assert make(wide, key="{rest[0]}-{more[z]}{{}}")(1, 2, 3, "r", d=1, z="k") == "p:r-k{}"
    with pytest.raises(TypeError, match=r"report\(\) missing 1 required positional argument: 'customer'"):
        key()


@pytest.mark.parametrize(
    "key, said",
    [
        ("{custmer}", "names 'custmer', which is not a parameter of report: did you mean 'customer'"),
        ("{customer:{yaer}}", "did you mean 'year'"),
        ("{}", "names ''"),
        ("{0}", "names '0'"),
        ("{customer", "not a valid format string"),
        ("{customer}{year}", "side by side"),
        ("user", r"names none of the parameters of report.*'report:\{customer\}'.*ignore="),
        (f"user:{id}", "no f before the quotes"),
        ("user:%s", "names none"),
        ("user:{{customer}}", "names none"),
        (7, "a plain function"),
    ],
)
def test_a_key_that_the_signature_cannot_fill_is_refused_at_decoration(key: Any, said: str) -> None:
    """Broken: a typo in `key=` is found by the first call in production."""
    with pytest.raises(OptionError, match=said):
        make(report, key=key)


def test_a_key_without_fields_is_for_calls_that_nothing_tells_apart() -> None:
    """Broken: a function whose calls all share one value can't have a constant key."""
    assert make(lambda: 0, key="all-books")() == "p:all-books"
    assert make(report, key="report", ignore=["customer", "year"])(1) == "p:report"
    assert make(lambda self: 0, key="mine", bound=True)(object()) == "p:mine"


def test_an_async_key_function_is_refused_at_decoration() -> None:
    """Broken: every key contains the address of a coroutine."""

    async def key(customer: int) -> str:
        return "x"

    with pytest.raises(OptionError, match="plain function"):
        make(report, key=key)


@pytest.mark.parametrize(
    "key, value", [("{customer.nme}", 1), ("{customer[x]}", {}), ("{customer:d}", "x"), ("{customer}", MISSING)]
)
def test_a_format_string_that_fails_at_the_call_is_a_keying_error(key: str, value: Any) -> None:
    """Broken: the address of an object becomes a key, or the error does not name the function."""
    with pytest.raises(KeyingError, match=r"^report: "):
        make(report, key=key)(value)


# -- long keys ------------------------------------------------------------------------------------------------


def test_a_long_key_is_hashed_and_keeps_its_prefix() -> None:
    """Broken: an engine truncates or refuses a long key, or two long arguments share a key."""
    key = make(report)
    assert key("x" * 300) == "p:#b9fcbeffdb65f46f0a96604230c3087823e8e935"
    assert len({key("x" * n) for n in range(150, 300)}) == 150
    assert key([*range(100)]) != key((*range(100),))
    assert key("x" * 180).startswith("p:('xxx")


def test_a_chosen_key_is_as_it_was_chosen() -> None:
    """Broken: a chosen key is hashed, so its author can't use it with the cache's own verbs."""
    for chosen in ("x" * 300, "#1", "\ud800"):
        for key in (make(report, key="{customer}"), make(report, key=lambda c: c)):
            assert key(chosen) == f"p:{chosen}"
    make(report)("\ud800").encode()  # a key that was not chosen can be encoded


@given(st.lists(st.tuples(st.text(":-%3A{", max_size=4), st.text(":-%3A{", max_size=4)), min_size=2, max_size=2))
@pytest.mark.parametrize(
    "template", ["{customer}:{year}", "a{customer}:-{year}:", "{{{customer}-{year}{{", "{customer}{{{year}"]
)
def test_a_format_string_makes_no_key_of_two(template: str, calls: list[tuple[str, str]]) -> None:
    """Broken: ("a:b", "c") and ("a", "b:c") share a key."""
    key = make(report, key=template)
    keys = [key(customer, year=year) for customer, year in calls]
    assert (keys[0] == keys[1]) == (calls[0] == calls[1])


# -- bound ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrozenShop:
    name: str

    def m(self, a: int = 1) -> None: ...


class Branch(FrozenShop):
    pass


class Tenant(FrozenShop):
    def __init__(self, name: str, tenant: str) -> None:
        super().__init__(name)
        object.__setattr__(self, "tenant", tenant)


@attrs.frozen
class AttrsShop:
    name: str


@attrs.define
class LooseAttrsShop:
    name: str


class PydanticShop(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)
    name: str


class LoosePydanticShop(pydantic.BaseModel):
    name: str


class TupleShop(NamedTuple):
    name: str


class KeyedShop:
    def __stampede_key__(self) -> int:
        return 7


@dataclass
class LooseShop:
    name: str


class PlainShop:
    pass


@pytest.mark.parametrize(
    "self, text",
    [
        (FrozenShop("a"), "test_keys_maker:FrozenShop(name='a')"),
        (Branch("a"), "test_keys_maker:Branch(name='a')"),
        (AttrsShop("a"), "test_keys_maker:AttrsShop(name='a')"),
        (PydanticShop(name="a"), "test_keys_maker:PydanticShop(name='a')"),
        (TupleShop("a"), "test_keys_maker:TupleShop(('a',))"),
        (KeyedShop(), "test_keys_maker:KeyedShop(7)"),
        (Colour.RED, "keys_corpus:Colour.RED"),
        (PlainShop, "<test_keys_maker:PlainShop>"),
    ],
)
def test_self_is_keyed_by_what_does_not_change(self: Any, text: str) -> None:
    """Broken: methods of frozen models, enums and classes can't be cached."""
    assert make(FrozenShop.m, bound=True)(self) == f"p:({text},1)"


@pytest.mark.parametrize(
    "self", [PlainShop(), LooseShop("a"), LooseAttrsShop("a"), LoosePydanticShop(name="a"), Tenant("a", "b")]
)
def test_a_self_that_may_change_is_an_error_with_the_remedies(self: Any) -> None:
    """Broken: a method returns a value for a self that has changed since, or for another tenant."""
    with pytest.raises(KeyingError) as caught:
        make(FrozenShop.m, bound=True)(self)
    assert "FrozenShop.m: parameter 'self': " in str(caught.value)
    for remedy in ("__stampede_key__", "frozen", 'ignore={"self"}'):
        assert remedy in str(caught.value)
    assert make(FrozenShop.m, bound=True, ignore={"self"})(self) == "p:(a=1)"


# -- Parameters -----------------------------------------------------------------------------------------------

SIGNATURES = [
    "()", "(a)", "(a, /)", "(a, /, b)", "(a=1, /)", "(a, b=1, /, c=2)", "(*, a)", "(a, *, b=1)", "(*a)", "(**a)",
    "(a, /, b=1, *c, d, e=2, **f)", "(a, /, *, b)", "(a, /, *b)", "(*a, b=1)", "(a, b=1, **c)",
]  # fmt: skip


@pytest.mark.parametrize("signature", SIGNATURES)
def test_generated_declarations_take_and_pass_on_what_the_function_takes(signature: str) -> None:
    """Broken: a wrapper that is generated from `Parameters` has another signature than its function."""
    namespace: dict[str, Any] = {}
    exec(f"def f{signature}: return locals()", namespace)
    fn = namespace["f"]
    parameters = Parameters(fn)
    inner = parameters.fresh_name("inner")
    generated: dict[str, Any] = {**parameters.defaults, inner: fn}
    exec(f"def g({parameters.declaration()}): return {inner}({parameters.passing()})", generated)
    assert inspect.signature(generated["g"]) == inspect.signature(fn)
    kinds = [parameter.kind for parameter in inspect.signature(fn).parameters.values()]
    args = [number for number, kind in enumerate(kinds) if kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)]
    kwargs = {p.name: 9 for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert generated["g"](*args, **kwargs) == fn(*args, **kwargs)
    assert parameters.plain is ("*a" not in signature and "*c" not in signature and "*b" not in signature)


def test_pairs_are_class_and_value_of_what_is_keyed() -> None:
    """Broken: the fast table confuses 1 and True, or looks at an ignored argument."""
    parameters = Parameters(report, ignore={"year"})
    namespace: dict[str, Any] = {**parameters.defaults}
    exec(f"def pairs({parameters.declaration()}): return {parameters.pairs('type')}", namespace)
    assert namespace["pairs"](1, year=5) == (int, 1)
    assert namespace["pairs"](1) != namespace["pairs"](True)
    assert float not in FAST_TYPES
    assert Parameters(lambda: None).pairs("type") == "()"


def test_wrapped_functions_partials_and_builtins_have_keys() -> None:
    """Broken: only plain functions can be decorated."""

    @functools.wraps(report)
    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    assert make(wrapper)(1) == make(wrapper)(customer=1) == "p:(1,year=2026)"
    assert make(functools.partial(report, year=1))(2) == "p:(2,year=1)"
    assert make(max)(1, 2, default=3) == "p:(*(1,2),**{'default':3})"


def test_a_key_function_may_take_whatever_it_is_given() -> None:
    """A key function may take *args and **kwargs, as cachetools' hashkey does. A parameter may be named `f`."""

    def of(f: str, n: int) -> None: ...

    assert key_maker(of, prefix="p:", key=lambda *args, **kwargs: f"{args}")(1, 2) == "p:(1, 2)"
    assert key_maker(of, prefix="p:", key=lambda f, *args: f"{f}")("a", 2) == "p:a"
    assert key_maker(report, prefix="p:", key=lambda first, *args: f"{first}")(1) == "p:1"
