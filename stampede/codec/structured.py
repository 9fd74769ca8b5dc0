"""msgpack and JSON, by msgspec: decoded to the return annotation, readable by other languages."""

from __future__ import annotations

import importlib
from collections import abc
from typing import Any

from stampede.codec.annotations import fingerprint_of, is_pydantic, reach
from stampede.errors import CodecError, MissingExtra, OptionError

READ_BACK = 4096  # bytes up to which a body is read back when it is stored: a wrong annotation shows at once

_LOOSE = {object, list, dict, tuple, set, frozenset, *(getattr(abc, name) for name in abc.__all__)}


class Structured:
    """A body of msgspec's. What would come back as another type is refused when it is stored."""

    def __init__(self, name: str, returns: Any = None) -> None:
        try:
            form = importlib.import_module(f"msgspec.{name}")
        except ImportError as error:
            raise MissingExtra(f"codec={name!r} needs msgspec: pip install 'stampede-guard[msgpack]'") from error
        self.number = {"msgpack": 2, "json": 3}[name]
        self.fingerprint = 0 if returns is None else fingerprint_of(returns)
        self._name = name
        self._loose = returns is None or any(_is_loose(part) for part in reach(returns))
        self._encode = form.Encoder(enc_hook=_give).encode
        kind = Any if returns is None else returns
        try:
            self._decode = form.Decoder(kind, dec_hook=_take).decode
        except TypeError as error:
            raise OptionError(f"codec={name!r} can't read a {returns!r} ({error}): use codec='sealed'") from error
        self._decode_raised = form.Decoder(tuple[str, list[Any]]).decode

    def dump(self, value: Any, raised: bool) -> bytes:
        body: bytes = self._encode(value)
        if raised or self._loose:
            if not _alike(value, self.load(body, raised)):
                raise CodecError(self._refusal(value))
        elif len(body) <= READ_BACK:
            again = self._decode(body)
            if type(again) is not type(value) and again != value:
                raise CodecError(self._refusal(value))
        return body

    def load(self, body: bytes | memoryview, raised: bool) -> Any:
        if raised:
            type_name, args = self._decode_raised(body)
            return type_name, tuple(args)
        return self._decode(body)

    def _refusal(self, value: Any) -> str:
        return (
            f"a {type(value).__name__} would come back from {self._name} with other types in it (a tuple as a list, "
            f"a dataclass as a dict): say what it is in the function's return annotation, or use codec='sealed'"
        )


def _is_loose(part: Any) -> bool:
    """Whether values of several types pass for this part of an annotation, of which one comes back."""
    return part is Any or part in _LOOSE or not (part is None or isinstance(part, type))


def _alike(value: Any, other: Any) -> bool:
    """Equal, and of equal types down to the leaves."""
    kind = type(value)
    if kind is not type(other):
        return False
    if kind is dict:
        return _alike([*value], [*other]) and _alike([*value.values()], [*other.values()])
    if kind in (list, tuple):
        return len(value) == len(other) and all(map(_alike, value, other))
    return bool(value == other or (value != value and other != other))


def _give(value: Any) -> Any:
    if is_pydantic(type(value)):
        return value.model_dump(mode="json", round_trip=True)
    raise CodecError(f"a {type(value).__qualname__} can't be stored by this codec: use codec='sealed'")


def _take(kind: Any, plain: Any) -> Any:
    if is_pydantic(kind):
        return kind.model_validate(plain)
    raise CodecError(f"a {kind!r} can't be read by this codec: use codec='sealed'")
