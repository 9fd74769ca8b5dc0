"""From options to a codec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from stampede.codec.annotations import fingerprint_of, unresolved
from stampede.codec.envelope import Body, Codec
from stampede.codec.own import Own, ValueCodec, is_own
from stampede.codec.pickled import Pickled
from stampede.codec.sealed import Sealed
from stampede.codec.shapes import shapes_of, trusted
from stampede.codec.structured import Structured
from stampede.errors import OptionError
from stampede.policy import nearest

NAMES = ["sealed", "msgpack", "json", "pickle"]


def make_codec(
    name: str | ValueCodec = "sealed",
    *,
    returns: Any = None,
    trust: Iterable[type | ModuleType] = (),
    signing_key: bytes | str | Sequence[bytes | str] | None = None,
    compress: int | None = None,
    max_bytes: int | None = None,
) -> Codec:
    """The codec of these options; OptionError names the wrong one, MissingExtra the package to install."""
    if not is_own(name) and name not in NAMES:
        raise OptionError(f"codec is {name!r}: {nearest(str(name), NAMES)}, or give an object with encode and decode")
    keys = _keys(signing_key)
    body = _body(name, None if unresolved(returns) else returns, *_types(name, trust), bool(keys))
    at, most = _size("compress", compress, 0), _size("max_bytes", max_bytes, 1)
    return Codec(body, keys=keys, compress=at, max_bytes=most)


def sealing(trust: Iterable[type | ModuleType] = ()) -> Body:
    """The sealed codec's body alone, for who keeps bytes of his own."""
    return _body("sealed", None, *_types("sealed", trust), signed=False)


def _body(
    name: str | ValueCodec, returns: Any, trust: tuple[type, ...], modules: tuple[str, ...], signed: bool
) -> Body:
    if not isinstance(name, str):
        return Own(name, returns)
    known = (() if returns is None else (returns,)) + trust + tuple(f"module {each}" for each in modules)
    if name == "sealed":
        found = trusted(modules) if modules else None
        return Sealed(shapes_of(returns, trust, modules), fingerprint_of(*known), found)
    if name != "pickle":
        return Structured(name, returns)
    if not signed:
        raise OptionError("codec='pickle' runs what is in the bytes: give a signing_key, or use codec='sealed'")
    return Pickled(fingerprint_of(*known))


def _types(name: object, trust: Iterable[type | ModuleType]) -> tuple[tuple[type, ...], tuple[str, ...]]:
    if isinstance(trust, (str, type, ModuleType)) or not isinstance(trust, Iterable):
        raise OptionError(f"trust is {trust!r}: give a list of types and modules")
    given = tuple(trust)
    if given and name != "sealed":
        raise OptionError(f"trust is an option of codec='sealed': with codec={name!r} leave it out")
    modules = tuple(each.__name__ for each in given if isinstance(each, ModuleType))
    return tuple(each for each in given if not isinstance(each, ModuleType)), modules


def _keys(given: object) -> tuple[bytes, ...]:
    if given is None:
        return ()
    several = given if isinstance(given, (list, tuple)) else (given,)
    if not several:
        raise OptionError("signing_key is an empty list: give a key, or None")
    return tuple(map(_key, several))


def _key(given: object) -> bytes:
    key = given.encode() if isinstance(given, str) else given
    if not isinstance(key, bytes) or not key:
        raise OptionError("signing_key must be bytes or str, and not empty; several of them, the newest first")
    return key


def _size(name: str, given: object, least: int) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise OptionError(f"{name} is {given!r}: give a number of bytes, at least {least}, or None")
    return given
