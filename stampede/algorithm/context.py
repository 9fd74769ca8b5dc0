"""The context of a computation: what the user's function can learn about its own entry, and decide about it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from stampede.algorithm.flight import Inside, innermost
from stampede.errors import NoComputation, OptionError
from stampede.model.entry import Entry
from stampede.settings.options import checked_tags, seconds

__all__ = ["Context", "EachContext", "Inside", "NotModified", "Reason", "as_one_of_many", "running"]

Reason: TypeAlias = Literal["missing", "stale", "early", "refresh"]

LONGEST_ETAG = 1024
"""The most characters of an etag."""

_UNSET: Any = object()


class Context:
    """What a computation can learn and decide about the value that it computes. `stampede.current()` returns it.

    >>> @cached(ttl=60, stale="1d")
    ... def price(article: str) -> float:
    ...     context = stampede.current()
    ...     context.ttl = 5 if article == "oil" else 3600
    ...     return {"oil": 80.5, "tea": 3.0}[article]
    >>> price("oil"), round(price.peek("oil").ttl)
    (80.5, 5)
    """

    __slots__ = ("__weakref__", "_etag", "_modified", "_stale_for", "_ttl", "key", "kept", "reason", "stale", "tags")

    ended = True  # it is no flight

    key: str
    """The key, as events and logs show it."""

    reason: Reason
    """Why the value is computed: "missing", "stale", "early" (shortly before its end) or "refresh" (on demand)."""

    stale: Entry[Any] | None
    """The entry that is stored until now, or None. Mostly it is stale; with the reasons "early" and "refresh" it may be
    fresh. A stored exception of `raises` is not shown."""

    def __init__(self, key: str, existing: Entry[Any] | None = None, reason: Reason = "missing") -> None:
        self.key = key
        self.reason = reason
        self.stale = None if existing is None or existing.raised else existing
        self.kept = True  # False after `dont_keep`
        self.tags: tuple[str, ...] = ()  # those of `tag`
        self._etag = self._modified = self._ttl = self._stale_for = _UNSET

    def __getitem__(self, name: Any) -> Context:
        """Return the context of one key. Only a function of many keys needs this."""
        raise TypeError(f"the computation of {self.key!r} has one key: use current() without [{name!r}]")

    @property
    def etag(self) -> str | None:
        """The version of the value, as the origin names it: that of the stored value, until another one is set. It is
        stored with the value."""
        return self._etag if self._etag is not _UNSET else None if self.stale is None else self.stale.etag

    @etag.setter
    def etag(self, etag: str | None) -> None:
        if etag is not None and (not isinstance(etag, str) or len(etag) > LONGEST_ETAG):
            raise OptionError(f"etag is {etag!r:.80}: give a string of at most {LONGEST_ETAG} characters, or None")
        self._etag = etag

    @property
    def modified(self) -> datetime | None:
        """When the origin last changed the value: the moment that is stored, until another one is set. It is stored
        with the value, in UTC."""
        return self._modified if self._modified is not _UNSET else None if self.stale is None else self.stale.modified

    @modified.setter
    def modified(self, modified: datetime | None) -> None:
        if modified is not None and (not isinstance(modified, datetime) or modified.tzinfo is None):
            raise OptionError(f"modified is {modified!r}: give a datetime with a time zone, or None")
        self._modified = None if modified is None else modified.astimezone(UTC)

    @property
    def ttl(self) -> float | None:
        """Seconds for which this value is fresh, instead of the option `ttl`. None means the option's."""
        return None if self._ttl is _UNSET else self._ttl

    @ttl.setter
    def ttl(self, ttl: Any) -> None:
        self._ttl = _UNSET if ttl is None else seconds("ttl (of current())", ttl)

    @property
    def stale_for(self) -> float | None:
        """Seconds for which this value is stored beyond its ttl, instead of the option `stale`. None means the
        option's."""
        return None if self._stale_for is _UNSET else self._stale_for

    @stale_for.setter
    def stale_for(self, stale: Any) -> None:
        self._stale_for = _UNSET if stale is None else seconds("stale_for (of current())", stale)

    def tag(self, *tags: str) -> None:
        """Give the value these tags, besides those of the option `tags`: for those that only the computation knows.

        If one of them is invalidated while the value is computed, the value is not stored.

        >>> @cached(ttl=60)
        ... def basket(user: int) -> list[int]:
        ...     articles = [5, 8]
        ...     stampede.current().tag(*[f"article:{article}" for article in articles])
        ...     return articles
        >>> basket(1), basket.peek(1).value
        ([5, 8], [5, 8])
        >>> basket.cache.invalidate_tags("article:8")
        >>> basket.peek(1)
        """
        self.tags = checked_tags("current().tag()", (*self.tags, *tags))

    def dont_keep(self) -> None:
        """Give the value to the callers of this process that wait for it, and store nothing."""
        self.kept = False

    def not_modified(self) -> Any:
        """Return an object for the function to return (or to raise): the stored value is still right, and starts a new
        ttl. If nothing is stored, this raises NoComputation, so look at `stale` before.

        >>> @cached(ttl=60, stale="1d")
        ... def logo() -> bytes:
        ...     context = stampede.current()
        ...     if context.stale and context.etag == "v1":  # as the server answers 304
        ...         return context.not_modified()
        ...     context.etag = "v1"
        ...     return b"PNG"
        >>> logo(), logo.refresh(), logo.peek().etag
        (b'PNG', b'PNG', 'v1')
        """
        if self.stale is None:
            raise NoComputation(f"not_modified() was called for {self.key!r}, and nothing is stored that could be kept")
        return NotModified(self)

    def facts(self) -> tuple[str | None, datetime | None]:
        """Return the etag and the moment to store with a new value: only what its own computation has set."""
        return None if self._etag is _UNSET else self._etag, None if self._modified is _UNSET else self._modified


class EachContext:
    """The contexts of a function of many keys: `current()[id]` is that of one id, or key."""

    __slots__ = ("__weakref__", "_contexts")

    ended = True  # it is no flight

    def __init__(self, contexts: Mapping[Any, Context]) -> None:
        self._contexts = contexts

    def __getitem__(self, name: Any) -> Context:
        return self._contexts[name]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this function computes many keys: use current()[key].{name}")


class NotModified(Exception):
    """What a computation returns, or raises, if the stored value is still right."""

    def __init__(self, context: Context) -> None:
        super().__init__("the stored value is still right (return this from the cached function, or raise it)")
        self.context = context


def running() -> Context | EachContext | None:
    """Return the context of the computation that the caller is inside, or None."""
    inside = innermost()
    if inside is None or isinstance(inside, (Context, EachContext)):
        return inside
    leader = None if inside.ended else inside.leader
    return None if leader is None else leader.context_of_computation()


def as_one_of_many(name: Any) -> Inside:
    """Return a context manager around a function of many keys that computes one: `current()[name]` is its context."""
    context = running()
    return Inside(EachContext({name: context if isinstance(context, Context) else Context(repr(name))}))
