"""Promise 8: bytes from an engine never run code and never change a class. Each body here has a valid seal."""

from __future__ import annotations

import copyreg
import fractions
import io
import pickle
import struct
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import stampede.codecs.classes as shapes
import stampede.codecs.sealed as sealed
import stampede.codecs.stdlib as values
from stampede.codecs import HEADER, Codec, make_codec
from stampede.errors import CodecError
from stampede.model.entry import Entry

KEY = "shop.report:(1,)"
DEEP = 200_000  # recursion to this depth, in C or in Python, would overflow the stack
RAN: list[object] = []  # what hostile bytes managed to call


class Colour(Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Account:
    """All that opcodes look for in an object: it is callable, and has append, extend, add and a state."""

    owner: str
    colour: Colour = Colour.RED
    rows: list[Any] = field(default_factory=list)

    def __call__(self, *args: object) -> None:
        RAN.append(args)

    def append(self, item: object) -> None:
        RAN.append(item)

    extend = add = append

    def __index__(self) -> int:
        RAN.append("index")
        return 1

    def __fspath__(self) -> str:
        RAN.append("fspath")
        return "x"

    def __complex__(self) -> complex:
        RAN.append("complex")
        return 1j

    def __setitem__(self, key: object, item: object) -> None:
        RAN.append(item)

    def __setstate__(self, state: object) -> None:
        RAN.append(state)


class Registered:
    """A class whose extension code was used before."""


CODEC = make_codec(returns=dict[str, Account | Point])
ME = __name__.encode()
NODE = b"cs\nN\n"


def entry(body: bytes, key: str = KEY, codec: Codec = CODEC) -> bytes:
    """A body in a valid envelope."""
    header = CODEC.encode(KEY, Entry(1, b"12345678", 0.1, 0.2, 60.0, 60.0, 90.0))[: HEADER.size]
    return header + struct.pack(">I", zlib.crc32(body, zlib.crc32(header, zlib.crc32(key.encode())))) + body


def text(words: str) -> bytes:
    return b"\x8c" + bytes([len(words)]) + words.encode()


def node(tag: str, *args: bytes) -> bytes:
    """Opcodes that leave a node on the stack."""
    return NODE + b"((" + text(tag) + b"".join(args) + b"ttR"


ACCOUNT = node(f"{__name__}:Account", text("bob"), node(f"{__name__}:Colour", text("RED")), b"]")
EVIL_STATE = b"}" + text("owner") + text("eve") + b"s"
SLOT_STATE = b"N}" + text("__add__") + text("gone") + b"s\x86"  # (None, {"__add__": "gone"})

BODIES: dict[str, bytes] = {
    # naming things
    "os.system, GLOBAL": b"cos\nsystem\n(S'echo'\ntR.",
    "os.system, STACK_GLOBAL": text("os") + text("system") + b"\x93(" + text("true") + b"tR.",
    "os.system, INST": b"(S'true'\nios\nsystem\n.",
    "os.system, OBJ": b"(cos\nsystem\nS'true'\no.",
    "eval": b"cbuiltins\neval\n(S'1'\ntR.",
    "exec": b"cbuiltins\nexec\n(S'1'\ntR.",
    "getattr": b"cbuiltins\ngetattr\n(cbuiltins\nint\nS'__subclasses__'\ntR.",
    "getattr chain": b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\n(cos\nS'path'\ntRS'os'\ntR.",
    "dotted name": text("stampede.codecs.sealed") + text("pickle.sys.modules") + b"\x93.",
    "dotted maker": text("s") + text("N.__self__") + b"\x93.",
    "the maker by its Python name": b"cstampede.codecs.sealed\n_node\n.",
    "the node class": b"cstampede.codecs.sealed\nNode\n.",
    "a trusted class": b"c" + ME + b"\nAccount\n.",
    "a trusted class, NEWOBJ": b"c" + ME + b"\nAccount\n)\x81.",
    "a trusted class, NEWOBJ_EX": b"c" + ME + b"\nAccount\n)}\x92.",
    "a value type": b"cfractions\nFraction\n(K\x01K\x02tR.",
    "copyreg": b"ccopyreg\n_reconstructor\n.",
    "an empty name": b"c\n\n.",
    "a name that is not UTF-8": b"c\xff\n\xfe\n.",
    # BUILD: the attacks that an exact list of names lets through
    "36 bytes: an attribute of a class": b"c" + ME + b"\nAccount\n" + SLOT_STATE + b"b.",
    "55 bytes: Fraction.__add__": b"cfractions\nFraction\nN}S'__add__'\ncfractions\nFraction\ns\x86b.",
    "BUILD on the maker, dict state": NODE + b"}" + text("x") + b"K\x01sb.",
    "BUILD on the maker, slot state": NODE + b"N}" + text("__func__") + b"K\x01s\x86b.",
    "BUILD on the maker, __self__": NODE + b"N}" + text("__self__") + b"K\x01s\x86b.",
    "BUILD on the maker, __class__": NODE + b"N}" + text("__class__") + b"K\x01s\x86b.",
    "BUILD on a node, dict state": ACCOUNT + EVIL_STATE + b"b.",
    "BUILD on a node, slot state": ACCOUNT + SLOT_STATE + b"b.",
    "BUILD on a node, no state": ACCOUNT + b"Nb.",
    "BUILD on an enum member": node(f"{__name__}:Colour", text("RED")) + b"N}" + text("_value_") + b"K\x09s\x86b.",
    "BUILD on a builtin": b"]" + SLOT_STATE + b"b.",
    "BUILD on a set": b"\x8f}" + text("x") + b"K\x01sb.",
    # calls
    "REDUCE on the maker, several arguments": NODE + b"(K\x01K\x02tR.",
    "REDUCE on the maker, no iterable": NODE + b"K\x01\x85R.",
    "REDUCE on the maker, no tuple": NODE + b"K\x01R.",
    "REDUCE on a node": ACCOUNT + b")R.",
    "REDUCE on a node, arguments": ACCOUNT + text("x") + b"\x85R.",
    "OBJ on a node": b"(" + ACCOUNT + b"K\x01o.",
    "NEWOBJ on the maker": NODE + b")\x81.",
    "NEWOBJ on a node": ACCOUNT + b")\x81.",
    "NEWOBJ_EX on the maker": NODE + b")}\x92.",
    "REDUCE on a string": text("x") + b")R.",
    "APPEND on a node": ACCOUNT + b"K\x01a.",
    "APPENDS on a node": ACCOUNT + b"(K\x01K\x02e.",
    "ADDITEMS on a node": ACCOUNT + b"(K\x01K\x02\x90.",
    "SETITEM on a node": ACCOUNT + b"K\x01K\x02s.",
    "SETITEMS on a node": ACCOUNT + b"(K\x01K\x02u.",
    "SETITEM on the maker": NODE + b"K\x01K\x02s.",
    "APPEND on the maker": NODE + b"K\x01a.",
    # wrong uses of the maker and of nodes
    "the maker as the value": NODE + b".",
    "the maker in a list": b"]" + NODE + b"a.",
    "the maker as an argument": node("deque", b"N", NODE) + b".",
    "a node without a tag": NODE + b")\x85R.",
    "a node whose tag is a node": NODE + b"(" + ACCOUNT + b"\x85\x85tR.",
    "a node whose tag can't be hashed": NODE + b"]\x85\x85R.",
    "an unknown tag": node("os:system", text("true")) + b".",
    "a class by its tag, no fields": node(f"{__name__}:Account") + b".",
    "a class by its tag, one field too many": ACCOUNT[:-3] + b"NttR.",
    "a tuple with a field too few": node(f"{__name__}:Point", b"K\x01") + b".",
    "a member that is none": node(f"{__name__}:Colour", text("__class__")) + b".",
    "a member that is a method": node(f"{__name__}:Colour", text("mro")) + b".",
    "a date of nowhere": node("date", b"K\x00K\x63K\x63") + b".",
    "a datetime from pickle's own bytes": node("datetime", b"C\x0a" + b"\xff" * 10) + b".",
    "a date from pickle's own bytes": node("date", b"C\x04\xff\xff\x0c\xff") + b".",
    "a time from pickle's own bytes": node("time", b"C\x06" + b"\x7f" * 6, b"K\x00") + b".",
    "a range of accounts": node("range", ACCOUNT, ACCOUNT, ACCOUNT) + b".",
    "a complex account": node("complex", ACCOUNT) + b".",
    "a path of an account": node("posixpath", ACCOUNT) + b".",
    "a fraction of an account": node("fraction", ACCOUNT, b"K\x01") + b".",
    "a decimal of an account": node("decimal", ACCOUNT) + b".",
    "a zone outside the zones": node("zone", text("../../../../etc/passwd")) + b".",
    "a factory that is no builtin type": node("defaultdict", text("eval")) + b".",
    "half a pair": node("ordered", b"K\x01") + b".",
    "a deque with a strange length": node("deque", text("x")) + b".",
    # extension codes, persistent ids, buffers
    "EXT1": b"\x82\xf0.",
    "EXT2": b"\x83\xf0\x00.",
    "EXT4": b"\x84\xf0\x00\x00\x00.",
    "EXT1, BUILD on its class": b"\x82\xf0" + SLOT_STATE + b"b.",
    "an unknown extension": b"\x82\xf1.",
    "PERSID": b"P1\n.",
    "BINPERSID": b"K\x01Q.",
    "NEXT_BUFFER": b"\x97.",
    "READONLY_BUFFER": b"K\x01\x98.",
    # sizes
    "a huge BINBYTES8": b"\x8e" + b"\xff" * 7 + b"\x7f.",
    "a huge BYTEARRAY8": b"\x96" + b"\xff" * 7 + b"\x7f.",
    "a huge BINUNICODE8": b"\x8d" + b"\xff" * 8 + b".",
    "a huge LONG4": b"\x8b\xff\xff\xff\x7f.",
    "a negative LONG4": b"\x8b\xff\xff\xff\xff.",
    "a huge FRAME": b"\x95" + b"\xff" * 8 + b".",
    "a pickle in a pickle's wake": b"N.N.",
    # nesting
    "nodes very deep": NODE + b"\x940" + b"h\x00(" * DEEP + b"N" + b"ttR" * DEEP + b".",
    "lists very deep, a node inside": b"]" * DEEP + ACCOUNT + b"a" * DEEP + b".",
    "tuples very deep, a node inside": ACCOUNT + b"\x85" * DEEP + b".",
    "dicts very deep, a node inside": b"}K\x01" * DEEP + ACCOUNT + b"s" * DEEP + b".",
    "many marks": b"(" * DEEP + b".",
    # nonsense
    "nothing": b"",
    "no stop": b"N",
    "an empty stack": b".",
    "an opcode that is none": b"\xfe.",
    "a protocol to come": b"\x80\x06N.",
    "a memo of nothing": b"h\x07.",
    "an unhashable key": b"}]Ns.",
    "an unhashable member": b"\x8f(]\x90.",
}


@pytest.fixture(autouse=True, scope="module")
def extension_in_use() -> Any:
    copyreg.add_extension(__name__, "Registered", 0xF0)
    pickle.loads(pickle.dumps(Registered, 2))  # from now on the C unpickler finds it without calling find_class
    yield
    copyreg.remove_extension(__name__, "Registered", 0xF0)


def world() -> dict[object, dict[str, object]]:
    """Everything that an attack could have changed."""
    here = sys.modules[__name__]
    classes = [Account, Point, Colour, Registered, Fraction, Entry, Codec, sealed.Node, sealed.Sealed, pickle.Unpickler]
    modules = [here, sealed, shapes, values, fractions, pickle]
    seen: dict[object, dict[str, object]] = {thing: dict(vars(thing)) for thing in (*classes, *modules)}
    seen["members"] = {member.name: (member.value, dict(vars(member))) for member in Colour}
    seen["tables"] = {"lower": dict(CODEC._body._lower), "rebuild": dict(CODEC._body._rebuild)}  # type: ignore[attr-defined]
    return seen


@pytest.mark.parametrize("name", BODIES)
def test_hostile_bytes_are_refused_and_change_nothing(name: str) -> None:
    """Hostile bytes raise CodecError, run no code, and change no class."""
    before = world()
    with pytest.raises(CodecError):
        CODEC.decode(KEY, entry(BODIES[name]))
    assert world() == before
    assert RAN == []


def test_the_envelope_of_these_tests_is_good() -> None:
    """The envelope of these tests is valid, so the attacks above do reach the unpickler."""
    assert CODEC.decode(KEY, entry(b"K\x07.")).value == 7
    value = CODEC.decode(KEY, entry(ACCOUNT + b".")).value
    assert (type(value), value.owner, value.colour, value.rows) == (Account, "bob", Colour.RED, [])


def test_the_extension_code_would_have_worked() -> None:
    """The extension attacks above would work on a plain Unpickler, which does not call find_class for them."""

    class Trusting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError("asked")

    assert Trusting(io.BytesIO(b"\x82\xf0.")).load() is Registered


def test_what_is_shared_many_times_takes_linear_time() -> None:
    """A few hundred bytes that share one list 2^60 times are decoded in linear time."""
    body = ACCOUNT + b"\x85\x940" + b"]\x94(h\x00h\x00e" + b"".join(
        b"0]\x94(" + bytes([0x68, n, 0x68, n]) + b"e" for n in range(1, 60)
    )  # fmt: skip
    start = time.perf_counter()
    value = CODEC.decode(KEY, entry(body + b".")).value
    assert time.perf_counter() - start < 1
    for _ in range(59):
        assert value[0] is value[1]
        value = value[0]


@pytest.mark.parametrize("name", ["msgpack", "json"])
def test_msgspec_bodies_refuse_what_is_not_of_the_type(name: str) -> None:
    """msgpack and json refuse bodies that don't fit the return annotation or that nest too deeply."""
    codec = make_codec(name, returns=dict[str, Point])
    header = codec.encode(KEY, Entry({}, b"12345678"))[: HEADER.size]
    for body in (b"", b"\x01", b"[]", b"\x90", b'{"a":1}', b"\x91" * DEEP, b"[" * DEEP, b"\xdf\xff\xff\xff\xff"):
        seal = struct.pack(">I", zlib.crc32(body, zlib.crc32(header, zlib.crc32(KEY.encode()))))
        with pytest.raises(CodecError):
            codec.decode(KEY, header + seal + body)


def test_bombs_need_the_signing_key() -> None:
    """The signature is checked before the body is decoded, so a slow hash, a deep key or a huge memo does no harm."""
    t60 = b")\x94" + b"".join(b"2\x86" for _ in range(60))
    bombs = [b"}" + t60 + b"Ns.", b"})" + b"\x85" * DEEP + b"Ns.", b"Nr\xff\xff\xff\x7f."]
    codec = make_codec(signing_key="secret")
    header = codec.encode(KEY, Entry(1, b"12345678"))[: HEADER.size]
    for bomb in bombs:
        with pytest.raises(CodecError, match="seal"):
            codec.decode(KEY, header + bytes(32) + bomb)


@pytest.mark.parametrize("stack, depths", [("0", ["150000"]), ("65536", ["40", "110", "300"])])
def test_depth_does_not_end_the_process(stack: str, depths: list[str]) -> None:
    """A deeply nested key or member does not end the process, also in a thread with a small stack."""
    child = Path(__file__).with_name("deep_bytes.py")
    done = subprocess.run([sys.executable, str(child), stack, *depths], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_large_values_with_many_tuples_come_back() -> None:
    """A large value with many tuples is not mistaken for hostile bytes."""
    point = Point(1, 2)
    twice = ("shared", (2**70, b"x" * 300, frozenset({1, (2, 3)})))
    each = {"t(": [twice, twice, (), (point,), (1, -1, 1.5, None, True)], ("key", 1): {"a" * 300, (4,)}}
    value = [[dict(each) for _ in range(12_000)], bytearray(9), "\u20ac" * 70_000]
    codec = make_codec(returns=list[Point])
    assert codec.decode(KEY, codec.encode(KEY, Entry(value, b"12345678"))).value == value


FLAT: list[Any] = [[{"a": number} for number in range(2_500)], bytes(range(128, 160)) * 700, ["[x]"] * 2_500]


@pytest.mark.parametrize("name", ["sealed", "msgpack", "json"])
def test_flat_values_are_stored_and_read_in_threads_with_a_small_stack(name: str) -> None:
    """Flat values whose bytes look nested are stored and read in a thread with a small stack."""
    codec, read = make_codec(name), []

    def work() -> None:
        for value in FLAT[:: 2 if name == "json" else 1]:  # JSON has no bytes
            read.append(codec.decode(KEY, codec.encode(KEY, Entry(value, b"12345678"))).value == value)

    before = threading.stack_size(1 << 17)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert read == [True] * len(FLAT[:: 2 if name == "json" else 1])
