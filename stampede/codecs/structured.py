"""msgpack and JSON, by msgspec: decoded to the return annotation, and readable in other languages."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any, get_origin

from stampede.codecs.annotations import fingerprint_of
from stampede.codecs.equality import alike
from stampede.codecs.packages import is_row, package_of
from stampede.codecs.pydantic import model_of, plain_shape, tree_of_model
from stampede.codecs.remedies import foreign, not_alike, where
from stampede.errors import CodecError, MissingExtra, OptionError
from stampede.keys.models import is_pydantic


class Structured:
    """A body that msgspec makes. A value that may come back changed is read when it is stored, and refused if it is."""

    def __init__(self, name: str, returns: Any = None) -> None:
        try:
            form = importlib.import_module(f"msgspec.{name}")
        except ImportError as error:
            raise MissingExtra(f"codec={name!r} needs msgspec: pip install 'stampede-guard[msgpack]'") from error
        self.number = {"msgpack": 2, "json": 3}[name]
        self.fingerprint = 0 if returns is None else fingerprint_of(returns)
        self._name, self._form = name, form
        self._refusal = importlib.import_module("msgspec").ValidationError
        self._encode = form.Encoder(enc_hook=partial(_encode_hook, name == "json")).encode
        kind = Any if returns is None else returns
        try:
            self._decode = form.Decoder(kind, dec_hook=_decode_hook).decode
        except TypeError as error:
            raise OptionError(f"codec={name!r} can't read a {returns!r} ({error}): use codec='sealed'") from error
        from stampede.codecs.lossless import certain_of  # it needs msgspec, too

        self._certain = certain_of(kind, json=name == "json")
        self._decode_raised = form.Decoder(list[Any]).decode

    def dump(self, value: Any, raised: bool) -> bytes:
        try:
            body: bytes = self._encode(value)
        except OverflowError as error:
            raise CodecError(
                f"{self._name} can't represent such a large number ({error}): use codec='sealed'"
            ) from error
        if raised or not self._certain([value]):
            read = self._read(value, body, raised)
            if not alike(value, read):
                raise CodecError(not_alike(value, read, self._name))
        return body

    def _read(self, value: Any, body: bytes, raised: bool) -> Any:
        try:
            return self.load(body, raised)
        except (CodecError, ValueError, TypeError, self._refusal) as error:
            plain = self._form.decode(body)
            given, read, _ = where(value, plain)
            if read is None and given is not None:  # JSON writes null for what it can't represent
                raise CodecError(not_alike(value, plain, self._name)) from error
            if is_row(type(given)):
                raise CodecError(foreign(given, self._name)) from error
            why = f"a {type(value).__qualname__} is not what the function's return annotation says"
            raise CodecError(f"{why}: {error}. Correct the annotation, or use codec='sealed'") from error

    def load(self, body: bytes | memoryview, raised: bool) -> Any:
        if raised:
            type_name, args, *facts = self._decode_raised(body)
            return type_name, tuple(args), *facts
        return self._decode(body)


def _encode_hook(json: bool, value: Any) -> Any:
    """Return a value of a type that msgspec does not know as one of a type that it knows."""
    kind: Any = type(value)
    if is_pydantic(kind):
        return tree_of_model(value)
    if (shape := plain_shape(kind, "")) is not None:
        return shape.lower(value)[1]
    if issubclass(kind, getattr(sys.modules.get("numpy"), "generic", ())) and type(plain := value.item()) is not kind:
        return plain
    raise CodecError(foreign(value, "json" if json else "msgpack"))


def _decode_hook(kind: Any, plain: Any) -> Any:
    if is_pydantic(kind):
        return model_of(kind, plain)
    shape = plain_shape(kind, "") if isinstance(kind, type) else None
    if shape is not None:
        return shape.rebuild(plain)
    origin = get_origin(kind) or kind
    if package_of(origin) is not None:
        return origin(plain)  # a numpy scalar
    raise CodecError(f"a {kind!r} can't be read by this codec: use codec='sealed'")
