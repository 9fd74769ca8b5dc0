"""Entries as bytes, and bytes as entries, without ever running code that the bytes name.

This package writes and reads each type of value, and the envelope around it. It does not know where the bytes are
stored. Begin with `envelope.py`, then `sealed.py`."""

from stampede.codecs.annotations import returns_of, values_of
from stampede.codecs.choose import ValueCodec, make_codec
from stampede.codecs.envelope import HEADER, Codec
from stampede.errors import TooLarge

__all__ = ["HEADER", "Codec", "TooLarge", "ValueCodec", "make_codec", "returns_of", "values_of"]
