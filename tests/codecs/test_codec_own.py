"""Custom codecs, and trusted types and modules."""

from __future__ import annotations

import json
import marshal
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest

from stampede import CodecError, OptionError, ValueCodec, cached
from stampede.codecs import make_codec
from stampede.codecs.classes import shapes_of
from stampede.model.entry import Entry
from stampede.testing import CodecSuite, isolated

KEY, ID = "k", b"12345678"


class Marshal:
    name = "marshal-4"

    def encode(self, value: Any) -> bytes:
        return marshal.dumps(value, 4)

    def decode(self, data: bytes) -> Any:
        return marshal.loads(data)


class Lines:
    """A codec for texts only, which raises LookupError."""

    name = "lines"

    def __init__(self, mark: str = "") -> None:
        self.mark = mark

    def encode(self, value: Any) -> bytes:
        if type(value) is not str:
            raise LookupError("no text")
        return f"{self.mark}{value}".encode()

    def decode(self, data: bytes) -> Any:
        text = data.decode()
        if not text.startswith(self.mark):
            raise LookupError("no mark")
        return text.removeprefix(self.mark)


class TestMarshal(CodecSuite):
    def make_codec(self) -> ValueCodec:
        return Marshal()


class TestLines(CodecSuite):
    values = ("", "a", "é")

    def make_codec(self) -> ValueCodec:
        return Lines()


class Forgetful(CodecSuite):
    """The suite for a codec that turns tuples into lists, as JSON does."""

    def make_codec(self) -> ValueCodec:
        class Json:
            name = "json-of-mine"

            def encode(self, value: Any) -> bytes:
                return json.dumps(value).encode()

            def decode(self, data: bytes) -> Any:
                return json.loads(data)

        return Json()


def test_the_suite_finds_a_codec_that_forgets() -> None:
    """The codec suite fails for a codec that changes values."""
    Forgetful().test_what_comes_back_is_what_went_in()
    with pytest.raises(AssertionError, match="came back as"):
        Forgetful().test_what_it_can_not_hold_is_an_error()


def test_a_codec_of_one_s_own_for_a_function_and_for_a_cache() -> None:
    """A custom codec can be set for a function and for a cache."""
    codec = Marshal()
    with isolated(url="memory://?codec=sealed", codec=codec):

        @cached
        def pair(n: int) -> Any:
            return [n, {"n": (n,)}]

        @cached(codec=Lines())
        def line(n: int) -> str:
            return f"line {n}"

        assert pair(1) == pair(1) == [1, {"n": (1,)}] and pair(1) is not pair(1)
        assert line(2) == line(2) == "line 2"
        assert pair.stats().computed == line.stats().computed == {"missing": 1}


def test_what_it_raises_is_a_codec_error_and_fails_nobody() -> None:
    """An error in a custom codec becomes a CodecError. Without strict, the caller still gets the value."""
    with isolated(url="memory://?codec=sealed", strict=False):

        @cached(codec=Lines())
        def number(n: int) -> int:
            return n

        assert number(1) == number(1) == 1 and number.stats().unkept == 2
        with pytest.raises(CodecError, match="LookupError: no text"):
            make_codec(Lines()).encode(KEY, Entry(3, ID))
    blob = make_codec(Lines()).encode(KEY, Entry("x", ID))
    with pytest.raises(CodecError, match="LookupError"):
        make_codec(Lines("mark ")).decode(KEY, blob)


def test_another_codec_s_bytes_are_a_miss() -> None:
    """Bytes of another codec, or of another version of a codec, are refused."""
    blob = make_codec(Lines()).encode(KEY, Entry("x", ID))

    class Newer(Lines):
        name = "lines-2"

    for other in (make_codec(Newer()), make_codec(), make_codec(Lines(), returns=int)):
        with pytest.raises(CodecError):
            other.decode(KEY, blob)
    assert make_codec(Lines()).decode(KEY, blob).value == "x"


def test_it_is_signed_compressed_and_limited_as_others_are() -> None:
    """The options signing_key and compress also apply to a custom codec."""
    codec = make_codec(Lines(), signing_key=b"k", compress=10)
    blob = codec.encode(KEY, Entry("x" * 1000, ID))
    assert len(blob) < 300 and codec.decode(KEY, blob).value == "x" * 1000
    with pytest.raises(CodecError):
        make_codec(Lines(), signing_key=b"other", compress=10).decode(KEY, blob)


