"""How much stack it takes to read bytes that may nest deeply, and where to find it.

Python hashes tuples by recursion in C, and does not look at what is left of the stack. A few hundred kilobytes of
nested tuples in the place of a dict's key would end the process. So would a chain of NamedTuples. msgspec stops at
Python's recursion limit, which some threads' stacks do not reach.

How deeply bytes nest is known only when they have been read. But they nest no deeper than they have opcodes that nest.
Those are counted, which is quick; bytes with more of them than this thread's stack could hold are read in a thread
whose stack is large enough for all of them.
"""

from __future__ import annotations

import ctypes
import sys
import threading

__all__ = ["deep_bytes", "deep_pickle"]

_USUAL = 1 << 20  # bytes of a stack, where the platform does not tell: the smallest default (Alpine Linux)
_TAKEN = 32_000  # bytes that are taken already
_HASHED, _CHECKED = 128, 512  # bytes per level: to hash a tuple; to read, compare or hash what Python counts, too

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


def _levels() -> int:
    """After how many levels Python stops C code that asks it. 3.12 and 3.13 have a constant for that."""
    constant = 10_000 if (3, 12) <= sys.version_info < (3, 14) else 0
    return max(sys.getrecursionlimit(), constant)


def _is_small() -> bool:
    """Whether the stack ends before Python's recursion limit is reached, which protects everything but hashing."""
    return _stack.room < _levels() * 2 * _CHECKED


def deep_pickle(body: bytes) -> int:
    """Return the bytes of stack that this pickle may need; 0 if this thread has them."""
    most = _stack.room // (_CHECKED if _is_small() else _HASHED)
    if len(body) <= most or (tuples := len(body.translate(None, _NO_TUPLES))) <= most:
        return 0
    return _TAKEN + tuples * _HASHED + min(tuples, _levels()) * 2 * _CHECKED


def deep_bytes(name: str, body: bytes | memoryview) -> int:
    """Return the bytes of stack that msgspec may need to read this JSON or msgpack; 0 if this thread has them."""
    most = _stack.room // _CHECKED
    if not _is_small() or len(body) <= most:
        return 0
    openings = len(bytes(body).translate(None, _NOT_OPENING[name]))
    return 0 if openings <= most else _TAKEN + min(openings, _levels()) * 2 * _CHECKED
