"""What a stream of the gateway says: JSON, a line each, in the chunks of HTTP. Pure."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["Broken", "Lines"]


class Broken(ConnectionError):
    """It has ended, or says what no stream says."""


class Lines:
    """Bytes go in, as they come; whole lines come out."""

    def __init__(self) -> None:
        self._raw, self._line = bytearray(), bytearray()
        self._begun = False

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        if not data:
            raise Broken("it was closed")
        self._raw += data
        if not self._begun:
            head, found, rest = self._raw.partition(b"\r\n\r\n")
            if not found:
                return []
            if b" 200 " not in head.partition(b"\r\n")[0] or b"chunked" not in head.lower():
                raise Broken(f"it answers {bytes(head[:80])!r}")
            self._raw, self._begun = rest, True
        self._unpack()
        *lines, rest = self._line.split(b"\n")
        self._line = rest
        try:
            return [json.loads(line) for line in lines if line]
        except ValueError as error:
            raise Broken("it says what is no JSON") from error

    def _unpack(self) -> None:
        """Move what is in whole chunks."""
        while (end := self._raw.find(b"\r\n")) >= 0:
            try:
                size = int(self._raw[:end].partition(b";")[0], 16)
            except ValueError as error:
                raise Broken("it says what is no chunk") from error
            if size == 0:
                raise Broken("it has ended")
            if len(self._raw) < end + 2 + size + 2:
                return
            self._line += self._raw[end + 2 : end + 2 + size]
            del self._raw[: end + 2 + size + 2]
