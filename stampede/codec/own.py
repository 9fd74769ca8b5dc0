"""Codecs of one's own: any object that makes bytes of values, and values of bytes."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from stampede.codec.annotations import fingerprint_of
from stampede.codec.sealed import Sealed
from stampede.errors import CodecError, OptionError

__all__ = ["Own", "ValueCodec", "is_own"]


@runtime_checkable
class ValueCodec(Protocol):
    """What `codec=` takes beside the names of ours: how values become bytes, and values again.

    Both methods are called by any thread. Whatever they raise is a `CodecError`: of `encode`, the value is served and
    not kept; of `decode`, it is a miss. What `decode` gives must equal what `encode` was given
    (`stampede.testing.CodecSuite` tries it). The bytes come in our envelope: a seal, the signature of a `signing_key`,
    compression. A codec of another name, or a function with another return annotation, doesn't read them.

    >>> import marshal
    >>> class Marshal:
    ...     name = "marshal-4"  # another name for each change of its bytes
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


def is_own(given: object) -> bool:
    """Whether it is a codec of the user's; OptionError says what it lacks, if it was meant to be one."""
    if isinstance(given, str):
        return False
    if isinstance(given, type):
        raise OptionError(f"codec is the class {given.__qualname__}: give an instance of it")
    lacking = [verb for verb in ("encode", "decode") if not callable(getattr(given, verb, None))]
    name = getattr(given, "name", None)
    if not isinstance(name, str) or not name:
        lacking.append("name, a text")
    if len(lacking) == 3:
        return False
    if lacking:
        raise OptionError(f"codec is a {type(given).__name__}, which has no {' and no '.join(lacking)}")
    return True


class Own:
    """A body that a codec of the user's makes. An exception of `raises` is none of its values."""

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
            raise CodecError(f"the codec {self._codec.name!r} has made a {type(data).__name__} of it, and no bytes")
        return bytes(data)

    def load(self, body: bytes | memoryview, raised: bool) -> Any:
        return self._raised.load(body, raised) if raised else self._codec.decode(bytes(body))
