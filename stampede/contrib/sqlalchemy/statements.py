"""Statements of the ORM whose results come from a cache, and their invalidation after a commit."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Engine, Table, event
from sqlalchemy import inspect as inspected
from sqlalchemy.engine import Result
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import ORMExecuteState, Session
from sqlalchemy.sql.selectable import SelectLabelStyle
from sqlalchemy.util import await_only, greenlet_spawn

from stampede.api.cache import Cache
from stampede.api.current import current
from stampede.api.typing import Hook
from stampede.contrib.sqlalchemy import tags
from stampede.contrib.sqlalchemy.changes import Changes
from stampede.contrib.sqlalchemy.compiled import Reads, reads_of
from stampede.contrib.sqlalchemy.keys import key_of, shape_of
from stampede.contrib.sqlalchemy.options import FromCache
from stampede.contrib.sqlalchemy.rows import APART, Rows, bring, read
from stampede.errors import KeyingError

__all__ = ["StatementCache"]

MOST_SHAPES = 10_000
"""The most statements, told by their text, of which is remembered what they read."""

_IN_THE_CALLER: dict[str, Any] = {"background": False, "patience": None, "deadline": None}
"""Options of a computation that uses its caller's session, and so must not continue without its caller."""


class StatementCache:
    """Results of ORM statements in a cache. Statements ask for it by the option `FromCache`.

    `listen` connects it with sessions. After a commit, the results that depend on the changed tables and rows are
    invalidated.

    >>> Sessions = sessionmaker(database)
    >>> statements = StatementCache(Cache(ttl=600))
    >>> statements.listen(Sessions)
    >>> with Sessions() as session:
    ...     session.scalars(select(User).options(FromCache())).first().name
    'bob'
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._reads: dict[str, Reads] = {}
        self._lazy_loads: dict[Any, FromCache] = {}  # by class and name of the relationship

    def listen(self, sessions: Any) -> None:
        """Connect the cache with these sessions: a `sessionmaker`, an `async_sessionmaker`, a `scoped_session`, a
        subclass of `Session`, or one session.

        Register hooks of your own for `do_orm_execute` before you call this. If a hook is registered later, the
        sessions that it listens to take nothing from the cache.

        >>> Sessions = sessionmaker(database)
        >>> StatementCache(Cache(ttl=600)).listen(Sessions)
        """
        asyncs = sys.modules.get("sqlalchemy.ext.asyncio")  # its import needs greenlet, which may not be installed
        if asyncs is not None and isinstance(sessions, asyncs.async_sessionmaker):  # SQLAlchemy can't listen on it
            base = sessions.kw.get("sync_session_class", Session)
            listening = type(base.__name__, (base,), {})
            sessions.configure(sync_session_class=listening)
            sessions = listening
        event.listen(sessions, "do_orm_execute", self._execute)
        event.listen(sessions, "after_begin", lambda session, _, connection: self._changes(session).begun(connection))
        event.listen(sessions, "before_flush", lambda session, *_: setattr(self._changes(session), "flushing", True))
        event.listen(sessions, "after_flush", lambda session, flush: self._changes(session).flushed(session, flush))
        event.listen(sessions, "before_commit", self._before_commit)
        event.listen(sessions, "after_transaction_end", self._after_transaction_end)

    def lazy_loads(self, *relationships: Any, option: FromCache) -> None:
        """Take these relationships from the cache when an object loads them lazily, whatever statement has found it.

        >>> statements.lazy_loads(User.team, option=FromCache(ttl="1h", by_primary_key=True))
        >>> session.get(User, 1).team.name
        'red'
        """
        for each in relationships:
            self._lazy_loads[each.property.parent.class_, each.property.key] = option

    def invalidate(self, *changed: Any, via: Hook | None = None) -> None:
        """Invalidate the results that depend on these mapped classes, or tables: after changes that no session made.

        `via=` is as for `Cache.invalidate_tags`.

        >>> statements.invalidate(User)
        """
        self.cache.invalidate_tags(*_tags_to_end(changed), via=via)

    async def ainvalidate(self, *changed: Any, via: Hook | None = None) -> None:
        """Invalidate the results that depend on these mapped classes, or tables. This is `invalidate`, awaited.

        >>> asyncio.run(statements.ainvalidate(User))
        """
        await self.cache.ainvalidate_tags(*_tags_to_end(changed), via=via)

    def key(self, session: Session, statement: Any, parameters: Any = None, *, by_primary_key: bool = False) -> str:
        """Return the key of a statement's result in the cache. The statement may have its option `FromCache`, or not.

        >>> users = select(User).options(FromCache())
        >>> session.scalars(users).first().name
        'bob'
        >>> statements.cache.invalidate(statements.key(session, users))
        True
        """
        bind = session.get_bind(clause=statement)
        if not isinstance(bind, Engine):
            raise KeyingError(f"the session is bound to {bind!r}: only statements that run on an Engine are cached")
        if not any(isinstance(each, FromCache) for each in statement._with_options):
            statement = statement.options(FromCache())  # it is a part of the statement's shape
        options = {**getattr(session, "execution_options", {}), **statement.get_execution_options()}
        facts = (*shape_of(statement, parameters), by_primary_key)
        return key_of(statement, facts, bind, self._connection_options(session, bind), options)

    # -- one statement --------------------------------------------------------------------------------------------

    def _execute(self, state: ORMExecuteState) -> Result[Any] | None:
        """Answer a statement from the cache. None: the session runs it as usual."""
        session = state.session
        if APART in session.info:
            return None
        if not state.is_select:
            if state.bind_mapper is not None:
                self._changes(session).in_bulk(state.bind_mapper)
            return None
        option = self._option_of(state)
        bind = None if option is None else session.get_bind(**state.bind_arguments)
        if option is None or not isinstance(bind, Engine) or not _may_be_cached(state):
            return None
        if any(hook != self._execute for hook in state._remaining_events()):
            return None  # later hooks would not run, and one of them may select the rows that this caller may see
        if state.execution_options.get("autoflush", True):
            session._autoflush()  # as the statement itself would do
        shape, values = shape_of(state.statement, state.parameters)
        known = self._reads.get(shape)
        reads = known or reads_of(state, bind.dialect)
        changes = self._changes(session)
        changed = changes.names()
        if reads.locks or changes.unknown or (changed and (known is None or not changed.isdisjoint(reads.tables))):
            return None  # the session sees its own changes, which other sessions must not see
        facts = (shape, values, option.by_primary_key)
        key = key_of(state.statement, facts, bind, self._connection_options(session, bind), state.execution_options)

        def compute() -> Rows:
            rows = read(state, lambda each: reads_of(each, bind.dialect).tables)
            if not changed.isdisjoint(rows[2]):
                current().dont_keep()
            current().tag(*tags.of_rows(rows, by_primary_key=option.by_primary_key))
            return rows

        options: dict[str, Any] = {**option.options, **_IN_THE_CALLER}
        before = tags.some_rows if option.by_primary_key else tags.table  # those that are known before the computation
        options["tags"] = [*options.get("tags", ()), *map(before, reads.tables)]
        if bind.dialect.is_async:
            stored = await_only(self._afetch(key, None if changes.sees_the_past else compute, options))
        elif changes.sees_the_past:
            stored = self.cache.get(key)
        else:
            stored = self.cache.get_or_compute(key, compute, **options)
        if stored is None:
            return None
        if known is None or not known.tables.issuperset(stored[2]):
            self._remember(shape, Reads(reads.tables | {*stored[2]}, locks=False))
        return bring(state, stored) if changed.isdisjoint(stored[2]) else None

    async def _afetch(self, key: str, compute: Any, options: dict[str, Any]) -> Rows | None:
        """Return the stored result, or compute it. If the caller is cancelled, end its query before that is raised: its
        session will be closed next."""
        if compute is None:
            found: Rows | None = await self.cache.aget(key)
            return found
        query: asyncio.Task[Rows] | None = None

        async def computed() -> Rows:
            nonlocal query
            query = asyncio.ensure_future(greenlet_spawn(compute))
            return await query

        try:
            return await self.cache.aget_or_compute(key, computed, **options)
        except asyncio.CancelledError:
            if query is not None and not query.done():
                query.cancel()
                await asyncio.wait([query])
            raise

    def _option_of(self, state: ORMExecuteState) -> FromCache | None:
        path: Any = state.loader_strategy_path
        if path is None or not state.is_relationship_load:
            return next((each for each in state.user_defined_options if isinstance(each, FromCache)), None)
        if not self._lazy_loads or state.lazy_loaded_from is None:
            return None
        mapper, relationship = path[-2:]
        found = (self._lazy_loads.get((each, relationship.key)) for each in mapper.class_.__mro__)
        return next((each for each in found if each is not None), None)

    def _remember(self, shape: str, reads: Reads) -> None:
        if len(self._reads) >= MOST_SHAPES:
            self._reads.clear()
        self._reads[shape] = reads

    # -- one transaction ------------------------------------------------------------------------------------------

    def _changes(self, session: Session) -> Changes:
        """Return what the session's current transaction has changed."""
        found: Changes = session.info.setdefault(self, Changes())
        return found

    def _connection_options(self, session: Session, bind: Engine) -> Mapping[str, Any]:
        """Return the execution options of the session's connection with this engine, or of the engine: they can tell
        another schema."""
        mine = (each for each in self._changes(session).connections if each.engine is bind)
        return next(mine, bind).get_execution_options()

    def _before_commit(self, session: Session) -> None:
        # This may be the commit of a savepoint only. The event does not tell: a transaction can be committed while a
        # savepoint in it is open. If the transaction is rolled back later, the invalidation does no harm.
        self._changes(session).committing = True

    def _after_transaction_end(self, session: Session, transaction: Any) -> None:
        """Invalidate after a commit, even if it has failed: the database may have made it before the connection broke.
        The session's connections are back in their pool by now, so that a slow cache does not hold them."""
        if transaction.parent is not None:
            self._changes(session).flushing = False  # the flush may have failed
            return
        changes: Changes | None = session.info.pop(self, None)
        if changes is None:
            return
        changes.ended()
        if not changes.committing or not (ended := changes.tags()):
            return
        if changes.suspending:
            await_only(self._aend_tags(ended))
        else:  # with `via`, an error is logged and not raised: it is too late to fail
            self.cache.invalidate_tags(*ended, via=lambda end: end(), on_error="later")

    async def _aend_tags(self, ended: set[str]) -> None:
        hooks: list[Any] = []
        await self.cache.ainvalidate_tags(*ended, via=hooks.append, on_error="later")
        await asyncio.shield(hooks[0]())


