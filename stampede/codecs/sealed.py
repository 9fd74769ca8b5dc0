"""Pickle protocol 5, restricted so that the bytes can't run any code.

The bytes can name exactly one thing, `s.N`, which makes an inert node: a tag and its arguments. While opcodes run,
the stack holds only nodes, this one callable (a bound C method, whose attributes can't be set) and exact builtins.
BUILD, REDUCE, APPEND and the like find no method and no attribute of ours, the user's or the standard library's.
After the last opcode, the tables of this process replace the nodes by the values that they represent.

Hostile bytes can't crash the process by their depth (see `nesting.py`). They may ask for much memory, or for a hash
that takes for ever: a `signing_key` keeps them out. To check every opcode would double the price of a hit."""

from __future__ import annotations

import copyreg
import pickle
import pickletools
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from types import MethodType
from typing import Any

from stampede.codecs.nesting import deep_pickle
from stampede.codecs.packages import rebuilder, shape_for
from stampede.codecs.remedies import foreign
from stampede.codecs.stdlib import LOWER, REBUILD, Lower, Rebuild, Shape
from stampede.errors import CodecError
from stampede.runtime.threads import on_stack

SCALARS = frozenset({type(None), bool, int, float, str, bytes, bytearray})
SHALLOW = 200  # bytes that can't nest too deeply for a small stack: 200 tuples, or two of 100 that are compared
_scalar = SCALARS.issuperset  # given the types of some values: are all of them scalars?

# In every body, place 0 of the memo is the node maker's, so a body needs no import and no Python name.
_NAMES = b"cs\nN\n\x940"  # GLOBAL s.N, MEMOIZE, POP
_PLAIN = b"N\x940"  # NONE, MEMOIZE, POP: for a body without nodes, the places stay the same


Trusted = Callable[[Any], Shape | None]
"""A function that returns the shape of a type, or of a tag, if it is of a module that is trusted as a whole."""


