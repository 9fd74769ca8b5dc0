"""Tags: names under which many entries are invalidated together. Pure.

A tag is stored as an entry of its own, whose id changes with each invalidation. An entry carries, for each of its tags,
the id that the tag had before its computation began, and is good while all of them are current. So invalidating a tag
writes one small entry, however many entries carry it. A tag that the engine has lost or evicted has no id: what carries
it is gone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import inf
from typing import Any

from stampede.model.entry import Entry, new_id

__all__ = [
    "LASTING",
    "SIZE",
    "Tag",
    "Tags",
    "TagsOfCall",
    "judge",
    "keep_of",
    "key_of_tag",
    "name_of_tag",
    "names_in",
    "outlasting",
    "packed",
]

SIZE = 24
"""The bytes of one tag in an entry: its name, its id, and the id of its last hard change."""

LASTING = 3600.0
"""Seconds for which an invalidated tag is stored at least: computations that are under way learn of it until then."""

EVER = 10 * 365.25 * 86_400
"""Seconds for which the tag of an entry without an end is stored."""

_CREATED, _CHANGED = b"n", b"c"


# Not frozen, for the same reason as an entry.
@dataclass(slots=True)
class Tag:
    """A tag, as an engine stores it."""

    id: bytes  # changes with each invalidation
    hard: bytes  # changes with each hard one: what carries another one is gone, and not only stale
    changed: bool  # it was invalidated since it was created
    age: float  # seconds since its id changed
    keep: float  # seconds until the engine forgets it
    ticket: Any = None  # of `model/ports.py`: the proof under which it was read

    @staticmethod
    def of(entry: Entry[Any] | None, ticket: Any = None) -> Tag | None:
        """Return the tag in an entry, or None if it is no tag's."""
        value = None if entry is None else entry.value
        if entry is None or not isinstance(value, bytes) or len(value) != 9 or value[8:] not in (_CREATED, _CHANGED):
            return None
        return Tag(entry.id, value[:8], value[8:] == _CHANGED, entry.ttl - entry.fresh, entry.keep, ticket)

    @staticmethod
    def new(keep: float, *, changed: bool) -> Tag:
        id = new_id()
        return Tag(id, id, changed, 0.0, min(max(keep, LASTING), EVER))

    def softened(self) -> Tag:
        """Return the tag after a soft invalidation."""
        return Tag(new_id(), self.hard, True, 0.0, max(self.keep, LASTING))

    def kept(self, keep: float) -> Tag:
        """Return the tag, to be stored for at least `keep` seconds."""
        return Tag(self.id, self.hard, self.changed, self.age, min(max(keep, self.keep), EVER))

    @property
    def entry(self) -> Entry[Any]:
        value = self.hard + (_CHANGED if self.changed else _CREATED)
        return Entry(value, self.id, ttl=self.age + self.keep, fresh=self.keep, keep=self.keep)


Tags = Mapping[bytes, Tag]
"""Tags by their names. One that is missing is not stored."""


@dataclass(slots=True)
class TagsOfCall:
    """The tags of a call that are known before its computation, and what its last claim has learned."""

    names: tuple[bytes, ...] = ()
    keep: float = 0.0  # seconds for which its value will be stored, as far as that is known
    noted: dict[bytes, Tag] = field(default_factory=dict)  # as they were before the computation began


@lru_cache(4096)
def name_of_tag(namespace: str, tag: str) -> bytes:
    """Return the 8 bytes by which entries name the tag. If two tags had the same, they would be invalidated
    together."""
    text = f"{len(namespace)}:{namespace}{tag}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=8).digest()


def key_of_tag(name: bytes) -> str:
    """Return the key of the tag's own entry. No other key begins so."""
    return f"#{name.hex()}"


def names_in(tags: bytes) -> Iterator[bytes]:
    """Return the names of the tags that an entry carries."""
    return (tags[at : at + 8] for at in range(0, len(tags), SIZE))


def packed(names: Iterable[bytes], noted: Tags) -> bytes:
    """Return the tags as an entry carries them. One that is not noted gets ids that no tag has."""
    return b"".join(
        [name + (tag.id + tag.hard if (tag := noted.get(name)) is not None else bytes(16)) for name in names]
    )


def judge(entry: Entry[Any], tags: Tags) -> bool | None:
    """Return whether the entry's tags are all current. If not, it is stale from now on. None: it is gone."""
    carried, current = entry.tags, True
    for at in range(0, len(carried), SIZE):
        tag = tags.get(carried[at : at + 8])
        if tag is None or tag.hard != carried[at + 16 : at + SIZE]:
            return None
        current = current and tag.id == carried[at + 8 : at + 16]
    if not current:
        entry.fresh = min(entry.fresh, 0.0)
    return current


def keep_of(ttl: float | None, stale: float) -> float:
    """Return for how long to keep the tags of a value that is stored for so long, if that is known."""
    return LASTING if ttl is None or ttl == inf else 2 * (ttl + stale)


def outlasting(tags: Tags, keep: float) -> dict[bytes, Tag]:
    """Return those of the tags that would be forgotten before an entry that is stored for `keep` seconds. They are to
    be kept for twice as long, so that this is seldom."""
    least = min(keep, EVER)
    return {name: tag.kept(2 * keep) for name, tag in tags.items() if tag.keep < least}