def _may_be_cached(state: ORMExecuteState) -> bool:
    """Return whether the statement is of a kind that can be answered from a cache."""
    options = state.execution_options
    return (
        state.is_orm_statement
        and not state.is_column_load
        and not state.is_executemany
        and state.session.is_active
        and not isinstance(state.session, ShardedSession)  # its own hook would not run
        and not any(options.get(name) for name in ("populate_existing", "yield_per", "stream_results"))
        # `session.query(...)` wants other rows than `select(...)` does.
        and getattr(state.statement, "get_label_style", lambda: None)() is not SelectLabelStyle.LABEL_STYLE_LEGACY_ORM
        and not any(map(_is_lazy_with_condition, state.statement._with_options))
    )


def _is_lazy_with_condition(option: Any) -> bool:
    """Return whether this is an option such as `lazyload(Team.members.and_(...))`. The loaded objects themselves carry
    it, and objects from a cache would load the relationship without the condition."""
    loads = getattr(option, "context", ())
    return any(each._extra_criteria and ("lazy", "select") in (each.strategy or ()) for each in loads)


def _tags_to_end(changed: tuple[Any, ...]) -> list[str]:
    tables: set[Table] = set()
    for each in changed:
        tables |= {each} if isinstance(each, Table) else tags.tables_of(inspected(each))
    return [tag for table in tables for tag in (tags.table(table.fullname), tags.some_rows(table.fullname))]
