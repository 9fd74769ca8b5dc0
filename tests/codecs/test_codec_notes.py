"""The notes of an entry, its etag and its date, in the envelope: they come back, and damaged ones are refused."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stampede.codecs import Codec, make_codec
from stampede.codecs.envelope import AnotherVersion
from stampede.errors import CodecError
from stampede.model.entry import Entry

KEY, ID = "shop.report:(1,)", b"12345678"
MADE = datetime(2026, 11, 28, 12, 0, 0, 500_000, tzinfo=UTC)
CODECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "signed": {"signing_key": "k" * 32},
    "compressed": {"compress": 10},
    "signed and compressed": {"signing_key": "k" * 32, "compress": 10},
}


@dataclass
class Price:
    amount: int


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return make_codec("sealed", **CODECS[request.param])


@pytest.mark.parametrize("etag", [None, "", '"v1"', "ä\udc80", "e" * 1024])
@pytest.mark.parametrize("modified", [None, MADE])
def test_notes_come_back(codec: Codec, etag: str | None, modified: datetime | None) -> None:
    value = "value" * 100
    found = codec.decode(KEY, codec.encode(KEY, Entry(value, ID, ttl=9.0, etag=etag, modified=modified)))
    assert (found.value, found.etag, found.modified, found.ttl) == (value, etag, modified, 9.0)


@pytest.mark.parametrize("options", CODECS.values(), ids=CODECS)
def test_tags_are_read_without_the_value(options: dict[str, Any]) -> None:
    """The tags of an entry can be read where its value cannot: it may be of another type, or by another codec."""
    reader, tags = make_codec("sealed", **options), bytes(range(48))
    for writer in (make_codec("sealed", returns=Price, **options), make_codec("json", **options)):
        for etag in (None, "v1"):
            blob = writer.encode(KEY, Entry("value" * 100, ID, etag=etag, tags=tags))
            assert reader.tags(KEY, blob) == tags
            with pytest.raises(AnotherVersion):
                reader.decode(KEY, blob)
            with pytest.raises(CodecError):
                reader.tags(f"{KEY}?", blob)
        assert reader.tags(KEY, writer.encode(KEY, Entry("value", ID))) == b""


def test_tags_are_read_only_with_the_signing_key() -> None:
    plain, signed, other = (make_codec("sealed", signing_key=key) for key in (None, "k" * 32, "l" * 32))
    for writer, readers in ((plain, (signed,)), (signed, (plain, other))):
        blob = writer.encode(KEY, Entry("value", ID, tags=bytes(24)))
        for reader in readers:
            with pytest.raises(CodecError):
                reader.tags(KEY, blob)


def test_an_entry_without_notes_is_written_as_before(codec: Codec) -> None:
    """An older release reads entries without notes, and refuses those with notes by their version."""
    plain = codec.encode(KEY, Entry("value", ID))
    noted = codec.encode(KEY, Entry("value", ID, etag="v1"))
    assert plain[2] in (1, 2) and noted[2] == plain[2] + 2
    assert len(noted) - len(plain) == 11 + len("v1")


@given(cut=st.integers(0, 200), flip=st.integers(0, 200), bit=st.integers(0, 7))
def test_damaged_notes_are_refused(cut: int, flip: int, bit: int) -> None:
    codec = make_codec("sealed")
    blob = codec.encode(KEY, Entry("value", ID, etag="version", modified=MADE))
    assert codec.decode(KEY, blob).etag == "version"
    for damaged in (blob[: min(cut, len(blob) - 1)], _flipped(blob, flip % len(blob), bit)):
        for read in (codec.decode, codec.tags):
            with pytest.raises(CodecError):
                read(KEY, damaged)


def _flipped(blob: bytes, at: int, bit: int) -> bytes:
    return blob[:at] + bytes([blob[at] ^ 1 << bit]) + blob[at + 1 :]


@pytest.mark.parametrize(
    "notes", [b"", b"\x00" * 10, b"\x7f\xef" + b"\xff" * 6 + b"\xff\xff\x00", b"\x00" * 8 + b"\x00\x09\x00abc"]
)
def test_hostile_notes_are_refused(notes: bytes) -> None:
    """Bytes with a valid checksum may have notes that are cut short, or a date that no calendar has."""
    import zlib

    blob = make_codec("sealed").encode(KEY, Entry("value", ID, etag=""))
    head, body = blob[:64], notes
    seal = zlib.crc32(body, zlib.crc32(head, zlib.crc32(KEY.encode()))).to_bytes(4, "big")
    for read in (make_codec("sealed").decode, make_codec("sealed").tags):
        with pytest.raises(CodecError):
            read(KEY, head + seal + body)
