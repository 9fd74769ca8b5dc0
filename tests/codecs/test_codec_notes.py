"""The notes of an entry, its etag and its date, in the envelope: they come back, and damaged ones are refused."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stampede.codecs import Codec, make_codec
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


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return make_codec("sealed", **CODECS[request.param])


@pytest.mark.parametrize("etag", [None, "", '"v1"', "ä\udc80", "e" * 1024])
@pytest.mark.parametrize("modified", [None, MADE])
def test_notes_come_back(codec: Codec, etag: str | None, modified: datetime | None) -> None:
    value = "value" * 100
    found = codec.decode(KEY, codec.encode(KEY, Entry(value, ID, ttl=9.0, etag=etag, modified=modified)))
    assert (found.value, found.etag, found.modified, found.ttl) == (value, etag, modified, 9.0)


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
        with pytest.raises(CodecError):
            codec.decode(KEY, damaged)


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
    with pytest.raises(CodecError):
        make_codec("sealed").decode(KEY, head + seal + body)
