"""Decodes hostile bytes that nest deeply, in the main thread or in one with a small stack.

    python deep_bytes.py STACK_SIZE DEPTH...      STACK_SIZE 0: the main thread

A process that survives all of it prints "alive".
"""

from __future__ import annotations

import struct
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from stampede.codecs import HEADER, Codec, make_codec
from stampede.errors import CodecError
from stampede.model.entry import Entry

KEY = "app:report(42)"


@dataclass(frozen=True)
class Frozen:
    inner: Any


class Pair(NamedTuple):
    inner: Any


class Colour(Enum):
    RED = 1


NODE = b"cs\nN\n"


def text(words: str) -> bytes:
    return b"\x8c" + bytes([len(words)]) + words.encode()


def node(tag: str, inner: bytes) -> bytes:
    return NODE + b"((" + text(tag) + inner + b"ttR"


def of_memo(number: int) -> bytes:
    return b"j" + number.to_bytes(4, "little")


def chain(tag: str, depth: int) -> bytes:
    """Nodes that each hold the one before it, by way of the memo."""
    links = [b"0" + node(tag, of_memo(number)) + b"\x94" for number in range(depth)]
    return node(tag, b"N") + b"\x94" + b"".join(links)


def deep_values(depth: int) -> Iterator[bytes]:
    """Opcodes that leave one hashable value on the stack, which is nested so deeply."""
    yield b")" + b"\x85" * depth
    yield b"(" * depth + b")" + b"(0t" * depth  # POP takes a mark
    if depth > 10_000:
        return  # the others take too long
    yield b")" + b"N\x86" * depth
    yield b"(" * depth + b"t" * depth
    yield b"(" * depth + b"\x91\x85" * depth
    yield b")\x85\x94" + b"".join(b"0(N" + of_memo(number) + b"t\x94" for number in range(depth))
    yield b"\x8c\xff" + b"x" * 255 + b"\x94\x85\x94" * depth  # as the pickler writes it
    for kind in (Frozen, Pair):
        yield chain(f"__main__:{kind.__qualname__}", depth)


def hashed(value: bytes) -> Iterator[bytes]:
    """Bodies in which it is hashed, by pickle itself or when a value is made; and compared with its like."""
    yield b"}" + value + b"Ns."
    yield b"}(" + value + b"N" + value + b"Nu."
    yield b"}" + value + b"Ns\x85" + node("__main__:Frozen", b"N") + b"\x86."
    yield b"\x8f(" + value + b"\x90."
    yield b"(" + value + b"\x91."
    yield NODE + b"((" + value + b"ttR."
    yield NODE + b"((" + text("counter") + value + b"K\x01ttR."
    yield node("defaultdict", value) + b"."
    yield node("__main__:Colour", value) + b"."


def decode(codec: Codec, body: bytes) -> None:
    head = codec.encode(KEY, Entry([], b"12345678"))[: HEADER.size]
    seal = struct.pack(">I", zlib.crc32(body, zlib.crc32(head, zlib.crc32(KEY.encode()))))
    with suppress(CodecError):
        codec.decode(KEY, head + seal + body)


def attack() -> None:
    sealed = make_codec(returns=dict[Frozen | Pair | Colour, Counter[Any]])
    for depth in map(int, sys.argv[2:]):
        for value in deep_values(depth):
            for body in hashed(value):
                decode(sealed, body)
        if threading.current_thread() is not threading.main_thread():
            continue  # msgspec stops at Python's limit, which needs more than a small stack
        for opening in (b"[", b'{"a":'):
            decode(make_codec("json"), opening * depth)
        for opening in (b"\x91", b"\x81\x01", b"\x81\x91", b"\xdd\x00\x00\x00\x01"):
            decode(make_codec("msgpack"), opening * depth + b"\x01")
    print("alive")


if __name__ == "__main__":
    if size := int(sys.argv[1]):
        threading.stack_size(size)
        thread = threading.Thread(target=attack)
        thread.start()
        thread.join()
    else:
        attack()
