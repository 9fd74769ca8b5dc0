"""The names of keys and locks, where a store takes not every string for one."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["name_of", "shown"]

LONGEST = 200


def name_of(key: str, kind: bytes = b"s") -> bytes:
    """Printable ASCII without blanks. Long keys, and those with anything else in them, are hashed."""
    if len(key) <= LONGEST and key.isascii() and key.isprintable() and " " not in key:
        return kind + b":" + key.encode()
    return kind + b"#" + blake2b(key.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest().encode()


def shown(raw: bytes) -> str:
    """A name as it was given; what was shortened, or is none of ours, as people can read it."""
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "backslashreplace")