class Node(tuple[Any, ...]):
    """A tag and arguments that represent a value. Hashed by identity: it may be a dict's key before it is a value."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __setstate__(self, state: object) -> None:
        raise CodecError("the bytes set the state of a node")


_node = MethodType(tuple.__new__, Node)


class Sealed:
    """The default codec's body: builtins, the standard library's value types, and the shapes of a return type."""

    number = 1

    def __init__(self, shapes: Sequence[Shape] = (), fingerprint: int = 0, trusted: Trusted | None = None) -> None:
        self.fingerprint = fingerprint
        self._trusted = trusted
        self._lower: dict[type, Lower] = LOWER | {shape.type: shape.lower for shape in shapes}
        self._rebuild: dict[str, Rebuild] = REBUILD | {shape.tag: shape.rebuild for shape in shapes}

    def dump(self, value: Any, raised: bool) -> bytes:
        out = BytesIO()
        sealer = _Sealer(out, 5)
        sealer.lower = self._lower
        sealer.trusted = self._trusted
        sealer.memo = {id(_node): (0, _node)}
        sealer.dump(value)
        return (_NAMES if sealer.used else _PLAIN) + out.getvalue()

    def load(self, body: bytes | memoryview, raised: bool) -> Any:
        if copyreg._extension_registry or copyreg._extension_cache:  # type: ignore[attr-defined]
            _refuse_extensions(body)
        if len(body) > SHALLOW and (stack := deep_pickle(body := bytes(body))):
            return on_stack(stack, partial(self._load, body))
        return self._load(body)

    def _load(self, body: bytes | memoryview) -> Any:
        source = BytesIO(body)
        unsealer = _Unsealer(source)
        value = unsealer.load()
        if source.read(1):
            raise CodecError("there are bytes after the value")
        if not unsealer.named:
            return value
        del unsealer  # and its memo of two tuples for each node, which costs a third of the time of settling
        return _Settling(self._rebuild, self._trusted).settle(value)


class _Sealer(pickle.Pickler):
    lower: dict[type, Lower]
    trusted: Trusted | None
    used = False

    def reducer_override(self, value: Any) -> Any:
        """Return the node of a value. Pickle calls this for every value that is not an exact builtin."""
        lower = self.lower.get(type(value))
        if lower is None:
            shape = shape_for(type(value)) or (self.trusted and self.trusted(type(value)))
            if not shape:
                raise CodecError(foreign(value, "sealed"))
            lower = self.lower[shape.type] = shape.lower
        self.used = True
        return _node, (lower(value),)


class _Unsealer(pickle.Unpickler):
    named = False

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("s", "N"):
            raise CodecError(f"the bytes name {module[:100]}.{name[:100]}")
        self.named = True
        return _node


def _refuse_extensions(body: bytes | memoryview) -> None:
    # Once an extension code has been used, the C unpickler returns its class without a call of find_class.
    # Hardly any process registers such codes, so hardly any pays for this check of every opcode.
    if any(opcode.name.startswith("EXT") for opcode, _, _ in pickletools.genops(bytes(body))):
        raise CodecError("the bytes use an extension code")


class _Settling:
    """Replaces nodes by values: lists, dicts and sets in place, others by new objects. Shared objects stay shared."""

    def __init__(self, rebuild: dict[str, Rebuild], trusted: Trusted | None = None) -> None:
        self._rebuild = rebuild
        self._trusted = trusted
        self._made: dict[Node, Any] = {}
        self._done: dict[int, tuple[Any, Any]] = {}  # id → object (kept alive, so that its id stays its own) and value

    def settle(self, value: Any) -> Any:
        kind = type(value)
        if kind is Node:
            made = self._made.get(value)
            if made is None:
                args = value[1:]
                if not _scalar(map(type, args)):
                    args = self.all_of(args)
                try:
                    rebuild = self._rebuild[value[0]]
                except KeyError:
                    rebuild = self._look_up(value[0])
                made = self._made[value] = rebuild(*args)
            return made
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        settle = _SETTLE.get(kind)
        if settle is None:
            raise CodecError(f"the bytes make a {kind.__name__}, which no value may hold")
        return settle(self, value)

    def _look_up(self, tag: Any) -> Rebuild:
        """Return what rebuilds a tag that is looked up only when a value needs it: of a trusted module, or an array."""
        shape = self._trusted and self._trusted(tag)
        made = self._rebuild[tag] = shape.rebuild if shape else rebuilder(tag)
        return made

    def all_of(self, values: Any) -> list[Any]:
        settle = self.settle
        return [value if type(value) in SCALARS else settle(value) for value in values]

    def _keep(self, value: Any, settled: Any) -> Any:
        # A list inside may refer back to this value, and have settled it first.
        return self._done.setdefault(id(value), (value, settled))[1]

    def tuple(self, value: Any) -> Any:
        return self._keep(value, value if _scalar(map(type, value)) else tuple(self.all_of(value)))

    def frozenset(self, value: Any) -> Any:
        return self._keep(value, frozenset(self.all_of(value)))

    def list(self, value: Any) -> Any:
        self._keep(value, value)
        if not _scalar(map(type, value)):
            value[:] = self.all_of(value)
        return value

    def set(self, value: Any) -> Any:
        self._keep(value, value)
        if not _scalar(map(type, value)):
            members = self.all_of(value)
            value.clear()
            value.update(members)
        return value

    def dict(self, value: Any) -> Any:
        self._keep(value, value)
        if not _scalar(map(type, value)):
            items = zip(self.all_of(value), self.all_of(value.values()), strict=True)
            pairs = [*items]
            value.clear()
            value.update(pairs)
        elif not _scalar(map(type, value.values())):
            for key, item in value.items():
                if type(item) not in SCALARS:
                    value[key] = self.settle(item)
        return value


_SETTLE: dict[type, Any] = {
    tuple: _Settling.tuple,
    frozenset: _Settling.frozenset,
    list: _Settling.list,
    set: _Settling.set,
    dict: _Settling.dict,
}