def test_an_exception_of_raises_does_not_go_through_it() -> None:
    """Exceptions of `raises` are stored without the custom codec, which need not support them."""
    with isolated(url="memory://?codec=sealed"):

        @cached(codec=Lines(), raises=KeyError)
        def missing(n: int) -> str:
            raise KeyError(n)

        for _ in range(2):
            with pytest.raises(KeyError, match="1"):
                missing(1)
        assert missing.stats().computed == {"missing": 1}


class Nameless:
    def encode(self, value: Any) -> bytes:
        return b""

    def decode(self, data: bytes) -> Any:
        return None


class Text(Nameless):
    name = "text"

    def encode(self, value: Any) -> Any:
        return "no bytes"


def test_what_is_no_codec_is_refused_at_decoration() -> None:
    """A wrong codec is refused when the function is decorated, and not at its first call."""
    for wrong, told in ((Nameless(), "name"), (Marshal, "instance|codec is"), (5, "codec is"), ("pickel", "pickle")):
        with pytest.raises(OptionError, match=told):
            cached(codec=wrong)(lambda: None)  # type: ignore[call-overload]
        with pytest.raises(OptionError, match=told):
            make_codec(wrong)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="encode must return bytes"):
        make_codec(Text()).encode(KEY, Entry(1, ID))
    with pytest.raises(OptionError, match="trust"):
        make_codec(Marshal(), trust=[Plain])


# -- trust ------------------------------------------------------------------------------------------------------------


class Plain:
    def __init__(self, n: int) -> None:
        self.n, self.more = n, [n]


@dataclass
class Fields:
    inner: int


def there_and_back(value: Any, *trust: Any) -> Any:
    codec = make_codec(trust=trust)
    return codec.decode(KEY, codec.encode(KEY, Entry(value, ID))).value


ME = sys.modules[__name__]


class Placed(Plain):
    __slots__ = ("place",)

    def __init__(self) -> None:
        super().__init__(1)
        self.place = "slot"

    @property
    def dangerous(self) -> int:
        return 1

    @dangerous.setter
    def dangerous(self, value: int) -> None:
        raise AssertionError("code of the class was run by what was read")


class OfItsOwn:
    def __reduce__(self) -> Any:
        return OfItsOwn, ()


class Remembered(dict[str, int]):
    pass


def test_a_trusted_module_is_trusted_for_its_classes() -> None:
    """If a module is trusted, all its classes can be stored."""
    assert there_and_back([Fields(2)], ME) == [Fields(2)]
    made = there_and_back(Plain(3), ME)
    assert type(made) is Plain and vars(made) == {"n": 3, "more": [3]}


def test_an_ordinary_class_goes_by_its_attributes() -> None:
    """A trusted class is stored by its attributes. Reading it runs no code of the class."""
    made = there_and_back(Placed(), Placed)
    assert type(made) is Placed and made.place == "slot" and vars(made) == {"n": 1, "more": [1]}
    (shape,) = shapes_of(None, [Placed])
    assert vars(shape.rebuild({"dangerous": 2}, {})) == {"dangerous": 2}
    for wrong in (({}, {"dangerous": 2}), ({}, {"__class__": Plain}), ({1: 2}, {}), ([], {}), ({},)):
        with pytest.raises((CodecError, TypeError)):
            shape.rebuild(*wrong)
    for kind in (OfItsOwn, Remembered):
        with pytest.raises(OptionError, match=rf"{kind.__name__}.*can't be stored by their attributes"):
            make_codec(trust=[kind])


def test_a_module_is_trusted_for_its_own_classes_only() -> None:
    """A trusted module does not make the classes that it imports trusted."""
    module = ModuleType("trusted_for_itself")
    module.Fields = Fields  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        with pytest.raises(CodecError):
            there_and_back(Fields(1), module)
    finally:
        del sys.modules[module.__name__]


def test_modules_are_named_in_settings() -> None:
    """trust= accepts the name of a module, as settings give it."""
    with isolated(url="memory://?codec=sealed", trust=["urllib.parse"]):

        @cached
        def address() -> Any:
            return urlsplit("http://example.org/a")

        assert address() is not address() and address() == urlsplit("http://example.org/a")
