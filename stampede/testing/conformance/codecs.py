"""The suite for custom codecs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from typing import Any

from stampede.codecs import ValueCodec, make_codec
from stampede.codecs.equality import alike
from stampede.errors import CodecError
from stampede.model.entry import Entry, new_id

__all__ = ["CodecSuite"]


class CodecSuite:
    """The suite for an object that is given as `codec=`. Override `values` with what the codec must be able to store.

    >>> import json
    >>> from stampede.testing import CodecSuite
    >>> class Plain:
    ...     name = "plain-1"
    ...
    ...     def encode(self, value):
    ...         return json.dumps(value).encode()
    ...
    ...     def decode(self, data):
    ...         return json.loads(data)
    >>> class TestPlain(CodecSuite):
    ...     def make_codec(self):
    ...         return Plain()
    """

    values: Sequence[Any] = (
        None, True, 0, -(2**31), 1.5, "", "é\0\U0001f40e", [], [1, [2, {"a": None}]], {"a": {"b": [1.5, "x"]}},
    )  # fmt: skip

    def make_codec(self) -> ValueCodec:
        """Return a new codec to test."""
        raise NotImplementedError("return the codec that is to be tested")

    def _read(self, value: Any, codec: ValueCodec | None = None) -> Any:
        made = make_codec(self.make_codec() if codec is None else codec)
        return made.decode("k", made.encode("k", Entry(value, new_id()))).value

    def test_it_is_a_codec(self) -> None:
        """The object must have the attributes of a codec; otherwise `codec=` would refuse it."""
        assert isinstance(self.make_codec(), ValueCodec)

    def test_what_comes_back_is_what_went_in(self) -> None:
        """Decoding must return an equal value; otherwise a hit would return another value than the miss did."""
        for value in self.values:
            assert alike(value, self._read(value)), f"{value!r} came back as {self._read(value)!r}"

    def test_each_instance_reads_what_another_wrote(self) -> None:
        """Another instance must read the bytes; otherwise other processes could not, nor this one after a restart."""
        for value in self.values:
            data = self.make_codec().encode(value)
            assert isinstance(data, bytes)
            assert alike(value, self.make_codec().decode(data))

    def test_what_it_gives_is_its_reader_s_own(self) -> None:
        """Each decoding must return a new object; otherwise a caller that changes it would change it for others."""
        codec = self.make_codec()
        for value in self.values:
            data = codec.encode(value)
            first, second = codec.decode(data), codec.decode(data)
            assert first is not second or isinstance(value, (type(None), bool, int, float, str, bytes, tuple, date))

    def test_what_it_can_not_hold_is_an_error(self) -> None:
        """A value that can't be stored must raise an error; otherwise another value would come back. A codec that can
        store all of these values passes, too."""
        for value in (object(), (1, 2), {1: 2}, {3}, datetime(2020, 1, 1), b"x", 1 << 70, Exception):
            try:
                back = self._read(value)
            except CodecError:
                continue
            assert alike(value, back), f"{value!r} came back as {back!r}: raise an error in `encode`"

    def test_other_bytes_are_an_error_or_a_value(self) -> None:
        """Damaged bytes must raise an Exception or give a value; otherwise they would hang or kill a reader."""
        codec = self.make_codec()
        for data in (b"", b"\0", b"\xff" * 40, codec.encode(self.values[-1])[:-1]):
            try:
                codec.decode(data)
            except Exception:
                continue

    def test_threads_share_it(self) -> None:
        """A codec must be usable from many threads at once; otherwise concurrent calls would mix their values."""
        codec = self.make_codec()

        def differs(value: Any) -> bool:
            return not alike(value, codec.decode(codec.encode(value)))

        with ThreadPoolExecutor(4) as pool:
            assert not any(pool.map(differs, [*self.values] * 80))
