"""How deeply bytes may nest, told before anything is built from them.

Python hashes and compares tuples by recursion in C, and does not look at what is left of the stack. A few hundred
kilobytes of nested tuples in the place of a dict's key would end the process. So would a chain of NamedTuples.
"""

from __future__ import annotations

import ctypes
import sys
import threading

from stampede.errors import CodecError

__all__ = ["check_containers", "check_pickle"]

_USUAL = 1 << 20  # bytes of a stack, where the platform does not tell: the smallest default (Alpine Linux)
_TAKEN = 32_000  # bytes that are taken already
_HASHED, _CHECKED = 128, 512  # bytes per level: to hash a tuple; to read, compare or hash what Python counts, too

# The opcodes that Python's own pickler writes for builtins. Others are not counted, and so they are refused.
_ARGUMENT = {**dict.fromkeys(b"N\x88\x89)]}\x8f", 0), **dict(zip(b"KMJG", (1, 2, 4, 8), strict=True))}  # bytes
_LENGTH = {**dict.fromkeys(b"\x8cC\x8a", 1), **dict.fromkeys(b"XB\x8b", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
_TUPLES = b"t\x85\x86\x87\x91"  # the last: frozensets, which are compared like tuples
_NO_TUPLES = bytes({*range(256)}.difference(_TUPLES))

_OPENING = {"json": b"[{", "msgpack": bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])}
_NOT_OPENING = {name: bytes({*range(256)}.difference(opening)) for name, opening in _OPENING.items()}


class _Stack(threading.local):
    """The size of this thread's stack. `threading.stack_size()` does not tell it: to ask is to set it to 0."""

    def __init__(self) -> None:
        size = ctypes.c_size_t(_USUAL)
        if sys.platform == "linux":
            library, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(128)  # glibc and musl take 56
            library.pthread_self.restype = ctypes.c_void_p  # `get_ident` is a greenlet's, under gevent's patch
            if library.pthread_getattr_np(ctypes.c_void_p(library.pthread_self()), attributes) == 0:
                library.pthread_attr_getstacksize(attributes, ctypes.byref(size))
                library.pthread_attr_destroy(attributes)
        self.room = max(size.value - _TAKEN, 0)


_stack = _Stack()


def _is_small() -> bool:
    """Whether the stack ends before Python's recursion limit is reached, which protects everything but hashing."""
    return _stack.room < sys.getrecursionlimit() * 2 * _CHECKED


def check_pickle(body: bytes) -> None:
    """Raise CodecError if tuples, and what is made from tuples, nest too deeply in this pickle.

    Each level needs an opcode of its own, so bytes with few of these values pass at once. This leaves some large
    values, and hostile ones, whose opcodes are followed one by one.
    """
    most = _stack.room // (_CHECKED if _is_small() else _HASHED)
    if len(body) > most and len(body.translate(None, _NO_TUPLES)) > most and _tuple_depth(body) > most:
        raise CodecError(f"tuples are nested more than {most} levels deep: return a flatter value, or lists")


def check_containers(name: str, body: bytes | memoryview) -> None:
    """Raise CodecError if reading this JSON or msgpack could need more stack than there is.

    msgspec stops at Python's recursion limit. Only where a stack has room for less, the containers are counted.
    """
    most = _stack.room // _CHECKED
    if _is_small() and len(body) > most and len(bytes(body).translate(None, _NOT_OPENING[name])) > most:
        raise CodecError(f"more than {most} containers, for so small a thread's stack: use codec='sealed'")


def _tuple_depth(body: bytes) -> int:
    """Run the opcodes on depths instead of values: of a tuple, and of what a call makes from one."""
    at, deepest = 0, 0
    stack: list[int] = []
    below: list[list[int]] = []  # the stacks under the marks
    memo: list[int] = []
    while (op := body[at]) != 0x2E:  # STOP
        at += 1
        if op == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif op in _ARGUMENT:
            at += _ARGUMENT[op]
            stack.append(0)
        elif op in _LENGTH:
            size = _LENGTH[op]
            at += size + int.from_bytes(body[at : at + size], "little")
            stack.append(0)
        elif op in b"hj":  # BINGET, LONG_BINGET
            size = 1 if op == 0x68 else 4
            stack.append(memo[int.from_bytes(body[at : at + size], "little")])
            at += size
        elif op == 0x28:  # MARK
            below.append(stack)
            stack = []
        elif op in _TUPLES:
            marked = op == 0x74 or op == 0x91
            count = len(stack) if marked else op - 0x84
            depth = 1 + max(stack[-count:], default=0)
            if marked:
                stack = below.pop()
            else:
                del stack[-count:]
            stack.append(depth)
            deepest = max(deepest, depth)
        elif op == 0x52:  # REDUCE: the callable and its arguments
            stack[-2:] = stack[-1:]
        elif op in b"ue\x901" or (op == 0x30 and not stack):  # SETITEMS, APPENDS, ADDITEMS, POP_MARK; POP of a mark
            stack = below.pop()
        elif op in b"as0":  # APPEND, SETITEM, POP
            del stack[-2 if op == 0x73 else -1 :]
        elif op == 0x63:  # GLOBAL: two lines
            at = body.index(b"\n", body.index(b"\n", at) + 1) + 1
            stack.append(0)
        elif op in b"\x80\x95":  # PROTO, FRAME
            at += 1 if op == 0x80 else 8
        else:
            raise CodecError(f"an opcode that is not expected: {op:#x}")
    return deepest
