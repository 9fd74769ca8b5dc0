"""Names of keys and locks, for stores that do not accept every string."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["name_of", "shown"]

LONGEST = 200


def name_of(key: str, kind: bytes = b"s") -> bytes:
    """Return a name of printable ASCII without blanks. Long keys, and keys with other characters, are hashed."""
    if len(key) <= LONGEST and key.isascii() and key.isprintable() and " " not in key:
        return kind + b":" + key.encode()
    return kind + b"#" + blake2b(key.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest().encode()


def shown(raw: bytes) -> str:
    """Return a stored name as the user gave it. Bytes that are not valid UTF-8 are shown with backslashes."""
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "backslashreplace")
