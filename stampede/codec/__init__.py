"""Entries as bytes, and bytes as entries that may be believed."""

from stampede.codec.annotations import returns_of, values_of
from stampede.codec.choose import ValueCodec, make_codec
from stampede.codec.envelope import HEADER, Codec, Header, header_of
from stampede.errors import TooLarge

__all__ = ["HEADER", "Codec", "Header", "TooLarge", "ValueCodec", "header_of", "make_codec", "returns_of", "values_of"]
