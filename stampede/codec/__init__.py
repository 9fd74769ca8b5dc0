"""Entries as bytes, and bytes as entries that may be believed."""

from stampede.codec.annotations import returns_of, values_of
from stampede.codec.choose import ValueCodec, make_codec
from stampede.codec.envelope import HEADER, Codec
from stampede.errors import TooLarge

__all__ = ["HEADER", "Codec", "TooLarge", "ValueCodec", "make_codec", "returns_of", "values_of"]
