"""Pickled pickle: any class, so only for bytes that are signed."""

from __future__ import annotations

import pickle
from typing import Any


class Pickled:
    """A body that may hold anything pickle can. The envelope has checked the signature before it is loaded."""

    number = 4

    def __init__(self, fingerprint: int = 0) -> None:
        self.fingerprint = fingerprint

    def dump(self, value: Any, raised: bool) -> bytes:
        return pickle.dumps(value, 5)

    def load(self, body: bytes | memoryview, raised: bool) -> Any:
        return pickle.loads(body)
