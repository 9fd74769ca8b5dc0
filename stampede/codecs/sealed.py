"""Pickle protocol 5 with nothing in it that bytes could grip.

The bytes can name exactly one thing, `s.N`, which makes an inert node: a tag and its arguments. While opcodes run,
the stack holds nodes, that one callable (a bound C method: nothing on it can be set) and exact builtins;
BUILD, REDUCE, APPEND and the like find no method and no attribute of ours, the user's or the standard library's.
Only when the last opcode has run are nodes replaced by the values they stand for, by the tables of this process.

Hostile bytes can't end the process by their depth (see `depth.py`). They may ask for much memory, or for a hash that
takes for ever: `signing_key` keeps them out. A look at every opcode would double the price of a hit.
"""

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
from stampede.codecs.stdlib import LOWER, REBUILD, Lower, Raise, Shape
from stampede.errors import CodecError
from stampede.runtime.threads import on_stack

SCALARS = frozenset({type(None), bool, int, float, str, bytes, bytearray})
SHALLOW = 200  # bytes in which nothing nests too deeply for a small stack: 200 tuples, or two of 100 that are compared
_scalar = SCALARS.issuperset  # of the types of some values

# The memo's place 0 is the node maker's in every body, so that a sealed body needs no import and no Python name.
_NAMES = b"cs\nN\n\x940"  # GLOBAL s.N, MEMOIZE, POP
_PLAIN = b"N\x940"  # NONE, MEMOIZE, POP: nothing is named, the places are the same


Trusted = Callable[[Any], Shape | None]
"""The shape of a type, or of a tag, of a module that is trusted as a whole."""


class Node(tuple[Any, ...]):
    """A tag and arguments that stand for a value. Hashed by identity: a key of a dict before it is a value."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __setstate__(self, state: object) -> None:
        raise CodecError("bytes that set the state of a node")


_node = MethodType(tuple.__new__, Node)


class Sealed:
    """The default body: builtins, the standard library's value types, and the shapes of a return type."""

    number = 1

    def __init__(self, shapes: Sequence[Shape] = (), fingerprint: int = 0, found: Trusted | None = None) -> None:
        self.fingerprint = fingerprint
        self._found = found
        self._lower: dict[type, Lower] = LOWER | {shape.type: shape.lower for shape in shapes}
        self._rebuild: dict[str, Raise] = REBUILD | {shape.tag: shape.rebuild for shape in shapes}

    def dump(self, value: Any, raised: bool) -> bytes:
        out = BytesIO()
        sealer = _Sealer(out, 5)
        sealer.lower = self._lower
        sealer.found = self._found
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
            raise CodecError("bytes behind the value")
        if not unsealer.named:
            return value
        del unsealer  # and its memo, which holds two tuples for each node: a third of the work of settling
        return _Settling(self._rebuild, self._found).settle(value)


class _Sealer(pickle.Pickler):
    lower: dict[type, Lower]
    found: Trusted | None
    used = False

    def reducer_override(self, value: Any) -> Any:
        """Called for whatever is no exact builtin."""
        lower = self.lower.get(type(value))
        if lower is None:
            shape = shape_for(type(value)) or (self.found and self.found(type(value)))
            if not shape:
                raise CodecError(foreign(value, "sealed"))
            lower = self.lower[shape.type] = shape.lower
        self.used = True
        return _node, (lower(value),)


class _Unsealer(pickle.Unpickler):
    named = False

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("s", "N"):
            raise CodecError(f"bytes that name {module[:100]}.{name[:100]}")
        self.named = True
        return _node


def _refuse_extensions(body: bytes | memoryview) -> None:
    # The C unpickler hands out an extension code's class without asking find_class, once anybody has used the code.
    # Hardly any process registers one, so nobody pays for this look at every opcode.
    if any(opcode.name.startswith("EXT") for opcode, _, _ in pickletools.genops(bytes(body))):
        raise CodecError("bytes that use an extension code")


class _Settling:
    """Puts values where nodes are: lists, dicts and sets in place, the others anew; what is shared stays shared."""

    def __init__(self, rebuild: dict[str, Raise], found: Trusted | None = None) -> None:
        self._rebuild = rebuild
        self._found = found
        self._made: dict[Node, Any] = {}
        self._done: dict[int, tuple[Any, Any]] = {}  # id → it (kept alive, so that ids stay its own) and its value

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
                    rebuild = self._late(value[0])
                made = self._made[value] = rebuild(*args)
            return made
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        settle = _SETTLE.get(kind)
        if settle is None:
            raise CodecError(f"bytes that leave a {kind.__name__} behind")
        return settle(self, value)

    def _late(self, tag: Any) -> Raise:
        """By what is known only once a value needs it: a type of a trusted module, an array, a frame."""
        shape = self._found and self._found(tag)
        made = self._rebuild[tag] = shape.rebuild if shape else rebuilder(tag)
        return made

    def all_of(self, values: Any) -> list[Any]:
        settle = self.settle
        return [value if type(value) in SCALARS else settle(value) for value in values]

    def _keep(self, value: Any, settled: Any) -> Any:
        # A list inside may have led back to this very value, and settled it first.
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
