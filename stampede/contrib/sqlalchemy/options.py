"""The option of a statement that says that its result comes from the cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict, Unpack

from sqlalchemy.orm.interfaces import UserDefinedOption

from stampede.settings.options import Seconds

__all__ = ["FromCache", "StatementOptions"]


class StatementOptions(TypedDict, total=False):
    """The options of a cached statement: those of a computation that runs in its caller's own thread or task."""

    ttl: Seconds
    stale: Seconds
    early: float
    jitter: float
    wait: Seconds
    tags: Iterable[str]


class FromCache(UserDefinedOption):
    """Take the statement's result from the cache: `select(User).options(FromCache(ttl=60))`.

    The options are `ttl`, `stale`, `early`, `jitter`, `wait` and `tags`, as everywhere in stampede. By default the
    result ends when a table that the statement reads is changed. `by_primary_key=True` is for statements that find
    their rows by primary key: the result then ends when one of the rows that it found is changed.

    >>> statement = select(User).where(User.name == "bob").options(FromCache(ttl="10m"))
    >>> session.scalars(statement).one().name
    'bob'
    >>> session.get(User, 1, options=[FromCache(by_primary_key=True)]).name
    'bob'
    """

    propagate_to_loaders = False

    # SQLAlchemy keeps compiled statements, and pairs their options with those of a later statement by position. Without
    # a key of this option, the same statement with it and without it would share a compiled form, and could lose
    # options such as `with_loader_criteria` in its lazy loads.
    _is_has_cache_key = True

    def _gen_cache_key(self, anon_map: Any, bindparams: Any) -> tuple[Any, ...]:
        return (FromCache,)

    def __init__(self, *, by_primary_key: bool = False, **options: Unpack[StatementOptions]) -> None:
        super().__init__()
        unknown = options.keys() - StatementOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(StatementOptions.__annotations__)
            raise TypeError(f"{type(self).__name__} has no option {min(unknown)!r}: it has {known}")
        self.by_primary_key = by_primary_key
        self.options = options
