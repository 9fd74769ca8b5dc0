"""The choice of a codec by its options; and the bodies that pickle and users' own codecs make."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from stampede.codecs.annotations import fingerprint_of, unresolved
from stampede.codecs.classes import shapes_of, trusted
from stampede.codecs.envelope import Body, Codec
from stampede.codecs.sealed import Sealed
from stampede.codecs.structured import Structured
from stampede.errors import CodecError, OptionError
from stampede.settings.options import nearest

__all__ = ["Pickled", "ValueCodec", "body_of", "make_codec"]

NAMES = ["sealed", "msgpack", "json", "pickle"]


@runtime_checkable
class ValueCodec(Protocol):
    """A codec of your own for `codec=`: an object that turns values into bytes, and bytes into values.

    Any thread may call the methods. Whatever they raise becomes a `CodecError`. If `encode` raises, the value is
    returned but not stored; if `decode` raises, it is a miss. `decode` must return what `encode` was given
    (`stampede.testing.CodecSuite` checks it). The bytes are put into our envelope, with a seal or the signature of a
    `signing_key`, and compressed if asked. A codec of another name, or a function with another return annotation, does
    not read them.

    >>> import marshal
    >>> class Marshal:
    ...     name = "marshal-4"  # change the name whenever the bytes change
    ...
    ...     def encode(self, value):
    ...         return marshal.dumps(value, 4)
    ...
    ...     def decode(self, data):
    ...         return marshal.loads(data)
    >>> @cached(codec=Marshal())
    ... def report(customer: int) -> dict:
    ...     return {"customer": customer}
    >>> report(5)
    {'customer': 5}
    """

    @property
    def name(self) -> str: ...

    def encode(self, value: Any, /) -> bytes: ...

    def decode(self, data: bytes, /) -> Any: ...


class _Own:
    """The body of a `ValueCodec`. Exceptions named in `raises` do not go through the codec."""

    number = 5

    def __init__(self, codec: ValueCodec, returns: Any = None) -> None:
        self.fingerprint = fingerprint_of(f"codec {codec.name}", *(() if returns is None else (returns,)))
        self._codec = codec
        self._raised = Sealed()

    def dump(self, value: Any, raised: bool) -> bytes:
        if raised:
            return self._raised.dump(value, raised)
        data = self._codec.encode(value)
        if not isinstance(data, (bytes, bytearray)):
            raise CodecError(
                f"the codec {self._codec.name!r} returned a {type(data).__name__}: encode must return bytes"
            )
        return bytes(data)

    def load(self, body: bytes | memoryview, raised: bool) -> Any:
        return self._raised.load(body, raised) if raised else self._codec.decode(bytes(body))


class Pickled:
    """A body that may hold anything that pickle can. The envelope checks the signature before the body is loaded."""

    number = 4

    def __init__(self, fingerprint: int = 0) -> None:
        self.fingerprint = fingerprint

    def dump(self, value: Any, raised: bool) -> bytes:
        return pickle.dumps(value, 5)

    def load(self, body: bytes | memoryview, raised: bool) -> Any:
        return pickle.loads(body)


def make_codec(
    name: str | ValueCodec = "sealed",
    *,
    returns: Any = None,
    trust: Iterable[type | ModuleType] = (),
    signing_key: bytes | str | Sequence[bytes | str] | None = None,
    compress: int | None = None,
    max_bytes: int | None = None,
) -> Codec:
    """Return the codec of these options. The settings have checked sizes and keys already. OptionError names any other
    option that is wrong, MissingExtra the package to install."""
    given = [signing_key] if isinstance(signing_key, (bytes, str)) else signing_key or ()
    keys = [key.encode() if isinstance(key, str) else key for key in given]
    body = body_of(name, None if unresolved(returns) else returns, trust, bool(keys))
    return Codec(body, keys=keys, compress=compress, max_bytes=max_bytes)


def body_of(name: str | ValueCodec, returns: Any, trust: Iterable[type | ModuleType], signed: bool) -> Body:
    given = tuple(trust)
    if given and name != "sealed":
        raise OptionError(f"trust works only with codec='sealed': leave it out with codec={name!r}")
    if name not in NAMES:
        if isinstance(name, (str, type)) or not isinstance(name, ValueCodec) or not isinstance(name.name, str):
            raise OptionError(
                f"codec is {name!r}: {nearest(str(name), NAMES)}, or give an object with a name, encode and decode"
            )
        return _Own(name, returns)
    assert isinstance(name, str)
    modules = tuple(each.__name__ for each in given if isinstance(each, ModuleType))
    types = tuple(each for each in given if not isinstance(each, ModuleType))
    known = (() if returns is None else (returns,)) + types + tuple(f"module {each}" for each in modules)
    if name == "sealed":
        found = trusted(modules) if modules else None
        return Sealed(shapes_of(returns, types), fingerprint_of(*known), found)
    if name != "pickle":
        return Structured(name, returns)
    if not signed:
        raise OptionError("codec='pickle' can run code from the bytes: give a signing_key, or use codec='sealed'")
    return Pickled(fingerprint_of(*known))
