"""From options to a codec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stampede.codec.annotations import fingerprint_of, unresolved
from stampede.codec.envelope import Body, Codec
from stampede.codec.sealed import Sealed
from stampede.codec.shapes import shapes_of
from stampede.codec.structured import Structured
from stampede.codec.whole import Whole
from stampede.errors import OptionError
from stampede.policy import nearest

NAMES = ["sealed", "msgpack", "json", "pickle"]


def make_codec(
    name: str = "sealed",
    *,
    returns: Any = None,
    trust: Iterable[type] = (),
    signing_key: bytes | str | Sequence[bytes | str] | None = None,
    compress: int | None = None,
    max_bytes: int | None = None,
) -> Codec:
    """The codec of these options; OptionError names the wrong one, MissingExtra the package to install."""
    if name not in NAMES:
        raise OptionError(f"codec is {name!r}: {nearest(str(name), NAMES)}")
    keys = _keys(signing_key)
    body = _body(name, None if unresolved(returns) else returns, _types(name, trust), bool(keys))
    at, most = _size("compress", compress, 0), _size("max_bytes", max_bytes, 1)
    return Codec(body, keys=keys, compress=at, max_bytes=most)


def _body(name: str, returns: Any, trust: tuple[type, ...], signed: bool) -> Body:
    known = (() if returns is None else (returns,)) + trust
    if name == "sealed":
        return Sealed(shapes_of(returns, trust), fingerprint_of(*known))
    if name != "pickle":
        return Structured(name, returns)
    if not signed:
        raise OptionError("codec='pickle' runs what is in the bytes: give a signing_key, or use codec='sealed'")
    return Whole(fingerprint_of(*known))


def _types(name: str, trust: Iterable[type]) -> tuple[type, ...]:
    if isinstance(trust, (str, type)) or not isinstance(trust, Iterable):
        raise OptionError(f"trust is {trust!r}: give a list of types")
    types = tuple(trust)
    if types and name != "sealed":
        raise OptionError(f"trust is an option of codec='sealed': with codec={name!r} leave it out")
    return types


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
